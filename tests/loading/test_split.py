"""Which samples train and which validate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache import UsageError
from tpucache.loading.split import stratified_split


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
