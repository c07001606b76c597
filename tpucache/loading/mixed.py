"""MixedLoader: batches with samples of several caches, in fixed shares."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import BatchLoader, CachedLoader
from tpucache.loading.order import EpochOrder, Sampling
from tpucache.loading.reading.memory import Buffer, BufferPools
from tpucache.loading.reading.record_reader import Divide, WaysRead, undivided
from tpucache.loading.selection import Windows
from tpucache.loading.tensors import Positions, to_integer, to_tensor
from tpucache.native import Array
from tpucache.store.fields import MASK
from tpucache.store.manifest import differ_in_values, label_options, mask_difference

if TYPE_CHECKING:
    from tpucache.store.reader import NetworkUse

_LONGEST: Final = 1_000_000

Rows = npt.NDArray[np.integer[Any]]


class Mixture:
    """An endless sequence of samples: of every `sum(shares)` samples, `shares[i]` come from source i, spread evenly."""

    def __init__(self, shares: Sequence[Any]) -> None:
        numbers = [to_integer("a share", share, 1) for share in shares]
        divisor = math.gcd(*numbers)
        self.shares = np.array([number // divisor for number in numbers], np.int64)
        if self.shares.sum() > _LONGEST:
            raise UsageError(f"shares add up to at most {_LONGEST:,}, not {self.shares.sum():,}: give smaller shares")
        sources = np.repeat(np.arange(len(numbers)), self.shares)
        turns = np.concatenate([np.arange(share) for share in self.shares])
        order = np.lexsort([sources, (turns + 0.5) / self.shares[sources]])
        self._sources, self._turns = sources[order], turns[order]

    def sources(self, first: int, stop: int) -> tuple[Positions, Positions]:
        """Return, for the samples from `first` to `stop`, the source of each and its number within this source."""
        rounds, places = np.divmod(np.arange(first, stop), len(self._sources))
        sources = self._sources[places]
        return sources, rounds * self.shares[sources] + self._turns[places]


class BufferRows(Buffer):
    """A view of some rows of a buffer."""

    def __init__(self, buffer: Buffer, rows: npt.NDArray[np.int64]) -> None:
        self.arrays, self.lengths, self.is_large = buffer.arrays, buffer.lengths, buffer.is_large
        self.starts = [starts[rows] for starts in buffer.starts]
        self._buffer, self._rows = buffer, rows

    def views(self, rows: Rows) -> list[list[memoryview]]:
        return self._buffer.views(self._rows[rows])

    def parts(self, rows: Rows) -> npt.NDArray[np.int64]:
        return self._buffer.parts(self._rows[rows])

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._rows[rows]


class MixedSamples:
    """The samples of several datasets. With n of them together, index i stands for sample i % n in epoch i // n."""

    def __init__(self, datasets: Sequence[CachedDataset], orders: Sequence[EpochOrder]) -> None:
        first = datasets[0]
        self._datasets, self._shared = datasets, [order.shared for order in orders]
        self._ends = np.cumsum([len(dataset) for dataset in datasets])
        self.names, self.manifest, self.record_fields = first.names, first.manifest, first.record_fields

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def buffer_pools(self) -> BufferPools:
        return self._datasets[0].buffer_pools

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join(dataset.digest for dataset in self._datasets).encode()).hexdigest()

    @property
    def label_scale(self) -> tuple[Array, Array] | None:
        return self._datasets[0].label_scale

    def read_into(self, buffer: Buffer, indices: Array, epoch: int, chunk: int, divide: Divide) -> WaysRead:
        ways = [
            self._datasets[at].read_into(BufferRows(buffer, rows), own, turn, self._shared[at], divide)
            for at, rows, own, turn in self._parts(indices)
        ]
        return WaysRead(*map(sum, zip(*ways, strict=True)))

    @property
    def maps(self) -> Counter[str]:
        return sum((Counter(dataset.maps) for dataset in self._datasets), Counter[str]())

    @property
    def networks(self) -> list[NetworkUse]:
        return [use for dataset in self._datasets for use in dataset.networks]

    def prepare(self, threads: int) -> None:
        for dataset in self._datasets:
            dataset.prepare(threads)

    @property
    def is_late(self) -> bool:
        return any(dataset.is_late for dataset in self._datasets)

    def expect(self, owner: object, windows: Windows) -> None:
        def of(at: int) -> Iterator[tuple[Array, int, int]]:
            for indices, _, _ in windows():
                yield from ((own, turn, self._shared[at]) for to, _, own, turn in self._parts(indices) if to == at)

        for at, dataset in enumerate(self._datasets):
            dataset.expect(owner, functools.partial(of, at))

    def hint(self, indices: Array, epoch: int, chunk: int) -> None:
        for at, _, own, turn in self._parts(indices):
            self._datasets[at].hint(own, turn, self._shared[at])

    def to_batch(self, arrays: Sequence[Array], indices: Array) -> Any:
        first = self._datasets[0]
        values = {name: np.asarray(value) for name, value in first.values_of(np.arange(0)).items()}
        joined = {name: np.empty((len(indices), *value.shape[1:]), value.dtype) for name, value in values.items()}
        for at, rows, own, _ in self._parts(indices):
            for name, value in self._datasets[at].values_of(own).items():
                joined[name][rows] = np.asarray(value)
        return first.join(arrays, {name: to_tensor(value) for name, value in joined.items()})

    @property
    def records(self) -> int:
        return sum(dataset.records for dataset in self._datasets)

    def record_numbers(self, indices: Array, epoch: int, chunk: int) -> Positions:
        numbers = np.empty(len(indices), np.int64)
        for at, rows, own, turn in self._parts(indices):
            numbers[rows] = self._first_records[at] + self._datasets[at].record_numbers(own, turn, self._shared[at])
        return numbers

    def record_indices(self, numbers: Array) -> Positions:
        indices = np.empty(len(numbers), np.int64)
        for at, rows, own in self._record_parts(numbers):
            first = self._ends[at] - len(self._datasets[at])
            indices[rows] = first + self._datasets[at].record_indices(own)
        return indices

    def read_records(self, buffer: Buffer, numbers: Array, divide: Divide = undivided) -> WaysRead:
        ways = [
            self._datasets[at].read_records(BufferRows(buffer, rows), own, divide)
            for at, rows, own in self._record_parts(numbers)
        ]
        return WaysRead(*map(sum, zip(*ways, strict=True)))

    @functools.cached_property
    def _first_records(self) -> Positions:
        counts = np.array([dataset.records for dataset in self._datasets])
        firsts: Positions = np.cumsum(counts) - counts
        return firsts

    def _record_parts(self, numbers: Array) -> Iterator[tuple[int, Positions, Positions]]:
        firsts = self._first_records
        sources = np.searchsorted(firsts, numbers, "right") - 1
        for at in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == at)
            yield at, rows, numbers[rows] - firsts[at]

    def _parts(self, indices: Array) -> Iterator[tuple[int, Positions, Positions, int]]:
        turns, places = np.divmod(indices, len(self))
        sources = np.searchsorted(self._ends, places, "right")
        for turn in np.unique(turns).tolist():
            for at in range(len(self._datasets)):
                rows = np.flatnonzero((turns == turn) & (sources == at))
                if len(rows):
                    yield at, rows, places[rows] - (self._ends[at] - len(self._datasets[at])), turn


