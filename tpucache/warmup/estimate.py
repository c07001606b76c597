"""The time and the space that a warmup will need, estimated by a few samples, and whether there is room for it."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tpucache import kaggle
from tpucache.errors import BuildError, SampleError
from tpucache.recipe import Recipe
from tpucache.store.codecs.dct.coefficients import BLOCK
from tpucache.store.fields import Field, RecordLayout
from tpucache.store.format import Part
from tpucache.store.manifest import value_bytes_of
from tpucache.store.pages import PAGE_HEADER_BYTES
from tpucache.warmup.blocks import Chunk
from tpucache.warmup.deadline import NEVER, Deadline
from tpucache.warmup.records.encode import EncodedSample, SampleEncoder
from tpucache.warmup.sources.ahead import Lateness, LoadAhead
from tpucache.warmup.sources.source import Sample

_Item = TypeVar("_Item")

_AHEAD: Final = 3  # tasks under way or waiting for each worker
_NODE_BYTES: Final = 18  # LMDB's header, key and pointer of a record
_PAGE_NUMBER_BYTES: Final = 8  # in the place of a record that has pages of its own
#: Bytes of the tables and receipts for each record; and for each sample without its path, which they hold twice.
_RECORD_BYTES: Final = 64
_SAMPLE_BYTES: Final = 128

_MEGABYTE: Final = 1e6


@dataclass(frozen=True)
class Remaining:
    """What is still to be done: chunks to be built, blocks with unfinished shards, and bytes of chunks on disk.

    `unsealed` has (records, records a chunk at most) of each such block. Where readers follow the build
    (`is_read`), the records of all blocks stay on the disk until the end.
    """

    chunks: Sequence[Chunk]
    unsealed: Sequence[tuple[int, int]]
    spooled: int
    is_read: bool = False


@dataclass(frozen=True)
class Estimate:
    """What is still to be done: records, their bytes on disk, the most bytes of working space, seconds of one process.

    `free` has the bytes that are free on the disk.
    """

    records: int
    bytes: int
    spooled: int
    process_seconds: float
    free: int


class _Trial(NamedTuple):
    """A sample that was tried: mean bytes of its records, their mean bytes on disk, and seconds."""

    bytes: float
    on_disk: float
    seconds: float


@dataclass(frozen=True)
class Trials:
    """How samples are tried: how many at most, for how long, and what is called with each result.

    `margin` is by how many standard errors the estimate is above the mean of those that were tried.
    """

    samples: int = 8
    seconds: float = 2.0
    margin: float = 2.0
    look: Callable[[Sample, EncodedSample | SampleError], None] = lambda sample, result: None


def estimate(
    encoder: SampleEncoder,
    remaining: Remaining,
    folder: Path,
    jobs: int | None = None,
    deadline: Deadline = NEVER,
    trials: Trials = Trials(),  # it is frozen
) -> Estimate:
    """Encode a few samples, spread over the chunks, in this process; samples that fail do not count.

    `folder` is on the disk that is written to.
    """
    samples = [(sample, chunk.parts) for chunk in remaining.chunks for sample in chunk.samples]
    done = _try_samples(encoder, samples, deadline, trials)
    timed = [trial.seconds for trial in done[1:] or done]  # the first one also warms libraries up
    to_build = sum(len(parts) for _, parts in samples)
    to_write = sum(records for records, _ in remaining.unsealed)
    sizes, on_disk = [trial.bytes for trial in done], [trial.on_disk for trial in done]
    if not done:  # from the chunks on disk, or as large as records can be
        mean = remaining.spooled / max(1, to_write - to_build) or RecordLayout(encoder.fields).nbytes
        sizes, on_disk = [mean], [on_disk_bytes(round(mean), encoder.fields)]
    return Estimate(
        records=to_build,
        bytes=round(_upper(on_disk, trials.margin) * to_write),
        spooled=_working_bytes(remaining, _upper(sizes, trials.margin), jobs or os.cpu_count() or 1)
        + _table_bytes(remaining),
        process_seconds=sum(timed) / len(timed) * len(samples) if timed else 0.0,
        free=shutil.disk_usage(folder).free,
    )


def _try_samples(
    encoder: SampleEncoder, samples: Sequence[tuple[Sample, Sequence[Part]]], deadline: Deadline, trials: Trials
) -> list[_Trial]:
    done: list[_Trial] = []
    began = time.monotonic()
    tried = spread(samples, trials.samples)
    with LoadAhead(encoder.load, encoder.source, (sample for sample, _ in tried), Lateness()) as items:
        for sample, parts in tried:
            start = time.monotonic()
            if deadline.is_past or start - began > trials.seconds:
                break
            try:
                encoded = encoder.encode(sample, parts, items.load(sample))
            except SampleError as error:
                trials.look(sample, error)
                continue
            seconds = time.monotonic() - start
            lengths = [len(record) for record in encoded.records]
            on_disk = statistics.mean(on_disk_bytes(length, encoder.fields) for length in lengths)
            done.append(_Trial(statistics.mean(lengths), on_disk, seconds))
            trials.look(sample, encoded)
    return done


def spread(samples: Sequence[_Item], count: int) -> list[_Item]:
    """Return as many samples, in equal distances; all where there are fewer."""
    count = min(count, len(samples))
    return [samples[number * len(samples) // count] for number in range(count)]


def _upper(sizes: Sequence[float], margin: float) -> float:
    """Return a size that the mean of all sizes will hardly exceed, judged by a few of them."""
    deviation: float = statistics.stdev(sizes) if len(sizes) > 1 else 0.0
    return statistics.fmean(sizes) + margin * deviation / math.sqrt(len(sizes))


def on_disk_bytes(length: int, fields: Sequence[Field]) -> float:
    """Return what a record of this length takes in a shard: pages of its own, or its share of those that it is in."""
    page: int = os.sysconf("SC_PAGE_SIZE")
    if value_bytes := value_bytes_of(fields):  # one value has several records, until it is this large
        return length * (1 + page / 2 / value_bytes)
    in_leaf = page - PAGE_HEADER_BYTES
    node = length + length % 2 + _NODE_BYTES
    if node <= in_leaf // 2:
        return page / (in_leaf // node)
    pages = -(-(length + PAGE_HEADER_BYTES) // page)
    return float(pages * page + _NODE_BYTES + _PAGE_NUMBER_BYTES)


def _working_bytes(remaining: Remaining, size: float, jobs: int) -> int:
    """Return the most bytes that the chunks of unfinished blocks will take on the disk in addition.

    While one block is sealed, the next one is built, and waiting tasks may be of the block after that.
    """
    blocks = sorted((records for records, _ in remaining.unsealed), reverse=True)
    ahead = _AHEAD * jobs * max((most for _, most in remaining.unsealed), default=0)
    records = sum(blocks) if remaining.is_read else min(sum(blocks), sum(blocks[:2]) + ahead)
    return max(0, round(records * size) - remaining.spooled)


def _table_bytes(remaining: Remaining) -> int:
    paths = sum(2 * len(sample.path) + _SAMPLE_BYTES for chunk in remaining.chunks for sample in chunk.samples)
    return paths + _RECORD_BYTES * sum(records for records, _ in remaining.unsealed)


def check_room(expected: Estimate, cache: Path, advice: str) -> None:
    """Raise BuildError with this advice when the disk does not hold what is to be written, working space included."""
    needed = expected.bytes + expected.spooled
    if needed > expected.free:
        raise BuildError(
            f"{cache} needs about {expected.bytes / _MEGABYTE:,.1f} MB more and {expected.spooled / _MEGABYTE:,.1f} MB "
            f"to work in, and {expected.free / _MEGABYTE:,.1f} MB are free: {advice}"
        )


def kaggle_blocks(recipe: Recipe) -> int:
    """Return how many blocks, a shard for each part, keep a cache within Kaggle's files. Raises BuildError."""
    bands = len(recipe.bands or (BLOCK,))
    blocks = kaggle.TARGET_SHARDS // ((recipe.variants + 1) * bands)
    if not blocks:
        of_bands = f", in {bands} bands each," if bands > 1 else ""
        raise BuildError(
            f"{recipe.variants} variants and the clean one{of_bands} make more than {kaggle.TARGET_SHARDS} shards: use "
            f"at most {kaggle.TARGET_SHARDS // bands - 1} --variants with --target kaggle"
        )
    return blocks


