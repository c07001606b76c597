"""merge_shards: the shards of a cache with the records of retried samples among them, beside the cache's own."""

from __future__ import annotations

import dataclasses
import heapq
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError
from tpucache.store.cache import Cache
from tpucache.store.files import link_or_copy
from tpucache.store.format import shard_name
from tpucache.store.manifest import ShardEntry
from tpucache.store.reader import ShardReader
from tpucache.store.writer import ShardWriter
from tpucache.warmup.planning.retrying import new_block_numbers
from tpucache.warmup.work.chunks import ChunkInfo
from tpucache.warmup.work.receipts import BuiltShard

Rows = npt.NDArray[Any]
Record = tuple[int, bytes | bytearray, int]

_log: Final = logging.getLogger("tpucache")


def merge_shards(cache: Cache, retried: Sequence[BuiltShard], work: Path) -> list[BuiltShard]:
    """Write all shards of a cache under new block numbers, with the retried samples in the order of their numbers.

    `retried` are the shards of those samples alone, which lie in `work` and have the new numbers. The cache's own
    shards stay as they are, and one to which nothing is added gets a second name. Raises DamageError for a record that
    is not what the index says, BuildError or OSError when the disk fails.
    """
    added = {shard.entry.name: shard for shard in retried if shard.entry.records}
    numbers = new_block_numbers(cache.manifest)
    merged, are_links = [], True
    for entry in cache.manifest.shards:
        block = numbers[entry.block]
        renamed = dataclasses.replace(entry, name=shard_name(entry.variant, block), block=block)
        target, aside = cache.directory / renamed.name, work / f"{renamed.name}.tmp"
        if renamed.name in added:
            merged.append(_merge(cache, entry, renamed, added[renamed.name], work, aside))
            continue
        are_links &= link_or_copy(cache.directory / entry.name, target, aside)
        merged.append(BuiltShard(renamed, cache.index_of(entry), ChunkInfo()))
    if not are_links:
        _log.warning("%s is on a disk without hard links: shards that stay as they are were copied", cache.directory)
    return merged


def _merge(
    cache: Cache, entry: ShardEntry, renamed: ShardEntry, retried: BuiltShard, work: Path, aside: Path
) -> BuiltShard:
    numbers = cache.samples.numbers[entry.first : entry.first + entry.records]
    before = _records(cache.reader, cache.index_of(entry), numbers.tolist(), entry.name)
    new = ShardReader(work, [retried.entry])
    added = _records(new, retried.rows, retried.info.numbers, retried.entry.name)
    with ShardWriter(aside) as writer:
        for number, record, crc in heapq.merge(before, added, key=lambda record: record[0]):
            writer.append(number, bytes(record), crc)
        sealed = writer.seal(cache.directory / renamed.name)
    whole = dataclasses.replace(
        renamed,
        bytes=sealed.bytes,
        sha256=sealed.sha256,
        records=len(sealed.rows),
        records_sha256=sealed.records_sha256,
    )
    return BuiltShard(whole, sealed.rows, ChunkInfo())


def _records(reader: ShardReader, rows: Rows, numbers: Iterable[int], name: str) -> Iterator[Record]:
    """Yield (sample number, record, CRC-32) of a shard's rows. Raises DamageError."""
    for row, number in zip(np.atleast_1d(rows), numbers, strict=True):
        record, crc = reader.read(row), int(row["crc32"])
        if zlib.crc32(record) != crc:
            raise DamageError(
                f"{name}: the record of sample {number} is not what the index says. Run `python -m tpucache verify` "
                "with --repair SOURCE, then the same command again"
            )
        yield number, record, crc
