"""Pictures that differ as photographs do, and edited copies of them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tpucache import Recipe, build_cache

Array = npt.NDArray[Any]


def picture(seed: int, side: int = 96) -> Array:
    """Return a picture of smooth random colours with a few sharp shapes: uint8 (side, side, 3)."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(0, 255, (7, 7, 3)).astype(np.uint8)
    pixels = np.array(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))
    for _ in range(6):
        top, left = rng.integers(0, side - 20, 2)
        height, width = rng.integers(8, 40, 2)
        pixels[top : top + height, left : left + width] = rng.integers(0, 256, 3)
    return pixels


def edited(pixels: Array, kind: int) -> Array:
    """Return a copy: encoded again, halved, brighter, mirrored, or with a mark, by `kind` modulo 5."""
    image = Image.fromarray(pixels)
    if kind % 5 == 0:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=20)
        return np.array(Image.open(file))
    if kind % 5 == 1:
        return np.array(image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX).resize(image.size))
    if kind % 5 == 2:
        return np.clip(pixels * 1.2, 0, 255).astype(np.uint8)
    if kind % 5 == 3:
        return np.ascontiguousarray(pixels[:, ::-1])
    marked = pixels.copy()
    marked[-10:, -24:] = 255
    return marked


def build_pictures(folder: Path, pictures: Mapping[str, Array], **recipe: Any) -> Path:
    """Write pictures into a folder, and return its cache."""
    for name, pixels in pictures.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)
    cache = folder.with_name(f"{folder.name}-cache")
    build_cache(folder, cache, Recipe(size=64, **recipe), jobs=1)
    return cache
