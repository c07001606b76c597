"""HEIC files that pillow-heif writes are read like any other."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from made import build_here
from PIL import Image

from tpucache import CachedDataset, CachedLoader
from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.records import pillow
from tpucache.warmup.records.presize import presize

pillow_heif = pytest.importorskip("pillow_heif")


@pytest.fixture(scope="module")
def photograph() -> bytes:
    x, y = np.meshgrid(np.linspace(0, 255, 64), np.linspace(0, 255, 48))
    target = io.BytesIO()
    image = Image.fromarray(np.stack([x, y, 255 - x], 2).astype(np.uint8))
    pillow_heif.from_pillow(image).save(target, quality=95)
    return target.getvalue()


def test_a_photograph_is_what_was_written(photograph: bytes) -> None:
    assert pillow.is_heif(photograph)
    pixels = presize(photograph, Recipe(size=(48, 64)), "a.heic").astype(int)
    x, y = np.meshgrid(np.linspace(0, 255, 64), np.linspace(0, 255, 48))
    assert np.abs(pixels - np.stack([x, y, 255 - x], 2)).mean() < 4


def test_a_file_cut_anywhere_is_refused(photograph: bytes) -> None:
    for cut in (12, 40, 200, len(photograph) // 2, len(photograph) - 1):
        with pytest.raises(SampleError):
            presize(photograph[:cut], Recipe(size=8), "a.heic")


def test_a_folder_of_photographs_becomes_a_cache(photograph: bytes, tmp_path: Path) -> None:
    for name in ("cat/1.heic", "dog/2.HEIF"):
        (tmp_path / "source" / name).parent.mkdir(parents=True)
        (tmp_path / "source" / name).write_bytes(photograph)
    assert build_here(tmp_path / "source", tmp_path / "cache").classes == ("cat", "dog")
    ((images, labels),) = CachedLoader(CachedDataset(tmp_path / "cache"), 2)
    assert labels.tolist() == [0, 1]
    assert images[0].equal(images[1])


def test_without_pillow_heif_the_package_is_named(photograph: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(SampleError, match="is a HEIC file: `pip install pillow-heif`"):
        presize(photograph, Recipe(size=8), "a.heic")
