"""The tables of a finished cache, made again: the index from the shards' pages, the samples table from the source."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError
from tpucache.store import pages
from tpucache.store.files import open_file
from tpucache.store.format import INDEX_DTYPE
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.samples import encode_columns
from tpucache.warmup.running.executor import Executor, Task
from tpucache.warmup.sources.base import Listing, Sample, Source
from tpucache.warmup.tables import encode_index, sample_columns
from tpucache.warmup.work.chunks import ChunkInfo, join_infos

_READ_AT_ONCE: Final = 256

Rows = npt.NDArray[Any]


def rebuild_index(manifest: Manifest, shards: Mapping[str, Path]) -> bytes:
    """Return the index of whole shards, given by name. Raises DamageError when it is not what the manifest says."""
    order = {variant: at for at, variant in enumerate(manifest.variants)}
    numbered = sorted(enumerate(manifest.shards), key=lambda one: (order[one[1].variant], one[1].first))
    runs = [_rows(shards[entry.name], position) for position, entry in numbered]
    data = encode_index(np.concatenate(runs))
    if not _matches(data, manifest.index):
        raise DamageError(
            f"{manifest.index.name} comes out as something else than it was, though all shards are as the manifest "
            "says: build the cache anew in another folder"
        )
    return data


def rebuild_samples(source: Source, manifest: Manifest, listing: Listing, numbers: Rows, executor: Executor) -> bytes:
    """Return the samples table of the kept samples, `numbers` (samples,) of a listing numbered as in the cache.

    The samples are only read when the listing does not have all that the table held. Raises DamageError when the
    table is not what the manifest says, SampleError when a sample cannot be read.
    """
    unread = ChunkInfo(numbers=numbers.tolist(), labels=[None] * len(numbers))
    data = _encode(listing, unread, numbers)
    if _matches(data, manifest.table):
        return data
    kept = [listing.samples[number] for number in numbers.tolist()]
    data = _encode(listing, _read(source, kept, executor), numbers)
    if not _matches(data, manifest.table):
        raise DamageError(
            f"{manifest.table.name} comes out as something else than it was: the samples have other sizes, labels or "
            "columns now. Bring the source back as it was"
        )
    return data


def _rows(path: Path, shard: int) -> Rows:
    """Return the index rows of a shard's records, in key order."""
    with open_file(path) as file:
        extents = list(pages.walk(file))
        rows = np.zeros(len(extents), INDEX_DTYPE)
        for at, extent in enumerate(extents):
            file.seek(extent.offset)
            rows[at] = (extent.offset, extent.length, zlib.crc32(file.read(extent.length)), shard)
    return rows


def _encode(listing: Listing, info: ChunkInfo, numbers: Rows) -> bytes:
    return encode_columns(sample_columns(listing, info, numbers)[0])


def _read(source: Source, samples: Sequence[Sample], executor: Executor) -> ChunkInfo:
    """Return what only the samples themselves state: their labels and columns."""

    def tasks() -> Iterator[Task]:
        for start in range(0, len(samples), _READ_AT_ONCE):
            yield _read_part, (source, samples[start : start + _READ_AT_ONCE])

    infos = sorted(executor.run(tasks()), key=lambda info: info.numbers[0])
    return join_infos(infos)


def _read_part(source: Source, samples: Sequence[Sample]) -> ChunkInfo:
    info = ChunkInfo()
    for sample in samples:
        info.add(sample.number, source.load(sample))
    return info


def _matches(data: bytes, entry: FileEntry) -> bool:
    return hashlib.sha256(data).hexdigest() == entry.sha256
