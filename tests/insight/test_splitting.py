"""folds: alike in their classes, never dividing a group, and the same on every machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache import CachedDataset
from tpucache.errors import UsageError
from tpucache.insight import folds
from tpucache.store.samples import Strings


class FakeDataset:
    """Samples of a cache with a table of columns, without classes."""

    def __init__(self, samples: int, positions: object = None, **columns: object) -> None:
        self.cache = SimpleNamespace(place="cache", samples=columns, manifest=SimpleNamespace(classes=()))
        self.positions = np.arange(samples) if positions is None else positions


def counts_of(found: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    return np.array([np.bincount(values[found == fold], minlength=int(values.max()) + 1) for fold in range(count)])


@settings(max_examples=60)
@given(st.integers(2, 7), st.integers(7, 120), st.integers(1, 9), st.integers(0, 99))
def test_without_groups_classes_and_sizes_differ_by_one_at_most(
    count: int, samples: int, classes: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).integers(0, classes, samples)
    found = folds(FakeDataset(samples, label=labels), count, seed=seed)
    shares = counts_of(found, labels, count)
    assert (np.ptp(shares, axis=0) <= 1).all()
    assert np.ptp(shares.sum(1)) <= 1


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(0, 999), st.sampled_from(["class", "several", "number", "none"]))
def test_no_group_is_divided(count: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    samples = int(rng.integers(20, 90))
    groups = rng.integers(0, max(count, samples // 2), samples)
    groups[:count] = np.arange(count)
    labels = {
        "class": rng.integers(0, 4, samples),
        "several": rng.integers(0, 2, (samples, 3)).astype(np.float32),
        "number": rng.normal(size=(samples, 1)).astype(np.float32),
        "none": np.zeros(samples, np.int64),
    }[kind]
    found = folds(FakeDataset(samples, label=labels), count, groups, None if kind == "none" else "label", seed=seed)
    assert sorted(np.unique(found)) == list(range(count))
    assert all(len(set(found[groups == group])) == 1 for group in groups)


def test_pairs_of_copies_leave_class_shares_within_one_sample_of_stratified() -> None:
    rng = np.random.default_rng(5)
    labels = rng.choice(6, 600, p=[0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    groups = np.arange(600)
    copies = rng.permutation(600)[:120].reshape(60, 2)
    groups[copies[:, 1]] = groups[copies[:, 0]]
    found = folds(FakeDataset(600, label=labels), 5, groups)
    exact = np.bincount(labels) / 5
    assert np.abs(counts_of(found, labels, 5) - exact).max() <= 1
    assert (found[copies[:, 0]] == found[copies[:, 1]]).all()


def test_labels_of_several_classes_and_numbers_are_balanced() -> None:
    rng = np.random.default_rng(7)
    marks = (rng.random((500, 4)) < [0.5, 0.3, 0.1, 0.02]).astype(np.float32)
    found = folds(FakeDataset(500, label=marks), 5)
    shares = np.array([marks[found == fold].sum(0) for fold in range(5)])
    assert (np.ptp(shares, axis=0) <= 2).all()
    numbers = rng.lognormal(size=(500, 1)).astype(np.float32)
    found = folds(FakeDataset(500, label=numbers), 5)
    medians = [np.median(numbers[found == fold]) for fold in range(5)]
    assert np.ptp(medians) < 0.25 * np.median(numbers)


def test_folds_are_the_same_on_every_machine_and_another_seed_gives_others() -> None:
    rng = np.random.RandomState(8)
    labels, groups = rng.randint(0, 5, 300), rng.randint(0, 120, 300)
    found = folds(FakeDataset(300, label=labels), 5, groups, seed=3)
    digest = hashlib.sha256(found.astype("<i8").tobytes()).hexdigest()
    assert digest == "f74d7faeb76159d9108b2078453ebce8e608996fc4438e6cf55beb6965697c4c"
    assert not np.array_equal(found, folds(FakeDataset(300, label=labels), 5, groups, seed=4))


def test_groups_of_the_same_samples_under_other_names_give_the_same_folds() -> None:
    groups = np.array([3, 3, 9, 1, 1, 5, 6, 7, 2, 0])
    names = np.array([f"patient {100 - number}" for number in groups])
    for each in (names, Strings.pack(names.tolist()), groups.astype(np.float64)):
        found = folds(FakeDataset(10, who=each), 3, "who", None)
        assert np.array_equal(found, folds(FakeDataset(10), 3, groups, None))


def test_a_missing_group_is_one_of_its_own() -> None:
    names = Strings.pack(["", "a", "", "a", "", "b"])
    numbers = np.array([np.nan, 1, np.nan, 1, np.nan, 2])
    for column in (names, numbers):
        found = folds(FakeDataset(6, who=column), 5, "who", None)
        assert len(set(found)) == 5
        assert found[1] == found[3]


def test_a_selection_gets_folds_of_its_own_samples() -> None:
    labels = np.arange(40) % 2
    dataset = FakeDataset(40, positions=np.arange(0, 40, 2)[::-1], label=labels)
    found = folds(dataset, 4)
    assert len(found) == 20
    assert np.bincount(found).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 1}, "6 samples can be divided into 2 to 6 folds, not 1"),
        ({"count": 7}, "2 to 6 folds, not 7"),
        ({"count": 3, "groups": np.zeros(6)}, "6 samples in 1 group cannot be divided into folds"),
        ({"groups": "who"}, "cache has no column 'who' for groups: its columns are .*label"),
        ({"stratify": "who"}, "cache has no column 'who' for stratify"),
        ({"groups": np.zeros(5)}, r"groups has shape \(5,\), and needs a value for each of 6 samples"),
        ({"groups": np.zeros((6, 2))}, "one value for each sample"),
    ],
)
def test_what_makes_no_folds_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        folds(FakeDataset(6, label=np.arange(6)), **arguments)


def test_a_cache_a_dataset_and_a_path_give_the_same_folds(cache: Path) -> None:
    dataset = CachedDataset(cache)
    found = folds(cache, 3)
    assert np.array_equal(found, folds(dataset, 3))
    assert np.array_equal(found, folds(dataset.cache, 3))
    assert (np.ptp(counts_of(found, dataset.labels.numpy(), 3), axis=0) <= 1).all()
