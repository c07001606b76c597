"""Cache: a finished cache, opened. Only here is it known in which order the index lists the records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.store.index import Numbers, RecordIndex, Rows
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.reader import ShardReader
from tpucache.store.samples import SampleTable


class Cache:
    """A cache's folder and manifest, and its index, samples table and reader, each opened when it is first used.

    Threads may share one. A pickled copy opens the index and the shards again in the process that uses them. Files
    close when nothing refers to the cache, its index or its reader any more.
    """

    def __init__(self, directory: str | Path, manifest: Manifest) -> None:
        """Take a cache whose manifest is read already; nothing is opened."""
        self.directory = Path(directory)
        self.manifest = manifest
        self._variants = np.array(manifest.variants, np.int64)
        self._index: RecordIndex | None = None
        self._samples: SampleTable | None = None
        self._reader: ShardReader | None = None

    @classmethod
    def open(cls, directory: str | Path) -> Cache:
        """Read a cache's manifest; nothing else is opened. Raises what `Manifest.load` raises."""
        return cls(directory, Manifest.load(directory))

    # Two threads may both open one of these, and both are right.
    @property
    def index(self) -> RecordIndex:
        """Where each record lies. Raises DamageError, FormatError or StoreError when it cannot be opened."""
        if self._index is None:
            self._index = RecordIndex(self.directory, self.manifest)
        return self._index

    @property
    def samples(self) -> SampleTable:
        """The table of the samples. Raises DamageError or FormatError when it cannot be opened."""
        if self._samples is None:
            table = self.manifest.table
            path, classes = self.directory / table.name, len(self.manifest.classes)
            self._samples = SampleTable(path, self.manifest.samples, table.sha256, classes)
        return self._samples

    @property
    def reader(self) -> ShardReader:
        """What reads records by their rows of the index; a shard is opened when a record of it is read."""
        if self._reader is None:
            self._reader = ShardReader(self.directory, self.manifest.shards)
        return self._reader

    def rows(self, variant: int | npt.NDArray[Any], positions: npt.ArrayLike) -> Numbers:
        """Return the numbers of the index's rows for samples in a variant, or each in a variant of its own.

        `positions` are whole numbers of any shape, from 0 to below the manifest's `samples`; `variant` is one variant
        number, or one for each position. Raises UsageError for a variant that the cache does not have.
        """
        positions = np.asarray(positions, np.int64)
        if isinstance(variant, int) and variant in self.manifest.variants:  # of one variant, as most batches are
            return self.manifest.variants.index(variant) * self.manifest.samples + positions
        places = np.searchsorted(self._variants, variant)
        if not np.array_equal(self._variants[np.minimum(places, len(self._variants) - 1)], variant):
            raise UsageError(f"{self.directory} has variants {self.manifest.variants}, not {variant}")
        rows: Numbers = places * self.manifest.samples + positions
        return rows

    def rows_of(self, shard: ShardEntry) -> Numbers:
        """Return the numbers of the index's rows for the records of a shard, in the order of their keys."""
        return self.rows(shard.variant, np.arange(shard.first, shard.first + shard.records))

    def index_of(self, shard: ShardEntry) -> Rows:
        """Return the rows of a shard's records: INDEX_DTYPE (records,), in the order of their keys."""
        return self.index[self.rows_of(shard)]


def annotation_counts(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Return how many boxes, keypoints and masks the `source` has, and each variant by its number, by field.

    Nothing where a manifest does not say so, or has something else in its place.
    """
    saved = manifest.source.get("annotations")
    fields = saved.items() if isinstance(saved, dict) else ()
    return {
        name: {place: count for place, count in places.items() if type(count) is int and count >= 0}
        for name, places in fields
        if isinstance(places, dict)
    }


def cache_fingerprint(recipe_fingerprint: str, shards: Sequence[ShardEntry]) -> str:
    """Return a hash of the recipe and the clean records: the same for equal contents wherever they were built."""
    digest = hashlib.sha256(recipe_fingerprint.encode())
    for entry in sorted(shards, key=lambda entry: entry.block):
        if entry.variant == 0:
            digest.update(bytes.fromhex(entry.records_sha256))
    return digest.hexdigest()
