"""A folder of every bad and odd input, warmed up whole: what is good is cached, the rest reported, nothing breaks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hostile import make_hostile
from made import build_here, digests
from patience import PATIENCE

from tpucache import CachedDataset, Manifest, Recipe, SampleError, verify_cache
from tpucache.warmup.records.presize import presize
from tpucache.warmup.sources import FolderSource
from tpucache.warmup.sources.source import Listing

pytestmark = pytest.mark.slow

_MUTANTS = 150
_SIZE = 32
_RECIPE = Recipe(size=_SIZE)
_MOST_MEMORY = 2 << 30

# A small process between, so that the memory of the tests' own process counts for nothing.
_MEASURED = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "photos"
    make_hostile(folder, _MUTANTS)
    return folder


@pytest.fixture(scope="module")
def listing(hostile: Path) -> Listing:
    return FolderSource(hostile).list()


@pytest.fixture(scope="module")
def warmed(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    cache = tmp_path_factory.mktemp("warmed") / "cache"
    return cache, _warm_up(hostile, cache, jobs=1)


def _warm_up(source: Path, cache: Path, jobs: int) -> int:
    warmup = [sys.executable, "-m", "tpucache", "warmup", str(source), str(cache)]
    options = ["--size", str(_SIZE), "--jobs", str(jobs), "--on-error", "skip"]
    command = [sys.executable, "-c", _MEASURED, *warmup, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors.decode(errors="replace")
    return int(output.split()[-1]) << 10


def _kind(path: str) -> str:
    return path.partition("/")[0]


def test_every_sample_found_is_cached_or_skipped_with_a_reason(listing: Listing, warmed: tuple[Path, int]) -> None:
    manifest = Manifest.load(warmed[0])
    cached = CachedDataset(warmed[0]).paths
    skipped = [skip.path for skip in manifest.skipped]
    assert len(cached) + len(skipped) == len(listing.samples)
    assert {*cached, *skipped} == {sample.path for sample in listing.samples}
    assert all(skip.reason.strip() for skip in manifest.skipped)
    assert [listing.samples[skip.number].path for skip in manifest.skipped] == skipped


def test_what_is_fine_is_cached_and_what_is_broken_is_not(listing: Listing, warmed: tuple[Path, int]) -> None:
    skipped = {skip.path: skip.reason for skip in Manifest.load(warmed[0]).skipped}
    assert {path: reason for path, reason in skipped.items() if _kind(path) in ("fine", "names")} == {}
    broken = {sample.path for sample in listing.samples if _kind(sample.path) == "broken"}
    assert broken - skipped.keys() == set()
    mutants = [sample.path in skipped for sample in listing.samples if _kind(sample.path) == "mutants"]
    assert len(mutants) == _MUTANTS
    assert 0.1 < sum(mutants) / _MUTANTS < 0.9  # else they say little


def test_the_cache_is_whole(warmed: tuple[Path, int]) -> None:
    assert verify_cache(warmed[0]) == []


@pytest.mark.thorough
def test_every_record_is_what_presize_gives(hostile: Path, warmed: tuple[Path, int]) -> None:
    dataset = CachedDataset(warmed[0])
    for position, path in enumerate(dataset.paths):
        image = dataset[position][0].permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(image, presize((hostile / path).read_bytes(), _RECIPE, path), path)


def test_no_process_takes_much_memory(warmed: tuple[Path, int]) -> None:
    assert warmed[1] < _MOST_MEMORY


@pytest.mark.thorough
def test_another_warmup_gives_the_same(hostile: Path, warmed: tuple[Path, int], tmp_path: Path) -> None:
    before = digests(warmed[0])
    _warm_up(hostile, warmed[0], jobs=1)
    assert digests(warmed[0]) == before
    _warm_up(hostile, tmp_path / "cache", jobs=2)
    assert digests(tmp_path / "cache") == before


def test_a_warmup_that_skips_nothing_names_the_sample_it_fails_at(
    hostile: Path, listing: Listing, tmp_path: Path
) -> None:
    with pytest.raises(SampleError) as caught:
        build_here(hostile, tmp_path / "cache", _RECIPE)
    assert caught.value.path in {sample.path for sample in listing.samples}
    assert caught.value.path in str(caught.value)
    assert not (tmp_path / "cache" / "manifest.json").exists()
