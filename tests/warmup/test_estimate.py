"""The estimate: what LMDB will take, what a run needs to work in, and a refusal that leaves nothing behind."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from made import Made, build_here, digests
from stops import Stopped
from thorough import thorough

from tpucache.errors import BuildError
from tpucache.recipe import Recipe
from tpucache.store.writer import ShardWriter
from tpucache.warmup.estimate import Estimate
from tpucache.warmup.sources.source import Item


def arrays(samples: int, nbytes: int) -> Made:
    return Made(samples, lambda at: Item({"tokens": np.full(nbytes, at % 251, np.uint8)}))


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    real = shutil.disk_usage

    def say(megabytes: int) -> None:
        def usage(path: Any) -> Disk:
            real(path)
            return Disk(10**12, 0, megabytes * 1_000_000)

        monkeypatch.setattr("shutil.disk_usage", usage)

    return say


# Just under, at and over what a leaf page holds one, two or five of, and what fills pages of its own.
@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [8, *thorough(768), 2021, 2022, *thorough(2023, 3072, 4079), 4080, 4081, *thorough(4096, 12_288, 49_152)]
)
def test_the_estimate_is_what_lmdb_takes(size: int, tmp_path: Path) -> None:
    reports: list[Estimate] = []
    manifest = build_here(arrays(400, size), tmp_path / "cache", announce=reports.append)
    taken = sum(entry.bytes for entry in manifest.shards)
    pages = 4 * 4096 * len(manifest.shards)  # of a file's own
    assert taken - pages - 0.02 * taken <= reports[0].bytes <= 1.02 * taken


@pytest.mark.slow
def test_a_small_cache_is_not_refused_for_room_that_it_does_not_need(
    tmp_path: Path, free: Callable[[int], None]
) -> None:
    free(40)
    build_here(arrays(2000, 10_000), tmp_path / "cache", announce=lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [70, 600])
def test_no_run_needs_more_room_than_was_estimated(
    samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, reports, used = tmp_path / "cache", list[Estimate](), list[int]()
    real = ShardWriter.finish

    def finish(writer: Any) -> Any:
        finished = real(writer)
        used.append(sum(path.stat().st_blocks * 512 for path in cache.rglob("*")))
        return finished

    monkeypatch.setattr(ShardWriter, "finish", finish)
    build_here(arrays(samples, 10_000), cache, announce=reports.append)
    assert max(used) <= reports[0].bytes + reports[0].spooled


@pytest.mark.slow
def test_a_refusal_leaves_nothing_behind_so_that_its_advice_can_be_followed(
    tmp_path: Path, free: Callable[[int], None]
) -> None:
    cache = tmp_path / "new" / "cache"
    free(10)
    with pytest.raises(BuildError, match=r"24\.\d MB for shards and \d+\.\d MB for tables .* and 10\.0 MB are free"):
        build_here(arrays(2000, 10_000), cache, announce=lambda _: None)
    assert not (tmp_path / "new").exists()
    free(100)
    build_here(arrays(2000, 10_000), cache, Recipe(size=9), announce=lambda _: None)


def test_a_refused_addition_leaves_the_cache_as_it_was(tmp_path: Path, free: Callable[[int], None]) -> None:
    cache = tmp_path / "cache"
    build_here(arrays(100, 10_000), cache)
    before = digests(tmp_path)
    free(10)
    with pytest.raises(BuildError, match="make room, or add fewer variants or samples"):
        build_here(arrays(2000, 10_000), cache, announce=lambda _: None)
    assert digests(tmp_path) == before


@pytest.mark.slow
def test_what_is_built_already_still_has_to_be_sealed(tmp_path: Path, free: Callable[[int], None]) -> None:
    cache, reports = tmp_path / "cache", list[Estimate]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "finish", stop)
        with pytest.raises(Stopped):
            build_here(arrays(2000, 10_000), cache)
    free(10)
    with pytest.raises(BuildError, match=r"needs about 24.*run the same command again; finished work is kept"):
        build_here(arrays(2000, 10_000), cache, announce=reports.append)
    assert reports[0].records < 2000
    free(40)
    build_here(arrays(2000, 10_000), cache, announce=reports.append)
    assert dataclasses.replace(reports[1], free=0, process_seconds=0) == dataclasses.replace(
        reports[0], free=0, process_seconds=0
    )


def stop(*_: object) -> None:
    raise Stopped
