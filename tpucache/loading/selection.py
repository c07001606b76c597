"""Selection: the chosen samples of a cache, in a variant."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from tpucache.errors import UsageError
from tpucache.loading.order import epoch_variants
from tpucache.loading.tensors import Positions, to_positions
from tpucache.native import Array
from tpucache.store.cache import Cache
from tpucache.store.index import Numbers
from tpucache.store.manifest import Manifest, ShardEntry

Variant = int | Literal["epoch"]
#: A function that returns an iterator over the samples that a loader will read next, in order. Each item has an array
#: of indices, their epoch, and the number of consecutive samples that have the same variant.
Windows = Callable[[], Iterator[tuple[Array, int, int]]]

_log: Final = logging.getLogger("tpucache")


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
        if self.variant == "epoch":
            return tuple(variant for variant in self.manifest.variants if variant)
        return (self.variant,)

    @property
    def shards(self) -> list[ShardEntry]:
        used = self.variants
        return sorted((entry for entry in self.manifest.shards if entry.variant in used), key=lambda entry: entry.name)

    @property
    def mean_record_bytes(self) -> int:
        shards = self.shards
        records = sum(entry.records for entry in shards)
        return max(1, sum(entry.bytes for entry in shards) // max(1, records))

    @property
    def positions(self) -> Positions:
        return self.positions_of(np.arange(len(self)))

    def positions_of(self, indices: Positions) -> Positions:
        return indices if self.chosen is None else self.chosen[indices]

    def select(self, indices: Any) -> Selection:
        return replace(self, chosen=self.positions_of(to_positions(indices, len(self))))

    @property
    def records(self) -> int:
        """The number of different records that all epochs together read."""
        samples = self.manifest.samples if self.chosen is None else len(np.unique(self.chosen))
        return samples * len(self.variants)

    def rows(self, cache: Cache, indices: Positions, epoch: int, chunk: int = 1) -> Numbers:
        """Return the index row numbers of the records that these samples have in an epoch: int64 (n,)."""
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
        turns, places = np.divmod(numbers, max(1, self._different))
        positions = places if self._distinct is None else self._distinct[0][places]
        return cache.rows(np.array(self.variants)[turns], positions)

    def digest(self, labels: Array | None) -> str:
        """Return a SHA-256, in hexadecimal, of the variant, fields, classes, shards, labels and positions in order.

        Of each shard, it covers `records_sha256`, which does not depend on the page size of the machine that wrote it,
        the name, the position of the first sample, and the numbers of records and deleted records.
        """
        facts = {
            "variant": self.variant,
            "fields": [field.to_dict() for field in self.manifest.fields],
            "classes": self.manifest.classes,
            "shards": [
                (each.name, each.first, each.records, each.records_sha256, *each.deleted) for each in self.shards
            ],
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for array in (np.empty(0) if labels is None else labels, self.positions):
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@functools.cache
def _warn_only_clean(cache: Path) -> None:
    _log.warning(
        '%s has no augmented variants: variant="epoch" shows the clean images in every epoch. Augment on the device, '
        "or warm up with --variants 4",
        cache,
    )


def to_variant(variant: Any, cache: Cache) -> Variant:
    has = cache.manifest.variants
    if isinstance(variant, str) and variant == "epoch":
        if cache.manifest.augmented:
            return "epoch"
        _warn_only_clean(cache.directory)
        return 0
    if not isinstance(variant, (int, np.integer)) or isinstance(variant, bool) or variant not in has:
        raise UsageError(f'{cache.directory} has variants {has} and "epoch", not {variant!r}')
    return int(variant)
