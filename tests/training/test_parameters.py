"""What is frozen does not learn, layers learn at their own rates, and what the model excepts does not decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tpucache.training.optimizers import freeze, layer_numbers, make_optimizer, parameter_groups, set_rates
from tpucache.training.schedule import Rates


class Transformer(nn.Module):
    """The parts of a vision transformer that have names of their own."""

    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.ones(1, 4, 6))
        self.patch_embed = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(12))
        self.head = nn.Linear(6, 2)

    def no_weight_decay(self):
        return {"pos_embed", "cls_token"}


def learned(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["blocks.1"], {"blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.1.weight", "blocks.1.1.bias"}),
        (["pos_embed", "head.bias"], {"pos_embed", "head.bias"}),
        (["patch*"], {"patch_embed.weight", "patch_embed.bias"}),
        (["blocks.[01].1"], {"blocks.0.1.weight", "blocks.0.1.bias", "blocks.1.1.weight", "blocks.1.1.bias"}),
    ],
)
def test_a_pattern_freezes_parameters_and_all_within_modules(patterns, frozen):
    model = Transformer()
    everything = learned(model)
    freeze(model, patterns)
    assert everything - learned(model) == frozen
    members = [parameter for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert len(members) == len(everything) - len(frozen)


def test_norms_that_are_frozen_as_a_whole_are_returned():
    model = Transformer()
    assert freeze(model, ["blocks.2", "blocks.3.1.weight"]) == [model.blocks[2][1]]
    assert freeze(Transformer(), []) == []
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    assert freeze(plain, ["[01]"]) == [plain[1]]


def test_layers_are_numbered_from_the_inputs_to_the_head():
    numbers = layer_numbers(Transformer())
    assert numbers["pos_embed"] == numbers["patch_embed.weight"] == 0
    assert [numbers[f"blocks.{each}.0.weight"] for each in range(12)] == list(range(1, 13))
    assert numbers["head.bias"] == 13


def test_the_rate_of_a_layer_is_a_share_of_the_next_ones():
    model = Transformer()
    optimizer = make_optimizer(model, "adamw", 0.1, 0.01, layer_decay=0.5)
    set_rates(optimizer, Rates(0.08, 0.9))
    rates = {
        name: group["lr"]
        for group in optimizer.param_groups
        for name, parameter in model.named_parameters()
        if any(parameter is member for member in group["params"])
    }
    assert rates["head.weight"] == rates["head.bias"] == 0.08
    assert rates["blocks.11.0.weight"] == 0.04
    assert rates["pos_embed"] == rates["patch_embed.bias"] == 0.08 * 0.5**13


def test_what_the_model_excepts_does_not_decay():
    model = Transformer()
    decays = {
        id(parameter): bool(group["weight_decay"])
        for group in parameter_groups(model, 0.1)
        for parameter in group["params"]
    }
    assert not decays[id(model.pos_embed)]
    assert decays[id(model.head.weight)]
    assert not decays[id(model.head.bias)]


def test_layers_with_rates_of_their_own_never_decay_by_equal_factors():
    optimizer = make_optimizer(Transformer(), "adamw", 0.1, 5e-4, layer_decay=0.7)
    for rate in (0.1, 4e-3, 1e-5, 1e-8):
        set_rates(optimizer, Rates(rate, 0.9))
        decays = [group["lr"] * group["weight_decay"] for group in optimizer.param_groups if group["weight_decay"]]
        factors = {torch.tensor(1 - decay, dtype=torch.float32).item() for decay in decays}
        assert len(factors) == len(decays) == 14, rate
        assert decays[-1] == pytest.approx(max(5e-4 * rate, 14 * 2.0**-23), rel=0.05)
