"""What a warmup will take, from a few samples tried before it starts."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tpucache import kaggle
from tpucache.errors import BuildError, SampleError
from tpucache.store.fields import RecordLayout
from tpucache.store.files.pages import PAGE_HEADER_BYTES
from tpucache.warmup.planning.blocks import Chunk
from tpucache.warmup.running.context import Job, make_records

_TRIED: Final = 8
_ENOUGH_SECONDS: Final = 2.0
_MEGABYTE: Final = 1e6
_AHEAD: Final = 3  # tasks under way or waiting for each worker
_NODE_BYTES: Final = 18  # LMDB's header, key and pointer of a record
_PAGE_NUMBER_BYTES: Final = 8  # in the place of a record that has pages of its own
#: Bytes of the tables and receipts for each record, and for each sample beside its path, which they hold twice.
_RECORD_BYTES: Final = 64
_SAMPLE_BYTES: Final = 128


@dataclass(frozen=True)
class Remaining:
    """What is still to be done: chunks to be built, the blocks whose shards are not sealed, and bytes spooled already.

    `unsealed` has (records, records a chunk at most) of each such block.
    """

    chunks: Sequence[Chunk]
    unsealed: Sequence[tuple[int, int]]
    spooled: int


@dataclass(frozen=True)
class Estimate:
    """What is still to be done: records, their bytes on disk, bytes of working space beside them at most, seconds of
    one process, and bytes free on the disk."""

    records: int
    bytes: int
    spooled: int
    process_seconds: float
    free: int


def estimate(job: Job, remaining: Remaining, jobs: int | None = None) -> Estimate:
    """Make the records of a few samples, spread over the chunks, in this process; bad ones do not count."""
    samples = [(sample, chunk.variants) for chunk in remaining.chunks for sample in chunk.samples]
    sizes: list[float] = []
    on_disk: list[float] = []
    seconds: list[float] = []
    began = time.monotonic()
    for sample, variants in samples[:: max(1, len(samples) // _TRIED)][:_TRIED]:
        if job.deadline.is_past or time.monotonic() - began > _ENOUGH_SECONDS:
            break
        start = time.monotonic()
        try:
            records = make_records(job, sample, variants).records
        except SampleError:
            continue
        seconds.append(time.monotonic() - start)
        sizes.append(statistics.mean(map(len, records)))
        on_disk.append(statistics.mean(_on_disk(len(record)) for record in records))
    timed = seconds[1:] or seconds  # the first one also warms libraries up
    to_build = sum(len(variants) for _, variants in samples)
    to_write = sum(records for records, _ in remaining.unsealed)
    if not sizes:  # by those that are spooled, or as large as they can be
        mean = remaining.spooled / max(1, to_write - to_build) or RecordLayout(job.fields).nbytes
        sizes, on_disk = [mean], [_on_disk(round(mean))]
    return Estimate(
        records=to_build,
        bytes=round(_upper(on_disk) * to_write),
        spooled=_working_bytes(remaining, _upper(sizes), jobs or os.cpu_count() or 1) + _table_bytes(remaining),
        process_seconds=sum(timed) / len(timed) * len(samples) if timed else 0.0,
        free=shutil.disk_usage(job.shards).free,
    )


def _upper(sizes: Sequence[float]) -> float:
    """Return what the mean of all sizes will hardly exceed, judged by a few of them."""
    spread: float = statistics.stdev(sizes) if len(sizes) > 1 else 0.0
    return statistics.fmean(sizes) + 2 * spread / math.sqrt(len(sizes))


def _on_disk(length: int) -> float:
    """Return what LMDB takes for a record of this length: pages of its own, or its share of a leaf."""
    page: int = os.sysconf("SC_PAGE_SIZE")
    in_leaf = page - PAGE_HEADER_BYTES
    node = length + length % 2 + _NODE_BYTES
    if node <= in_leaf // 2:
        return page / (in_leaf // node)
    pages = -(-(length + PAGE_HEADER_BYTES) // page)
    return float(pages * page + _NODE_BYTES + _PAGE_NUMBER_BYTES)


def _working_bytes(remaining: Remaining, size: float, jobs: int) -> int:
    """Return what is spooled at most at a time, beside what is already: one block is sealed while the next is built,
    and the tasks that wait may be of the one after them."""
    blocks = sorted((records for records, _ in remaining.unsealed), reverse=True)
    ahead = _AHEAD * jobs * max((most for _, most in remaining.unsealed), default=0)
    records = min(sum(blocks), sum(blocks[:2]) + ahead)
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


def kaggle_blocks(variants: int) -> int:
    """Return how many blocks a cache of so many variants may have, to stay within Kaggle's files. Raises BuildError."""
    blocks = kaggle.TARGET_SHARDS // (variants + 1)
    if not blocks:
        raise BuildError(
            f"{variants} variants and the clean one make more than {kaggle.TARGET_SHARDS} shards: use at most "
            f"{kaggle.TARGET_SHARDS - 1} --variants with --target kaggle"
        )
    return blocks


def check_kaggle_files(shards: int) -> None:
    """Raise BuildError when a cache of so many shards is not one that Kaggle publishes file by file."""
    if shards > kaggle.TARGET_SHARDS:
        raise BuildError(
            f"the cache would have {shards} shards, more than the {kaggle.TARGET_SHARDS} of --target kaggle: a larger "
            "--shard-mb makes fewer"
        )


def check_kaggle_bytes(expected: Estimate, cache: Path) -> None:
    """Raise BuildError when a cache, with what is still to be done, is larger than what Kaggle keeps."""
    total = expected.bytes + sum(path.stat().st_size for path in cache.glob("*.lmdb"))
    if total > kaggle.WORKING_BYTES:
        raise BuildError(
            f"the cache would take about {total / 1e9:,.1f} GB, and /kaggle/working keeps "
            f"{kaggle.WORKING_BYTES / 1e9:.0f}: use --codec jpeg, a smaller --size or fewer --variants"
        )
