"""The tasks of a build: build_chunk and seal_shard, or build_block alone. A sample is decoded once for all variants."""

from __future__ import annotations

import itertools
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpucache.errors import BuildError, SampleError
from tpucache.store.format import shard_name
from tpucache.store.manifest import ShardEntry
from tpucache.store.writer import ShardInfo, ShardWriter, place_shard
from tpucache.warmup.planning.blocks import Block, Chunk
from tpucache.warmup.running.context import BuildContext
from tpucache.warmup.running.samples import add_samples, check_run, keep_freed_memory
from tpucache.warmup.work.chunks import (
    ChunkInfo,
    StoredChunk,
    join_infos,
    load_chunk,
    read_records,
    remove_chunks,
    save_chunk,
)
from tpucache.warmup.work.folder import disk_failure
from tpucache.warmup.work.receipts import BuiltShard, save_receipt


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk's task reports: samples kept and skipped, bytes of records, and whether that is the whole chunk."""

    kept: int
    skipped: int
    bytes: int
    whole: bool = True


class _Record(NamedTuple):
    """A record that is made, and its checksum."""

    data: bytes
    crc32: int


@dataclass(frozen=True)
class WrittenShard:
    """A shard that is verified and has its temporary name: what `install_shard` gives its place to."""

    aside: Path
    shard: BuiltShard


def build_chunk(context: BuildContext, chunk: Chunk) -> ChunkResult:
    """Decode, presize, augment and encode the samples of a chunk, and write their records into the work folder.

    A chunk that the deadline cuts short is written as far as it is done, and another call continues there. Raises
    SampleError when a sample cannot be used and errors are not skipped, BuildError when its clean record differs from
    the one that the cache has, or when the disk fails.
    """
    keep_freed_memory()
    info, records = _resume(context, chunk)
    first = len(info.numbers) + len(info.skipped)

    def keep(_number: int, made: Sequence[bytes]) -> None:
        for variant, record in zip(chunk.variants, made, strict=True):
            records[variant].append(_Record(record, zlib.crc32(record)))

    done = add_samples(context, chunk, first, info, keep)
    whole = done == len(chunk.samples)
    if whole or done > first:
        check_run(context)
        _save_chunk(context, chunk, info, records, whole)
    made = sum(len(record.data) for of_variant in records.values() for record in of_variant)
    return ChunkResult(len(info.numbers), len(info.skipped), made, whole)


def build_block(context: BuildContext, chunks: Sequence[Chunk]) -> WrittenShard | None:
    """Make the records of a block with one variant and write them straight into its shard, under a temporary name.

    That saves what its chunks on disk would cost: each record is written once and read once. Returns None at the
    deadline. What was done by then, or before a sample that cannot be used, is kept as chunks. Raises what
    `build_chunk` and `write_shard` do.
    """
    keep_freed_memory()
    (variant,) = chunks[0].variants
    infos: list[ChunkInfo] = []
    aside = _temporary(context, chunks[0].block, variant)
    with ShardWriter(aside) as writer:

        def keep(number: int, made: Sequence[bytes]) -> None:
            writer.append(number, made[0])

        try:
            for chunk in chunks:
                info = ChunkInfo()
                done = add_samples(context, chunk, 0, info, keep)
                infos.append(info)
                if done < len(chunk.samples):
                    _keep_chunks(context, chunks, infos, writer)
                    return None
        except SampleError:
            _keep_chunks(context, chunks, infos, writer)
            raise
        check_run(context)
        return _written(aside, chunks[0].block, variant, writer.finish(), infos)


def _keep_chunks(
    context: BuildContext, chunks: Sequence[Chunk], infos: Sequence[ChunkInfo], writer: ShardWriter
) -> None:
    """Save the samples that a shard has so far as chunks; the last of them may not be whole."""
    check_run(context)
    written = writer.records()
    for chunk, info in zip(chunks, infos, strict=False):
        records = {chunk.variants[0]: [_Record(*each) for each in itertools.islice(written, len(info.numbers))]}
        if info.numbers or info.skipped:
            _save_chunk(context, chunk, info, records, whole=info.covers(chunk.samples))


def _save_chunk(
    context: BuildContext, chunk: Chunk, info: ChunkInfo, records: Mapping[int, Sequence[_Record]], whole: bool
) -> None:
    stored = StoredChunk(
        info,
        {variant: [len(record.data) for record in made] for variant, made in records.items()},
        {variant: [record.crc32 for record in made] for variant, made in records.items()},
    )
    parts = {variant: [record.data for record in made] for variant, made in records.items()}
    try:
        save_chunk(context.work, chunk.block, chunk.number, stored, parts, whole)
    except OSError as error:
        raise disk_failure(context.work, error) from error


