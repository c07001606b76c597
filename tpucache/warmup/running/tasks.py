"""build_chunk and seal_shard: the two tasks of a build. Each sample is decoded once, for all its variants."""

from __future__ import annotations

import functools
import time
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from tpucache.errors import BuildError, SampleError
from tpucache.store.fields import IMAGE
from tpucache.store.format import shard_name
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.writer import ShardInfo, ShardWriter, place_shard
from tpucache.warmup.planning.blocks import Block, Chunk
from tpucache.warmup.records.moments import Moments, add_moments, moments
from tpucache.warmup.running.consistency import check_clean
from tpucache.warmup.running.context import BuildContext
from tpucache.warmup.sources.base import content_sha256
from tpucache.warmup.work.chunks import (
    IN_SOURCE,
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

Array = npt.NDArray[Any]

#: Just below the largest piece of memory that glibc adapts to.
_LARGEST_PIECE: Final = (32 << 20) - (8 << 10)
#: Of images that are added up together: right after its decode, each alone would take longer.
_ADDED_BYTES: Final = 2 << 20
#: How often a worker looks whether its run is still there: the look takes as long as a small image's resize.
_CHECK_SECONDS: Final = 0.05


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk's task reports: samples kept and skipped, bytes of records, and whether that is the whole chunk."""

    kept: int
    skipped: int
    bytes: int
    whole: bool = True


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
    _keep_freed_memory()
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
            _check_run(context)
            save_chunk(context.work, chunk.block, chunk.number, stored, records, whole)
    except OSError as error:
        raise disk_failure(context.work, error) from error
    return ChunkResult(len(info.numbers), len(info.skipped), sum(map(sum, stored.lengths.values())), whole)


def _add_samples(
    context: BuildContext, chunk: Chunk, first: int, info: ChunkInfo, records: dict[int, list[bytes]]
) -> int:
    """Add a chunk's samples from the `first` on to `info` and `records`; return where the deadline stopped it."""
    totals: Moments = (info.sums, info.squares)
    images: list[Array] = []  # whose moments are still to be added
    done, checked = first, -_CHECK_SECONDS
    for sample in chunk.samples[first:]:
        if time.monotonic() - checked >= _CHECK_SECONDS:
            _check_run(context)
            checked = time.monotonic()
        if context.deadline.is_past:
            break
        done += 1
        try:
            encoded = context.encoder.encode(sample, chunk.variants)
        except SampleError as error:
            if not context.skip_errors:
                raise
            info.skipped.append(Skipped(sample.number, sample.path, error.reason))
            info.digests[str(sample.number)] = content_sha256(context.encoder.source, sample)
            continue
        if sample.number in context.compared:
            info.digests[str(sample.number)] = encoded.item.sha256()
        if sample.number in chunk.clean:
            check_clean(context, sample, encoded, chunk.clean[sample.number])
        for variant, record in zip(chunk.variants, encoded.records, strict=True):
            records[variant].append(record)
        if IMAGE in encoded.clean:
            images.append(encoded.clean[IMAGE])
            if len(images) * images[0].nbytes >= _ADDED_BYTES:
                totals = _add_images(totals, images)
        info.add(sample.number, encoded.item)
        for place, counts in zip((IN_SOURCE, *map(str, chunk.variants)), encoded.counts, strict=True):
            info.count(place, counts)
    info.sums[:], info.squares[:] = _add_images(totals, images)
    return done


def _add_images(totals: Moments, images: list[Array]) -> Moments:
    """Return the sums with those of images added, and empty the list."""
    for image in images:
        totals = add_moments(totals, moments(image))
    images.clear()
    return totals


def find_partial_chunk(context: BuildContext, chunk: Chunk) -> StoredChunk | None:
    """Return what an earlier run made of a chunk before its deadline, or None where that cannot be continued."""
    stored = load_chunk(context.work, chunk.block, chunk.number, chunk.variants, whole=False)
    if stored is None or (stored.info.skipped and not context.skip_errors):
        return None
    done = len(stored.info.numbers) + len(stored.info.skipped)
    return stored if stored.info.covers(chunk.samples[:done]) else None


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
    _check_run(context)
    found = [load_chunk(context.work, block.number, chunk, block.variants) for chunk in range(chunks)]
    parts = [stored for stored in found if stored is not None]
    if len(parts) != chunks:
        return None
    aside = context.work / f"{shard_name(variant, block.number)}.{uuid.uuid4().hex}"
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
    return WrittenShard(aside, BuiltShard(entry, sealed.rows, join_infos([stored.info for stored in parts])))


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
        _check_run(context)
        return writer.finish()


@functools.cache
def _keep_freed_memory() -> None:
    """Make this process use freed memory again, rather than give every array back to the system and fetch it anew.

    glibc keeps pieces as large as the largest that it has seen freed. This one is never touched, so it takes no memory.
    """
    bytearray(_LARGEST_PIECE)


def _check_run(context: BuildContext) -> None:
    """Stop a worker whose run was killed: another one may be working in the same place by now."""
    if not is_held(context.work, context.run):
        raise BuildError(f"the run that this worker builds {context.shards} for is gone")
