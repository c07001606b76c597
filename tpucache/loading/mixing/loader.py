"""MixedLoader: batches of one size, mixed from several caches by shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.loading.mixing.samples import MixedOrder, MixedSamples
from tpucache.loading.order import EpochOrder
from tpucache.loading.samples.mixture import Mixture
from tpucache.store.fields import Field


class MixedLoader(CachedLoader):
    """Batches mixed from several loaders: `MixedLoader([loader_a, loader_b], shares=[3, 1])`.

    Of 4 consecutive samples, 3 are of the first and 1 of the second, on any number of ranks. Each cache continues in
    its loader's order (shuffle, seed, weights, …), through as many epochs of its own as its share asks for. An epoch
    of the mixture has as many samples as one epoch of all loaders together, so that a cache with a larger share than
    its size is seen more than once in it, and another less than once.

    The first loader says how many threads read, and how far ahead. State, epochs and batches are as in CachedLoader.
    """

    def __init__(self, loaders: Sequence[CachedLoader], shares: Sequence[int]) -> None:
        """Take loaders of the same batch_size, rank, world_size, drop_last and finish, and a share, from 1, of each.

        The places where the loaders are do not count, and do not move. Raises UsageError for loaders, fields, classes
        or labels that do not fit.
        """
        loaders = list(loaders)
        if not loaders or len(loaders) != len(shares):
            raise UsageError(f"a mixture has one share for each loader, not {len(shares)} for {len(loaders)}")
        for at, loader in enumerate(loaders):
            _check(loaders[0], loader, at)
        first = loaders[0]
        datasets, orders = [loader.dataset for loader in loaders], [loader._order for loader in loaders]
        mixed: Any = MixedSamples(datasets, orders)  # all that a loader asks of a dataset
        self.dataset = mixed
        self._order = EpochOrder(
            "drawn", sampling=MixedOrder(Mixture(shares), datasets, orders, [loader._seed for loader in loaders])
        )
        self.batch_size, self.world_size, self.rank = first.batch_size, first.world_size, first.rank
        self.drop_last, self._seed = first.drop_last, 0
        self._threads, self._prefetch, self._allocate = first._threads, first._prefetch, first._allocate
        self._begin()


def _check(first: CachedLoader, loader: Any, at: int) -> None:
    """Raise UsageError unless a loader's batches can be mixed with those of the first one."""
    if not isinstance(loader, CachedLoader) or isinstance(loader, MixedLoader):
        raise UsageError(f"a mixture is made of CachedLoaders, not of {type(loader).__name__}")
    for name in ("batch_size", "rank", "world_size", "drop_last"):
        if getattr(loader, name) != getattr(first, name):
            raise UsageError(f"loader {at} has {name} {getattr(loader, name)}, loader 0 {getattr(first, name)}")
    one, other = first.dataset, loader.dataset
    if not len(other) or not loader.samples:
        raise UsageError(f"loader {at} has no samples to mix")
    if other.classes != one.classes:
        raise UsageError(
            f"{other.directory} has other classes than {one.directory}, so labels would mean two things: build it with "
            f"`warmup SOURCE CACHE --classes {one.directory}`"
        )
    if _forms(other) != _forms(one):
        raise UsageError(
            f"{other.directory} has records of other fields, sizes or packed forms than {one.directory}: build it with "
            f"`warmup SOURCE CACHE --like {one.directory}`, or leave finish out where only codecs differ"
        )
    labels = [(dataset.labels[:0].dtype, dataset.labels.shape[1:]) for dataset in (one, other)]
    if labels[0] != labels[1]:
        raise UsageError(
            f"{other.directory} has labels of another kind than {one.directory}: use --like {one.directory}"
        )


def _forms(dataset: CachedDataset) -> list[tuple[Any, ...]]:
    """Return what must be equal: the arrays, and where a field is left packed, what it is decoded by."""

    def form(stored: Field, read: Field) -> tuple[Any, ...]:
        return read.name, read.dtype, read.shape, None if read.shape == stored.shape else replace(stored, packing=None)

    return [form(*pair) for pair in zip(dataset.manifest.fields, dataset.record_fields, strict=True)]
