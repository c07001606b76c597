"""Pictures in files, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_picture(path: Path, number: int = 0, mode: str = "RGB") -> Path:
    """Write a picture of 12x10 pixels without loss, another one for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (10, 12, 4), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, "bmp" if path.suffix == ".bmp" else "png")
    return path
