"""Samples: what a loader needs from a dataset. Selection: the chosen samples of a cache, in a variant."""

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
from tpucache.loading.order import epoch_variants
from tpucache.loading.reading.buffers import Buffer, BufferPools
from tpucache.loading.reading.record_reader import Divide, WaysRead
from tpucache.loading.tensors import Positions, to_positions
from tpucache.native import Array
from tpucache.store.cache import Cache
from tpucache.store.fields import Field
from tpucache.store.index import Numbers
from tpucache.store.manifest import Manifest, ShardEntry

if TYPE_CHECKING:
    from tpucache.store.reader import NetworkUse

Variant = int | Literal["epoch"]
#: A function that returns an iterator over the samples that a loader will read next, in order. Each item has an array
#: of indices, their epoch, and the number of consecutive samples that have the same variant.
Windows = Callable[[], Iterator[tuple[Array, int, int]]]

_log: Final = logging.getLogger("tpucache")


class Samples(Protocol):
    """The interface through which a loader reads samples by their indices, or records by their numbers.

    `manifest` describes classes and fields. For samples of several caches, it is the manifest of the first cache.
    """

    manifest: Manifest

    @property
    def names(self) -> list[str]:
        """The names of a record's fields, in order."""
        ...

    @property
    def record_fields(self) -> tuple[Field, ...]:
        """The fields of a record, with the dtype and shape that each has when it is read."""
        ...

    @property
    def buffer_pools(self) -> BufferPools:
        """The batch buffers, which all loaders of these samples share."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of everything that decides the samples and their order."""
        ...

    @property
    def label_scale(self) -> tuple[Array, Array] | None:
        """The means and deviations that labels are standardised by in batches; None if they are as stored."""
        ...

    def prepare(self, threads: int) -> None:
        """Map shards, or read the first records into memory, for a loader with this many threads."""
        ...

    @property
    def is_late(self) -> bool:
        """Whether the storage takes long to answer, as a network mount does."""
        ...

    def expect(self, owner: object, windows: Windows) -> None:
        """Announce the samples that the loader `owner` will read, in order: `windows()` yields them (see `Windows`)."""
        ...

    def hint(self, indices: Array, epoch: int, chunk: int) -> None:
        """Ask the kernel to read these samples' records from the disk ahead."""
        ...

    @property
    def maps(self) -> Mapping[str, int]:
        """The number of mapped shards by method, and of other shards by the reason why they are not mapped."""
        ...

    @property
    def networks(self) -> list[NetworkUse]:
        """The network traffic of each cache at a URL."""
        ...

    def read_into(self, buffer: Buffer, indices: Array, epoch: int, chunk: int, divide: Divide) -> WaysRead:
        """Read samples into the first rows of a buffer. Threads may call this, each with its own buffer.

        With variant="epoch", every `chunk` consecutive samples have the same variant. `divide` may share the work among
        threads. Returns how many records were read from memory, maps and files.
        """
        ...

    def to_batch(self, arrays: Sequence[Array], indices: Array) -> Any:
        """Make the batch that users get: the fields in `arrays` with the labels, and any columns, of these samples."""
        ...

    @property
    def records(self) -> int:
        """The number of different records that all epochs together read. They are numbered from 0."""
        ...

    def record_numbers(self, indices: Array, epoch: int, chunk: int) -> Positions:
        """Return the numbers of the samples' records in an epoch. `chunk` has the same meaning as in `read_into`."""
        ...

    def record_indices(self, numbers: Array) -> Positions:
        """Return, for each record, the index of a sample with this record."""
        ...

    def read_records(self, buffer: Buffer, numbers: Array, divide: Divide = ...) -> WaysRead:
        """Read records by their numbers into the first rows of a buffer.

        `divide` and the result are the same as for `read_into`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Selection:
    """Some samples of a cache, in an order, and their variant: a number, or "epoch" for another variant in each epoch.

    `chosen` has the samples' positions in the cache; None means all samples, in the cache's order.
    """

    manifest: Manifest
    variant: Variant
    chosen: Positions | None = None

    def __len__(self) -> int:
        return self.manifest.samples if self.chosen is None else len(self.chosen)

    @property
    def variants(self) -> tuple[int, ...]:
        """The variants that are read, ascending."""
        if self.variant == "epoch":
            return tuple(variant for variant in self.manifest.variants if variant)
        return (self.variant,)

    @property
    def shards(self) -> list[ShardEntry]:
        """The shards of the variants that are read, sorted by name."""
        used = self.variants
        return sorted((entry for entry in self.manifest.shards if entry.variant in used), key=lambda entry: entry.name)

    @property
    def mean_record_bytes(self) -> int:
        """The mean size of a record on disk in bytes, over the variants that are read."""
        shards = self.shards
        records = sum(entry.records for entry in shards)
        return max(1, sum(entry.bytes for entry in shards) // max(1, records))

    @property
    def positions(self) -> Positions:
        """The position of each sample in the cache: int64 (n,)."""
        return self.positions_of(np.arange(len(self)))

    def positions_of(self, indices: Positions) -> Positions:
        """Return the positions in the cache of the samples with these indices: int64 (n,)."""
        return indices if self.chosen is None else self.chosen[indices]

    def select(self, indices: Any) -> Selection:
        """Return a selection of some of these samples. `indices` is anything that `to_positions` accepts."""
        return replace(self, chosen=self.positions_of(to_positions(indices, len(self))))

    @property
    def records(self) -> int:
        """The number of different records that all epochs together read."""
        samples = self.manifest.samples if self.chosen is None else len(np.unique(self.chosen))
        return samples * len(self.variants)

    def rows(self, cache: Cache, indices: Positions, epoch: int, chunk: int = 1) -> Numbers:
        """Return the index row numbers of the records that these samples have in an epoch: int64 (n,).

        With variant "epoch", a sample's variant follows from the sample's position in the cache. If `chunk` is above 1,
        the variant follows from the sample's index instead: samples with equal `index // chunk` have the same variant.
        """
        positions = self.positions_of(indices)
        if self.variant != "epoch":
            return cache.rows(self.variant, positions)
        return cache.rows(np.array(self.variants)[self._turns(indices, epoch, chunk)], positions)

    def _turns(self, indices: Positions, epoch: int, chunk: int) -> Positions:
        """Return each sample's variant in an epoch, as a position in `variants`."""
        if self.variant != "epoch":
            return np.zeros(len(indices), np.int64)
        turns = self.positions_of(indices) if chunk == 1 else indices // chunk
        return epoch_variants(turns, epoch, len(self.variants)) - 1

    @functools.cached_property
    def _distinct(self) -> tuple[Positions, Positions, Positions] | None:
        return None if self.chosen is None else np.unique(self.chosen, return_index=True, return_inverse=True)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_distinct"}  # it is large

    @property
    def _different(self) -> int:
        return self.manifest.samples if self._distinct is None else len(self._distinct[0])

    def record_numbers(self, indices: Positions, epoch: int, chunk: int = 1) -> Positions:
        """Return the numbers, below `records`, of the samples' records in an epoch."""
        places = indices if self._distinct is None else self._distinct[2][indices]
        return self._turns(indices, epoch, chunk) * self._different + places

    def record_indices(self, numbers: Positions) -> Positions:
        """Return, for each record number, the index of a sample with this record."""
        places = numbers % max(1, self._different)
        return places if self._distinct is None else self._distinct[1][places]

    def rows_of_records(self, cache: Cache, numbers: Positions) -> Numbers:
        """Return the index row numbers of the records with the record numbers `numbers`: int64 (n,)."""
        turns, places = np.divmod(numbers, max(1, self._different))
        positions = places if self._distinct is None else self._distinct[0][places]
        return cache.rows(np.array(self.variants)[turns], positions)

    def digest(self, labels: Array | None) -> str:
        """Return a SHA-256, in hexadecimal, of the records, of `labels`, and of the samples' positions in order."""
        return digest_of(self.manifest, self.variant, self.shards, labels, self.positions)


@functools.cache
def _warn_only_clean(cache: Path) -> None:
    _log.warning(
        '%s has no augmented variants: variant="epoch" shows the clean images in every epoch. Augment on the device, '
        "or warm up with --variants 4",
        cache,
    )


def to_variant(variant: Any, cache: Cache) -> Variant:
    """Return a variant, a number or "epoch", if the cache has it. Raises UsageError otherwise.

    For a cache without augmented variants, "epoch" becomes 0, the clean variant, and a warning is logged once.
    """
    has = cache.manifest.variants
    if isinstance(variant, str) and variant == "epoch":
        if cache.manifest.augmented:
            return "epoch"
        _warn_only_clean(cache.directory)
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
    """Return a SHA-256, in hexadecimal, of the variant, fields, classes, shards, labels and positions in order.

    Of each shard, the digest covers the name, the position of the first sample, the number of records, the deleted
    records, and `records_sha256`, which does not depend on the page size of the machine that wrote the shard.
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
