"""The tasks of a build: build_samples and then seal_block. A task decodes each sample once."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from tpucache.errors import BuildError, SampleError
from tpucache.native import Array
from tpucache.store.ahead import Lateness
from tpucache.store.cache import Cache
from tpucache.store.fields import IMAGE
from tpucache.store.format import shard_name
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.samples import MEAN, STD
from tpucache.store.writer import ShardWriter, place_shard
from tpucache.warmup.blocks import TASK_BYTES, Block, content_sha256
from tpucache.warmup.build_options import NEVER, Deadline
from tpucache.warmup.records.arrays import Facts
from tpucache.warmup.records.encode import Moments, SampleEncoder, add_moments, mean_and_std, moments
from tpucache.warmup.run.folder import disk_failure, is_held
from tpucache.warmup.run.spool import (
    IN_SOURCE,
    BuiltShard,
    ChunkInfo,
    KeptSample,
    Log,
    Spooled,
    Unwritten,
    read_spool,
    save_receipt,
    write_spool,
)
from tpucache.warmup.sources.source import LoadAhead, Sample, lateness_of

#: Just below glibc's largest value for its dynamic mmap threshold: see `keep_freed_memory`.
_LARGEST_PIECE: Final = (32 << 20) - (8 << 10)
#: The pixels of images of this total size are added up together, which is faster than one image at a time.
_ADDED_BYTES: Final = 2 << 20
#: The least time between two checks that the run is alive. A check takes as long as resizing a small image.
_CHECK_SECONDS: Final = 0.05
#: The time of this process's last such check, by the token of the run. It has the newest run only.
_checked: dict[str, float] = {}
#: The loader that this process keeps between two tasks, by the token of the run; at most one.
_kept: dict[str, LoadAhead] = {}

_TRIED: Final = 8
#: The number of compared samples if library versions differ: more, so that rare kinds of files are compared, too.
_TRIED_OF_OTHER_VERSIONS: Final = 64
_COMPARE_SECONDS: Final = 1.0

#: The CRC-32 of some records, by sample number and variant.
Known = Mapping[int, Mapping[int, int]]


@dataclass(frozen=True)
class BuildContext:
    """The settings that all tasks of a run share. They are pickled to every worker.

    `build` is the identity of the build, `run` the token of the run's lock, `work` the work folder, and `shards` the
    folder of finished shards. `other_versions` describes the library versions that differ from the cache's. The samples
    with the numbers `compared` get a content hash, by which later runs notice another source. `latency` is the time in
    seconds that the storage took to deliver the first sample. `is_followed` says that processes may read the records
    meanwhile.
    """

    encoder: SampleEncoder
    work: Path
    shards: Path
    skip_errors: bool
    run: str
    deadline: Deadline = NEVER
    other_versions: tuple[str, ...] = ()
    compared: frozenset[int] = frozenset()
    latency: float = 0.0
    is_followed: bool = False
    build: str = ""

    @property
    def log(self) -> Log:
        return Log(self.work, self.build, self.is_followed)

    @property
    def lateness(self) -> Lateness:
        return lateness_of(self.work, self.latency)


class Made(NamedTuple):
    """The result of a task. `is_whole` says whether it built all its samples.

    `samples_a_task` is how many samples a task should have, given the storage's delay that the worker has measured.
    """

    groups: list[Spooled]
    is_whole: bool
    samples_a_task: int


@dataclass(frozen=True)
class WrittenShard:
    """A verified shard with a temporary name, `aside`. `install_shard` gives it its final name."""

    aside: Path
    shard: BuiltShard


@contextlib.contextmanager
def load_ahead(context: BuildContext, blocks: Sequence[Block], then: Sequence[Sample] = ()) -> Iterator[LoadAhead]:
    """Yield a loader of the blocks' samples, which reads ahead if the storage is slow to answer."""
    items = _kept.pop(context.run, None)
    end_loading()
    samples = [*itertools.chain.from_iterable(block.samples for block in blocks), *then]
    if items is None:
        items = LoadAhead(context.encoder.load, context.encoder.source, samples, context.lateness)
    else:
        items.follow(samples)
    try:
        yield items
    except BaseException:
        items.close()
        raise
    if then:
        _kept[context.run] = items
    else:
        items.close()


