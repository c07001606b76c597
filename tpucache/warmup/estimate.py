"""Estimates the time and disk space of a warmup from a few samples, and checks the disk's and Kaggle's limits."""

from __future__ import annotations

import dataclasses
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
from tpucache.store.ahead import Lateness
from tpucache.store.fields import RecordLayout
from tpucache.store.pages import PAGE_HEADER_BYTES
from tpucache.warmup.build_options import NEVER, BuildOptions, Deadline
from tpucache.warmup.records.encode import EncodedSample, SampleEncoder
from tpucache.warmup.sources.source import LoadAhead, Sample

_Item = TypeVar("_Item")

_TASKS_PER_WORKER: Final = 3  # running or waiting
_NODE_BYTES: Final = 18  # LMDB's header, key and pointer of a record
_PAGE_NUMBER_BYTES: Final = 8  # what LMDB stores in place of a record that lies in overflow pages
#: Bytes that the tables and the files about finished shards need for each record, and for each sample besides its path.
_RECORD_BYTES: Final = 64
_SAMPLE_BYTES: Final = 128

_MEGABYTE: Final = 1e6


@dataclass(frozen=True)
class Remaining:
    """The remaining work of a build.

    `samples` are the samples to build, with their variants. `unsealed` has the number of records of each unfinished
    block, `spooled` the bytes of those that are built, and `most` the largest number of records of a task. If readers
    follow the build, spool files stay until the end.
    """

    samples: Sequence[tuple[Sample, Sequence[int]]]
    unsealed: Sequence[int]
    most: int
    spooled: int = 0
    is_followed: bool = False


@dataclass(frozen=True)
class Estimate:
    """An estimate of the remaining work.

    `records` is the number of records to build, and `bytes` the size of the shards to write. `spooled` is the most
    bytes of tables and temporary files, `process_seconds` the time that one process would need, and `free` the free
    bytes on the disk.
    """

    records: int
    bytes: int
    spooled: int
    process_seconds: float
    free: int


class _TrialSample(NamedTuple):
    """The result of encoding one sample: the mean bytes of a record, its mean bytes in a shard, and the seconds."""

    bytes: float
    on_disk: float
    seconds: float