class MixedOrder(Sampling):
    """The order of a mixture's epochs. Each dataset continues in its own order, through epochs of its own."""

    def __init__(
        self, mixture: Mixture, datasets: Sequence[CachedDataset], orders: Sequence[EpochOrder], seeds: Sequence[int]
    ) -> None:
        self._mixture, self._orders, self._seeds = mixture, orders, seeds
        self._sizes = [len(dataset) for dataset in datasets]
        self._lengths = [order.length(size) for order, size in zip(orders, self._sizes, strict=True)]
        each = [f"{order.text} {order.chunk} seed {seed}" for order, seed in zip(orders, seeds, strict=True)]
        self.text = f"mixed {mixture.shares.tolist()} of {each}"

    def __len__(self) -> int:
        return sum(self._lengths)

    def positions(self, seed: int, epoch: int) -> Positions:
        sources, turns = self._mixture.sources(epoch * len(self), (epoch + 1) * len(self))
        found = np.empty(len(self), np.int64)
        total, start = sum(self._sizes), 0
        for at, (order, size, length) in enumerate(zip(self._orders, self._sizes, self._lengths, strict=True)):
            rows = np.flatnonzero(sources == at)
            epochs, places = np.divmod(turns[rows], length)
            bounds = np.flatnonzero(np.diff(epochs, prepend=-1))
            for first, stop in zip(bounds, [*bounds[1:], len(rows)], strict=True):
                turn = int(epochs[first])
                own = order.positions(size, self._seeds[at], turn)
                found[rows[first:stop]] = turn * total + start + own[places[first:stop]]
            start += size
        return found

    def digest(self, seed: int, epoch: int) -> str:
        if not any(order.digest(own, 0) for order, own in zip(self._orders, self._seeds, strict=True)):
            return ""
        return hashlib.sha256(self.positions(seed, epoch).astype("<i8").tobytes()).hexdigest()


