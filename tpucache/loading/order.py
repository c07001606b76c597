"""The samples of an epoch and their order: from seed and epoch, and from weights, classes or a torch Sampler."""

from __future__ import annotations

import hashlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tpucache.errors import OutOfRangeError, UsageError
from tpucache.loading.state import LoaderState
from tpucache.loading.tensors import HAS_TORCH, Positions, integer_positions, to_array

_SHOWN: Final = 16  # hexadecimal digits of a digest in a loader's state


def full_order(samples: int, seed: int, epoch: int) -> Positions:
    """Return all positions in random order: int64 (samples,)."""
    return epoch_random(seed, epoch).permutation(samples)


def block_order(samples: int, seed: int, epoch: int, *, chunk: int, window: int) -> Positions:
    """Return all positions in an order that is nearly sequential on disk, but still random: int64 (samples,).

    The chunks are shuffled, and then the samples within each `window` of the result. So the disk reads one window at a
    time, chunk by chunk. Any two samples may be in the same batch in some epoch.
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
    """Return all positions, so that every batch has `each` samples of each part, part after part: int64 (samples,)."""
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
    # The third word makes this stream differ from the streams of all epochs.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, 0, 1]))).permutation(samples)


def _part_slices(samples: int, parts: int) -> list[slice]:
    return [rank_slice(0, samples, part, parts) for part in range(parts)]


def epoch_random(seed: int, epoch: int) -> np.random.RandomState:
    """Return the random generator of an epoch: numpy's legacy RandomState, whose stream never changes (NEP 19)."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))


