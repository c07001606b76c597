"""open_or_build and ImageFolder: a process builds the cache that this one reads."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE, wait_for
from writing import BUILDS, changing, large_folder, write_picture

import tpucache
from tpucache.errors import BuildError, SampleError, SourceError, UsageError
from tpucache.recipe import Recipe
from tpucache.store.format import WORK_NAME
from tpucache.store.growing import GrowingCache
from tpucache.store.verify import verify_cache

RECIPE = Recipe(size=16)


def files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir())}


def check_batches(dataset: Any, expected: Any) -> None:
    loader, other = (tpucache.CachedLoader(each, 16, shuffle=True) for each in (dataset, expected))
    for one, two in zip(loader, other, strict=True):
        assert all(map(np.array_equal, one, two))
    assert loader.state_dict() == other.state_dict()


def children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def builders() -> list[int]:
    return [each for each in children(os.getpid()) if b"warmup.growing" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["builder", "worker"])
def test_a_build_that_is_killed_is_an_error_and_the_next_call_ends_in_the_cache_of_warmup(
    victim: str, tmp_path: Path
) -> None:
    photos, expected, cache = large_folder(tmp_path / "photos"), tmp_path / "expected", tmp_path / "cache"
    tpucache.build_cache(photos, expected, RECIPE, jobs=1)
    dataset = tpucache.open_or_build(photos, cache, RECIPE, jobs=2)
    for each in [each for builder in builders() for each in ([builder] if victim == "builder" else children(builder))]:
        with contextlib.suppress(ProcessLookupError):  # it may end because another was killed
            os.kill(each, signal.SIGKILL)
    with contextlib.suppress(BuildError):  # it may have been done
        dataset.digest  # noqa: B018  # it is a property that waits
    del dataset
    gc.collect()
    check_batches(tpucache.open_or_build(photos, cache, RECIPE, jobs=2), tpucache.CachedDataset(expected))
    wait_for(lambda: not (cache / WORK_NAME).exists())
    assert files(cache) == files(expected)
    assert not verify_cache(cache)
    assert not isinstance(tpucache.open_or_build(photos, cache, RECIPE, jobs=1).cache, GrowingCache)  # it is found


@pytest.mark.slow
def test_the_builder_says_what_it_failed_with_and_ends(tmp_path: Path) -> None:
    for number in range(2):
        write_picture(tmp_path / "photos" / "ant" / f"{number}.png")
    (tmp_path / "photos" / "ant" / "2.png").write_bytes(b"no picture")
    dataset = tpucache.open_or_build(tmp_path / "photos", tmp_path / "cache", RECIPE, jobs=1)
    with pytest.raises(SampleError, match=r"2\.png"):
        dataset[2]
    with pytest.raises(SampleError, match=r"2\.png"):
        dataset.digest  # noqa: B018  # it is a property that waits
    assert not builders()


def test_a_source_that_no_pipe_holds_whole_reaches_the_builder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = [(rng.integers(0, 256, (64, 64, 3), np.uint8), number % 2) for number in range(80)]  # 1 MB
    dataset = tpucache.open_or_build(pictures, tmp_path / "cache", RECIPE, jobs=1)
    assert [label for _, label in dataset] == [label for _, label in pictures]


def test_a_cache_at_a_url_is_refused_without_its_secrets(photos: Path) -> None:
    for call in tpucache.open_or_build, tpucache.ImageFolder:
        with pytest.raises(UsageError, match="is a URL") as raised:
            call(photos, cache="https://ann:secret@host/cache?sig=secret")  # type: ignore[operator]
        assert "secret" not in str(raised.value)
    with pytest.raises(UsageError, match="is a URL"):
        tpucache.from_hf("https://ann:secret@host/data")


@pytest.mark.slow
def test_an_image_folder_is_built_while_it_is_read(tmp_path: Path, kept: Path, capfd: Any) -> None:
    root = large_folder(tmp_path / "photos")
    whole = tpucache.ImageFolder(root, size=8, jobs=1, cache=tmp_path / "whole", on_error="skip")
    old = kept / whole.directory.parent.name / "0123"
    old.mkdir(parents=True)  # the cache of another state, which nobody reads
    dataset = tpucache.ImageFolder(root, size=8, jobs=1)
    assert isinstance(dataset.to_cached().cache, GrowingCache)
    assert (dataset.samples, dataset.targets, dataset.classes) == (whole.samples, whole.targets, whole.classes)
    check_batches(dataset, whole)
    assert np.array_equal(dataset[-1][0], whole[-1][0])
    dataset.to_cached().cache.wait()
    wait_for(lambda: not (dataset.directory / WORK_NAME).exists() and not old.exists())
    assert {*files(dataset.directory)} == {*files(whole.directory)}
    assert capfd.readouterr().err.count(BUILDS) == 2
    found = tpucache.ImageFolder(root, size=8, jobs=1)
    assert (type(found.to_cached().cache), found.directory) == (type(whole.to_cached().cache), dataset.directory)
    assert BUILDS not in capfd.readouterr().err


@pytest.mark.slow
def test_of_an_image_folder_that_changes_meanwhile_nothing_is_kept(tmp_path: Path) -> None:
    root = large_folder(tmp_path / "photos")
    with changing([root / "ant" / "0.png"]):
        dataset = tpucache.ImageFolder(root, size=8, jobs=1)
        with pytest.raises(SourceError, match="pictures of photos were changed while its cache was made"):
            dataset.to_cached().cache.wait()
    assert not dataset.directory.exists()


@pytest.mark.slow
def test_a_builder_whose_build_is_refused_ends_with_its_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SourceError, match="no number"):
        tpucache.open_or_build(large_folder(tmp_path / "photos"), tmp_path / "cache", RECIPE, jobs=2, labels="numbers")
    assert not capfd.readouterr().err
    assert not builders()


def test_modules_in_the_working_folder_are_not_the_builders(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('not the random that was meant')")
    monkeypatch.chdir(tmp_path)
    assert len(tpucache.open_or_build(photos, tmp_path / "cache", RECIPE, jobs=1)) == 150


def test_a_builder_whose_reader_ends_at_once_prints_nothing() -> None:
    from tpucache.warmup.growing import COMMAND

    words = [sys.executable, "-P", "-c", COMMAND, *sys.path]
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")