def end_loading() -> None:
    """End the threads that read samples ahead, which `load_ahead` kept for this process's next task."""
    for run in [*_kept]:
        if (items := _kept.pop(run, None)) is not None:
            items.close()


def build_samples(context: BuildContext, blocks: Sequence[Block], then: Sequence[Sample]) -> Made:
    """Build the records of the samples of `blocks`, and append them to a spool file."""
    keep_freed_memory()
    groups: list[Spooled] = []
    built: list[Unwritten] = []
    is_whole = True

    def write() -> None:
        check_run(context)
        groups.extend(write_spool(context.work, context.run, built, is_followed=context.is_followed))
        built.clear()

    with load_ahead(context, blocks, then) as items:
        for block in blocks:
            made = Unwritten(block.number, len(block.variants), ChunkInfo(), [])
            is_whole = add_samples(context, block, made, items)
            if made.info.every_number:
                built.append(made)
            if sum(each.bytes for each in built) >= TASK_BYTES:
                write()
            if not is_whole:
                break
    if built:
        write()
    return Made(groups, is_whole, context.lateness.samples_a_task)


def seal_block(
    context: BuildContext, block: int, variant: int, rows: Array, info: ChunkInfo, is_installed: bool
) -> WrittenShard | BuiltShard:
    """Write the shard of one variant of a block from spool files, under a temporary name."""
    check_run(context)
    name = shard_name(variant, block)
    aside = context.work / f"{name}.{uuid.uuid4().hex}"
    try:
        with ShardWriter(aside) as writer:
            records = read_spool(context.work, rows)
            for number, record, crc in zip(info.numbers, records, rows["crc32"].tolist(), strict=True):
                writer.append(number, record, crc)
            check_run(context)
            made = writer.finish()
    except OSError as error:
        raise disk_failure(context.work, error) from error
    except BuildError:  # a power cut may have damaged the spool files
        context.log.forget()
        raise
    # `first` is set when the manifest is made.
    entry = ShardEntry(name, made.bytes, made.sha256, variant, block, 0, len(made.rows), made.records_sha256)
    written = WrittenShard(aside, BuiltShard(entry, made.rows, info))
    return install_shard(context, written) if is_installed else written


def install_shard(context: BuildContext, written: WrittenShard) -> BuiltShard:
    """Sync a shard, give it its final name, and write its receipt."""
    target = context.shards / written.shard.entry.name
    try:
        place_shard(written.aside, target)
    except OSError as error:
        raise disk_failure(target, error) from error
    save_receipt(context.work, context.build, written.shard)
    return written.shard


def add_samples(context: BuildContext, block: Block, made: Unwritten, items: LoadAhead) -> bool:
    """Encode a block's samples. Returns False if the deadline has stopped it before the last one."""
    info = made.info
    totals: Moments = (info.sums, info.squares)
    kept: list[KeptSample] = []
    images: list[tuple[Array, Facts]] = []  # their moments are added later, several images at a time
    is_whole = True
    for sample in block.samples:
        if time.monotonic() - _checked.get(context.run, -_CHECK_SECONDS) >= _CHECK_SECONDS:
            check_run(context)
        if context.deadline.is_past:
            is_whole = False
            break
        try:
            encoded = context.encoder.encode(sample, block.variants, items.load(sample))
        except SampleError as error:
            if not context.skip_errors or 0 not in block.variants:
                raise
            info.skipped.append(Skipped(sample.number, sample.path, error.reason))
            info.digests[str(sample.number)] = content_sha256(context.encoder.source, sample)
            continue
        if sample.number in context.compared:
            info.digests[str(sample.number)] = encoded.item.sha256()
        known = block.clean.get(sample.number)  # the checksum of the existing cache's record
        if known is not None and zlib.crc32(context.encoder.to_record(encoded.clean)) != known:
            raise _difference(context, sample, 0)
        made.records.append(encoded.records)
        kept.append(KeptSample(sample.number, encoded.item.label, encoded.item.columns, encoded.facts))
        if IMAGE in encoded.clean:
            images.append((encoded.clean[IMAGE], encoded.facts))
            if len(images) * encoded.clean[IMAGE].nbytes >= _ADDED_BYTES:
                totals = _add_images(totals, images)
        for place, counts in zip((IN_SOURCE, *map(str, block.variants)), encoded.counts, strict=True):
            info.count(place, counts)
    info.sums[:], info.squares[:] = _add_images(totals, images)
    info.add(kept)
    return is_whole


