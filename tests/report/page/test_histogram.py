"""Counts for charts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.report.page import histogram
from tpucache.report.page.histogram import channel_histogram, size_histogram
from tpucache.report.records import Records


def test_channels_are_counted_over_all_clean_records_of_a_small_cache(plain):
    records = Records(plain)
    found = channel_histogram(records)
    pixels = np.stack([records.read(position, 0)["image"] for position in range(12)])
    expected = [np.bincount(pixels[..., channel].reshape(-1), minlength=256) for channel in range(3)]
    assert found.records == 12
    assert np.array_equal(found.counts, expected)


def test_no_more_records_are_read_than_the_bound(plain, monkeypatch):
    monkeypatch.setattr(histogram, "_RECORDS", 5)
    found = channel_histogram(Records(plain))
    assert found.records == 5
    assert found.counts.sum() == 5 * 20 * 24 * 3


def test_without_an_image_there_are_no_channels(tokens):
    assert channel_histogram(Records(tokens)) is None


@pytest.mark.slow
@given(st.lists(st.integers(1, 1 << 62), min_size=1, max_size=50), st.integers(0, 3))
def test_every_file_whose_size_is_known_is_counted_once(sizes, unknown):
    found = size_histogram(np.array([*sizes, *[0] * unknown], np.uint64))
    assert found.counts.sum() == len(sizes)
    assert found.smallest == pytest.approx(min(sizes))
    assert found.largest == pytest.approx(max(sizes))
    assert found.smallest <= found.middle <= found.largest


def test_steps_of_sizes_are_of_equal_ratio():
    found = size_histogram(np.array([1000, 1001, 31_622, 31_700, 1_000_000]))
    steps = len(found.counts)
    assert found.counts[0] == 2
    assert found.counts[steps // 2 - 1 : steps // 2 + 1].sum() == 2
    assert found.counts[-1] == 1
    assert found.median == 31_622


def test_without_known_sizes_there_is_no_histogram():
    assert size_histogram(np.zeros(4, np.uint64)) is None
