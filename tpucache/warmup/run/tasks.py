"""The tasks of a build: build_chunk and seal_shard, or build_block alone. A sample is decoded once for all variants."""

from __future__ import annotations

import functools
import itertools
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from tpucache.errors import BuildError, SampleError
from tpucache.store.cache import Cache
from tpucache.store.fields import IMAGE
from tpucache.store.format import Part, shard_name
from tpucache.store.manifest import ShardEntry, Skipped, value_bytes_of
from tpucache.store.samples import MEAN, STD
from tpucache.store.writer import ShardInfo, ShardWriter, place_shard
from tpucache.types import Array
from tpucache.warmup.blocks import Block, Chunk, content_sha256, parts_of, variants_of
from tpucache.warmup.deadline import NEVER, Deadline
from tpucache.warmup.records.arrays import Facts
from tpucache.warmup.records.encode import EncodedSample, SampleEncoder
from tpucache.warmup.records.frequencies import measure_frequencies
from tpucache.warmup.records.moments import Moments, add_moments, mean_and_std, moments
from tpucache.warmup.run.chunks import (
    IN_SOURCE,
    BuiltShard,
    ChunkInfo,
    KeptSample,
    StoredChunk,
    join_infos,
    load_chunk,
    read_records,
    remove_chunks,
    save_chunk,
    save_receipt,
)
from tpucache.warmup.run.folder import disk_failure, is_held
from tpucache.warmup.sources.ahead import LoadAhead, lateness_of
from tpucache.warmup.sources.source import Sample

#: Just below the largest piece of memory that glibc adapts to.
_LARGEST_PIECE: Final = (32 << 20) - (8 << 10)
#: Bytes of images whose pixels are added up together; one by one, right after its decode, each takes longer.
_ADDED_BYTES: Final = 2 << 20
#: How often a worker looks whether its run is still there: the look takes as long as a small image's resize.
_CHECK_SECONDS: Final = 0.05

_TRIED: Final = 8
#: Where libraries differ, so that rare kinds of files are tried, too.
_TRIED_OF_OTHER_VERSIONS: Final = 64

#: A sample's number -> the CRC-32 of its record of some parts.
Known = Mapping[int, Mapping[Part, int]]


@dataclass(frozen=True)
class BuildContext:
    """What all tasks of a run share. It is pickled to every worker.

    `work` is the work folder, `shards` the folder of finished shards, and `run` the name of the run that holds the work
    folder's lock. No task starts after `deadline`. `other_versions` names the versions that differ from the cache's. A
    hash is kept of the samples with the numbers `compared`, by which another source is noticed.
    """

    encoder: SampleEncoder
    work: Path
    shards: Path
    skip_errors: bool
    run: str
    deadline: Deadline = NEVER
    other_versions: tuple[str, ...] = ()
    compared: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ChunkResult:
    """What building a chunk reports: samples kept and skipped, bytes of records, and whether that is the whole chunk.

    `samples_a_task` is how many samples a task needs at least, as far as the worker knows the storage.
    """

    kept: int
    skipped: int
    bytes: int
    whole: bool = True
    samples_a_task: int = 1


class _Record(NamedTuple):
    """A record that is made, and its checksum."""

    data: bytes
    crc32: int


@dataclass(frozen=True)
class WrittenShard:
    """A verified shard with a temporary name, which `install_shard` moves to its place."""

    aside: Path
    shard: BuiltShard


def load_ahead(context: BuildContext, chunks: Sequence[Chunk]) -> LoadAhead:
    """Return what loads the samples of chunks, ahead of their use where that is worth it."""
    samples = itertools.chain.from_iterable(chunk.samples for chunk in chunks)
    return LoadAhead(context.encoder.load, context.encoder.source, samples, lateness_of(context.work))


