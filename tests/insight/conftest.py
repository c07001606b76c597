"""Caches lie on the disk here, and pictures have something to recognise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from disk import disk, tmp_path, tmp_path_factory
from photographs import edited, picture
from PIL import Image

from tpucache.recipe import Recipe
from tpucache.warmup import build_cache

__all__ = ["disk", "tmp_path", "tmp_path_factory"]


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of 24 pictures in two classes: number n + 12 is an edited copy of number n, for n < 6. Not written to."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(24):
        pixels = picture(number) if not 12 <= number < 18 else edited(picture(number - 12), number)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    labels = "\n".join(f"{number:02d}.png,{('ant', 'bee')[number % 2]},p{number % 8}" for number in range(24))
    (folder / "table.csv").write_text(f"path,label,patient\n{labels}\n")
    build_cache(folder / "table.csv", folder / "cache", Recipe(size=64), jobs=1)
    return folder / "cache"


@pytest.fixture
def noise() -> np.random.Generator:
    """Random numbers, the same in each test."""
    return np.random.default_rng(3)
