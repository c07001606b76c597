"""What a warmup will take, from a few samples tried before it starts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import BuildError, SampleError
from tpucache.warmup.job import Job, make_records
from tpucache.warmup.plan import Chunk

_TRIED: Final = 8
_ENOUGH_SECONDS: Final = 2.0
_PAGE: Final = 4096
_SPOOLED_BLOCKS: Final = 2  # one is sealed while the next is built
KAGGLE_BYTES: Final = 20_000_000_000  # what /kaggle/working keeps
# Two fewer than where kagglehub zips a dataset, and one for the sheet of samples; tables and manifest included.
KAGGLE_FILES: Final = 47
_TABLES: Final = 3


@dataclass(frozen=True)
class Estimate:
    """What is still to be done: records, their bytes on disk, bytes spooled beside them at most, seconds of one
    process, and bytes free on the disk."""

    records: int
    bytes: int
    spooled: int
    process_seconds: float
    free: int


def estimate(job: Job, chunks: Sequence[Chunk]) -> Estimate:
    """Make the records of a few samples, spread over the chunks, in this process; bad ones do not count."""
    samples = [sample for chunk in chunks for sample in chunk.samples]
    variants = max((chunk.variants for chunk in chunks), key=len, default=())
    sizes: list[int] = []
    seconds: list[float] = []
    began = time.monotonic()
    for sample in samples[:: max(1, len(samples) // _TRIED)][:_TRIED]:
        start = time.monotonic()
        try:
            sizes += map(_on_disk, make_records(job, sample, variants).records)
        except SampleError:
            continue
        seconds.append(time.monotonic() - start)
        if time.monotonic() - began > _ENOUGH_SECONDS:
            break
    timed = seconds[1:] or seconds  # the first one also warms libraries up
    records = len(samples) * len(variants)
    return Estimate(
        records=records,
        bytes=round(sum(sizes) / len(sizes) * records) if sizes else 0,
        spooled=(job.recipe.shard_mb << 20) * _SPOOLED_BLOCKS * len(variants),
        process_seconds=sum(timed) / len(timed) * len(samples) if timed else 0.0,
        free=shutil.disk_usage(job.shards).free,
    )


def _on_disk(record: bytes) -> int:
    """Return what LMDB takes for a record: whole pages, but for one that it keeps in a leaf."""
    return -(-len(record) // _PAGE) * _PAGE if len(record) > _PAGE // 2 else len(record)


def check_room(expected: Estimate, cache: Path) -> None:
    """Raise BuildError when the disk does not hold what is to be written, spooled chunks included."""
    needed = expected.bytes + expected.spooled
    if needed > expected.free:
        raise BuildError(
            f"{cache} needs about {needed / 1e9:,.1f} GB, and {expected.free / 1e9:,.1f} GB are free: make room, or "
            "use another folder, --codec jpeg, a smaller --size or fewer --variants"
        )


def kaggle_blocks(variants: int) -> int:
    """Return how many blocks a cache of so many variants may have, to stay within Kaggle's files. Raises BuildError."""
    blocks = (KAGGLE_FILES - _TABLES) // (variants + 1)
    if not blocks:
        raise BuildError(
            f"{variants} variants and the clean one make more than {KAGGLE_FILES} files: use at most "
            f"{KAGGLE_FILES - _TABLES - 1} --variants with --target kaggle"
        )
    return blocks


def check_kaggle_files(shards: int) -> None:
    """Raise BuildError when a cache of so many shards is not one that Kaggle publishes file by file."""
    if shards + _TABLES > KAGGLE_FILES:
        raise BuildError(
            f"the cache would have {shards + _TABLES} files, more than the {KAGGLE_FILES} of --target kaggle"
        )


def check_kaggle_bytes(expected: Estimate, cache: Path) -> None:
    """Raise BuildError when a cache, with what is still to be done, is larger than what Kaggle keeps."""
    total = expected.bytes + sum(path.stat().st_size for path in cache.glob("*.lmdb"))
    if total > KAGGLE_BYTES:
        raise BuildError(
            f"the cache would take about {total / 1e9:,.1f} GB, and /kaggle/working keeps "
            f"{KAGGLE_BYTES / 1e9:.0f}: use --codec jpeg, a smaller --size or fewer --variants"
        )
