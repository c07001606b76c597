"""What weights and classes draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache import UsageError
from tpucache.loading.order import BalancedDraws, WeightedDraws

seeds = st.integers(0, 2**63 - 1)
weight_lists = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=60).filter(any)


def chances(draws: WeightedDraws) -> np.ndarray[Any, Any]:
    """Return how likely a draw gives each sample, by the tables that it is looked up in."""
    samples = len(draws)
    own = np.bincount(np.arange(samples), draws._kept, samples)
    return (own + np.bincount(draws._other, 1 - draws._kept, samples)) / samples


@pytest.mark.slow
@given(weight_lists)
def test_a_sample_is_as_likely_as_its_weight_says(weights: list[float]) -> None:
    draws = WeightedDraws(weights, len(weights))
    np.testing.assert_allclose(chances(draws), np.array(weights) / sum(weights), atol=1e-9)
    assert (draws._kept >= -1e-9).all()


@pytest.mark.slow
@given(weight_lists, seeds)
def test_a_sample_of_weight_zero_is_never_drawn(weights: list[float], seed: int) -> None:
    drawn = WeightedDraws(weights, len(weights)).positions(seed, 3)
    assert len(drawn) == len(weights)
    assert all(weights[at] > 0 for at in drawn)


def test_frequencies_over_200_epochs_pass_a_chi_square_test() -> None:
    weights = np.random.RandomState(3).random_sample(101) ** 4
    draws = WeightedDraws(weights, 101)
    seen = np.bincount(np.concatenate([draws.positions(0, epoch) for epoch in range(200)]), minlength=101)
    expected = 200 * 101 * weights / weights.sum()
    is_frequent = expected >= 5
    seen = np.append(seen[is_frequent], seen[~is_frequent].sum())
    expected = np.append(expected[is_frequent], expected[~is_frequent].sum())
    statistic = ((seen - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 3.1 * np.sqrt(2 * freedom)  # one of a thousand good draws is beyond


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_only_the_ratio_of_weights_counts(scale: float) -> None:
    weights = np.arange(1, 9.0)
    drawn = [WeightedDraws(w, 8).positions(0, 0).tolist() for w in (weights, weights * scale)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], r"shape \(3,\), not \(2,\)"),
        ([[1, 2, 3]], r"not \(1, 3\)"),
        ([1, -1, 2], "sample 1 is -1"),
        ([1, 1, float("nan")], "sample 2 is nan"),
        ([1, float("inf"), 1], "sample 1 is inf"),
        ([0, 0, 0], "all weights are 0"),
        (["a", "b", "c"], "weights are numbers"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WeightedDraws(weights, 3)


@pytest.mark.slow
@given(st.lists(st.integers(0, 6), min_size=1, max_size=80), seeds, st.integers(0, 50))
def test_each_class_is_drawn_equally_often(labels: list[int], seed: int, epoch: int) -> None:
    drawn = BalancedDraws(np.array(labels), 9).positions(seed, epoch)
    counts = np.bincount(np.array(labels)[drawn], minlength=7)[sorted(set(labels))]
    assert len(drawn) == len(labels)
    assert counts.max() - counts.min() <= 1


def test_samples_of_a_class_are_drawn_equally_often() -> None:
    draws = BalancedDraws(np.repeat([0, 1], [10, 90]), 2)
    seen = np.bincount(np.concatenate([draws.positions(1, epoch) for epoch in range(200)]), minlength=100)
    assert np.abs(seen[:10] / 1000 - 1).max() < 0.15
    assert np.abs(seen[10:] / (10_000 / 90) - 1).max() < 0.4


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (np.zeros((3, 2), np.float32), 2, "multilabel"),
        (np.zeros(3, np.float32), 2, "needs classes"),
        (np.zeros(3, np.int64), 0, "needs classes"),
        (np.array([0, -1, 1]), 2, "1 have none, the first at position 1"),
    ],
)
def test_what_has_no_classes_cannot_be_balanced(labels: Any, classes: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BalancedDraws(labels, classes)


def test_nothing_is_drawn_of_nothing() -> None:
    assert len(WeightedDraws([], 0).positions(0, 0)) == 0
    assert len(BalancedDraws(np.empty(0, np.int64), 4).positions(0, 0)) == 0


@pytest.mark.parametrize("kind", ["weights", "balance"])
def test_draws_are_a_function_of_seed_and_epoch(kind: str) -> None:
    draws = WeightedDraws(np.ones(50), 50) if kind == "weights" else BalancedDraws(np.arange(50) % 3, 3)
    first = draws.positions(5, 2).tolist()
    assert first == draws.positions(5, 2).tolist()
    assert first != draws.positions(5, 3).tolist()
    assert first != draws.positions(6, 2).tolist()
