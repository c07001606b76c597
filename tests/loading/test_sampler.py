"""The order of an epoch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tpucache.loading.sampler import epoch_order, epoch_variants, rank_slice

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 10_000)


@given(st.integers(0, 500), seeds, epochs, st.booleans())
def test_an_epoch_visits_every_sample_once(samples, seed, epoch, shuffle):
    assert sorted(epoch_order(samples, seed, epoch, shuffle)) == list(range(samples))


@given(seeds, epochs)
def test_shuffle_is_a_function_of_seed_and_epoch(seed, epoch):
    order = epoch_order(200, seed, epoch, True)
    assert np.array_equal(order, epoch_order(200, seed, epoch, True))
    assert not np.array_equal(order, epoch_order(200, seed, epoch + 1, True))
    assert not np.array_equal(order, epoch_order(200, seed ^ 1, epoch, True))


def test_the_shuffled_order_never_changes_between_releases():
    assert epoch_order(10, 3, 1, True).tolist() == [3, 0, 4, 8, 2, 7, 9, 6, 1, 5]


@given(st.integers(0, 1000), st.integers(0, 100), st.integers(1, 16))
def test_ranks_share_a_batch_without_overlap(start, size, world):
    slices = [rank_slice(start, start + size, rank, world) for rank in range(world)]
    assert [position for part in slices for position in range(part.start, part.stop)] == list(
        range(start, start + size)
    )
    sizes = [part.stop - part.start for part in slices]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 9), epochs)
def test_every_sample_shows_all_variants_in_as_many_epochs(variants, epoch):
    shown = np.stack([epoch_variants(np.arange(50), epoch + turn, variants) for turn in range(variants)])
    assert np.array_equal(np.sort(shown, axis=0), np.tile(np.arange(1, variants + 1)[:, None], 50))
