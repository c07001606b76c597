"""The order of an epoch: a function of (seed, epoch) alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


def full_order(samples: int, seed: int, epoch: int) -> Positions:
    """Return all positions in random order: int64 (samples,). For caches that fit into memory."""
    return epoch_random(seed, epoch).permutation(samples)


def block_order(samples: int, seed: int, epoch: int, *, chunk: int, window: int) -> Positions:
    """Return all positions so that they read nearly in file order and still mix: int64 (samples,).

    The samples are cut into chunks of `chunk` consecutive ones, the chunks shuffled, and the samples shuffled within
    each `window` of the result. So what is read at any time is a window of whole chunks, and two samples can meet in a
    batch when their chunks fall into one window, which any two chunks do in some epoch.
    """
    random = epoch_random(seed, epoch)
    chunk = max(1, min(chunk, samples))
    chunks = random.permutation(-(-samples // chunk))
    order: Positions = (chunks[:, None] * chunk + np.arange(chunk)).reshape(-1)
    if excess := len(order) - samples:  # of the last chunk; closed up in place, because an order may take gigabytes
        end = (int(chunks.argmax()) + 1) * chunk
        order[end - excess : samples] = order[end:]
        order = order[:samples]
    for start in range(0, samples, window):
        random.shuffle(order[start : start + window])
    return order


def epoch_random(seed: int, epoch: int) -> np.random.RandomState:
    """Return numpy's legacy generator: its stream is frozen (NEP 19), so that an order survives an upgrade.

    The seed sequence keeps neighbouring seeds and epochs independent.
    """
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))


def global_batches(start: int, samples: int, size: int, ranks: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """Yield where each batch of all ranks together begins and ends in an epoch's order, from position `start`.

    A last batch of fewer samples than `ranks` takes what it lacks from the one before, so that each rank has a sample.
    """
    while start < samples:
        stop = min(start + size, samples)
        if stop - start < size and drop_last:
            return
        left = samples - stop
        if 0 < left < ranks and not drop_last:
            stop -= ranks - left
        yield start, stop
        start = stop


def rank_slice(start: int, stop: int, rank: int, world_size: int) -> slice:
    """Return the part of the global batch [start, stop) that is one rank's: contiguous, equal to within one sample."""
    size = stop - start
    return slice(start + size * rank // world_size, start + size * (rank + 1) // world_size)


def rank_windows(batches: Iterable[tuple[int, int]], window: int, rank: int, world_size: int) -> Iterator[list[slice]]:
    """Yield the parts of an epoch's order that one rank reads, those within the same `window` positions together."""

    def parts() -> Iterator[slice]:
        for start, stop in batches:
            own = rank_slice(start, stop, rank, world_size)
            cuts = [own.start, *range((own.start // window + 1) * window, own.stop, window), own.stop]
            yield from map(slice, cuts, cuts[1:])

    for _, found in itertools.groupby(parts(), lambda part: part.start // window):
        yield list(found)


def epoch_variants(positions: Positions, epoch: int, variants: int) -> Positions:
    """Return which augmented variant, 1 to `variants`, each sample shows in an epoch: all of them in `variants` epochs.

    Neighbouring samples differ, so that an epoch shows every variant.
    """
    return 1 + (positions + epoch) % variants
