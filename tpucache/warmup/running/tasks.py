"""build_chunk and seal_shard: the two tasks of a warmup. Each sample is decoded once, for all its variants."""

from __future__ import annotations

import uuid
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpucache.errors import BuildError, SampleError
from tpucache.store.fields import IMAGE
from tpucache.store.format import shard_name
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.writer import ShardWriter
from tpucache.warmup.planning.blocks import Block, Chunk
from tpucache.warmup.running.consistency import check_clean
from tpucache.warmup.running.context import Job, make_records
from tpucache.warmup.work import chunks as spool
from tpucache.warmup.work.chunks import Note, Spooled
from tpucache.warmup.work.folder import disk_failure
from tpucache.warmup.work.lock import is_held
from tpucache.warmup.work.receipts import SealedShard, save_receipt


@dataclass(frozen=True)
class ChunkDone:
    """What a chunk's task reports: samples kept and skipped, bytes of records, and whether that is the whole chunk."""

    kept: int
    skipped: int
    bytes: int
    whole: bool = True


def build_chunk(job: Job, chunk: Chunk) -> ChunkDone:
    """Decode, presize, augment and encode the samples of a chunk, and spool their records.

    A chunk that the deadline cuts short is spooled as far as it is done, and another call continues there. Raises
    SampleError when a sample cannot be used and errors are not skipped, BuildError when its clean record is not the one
    that the cache has, or when the disk fails.
    """
    note, records = _begun(job, chunk)
    first = len(note.numbers) + len(note.skipped)
    totals = np.array([note.sums, note.squares], np.uint64) if note.sums else np.zeros((2, 3), np.uint64)
    done = first
    for sample in chunk.samples[first:]:
        _check_run(job)
        if job.deadline.is_past:
            break
        done += 1
        try:
            made = make_records(job, sample, chunk.variants)
        except SampleError as error:
            if not job.skip_errors:
                raise
            note.skipped.append(Skipped(sample.number, sample.path, error.reason))
            continue
        if sample.number in chunk.clean:
            check_clean(job, sample, made, chunk.clean[sample.number])
        for variant, record in zip(chunk.variants, made.records, strict=True):
            records[variant].append(record)
        if IMAGE in made.clean:
            totals += _moments(made.clean[IMAGE])
        note.add(sample.number, made.item)
    if job.fields[0].name == IMAGE:
        note.sums[:], note.squares[:] = totals.tolist()
    whole = done == len(chunk.samples)
    spooled = Spooled(
        note,
        {variant: [len(record) for record in parts] for variant, parts in records.items()},
        {variant: [zlib.crc32(record) for record in parts] for variant, parts in records.items()},
    )
    try:
        if whole or done > first:
            spool.save(job.work, chunk.block, chunk.number, spooled, records, whole)
    except OSError as error:
        raise disk_failure(job.work, error) from error
    return ChunkDone(len(note.numbers), len(note.skipped), sum(map(sum, spooled.lengths.values())), whole)


def find_begun(job: Job, chunk: Chunk) -> Spooled | None:
    """Return what an earlier run made of a chunk before its deadline, or None where that cannot be continued."""
    spooled = spool.load(job.work, chunk.block, chunk.number, chunk.variants, whole=False)
    if spooled is None or (spooled.note.skipped and not job.skip_errors):
        return None
    numbers = sorted([*spooled.note.numbers, *(skip.number for skip in spooled.note.skipped)])
    return spooled if numbers == [sample.number for sample in chunk.samples[: len(numbers)]] else None


def _begun(job: Job, chunk: Chunk) -> tuple[Note, dict[int, list[bytes]]]:
    """Return the note and the records, by variant, with which a chunk is to be continued."""
    empty: dict[int, list[bytes]] = {variant: [] for variant in chunk.variants}
    spooled = find_begun(job, chunk)
    if spooled is None:
        return Note(), empty
    records = dict(empty)
    try:
        for variant in chunk.variants:
            read = list(spool.read(job.work, chunk.block, chunk.number, variant, spooled))
            if any(zlib.crc32(record) != crc for _, record, crc in read):  # torn by a power cut
                return Note(), empty
            records[variant] = [record for _, record, _ in read]
    except OSError:
        return Note(), empty
    return spooled.note, records


def seal_shard(job: Job, block: Block, variant: int, chunks: int) -> SealedShard | None:
    """Make the shard of one variant of a block out of its `chunks` spooled chunks, and receipt it.

    Returns None where a chunk does not exist (yet), and at the deadline. Raises BuildError when the disk fails.
    """
    _check_run(job)
    found = [spool.load(job.work, block.number, chunk, block.variants) for chunk in range(chunks)]
    parts = [spooled for spooled in found if spooled is not None]
    if len(parts) != chunks:
        return None
    note = spool.join([spooled.note for spooled in parts])
    name = shard_name(variant, block.number)
    try:
        with ShardWriter(job.work / f"{name}.{uuid.uuid4().hex}") as writer:
            for chunk, spooled in enumerate(parts):
                for number, record, crc in spool.read(job.work, block.number, chunk, variant, spooled):
                    if job.deadline.is_past:
                        return None
                    writer.append(number, record, crc)
            _check_run(job)
            sealed = writer.seal(job.shards / name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_failure(job.work, error) from error
    except BuildError:
        # Torn by a power cut, the chunks would fail for ever; what they were made from is there still.
        spool.remove(job.work, block.number)
        raise
    entry = ShardEntry(
        name=name,
        bytes=sealed.bytes,
        sha256=sealed.sha256,
        variant=variant,
        block=block.number,
        first=0,  # finish.py sets it, once all blocks before this one are known
        records=len(sealed.rows),
        records_sha256=sealed.records_sha256,
    )
    shard = SealedShard(entry, sealed.rows, note)
    save_receipt(job.work, shard)
    return shard


def _check_run(job: Job) -> None:
    """Stop a worker whose run was killed: another one may be working in the same place by now."""
    if not is_held(job.work, job.run):
        raise BuildError(f"the run that this worker builds {job.shards} for is gone")


def _moments(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return each channel's sum and sum of squares, exactly: uint64 (2, channels)."""
    height, _, channels = image.shape
    rows = image.reshape(height, -1)
    # Down the columns numpy adds in steps that a processor does many at once; 2^32 is 66,051 squares of 255.
    columns = [np.add.reduce(rows, 0, np.uint32), np.add.reduce(np.square(rows, dtype=np.uint16), 0, np.uint32)]
    moments: npt.NDArray[np.uint64] = np.stack(columns).reshape(2, -1, channels).sum(1, np.uint64)
    return moments
