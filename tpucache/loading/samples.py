"""Samples: the interface that a loader needs, and Selection, which samples of a cache to show, in which variant."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.loading.indices import Positions, to_positions
from tpucache.loading.reading.buffers import Buffer, BufferPools
from tpucache.loading.reading.record_reader import Divide, WaysRead
from tpucache.loading.sampler import epoch_variants
from tpucache.store.cache import Cache
from tpucache.store.fields import Field
from tpucache.store.index import Numbers
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.types import Array

if TYPE_CHECKING:
    from tpucache.store.arriving import NetworkUse

Variant = int | Literal["epoch"]
#: Gives what will be read, in its order: indices, the epoch, and how many consecutive samples share a variant.
Windows = Callable[[], Iterator[tuple[Array, int, int]]]

_log: Final = logging.getLogger("tpucache")


class Samples(Protocol):
    """What a loader reads: samples by their indices from 0, and the records of each epoch.

    `manifest` describes classes and fields; with samples of several caches it is the manifest of the first.
    """

    manifest: Manifest

    @property
    def names(self) -> list[str]:
        """The names of a record's fields, in order."""
        ...

    @property
    def record_fields(self) -> tuple[Field, ...]:
        """The fields of a record as they are read: dtype and shape of each array of a sample."""
        ...

    @property
    def buffer_pools(self) -> BufferPools:
        """The buffers of batches, which all loaders of these samples share."""
        ...

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that decides the samples and their order."""
        ...

    def prepare(self, threads: int) -> None:
        """Prepare for a loader that reads with this number of threads."""
        ...

    def expect(self, owner: object, windows: Windows, further: Windows | None = None) -> None:
        """Say what an owner will read, far ahead and in its order.

        `further` gives the same again and later epochs, where the owner does not read all samples in each.
        """
        ...

    def hint(self, indices: Array, epoch: int, chunk: int) -> None:
        """Ask the kernel to have these samples in memory when they are read."""
        ...

    @property
    def maps(self) -> Mapping[str, int]:
        """How many shards are mapped, by the way, and how many are not, by the reason."""
        ...

    @property
    def networks(self) -> list[NetworkUse]:
        """What was read over the network from each cache at a URL."""
        ...

    def read_into(self, buffer: Buffer, indices: Array, epoch: int, chunk: int, divide: Divide) -> WaysRead:
        """Read samples into the first rows of a buffer; several threads may call this, with a buffer each.

        `chunk` consecutive samples share a variant of an epoch; `divide` may let several threads do the work. Returns
        where their records were.
        """
        ...

    def to_batch(self, arrays: Sequence[Array], indices: Array) -> Any:
        """Return the batch that users see, of the samples whose fields were read into `arrays`."""
        ...

    @property
    def records(self) -> int:
        """How many different records may be shown, in all epochs: they are numbered from 0."""
        ...

    def record_numbers(self, indices: Array, epoch: int, chunk: int) -> Positions:
        """Return the numbers of the records that samples show in an epoch; `chunk` is as in `read_into`."""
        ...

    def record_indices(self, numbers: Array) -> Positions:
        """Return for each record the index of a sample that shows it."""
        ...

    def read_records(self, buffer: Buffer, numbers: Array, divide: Divide = ...) -> WaysRead:
        """Read records, given by their numbers, into the first rows of a buffer, as `read_into` reads samples."""
        ...


@dataclass(frozen=True, eq=False)
class Selection:
    """Samples of a cache in an order, each shown in one variant, or in another one each epoch.

    `chosen` are the samples' positions in the cache; None means all of them, in its order.
    """

    manifest: Manifest
    variant: Variant
    chosen: Positions | None = None

    def __len__(self) -> int:
        return self.manifest.samples if self.chosen is None else len(self.chosen)

    @property
    def variants(self) -> tuple[int, ...]:
        """The variants in use, ascending."""
        if self.variant == "epoch":
            return tuple(variant for variant in self.manifest.variants if variant)
        return (self.variant,)

    @property
    def shards(self) -> list[ShardEntry]:
        """The shards of the variants and bands in use, in the order of their names."""
        used, bands = self.variants, len(self.manifest.layouts)
        shards = (entry for entry in self.manifest.shards if entry.variant in used and entry.band < bands)
        return sorted(shards, key=lambda entry: entry.name)

    @property
    def mean_record_bytes(self) -> int:
        """Bytes a record takes on disk, on average over the variants in use."""
        shards = self.shards
        records = sum(entry.records for entry in shards if not entry.band)
        return max(1, sum(entry.bytes for entry in shards) // max(1, records))

    @property
    def positions(self) -> Positions:
        """Where in the cache each sample is: int64 (n,)."""
        return self.positions_of(np.arange(len(self)))

    def positions_of(self, indices: Positions) -> Positions:
        """Return where in the cache some of the samples are, given by whole numbers from 0: int64 (n,)."""
        return indices if self.chosen is None else self.chosen[indices]

    def select(self, indices: Any) -> Selection:
        """Return a selection of these samples of this one, as `to_positions` takes them."""
        return replace(self, chosen=self.positions_of(to_positions(indices, len(self))))

    @property
    def records(self) -> int:
        """How many different records may be shown."""
        samples = self.manifest.samples if self.chosen is None else len(np.unique(self.chosen))
        return samples * len(self.variants)

    def rows(self, cache: Cache, indices: Positions, epoch: int, chunk: int = 1) -> Numbers:
        """Return the index's rows of the records that some of the samples show in an epoch.

        In "epoch", samples show variants by their position in the cache, or, with a `chunk` above 1, each `chunk` of
        consecutive samples of the selection shows one.
        """
        positions = self.positions_of(indices)
        if self.variant != "epoch":
            return cache.rows(self.variant, positions)
        return cache.rows(np.array(self.variants)[self._turns(indices, epoch, chunk)], positions)

    def _turns(self, indices: Positions, epoch: int, chunk: int) -> Positions:
        """Return which of the variants in use each sample shows in an epoch."""
        if self.variant != "epoch":
            return np.zeros(len(indices), np.int64)
        turns = self.positions_of(indices) if chunk == 1 else indices // chunk
        return epoch_variants(turns, epoch, len(self.variants)) - 1

    @functools.cached_property
    def _distinct(self) -> tuple[Positions, Positions, Positions] | None:
        """The different positions of chosen samples, ascending, the first index that has each, and the place among them
        of each index; None for all samples.
        """
        return None if self.chosen is None else np.unique(self.chosen, return_index=True, return_inverse=True)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_distinct"}  # it is large

    @property
    def _different(self) -> int:
        return self.manifest.samples if self._distinct is None else len(self._distinct[0])

    def record_numbers(self, indices: Positions, epoch: int, chunk: int = 1) -> Positions:
        """Return the numbers, from 0 to below `records`, of the records that some of the samples show in an epoch."""
        places = indices if self._distinct is None else self._distinct[2][indices]
        return self._turns(indices, epoch, chunk) * self._different + places

    def record_indices(self, numbers: Positions) -> Positions:
        """Return for each record, given by its number, the index of a sample that shows it."""
        places = numbers % max(1, self._different)
        return places if self._distinct is None else self._distinct[1][places]

    def rows_of_records(self, cache: Cache, numbers: Positions) -> Numbers:
        """Return the index's rows of records, given by their numbers."""
        turns, places = np.divmod(numbers, max(1, self._different))
        positions = places if self._distinct is None else self._distinct[0][places]
        return cache.rows(np.array(self.variants)[turns], positions)

    def digest(self, labels: Array | None) -> str:
        """Return a SHA-256, in hexadecimal, of the records, the labels of the whole cache, and the order."""
        return digest_of(self.manifest, self.variant, self.shards, labels, self.positions)