def _add_images(totals: Moments, images: list[tuple[Array, Facts]]) -> Moments:
    for image, facts in images:
        found = moments(image)
        totals = add_moments(totals, found)
        facts[MEAN], facts[STD] = mean_and_std(found, image)
    images.clear()
    return totals


@functools.cache
def keep_freed_memory() -> None:
    """Let this process reuse freed memory, which glibc otherwise returns to the system for each large array."""
    bytearray(_LARGEST_PIECE)


def check_run(context: BuildContext) -> None:
    """Raise BuildError if this worker's run was killed or has ended: another run may use the work folder now."""
    if not is_held(context.work, context.run):
        raise BuildError(f"the run for which this worker builds {context.shards} has ended")
    _checked.clear()
    _checked[context.run] = time.monotonic()


def known_records(cache: Cache, positions: Array | None = None) -> Known:
    """Return the CRC-32s of some records of a finished cache: clean ones, and those of up to two augmented variants."""
    manifest = cache.manifest
    if positions is None:
        positions = np.arange(0, manifest.samples, max(1, manifest.samples // (2 * _TRIED_OF_OTHER_VERSIONS)))
    augmented = manifest.variants[1:]
    variants = sorted({*manifest.variants[:1], *augmented[:1], *augmented[-1:]})
    checksums = [cache.index[cache.rows(variant, positions)]["crc32"].tolist() for variant in variants]
    return {
        number: dict(zip(variants, own, strict=True))
        for number, *own in zip(cache.samples.numbers[positions].tolist(), *checksums, strict=True)
    }


def check_records(context: BuildContext, samples: Sequence[Sample], known: Known) -> None:
    """Encode a few samples again, and raise BuildError if their records differ from `known`."""
    most = _TRIED_OF_OTHER_VERSIONS if context.other_versions else _TRIED
    numbers = list(known)
    kinds = {Path(samples[number].path).suffix.lower(): number for number in reversed(numbers)}
    for number in sorted({*numbers[:: max(1, len(numbers) // most)][:most], *list(kinds.values())[:most]}):
        _compare(context, samples[number], known[number])


def check_rewritten(context: BuildContext, samples: Sequence[Sample], cache: Cache) -> None:
    """Encode samples again whose files were written after their records, as by `compare_newest`."""
    numbers = cache.samples.numbers
    rows = cache.index[cache.rows(cache.manifest.variants[0], np.arange(len(numbers)))]
    made = np.array([(cache.directory / each.name).stat().st_mtime_ns for each in cache.manifest.shards])
    written = np.array([samples[number].written_ns for number in numbers.tolist()], np.int64)
    later = np.flatnonzero(written > made[rows["shard"]])
    compare_newest(context, samples, known_records(cache, later))


def compare_newest(context: BuildContext, samples: Sequence[Sample], known: Known) -> None:
    """Encode samples again, as `check_records` does: the newest first, and of very many some, as in a new copy."""
    began = time.monotonic()
    for number in sorted(known, key=lambda number: -samples[number].written_ns):
        if time.monotonic() - began > _COMPARE_SECONDS:
            break
        _compare(context, samples[number], known[number])


def _compare(context: BuildContext, sample: Sample, checksums: Mapping[int, int]) -> None:
    try:
        records = context.encoder.encode(sample, list(checksums)).records
    except SampleError:
        return
    for (variant, checksum), record in zip(checksums.items(), records, strict=True):
        if zlib.crc32(record) != checksum:
            raise _difference(context, sample, variant)


def _difference(context: BuildContext, sample: Sample, variant: int) -> BuildError:
    what = f"variant {variant}" if variant else "the clean record"
    if context.other_versions:
        why = f"the cache was made with other versions ({'; '.join(context.other_versions)}): use those versions"
    elif variant:
        why = "the source or the augmentation has changed since, or is not reproducible: bring both back as they were"
    else:
        why = (
            "the source or its code has changed since, but not the size of the sample: bring the source back as it was"
        )
    return BuildError(
        f"{sample.path!r}: {what} is not the same as in {context.shards} when it is built again, so nothing is added: "
        f"{why}, or give another folder to build anew"
    )
