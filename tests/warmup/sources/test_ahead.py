"""Samples are loaded ahead where storage answers late, in their order, and nothing of it shows in what is loaded."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made import Made, build_here
from patience import PATIENCE
from thorough import thorough

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.store.ahead import Lateness
from tpucache.store.files import read_file
from tpucache.warmup.build import build_cache
from tpucache.warmup.growing import build_for_readers
from tpucache.warmup.sources import FolderSource
from tpucache.warmup.sources.source import Item, LoadAhead, Sample

SAMPLES = [Sample(number, f"{number:03d}.png", bytes=1000) for number in range(100)]


class Threaded(Made):
    loads_in_threads = True


SOURCE = Threaded(0, lambda _: Item({}))


def late(wait: float = 0.1, work: float = 0.01) -> Lateness:
    lateness = Lateness()
    lateness.waited(wait)
    lateness.worked(work)
    return lateness


def names_of(items: list[Item]) -> list[bytes]:
    return [item.fields["image"] for item in items]


def slow(*broken: int) -> Threaded:
    def item(number: int) -> Item:
        time.sleep(0.03)
        return Item({"image": np.full((8, 8, 3), number, np.uint8)})

    facts = {"classes": ("one",)}
    return Threaded(60, item, lambda _: 0, "{:03}", 3 * 8 * 8, broken, facts)


def test_samples_come_in_their_order_whichever_is_there_first() -> None:
    first = threading.Event()

    def load(sample: Sample) -> Item:
        if sample.number == 0:  # the first one comes last
            assert first.wait(PATIENCE)
        elif sample.number == 5:
            first.set()
        return Item({"image": sample.path.encode()})

    with LoadAhead(load, SOURCE, SAMPLES, late()) as items:
        assert names_of([items.load(sample) for sample in SAMPLES]) == [sample.path.encode() for sample in SAMPLES]


def test_a_fault_is_raised_at_its_own_turn() -> None:
    def load(sample: Sample) -> Item:
        if sample.number == 3:
            raise SampleError(sample.path, "is broken")
        return Item({"image": sample.path.encode()})

    with LoadAhead(load, SOURCE, SAMPLES, late()) as items:
        assert names_of([items.load(sample) for sample in SAMPLES[:3]]) == [b"000.png", b"001.png", b"002.png"]
        with pytest.raises(SampleError, match=r"003\.png"):
            items.load(SAMPLES[3])
        assert names_of([items.load(SAMPLES[4])]) == [b"004.png"]


def loading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tpucache-load")]


def test_samples_that_were_announced_for_the_next_task_are_not_read_twice() -> None:
    begun = list[int]()

    def load(sample: Sample) -> Item:
        begun.append(sample.number)
        return Item({"image": sample.path.encode()})

    with LoadAhead(load, SOURCE, SAMPLES[:20], late()) as items:
        items.load(SAMPLES[0])
        items.follow(following := [dataclasses.replace(sample) for sample in SAMPLES[1:40]])
        found = [items.load(sample) for sample in following]
    assert names_of(found) == [sample.path.encode() for sample in SAMPLES[1:40]]
    assert sorted(begun) == list(range(40))


def followed(source: Threaded, cache: Path, recipe: Recipe, jobs: int) -> None:
    build_for_readers(source, cache, lambda _: None, recipe=recipe, jobs=jobs)


@pytest.mark.parametrize("builds", [build_cache, followed])
def test_each_sample_of_slow_storage_is_read_once_while_tasks_follow_each_other(
    tmp_path: Path, builds: Callable[..., object]
) -> None:
    source = slow()
    builds(source, tmp_path / "cache", Recipe(size=128, shard_mb=1), jobs=1)
    tried = len(source.loaded) - source.count  # the samples that were read before the build
    assert tried < 5
    assert {*source.loaded[tried:]} == {*range(source.count)}
    assert not loading_threads()


def test_a_build_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="is broken"):
        build_here(slow(20), tmp_path / "cache", Recipe(size=8, max_blocks=4))
    assert not loading_threads()


@pytest.mark.parametrize("variants", [*thorough(0), 2])
def test_a_cache_is_the_same_whether_its_files_are_read_ahead_or_not(
    photos: Path, tmp_path: Path, variants: int
) -> None:
    threads = set[str]()

    class Late(FolderSource):
        def load(self, sample: Sample) -> Item:
            time.sleep(0.02)
            threads.add(threading.current_thread().name.partition("_")[0])
            return super().load(sample)

    def build(source: FolderSource, name: str) -> dict[str, bytes]:
        build_here(source, tmp_path / name, Recipe(size=8, variants=variants, augment="flip"))
        return {path.name: read_file(path) for path in (tmp_path / name).glob("*.lmdb")}

    assert build(Late(photos), "ahead") == build(FolderSource(photos), "at once")
    assert "tpucache-load" in threads
