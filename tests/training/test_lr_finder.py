"""The range test finds a rate, says why, and leaves no trace in what it tested."""

from __future__ import annotations

import copy
import dataclasses
import sys

import numpy as np
import pytest
import torch
from running import command, last_of, learner_on
from stopping import differences
from thorough import thorough

from tpucache import CachedDataset, TrainingError, UnfinishedError, UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training.device import CpuDevice
from tpucache.training.interrupt import StopRequest
from tpucache.training.lr_finder import find_lr, range_test, suggest
from tpucache.training.settings import TrainSettings

pytestmark = pytest.mark.slow

SETTINGS = TrainSettings(model="cnn", batch_size=30, accumulate=2, ema=0.9, augment=AugmentSettings(flip=True))


def learner_for(dataset, **settings):
    return learner_on(dataclasses.replace(SETTINGS, **settings), dataset)


def test_the_steepest_fall_of_a_curve_is_suggested():
    rates = np.geomspace(1e-6, 10, 100)
    falling = 2 - 1 / (1 + np.exp(-4 * (np.log10(rates) + 3)))  # steepest at 1e-3
    losses = np.where(rates > 0.1, falling + 10 * (rates - 0.1), falling)
    assert suggest(rates, losses) == pytest.approx(1e-3, rel=0.2)


@pytest.mark.parametrize("losses", [[], [2.0] * 100, np.linspace(2, 3, 100), [2.0, 1.0]])
def test_no_rate_is_suggested_where_the_loss_does_not_fall(losses):
    with pytest.raises(TrainingError, match="give --lr a number"):
        suggest(np.geomspace(1e-6, 10, 100)[: len(losses)], losses)


@pytest.mark.parametrize("optimizer", [*thorough("sgd"), "adamw"])
def test_learner_and_random_numbers_are_left_exactly_as_they_were(cache, optimizer):
    dataset = CachedDataset(cache)
    learner = learner_for(dataset, optimizer=optimizer)
    torch.manual_seed(5)
    before, random, numpy_random = copy.deepcopy(learner.state_dict()), torch.get_rng_state(), np.random.get_state()
    found = range_test(learner, dataset, steps=40)
    assert len(found.losses) > 20
    assert differences(learner.state_dict(), before) == []
    assert torch.equal(torch.get_rng_state(), random)
    assert np.random.get_state()[2:] == numpy_random[2:]
    assert learner.model.training
    assert all(parameter.grad is None for parameter in learner.model.parameters())


@pytest.mark.parametrize(("loss", "kept"), [(float("nan"), 30), (1000.0, 31)])
def test_the_test_ends_soon_after_the_loss_diverges(cache, monkeypatch, loss, kept):
    dataset, taken = CachedDataset(cache), []
    learner = learner_for(dataset)

    def step(_batches, rates, number):
        taken.append(rates.lr)
        return torch.tensor(loss if number == 30 else 4 - number / 15)

    monkeypatch.setattr(learner, "step", step)
    found = range_test(learner, dataset)
    assert len(found.losses) == len(found.rates) == kept
    assert len(taken) < 50
    assert taken[1] / taken[0] == pytest.approx(taken[9] / taken[8])
    assert taken[0] == pytest.approx(1e-6)


def test_a_range_test_that_reaches_the_time_limit_leaves_the_learner_as_it_was(cache):
    dataset = CachedDataset(cache)
    learner, times = learner_for(dataset), iter(range(100))
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(UnfinishedError, match=r"after 8 of 100 steps.*--resume"):
        range_test(learner, dataset, stop=StopRequest(10.0, clock=lambda: next(times)))  # one is left for saving
    assert differences(learner.state_dict(), before) == []


def test_rates_that_do_not_rise_are_refused(cache):
    dataset = CachedDataset(cache)
    with pytest.raises(UsageError, match="learning rate must rise"):
        range_test(learner_for(dataset), dataset, lowest=1.0, highest=0.1)


@pytest.mark.thorough
def test_train_uses_what_it_finds_and_a_resumed_run_what_it_found(cache, tmp_path, capsys):
    words = "--backend eager --model tiny_tasks:linear --batch-size 50 --epochs 1 --lr find --json"
    arguments = ["train", cache, "--run", tmp_path / "run", *words.split()]
    assert command(*arguments) == 0
    assert "learning rate is" in capsys.readouterr().err
    assert (tmp_path / "run" / "lr_finder.png").read_bytes().startswith(b"\x89PNG")
    last = last_of(tmp_path / "run")
    (tmp_path / "run" / "lr_finder.csv").unlink()
    assert command(*arguments, "--resume") == 0
    assert not (tmp_path / "run" / "lr_finder.csv").exists()
    assert last_of(tmp_path / "run")["settings"] == last["settings"]
    assert command(*arguments) == 2
    assert "--resume" in capsys.readouterr().err


def test_without_matplotlib_the_plot_is_left_out_in_words(cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    find_lr(tmp_path, TrainSettings(model="tiny_tasks:linear", batch_size=50), CachedDataset(cache), CpuDevice())
    assert (tmp_path / "lr_finder.csv").exists()
    assert not (tmp_path / "lr_finder.png").exists()
    assert "`pip install matplotlib`" in caplog.text


ON_XLA = """
import copy, sys
import torch
from stopping import differences
import torch_xla.core.xla_model as xm
from stopping import differences
from tpucache import CachedDataset
from tpucache.training.data import choose_task
from tpucache.training.device.tensors import to_host
from tpucache.training.device import open_device
from tpucache.training.learner import Learner
from tpucache.training.lr_finder import range_test
from tpucache.training.settings import TrainSettings

cache, cores = sys.argv[1], int(sys.argv[2])
device, dataset = open_device("xla", cores), CachedDataset(cache)
settings = TrainSettings(model="tiny_models:tiny", batch_size=16, ema=0.9, optimizer="adamw")
learner = Learner(settings, dataset, choose_task(settings, dataset), device)
xm.set_rng_state(77)
before, random = to_host(copy.deepcopy(learner.state_dict())), torch.get_rng_state()
found = range_test(learner, dataset, lowest=1e-4, steps=20)
assert len(found.losses) > 10
assert differences(to_host(learner.state_dict()), before) == []
assert torch.equal(torch.get_rng_state(), random)
assert xm.get_rng_state() == 77
compiles = []
for _ in range(2):  # as a run after its test: another learner, and no other graph
    range_test(Learner(settings, dataset, choose_task(settings, dataset), device), dataset, lowest=1e-4, steps=20)
    compiles.append(device.counters().compiles)
assert compiles[0] == compiles[1], compiles
"""


@pytest.mark.thorough
@pytest.mark.xla
def test_learner_and_random_numbers_on_xla_are_left_exactly_as_they_were(cache, on_xla):
    on_xla(ON_XLA, cache, 8, devices=8)
