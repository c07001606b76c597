"""open_or_build: a process builds the cache that this one reads."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import wait_for
from PIL import Image
from writing import write_picture

import tpucache
from tpucache.adopt.builder import LEAST_GROWING
from tpucache.adopt.states import at_rest
from tpucache.errors import BuildError, SampleError, SourceError, UsageError
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


def test_a_source_that_no_pipe_holds_whole_reaches_the_builder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = [(rng.integers(0, 256, (64, 64, 3), np.uint8), number % 2) for number in range(80)]  # 1 MB
    dataset = tpucache.open_or_build(pictures, tmp_path / "cache", RECIPE, jobs=1)
    assert [label for _, label in dataset] == [label for _, label in pictures]


def test_a_cache_at_a_url_is_refused(photos: Path) -> None:
    with pytest.raises(UsageError, match="folder of this machine"):
        tpucache.open_or_build(photos, "gs://bucket/cache")


def grown_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tpucache.adopt.pictures.LEAST_GROWING", 1)
    return tpucache.ImageFolder(root, size=8, jobs=1)


@pytest.mark.slow
def test_an_image_folder_is_built_while_it_is_read(
    root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, no_build: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = tpucache.ImageFolder(root, size=8, jobs=1, cache=root.parent / "whole")
    old = kept / next(kept_of(root.parent / "whole")).name / "0123"
    old.mkdir(parents=True)  # the cache of another state, which nobody reads
    dataset = grown_folder(root, monkeypatch)
    assert isinstance(dataset.to_cached().cache, GrowingCache)
    assert (dataset.samples, dataset.targets, dataset.classes) == (whole.samples, whole.targets, whole.classes)
    same = tpucache.CachedLoader(whole, 4, shuffle=True)
    for (images, labels), (others, known) in zip(tpucache.CachedLoader(dataset, 4, shuffle=True), same, strict=True):
        assert np.array_equal(images, others)
        assert np.array_equal(labels, known)
    assert np.array_equal(dataset[-1][0], whole[-1][0])
    assert "decoding and resizing its pictures once" in capfd.readouterr().err
    dataset.to_cached().cache.wait()
    wait_for(lambda: not (dataset.directory / WORK_NAME).exists() and not old.exists())
    assert files(dataset.directory) == files(whole.directory)
    no_build()
    found = grown_folder(root, monkeypatch)
    assert not isinstance(found.to_cached().cache, GrowingCache)
    assert found.directory == dataset.directory


def kept_of(folder: Path) -> Any:
    return (folder / "datasets").iterdir()


@pytest.mark.slow
def test_of_an_image_folder_that_changes_meanwhile_nothing_is_kept(
    root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed_late(*arguments: Any, **options: Any) -> Any:
        folder = at_rest(*arguments, **options)
        write_picture(root / "9" / "new.png", 9)
        return folder

    monkeypatch.setattr("tpucache.adopt.pictures.at_rest", listed_late)
    dataset = grown_folder(root, monkeypatch)
    with pytest.raises(SourceError, match="pictures of photos were changed while its cache was made"):
        dataset.to_cached().cache.wait()
    assert not dataset.directory.exists()


def large_folder(folder: Path) -> Path:
    """Return a folder with enough pictures that workers start before they are listed."""
    picture = write_picture(folder / "ant" / "0.png")
    for number in range(LEAST_GROWING):
        os.link(picture, picture.with_name(f"{number + 1}.png"))
    return folder


@pytest.mark.slow
def test_a_builder_whose_build_is_refused_ends_with_its_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SampleError, match="no number"):
        tpucache.open_or_build(large_folder(tmp_path / "photos"), tmp_path / "cache", RECIPE, jobs=2, labels="numbers")
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_a_builder_whose_worker_is_killed_is_an_error_and_the_next_one_continues(tmp_path: Path) -> None:
    photos, cache = large_folder(tmp_path / "photos"), tmp_path / "cache"
    tpucache.build_cache(photos, tmp_path / "expected", RECIPE, jobs=1)
    dataset = tpucache.open_or_build(photos, cache, RECIPE, jobs=2)
    opened: Any = dataset.cache
    builder = opened._arrivals._builder._process.pid
    workers = Path(f"/proc/{builder}/task/{builder}/children").read_text().split()
    if workers:  # otherwise it was faster
        assert len(workers) == 2
        os.kill(int(workers[0]), signal.SIGKILL)
        with contextlib.suppress(BuildError):  # it may have been done
            opened.wait()
    del dataset, opened
    gc.collect()
    tpucache.open_or_build(photos, cache, RECIPE, jobs=2).cache.wait()
    wait_for(lambda: not (cache / WORK_NAME).exists())
    assert files(cache) == files(tmp_path / "expected")
