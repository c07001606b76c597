"""The samples of an epoch and their order. Both follow from seed and epoch, and from weights or classes if given."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.loading.indices import Positions, to_array

_SHOWN: Final = 16  # hexadecimal digits of a digest in a loader's state


def full_order(samples: int, seed: int, epoch: int) -> Positions:
    """Return all positions in random order: int64 (samples,). For caches that fit into memory."""
    return epoch_random(seed, epoch).permutation(samples)


def block_order(samples: int, seed: int, epoch: int, *, chunk: int, window: int) -> Positions:
    """Return all positions in an order that is nearly sequential on disk, but still random: int64 (samples,).

    The samples are cut into chunks of `chunk` consecutive samples. The chunks are shuffled, and then the samples within
    each `window` of the result. So the disk reads one window at a time, chunk by chunk. Two samples can be in the same
    batch if their chunks are in the same window, which happens for any two chunks in some epoch.
    """
    random = epoch_random(seed, epoch)
    chunk = max(1, min(chunk, samples))
    chunks = random.permutation(-(-samples // chunk))
    order: Positions = (chunks[:, None] * chunk + np.arange(chunk)).reshape(-1)
    if excess := len(order) - samples:  # the last chunk is shorter; removed in place, as an order may take gigabytes
        end = (int(chunks.argmax()) + 1) * chunk
        order[end - excess : samples] = order[end:]
        order = order[:samples]
    for start in range(0, samples, window):
        random.shuffle(order[start : start + window])
    return order


def local_order(samples: int, seed: int, epoch: int, *, parts: int, each: int) -> Positions:
    """Return all positions, so that every batch has `each` samples of each part, part after part: int64 (samples,).

    The samples are divided at random into `parts` parts, the same ones in every epoch, and each part is shuffled
    separately. So an accelerator core that keeps one part in its memory needs no other samples. A short last batch is
    divided among the parts as `rank_slice` divides a batch among ranks.
    """
    random, members = epoch_random(seed, epoch), _part_members(samples, seed)
    shuffled = [random.permutation(members[part]) for part in _part_slices(samples, parts)]
    batches = samples // (parts * each)
    whole = [part[: batches * each].reshape(batches, each) for part in shuffled]
    return np.concatenate([np.stack(whole, 1).reshape(-1), *(part[batches * each :] for part in shuffled)])


def local_parts(samples: int, seed: int, *, parts: int) -> Positions:
    """Return the part, from 0, to which each position belongs in every epoch: int64 (samples,)."""
    found = np.empty(samples, np.int64)
    members = _part_members(samples, seed)
    for number, part in enumerate(_part_slices(samples, parts)):
        found[members[part]] = number
    return found


def _part_members(samples: int, seed: int) -> Positions:
    """Return all positions in a random order that does not depend on the epoch. Each part of "local" is a slice of it.

    As the order is random, the samples of a class spread over all parts.
    """
    # The third word makes this stream differ from the streams of all epochs.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, 0, 1]))).permutation(samples)


def _part_slices(samples: int, parts: int) -> list[slice]:
    return [rank_slice(0, samples, part, parts) for part in range(parts)]


def epoch_random(seed: int, epoch: int) -> np.random.RandomState:
    """Return the random generator of an epoch: numpy's legacy RandomState, whose stream never changes (NEP 19).

    So orders stay the same with later versions of numpy. The seed sequence makes neighbouring seeds and epochs
    independent.
    """
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))


def global_batches(start: int, samples: int, size: int, ranks: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each global batch (of all ranks together) in an epoch's order, from position `start` on.

    If the last batch would have fewer samples than `ranks`, the batch before is shorter, so that each rank gets a
    sample. With `drop_last`, a short last batch is left out instead.
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
    """Return one rank's slice of the global batch [start, stop). The ranks' slices differ by at most one sample."""
    size = stop - start
    return slice(start + size * rank // world_size, start + size * (rank + 1) // world_size)


def rank_windows(batches: Iterable[tuple[int, int]], window: int, rank: int, world_size: int) -> Iterator[list[slice]]:
    """Yield, for each window of `window` samples of an epoch's order, the list of slices in it that one rank reads.

    `batches` yields the bounds of the global batches in the order.
    """

    def parts() -> Iterator[slice]:
        for start, stop in batches:
            own = rank_slice(start, stop, rank, world_size)
            cuts = [own.start, *range((own.start // window + 1) * window, own.stop, window), own.stop]
            yield from map(slice, cuts, cuts[1:])

    for _, found in itertools.groupby(parts(), lambda part: part.start // window):
        yield list(found)


def epoch_variants(positions: Positions, epoch: int, variants: int) -> Positions:
    """Return the augmented variant, 1 to `variants`, of each sample in an epoch: int64 (n,).

    In `variants` epochs, a sample gets each variant once. Neighbouring positions have different variants, so that an
    epoch has all variants.
    """
    return 1 + (positions + epoch) % variants


class WeightedDraws:
    """An epoch of len(weights) draws with replacement, with probabilities in proportion to the weights.

    The draws use Walker's alias method, in constant time each. Its tables are filled in one sweep over prefix sums
    (Hübschle-Schneider and Sanders, Parallel Weighted Random Sampling, arXiv:1903.00227).
    """

    def __init__(self, weights: Any, samples: int) -> None:
        """Make the tables for weights (samples,). Raises UsageError unless they are finite, at least 0, not all 0."""
        array = _checked(weights, samples)
        self.text = f"weights {hashlib.sha256(array.astype('<f8').tobytes()).hexdigest()[:_SHOWN]}"
        self._kept, self._other = _alias_tables(array)

    def __len__(self) -> int:
        return len(self._kept)

    def positions(self, seed: int, epoch: int) -> Positions:
        """Return the positions drawn: int64 (samples,)."""
        samples = len(self)
        places = epoch_random(seed, epoch).random_sample(samples) * samples
        cells = places.astype(np.int64)
        return np.where(places - cells < self._kept[cells], cells, self._other[cells])

    def digest(self, seed: int, epoch: int) -> str:
        """Return "": `text` already has a digest of the weights."""
        return ""


class BalancedDraws:
    """An epoch of len(labels) draws, in which the classes are equally frequent, to within one draw.

    Within a class, samples are drawn with replacement. Classes without samples are left out.
    """

    text = "balance"

    def __init__(self, labels: npt.NDArray[Any], classes: int) -> None:
        """Group the samples by class number. Raises UsageError for labels that are not class numbers."""
        numbers = _class_numbers(labels, classes)
        self._members = np.argsort(numbers, kind="stable")  # class after class
        counts = np.bincount(numbers, minlength=1)
        self._counts = counts[counts > 0]
        self._starts = np.cumsum(self._counts) - self._counts

    def __len__(self) -> int:
        return len(self._members)

    def positions(self, seed: int, epoch: int) -> Positions:
        """Return the positions drawn: int64 (samples,)."""
        random, samples, classes = epoch_random(seed, epoch), len(self), len(self._counts)
        if not samples:
            return np.empty(0, np.int64)
        # If the draws do not divide evenly, other classes get one more draw in each epoch.
        turns = (random.permutation(samples) + random.randint(classes)) % classes
        chosen = (random.random_sample(samples) * self._counts[turns]).astype(np.int64)
        positions: Positions = self._members[self._starts[turns] + chosen]
        return positions

    def digest(self, seed: int, epoch: int) -> str:
        """Return "": the digest of the dataset already covers the labels."""
        return ""


def _checked(weights: Any, samples: int) -> npt.NDArray[np.float64]:
    array = to_array("weights", weights)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"weights are numbers, one a sample, not {array.dtype}")
    if array.shape != (samples,):
        raise UsageError(f"weights are one number a sample, shape ({samples},), not {array.shape}")
    array = array.astype(np.float64)
    is_wrong = ~(np.isfinite(array) & (array >= 0))
    if is_wrong.any():
        at = int(is_wrong.argmax())
        raise UsageError(f"weights are finite and at least 0; the weight of sample {at} is {array[at]}")
    if samples and not array.any():
        raise UsageError("all weights are 0: there is nothing to draw")
    return array


def _alias_tables(weights: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], Positions]:
    """Return the tables of Walker's alias method: each cell's probability of its own sample, and its second sample.

    There is one cell per sample, and all cells are equally likely. A sample with a weight below the mean leaves a gap
    in its cell. Heavy samples fill the gaps, one after the other. A heavy sample that has filled more than its surplus
    leaves a gap itself, which the next heavy sample fills.
    """
    samples = len(weights)
    if not samples:
        return weights, np.empty(0, np.int64)
    scaled = weights / weights.max()  # so that their sum is finite
    scaled *= samples / scaled.sum()
    is_heavy = scaled >= 1
    is_heavy[scaled.argmax()] = True  # rounding might leave none
    light, heavy = np.flatnonzero(~is_heavy), np.flatnonzero(is_heavy)
    gaps, surplus = np.cumsum(1 - scaled[light]), np.cumsum(scaled[heavy] - 1)
    kept, other = scaled.copy(), np.arange(samples)
    filled = np.concatenate([[0.0], gaps])  # filled[i]: the sum of all gaps before gap i
    last = len(heavy) - 1
    other[light] = heavy[np.minimum(np.searchsorted(surplus, filled[:-1], "right"), last)]
    given = filled[np.searchsorted(filled[:-1], surplus)]  # the sum of the gaps until each heavy sample is exhausted
    kept[heavy] = 1 - np.maximum(given - surplus, 0)
    other[heavy] = heavy[np.minimum(np.arange(len(heavy)) + 1, last)]
    return kept, other


def _class_numbers(labels: npt.NDArray[Any], classes: int) -> npt.NDArray[np.int64]:
    if labels.ndim > 1:
        raise UsageError(
            "balance needs one class a sample, and these samples have several (multilabel): give weights, one a sample"
        )
    if not classes or labels.dtype.kind not in "iu":
        raise UsageError("balance needs classes, and this cache has no classes: give weights, one a sample")
    is_missing = labels < 0
    if is_missing.any():
        raise UsageError(
            f"balance needs a class for each sample, and {int(is_missing.sum()):,} have none, the first at "
            f"position {int(is_missing.argmax())}: select only samples with a class"
        )
    return labels.astype(np.int64)
