"""The moving average is what its formula says, of weights and statistics, and the model gets its own back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpucache import TrainingError
from tpucache.training.optimizers import Ema


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def walk(model, ema, steps, seen=None):
    for _ in range(steps):
        model(torch.randn(8, 4))  # moves the norm's statistics
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ema.update()
        if seen is not None:
            seen.append(copy.deepcopy(model.state_dict()))


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_the_average_follows_its_formula(decay):
    model, seen = make_model(), []
    expected = {name: value.double() for name, value in model.state_dict().items()}
    ema = Ema(model, decay)
    walk(model, ema, 20, seen)
    for step, state in enumerate(seen, 1):
        keep = min(decay, (1 + step) / (10 + step))
        for name, value in state.items():
            expected[name] = keep * expected[name] + (1 - keep) * value.double()
    average = ema.state_dict()["average"]
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(average[name].double(), expected[name], rtol=1e-5, atol=1e-5)
        else:
            assert average[name] == value == 20


def test_the_model_has_the_average_within_the_context_and_its_own_after_it():
    model = make_model()
    ema = Ema(model)
    walk(model, ema, 3)
    own = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}

    def fail():
        with ema.applied():
            for name, value in ema.state_dict()["average"].items():
                assert torch.equal(model.state_dict()[name], value)
            raise RuntimeError("evaluation failed")

    with pytest.raises(RuntimeError, match="evaluation failed"):
        fail()
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is own[name][0]
        assert torch.equal(value, own[name][1])
    assert not torch.equal(model[0].weight, ema.state_dict()["average"]["0.weight"])


def test_a_loaded_average_continues_bit_by_bit():
    whole, halves = make_model(), make_model()
    first, second = Ema(whole, 0.9), Ema(halves, 0.9)
    torch.manual_seed(1)
    walk(whole, first, 4)
    saved = copy.deepcopy((whole.state_dict(), first.state_dict()))
    random = torch.get_rng_state()
    walk(whole, first, 3)
    halves.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    torch.set_rng_state(random)
    walk(halves, second, 3)
    for name, value in first.state_dict()["average"].items():
        assert torch.equal(second.state_dict()["average"][name], value)


def test_an_average_of_another_model_is_refused():
    ema = Ema(make_model())
    for state in ({}, {"average": {}}, Ema(nn.Linear(2, 2)).state_dict()):
        with pytest.raises(TrainingError, match="no moving average of this model"):
            ema.load_state_dict(state)


class Counting(TorchDispatchMode):
    """Counts what is sent to a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_an_update_of_a_deep_model_sends_no_more_than_that_of_a_shallow_one():
    counts = []
    for depth in (2, 20):
        ema = Ema(nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(depth))))
        with Counting() as counting:
            ema.update()
        counts.append(counting.count)
    assert counts[0] == counts[1]