def check_kaggle_files(shards: int) -> None:
    """Raise BuildError where a cache has more shards than Kaggle publishes file by file."""
    if shards > kaggle.TARGET_SHARDS:
        raise BuildError(
            f"the cache has or would have {shards} shards, more than the {kaggle.TARGET_SHARDS} of --target kaggle: a "
            "larger --shard-mb makes fewer, in another folder where it is finished"
        )


def check_kaggle_bytes(expected: Estimate, cache: Path, sent: int = 0, *, is_kept: bool = True) -> None:
    """Raise BuildError where a cache, with what is still to be done, is larger than what Kaggle keeps.

    Where the cache is not kept on this machine, `sent` are the bytes that are at Kaggle already: a dataset may be
    larger than /kaggle/working.
    """
    total = expected.bytes + sum(path.stat().st_size for path in cache.glob("*.lmdb"))
    if is_kept and total > kaggle.WORKING_BYTES:
        raise BuildError(
            f"the cache would take about {total / 1e9:,.1f} GB, and /kaggle/working keeps "
            f"{kaggle.WORKING_BYTES / 1e9:.0f}: use --codec dct-zstd, a smaller --size or fewer --variants"
        )
    if total + sent > kaggle.MAX_BYTES:
        raise BuildError(
            f"the cache would take about {(total + sent) / 1e9:,.1f} GB, and a dataset at Kaggle at most "
            f"{kaggle.MAX_BYTES / 1e9:.0f}: use --codec dct-zstd, a smaller --size or fewer --variants"
        )