def build_chunk(context: BuildContext, chunk: Chunk, items: LoadAhead) -> ChunkResult:
    """Decode, presize, augment and encode the samples of a chunk, and write their records into the work folder.

    A chunk that the deadline cuts short is written as far as it is done, and another call continues there. Raises
    SampleError when a sample cannot be used and errors are not skipped, BuildError when its clean record differs from
    the one that the cache has, or when the disk fails.
    """
    keep_freed_memory()
    info, records = _resume(context, chunk)
    first = len(info.numbers) + len(info.skipped)

    def keep(_number: int, made: Sequence[bytes]) -> None:
        for part, record in zip(chunk.parts, made, strict=True):
            records[part].append(_Record(record, zlib.crc32(record)))

    done = add_samples(context, chunk, first, info, items, keep)
    whole = done == len(chunk.samples)
    if whole or done > first:
        check_run(context)
        _save_chunk(context, chunk, info, records, whole)
    made = sum(len(record.data) for of_part in records.values() for record in of_part)
    return ChunkResult(len(info.numbers), len(info.skipped), made, whole, lateness_of(context.work).samples_a_task)


def build_block(context: BuildContext, chunks: Sequence[Chunk]) -> WrittenShard | None:
    """Make the records of a block with one part and write them straight into its shard, under a temporary name.

    No chunks are written to the disk and read again. Returns None at the deadline. What was done by then, or before a
    sample that cannot be used, is kept as chunks. Raises what `build_chunk` and `write_shard` raise.
    """
    keep_freed_memory()
    (part,) = chunks[0].parts
    infos: list[ChunkInfo] = []
    aside = temporary_shard(context, chunks[0].block, part)
    with ShardWriter(aside, value_bytes_of(context.encoder.fields)) as writer, load_ahead(context, chunks) as items:

        def keep(number: int, made: Sequence[bytes]) -> None:
            writer.append(number, made[0])

        try:
            for chunk in chunks:
                info = ChunkInfo()
                done = add_samples(context, chunk, 0, info, items, keep)
                infos.append(info)
                if done < len(chunk.samples):
                    _keep_chunks(context, chunks, infos, writer)
                    return None
        except SampleError:
            _keep_chunks(context, chunks, infos, writer)
            raise
        check_run(context)
        return written_shard(aside, chunks[0].block, part, writer.finish(), infos)


def _keep_chunks(
    context: BuildContext, chunks: Sequence[Chunk], infos: Sequence[ChunkInfo], writer: ShardWriter
) -> None:
    """Save the samples that a shard has so far, in chunks. The last chunk may be shorter."""
    check_run(context)
    written = writer.records()
    for chunk, info in zip(chunks, infos, strict=False):
        records = {chunk.parts[0]: [_Record(*each) for each in itertools.islice(written, len(info.numbers))]}
        if info.numbers or info.skipped:
            _save_chunk(context, chunk, info, records, whole=info.covers(chunk.samples))


def _save_chunk(
    context: BuildContext, chunk: Chunk, info: ChunkInfo, records: Mapping[Part, Sequence[_Record]], whole: bool
) -> None:
    stored = StoredChunk(
        info,
        {part: [len(record.data) for record in made] for part, made in records.items()},
        {part: [record.crc32 for record in made] for part, made in records.items()},
    )
    data = {part: [record.data for record in made] for part, made in records.items()}
    try:
        save_chunk(context.work, chunk.block, chunk.number, stored, data, whole)
    except OSError as error:
        raise disk_failure(context.work, error) from error


def find_partial_chunk(context: BuildContext, chunk: Chunk) -> StoredChunk | None:
    """Return what an earlier run made of a chunk before its deadline, or None where that cannot be continued."""
    stored = load_chunk(context.work, chunk.block, chunk.number, chunk.parts, whole=False)
    if stored is None or (stored.info.skipped and not context.skip_errors):
        return None
    done = len(stored.info.numbers) + len(stored.info.skipped)
    return stored if stored.info.covers(chunk.samples[:done]) else None


def _resume(context: BuildContext, chunk: Chunk) -> tuple[ChunkInfo, dict[Part, list[_Record]]]:
    """Return the info and the records, by part, with which a chunk is to be continued."""
    empty: dict[Part, list[_Record]] = {part: [] for part in chunk.parts}
    stored = find_partial_chunk(context, chunk)
    if stored is None:
        return ChunkInfo(), empty
    records = dict(empty)
    try:
        for part in chunk.parts:
            read = read_records(context.work, chunk.block, chunk.number, part, stored)
            records[part] = [_Record(record, crc) for _, record, crc in read]
            if any(zlib.crc32(record) != crc for record, crc in records[part]):  # torn by a power cut
                return ChunkInfo(), empty
    except OSError:
        return ChunkInfo(), empty
    return stored.info, records