@dataclass(frozen=True)
class Trials:
    """How many samples are encoded for an estimate: at most `samples`, for about `seconds`.

    `look` is called with each sample and the result: an EncodedSample, or the SampleError of a sample that failed. The
    estimate of sizes is `margin` standard errors above the mean of the encoded samples.
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
    """Encode a few samples, evenly spread, in this process, and estimate the remaining work from them."""
    samples = remaining.samples
    done = _try_samples(encoder, samples, deadline, trials)
    timed = [trial.seconds for trial in done[1:] or done]  # the first one also includes imports
    to_build = sum(len(variants) for _, variants in samples)
    to_write = sum(remaining.unsealed)
    sizes, on_disk = [trial.bytes for trial in done], [trial.on_disk for trial in done]
    if not done:  # use the mean size of finished records, or else the largest possible size
        mean = remaining.spooled / max(1, to_write - to_build) or RecordLayout(encoder.fields).nbytes
        sizes, on_disk = [mean], [on_disk_bytes(round(mean))]
    blocks = sorted(remaining.unsealed, reverse=True)
    workers = jobs or os.cpu_count() or 1
    ahead = to_write if remaining.is_followed else _TASKS_PER_WORKER * workers * remaining.most
    spooled = round(min(to_write, sum(blocks[:2]) + ahead) * _upper(sizes, trials.margin)) - remaining.spooled
    return Estimate(
        records=to_build,
        bytes=round(_upper(on_disk, trials.margin) * to_write),
        spooled=max(0, spooled)
        + sum(2 * len(sample.path) + _SAMPLE_BYTES for sample, _ in samples)
        + _RECORD_BYTES * to_write,
        process_seconds=sum(timed) / len(timed) * len(samples) if timed else 0.0,
        free=shutil.disk_usage(folder).free,
    )


def _try_samples(
    encoder: SampleEncoder, samples: Sequence[tuple[Sample, Sequence[int]]], deadline: Deadline, trials: Trials
) -> list[_TrialSample]:
    done: list[_TrialSample] = []
    began = time.monotonic()
    tried = spread(samples, trials.samples)
    with LoadAhead(encoder.load, encoder.source, (sample for sample, _ in tried), Lateness()) as items:
        for sample, variants in tried:
            start = time.monotonic()
            if deadline.is_past or start - began > trials.seconds:
                break
            try:
                encoded = encoder.encode(sample, variants, items.load(sample))
            except SampleError as error:
                trials.look(sample, error)
                continue
            seconds = time.monotonic() - start
            lengths = [len(record) for record in encoded.records]
            on_disk = statistics.mean(on_disk_bytes(length) for length in lengths)
            done.append(_TrialSample(statistics.mean(lengths), on_disk, seconds))
            trials.look(sample, encoded)
    return done


def spread(samples: Sequence[_Item], count: int) -> list[_Item]:
    """Return `count` evenly spread items of `samples`, or all items if there are fewer."""
    count = min(count, len(samples))
    return [samples[number * len(samples) // count] for number in range(count)]


def _upper(sizes: Sequence[float], margin: float) -> float:
    deviation: float = statistics.stdev(sizes) if len(sizes) > 1 else 0.0
    return statistics.fmean(sizes) + margin * deviation / math.sqrt(len(sizes))


def on_disk_bytes(length: int) -> float:
    """Return the bytes that a record of `length` bytes takes in a shard: pages of its own, or its share of a page."""
    page: int = os.sysconf("SC_PAGE_SIZE")
    in_leaf = page - PAGE_HEADER_BYTES
    node = length + length % 2 + _NODE_BYTES
    if node <= in_leaf // 2:
        return page / (in_leaf // node)
    pages = -(-(length + PAGE_HEADER_BYTES) // page)
    return float(pages * page + _NODE_BYTES + _PAGE_NUMBER_BYTES)


def check_room(expected: Estimate, cache: Path, advice: str) -> None:
    """Raise BuildError, with `advice` in the message, if the disk has no room for shards and temporary files."""
    needed = expected.bytes + expected.spooled
    if needed > expected.free:
        raise BuildError(
            f"{cache} needs about {expected.bytes / _MEGABYTE:,.1f} MB for shards and "
            f"{expected.spooled / _MEGABYTE:,.1f} MB for tables and temporary files, and "
            f"{expected.free / _MEGABYTE:,.1f} MB are free: {advice}"
        )


def meant_recipe(recipe: Recipe, options: BuildOptions) -> Recipe:
    """Return a recipe with as few blocks as `--target kaggle` needs, if the options have that target."""
    if options.target != "kaggle" or recipe.max_blocks:
        return recipe
    blocks = kaggle.TARGET_SHARDS // (recipe.variants + 1)
    if not blocks:
        raise BuildError(
            f"{recipe.variants} variants and the clean one make more than {kaggle.TARGET_SHARDS} shards: "
            f"with --target kaggle, give --variants {kaggle.TARGET_SHARDS - 1} or fewer"
        )
    return dataclasses.replace(recipe, max_blocks=blocks)


def check_kaggle_files(shards: int) -> None:
    """Raise BuildError if a cache has more shards than --target kaggle allows."""
    if shards > kaggle.TARGET_SHARDS:
        raise BuildError(
            f"the cache has or would have {shards} shards, more than the {kaggle.TARGET_SHARDS} of --target kaggle: "
            "give a larger --shard-mb, and another folder if the cache is finished"
        )


def check_kaggle_bytes(expected: Estimate, cache: Path, sent: int = 0, *, is_kept: bool = True) -> None:
    """Raise BuildError if a cache, including its estimated rest, is larger than Kaggle's limits.

    All shards together must fit into a dataset. If they are kept on this machine (`is_kept`), they must also fit into
    /kaggle/working.
    """
    total = expected.bytes + sum(path.stat().st_size for path in cache.glob("*.lmdb"))
    if is_kept and total > kaggle.WORKING_BYTES:
        raise BuildError(
            f"the cache would take about {total / 1e9:,.1f} GB, and /kaggle/working keeps at most "
            f"{kaggle.WORKING_BYTES / 1e9:.0f} GB: use --codec dct-zstd, a smaller --size or fewer --variants"
        )
    if total + sent > kaggle.MAX_BYTES:
        raise BuildError(
            f"the cache would take about {(total + sent) / 1e9:,.1f} GB, and a dataset at Kaggle takes at most "
            f"{kaggle.MAX_BYTES / 1e9:.0f} GB: use --codec dct-zstd, a smaller --size or fewer --variants"
        )
