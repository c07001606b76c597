"""The steps are torch's own; what does not decay is left out, and all state is there before the first step."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tpucache.training.optimizers import (
    clip_gradients,
    find_optimizer,
    load_optimizer,
    make_optimizer,
    set_rates,
)
from tpucache.training.schedule import Rates


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def make_plain_model():
    """A model without a bias before its norm: that has no gradient but noise, which AdamW would scale up."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def run(model, optimizer, steps, rates):
    torch.manual_seed(5)
    for step in range(steps):
        rates(optimizer, step)
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_steps_are_those_of_torchs_optimizer_with_two_groups(kind):
    ours, theirs = make_model(), make_model()
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = (
        torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)
        if kind == "sgd"
        else torch.optim.AdamW(groups, lr=0.01)
    )

    def plain(optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
            if kind == "sgd":
                group["momentum"] = 0.8 + step / 100
            else:
                group["betas"] = (0.8 + step / 100, 0.999)

    expected = run(theirs, reference, 6, plain)
    found = run(
        ours,
        make_optimizer(ours, kind, 0.5, 0.1),
        6,
        lambda optimizer, step: set_rates(optimizer, Rates(0.01 / (step + 1), 0.8 + step / 100)),
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "names"), [("sgd", {"momentum_buffer"}), ("adamw", {"step", "exp_avg", "exp_avg_sq"})]
)
def test_all_state_is_there_before_the_first_step_and_after_it(kind, names):
    model = make_model()
    optimizer = make_optimizer(model, kind, 0.1)
    for _ in range(2):
        for parameter in model.parameters():
            assert optimizer.state[parameter].keys() == names
        run(model, optimizer, 1, lambda *_: None)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_fused_optimizer_takes_the_same_steps(kind):
    ours, theirs = make_plain_model(), make_plain_model()

    def rates(optimizer, step):
        set_rates(optimizer, Rates(0.01 / (step + 1), 0.8 + step / 100))

    expected = run(theirs, make_optimizer(theirs, kind, 0.5, 0.1), 6, rates)
    optimizer = make_optimizer(ours, kind, 0.5, 0.1, fused=True)
    assert all(group["fused"] for group in optimizer.param_groups)
    for one, other in zip(run(ours, optimizer, 6, rates), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_state_is_continued_by_an_optimizer_of_another_device_and_fused_only_there(kind, is_fused):
    first, second = make_plain_model(), make_plain_model()
    before = make_optimizer(first, kind, 0.001, 0.01, fused=is_fused)
    run(first, before, 3, lambda *_: None)
    optimizer = make_optimizer(second, kind, 0.7, 0.0, fused=not is_fused)
    load_optimizer(optimizer, copy.deepcopy(before.state_dict()))
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [not is_fused] * 2
    second.load_state_dict(first.state_dict())
    found, uninterrupted = (run(*each, 3, lambda *_: None) for each in ((second, optimizer), (first, before)))
    for one, other in zip(found, uninterrupted, strict=True):
        torch.testing.assert_close(one, other)


def test_the_count_of_a_fused_adamw_goes_where_the_parameters_are():
    state = make_optimizer(make_model(), "adamw", 0.1).state_dict()
    for values in state["state"].values():
        values["step"] = values["step"].double()  # torch converts what it sends to a device, and nothing else
    for fused, dtype in ((True, torch.float32), (False, torch.float64)):
        optimizer = make_optimizer(make_model(), "adamw", 0.1, fused=fused)
        load_optimizer(optimizer, state)
        assert {values["step"].dtype for values in optimizer.state.values()} == {dtype}


def test_parameters_that_no_fused_optimizer_takes_are_learned_one_by_one():
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(2))])
    assert not any(group["fused"] for group in make_optimizer(model, "adamw", 0.1, fused=True).param_groups)


def test_no_factor_of_adamws_step_is_one_in_float32_however_late_or_small():
    model = make_model()
    optimizer = make_optimizer(model, "adamw", 1e-3, 0.01)
    for parameter in model.parameters():
        optimizer.state[parameter]["step"].fill_(1e6)
    set_rates(optimizer, Rates(1e-9, 0.9))
    decaying, others = optimizer.param_groups
    assert np.float32(1 - decaying["lr"] * decaying["weight_decay"]) != 1
    assert others["weight_decay"] == 0
    for parameter in model.parameters():
        step = optimizer.state[parameter]["step"].item() + 1
        assert np.float32(1) > np.float32((1 - 0.999**step) ** 0.5) > 1 - 3e-7
    set_rates(optimizer, Rates(1e-3, 0.9))
    assert decaying["weight_decay"] == 0.01


def test_frozen_parameters_are_left_out():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, "sgd", 0.1, 0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1e6])
def test_gradients_are_scaled_to_the_norm_and_never_up(max_norm):
    model = make_model()
    model(torch.randn(8, 4)).square().sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = clip_gradients(model.parameters(), max_norm)
    whole = torch.cat([gradient.flatten() for gradient in before]).norm()
    assert norm.item() == pytest.approx(whole.item(), rel=1e-6)
    for gradient, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient * min(1.0, max_norm / whole.item()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name", ["torch.optim:NAdam", "torch.optim:RMSprop", "torch.optim:Adafactor", "torch.optim:SGD", "torch.optim:ASGD"]
)
def test_an_optimizer_by_name_has_torchs_steps_and_continues_bit_by_bit(name):
    whole, halves, theirs = make_model(), make_model(), make_model()
    maker = find_optimizer(name)
    optimizer, first = (make_optimizer(model, maker, 0.01) for model in (whole, halves))
    expected = run(theirs, maker(theirs.parameters(), lr=0.01, weight_decay=0), 6, lambda *_: None)
    found = run(whole, optimizer, 6, lambda *_: None)
    torch.testing.assert_close(found, expected)
    run(halves, first, 3, lambda *_: None)
    second = make_optimizer(halves, maker, 0.7)
    load_optimizer(second, copy.deepcopy(first.state_dict()))
    torch.manual_seed(5)
    torch.randn(3, 8, 4)  # the inputs of the first steps
    for _ in range(3):
        halves(torch.randn(8, 4)).square().sum().backward()
        second.step()
        second.zero_grad(set_to_none=True)
    for one, other in zip(found, halves.parameters(), strict=True):
        assert torch.equal(one, other)


def test_on_xla_torchs_optimizers_count_their_steps_on_the_device():
    for name, is_on_device in (("NAdam", True), ("AdamW", True), ("Adadelta", False), ("Adagrad", False)):
        groups = make_optimizer(make_model(), find_optimizer(f"torch.optim:{name}"), 0.1, capturable=True).param_groups
        assert [group.get("capturable", False) for group in groups] == [is_on_device] * 2
