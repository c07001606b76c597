"""Which samples train and which validate."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache import UsageError
from tpucache.loading.columns import fold_split, fold_splits, stratified_split
from tpucache.store.samples import Strings


@pytest.mark.slow
@given(st.lists(st.integers(0, 4), min_size=20, max_size=200), st.floats(0.05, 0.9), st.integers(0, 99))
def test_a_split_covers_all_samples_and_holds_out_its_share_of_every_class(labels, fraction, seed):
    labels = np.array(labels)
    train, valid = stratified_split(labels, fraction, seed)
    assert np.array_equal(np.sort(np.concatenate([train, valid])), np.arange(len(labels)))
    for label in np.unique(labels):
        members = (labels == label).sum()
        held = (labels[valid] == label).sum()
        assert abs(held - members * fraction) <= 1
        assert members == 1 or 0 < held < members


def test_a_split_depends_on_the_seed_alone():
    labels = np.arange(100) % 5
    assert np.array_equal(stratified_split(labels, 0.2, 1).valid, stratified_split(labels, 0.2, 1).valid)
    assert not np.array_equal(stratified_split(labels, 0.2, 1).valid, stratified_split(labels, 0.2, 2).valid)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_a_fraction_outside_zero_to_one_is_refused(fraction):
    with pytest.raises(UsageError):
        stratified_split(np.arange(10) % 2, fraction, 0)


@pytest.mark.parametrize("labels", [[], [0], [0, 1, 2], [[1.0, 0.0]]])
def test_what_cannot_be_split_is_refused_with_the_reason(labels):
    with pytest.raises(UsageError, match=f"{len(labels)} samples cannot be split at 0.5"):
        stratified_split(np.array(labels), 0.5, 0)


FOLDS = {
    "integers": np.array([0, 1, 2, 1], np.int64),
    "bytes": np.array([0, 1, 2, 1], np.uint8),
    "floats": np.array([0.0, 1.0, 2.0, 1.0]),
    "text": Strings.pack(["0", "1", "2", "1"]),
}


@pytest.mark.parametrize("column", FOLDS)
@pytest.mark.parametrize("fold", ["1", 1, " 1"])
def test_a_fold_is_held_out_whatever_its_column_holds(column, fold):
    train, valid = fold_split({"fold": FOLDS[column]}, fold)
    assert (train.tolist(), valid.tolist()) == ([0, 2], [1, 3])


def test_folds_may_have_names():
    table = {"fold": Strings.pack(["site a", "site b", "site a"])}
    assert fold_split(table, "site a").valid.tolist() == [0, 2]
    for other in ("site c", "0", ""):
        with pytest.raises(UsageError, match="the cache has"):
            fold_split(table, other)


@pytest.mark.parametrize(
    "column",
    [np.array([0.0, np.nan, 1.0]), np.array([0.0, 0.5, 1.0]), Strings.pack(["0", "", "1"]), np.zeros((3, 2), np.int64)],
)
def test_samples_in_no_fold_do_not_train_in_every_fold(column):
    with pytest.raises(UsageError, match=r"1 samples are in no fold, the first at position 1|shape \(3, 2\)"):
        fold_split({"fold": column}, "1")


@pytest.mark.parametrize("fold", ["3", "-1", "1.0", "one", ""])
def test_a_fold_that_is_not_there_is_refused(fold):
    with pytest.raises(UsageError, match=r"the cache has \[0, 1, 2\]"):
        fold_split({"fold": FOLDS["integers"]}, fold)
    with pytest.raises(UsageError, match=r"all samples of the cache are in fold 1"):
        fold_split({"fold": np.ones(3, np.int64)}, "1")


@pytest.mark.parametrize("folds", [np.array([0, -1, 1, 0]), Strings.pack(["0", "-1", "1", "0"])])
def test_samples_of_fold_minus_one_train_in_every_fold_and_validate_in_none(folds):
    splits = fold_splits({"fold": folds})
    assert {name: split.valid.tolist() for name, split in splits.items()} == {"0": [0, 3], "1": [2]}
    assert {name: split.train.tolist() for name, split in splits.items()} == {"0": [1, 2], "1": [0, 1, 3]}


@pytest.mark.parametrize(
    ("folds", "reason"),
    [
        ([3, 3, 3], "all samples are in one fold, {}: nothing would remain to train on"),
        ([3, -1, 3], "the cache has only one fold besides -1, {}: cross-validation needs at least two"),
        ([-1, -1, -1], "the cache has no fold besides -1: cross-validation needs at least two"),
    ],
)
@pytest.mark.parametrize("has_names", [False, True])
def test_fewer_than_two_folds_are_refused_with_the_reason(folds, reason, has_names):
    column = Strings.pack([str(fold) for fold in folds]) if has_names else np.array(folds)
    with pytest.raises(UsageError, match=re.escape(reason.format(["3"] if has_names else [3]))):
        fold_splits({"fold": column})