def find_partial_chunk(context: BuildContext, chunk: Chunk) -> StoredChunk | None:
    """Return what an earlier run made of a chunk before its deadline, or None where that cannot be continued."""
    stored = load_chunk(context.work, chunk.block, chunk.number, chunk.variants, whole=False)
    if stored is None or (stored.info.skipped and not context.skip_errors):
        return None
    done = len(stored.info.numbers) + len(stored.info.skipped)
    return stored if stored.info.covers(chunk.samples[:done]) else None


def _resume(context: BuildContext, chunk: Chunk) -> tuple[ChunkInfo, dict[int, list[_Record]]]:
    """Return the info and the records, by variant, with which a chunk is to be continued."""
    empty: dict[int, list[_Record]] = {variant: [] for variant in chunk.variants}
    stored = find_partial_chunk(context, chunk)
    if stored is None:
        return ChunkInfo(), empty
    records = dict(empty)
    try:
        for variant in chunk.variants:
            read = read_records(context.work, chunk.block, chunk.number, variant, stored)
            records[variant] = [_Record(record, crc) for _, record, crc in read]
            if any(zlib.crc32(record) != crc for record, crc in records[variant]):  # torn by a power cut
                return ChunkInfo(), empty
    except OSError:
        return ChunkInfo(), empty
    return stored.info, records


def seal_shard(context: BuildContext, block: Block, variant: int, chunks: int) -> BuiltShard | None:
    """Write a shard and install it. Returns and raises what `write_shard` does."""
    written = write_shard(context, block, variant, chunks)
    return None if written is None else install_shard(context, written)


def install_shard(context: BuildContext, written: WrittenShard) -> BuiltShard:
    """Sync a shard, give it its name and write its receipt. Raises BuildError when the disk fails."""
    target = context.shards / written.shard.entry.name
    try:
        place_shard(written.aside, target)
    except OSError as error:
        raise disk_failure(target, error) from error
    save_receipt(context.work, written.shard)
    return written.shard


def write_shard(context: BuildContext, block: Block, variant: int, chunks: int) -> WrittenShard | None:
    """Make the shard of one variant of a block out of its `chunks` chunks on disk, under a temporary name.

    Returns None where a chunk does not exist (yet), and at the deadline. Raises BuildError when the disk fails.
    """
    check_run(context)
    found = [load_chunk(context.work, block.number, chunk, block.variants) for chunk in range(chunks)]
    parts = [stored for stored in found if stored is not None]
    if len(parts) != chunks:
        return None
    aside = _temporary(context, block.number, variant)
    try:
        sealed = _write_records(context, aside, block, variant, parts)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_failure(context.work, error) from error
    except BuildError:
        # Chunks torn by a power cut would fail for ever; what they were made from still exists.
        remove_chunks(context.work, block.number)
        raise
    if sealed is None:
        return None
    return _written(aside, block.number, variant, sealed, [stored.info for stored in parts])


def _temporary(context: BuildContext, block: int, variant: int) -> Path:
    return context.work / f"{shard_name(variant, block)}.{uuid.uuid4().hex}"


def _written(aside: Path, block: int, variant: int, sealed: ShardInfo, infos: Sequence[ChunkInfo]) -> WrittenShard:
    entry = ShardEntry(
        name=shard_name(variant, block),
        bytes=sealed.bytes,
        sha256=sealed.sha256,
        variant=variant,
        block=block,
        first=0,  # set in the manifest, once all blocks before this one are known
        records=len(sealed.rows),
        records_sha256=sealed.records_sha256,
    )
    return WrittenShard(aside, BuiltShard(entry, sealed.rows, join_infos(infos)))


def _write_records(
    context: BuildContext, aside: Path, block: Block, variant: int, parts: list[StoredChunk]
) -> ShardInfo | None:
    """Write the records of all chunks into a shard; None at the deadline. Raises OSError, BuildError."""
    with ShardWriter(aside) as writer:
        for chunk, stored in enumerate(parts):
            for number, record, crc in read_records(context.work, block.number, chunk, variant, stored):
                if context.deadline.is_past:
                    return None
                writer.append(number, record, crc)
        check_run(context)
        return writer.finish()
