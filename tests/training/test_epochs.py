"""`epochs="auto"`: the run is the one that the decided number of epochs would be, and keeps that number."""

from __future__ import annotations

import pytest
import torch
from running import train_on

from tpucache import CachedDataset
from tpucache.errors import UnfinishedError
from tpucache.training.device import CpuDevice
from tpucache.training.interrupt import StopRequest
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.run.saved import load_last
from tpucache.training.settings import TrainSettings

AUTO = TrainSettings(model="cnn", epochs="auto")


@pytest.fixture
def three_epochs(monkeypatch):
    """Have steps and evaluations take so long that a limit of 1,000 seconds allows three epochs."""
    monkeypatch.setattr("tpucache.training.lr_finder._step_seconds", lambda learner, data, *_: 290 / max(1, each(data)))

    def each(data):
        return TrainSettings(model="cnn", batch_size=8).steps_per_epoch(len(data.train_set))


def test_the_run_is_that_of_the_decided_number_and_keeps_it(cache, tmp_path, three_epochs):
    data, quiet = CachedDataset(cache), {"replay": False}
    options = RunOptions(stop=StopRequest(1000, clock=lambda: 0.0), **quiet)
    report = train(tmp_path / "auto", AUTO, data, None, CpuDevice(), options)
    assert len(report.epochs) == 3
    settings = TrainSettings(model="cnn", epochs=3, batch_size=load_last(tmp_path / "auto")["settings"]["batch_size"])
    given = train(tmp_path / "given", settings, data, None, CpuDevice(), RunOptions(**quiet))
    assert given.losses == report.losses
    states = [load_last(tmp_path / name)["learner"]["model"] for name in ("auto", "given")]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    again = train(tmp_path / "auto", AUTO, data, None, CpuDevice(), RunOptions(resume=True, **quiet))
    assert again.losses == report.losses


def test_a_limit_below_one_epoch_is_said(cache, tmp_path, three_epochs, capsys):
    options = RunOptions(stop=StopRequest(100, clock=lambda: 0.0), replay=False)
    report = train(tmp_path, AUTO, CachedDataset(cache), None, CpuDevice(), options)
    assert len(report.epochs) == 1
    assert "not even one epoch" in capsys.readouterr().err


def test_the_pace_is_measured_with_validation(cache, tmp_path):
    data = CachedDataset(cache)
    try:
        report = train_on(tmp_path, AUTO, data, data, time_limit=2)
    except UnfinishedError:  # a machine may be too slow for it
        return
    assert len(report.epochs) >= 1
