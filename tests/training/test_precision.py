"""A run computes in the precision that is given, or in the device's own; fp16 loses no small gradient and no step."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from running import learner_on, train_on
from stopping import differences
from streams import StandIn, install, open_cuda

from tpucache import CachedDataset, TrainingError, UsageError
from tpucache.training.device import CpuDevice
from tpucache.training.device.base import DeviceBatch
from tpucache.training.device.torch_device import AcceleratorDevice
from tpucache.training.learner import Learner
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.prediction import Predictor
from tpucache.training.run.saved import load_last
from tpucache.training.schedule import Rates
from tpucache.training.settings import TrainSettings, as_decided, setting_differences
from tpucache.training.weights import load_checkpoint

CPU = torch.device("cpu")
LINEAR = TrainSettings(model="tiny_tasks:linear", epochs=2, batch_size=50, lr=0.01)  # three steps an epoch
HALF = dataclasses.replace(LINEAR, precision="fp16")
QUICK = RunOptions(replay=False)


@pytest.fixture
def module(monkeypatch):
    return install(monkeypatch, StandIn())


@pytest.fixture
def cuda(module):
    return open_cuda(module)


def make_learner(cache, device, settings=HALF):
    return learner_on(settings, CachedDataset(cache), device)


def batch_of(cache, rows=range(50)):
    dataset = CachedDataset(cache).select(rows)
    images = torch.stack([image.permute(1, 2, 0) for image, _ in dataset])
    return DeviceBatch({"image": images}, torch.as_tensor(dataset.labels))


def take(learner, batch, number=0, lr=0.01):
    return learner.step([batch], Rates(lr, 0.9), number)


def test_a_run_keeps_the_precision_that_it_began_with():
    before = TrainSettings(precision="fp16")
    assert as_decided(TrainSettings(), before).precision == "fp16"
    assert setting_differences(before, as_decided(TrainSettings(precision="float32"), before)) == [
        "precision fp16, now float32"
    ]


def test_the_default_is_float32_but_on_a_gpu_bf16_or_where_it_has_none_fp16(cache, module):
    found = {
        "cpu": CpuDevice(),
        "tpu": AcceleratorDevice(CPU, module),
        "new": open_cuda(module),
    }
    module.has_bf16 = False
    found["old"] = open_cuda(module)
    texts = {name: make_learner(cache, device, LINEAR).decided.precision for name, device in found.items()}
    assert texts == {
        "cpu": "float32: default on cpu",
        "tpu": "float32: default on cpu",
        "new": "bf16: default on cpu, which has it",
        "old": "fp16: default on cpu, which has no bf16 of its own",
    }
    given = make_learner(cache, found["old"], dataclasses.replace(LINEAR, precision="float32"))
    assert given.settings.precision == "float32"
    with pytest.raises(UsageError, match="'cpu' does not train in fp16"):
        make_learner(cache, found["tpu"], HALF)
    assert given.decided.precision == "float32: given; fp16 is default on cpu, which has no bf16 of its own"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_gradients_too_small_for_fp16_are_learned_from(cache, cuda, optimizer):
    found = {}
    for precision in ("float32", "fp16"):
        settings = dataclasses.replace(LINEAR, precision=precision, optimizer=optimizer, loss="tiny_tasks:faint_loss")
        learner = make_learner(cache, cuda, settings)
        before = learner.model.state_dict()["2.weight"].clone()
        for number in range(3):
            take(learner, batch_of(cache), number, lr=1e5 if optimizer == "sgd" else 0.01)
        found[precision] = learner.model.state_dict()["2.weight"] - before
    assert found["float32"].abs().max() > 1e-4
    torch.testing.assert_close(
        found["fp16"], found["float32"], rtol=0.05, atol=float(found["float32"].abs().max()) / 50
    )


def test_gradients_are_clipped_as_they_are_and_not_as_they_are_scaled(cache, cuda):
    steps = []
    for precision in ("float32", "fp16"):
        learner = make_learner(cache, cuda, dataclasses.replace(LINEAR, precision=precision, clip=0.01))
        before = learner.model.state_dict()["2.weight"].clone()
        take(learner, batch_of(cache))
        steps.append(learner.model.state_dict()["2.weight"] - before)
    torch.testing.assert_close(steps[1], steps[0], rtol=0.05, atol=1e-6)


def scale_losses(learner, scale):
    state = learner.state_dict()
    learner.load_state_dict({**state, "scaler": {**state["scaler"], "scale": scale}})


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_update_with_infinite_gradients_is_skipped_and_the_next_losses_are_scaled_less(cache, cuda, optimizer, clip):
    learner = make_learner(cache, cuda, dataclasses.replace(HALF, optimizer=optimizer, clip=clip))
    batch = batch_of(cache)
    take(learner, batch)
    scale_losses(learner, 1e30)
    before = learner.checked_state()
    loss = take(learner, batch, 1)
    after = learner.checked_state()
    assert math.isfinite(loss)
    assert differences(after["model"], before["model"]) == []
    assert differences(after["optimizer"]["state"], before["optimizer"]["state"]) == []
    assert after["scaler"]["scale"] == pytest.approx(0.5e30)
    scale_losses(learner, 2.0**10)
    take(learner, batch, 2)
    assert differences(learner.checked_state()["model"], before["model"]) != []


def test_a_run_whose_gradients_are_finite_at_no_scale_has_diverged(cache, cuda):
    learner = make_learner(cache, cuda)
    take(learner, batch_of(cache))
    scale_losses(learner, 2.0**-25)
    with pytest.raises(TrainingError, match=r"gradients are not finite after step 1.*--precision float32"):
        learner.checked_state()


@pytest.mark.slow
def test_a_run_in_fp16_is_resumed_with_the_scale_that_it_had(cache, tmp_path, cuda, monkeypatch):
    dataset, skipped = CachedDataset(cache), dataclasses.replace(HALF, ema=0.9, clip=1.0)
    begun = Learner.__init__

    def begin(self, *arguments):
        begun(self, *arguments)
        self._scaler._init_scale = 2.0**40  # so that the first updates overflow

    monkeypatch.setattr(Learner, "__init__", begin)
    whole = train_on(tmp_path / "whole", skipped, dataset, dataset, device=cuda)
    step = Learner.step

    def killed(self, batches, rates, number):
        if number == 2:
            raise RuntimeError("killed")
        return step(self, batches, rates, number)

    monkeypatch.setattr(Learner, "step", killed)
    again = dataclasses.replace(QUICK, resume=True, checkpoint_every=1)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "run", skipped, dataset, dataset, cuda, again)
    saved = load_last(tmp_path / "run")["learner"]["scaler"]
    assert saved["scale"] == 2.0**38
    monkeypatch.setattr(Learner, "step", step)
    resumed = train(tmp_path / "run", dataclasses.replace(skipped, precision="auto"), dataset, dataset, cuda, again)
    assert resumed.losses == whole.losses
    left, right = (load_checkpoint(tmp_path / run / "last.pt")["learner"] for run in ("run", "whole"))
    assert differences(left, right) == []
    assert resumed.precision == "fp16: given; bf16 is default on cpu, which has it"


@pytest.mark.slow
def test_a_run_in_fp16_predicts_in_float32_where_there_is_no_fp16(cache, tmp_path, cuda):
    dataset = CachedDataset(cache)
    train_on(tmp_path, HALF, dataset, dataset, device=cuda)
    found = [
        Predictor([tmp_path], device, trust=[HALF.model]).predict(batch_of(cache)) for device in (cuda, CpuDevice())
    ]
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, atol=0.01, rtol=0.01)
