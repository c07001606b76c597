"""Cache: a finished cache that is open for reading. Only this file knows the order of the records in the index."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache import machine
from tpucache.errors import DamageError, UsageError
from tpucache.native import Array
from tpucache.store.codecs import CODECS
from tpucache.store.fields import RecordLayout
from tpucache.store.files import is_late
from tpucache.store.history import OpenVersion, one_version, read_times, split_version, versions_before
from tpucache.store.index import Numbers, RecordIndex, Rows
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.reader import ShardReader
from tpucache.store.samples import SampleTable

_BATCH_BYTES: Final = 4 << 20
#: Answers of the storage until a manifest is read: that the file exists, that it is open, and what is in it.
_ANSWERS: Final = 3
_COLOURS: Final = 3  # channels of a colour image


class Cache:
    """An open cache: its folder and manifest. The index, samples table and reader are opened on first use.

    Threads may share a Cache. A pickled copy opens its files again. Files close when nothing refers to the cache, its
    index or its reader any more.
    """

    def __init__(self, directory: str | Path, manifest: Manifest, opened: OpenVersion | None = None) -> None:
        self.directory = Path(directory)
        self.manifest = manifest
        self._check = None if opened is None else opened.check
        #: The seconds that the storage took for each answer when the manifest was read; 0 if it answered at once.
        self.latency = 0.0
        self._asked: int | None = None
        self._variants = np.array(manifest.variants, np.int64)
        self._index: RecordIndex | None = None
        self._samples: SampleTable | None = None
        self._reader: ShardReader | None = None

    @classmethod
    def open(cls, directory: str | Path, version: int | None = None) -> Cache:
        """Open the cache in the folder `directory`: read its manifest, and no other file."""
        folder, number = split_version(directory)
        number = one_version(version, number, str(directory))
        began, waits = time.monotonic(), machine.waits()
        opened = OpenVersion(Path(folder), number)
        cache = cls(folder, opened.manifest, opened)
        if machine.waits() - waits > 1:  # else it was computing, or another process had the core
            cache.latency = (time.monotonic() - began) / _ANSWERS
        cache._asked = number
        return cache

    @property
    def place(self) -> str:
        """The folder or URL for messages, with the version that the user asked for."""
        return str(self.directory) if self._asked is None else f"{self.directory}@{self._asked}"

    def versions(self) -> tuple[list[Manifest], dict[str, str]]:
        return [*versions_before(self.directory, self.manifest), self.manifest], read_times(self.directory)

    #: Whether the cache was opened before its build was finished.
    is_growing = False
    #: Whether `open_or_build` opened the cache. Training then decides nothing by what only a finished cache knows, so
    #: that a run is the same whether the build ended before it or not.
    may_be_growing = False

    @property
    def is_finished(self) -> bool:
        return True

    @property
    def built(self) -> float:
        """The fraction of the records that are built."""
        return 1.0

    def wait(self) -> Cache:
        """Return the finished cache: this one. A GrowingCache waits for it."""
        return self

    # Two threads may open the same file at once: either result may be kept.
    @property
    def index(self) -> RecordIndex:
        if self._index is None:
            self._index = RecordIndex(self.directory, self.manifest, self._check)
        return self._index

    @property
    def samples(self) -> SampleTable:
        if self._samples is None:
            table = self.manifest.table
            path, classes = self.directory / table.name, len(self.manifest.classes)
            self._samples = SampleTable(path, self.manifest.samples, table.sha256, classes)
        return self._samples

    def open_tables(self) -> None:
        """Open the index and the samples table, in parallel if the storage is slow."""
        if is_late(self.latency):
            from tpucache.store.ahead import Threads  # not needed for local files

            with Threads(1, "tpucache-open") as other:
                opening = other.submit(lambda: self.index)
                self.samples  # noqa: B018
            opening.result()
        self.samples  # noqa: B018
        self.index  # noqa: B018

    @property
    def reader(self) -> ShardReader:
        if self._reader is None:
            self._reader = ShardReader(self.directory, self.manifest.shards, self._check, self.latency)
        return self._reader

    def rows(self, variant: int | Array, positions: npt.ArrayLike) -> Numbers:
        """Return the index row numbers of the records of some samples."""
        positions = np.asarray(positions, np.int64)
        if isinstance(variant, int) and variant in self.manifest.variants:  # most batches have a single variant
            return self.manifest.variants.index(variant) * self.manifest.samples + positions
        places = np.searchsorted(self._variants, variant)
        if not np.array_equal(self._variants[np.minimum(places, len(self._variants) - 1)], variant):
            raise UsageError(f"{self.directory} has variants {self.manifest.variants}, not {variant}")
        rows: Numbers = places * self.manifest.samples + positions
        return rows

    def rows_of(self, shard: ShardEntry) -> Numbers:
        """Return the index row numbers of a shard's records, int64 (records,), in the order of the samples."""
        return self.rows(shard.variant, np.arange(shard.first, shard.first + shard.records))

    def index_of(self, shard: ShardEntry) -> Rows:
        return self.index[self.rows_of(shard)]


