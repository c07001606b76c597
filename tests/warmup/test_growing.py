"""A cache that is read while it is built: the same bytes and batches, in whatever order, whoever ends in between."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made import build_here, digests
from patience import PATIENCE, wait_for
from thorough import thorough

from tpucache.errors import BuildError, NoRoomError, RecipeError, SampleError, SourceError, StoreError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.recipe import Recipe
from tpucache.store import growing as reading
from tpucache.store.ahead import Lateness
from tpucache.store.format import WORK_NAME
from tpucache.store.growing import GrowingCache, Prospect
from tpucache.warmup.build_options import BuildOptions
from tpucache.warmup.growing import build_for_readers
from tpucache.warmup.plan import plan_build
from tpucache.warmup.run import scheduler
from tpucache.warmup.run.folder import disk_failure
from tpucache.warmup.sources.source import Item, Listing, Sample
from tpucache.warmup.versions import delete_samples

SAMPLES = 130  # three blocks
SIZE = 16
RECORD = SIZE * SIZE * 3  # bytes
RECIPE = Recipe(size=SIZE)
PLANNED = [0, 0]  # what is loaded to plan a build: the first sample says what all are like


@dataclass
class Gated:
    first: int = SAMPLES  # samples that are to be had before the gate is open
    most: int = 0  # and so many others
    gate: threading.Event = field(default_factory=threading.Event)
    labelled: bool = True
    seed: int = 0
    change: Callable[[list[Sample]], list[Sample]] = lambda samples: samples
    room: int = SAMPLES  # the disk is full at the sample with this number, once
    loaded: list[int] = field(default_factory=list)
    ended: bool = False

    def list(self) -> Listing:
        samples = [Sample(at, f"{at:03}.png", at % 3 if self.labelled else None) for at in range(SAMPLES)]
        samples = self.change(samples)
        return Listing(samples, classes=("ant", "bee", "cat"), columns={"fold": np.arange(len(samples)) % 4})

    def load(self, sample: Sample) -> Item:
        if sample.path.startswith("bad"):
            raise SampleError(sample.path, "is broken")
        wait_for(lambda: self._passes(sample.number) or self.ended)
        if self.ended:
            raise BuildError("the builder was ended")
        if sample.number == self.room:
            self.room = SAMPLES
            raise disk_failure(Path("disk"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        self.loaded.append(sample.number)
        pixels = np.random.default_rng([self.seed, sample.number]).integers(0, 256, (20, 24, 3), np.uint8)
        return Item({"image": pixels}, None if self.labelled else sample.number % 3)

    def _passes(self, number: int) -> bool:
        return number < self.first or len(self.loaded) < self.most or self.gate.is_set()


class Building:
    def __init__(self, source: Any, cache: Path, recipe: Recipe, **others: Any) -> None:
        self.prospect: Prospect | None = None
        self.error: BaseException | None = None
        self._source, self._told = source, threading.Event()
        self._thread = threading.Thread(target=self._build, args=(cache, recipe), kwargs=others)
        self._thread.start()

    def _build(self, cache: Path, recipe: Recipe, **others: Any) -> None:
        try:
            build_for_readers(self._source, cache, self._tell, recipe=recipe, jobs=1, **others)
        except BaseException as error:  # noqa: BLE001  # `check` raises it
            self.error = error
        self._told.set()

    def _tell(self, prospect: Prospect) -> None:
        self.prospect = prospect
        self._told.set()

    def check(self) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def wait_for_prospect(self) -> Prospect | None:
        assert self._told.wait(PATIENCE), "no prospect"
        return self.prospect

    def end(self) -> None:
        self._source.ended = True
        self.join()

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def grown(
    source: Any, cache: Path, recipe: Recipe = RECIPE, variant: Any = 0
) -> Iterator[tuple[CachedDataset, Building]]:
    building = Building(source, cache, recipe)
    try:
        prospect = building.wait_for_prospect()
        building.check()
        assert prospect is not None
        yield CachedDataset(GrowingCache(cache, prospect, building.check), variant), building
    finally:
        source.ended = True
        building.join()


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_TASK_SAMPLES", 4)
    monkeypatch.setattr(scheduler, "_MOST_SAMPLES", 4)
    monkeypatch.setattr(scheduler, "_MOST_LATE_SAMPLES", 4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[Recipe, Path] = {}

    def build(recipe: Recipe = RECIPE) -> Path:
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp("finished") / "cache"
            build_here(Gated(), made[recipe], recipe)
        return made[recipe]

    return build


def batches_of(dataset: CachedDataset, **how: Any) -> list[Any]:
    return [*CachedLoader(dataset, 24, threads=2, **how)]


def assert_same_batches(one: CachedDataset, other: CachedDataset, **how: Any) -> None:
    loaders = [CachedLoader(each, 24, seed=5, threads=1, **how) for each in (one, other)]
    for _ in range(2):
        for (images, labels), (expected, known) in zip(*loaders, strict=True):
            assert np.array_equal(images, expected)
            assert np.array_equal(labels, known)
    assert loaders[0].state_dict() == loaders[1].state_dict()


CASES: Sequence[tuple[Recipe, Any, Any]] = [
    (RECIPE, 0, "full"),
    (RECIPE, 0, False),
    (Recipe(size=SIZE, variants=2, augment="flip"), "epoch", "block"),
    (Recipe(size=SIZE, codec="png"), 0, "block"),
]


@pytest.mark.parametrize(
    ("recipe", "variant", "shuffle"), [CASES[0], *thorough(CASES[1]), CASES[2], *thorough(CASES[3])]
)
def test_batches_and_bytes_are_those_of_the_finished_cache(
    recipe: Recipe, variant: Any, shuffle: Any, tmp_path: Path, finished: Any
) -> None:
    source, expected = Gated(), finished(recipe)
    with grown(source, tmp_path / "cache", recipe, variant) as (dataset, building):
        assert_same_batches(dataset, CachedDataset(expected, variant), shuffle=shuffle)
        building.join()
        building.check()
        assert_same_batches(dataset, CachedDataset(expected, variant), shuffle=shuffle)  # out of the finished one
        assert dataset.manifest.statistics == CachedDataset(expected).manifest.statistics
    assert digests(tmp_path / "cache") == digests(expected)
    assert sorted(source.loaded) == sorted([*range(SAMPLES), *PLANNED])  # each is decoded once


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    monkeypatch.setattr("tpucache.warmup.run.scheduler.is_late", lambda _: False)  # then no task is planned ahead
    monkeypatch.setattr(Lateness, "samples_a_task", 1)
    found, ask_for = threading.Event(), reading.ask_for
    monkeypatch.setattr(reading, "ask_for", lambda *what: (ask_for(*what), found.set()))
    return found


def test_what_a_loader_needs_first_is_built_first(tmp_path: Path, asked: threading.Event) -> None:
    source = Gated(4, gate=asked)
    with grown(source, tmp_path / "cache") as (dataset, _):
        loader = CachedLoader(dataset, 8, shuffle=True, seed=2, threads=1)
        batches = loader.iterate_ahead()
        reading = threading.Thread(target=lambda: [next(batches) for _ in range(3)])
        reading.start()
        reading.join(PATIENCE)
        order = loader.order.positions(SAMPLES, 2, 0)[:24].tolist()
        begun = 2 * 4  # samples of the task before, and of that which was begun
        assert set(order) <= set(source.loaded[: len(PLANNED) + begun + 24])
        batches.close()


def test_a_record_that_is_not_built_yet_is_waited_for_alone(tmp_path: Path) -> None:
    source = Gated(8)
    with grown(source, tmp_path / "cache") as (dataset, _):
        images = [np.asarray(dataset[at][0]) for at in (7, 0, 3)]  # while the others are not to be had
        assert all(image.shape == (3, SIZE, SIZE) for image in images)
        later: list[Any] = []
        waiting = threading.Thread(target=lambda: later.append(dataset[60]))
        waiting.start()
        assert not later
        source.gate.set()
        waiting.join(PATIENCE)
        assert len(later) == 1


def test_what_nobody_expected_is_asked_for_when_it_is_read(tmp_path: Path, asked: threading.Event) -> None:
    source = Gated(4, gate=asked)
    with grown(source, tmp_path / "cache") as (dataset, _):
        found: list[Any] = []
        reading_it = threading.Thread(target=lambda: found.append(dataset[125]))  # as a DataLoader does
        reading_it.start()
        reading_it.join(PATIENCE)
        assert len(found) == 1
        assert 125 in source.loaded[: len(PLANNED) + 2 * 4 + 4]


def test_what_is_known_at_the_end_alone_waits_for_the_end(tmp_path: Path) -> None:
    source = Gated(8)
    with grown(source, tmp_path / "cache") as (dataset, _):
        assert (len(dataset), dataset.classes) == (SAMPLES, ("ant", "bee", "cat"))
        assert np.asarray(dataset.labels).tolist() == [at % 3 for at in range(SAMPLES)]
        assert len(dataset.where("fold == 1")) == len(range(1, SAMPLES, 4))
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend([dataset.manifest.statistics.mean, dataset.digest]))
        waiting.start()
        assert not found
        source.gate.set()
        waiting.join(PATIENCE)
        assert found == [
            CachedDataset(tmp_path / "cache").manifest.statistics.mean,
            CachedDataset(tmp_path / "cache").digest,
        ]


def hurt(cache: Path, random: np.random.Generator) -> None:
    work = cache / WORK_NAME
    for spool in sorted(work.glob("spool-*")):
        match random.integers(5), bytearray(spool.read_bytes()):
            case 0, _:
                spool.unlink()
            case 1, data if data:
                data[random.integers(len(data))] ^= 1
                spool.write_bytes(data)
            case 2, data:
                os.truncate(spool, random.integers(len(data) + 1))
    for shard in sorted(cache.glob("*.lmdb")):
        if random.random() < 0.4:
            shard.unlink()
    for name, share in (("arrived.jsonl", 0.3), ("arrived.bin", 0.2)):
        if random.random() < share:
            (work / name).unlink()
        elif random.random() < share:
            with (work / name).open("ab") as file:
                file.write(b'00000000 {"block": 0, "in')


def build_some(cache: Path, most: int) -> None:
    source = Gated(0, most)
    with grown(source, cache) as (_, building):
        wait_for(lambda: len(source.loaded) == most)
        building.end()


@pytest.mark.parametrize("seed", [*range(8), *thorough(*range(8, 40))])
def test_readers_of_a_continued_build_see_nothing_of_what_was_damaged(seed: int, tmp_path: Path, finished: Any) -> None:
    random = np.random.default_rng(seed)
    cache = tmp_path / "cache"
    for most in random.integers(20, SAMPLES // 3, 3).tolist():
        build_some(cache, most)
        hurt(cache, random)
    with grown(Gated(), cache) as (dataset, building):
        assert_same_batches(dataset, CachedDataset(finished()), shuffle=True)
        building.join()
        building.check()
    assert digests(cache) == digests(finished())


def test_a_record_is_compared_with_its_checksum_when_it_is_first_read(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with grown(Gated(8), cache) as (dataset, _):
        dataset[0]
        (spool,) = (cache / WORK_NAME).glob("spool-*")
        with spool.open("r+b") as file:
            file.write(b"\xff" * spool.stat().st_size)
        dataset[0]
        for _ in range(2):  # a wrong record stays wrong
            with pytest.raises(Exception, match="other records"):
                dataset[1]


def test_workers_know_from_the_first_sample_that_storage_answers_late(tmp_path: Path) -> None:
    class Late(Gated):
        def load(self, sample: Sample) -> Item:
            time.sleep(0.1)
            return super().load(sample)

    plan = plan_build(Late(), Late().list(), RECIPE, BuildOptions())
    assert plan.latency >= 0.1


def test_of_two_builders_one_builds_and_the_other_takes_over(tmp_path: Path, finished: Any) -> None:
    cache = tmp_path / "cache"
    first, second = Gated(60), Gated()
    with grown(first, cache) as (one, building):
        one[50]
        with grown(second, cache) as (other, taking):
            assert np.array_equal(other[50][0], one[50][0])  # which the first has built
            assert second.loaded == PLANNED
            building.end()
            assert_same_batches(other, CachedDataset(finished()), shuffle=True)
            taking.join()
            taking.check()
    assert digests(cache) == digests(finished())


def test_two_readers_of_one_build_decode_each_sample_once(tmp_path: Path, finished: Any) -> None:
    cache = tmp_path / "cache"
    first, second = Gated(0, len(PLANNED)), Gated()
    with grown(first, cache) as (one, building), grown(second, cache) as (other, waiting):
        first.gate.set()
        assert_same_batches(one.select(range(0, SAMPLES, 2)), CachedDataset(finished())[::2], shuffle=True)
        assert_same_batches(other.select(range(1, SAMPLES, 2)), CachedDataset(finished())[1::2], shuffle=True)
        building.join()
        waiting.join()
        waiting.check()
    assert sorted(first.loaded) == sorted([*range(SAMPLES), *PLANNED])
    assert len(second.loaded) < SAMPLES // 2  # it compares a few with the finished cache


@pytest.mark.parametrize(("recipe", "variant", "shuffle"), [CASES[0], *thorough(CASES[2])])
def test_where_the_disk_is_full_readers_are_told_and_the_next_build_continues(
    recipe: Recipe, variant: Any, shuffle: Any, tmp_path: Path, finished: Any
) -> None:
    cache, expected = tmp_path / "cache", CachedDataset(finished(recipe), variant)
    with grown(Gated(room=40), cache, recipe, variant) as (dataset, building):
        with pytest.raises(NoRoomError, match="No space left on device"):
            batches_of(dataset, shuffle=shuffle)
        building.join()
        with pytest.raises(NoRoomError):
            dataset.digest  # noqa: B018  # it is a property that waits for the end
    then = Gated()  # somebody made room
    with grown(then, cache, recipe, variant) as (dataset, building):
        building.join()
        assert_same_batches(dataset, expected, shuffle=shuffle)
    assert len(then.loaded) < SAMPLES


def replace_cache(cache: Path, how: str) -> None:
    shutil.rmtree(cache)
    if how == "built anew":
        build_here(Gated(seed=1), cache, RECIPE)
    elif how == "begun anew":
        build_some(cache, 90)


#: How a cache is replaced, whether it was whole, and whether it was read. Who reads a removed one waits for seconds.
REPLACED = [
    (how, whole, read) for how in ("removed", "built anew", "begun anew") for whole in (1, 0) for read in (1, 0)
]
SLOW = [("removed", 1, 0), ("removed", 0, 1), ("removed", 0, 0), ("begun anew", 1, 1), ("begun anew", 0, 1)]


@pytest.mark.parametrize(
    ("how", "is_whole", "is_read"), [*(each for each in REPLACED if each not in SLOW), *thorough(*SLOW)]
)
def test_nothing_of_another_cache_is_read_under_these_labels(
    how: str, is_whole: int, is_read: int, tmp_path: Path, finished: Any
) -> None:
    cache = tmp_path / "cache"
    batches = len(batches_of(CachedDataset(finished())))
    source = Gated(40)
    with grown(source, cache) as (dataset, building):
        copy = pickle.loads(pickle.dumps(dataset))  # as in a worker of a DataLoader
        if is_read:
            assert dataset[3] is not None
            assert copy[4] is not None
        if is_whole:
            source.gate.set()
            building.join()
        else:
            building.end()
        building.error = None  # it was killed
        replace_cache(cache, how)
        time.sleep(0.6)  # that long a reader trusts what it has looked at
        for reader in (dataset, copy):
            if (how, is_read) == ("built anew", 0):  # nothing was read before, and the samples are the same
                assert len(batches_of(reader)) == batches
            else:
                with pytest.raises(StoreError, match="another cache now"):
                    batches_of(reader)


def test_a_version_that_was_made_since_does_not_move_samples(tmp_path: Path, finished: Any) -> None:
    with grown(Gated(), tmp_path / "cache") as (dataset, building):
        assert dataset[3] is not None
        building.join()
        delete_samples(tmp_path / "cache", paths=["000.png"])
        assert_same_batches(dataset, CachedDataset(finished()))


def test_a_build_that_is_refused_at_its_end_is_not_read_on(tmp_path: Path) -> None:
    def refuse() -> None:
        raise SourceError("a picture has changed")

    building = Building(Gated(), tmp_path / "cache", RECIPE, check=refuse)
    prospect = building.wait_for_prospect()
    assert prospect is not None
    dataset = CachedDataset(GrowingCache(tmp_path / "cache", prospect, building.check))
    with contextlib.suppress(SourceError):
        dataset[3]
    building.join()
    with pytest.raises(SourceError, match="has changed"):
        batches_of(dataset)


def test_files_of_another_build_count_for_nothing(tmp_path: Path) -> None:
    caches = [tmp_path / "one", tmp_path / "other"]
    for seed, cache in enumerate(caches):
        source = Gated(100, seed=seed)
        with grown(source, cache) as (dataset, building):
            dataset.__getitems__(range(96))
            building.end()
    for path in [*caches[0].glob("*.lmdb"), *(caches[0] / WORK_NAME).iterdir()]:
        if path.name not in ("plan.json", "listing.npz"):
            shutil.copy(path, caches[1] / path.relative_to(caches[0]))
    build_here(Gated(seed=1), caches[1], RECIPE)
    build_here(Gated(seed=1), tmp_path / "whole", RECIPE)
    assert digests(caches[1]) == digests(tmp_path / "whole")


def test_requests_that_no_reader_wrote_are_passed_over(tmp_path: Path, finished: Any) -> None:
    source, work = Gated(8), tmp_path / "cache" / WORK_NAME
    with grown(source, work.parent) as (dataset, building):
        os.mkfifo(work / "wanted-0")
        os.mkfifo(work / reading.FAILURE_NAME)
        (work / "wanted-1").mkdir()
        (work / "wanted-2").symlink_to("/dev/zero")
        (work / "wanted-3").write_bytes(np.array([-1, 1 << 62, 7, 7, SAMPLES], "<i8").tobytes() + b"cut")
        with (work / "wanted-4").open("wb") as huge:
            huge.truncate(1 << 40)
        source.gate.set()
        assert_same_batches(dataset, CachedDataset(finished()), shuffle=True)
        building.join()
        building.check()
    assert digests(work.parent) == digests(finished())


def test_room_for_all_of_it_is_looked_for_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=int(1.5 * SAMPLES * RECORD)))
    building = Building(Gated(), tmp_path / "cache", RECIPE)
    assert building.wait_for_prospect() is None
    building.join()
    with pytest.raises(BuildError, match=r"temporary files, and 0\.1 MB are free: make room"):
        building.check()
    assert not (tmp_path / "cache").exists()


def test_another_recipe_is_refused_while_a_cache_is_built(tmp_path: Path) -> None:
    with grown(Gated(8), tmp_path / "cache") as (one, _):
        one[0]
        other = Building(Gated(), tmp_path / "cache", Recipe(size=2 * SIZE))
        other.wait_for_prospect()
        other.join()
        assert other.prospect is None
        with pytest.raises(RecipeError, match="another recipe"):
            other.check()


@pytest.mark.parametrize("case", ["skip", "labels in the samples"])
def test_where_the_samples_are_known_at_the_end_alone_nothing_is_read_before(case: str, tmp_path: Path) -> None:
    source = Gated(labelled=case == "skip")
    building = Building(source, tmp_path / "cache", RECIPE, on_error="skip" if case == "skip" else "fail")
    assert building.wait_for_prospect() is None
    building.join()
    building.check()
    assert len(CachedDataset(tmp_path / "cache")) == SAMPLES


def test_a_copy_does_not_wait_for_ever_for_a_builder_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_SECONDS", 0.0)
    with grown(Gated(40), tmp_path / "cache") as (dataset, building):
        dataset[0]
        copy = pickle.loads(pickle.dumps(dataset))
        building.end()
        (tmp_path / "cache" / WORK_NAME / reading.FAILURE_NAME).unlink()  # a kill writes none
        with pytest.raises(BuildError, match="no process builds"):
            copy[120]


def test_a_copy_is_told_why_the_build_has_failed(tmp_path: Path) -> None:
    class Broken(Gated):
        def load(self, sample: Sample) -> Item:
            if sample.number == 70:
                raise SampleError(sample.path, "is broken")
            return super().load(sample)

    source = Broken(8)
    with grown(source, tmp_path / "cache") as (dataset, building):
        copy = pickle.loads(pickle.dumps(dataset))  # as in a worker of a DataLoader
        source.gate.set()
        building.join()
        with pytest.raises(BuildError, match=r"'070.png': is broken"):
            copy[120]
