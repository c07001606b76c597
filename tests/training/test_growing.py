"""A run on a cache that is built meanwhile: the steps of a run on the finished one."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE, wait_for

from tpucache.errors import UnfinishedError
from tpucache.loading.dataset import CachedDataset
from tpucache.recipe import Recipe
from tpucache.store.growing import GrowingCache
from tpucache.training import RunOptions, TrainSettings
from tpucache.training.device.torch_device import CpuDevice
from tpucache.training.loop import train
from tpucache.warmup.growing import build_for_readers
from tpucache.warmup.run import growing as growing_scheduler
from tpucache.warmup.sources.source import Item, Listing, Sample

SAMPLES = 70
SETTINGS = TrainSettings(model="tpucache_tests_linear:linear", epochs=2, batch_size=10, lr=0.01)
QUIET = RunOptions(replay=False)


class Pictures:
    """Pictures, those from `first_late` on once a gate is open."""

    def __init__(self) -> None:
        self.gate, self.first_late = threading.Event(), SAMPLES

    def list(self) -> Listing:
        return Listing([Sample(at, f"{at:02}.png", at % 3) for at in range(SAMPLES)], classes=("ant", "bee", "cat"))

    def load(self, sample: Sample) -> Item:
        wait_for(lambda: sample.number < self.first_late or self.gate.is_set())
        return Item({"image": np.random.default_rng(sample.number).integers(0, 256, (20, 20, 3), np.uint8)})


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of four samples, also where a busy machine makes storage seem late."""
    monkeypatch.setattr(growing_scheduler, "_TASK_SAMPLES", 4)
    monkeypatch.setattr(growing_scheduler, "_MOST_SAMPLES", 4)


@pytest.fixture(autouse=True)
def linear_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tpucache_tests_linear.py").write_text(
        "from torch import nn\n\ndef linear(outputs):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, outputs))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def growing(source: Pictures, cache: Path) -> tuple[CachedDataset, threading.Thread]:
    told: list[Any] = []
    build = threading.Thread(
        target=build_for_readers, args=(source, cache, told.append), kwargs={"recipe": Recipe(size=16), "jobs": 1}
    )
    build.start()
    wait_for(lambda: told)
    return CachedDataset(GrowingCache(cache, told[0])), build


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run / "best.pt", weights_only=True)["model"]
    return found


@pytest.mark.slow
def test_losses_weights_and_files_are_those_of_a_run_on_the_finished_cache(tmp_path: Path) -> None:
    dataset, build = growing(Pictures(), tmp_path / "cache")
    valid, trained = np.arange(0, SAMPLES, 5), np.flatnonzero(np.arange(SAMPLES) % 5)
    first = train(tmp_path / "first", SETTINGS, dataset[trained], dataset[valid], CpuDevice(), QUIET)
    build.join(PATIENCE)
    whole, same = CachedDataset(tmp_path / "cache"), replace(SETTINGS, normalise="imagenet")
    second = train(tmp_path / "second", same, whole[trained], whole[valid], CpuDevice(), QUIET)
    assert first.losses == second.losses
    assert all(
        torch.equal(one, weights(tmp_path / "second")[name]) for name, one in weights(tmp_path / "first").items()
    )
    infos = [json.loads((tmp_path / run / "run.json").read_text()) for run in ("first", "second")]
    assert infos[0]["training"] == infos[1]["training"]
    resumed = train(
        tmp_path / "first", SETTINGS, whole[trained], whole[valid], CpuDevice(), replace(QUIET, resume=True)
    )
    assert resumed.losses == first.losses  # the finished cache is the one that it was begun with


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
    report = train(tmp_path / "run", SETTINGS, dataset[:32], None, CpuDevice(), replace(QUIET, resume=True))
    assert len(report.losses) == 6
