"""What a warmup will take, from a few samples tried before it starts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpucache.errors import BuildError, SampleError
from tpucache.recipe import Recipe
from tpucache.store.codec import Field, RecordLayout, encode
from tpucache.warmup.augment import augment_fields
from tpucache.warmup.fields import clean_fields
from tpucache.warmup.sources.base import Sample, Source

_TRIED: Final = 8
_ENOUGH_SECONDS: Final = 2.0
_PAGE: Final = 4096
KAGGLE_BYTES: Final = 20_000_000_000  # what /kaggle/working keeps
KAGGLE_FILES: Final = 48  # two fewer than where kagglehub zips a dataset; tables and manifest included
_TABLES: Final = 3


@dataclass(frozen=True)
class Estimate:
    """What is still to be done: records, their bytes on disk, seconds of one process, and bytes free on the disk."""

    records: int
    bytes: int
    process_seconds: float
    free: int


def estimate(
    source: Source,
    samples: Sequence[Sample],
    variants: Sequence[int],
    recipe: Recipe,
    augmentation: Mapping[str, Any],
    fields: Sequence[Field],
    cache: Path,
) -> Estimate:
    """Build a few samples, spread over all, in this process and throw them away; bad ones do not count."""
    layout = RecordLayout(tuple(fields))
    sizes: list[int] = []
    seconds = tried = 0.0
    began = time.monotonic()
    for sample in samples[:: max(1, len(samples) // _TRIED)][:_TRIED]:
        start = time.monotonic()
        try:
            clean = clean_fields(source.load(sample), fields, recipe, sample.path)
        except SampleError:
            continue
        for variant in variants:
            shown = augment_fields(clean, augmentation, recipe.seed, sample.number, variant) if variant else clean
            quality = {"image": recipe.quality}
            record = layout.join([encode(field, shown[field.name], quality.get(field.name)) for field in fields])
            sizes.append(-(-len(record) // _PAGE) * _PAGE if len(record) > _PAGE // 2 else len(record))
        # The first one also warms libraries up, and does not count where there is another.
        seconds, tried = (seconds + time.monotonic() - start, tried + 1) if tried else (0.0, 1e-9)
        if time.monotonic() - began > _ENOUGH_SECONDS:
            break
    records = len(samples) * len(variants)
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    pace = seconds / tried if tried >= 1 else time.monotonic() - began
    free = shutil.disk_usage(cache).free
    return Estimate(records, round(mean * records), pace * len(samples), free)


def check_room(expected: Estimate, cache: Path, chunk_bytes: int) -> None:
    """Raise BuildError when the disk does not hold what is to be written, spooled chunks included."""
    needed = expected.bytes + chunk_bytes
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


def check_kaggle(shards: int, total_bytes: int) -> None:
    """Raise BuildError when a cache of so many shards and bytes is not one that Kaggle keeps and publishes well."""
    if shards + _TABLES > KAGGLE_FILES:
        raise BuildError(
            f"the cache would have {shards + _TABLES} files, more than the {KAGGLE_FILES} of --target kaggle"
        )
    if total_bytes > KAGGLE_BYTES:
        raise BuildError(
            f"the cache would take about {total_bytes / 1e9:,.1f} GB, and /kaggle/working keeps "
            f"{KAGGLE_BYTES / 1e9:.0f}: use --codec jpeg, a smaller --size or fewer --variants"
        )
