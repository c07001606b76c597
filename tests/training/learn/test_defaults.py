"""Rate, weight decay and schedule follow from optimizer, model, and given weights, and a given one is used as given."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from tpucache import UsageError
from tpucache.training.learn.defaults import decide, describe_rates, find_family
from tpucache.training.learn.model import cnn
from tpucache.training.settings import TrainSettings, as_decided, settings_from


def transformer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def adam(groups: list[dict[str, object]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr)


class OwnRMSNorm(nn.Module):
    """A norm as libraries have their own."""


def test_the_family_of_a_model_is_the_norm_that_it_has_most_of():
    assert find_family(cnn(3)) == "batch norm"
    assert find_family(nn.GroupNorm(2, 4)) == "batch norm"
    assert find_family(nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(16)))) == "many batch norms"
    assert find_family(transformer()) == "layer norm"
    assert find_family(OwnRMSNorm()) == "layer norm"
    assert find_family(nn.GroupNorm(1, 4)) == "layer norm"
    assert find_family(nn.Sequential(cnn(3), nn.LayerNorm(3))) == "batch norm"
    assert find_family(nn.Linear(2, 2)) == "no norm"


def test_many_batch_norms_halve_the_rate_of_sgd_and_leave_that_of_adamw():
    deep = nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(16)))
    for optimizer, share in (("sgd", 0.5), ("adamw", 1.0)):
        settings = TrainSettings(optimizer=optimizer)  # type: ignore[arg-type]
        assert decide(settings, deep).peak_lr == pytest.approx(share * decide(settings, cnn(3)).peak_lr)


def test_rates_follow_from_optimizer_and_model_and_given_weights():
    def rate(optimizer: str, model: nn.Module, weights: str | None = None) -> float:
        return decide(TrainSettings(optimizer=optimizer, weights=weights), model).peak_lr  # type: ignore[arg-type]

    assert rate("sgd", cnn(3)) > rate("sgd", transformer()) > rate("sgd", nn.Linear(2, 2))
    assert rate("adamw", transformer()) < 0.1 * rate("sgd", cnn(3))
    for optimizer in ("sgd", "adamw"):
        for model in (cnn(3), transformer(), nn.Linear(2, 2)):
            assert rate(optimizer, model, "given.pt") < rate(optimizer, model)


def test_a_decided_rate_follows_the_batch_linearly_in_sgd_and_by_the_root_in_adamw():
    for optimizer, power in (("sgd", 1.0), ("adamw", 0.5)):
        small, large = (
            decide(TrainSettings(optimizer=optimizer, batch_size=size), cnn(3)).peak_lr  # type: ignore[arg-type]
            for size in (64, 256)
        )
        assert large == pytest.approx(small * 4**power)


def test_a_given_rate_is_used_as_given_whatever_the_batch():
    for size in (8, 1024):
        decided = decide(TrainSettings(lr=0.3, batch_size=size), cnn(3))
        assert decided.peak_lr == 0.3
    assert decide(TrainSettings(lr=0.3, scale="linear", batch_size=512), cnn(3)).peak_lr == 0.6
    assert decide(TrainSettings(weight_decay=0.0), cnn(3)).weight_decay == 0


def test_what_is_decided_stays_decided():
    decided = decide(TrainSettings(optimizer="adamw"), transformer())
    assert decide(decided, cnn(3)) == decided
    assert as_decided(TrainSettings(optimizer="adamw"), decided) == decided
    assert settings_from(decided.to_dict()) == decided
    assert as_decided(TrainSettings(lr=0.5), decided).lr == 0.5


def test_an_undecided_rate_is_not_known():
    with pytest.raises(UsageError, match="decided when the run begins"):
        _ = TrainSettings().peak_lr


def test_an_optimizer_of_ones_own_has_its_own_default_rate_or_asks_for_one():
    settings = TrainSettings()
    assert decide(settings, cnn(3), torch.optim.Adam).peak_lr == 1e-3
    assert decide(settings, cnn(3), functools.partial(torch.optim.RMSprop, alpha=0.9)).peak_lr == 1e-2
    with pytest.raises(UsageError, match="give lr"):
        decide(settings, cnn(3), adam)
    own = decide(TrainSettings(lr=0.2), cnn(3), adam)
    assert (own.peak_lr, own.weight_decay) == (0.2, 0)


def test_the_text_says_each_value_and_what_was_given():
    decided = decide(TrainSettings(batch_size=128), cnn(3))
    text = describe_rates(decided, cnn(3))
    assert text.startswith("sgd, lr 0.1 (0.2 for a batch of 256, linear), weight decay 0.0005, one-cycle")
    assert "batch norm" in text
    assert "arXiv" in text
    assert "given:" not in text
    given = describe_rates(replace(decided, lr=0.02, scale="none"), cnn(3))
    assert given.startswith("sgd, lr 0.02, weight decay")
    assert given.endswith("given: lr")