class MixedLoader(BatchLoader[MixedSamples]):
    """Batches mixed from several loaders: `MixedLoader([loader_a, loader_b], shares=[3, 1])`.

    Of 4 consecutive samples, 3 come from the first loader and 1 from the second, on any number of ranks. Each cache
    continues in its loader's order (shuffle, seed, weights, …), through epochs of its own. An epoch of the mixture has
    as many samples as one epoch of all loaders together, so it may read a small cache several times, and a large one
    only in part.

    `threads` and `prefetch` of the first loader apply. If the loaders have `augment`, `normalise` or `device`, batches
    are finished with the statistics of the first cache, by random numbers of seed 0 and the step. State, epochs and
    batches are as for CachedLoader.
    """

    def __init__(self, loaders: Sequence[CachedLoader], shares: Sequence[int]) -> None:
        """Mix loaders by their shares, integers from 1.

        The loaders need the same batch_size, rank, world_size, drop_last, reiterate, finish, augment, normalise and
        device. Their own positions are ignored, and do not move. Raises UsageError if loaders, fields, classes or
        labels do not fit together.
        """
        loaders = list(loaders)
        if not loaders or len(loaders) != len(shares):
            raise UsageError(f"a mixture has one share for each loader, not {len(shares)} shares for {len(loaders)}")
        for at, loader in enumerate(loaders):
            _check(loaders[0], loader, at)
        first = loaders[0]
        datasets, orders = [loader.dataset for loader in loaders], [loader.order for loader in loaders]
        seeds = [loader.seed for loader in loaders]
        order = EpochOrder("drawn", sampling=MixedOrder(Mixture(shares), datasets, orders, seeds))
        super().__init__(MixedSamples(datasets, orders), order, replace(first.options, seed=0))


def _check(first: CachedLoader, loader: Any, at: int) -> None:
    if not isinstance(loader, CachedLoader) or isinstance(loader, MixedLoader):
        raise UsageError(f"a mixture is made of CachedLoaders, not of {type(loader).__name__}")
    for name in ("batch_size", "rank", "world_size", "drop_last", "reiterate"):
        own, expected = getattr(loader.options, name), getattr(first.options, name)
        if own != expected:
            raise UsageError(f"loader {at} has {name} {own}, loader 0 {expected}: give all loaders the same")
    if loader.options.finishing != first.options.finishing:
        raise UsageError(f"loader {at} has another augment, normalise or device than loader 0: give loaders the same")
    if loader.options.finishing is not None and loader.options.finishing.size is not None:
        raise UsageError(f"loader {at} has a size, and a mixture makes crops of the images' size: leave size out")
    one, other = first.dataset, loader.dataset
    if not len(other) or not loader.samples:
        raise UsageError(f"loader {at} has no samples to mix")
    if other.classes != one.classes:
        raise UsageError(
            f"{other.directory} has other classes than {one.directory}, so a label would mean two classes: build it "
            f"with `warmup SOURCE CACHE --classes {one.directory}`"
        )
    if _forms(other) != _forms(one):
        raise UsageError(
            f"{other.directory} has records of other fields, sizes or packed forms than {one.directory}: build it with "
            f"`warmup SOURCE CACHE --like {one.directory}`, or leave finish out if only codecs differ"
        )
    if one.column_width != other.column_width:
        raise UsageError(
            f"{other.directory} has {other.column_width} columns as input, and {one.directory} has {one.column_width}: "
            "give both the same columns"
        )
    _check_labels(one, other)


def _check_labels(one: CachedDataset, other: CachedDataset) -> None:
    labels = [(dataset.labels[:0].dtype, dataset.labels.shape[1:]) for dataset in (one, other)]
    if labels[0] != labels[1]:
        raise UsageError(
            f"{other.directory} has labels of another kind than {one.directory}: build it with "
            f"`warmup SOURCE CACHE --like {one.directory}`"
        )
    names = [dataset.manifest.value_names for dataset in (one, other)]
    if differ_in_values(*names):
        raise UsageError(
            f"the labels of {other.directory} are the columns {', '.join(names[1])}, those of {one.directory} "
            f"{', '.join(names[0])}: relabel {other.directory} with {label_options(names[0])}"
        )
    if MASK in one.names and (difference := mask_difference(one.manifest, other.manifest)):
        raise UsageError(
            f"the masks of {other.directory} have other classes than those of {one.directory}: {difference}"
        )
    if one.label_form != other.label_form:
        raise UsageError(
            f"{other.directory} gives labels as {other.label_form}, and {one.directory} as {one.label_form}: give both "
            "caches soft labels (`relabel --soft-labels`, with_soft_labels), or the same mean and deviation, or neither"
        )


def _forms(dataset: CachedDataset) -> list[tuple[Any, ...]]:
    """Return, for each field, what must be equal in all datasets of a mixture."""
    return [
        (read.name, read.dtype, read.shape, None if read.shape == stored.shape else stored)
        for stored, read in zip(dataset.manifest.fields, dataset.record_fields, strict=True)
    ]