def global_batches(start: int, samples: int, size: int, ranks: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each global batch (of all ranks together) in an epoch's order, from position `start` on.

    If the last batch would have fewer samples than `ranks`, the batch before is shorter, so that each rank gets one.
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
    """Yield, for each window of `window` samples of an epoch's order, the list of slices in it that one rank reads."""

    def parts() -> Iterator[slice]:
        for start, stop in batches:
            own = rank_slice(start, stop, rank, world_size)
            cuts = [own.start, *range((own.start // window + 1) * window, own.stop, window), own.stop]
            yield from map(slice, cuts, cuts[1:])

    for _, found in itertools.groupby(parts(), lambda part: part.start // window):
        yield list(found)


def epoch_variants(positions: Positions, epoch: int, variants: int) -> Positions:
    """Return the augmented variant, 1 to `variants`, of each sample in an epoch: int64 (n,); neighbours have
    different ones.
    """
    return 1 + (positions + epoch) % variants


class Sampling(ABC):
    """Draws the samples of an epoch: by weights, by classes, or by a torch Sampler."""

    text: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def positions(self, seed: int, epoch: int) -> Positions: ...

    def digest(self, seed: int, epoch: int) -> str:
        return ""


class WeightedDraws(Sampling):
    """An epoch of len(weights) draws with replacement, with probabilities in proportion to the weights.

    The draws use Walker's alias method, in constant time each. Its tables are filled in one sweep over prefix sums
    (Hübschle-Schneider and Sanders, Parallel Weighted Random Sampling, arXiv:1903.00227).
    """

    def __init__(self, weights: Any, samples: int) -> None:
        array = _checked(weights, samples)
        self.text = f"weights {hashlib.sha256(array.astype('<f8').tobytes()).hexdigest()[:_SHOWN]}"
        self._kept, self._other = _alias_tables(array)

    def __len__(self) -> int:
        return len(self._kept)

    def positions(self, seed: int, epoch: int) -> Positions:
        samples = len(self)
        places = epoch_random(seed, epoch).random_sample(samples) * samples
        cells = places.astype(np.int64)
        return np.where(places - cells < self._kept[cells], cells, self._other[cells])


class BalancedDraws(Sampling):
    """An epoch of len(labels) draws with replacement, in which the classes that have samples are equally frequent,
    to within one draw.
    """

    text = "balance"

    def __init__(self, labels: npt.NDArray[Any], classes: int) -> None:
        numbers = _class_numbers(labels, classes)
        self._members = np.argsort(numbers, kind="stable")  # class after class
        counts = np.bincount(numbers, minlength=1)
        self._counts = counts[counts > 0]
        self._starts = np.cumsum(self._counts) - self._counts

    def __len__(self) -> int:
        return len(self._members)

    def positions(self, seed: int, epoch: int) -> Positions:
        random, samples, classes = epoch_random(seed, epoch), len(self), len(self._counts)
        if not samples:
            return np.empty(0, np.int64)
        # If the draws do not divide evenly, other classes get one more draw in each epoch.
        turns = (random.permutation(samples) + random.randint(classes)) % classes
        chosen = (random.random_sample(samples) * self._counts[turns]).astype(np.int64)
        positions: Positions = self._members[self._starts[turns] + chosen]
        return positions


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

    A sample with a weight below the mean leaves a gap in its cell. Heavy samples fill the gaps, one after the other.
    One that has filled more than its surplus leaves a gap itself, which the next heavy sample fills.
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


Shuffle = bool | Literal["full", "block", "local"]

_BY_CHUNK = ", variants by chunk"


@dataclass(frozen=True)
class EpochOrder:
    """An order of samples. `name` is "file", "full", "block", "local", or "drawn" for an order by `sampling`.

    `window` and `chunk`, in samples, are for "block". `parts` and `each` are for "local": the number of parts into
    which the samples are divided, and of samples of each part in a batch. If `is_by_chunk`, all samples of a chunk have
    the same variant in an epoch, so that a chunk is a contiguous range of a file.
    """

    name: str
    window: int = 0
    chunk: int = 0
    is_by_chunk: bool = False
    sampling: Sampling | None = None
    parts: int = 0
    each: int = 0

    @property
    def text(self) -> str:
        """The order as text, for a loader's state."""
        return self.text_by_sample + (_BY_CHUNK if self.is_by_chunk else "")

    @property
    def text_by_sample(self) -> str:
        """As `text`, but it never says that all samples of a chunk have the same variant."""
        if self.sampling is not None:
            return self.sampling.text
        if self.name == "local":
            return f"local {self.parts} parts, {self.each} of each a batch"
        return f"block {self.window}" if self.name == "block" else self.name

    @property
    def shared(self) -> int:
        """The number of consecutive samples that have the same variant."""
        return self.chunk if self.is_by_chunk else 1

    def length(self, samples: int) -> int:
        return samples if self.sampling is None else len(self.sampling)

    def positions(self, samples: int, seed: int, epoch: int) -> Positions:
        """Return the positions of the samples in an epoch's order: int64 (n,)."""
        if self.sampling is not None:
            return self.sampling.positions(seed, epoch)
        if self.name == "full":
            return full_order(samples, seed, epoch)
        if self.name == "block":
            return block_order(samples, seed, epoch, chunk=self.chunk, window=self.window)
        if self.name == "local":
            return local_order(samples, seed, epoch, parts=self.parts, each=self.each)
        return np.arange(samples)

    def devices(self, samples: int, seed: int, count: int) -> Positions | None:
        """Return the device, from 0 to `count` - 1, that gets each sample in every epoch: int64 (samples,)."""
        if count == 1 or not self.parts or self.parts % count:
            return None
        return local_parts(samples, seed, parts=self.parts) // (self.parts // count)

    def digest(self, seed: int, epoch: int) -> str:
        """Return a SHA-256 of an epoch's order if a torch Sampler gives the order, otherwise ""."""
        return "" if self.sampling is None else self.sampling.digest(seed, epoch)

    def check(self, saved: LoaderState) -> None:
        if self.digest(saved.seed, saved.epoch) != saved.drawn:
            raise UsageError(
                f"the state cannot be continued here: the sampler gives another order in epoch {saved.epoch} than when "
                "the state was saved. A sampler's order must follow from its arguments, set_epoch and the random "
                "numbers of torch, numpy and Python alone"
            )

    def continued(self, text: str, chunk: int) -> EpochOrder:
        """Return this order with the `chunk` and `is_by_chunk` of a saved order, whose `EpochOrder.text` is `text`."""
        return replace(self, chunk=chunk, is_by_chunk=text.endswith(_BY_CHUNK))


def make_order(
    shuffle: Shuffle, window: int, chunk: int, *, changes_variants: bool, parts: int = 1, each: int = 1
) -> EpochOrder:
    if shuffle == "local":
        return EpochOrder("local", parts=parts, each=each)
    if isinstance(shuffle, bool):
        return EpochOrder("full" if shuffle else "file")
    if shuffle == "full":
        return EpochOrder("full")
    if shuffle == "block":
        return EpochOrder("block", window, chunk, is_by_chunk=changes_variants and chunk > 1)
    raise UsageError(f'shuffle is True, False, "full", "block" or "local", not {shuffle!r}')


def make_sampled_order(
    dataset: Any, shuffle: Shuffle = True, weights: Any = None, balance: bool = False, sampler: Any = None
) -> EpochOrder | None:
    """Return the order for `weights`, `balance` or `sampler`; None if all three are left out."""
    if not isinstance(balance, bool):
        raise UsageError(f"balance is True or False, not {balance!r}")
    given = {"weights": weights is not None, "balance": balance, "sampler": sampler is not None}
    names = [name for name, is_given in given.items() if is_given]
    if not names:
        return None
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} each say which samples an epoch has: give one of them")
    if shuffle not in (True, False, "full"):
        raise UsageError(f"{names[0]} decides the order itself: leave shuffle={shuffle!r} out")
    sampling: Sampling
    if weights is not None:
        sampling = WeightedDraws(weights, len(dataset))
    elif balance:
        sampling = BalancedDraws(np.asarray(dataset.labels), len(dataset.classes))
    else:
        if not HAS_TORCH:
            raise UsageError("sampler needs torch, which is not installed: install torch, or give weights instead")
        sampling = SamplerOrder(sampler, len(dataset))
    return EpochOrder("drawn", sampling=sampling)


class SamplerOrder(Sampling):
    """The indices of a torch Sampler, listed once per epoch.

    While the sampler runs, the random generators of torch, numpy and Python and its own are seeded by (seed, epoch),
    and by the initial seed of its own if it has one. So every rank gets the same indices, and a saved state can
    continue. The sampler's `set_epoch` is called if it exists.
    """

    def __init__(self, sampler: Any, samples: int) -> None:
        from torch.utils.data import BatchSampler, Sampler
        from torch.utils.data.distributed import DistributedSampler

        if isinstance(sampler, BatchSampler):
            raise UsageError("sampler gives batches: give the sampler of single samples that the BatchSampler wraps")
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != 1:
            raise UsageError(
                "a DistributedSampler divides samples among ranks, which CachedLoader does itself: give the loader "
                "rank and world_size, and a sampler of all samples"
            )
        if not isinstance(sampler, Sampler):
            raise UsageError(f"sampler is a torch.utils.data.Sampler, not {type(sampler).__name__}")
        try:
            len(sampler)  # type: ignore[arg-type]  # most samplers have a length, although Sampler itself has none
        except (TypeError, NotImplementedError) as error:
            raise UsageError(
                f"{type(sampler).__name__} has no __len__: add a method __len__ that returns the number of indices in "
                "an epoch"
            ) from error
        self._sampler: Any = sampler
        self._samples = samples
        self._listed: tuple[int, int, Positions] | None = None
        self.text = f"sampler {type(sampler).__qualname__}"

    def __len__(self) -> int:
        return len(self._sampler)

    def positions(self, seed: int, epoch: int) -> Positions:
        listed = self._listed
        if listed is None or listed[:2] != (seed, epoch):
            listed = self._listed = seed, epoch, self._list(seed, epoch)
        return listed[2]

    def digest(self, seed: int, epoch: int) -> str:
        return hashlib.sha256(self.positions(seed, epoch).astype("<i8").tobytes()).hexdigest()

    def _list(self, seed: int, epoch: int) -> Positions:
        name = type(self._sampler).__name__
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        expected = len(self._sampler)
        with _seeded(seed, epoch, getattr(self._sampler, "generator", None)):
            indices = list(self._sampler)
        try:
            array = np.asarray(indices)
        except ValueError:  # rows of several lengths
            array = np.empty((0, 0))
        if array.ndim != 1:
            raise UsageError(f"{name} gives batches, not single samples: give a sampler of single samples")
        try:
            found = integer_positions(array, self._samples, from_end=False)
        except OutOfRangeError as error:
            raise OutOfRangeError(
                f"{name} is not for this dataset: {error}. Make the sampler from this dataset"
            ) from error
        if len(found) != expected:
            raise UsageError(
                f"{name} gives {len(found):,} indices in epoch {epoch}, but its __len__ returns {expected:,}: correct "
                "__len__"
            )
        return found


@contextmanager
def _seeded(seed: int, epoch: int, generator: Any) -> Iterator[None]:
    import torch

    own = generator if isinstance(generator, torch.Generator) else None
    entropy = [seed, epoch] if own is None else [seed, epoch, own.initial_seed()]
    word = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    kept = None if own is None else own.get_state()
    random.seed(word)
    np.random.seed(word)
    torch.default_generator.manual_seed(word)
    if own is not None:
        own.manual_seed(word)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if own is not None and kept is not None:
            own.set_state(kept)
