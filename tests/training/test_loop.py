"""What a run needs before its first step."""

from __future__ import annotations

import json

import pytest

from tpucache import CachedDataset, Recipe, TrainingError, UsageError, build_cache
from tpucache.training.device import EagerDevice, open_device
from tpucache.training.loop import TrainSettings, train


def test_a_run_learns_and_leaves_its_report(cache, tmp_path):
    settings = TrainSettings(model="cnn", epochs=6, batch_size=16, lr=0.05)
    dataset = CachedDataset(cache)
    report = train(
        tmp_path, settings, dataset.select(range(0, 150, 2)), dataset.select(range(1, 150, 2)), EagerDevice()
    )
    assert report.validation[-1].accuracy > 0.6
    assert json.loads((tmp_path / "report.json").read_text())["losses"] == report.losses
    assert report.pace.steps == len(report.losses) - 2
    assert 0 <= report.pace.waited <= 1


def test_the_same_seed_gives_the_same_losses(cache, tmp_path):
    settings = TrainSettings(model="cnn", epochs=1, batch_size=30)
    first, second = (
        train(tmp_path / str(run), settings, CachedDataset(cache, "epoch"), None, EagerDevice()) for run in (1, 2)
    )
    assert first.losses == second.losses


def test_a_loss_that_is_not_finite_ends_the_run(cache, tmp_path):
    settings = TrainSettings(model="cnn", epochs=2, batch_size=10, lr=1e30)
    with pytest.raises(TrainingError, match="--lr"):
        train(tmp_path, settings, CachedDataset(cache), None, EagerDevice())


def test_data_that_does_not_fit_is_refused_before_the_first_step(cache, photos, tmp_path):
    settings = TrainSettings(model="cnn", batch_size=200)
    dataset = CachedDataset(cache)
    with pytest.raises(UsageError, match="150"):
        train(tmp_path, settings, dataset, None, EagerDevice())
    build_cache(photos / "ant", tmp_path / "flat", Recipe(size=16), jobs=1)
    flat = CachedDataset(tmp_path / "flat")
    with pytest.raises(UsageError, match="labels"):
        train(tmp_path, TrainSettings(batch_size=4), flat, None, EagerDevice())
    with pytest.raises(UsageError, match="classes"):
        train(tmp_path, TrainSettings(batch_size=4), dataset, flat, EagerDevice())


def test_eager_has_one_core():
    with pytest.raises(UsageError, match="eager"):
        open_device("eager", 8)
