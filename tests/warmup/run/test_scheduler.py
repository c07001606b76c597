"""Small blocks are built whole, others by chunks, and it does not show in what is built."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from thorough import thorough

from tpucache.errors import UnfinishedError
from tpucache.progress import BuildProgress
from tpucache.recipe import Recipe
from tpucache.store.format import WORK_NAME
from tpucache.warmup.blocks import Chunk
from tpucache.warmup.build import build_cache
from tpucache.warmup.run import scheduler, tasks
from tpucache.warmup.run.executors import Executor

Digests = Callable[[Path], dict[str, str]]

_RECIPE = Recipe(size=16)  # of 150 photographs: three blocks


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The block of each chunk that this process saves."""
    saved, save = list[int](), tasks.save_chunk
    monkeypatch.setattr(tasks, "save_chunk", lambda *parts: (saved.append(parts[1]), save(*parts)))
    return saved


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [*thorough(1), 2])
def test_blocks_built_whole_are_the_same_as_blocks_of_chunks(
    photos: Path, tmp_path: Path, digests: Digests, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    reports: list[BuildProgress] = []
    build_cache(photos, tmp_path / "whole", _RECIPE, jobs=jobs, on_progress=reports.append)
    assert [(reports[-1].samples, reports[-1].bytes)] == [(150, 150 * 16 * 16 * 3)]
    monkeypatch.setattr(scheduler, "SMALL_BYTES", 0)
    build_cache(photos, tmp_path / "chunks", _RECIPE, jobs=jobs)
    assert digests(tmp_path / "whole") == digests(tmp_path / "chunks")


def test_one_worker_builds_every_small_block_whole(photos: Path, tmp_path: Path, saved: list[int]) -> None:
    build_cache(photos, tmp_path / "cache", _RECIPE, jobs=1)
    assert saved == []
    build_cache(photos, tmp_path / "cache", Recipe(size=16, variants=1), jobs=1)
    assert set(saved) == {0, 1, 2}  # a variant takes longer, so less of it must be lost at a time


def test_the_cores_of_a_container_are_those_that_share_small_blocks(
    photos: Path, tmp_path: Path, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")  # as a container's limit, which os.cpu_count does not see
    build_cache(photos, tmp_path / "cache", _RECIPE)
    assert saved == []


def test_a_large_block_is_shared_by_chunks(
    photos: Path, tmp_path: Path, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SMALL_BYTES", 4000)  # less than any block has
    build_cache(photos, tmp_path / "cache", _RECIPE, jobs=1)
    assert set(saved) == {0, 1, 2}


def test_what_a_time_limit_leaves_of_a_small_block_is_continued(
    photos: Path, tmp_path: Path, digests: Digests, monkeypatch: pytest.MonkeyPatch, saved: list[int]
) -> None:
    now, made = time.time(), list[int]()
    add = tasks.ShardWriter.append

    def append(*arguments: object) -> None:
        made.append(1)
        add(*arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(tasks.ShardWriter, "append", append)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + len(made))
        with pytest.raises(UnfinishedError, match=r"(6[0-9]|70) of 150 samples are finished"):
            build_cache(photos, tmp_path / "cache", _RECIPE, jobs=1, time_limit=75)
    assert set(saved) == {1}
    assert len(list((tmp_path / "cache" / WORK_NAME).glob("shard-*.npz"))) == 1
    build_cache(photos, tmp_path / "cache", _RECIPE, jobs=1)
    build_cache(photos, tmp_path / "whole", _RECIPE, jobs=1)
    assert digests(tmp_path / "cache") == digests(tmp_path / "whole")


def test_a_chunk_whose_result_comes_after_its_shards_is_counted_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Executor.run

    def late(self: Executor, tasks: Any, **options: Any) -> Iterator[Any]:
        held = None
        for results in run(self, tasks, **options):
            if isinstance(results[0][0], Chunk) and held is None:
                held = results
                continue
            yield results
        assert held is not None
        yield held

    monkeypatch.setattr(Executor, "run", late)
    monkeypatch.setattr(scheduler, "SMALL_BYTES", 0)
    reports: list[BuildProgress] = []
    build_cache(photos, tmp_path / "cache", _RECIPE, jobs=1, on_progress=reports.append)
    assert [each.samples for each in reports] == sorted(each.samples for each in reports)
    assert reports[-1].samples == 150
