"""The order of an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.loading.order import block_order, full_order, global_batches, rank_slice, rank_windows

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 10_000)


def in_blocks(samples, seed, epoch):
    return block_order(samples, seed, epoch, chunk=10, window=40)


orders = pytest.mark.parametrize("order", [full_order, in_blocks])


@pytest.mark.slow
@orders
@given(samples=st.integers(0, 500), seed=seeds, epoch=epochs)
def test_an_epoch_visits_every_sample_once(order, samples, seed, epoch):
    assert sorted(order(samples, seed, epoch)) == list(range(samples))


@pytest.mark.slow
@given(st.integers(1, 500), st.integers(1, 50), st.integers(1, 8), seeds)
def test_a_window_of_the_block_order_is_made_of_whole_chunks(samples, chunk, chunks, seed):
    order = block_order(samples, seed, 0, chunk=chunk, window=chunk * chunks)
    for start in range(0, samples, chunk * chunks):
        touched = set(order[start : start + chunk * chunks] // chunk)
        assert len(touched) <= chunks + 1  # one more where the short last chunk shifts the others


def test_the_block_order_mixes_within_a_window():
    order = block_order(1000, 0, 0, chunk=50, window=500)
    together = order[:100] // 50
    assert len(set(together)) >= 8
    assert np.mean(np.diff(order) == 1) < 0.1


def test_the_shuffled_order_never_changes_between_releases():
    assert block_order(10, 3, 1, chunk=2, window=6).tolist() == [7, 0, 8, 1, 6, 9, 2, 5, 3, 4]
    assert block_order(11, 3, 1, chunk=4, window=6).tolist() == [3, 0, 8, 1, 2, 9, 5, 4, 10, 6, 7]
    assert full_order(10, 3, 1).tolist() == [3, 0, 4, 8, 2, 7, 9, 6, 1, 5]


@pytest.mark.slow
@given(st.integers(0, 1000), st.integers(0, 100), st.integers(1, 16))
def test_ranks_share_a_batch_without_overlap(start, size, world):
    slices = [rank_slice(start, start + size, rank, world) for rank in range(world)]
    assert [position for part in slices for position in range(part.start, part.stop)] == list(
        range(start, start + size)
    )
    sizes = [part.stop - part.start for part in slices]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@given(st.integers(0, 500), st.integers(0, 99), st.integers(1, 9), st.integers(1, 6), st.integers(1, 70), st.booleans())
def test_the_windows_of_a_rank_are_the_parts_that_it_reads(samples, start, size, world, window, drop_last):
    for rank in range(world):
        batches = list(global_batches(start, samples, size * world, world, drop_last))
        own = [rank_slice(first, stop, rank, world) for first, stop in batches]
        found = list(rank_windows(batches, window, rank, world))
        positions = [[position for part in parts for position in range(part.start, part.stop)] for parts in found]
        read = [position for part in own for position in range(part.start, part.stop)]
        assert [position for part in positions for position in part] == read
        numbers = [{position // window for position in part} for part in positions if part]
        assert all(len(number) == 1 for number in numbers)
        assert len(set.union(set(), *numbers)) == len(numbers)  # no window comes twice
