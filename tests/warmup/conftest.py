"""Synthetic photographs, folders of them, and what tests compare caches by."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from disk import disk
from joblib.externals.loky import get_reusable_executor
from made import build_here, write_photos
from once import once
from patience import PATIENCE

from tpucache import Recipe
from tpucache.warmup.plan import resolve

__all__ = ["disk"]


@pytest.fixture(scope="session")
def image() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, (24, 24, 3), np.uint8)


@pytest.fixture(scope="session", autouse=True)
def no_haste() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpucache.warmup.listing._COMPARE_SECONDS", PATIENCE)
        yield


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "train", lambda folder: write_photos(folder, 150))


@pytest.fixture(scope="session")
def cache(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(folder: Path) -> None:
        build_here(photos, folder / "cache", Recipe(size=16, variants=3))

    return once(tmp_path_factory, "of train", build) / "cache"


@pytest.fixture
def jitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "jitter_by_test.py").write_text(
        "import numpy as np\n"
        "def jitter(image, generator):\n"
        "    noise = generator.integers(-9, 10, image.shape)\n"
        "    return np.clip(image + noise, 0, 255).astype(np.uint8)\n"
    )
    monkeypatch.syspath_prepend(modules)
    monkeypatch.delitem(sys.modules, "jitter_by_test", raising=False)  # another test's, from another folder
    get_reusable_executor().shutdown(wait=True)  # an earlier test's workers do not know this folder
    return "jitter_by_test:jitter"


@pytest.fixture(scope="session")
def albumentations() -> Any:
    """Import albumentations the way tpucache does, so that it asks nobody for a newer version."""
    resolve("flip", 8, 8)
    return importlib.import_module("albumentations")


@pytest.fixture
def two_flips(albumentations: Any, tmp_path: Path) -> Path:
    pipeline = albumentations.Compose([albumentations.HorizontalFlip(p=0.5), albumentations.VerticalFlip(p=0.5)])
    path = tmp_path / "flips.json"
    path.write_text(json.dumps(albumentations.to_dict(pipeline)))
    return path


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    return write
