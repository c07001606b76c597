"""The images that the caches of earlier versions were made of: the same ones on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Pixels = np.ndarray[Any, Any]


def write_images(folder: Path, count: int, side: int = 32) -> list[Pixels]:
    """Write images of noise in classes a and b, and return their pixels. More images begin with the same ones."""
    rng = np.random.default_rng(5)
    return _write(folder, [rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for _ in range(count)])


def write_mosaics(folder: Path, count: int, side: int = 16) -> list[Pixels]:
    """Write images of 8x8 tiles, which take few bytes, in classes a and b, and return their pixels, as above."""
    rng = np.random.default_rng(6)
    tiles = [rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(count)]
    return _write(folder, [each.repeat(side // 8, 0).repeat(side // 8, 1) for each in tiles])


def write_deep_images(folder: Path, count: int, side: int = 16) -> list[Pixels]:
    """Write grey images of 16 bits in classes a and b, and return their pixels, as above."""
    rng = np.random.default_rng(7)
    tiles = [rng.integers(0, 1 << 16, (8, 8), dtype=np.uint16) for _ in range(count)]
    return _write(folder, [each.repeat(side // 8, 0).repeat(side // 8, 1) for each in tiles], "png")


def in_order(count: int) -> list[int]:
    """Return the numbers of the images as a cache has them: class by class."""
    return [*range(0, count, 2), *range(1, count, 2)]


def _write(folder: Path, images: list[Pixels], suffix: str = "bmp") -> list[Pixels]:
    for number, pixels in enumerate(images):
        path = folder / "ab"[number % 2] / f"{number:02d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return images
