"""Caches lie on the disk here."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disk import DiskFolders, cache, tmp_path, tmp_path_factory
from PIL import Image

from tpucache import Recipe, build_cache

__all__ = ["cache", "tmp_path", "tmp_path_factory"]


@pytest.fixture
def copy(cache: Path, tmp_path: Path) -> Path:
    """A cache of the test's own."""
    return Path(shutil.copytree(cache, tmp_path / "copy"))


@pytest.fixture(scope="session")
def cache_of(tmp_path_factory: DiskFolders) -> Callable[[str], Path]:
    """The function `cache_of(codec)`: a cache of 22 smooth pictures of two classes, 16 high and 24 wide."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(5)
    for number in range(22):
        path = folder / "photos" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grid = Image.fromarray(rng.integers(60, 196, (3, 4, 3), np.uint8))
        grid.resize((24, 16), Image.Resampling.BICUBIC).save(path)

    @functools.cache
    def build(codec: str) -> Path:
        build_cache(folder / "photos", folder / codec, Recipe(size=(16, 24), codec=codec), jobs=1)
        return folder / codec

    return build
