"""Rate, weight decay and schedule follow from optimizer, model, and given weights, and a given one is used as given."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import train_on
from torch import nn

from tpucache import CachedDataset, Recipe, UsageError, build_cache
from tpucache.runs import INFO_NAME
from tpucache.training.data import begin
from tpucache.training.defaults import (
    Custom,
    decide_length,
    decide_optimizer,
    decide_rates,
    decide_settings,
    describe_rates,
    find_family,
    least_share,
)
from tpucache.training.device import CpuDevice
from tpucache.training.model import cnn, resnet18
from tpucache.training.settings import TrainSettings, as_decided, settings_from
from tpucache.training.tasks.classes import Classes
from tpucache.training.tasks.regression import Regression


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


def test_a_regression_of_a_model_with_layer_norm_has_twice_the_rate_if_gradients_are_clipped(cache):
    settings, dataset = TrainSettings(model="cnn", batch_size=4), CachedDataset(cache)
    build = Custom(lambda _: transformer())
    classes, numbers = (
        decide_settings(settings, dataset, task, CpuDevice(), build) for task in (Classes(3), Regression(1))
    )
    assert numbers.settings.peak_lr == pytest.approx(2 * classes.settings.peak_lr)
    unclipped = decide_settings(replace(settings, optimizer="adamw"), dataset, Regression(1), CpuDevice(), build)
    assert unclipped.settings.peak_lr == classes.settings.peak_lr
    assert "arXiv:2201.03545" in numbers.rates
    assert "given:" not in numbers.rates
    given = decide_settings(replace(settings, lr=1e-3), dataset, Regression(1), CpuDevice(), build)
    assert given.settings.peak_lr == 1e-3
    assert "given: lr" in given.rates


def test_a_given_rate_is_used_as_given_whatever_the_batch():
    for size in (8, 1024):
        decided = decide_rates(TrainSettings(optimizer="sgd", lr=0.3, batch_size=size), cnn(3))
        assert decided.peak_lr == 0.3
    settings = TrainSettings(optimizer="sgd", weight_decay=0.0, batch_size=8)
    assert decide_rates(settings, cnn(3)).weight_decay == 0


def test_what_is_decided_stays_decided():
    decided = decide_rates(TrainSettings(optimizer="adamw", batch_size=8), transformer())
    assert decide_rates(decided, cnn(3)) == decided
    assert as_decided(TrainSettings(optimizer="adamw"), decided) == decided
    own = replace(decided, optimizer="os:getcwd")  # a file may not name what is imported and called
    assert as_decided(TrainSettings(), own).optimizer is None
    assert settings_from(decided.to_dict()) == decided
    assert as_decided(TrainSettings(lr=0.5), decided).lr == 0.5


def test_an_undecided_rate_is_not_known():
    with pytest.raises(UsageError, match="decided when the run begins"):
        _ = TrainSettings().peak_lr
    for name in ("batch", "part_size"):
        with pytest.raises(UsageError, match="batch size is decided when the run begins"):
            getattr(TrainSettings(), name)
    with pytest.raises(UsageError, match="epochs is decided when the run begins"):
        _ = TrainSettings(epochs="auto").passes
    with pytest.raises(UsageError, match="give optimizer"):
        decide_rates(TrainSettings(), cnn(3))


def test_an_optimizer_of_ones_own_has_its_own_default_rate_or_asks_for_one():
    settings = TrainSettings(batch_size=128)
    assert decide_rates(settings, cnn(3), torch.optim.Adam).peak_lr == 1e-3
    assert decide_rates(settings, cnn(3), functools.partial(torch.optim.RMSprop, alpha=0.9)).peak_lr == 1e-2
    with pytest.raises(UsageError, match="give lr"):
        decide_rates(settings, cnn(3), adam)
    own = decide_rates(TrainSettings(lr=0.2, batch_size=128), cnn(3), adam)
    assert (own.peak_lr, own.weight_decay) == (0.2, 0)


def test_the_text_says_each_value_and_what_was_given():
    decided = decide_rates(TrainSettings(optimizer="sgd", batch_size=128), cnn(3))
    text = describe_rates(decided, cnn(3))
    assert text.startswith("sgd, lr 0.099 (0.14 for a batch of 256, sqrt), weight decay 0.0005, one-cycle")
    assert "batch norm" in text
    assert "arXiv" in text
    assert "given:" not in text
    rates = describe_rates(replace(decided, lr=0.02), cnn(3))
    assert rates.startswith("sgd, lr 0.02, weight decay")
    assert rates.endswith("given: lr")


@pytest.mark.parametrize(
    ("samples", "epochs", "cores", "batch"),
    [
        (5, 5, 1, 5),
        (20, 5, 1, 8),
        (999, 5, 1, 8),
        (999, 40, 1, 128),
        (1000, 5, 1, 32),
        (3068, 1, 1, 32),
        (3068, 2, 1, 32),
        (2000, 40, 1, 128),
        (10**6, 90, 1, 128),
        (10**6, 90, 8, 1024),
        (320, 5, 8, 64),
        (20, 5, 8, 16),
    ],
)
def test_the_batch_follows_from_samples_epochs_and_cores(samples, epochs, cores, batch):
    assert decide_length(TrainSettings(epochs=epochs), samples, cores).batch == batch


@given(
    samples=st.integers(1, 10**6),
    epochs=st.integers(1, 300),
    cores=st.sampled_from([1, 4, 8]),
    processes=st.integers(1, 3),
    accumulate=st.integers(1, 4),
    each=st.integers(1, 3),
)
def test_a_batch_by_default_divides_and_is_there(samples, epochs, cores, processes, accumulate, each):
    settings = TrainSettings(epochs=epochs, accumulate=accumulate, steps_per_execution=each)
    share = cores * processes * accumulate
    if samples < share * each:
        with pytest.raises(UsageError, match="too few"):
            decide_length(settings, samples, cores, processes)
        return
    decided = decide_length(settings, samples, cores, processes)
    assert decided.batch % share == 0
    assert decided.batch * each <= samples
    assert decided.batch <= max(128 * cores * processes, share)
    assert decided.steps_per_epoch(samples) >= each
    assert decide_length(decided, 10 * samples, 1) == decided  # it is kept


@pytest.mark.parametrize(("samples", "epochs"), [(1, 100), (42, 100), (320, 25), (1599, 6), (1600, 5), (10**6, 5)])
def test_few_samples_are_shown_more_often(samples, epochs):
    decided = decide_length(TrainSettings(), samples)
    assert decided.epochs == epochs
    assert decide_length(decided, 10**6) == decided
    assert decide_length(TrainSettings(epochs=3), samples).epochs == 3


@pytest.mark.parametrize(
    ("model", "task", "changes", "least"),
    [
        (cnn(1), Regression(1), {}, 4),
        (transformer(), Classes(2), {}, 4),
        (transformer(), Regression(1), {}, 4),
        (cnn(3), Classes(3), {}, 8),
        (resnet18(1), Regression(1), {}, 8),
        (nn.Linear(2, 1), Regression(1), {}, 8),
        (cnn(1), Regression(1), {"weights": "run"}, 8),
        (cnn(1), Regression(1), {"model": "module:function"}, 8),
    ],
)
def test_models_that_need_no_large_batches_have_small_ones_where_samples_are_few(model, task, changes, least):
    settings = TrainSettings(**{"model": "timm:any", **changes})
    found = least_share(settings, task, model)
    assert found == least
    assert decide_length(settings, 320, 2, 1, found).batch == 2 * least
    assert decide_length(settings, 999, 1, 1, found).batch == least
    for many in (replace(settings, epochs=100), replace(settings, accumulate=8)):
        assert decide_length(many, 3000, 1, 1, found) == decide_length(many, 3000)


@pytest.mark.parametrize(("model", "batch"), [("cnn", 4), ("resnet18", 8)])
def test_the_batch_of_a_regression_is_the_same_whoever_decides_it(tmp_path, model, batch):
    build_cache("tiny_tasks:prices", tmp_path / "cache", Recipe(size=16), jobs=1)
    settings, dataset, device = (
        TrainSettings(model=model, epochs=1),
        CachedDataset(tmp_path / "cache")[:24],
        CpuDevice(),
    )
    state = torch.get_rng_state()
    begun = begin(settings, dataset, device)
    assert torch.equal(torch.get_rng_state(), state)
    decided = decide_settings(settings, dataset, Regression(3), device)
    assert begun.batch == decided.settings.batch == batch
    assert decided.batch.startswith(f"{batch}: default for")
    assert begin(replace(settings, batch_size=16), dataset, device).batch == 16
    train_on(tmp_path / "run", settings, dataset, device=device)
    assert json.loads((tmp_path / "run" / INFO_NAME).read_text())["settings"]["batch_size"] == batch


def test_the_optimizer_follows_from_task_and_model_unless_it_is_given():
    def found(task: object, model: nn.Module, **values: object) -> tuple[str | None, float | None]:
        settings = decide_optimizer(TrainSettings(**values), task, model)
        return settings.optimizer, settings.clip

    classes, numbers = Classes(3), Regression(1)
    assert found(classes, cnn(3)) == ("sgd", None)
    assert found(classes, transformer()) == ("adamw", None)
    assert found(numbers, cnn(1)) == ("adamw", 1.0)
    assert found(numbers, cnn(1), clip=3.0) == ("adamw", 3.0)
    assert found(numbers, cnn(1), optimizer="sgd") == ("sgd", None)
    # A run of an earlier version had an optimizer, and no clipping: it has none when it is continued either.
    before = TrainSettings(optimizer="sgd", batch_size=8)
    assert decide_optimizer(as_decided(TrainSettings(), before), numbers, cnn(1)).clip is None


@pytest.mark.parametrize(
    ("optimizer", "make_model", "weights", "rates"),
    [
        ("sgd", cnn, None, {4: 0.2, 8: 0.2, 9: 0.099, 127: 0.099, 128: 0.14 / 2**0.5, 512: 0.14 * 2**0.5}),
        ("sgd", cnn, "given.pt", {64: 0.005, 256: 0.02}),
        ("sgd", resnet18, None, {2: 0.00625, 15: 0.00625, 16: 0.00625, 32: 0.0125, 512: 0.2}),
        ("sgd", lambda _: transformer(), None, {256: 0.03, 512: 0.06}),
        ("sgd", lambda _: nn.Linear(2, 2), None, {256: 0.01}),
        ("adamw", cnn, None, {16: 8.4e-3, 512: 8.4e-3}),
        ("adamw", cnn, "given.pt", {256: 6e-4, 1024: 1.2e-3}),
        ("adamw", resnet18, None, {64: 3e-3, 256: 6e-3}),
        ("adamw", lambda _: transformer(), None, {16: 1.4e-3, 512: 1.4e-3}),
        ("adamw", lambda _: transformer(), "given.pt", {256: 2e-4}),
    ],
)
def test_the_rate_follows_from_optimizer_model_weights_and_batch(optimizer, make_model, weights, rates):
    for batch, rate in rates.items():
        settings = TrainSettings(optimizer=optimizer, weights=weights, batch_size=batch)
        assert decide_rates(settings, make_model(3)).peak_lr == pytest.approx(rate)