def annotation_counts(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Return how many boxes, keypoints and masks a cache has, as {field: {where: count}}."""
    saved = manifest.source.get("annotations")
    fields = saved.items() if isinstance(saved, dict) else ()
    return {
        name: {place: count for place, count in places.items() if type(count) is int and count >= 0}
        for name, places in fields
        if isinstance(places, dict)
    }


def cache_fingerprint(recipe_fingerprint: str, shards: Sequence[ShardEntry]) -> str:
    """Return the SHA-256, in hexadecimal, of the recipe's fingerprint and the clean records."""
    digest = hashlib.sha256(recipe_fingerprint.encode())
    for entry in sorted(shards, key=lambda entry: entry.block):
        if entry.variant == 0:
            digest.update(bytes.fromhex(entry.records_sha256))
            if entry.deleted:
                digest.update(np.array(entry.deleted, "<u8").tobytes())
    return digest.hexdigest()


def field_batches(cache: Cache, numbers: Numbers, name: str) -> Iterator[Array]:
    field_bytes = max([field.nbytes for field in cache.manifest.fields if field.name == name], default=1)
    count = max(1, _BATCH_BYTES // max(1, field_bytes))
    for start in range(0, len(numbers), count):
        yield read_field(cache, numbers[start : start + count], name)


def read_field(cache: Cache, numbers: Numbers, name: str) -> Array:
    """Return the field `name` of the records with these index row numbers: (n, *shape) of the field's dtype."""
    place = _place(cache, name)
    field = cache.manifest.fields[place]
    out = np.empty((len(numbers), *field.shape), field.dtype)
    if field.is_plain:
        parts = _parts(cache.reader, cache.manifest.layout, cache.index[numbers], place)
        flat = out.reshape(len(parts), -1).view(np.uint8)
        cache.reader.scatter(parts, [[row.data] for row in flat], are_whole=False)
        return out
    codec = CODECS[field.codec]
    for target, encoded in zip(out, _encoded(cache, numbers, place), strict=True):
        codec.decode_into(field, encoded, target)
    return out


def read_luma(cache: Cache, numbers: Numbers, name: str, least: int) -> Array:
    """Return the luma (brightness) of the image field `name` of these records: uint8 (n, height, width, 1).

    Height and width are halved if that is cheaper, both are even, and both halves have at least `least` pixels. Images
    without colours, and those of codecs that cannot decode luma alone, are returned as by `read_field`.
    """
    place = _place(cache, name)
    field = cache.manifest.fields[place]
    codec = CODECS[field.codec]
    if not (codec.has_luma and field.shape[-1] == _COLOURS):
        return read_field(cache, numbers, name)
    height, width, _ = field.shape
    is_even = height % 2 == width % 2 == 0
    step = 2 if codec.has_half_luma and is_even and min(height, width) >= 2 * least else 1
    out = np.empty((len(numbers), height // step, width // step), np.uint8)
    codec.decode_luma(field, _encoded(cache, numbers, place), out)
    return out[..., None]


def _place(cache: Cache, name: str) -> int:
    names = [field.name for field in cache.manifest.layout.fields]
    if name not in names:
        raise UsageError(f"the records of {cache.directory} have no field {name!r}: give one of {', '.join(names)}")
    return names.index(name)


def _encoded(cache: Cache, numbers: Numbers, place: int) -> list[memoryview]:
    parts = _parts(cache.reader, cache.manifest.layout, cache.index[numbers], place)
    return [memoryview(data) for data in _read(cache.reader, parts)]


def _parts(reader: ShardReader, layout: RecordLayout, rows: Rows, place: int) -> Rows:
    """Return a copy of `rows` that points only at the field at position `place` of each record."""
    spans = _spans(reader, layout, rows, place)
    parts: Rows = rows.copy()
    parts["offset"] += spans[:, 0].astype(rows.dtype["offset"])
    parts["length"] = spans[:, 1] - spans[:, 0]
    return parts


def _spans(reader: ShardReader, layout: RecordLayout, rows: Array, place: int) -> npt.NDArray[np.int64]:
    """Return where a field starts and ends in each record, in bytes: int64 (rows, 2)."""
    if not layout.is_plain:
        headers = rows.copy()
        headers["length"] = np.minimum(rows["length"], layout.header_bytes)
        lengths = rows["length"].tolist()
        spans = []
        for header, length, shard in zip(_read(reader, headers), lengths, rows["shard"].tolist(), strict=True):
            try:
                spans.append(layout.spans(memoryview(header), length)[place])
            except DamageError as error:
                raise DamageError(f"{reader.path(shard)} is damaged: {error}. Copy the cache again") from error
        return np.array(spans, np.int64).reshape(-1, 2)
    if np.any(rows["length"] != layout.nbytes):
        raise DamageError(f"the index lists records that do not have {layout.nbytes:,} bytes: copy the cache again")
    start = sum(field.nbytes for field in layout.fields[:place])
    return np.tile(np.array([start, start + layout.fields[place].nbytes], np.int64), (len(rows), 1))


def _read(reader: ShardReader, rows: Array) -> Sequence[bytearray]:
    buffers = [bytearray(length) for length in rows["length"].tolist()]
    reader.scatter(rows, [[memoryview(buffer)] for buffer in buffers], are_whole=False)
    return buffers
