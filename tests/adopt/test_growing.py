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
from writing import write_picture

import tpucache
from tpucache.adopt.builder import LEAST_GROWING
from tpucache.adopt.picture_folder import list_at_rest
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


def test_a_cache_at_a_url_is_refused(photos: Path) -> None:
    with pytest.raises(UsageError, match="folder of this machine"):
        tpucache.open_or_build(photos, "gs://bucket/cache")


def grown_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tpucache.adopt.image_folder.LEAST_GROWING", 1)
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
        folder = list_at_rest(*arguments, **options)
        write_picture(root / "9" / "new.png", 9)
        return folder

    monkeypatch.setattr("tpucache.adopt.image_folder.list_at_rest", listed_late)
    dataset = grown_folder(root, monkeypatch)
    with pytest.raises(SourceError, match=r"was changed while its cache was made: 1 new: '9/new.png'"):
        dataset.to_cached().cache.wait()
    assert not dataset.directory.exists()


FORKED = """
import sys
from torch.utils.data import DataLoader
from tpucache import Recipe, open_or_build

if __name__ == "__main__":
    dataset = open_or_build(sys.argv[1], sys.argv[2], Recipe(size=8), jobs=1)
    print(dataset.cache.is_growing)
    for _ in range(2):
        for images, labels in DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork"):
            print(images.sum((1, 2, 3)).tolist(), labels.tolist())
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_forked_workers_of_a_dataloader_read_what_is_built_meanwhile(
    root: Path, tmp_path: Path, run_forking: Any
) -> None:
    (growing, *lines), (finished, *expected) = (
        run_forking(FORKED, root, tmp_path / "cache").splitlines() for _ in range(2)
    )
    assert (growing, finished) == ("True", "False")
    assert lines == expected


#: The workers of the builder have started as soon as its main thread waits for them, and no sooner.
SLOW_START = """
import pathlib, sys, threading, time
import joblib

def start(self, tasks):
    while "_wait_for" not in names(sys._current_frames()[threading.main_thread().ident]):
        time.sleep(0.01)
    pathlib.Path({started!r}).touch()

def names(frame):
    while frame:
        yield frame.f_code.co_name
        frame = frame.f_back

joblib.Parallel.__call__ = start
"""


@pytest.mark.slow
def test_a_builder_whose_build_is_refused_ends_when_its_workers_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START.format(started=str(tmp_path / "started")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    picture = write_picture(tmp_path / "photos" / "ant" / "0.png")
    for number in range(LEAST_GROWING):
        os.link(picture, picture.with_name(f"{number + 1}.png"))
    with pytest.raises(SampleError, match="no number"):
        tpucache.open_or_build(tmp_path / "photos", tmp_path / "cache", RECIPE, jobs=2, labels="numbers")
    assert (tmp_path / "started").exists()  # ended before that, they would leave their shared memory behind