def seal_shard(context: BuildContext, block: Block, part: Part, chunks: int) -> BuiltShard | None:
    """Write a shard and install it. Returns and raises what `write_shard` does."""
    written = write_shard(context, block, part, chunks)
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


def write_shard(context: BuildContext, block: Block, part: Part, chunks: int) -> WrittenShard | None:
    """Make the shard of one part of a block out of its `chunks` chunks on disk, under a temporary name.

    Returns None where a chunk does not exist (yet), and at the deadline. Raises BuildError when the disk fails.
    """
    check_run(context)
    found = [load_chunk(context.work, block.number, chunk, block.parts) for chunk in range(chunks)]
    made = [stored for stored in found if stored is not None]
    if len(made) != chunks:
        return None
    aside = temporary_shard(context, block.number, part)
    try:
        sealed = _write_records(context, aside, block, part, made)
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
    return written_shard(aside, block.number, part, sealed, [stored.info for stored in made])


def temporary_shard(context: BuildContext, block: int, part: Part) -> Path:
    """Return a name for a shard that is being written, which no other process uses."""
    return context.work / f"{shard_name(part, block)}.{uuid.uuid4().hex}"


def written_shard(aside: Path, block: int, part: Part, sealed: ShardInfo, infos: Sequence[ChunkInfo]) -> WrittenShard:
    """Return a finished shard that has its temporary name."""
    entry = ShardEntry(
        name=shard_name(part, block),
        bytes=sealed.bytes,
        sha256=sealed.sha256,
        variant=part.variant,
        band=part.band,
        block=block,
        first=0,  # set in the manifest, once all blocks before this one are known
        records=len(sealed.rows),
        records_sha256=sealed.records_sha256,
    )
    return WrittenShard(aside, BuiltShard(entry, sealed.rows, join_infos(infos)))


def _write_records(
    context: BuildContext, aside: Path, block: Block, part: Part, chunks: list[StoredChunk]
) -> ShardInfo | None:
    """Write the records of all chunks into a shard; None at the deadline. Raises OSError, BuildError."""
    with ShardWriter(aside, value_bytes_of(context.encoder.fields)) as writer:
        for chunk, stored in enumerate(chunks):
            for number, record, crc in read_records(context.work, block.number, chunk, part, stored):
                if context.deadline.is_past:
                    return None
                writer.append(number, record, crc)
        check_run(context)
        return writer.finish()


def add_samples(
    context: BuildContext,
    chunk: Chunk,
    first: int,
    info: ChunkInfo,
    items: LoadAhead,
    keep: Callable[[int, Sequence[bytes]], None],
) -> int:
    """Add a chunk's samples from the `first` on to `info`; return where the deadline stopped it.

    `items` has what they are made of. `keep` is given each kept sample's number and its records, one each part.
    """
    totals: Moments = (info.sums, info.squares)
    kept: list[KeptSample] = []
    images: list[tuple[Array, Facts]] = []  # whose moments are still to be added
    done, checked = first, -_CHECK_SECONDS
    for sample in chunk.samples[first:]:
        if time.monotonic() - checked >= _CHECK_SECONDS:
            check_run(context)
            checked = time.monotonic()
        if context.deadline.is_past:
            break
        done += 1
        try:
            encoded = context.encoder.encode(sample, chunk.parts, items.load(sample))
        except SampleError as error:
            if not context.skip_errors:
                raise
            info.skipped.append(Skipped(sample.number, sample.path, error.reason))
            info.digests[str(sample.number)] = content_sha256(context.encoder.source, sample)
            continue
        if sample.number in context.compared:
            info.digests[str(sample.number)] = encoded.item.sha256()
            info.frequencies.update(_frequencies(context, sample, encoded))
        if sample.number in chunk.clean:
            check_clean(context, sample, encoded, chunk.clean[sample.number])
        keep(sample.number, encoded.records)
        kept.append(KeptSample(sample.number, encoded.item.label, encoded.item.columns, encoded.facts))
        if IMAGE in encoded.clean:
            images.append((encoded.clean[IMAGE], encoded.facts))
            if len(images) * encoded.clean[IMAGE].nbytes >= _ADDED_BYTES:
                totals = _add_images(totals, images)
        for place, counts in zip((IN_SOURCE, *map(str, variants_of(chunk.parts))), encoded.counts, strict=True):
            info.count(place, counts)
    info.sums[:], info.squares[:] = _add_images(totals, images)
    info.add(kept)
    return done


