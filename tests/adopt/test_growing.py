"""open_or_build: a process builds the cache that this one reads."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import wait_for
from PIL import Image

import tpucache
from tpucache.errors import BuildError, SampleError, UsageError
from tpucache.recipe import Recipe
from tpucache.store.format import WORK_NAME
from tpucache.store.growing import GrowingCache
from tpucache.store.verify import verify_cache

RECIPE = Recipe(size=16)


def files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir())}


@pytest.mark.slow
def test_a_builder_that_is_killed_is_an_error_and_the_next_call_ends_in_the_cache_of_warmup(
    photos: Path, tmp_path: Path
) -> None:
    expected, cache = tmp_path / "expected", tmp_path / "cache"
    tpucache.build_cache(photos, expected, RECIPE, jobs=1)
    dataset = tpucache.open_or_build(photos, cache, RECIPE, jobs=1)
    opened: Any = dataset.cache
    assert isinstance(opened, GrowingCache)
    process = opened._arrivals._builder._process  # type: ignore[union-attr]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if not (cache / "manifest.json").exists():  # it may have been faster
        with pytest.raises(BuildError, match="run this again"):
            opened.wait()
    del dataset, opened
    gc.collect()
    loader = tpucache.CachedLoader(tpucache.open_or_build(photos, cache, RECIPE, jobs=1), 16, shuffle=True)
    same = tpucache.CachedLoader(tpucache.CachedDataset(expected), 16, shuffle=True)
    for (images, labels), (others, known) in zip(loader, same, strict=True):
        assert np.array_equal(images, others)
        assert np.array_equal(labels, known)
    assert loader.state_dict() == same.state_dict()
    wait_for(lambda: not (cache / WORK_NAME).exists())
    assert files(cache) == files(expected)
    assert not verify_cache(cache)
    assert not isinstance(tpucache.open_or_build(photos, cache, RECIPE, jobs=1).cache, GrowingCache)  # it is found


@pytest.mark.slow
def test_the_builder_ends_with_its_reader_and_says_what_it_failed_with(tmp_path: Path) -> None:
    for number in range(3):
        path = tmp_path / "photos" / "ant" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no picture")
        if number < 2:
            Image.fromarray(np.full((18, 20, 3), number, np.uint8)).save(path)
    dataset = tpucache.open_or_build(tmp_path / "photos", tmp_path / "cache", RECIPE, jobs=1)
    opened: Any = dataset.cache
    process = opened._arrivals._builder._process
    with pytest.raises(SampleError, match=r"2\.png"):
        dataset[2]
    with pytest.raises(SampleError, match=r"2\.png"):
        dataset.digest  # noqa: B018  # it is a property that waits
    assert process.poll() is not None
    del dataset, opened
    gc.collect()


def test_a_cache_at_a_url_is_refused(photos: Path) -> None:
    with pytest.raises(UsageError, match="folder of this machine"):
        tpucache.open_or_build(photos, "gs://bucket/cache")
