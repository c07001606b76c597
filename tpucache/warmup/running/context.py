"""Job: what all tasks of a run share, and a sample's records by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from tpucache.recipe import Recipe
from tpucache.store.codecs import encode
from tpucache.store.fields import IMAGE, Field, RecordLayout
from tpucache.warmup.deadline import NEVER, Deadline
from tpucache.warmup.records.augment import augment_fields
from tpucache.warmup.records.encode import clean_fields
from tpucache.warmup.records.labels import LabelRule
from tpucache.warmup.sources.base import Item, Sample, Source


@dataclass(frozen=True)
class Job:
    """What all tasks of a run share.

    `shards` is where sealed shards go, `run` the name of the run; `labels` is what samples' own labels must be, None
    where they do not count; `deadline` is when tasks stop, `other_versions` names those that differ from the cache's.
    """

    source: Source
    recipe: Recipe
    augmentation: Mapping[str, Any]
    fields: tuple[Field, ...]
    work: Path
    shards: Path
    skip_errors: bool
    run: str
    labels: LabelRule | None = None
    deadline: Deadline = NEVER
    other_versions: tuple[str, ...] = ()


class Made(NamedTuple):
    """A sample as its source gives it, its clean arrays by field, and its record in each variant asked for."""

    item: Item
    clean: dict[str, npt.NDArray[Any]]
    records: list[bytes]


def make_records(job: Job, sample: Sample, variants: Sequence[int]) -> Made:
    """Load and decode a sample once, and encode these variants of it. Raises SampleError, RecipeError."""
    item = job.source.load(sample)
    if job.labels is not None:
        job.labels.check(item.label, sample.path)
    clean = clean_fields(item, job.fields, job.recipe, sample.path)
    records = []
    for variant in variants:
        shown = clean
        if variant:
            shown = augment_fields(clean, job.augmentation, job.recipe.seed, sample.number, variant)
        records.append(to_record(job, shown))
    return Made(item, clean, records)


def to_record(job: Job, arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return a sample's arrays as the bytes of its record."""
    quality = {IMAGE: job.recipe.quality}
    parts = [encode(field, arrays[field.name], quality.get(field.name)) for field in job.fields]
    return RecordLayout(job.fields).join(parts)