def _frequencies(context: BuildContext, sample: Sample, encoded: EncodedSample) -> dict[str, list[list[float]]]:
    """Return what frequencies are worth in a sample, by its number, where they are stored apart."""
    fields = [field for field in context.encoder.fields if field.bands is not None]
    return {str(sample.number): measure_frequencies(field, encoded.clean[field.name]) for field in fields}


def _add_images(totals: Moments, images: list[tuple[Array, Facts]]) -> Moments:
    """Return the sums with those of images added, note each one's mean in its facts, and empty the list."""
    for image, facts in images:
        found = moments(image)
        totals = add_moments(totals, found)
        facts[MEAN], facts[STD] = mean_and_std(found, image)
    images.clear()
    return totals


@functools.cache
def keep_freed_memory() -> None:
    """Make this process use freed memory again, rather than give every array back to the system and fetch it anew.

    glibc keeps pieces as large as the largest that it has seen freed. This one is never touched, so it takes no memory.
    """
    bytearray(_LARGEST_PIECE)


def check_run(context: BuildContext) -> None:
    """Stop a worker whose run was killed: another one may be working in the same place by now."""
    if not is_held(context.work, context.run):
        raise BuildError(f"the run that this worker builds {context.shards} for is gone")


def known_records(cache: Cache) -> Known:
    """Return the checksums of some of a finished cache's samples: of the clean variant, and of two augmented ones."""
    manifest = cache.manifest
    positions = np.arange(0, manifest.samples, max(1, manifest.samples // (2 * _TRIED_OF_OTHER_VERSIONS)))
    augmented = manifest.variants[1:]
    parts = parts_of(sorted({*manifest.variants[:1], *augmented[:1], *augmented[-1:]}), manifest.fields)
    checksums = [cache.index[cache.rows(part.variant, positions, part.band)]["crc32"].tolist() for part in parts]
    return {
        number: dict(zip(parts, of_sample, strict=True))
        for number, *of_sample in zip(cache.samples.numbers[positions].tolist(), *checksums, strict=True)
    }


def check_records(context: BuildContext, samples: Sequence[Sample], known: Known) -> None:
    """Encode a few samples again and raise BuildError when their records differ; samples that fail do not count.

    `samples` are by number. One sample of each kind of file is among those tried.
    """
    most = _TRIED_OF_OTHER_VERSIONS if context.other_versions else _TRIED
    numbers = list(known)
    kinds = {Path(samples[number].path).suffix.lower(): number for number in reversed(numbers)}
    for number in sorted({*numbers[:: max(1, len(numbers) // most)][:most], *list(kinds.values())[:most]}):
        checksums = known[number]
        try:
            records = context.encoder.encode(samples[number], list(checksums)).records
        except SampleError:
            continue
        for (part, checksum), record in zip(checksums.items(), records, strict=True):
            if zlib.crc32(record) != checksum:
                raise _difference(context, samples[number], part.variant)


def check_clean(context: BuildContext, sample: Sample, encoded: EncodedSample, checksums: Sequence[int]) -> None:
    """Raise BuildError when the CRC-32 of a sample's clean records are not those that its cache has."""
    if [*map(zlib.crc32, context.encoder.to_records(encoded.clean))] != [*checksums]:
        raise _difference(context, sample, 0)


def _difference(context: BuildContext, sample: Sample, variant: int) -> BuildError:
    what = f"variant {variant}" if variant else "the clean record"
    if context.other_versions:
        why = f"it was made with other versions ({'; '.join(context.other_versions)}): use those"
    elif variant:
        why = "the source or what the augmentation uses changed since, or it is not reproducible: bring both back"
    else:
        why = "its source changed since without changing its size, or code that it uses did: bring it back as it was"
    return BuildError(
        f"{sample.path!r}: {what} comes out as something else than {context.shards} has. So that versions are not "
        f"mixed, nothing is added: {why}, or give another folder to build anew"
    )
