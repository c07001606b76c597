"""build_chunk and seal_shard: the two tasks of a build. Each sample is decoded once, for all its variants."""

from __future__ import annotations

import uuid
import zlib
from dataclasses import dataclass

from tpucache.errors import BuildError, SampleError
from tpucache.store.fields import IMAGE
from tpucache.store.format import shard_name
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.writer import ShardInfo, ShardWriter
from tpucache.warmup.planning.blocks import Block, Chunk
from tpucache.warmup.records.moments import Moments, add_moments, moments
from tpucache.warmup.running.consistency import check_clean
from tpucache.warmup.running.context import BuildContext
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
from tpucache.warmup.work.lock import is_held
from tpucache.warmup.work.receipts import BuiltShard, save_receipt


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk's task reports: samples kept and skipped, bytes of records, and whether that is the whole chunk."""

    kept: int
    skipped: int
    bytes: int
    whole: bool = True


def build_chunk(context: BuildContext, chunk: Chunk) -> ChunkResult:
    """Decode, presize, augment and encode the samples of a chunk, and write their records into the work folder.

    A chunk that the deadline cuts short is written as far as it is done, and another call continues there. Raises
    SampleError when a sample cannot be used and errors are not skipped, BuildError when its clean record differs from
    the one that the cache has, or when the disk fails.
    """
    info, records = _resume(context, chunk)
    first = len(info.numbers) + len(info.skipped)
    done = _add_samples(context, chunk, first, info, records)
    whole = done == len(chunk.samples)
    stored = StoredChunk(
        info,
        {variant: [len(record) for record in parts] for variant, parts in records.items()},
        {variant: [zlib.crc32(record) for record in parts] for variant, parts in records.items()},
    )
    try:
        if whole or done > first:
            save_chunk(context.work, chunk.block, chunk.number, stored, records, whole)
    except OSError as error:
        raise disk_failure(context.work, error) from error
    return ChunkResult(len(info.numbers), len(info.skipped), sum(map(sum, stored.lengths.values())), whole)


def _add_samples(
    context: BuildContext, chunk: Chunk, first: int, info: ChunkInfo, records: dict[int, list[bytes]]
) -> int:
    """Add a chunk's samples from the `first` on to `info` and `records`; return where the deadline stopped it."""
    totals: Moments = (info.sums, info.squares)
    done = first
    for sample in chunk.samples[first:]:
        _check_run(context)
        if context.deadline.is_past:
            break
        done += 1
        try:
            encoded = context.encoder.encode(sample, chunk.variants)
        except SampleError as error:
            if not context.skip_errors:
                raise
            info.skipped.append(Skipped(sample.number, sample.path, error.reason))
            continue
        if sample.number in chunk.clean:
            check_clean(context, sample, encoded, chunk.clean[sample.number])
        for variant, record in zip(chunk.variants, encoded.records, strict=True):
            records[variant].append(record)
        if IMAGE in encoded.clean:
            totals = add_moments(totals, moments(encoded.clean[IMAGE]))
        info.add(sample.number, encoded.item)
    info.sums[:], info.squares[:] = totals
    return done


def find_partial_chunk(context: BuildContext, chunk: Chunk) -> StoredChunk | None:
    """Return what an earlier run made of a chunk before its deadline, or None where that cannot be continued."""
    stored = load_chunk(context.work, chunk.block, chunk.number, chunk.variants, whole=False)
    if stored is None or (stored.info.skipped and not context.skip_errors):
        return None
    numbers = sorted([*stored.info.numbers, *(skip.number for skip in stored.info.skipped)])
    return stored if numbers == [sample.number for sample in chunk.samples[: len(numbers)]] else None


def _resume(context: BuildContext, chunk: Chunk) -> tuple[ChunkInfo, dict[int, list[bytes]]]:
    """Return the info and the records, by variant, with which a chunk is to be continued."""
    empty: dict[int, list[bytes]] = {variant: [] for variant in chunk.variants}
    stored = find_partial_chunk(context, chunk)
    if stored is None:
        return ChunkInfo(), empty
    records = dict(empty)
    try:
        for variant in chunk.variants:
            read = list(read_records(context.work, chunk.block, chunk.number, variant, stored))
            if any(zlib.crc32(record) != crc for _, record, crc in read):  # torn by a power cut
                return ChunkInfo(), empty
            records[variant] = [record for _, record, _ in read]
    except OSError:
        return ChunkInfo(), empty
    return stored.info, records


def seal_shard(context: BuildContext, block: Block, variant: int, chunks: int) -> BuiltShard | None:
    """Make the shard of one variant of a block out of its `chunks` chunks on disk, and write its receipt.

    Returns None where a chunk does not exist (yet), and at the deadline. Raises BuildError when the disk fails.
    """
    _check_run(context)
    found = [load_chunk(context.work, block.number, chunk, block.variants) for chunk in range(chunks)]
    parts = [stored for stored in found if stored is not None]
    if len(parts) != chunks:
        return None
    try:
        sealed = _write_shard(context, block, variant, parts)
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
    entry = ShardEntry(
        name=shard_name(variant, block.number),
        bytes=sealed.bytes,
        sha256=sealed.sha256,
        variant=variant,
        block=block.number,
        first=0,  # set in the manifest, once all blocks before this one are known
        records=len(sealed.rows),
        records_sha256=sealed.records_sha256,
    )
    shard = BuiltShard(entry, sealed.rows, join_infos([stored.info for stored in parts]))
    save_receipt(context.work, shard)
    return shard


def _write_shard(context: BuildContext, block: Block, variant: int, parts: list[StoredChunk]) -> ShardInfo | None:
    """Write the records of all chunks into a shard; None at the deadline. Raises OSError, BuildError."""
    name = shard_name(variant, block.number)
    with ShardWriter(context.work / f"{name}.{uuid.uuid4().hex}") as writer:
        for chunk, stored in enumerate(parts):
            for number, record, crc in read_records(context.work, block.number, chunk, variant, stored):
                if context.deadline.is_past:
                    return None
                writer.append(number, record, crc)
        _check_run(context)
        return writer.seal(context.shards / name)


def _check_run(context: BuildContext) -> None:
    """Stop a worker whose run was killed: another one may be working in the same place by now."""
    if not is_held(context.work, context.run):
        raise BuildError(f"the run that this worker builds {context.shards} for is gone")
