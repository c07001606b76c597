"""MixedSamples: the samples of several datasets, numbered one dataset after the other, for a loader to read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.loading.dataset import CachedDataset
from tpucache.loading.mixing.rows import BufferRows
from tpucache.loading.order import EpochOrder
from tpucache.loading.records.buffers import Buffer
from tpucache.loading.records.reader import Divide
from tpucache.loading.samples.mixture import Mixture
from tpucache.loading.samples.sampler import Positions
from tpucache.loading.tensors import to_tensor

Array = npt.NDArray[Any]


class MixedSamples:
    """What a loader asks of a dataset, for several. An index counts the samples of all datasets, once for each epoch.

    Index i is of the epoch i // n of a dataset, n samples in all, and there of the sample i % n.
    """

    def __init__(self, datasets: Sequence[CachedDataset], orders: Sequence[EpochOrder]) -> None:
        first = datasets[0]
        self._datasets, self._shared = datasets, [order.shared for order in orders]
        self._ends = np.cumsum([len(dataset) for dataset in datasets])
        self.names, self.manifest, self.buffer_pools = first.names, first.manifest, first.buffer_pools
        self.record_fields = first.record_fields
        self.as_tensor, self.pack = first.as_tensor, first.pack

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the datasets' digests."""
        return hashlib.sha256(" ".join(dataset.digest for dataset in self._datasets).encode()).hexdigest()

    def read_into(self, buffer: Buffer, indices: Array, epoch: int, chunk: int, divide: Divide) -> None:
        """Read samples into the first rows of a buffer; epochs and chunks are those of each dataset."""
        for at, rows, own, turn in self._parts(indices):
            self._datasets[at].read_into(BufferRows(buffer, rows), own, turn, self._shared[at], divide)

    def prepare(self, threads: int) -> None:
        """Make reading ready, as CachedDataset does."""
        for dataset in self._datasets:
            dataset.prepare(threads)

    def hint(self, indices: Array, epoch: int, chunk: int) -> None:
        """Ask the kernel to have these samples in memory when they are read."""
        for at, _, own, turn in self._parts(indices):
            self._datasets[at].hint(own, turn, self._shared[at])

    def labels_of(self, indices: Array) -> Any:
        """Return the labels of samples, as CachedDataset does."""
        labels: Array | None = None
        for at, rows, own, _ in self._parts(indices):
            part = np.asarray(self._datasets[at].labels_of(own))
            labels = np.empty((len(indices), *part.shape[1:]), part.dtype) if labels is None else labels
            labels[rows] = part
        return to_tensor(np.empty(0, np.int64) if labels is None else labels)

    def _parts(self, indices: Array) -> Iterator[tuple[int, Positions, Positions, int]]:
        """Yield the dataset, the rows, the dataset's own indices and its epoch, for each part that shares them."""
        turns, places = np.divmod(indices, len(self))
        sources = np.searchsorted(self._ends, places, "right")
        for turn in np.unique(turns).tolist():
            for at in range(len(self._datasets)):
                rows = np.flatnonzero((turns == turn) & (sources == at))
                if len(rows):
                    yield at, rows, places[rows] - (self._ends[at] - len(self._datasets[at])), turn


class MixedOrder:
    """The order of a mixture's epochs: each dataset continues in its own order, epoch after epoch of its own."""

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
        """Return the indices of an epoch's samples among MixedSamples: int64 (n,). The seeds are the loaders' own."""
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
        """Return a SHA-256 of an epoch's order where a torch Sampler gives a part of it, else ""."""
        if not any(order.digest(own, 0) for order, own in zip(self._orders, self._seeds, strict=True)):
            return ""
        return hashlib.sha256(self.positions(seed, epoch).astype("<i8").tobytes()).hexdigest()
