"""A run on a cache that is built meanwhile: the steps of a run on the finished one."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE, wait_for
from running import best_of, train_on
from stopping import differences
from thorough import thorough

from tpucache.adopt.growing import open_or_build
from tpucache.errors import UnfinishedError
from tpucache.loading.dataset import CachedDataset
from tpucache.recipe import Recipe
from tpucache.store import growing as growing_reader
from tpucache.store.ahead import Lateness
from tpucache.store.growing import GrowingCache
from tpucache.training import RunOptions, TrainSettings
from tpucache.training.device.torch_device import CpuDevice
from tpucache.training.forward import IMAGENET
from tpucache.training.loop import train
from tpucache.warmup.growing import build_for_readers
from tpucache.warmup.run import scheduler as growing_scheduler
from tpucache.warmup.sources.source import Item, Listing, Sample

SAMPLES = 70
SETTINGS = TrainSettings(model="tiny_models:tiny", epochs=2, batch_size=10, lr=0.01)
QUIET = RunOptions(replay=False)


class Pictures:
    """Pictures, those from `first_late` on once a gate is open."""

    def __init__(self) -> None:
        self.gate, self.first_late, self.loaded = threading.Event(), SAMPLES, list[int]()

    def list(self) -> Listing:
        return Listing([Sample(at, f"{at:02}.png", at % 3) for at in range(SAMPLES)], classes=("ant", "bee", "cat"))

    def load(self, sample: Sample) -> Item:
        wait_for(lambda: sample.number < self.first_late or self.gate.is_set())
        self.loaded.append(sample.number)
        return Item({"image": np.random.default_rng(sample.number).integers(0, 256, (20, 20, 3), np.uint8)})


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of four samples, also where a busy machine makes storage seem late."""
    monkeypatch.setattr(growing_scheduler, "_TASK_SAMPLES", 4)
    monkeypatch.setattr(growing_scheduler, "_MOST_SAMPLES", 4)
    monkeypatch.setattr(growing_scheduler, "_MOST_LATE_SAMPLES", 4)


def growing(source: Pictures, cache: Path) -> tuple[CachedDataset, threading.Thread]:
    told: list[Any] = []
    build = threading.Thread(
        target=build_for_readers, args=(source, cache, told.append), kwargs={"recipe": Recipe(size=16), "jobs": 1}
    )
    build.start()
    wait_for(lambda: told)
    return CachedDataset(GrowingCache(cache, told[0])), build


@pytest.mark.slow
def test_a_run_that_stops_before_the_cache_is_finished_saves_no_place_and_begins_anew(tmp_path: Path) -> None:
    source = Pictures()
    source.first_late = 50
    dataset, build = growing(source, tmp_path / "cache")
    short = replace(QUIET, time_limit=0.01)
    with pytest.raises(UnfinishedError):
        train(tmp_path / "run", SETTINGS, dataset[:32], None, CpuDevice(), short)
    assert not (tmp_path / "run" / "last.pt").exists()
    source.gate.set()
    build.join(PATIENCE)
    report = train_on(tmp_path / "run", SETTINGS, dataset[:32], resume=True)
    assert len(report.losses) == 6


@pytest.mark.slow
def test_validation_samples_are_built_after_those_that_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpucache.warmup.run.scheduler.is_late", lambda _: False)  # then no task is planned ahead
    monkeypatch.setattr(Lateness, "samples_a_task", 1)
    source, has_asked = Pictures(), threading.Event()
    source.first_late = 4  # no more than a task is made before the run asks for an epoch

    def ask_for(work: Path, positions: np.ndarray[Any, Any]) -> None:
        ask(work, positions)
        if len(positions) > SETTINGS.batch_size:  # for an epoch; the first validation sample may be asked for alone
            has_asked.set()

    ask = growing_reader.ask_for
    monkeypatch.setattr(growing_reader, "ask_for", ask_for)
    dataset, build = growing(source, tmp_path / "cache")
    valid, trained = np.arange(0, SAMPLES, 5), np.flatnonzero(np.arange(SAMPLES) % 5)
    run = threading.Thread(
        target=train,
        args=(tmp_path / "run", replace(SETTINGS, epochs=1), dataset[trained], dataset[valid], CpuDevice(), QUIET),
    )
    run.start()
    wait_for(has_asked.is_set)
    source.gate.set()
    run.join(PATIENCE)
    build.join(PATIENCE)
    made = [number for number in source.loaded[2:] if number != source.loaded[0]]  # without what planned it
    before = made[: len(trained) - 4]
    begun = 2 * 4  # samples of the tasks that were given before the run asked
    assert {*before[begun:]} <= {*trained.tolist()}


@pytest.mark.slow
def test_a_run_is_the_same_whether_its_cache_is_being_built_or_finished_and_is_continued(
    photos: Path, tmp_path: Path
) -> None:
    runs, sets = [tmp_path / f"run-{number}" for number in range(4)], (slice(None, 110), slice(110, 150))
    losses = []
    for number, run in enumerate(runs):
        if number in (0, 2):
            dataset = open_or_build(photos, tmp_path / "cache", Recipe(size=16), jobs=1)
        losses.append(train_on(run, SETTINGS, *(dataset[part] for part in sets)).losses)
        dataset.cache.wait()  # now its own mean and deviation are known
    assert losses == losses[:1] * 4
    assert best_of(runs[0])["mean"] == [*IMAGENET[0]]
    for run in runs[1:]:
        assert differences(best_of(run), best_of(runs[0])) == []
        infos = [json.loads((each / "run.json").read_text()) for each in (runs[0], run)]
        assert infos[0]["training"] == infos[1]["training"]
    whole = CachedDataset(tmp_path / "cache")  # the one that the first run was begun with
    assert train_on(runs[0], SETTINGS, *(whole[part] for part in sets), resume=True).losses == losses[0]


ON_XLA = """
import sys
from pathlib import Path
import numpy as np
from tpucache import CachedDataset, CachedLoader, Recipe, open_or_build
from tpucache.training.device import open_device
from tpucache.training.feed import Feeder

photos, cache, cores = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
device = open_device("xla", cores)


def batches(dataset):
    with Feeder(CachedLoader(dataset, 16, shuffle=True, drop_last=True), device) as feeder:
        return [(batch.images.cpu().numpy(), batch.labels.cpu().numpy()) for batch in feeder]


growing = open_or_build(photos, cache, Recipe(size=16), jobs=1)
assert growing.cache.is_growing
found = batches(growing)
growing.cache.wait()
for one, other in zip(found, batches(CachedDataset(cache)), strict=True):
    assert all(map(np.array_equal, one, other))
"""


@pytest.mark.xla
@pytest.mark.parametrize("cores", [*thorough(1), 8])
def test_batches_on_the_cores_of_xla_are_those_of_the_finished_cache(
    cores: int, on_xla: Any, photos: Path, tmp_path: Path
) -> None:
    on_xla(ON_XLA, photos, tmp_path / "cache", cores, devices=cores)
