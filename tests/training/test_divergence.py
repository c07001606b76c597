"""A run that diverges ends with an error, and leaves what was good before."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from running import last_of, train_on

from tpucache import CachedDataset, TrainingError
from tpucache.training.learner import Learner
from tpucache.training.settings import TrainSettings

LINEAR = TrainSettings(model="tiny_tasks:linear", epochs=2, batch_size=50, lr=0.01)  # three steps an epoch


def spoil(monkeypatch, at):
    """Make a weight infinite after a step, whose loss is finite."""
    step = Learner.step

    def spoiled(self, batches, rates, number):
        loss = step(self, batches, rates, number)
        if number + 1 == at:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] = math.inf
        return loss

    monkeypatch.setattr(Learner, "step", spoiled)


@pytest.mark.slow
@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_run_that_diverges_in_its_last_step_ends_with_an_error(cache, tmp_path, monkeypatch, validated, ema):
    dataset, settings = CachedDataset(cache), dataclasses.replace(LINEAR, ema=ema)
    spoil(monkeypatch, 6)
    with pytest.raises(TrainingError, match=r"after step 6.*diverged.*--lr"):
        train_on(tmp_path, settings, dataset, dataset if validated else None)
    assert not (tmp_path / "report.json").exists()
    for name in ("best.pt", "last.pt"):
        content = torch.load(tmp_path / name, weights_only=True)
        weights = content["model"] if name == "best.pt" else content["learner"]["model"]
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_checkpoint_within_an_epoch_is_not_replaced_by_weights_that_are_not_finite(cache, tmp_path, monkeypatch):
    spoil(monkeypatch, 2)
    with pytest.raises(TrainingError, match="after step 2"):
        train_on(tmp_path, LINEAR, CachedDataset(cache), checkpoint_every=1)
    assert last_of(tmp_path)["stand"]["steps"] == 1


@pytest.mark.slow
def test_a_buffer_that_began_infinite_is_no_divergence(cache, tmp_path):
    dataset = CachedDataset(cache)
    settings = dataclasses.replace(LINEAR, model="failing_code:Bounded")
    assert train_on(tmp_path, settings, dataset, dataset).epochs