@functools.cache
def _say_only_clean(cache: Path) -> None:
    _log.warning(
        '%s has no augmented variants: variant="epoch" shows the clean images in every epoch. Augment on the device, '
        "or warm up with --variants 4",
        cache,
    )


def to_variant(variant: Any, cache: Cache) -> Variant:
    """Return a variant of a cache, a whole number, or "epoch" where it has augmented ones. Raises UsageError.

    "epoch" is the clean one where there are no others, and that is logged once.
    """
    has = cache.manifest.variants
    if isinstance(variant, str) and variant == "epoch":
        if cache.manifest.augmented:
            return "epoch"
        _say_only_clean(cache.directory)
        return 0
    if not isinstance(variant, (int, np.integer)) or isinstance(variant, bool) or variant not in has:
        raise UsageError(f'{cache.directory} has variants {has} and "epoch", not {variant!r}')
    return int(variant)


def digest_of(
    manifest: Manifest,
    variant: int | str,
    shards: Iterable[ShardEntry],
    labels: Array | None,
    positions: npt.NDArray[np.int64],
) -> str:
    """Return a SHA-256, in hexadecimal, of the records in these shards, the labels, and the positions in their order.

    Records count by their own hash, so that the page size of the machine that wrote a shard does not matter.
    """
    facts = {
        "variant": variant,
        "fields": [field.to_dict() for field in manifest.fields],
        "classes": manifest.classes,
        "shards": [(entry.name, entry.first, entry.records, entry.records_sha256, *entry.deleted) for entry in shards],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for array in (np.empty(0) if labels is None else labels, positions):
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
