"""The order of an epoch: a function of (seed, epoch) alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


def epoch_order(samples: int, seed: int, epoch: int, shuffle: bool) -> Positions:
    """Return the positions of all samples in the order an epoch visits them: int64 (samples,).

    The permutation comes from numpy's legacy generator, whose stream is frozen (NEP 19), so that an order survives
    an upgrade; the seed sequence keeps neighbouring seeds and epochs independent.
    """
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    order: npt.NDArray[Any] = np.random.RandomState(bits).permutation(samples)
    return order.astype(np.int64, copy=False)


def rank_slice(start: int, stop: int, rank: int, world_size: int) -> slice:
    """Return the part of the global batch [start, stop) that is one rank's: contiguous, equal to within one sample."""
    size = stop - start
    return slice(start + size * rank // world_size, start + size * (rank + 1) // world_size)


def epoch_variants(positions: Positions, epoch: int, variants: int) -> Positions:
    """Return which augmented variant, 1 to `variants`, each sample shows in an epoch: all of them in `variants` epochs.

    Neighbouring samples differ, so that an epoch shows every variant.
    """
    return 1 + (positions + epoch) % variants
