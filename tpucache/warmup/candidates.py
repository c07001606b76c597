"""Candidates: what caches of several recipes would take, and a small cache of each to read, made of a few samples.

A sample is loaded once, decoded and resized once for each size, and encoded for each recipe, by as many workers as the
build would have.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache.errors import DependencyError, RecipeError, SampleError, SourceError, TpucacheError
from tpucache.recipe import Recipe
from tpucache.store.codecs.dct.coefficients import BLOCK
from tpucache.store.fields import IMAGE, Field, part_layouts
from tpucache.store.format import INDEX_DTYPE, WORK_NAME, Part
from tpucache.types import Array
from tpucache.warmup.blocks import parts_of, plan_blocks
from tpucache.warmup.build_options import BuildOptions, LabelKind
from tpucache.warmup.estimate import on_disk_bytes, spread
from tpucache.warmup.plan import BuildPlan, plan_build, with_recipe
from tpucache.warmup.records.arrays import clean_and_count
from tpucache.warmup.records.encode import EncodedSample, LabelRule, SampleEncoder
from tpucache.warmup.run.executors import ALONE_SECONDS, Executor
from tpucache.warmup.run.folder import hold
from tpucache.warmup.run.scheduler import Scheduler
from tpucache.warmup.run.tasks import BuildContext, keep_freed_memory
from tpucache.warmup.sources.source import Item, Listing, Sample, Source, source_name
from tpucache.warmup.tables import finish_cache

_SAMPLES: Final = 512
#: The first samples of a worker that tries at least four times as many, whose seconds do not count: with so many, a
#: build has its code and memory at hand most of the time.
_WARM_UP: Final = 16
_LEAST: Final = 3  # of each worker
#: Samples that a worker encodes at most by one recipe before the next one: in turns, none would have its code
#: and tables at hand as it has in a build. The first groups are smaller, so that large photographs take no longer than
#: they may.
_GROUP: Final = 64
#: Samples whose arrays and records are kept, to be compared and to be read over and over.
_KEPT: Final = 24
#: Of a small cache: more than a processor's cache holds, so that reading is not faster than it will be.
_CACHE_BYTES: Final = 128 << 20
_CACHE_RECORDS: Final = 1024
#: Bytes of the samples table for each sample beside its path.
_SAMPLE_BYTES: Final = 16
#: Of a shard beside its records: two pages of its head, one of its tree, and half of a leaf.
_SHARD_BYTES: Final = 3.5 * 4096
#: In what recipes differ whose clean arrays are the same.
_OF_CODEC: Final = ("codec", "quality", "chroma", "bands", "variants")


class Cost(NamedTuple):
    """What one record takes: bytes on disk in all its bands, and seconds of a worker to make it."""

    bytes: float
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """What a recipe would cost for so many `samples` in so many `blocks`, and a small cache of it.

    `clean` and `augmented` are the costs of a record, those of loading, decoding and resizing left out: they are
    `sample_seconds`. `write_seconds` are those of a record's way into a shard. `start_seconds` are those until workers
    have begun, `augment_seconds` what it takes them longer where there are variants, `finish_seconds` those of the
    tables. The first records of the variant 0 in `cache` are those of `images`, uint8 (height, width, channels).
    """

    recipe: Recipe
    samples: int
    blocks: int
    workers: int
    start_seconds: float
    augment_seconds: float
    sample_seconds: float
    write_seconds: float
    finish_seconds: float
    sample_bytes: float
    clean: Cost
    augmented: Cost
    cache: Path
    images: Sequence[Array]

    def bytes(self, variants: int) -> int:
        """Return how large the cache of all samples would be with so many augmented variants."""
        parts = len(self.recipe.bands or (BLOCK,)) * (1 + variants)
        one = self.clean.bytes + variants * self.augmented.bytes + parts * INDEX_DTYPE.itemsize + self.sample_bytes
        return round(self.samples * one + self.blocks * parts * _SHARD_BYTES)

    def seconds(self, variants: int) -> float:
        """Return how long its build would take here."""
        made = self.sample_seconds + self.clean.seconds + variants * self.augmented.seconds
        one = made + (1 + variants) * self.write_seconds
        once = self.start_seconds + (self.augment_seconds if variants else 0.0) + self.finish_seconds
        # A build of one block begins in one process, as most of these are done before workers would have started.
        alone = min(self.samples * one, ALONE_SECONDS) if self.blocks == 1 and self.workers > 1 else 0.0
        return once + alone + (self.samples * one - alone) / self.workers


@dataclass(frozen=True)
class Candidates:
    """The recipes that were tried on `tried` samples of `samples`, and why others cannot be used, by their number.

    `failed` has the path of each sample that cannot be used, and the reason.
    """

    found: Mapping[int, Candidate]
    left_out: Mapping[int, str]
    samples: int
    tried: int
    failed: Sequence[tuple[str, str]]


def try_recipes(
    source: Source,
    recipes: Sequence[Recipe],
    folder: Path,
    *,
    seconds: float = 10.0,
    jobs: int | None = None,
    labels: LabelKind = BuildOptions.labels,
) -> Candidates:
    """Try recipes on a few samples of a source, spread over it, for so many seconds; write small caches into a folder.

    `variants` of a recipe are not counted, but whether there are any. A recipe that cannot be used here, for want of a
    package, is left out. Raises SourceError where no sample can be used, RecipeError or DependencyError where no recipe
    can be.
    """
    began = time.monotonic()
    listing = source.list()
    if not listing.samples:
        raise SourceError(f"{source_name(source)} has no samples")
    first, left_out = _first_plan(source, listing, recipes, labels)
    start_seconds = time.monotonic() - began
    import_seconds = _import_augmentation(source, first, recipes)
    plans = _plans(source, first, recipes, left_out)
    encoders = {number: _encoder(source, plan) for number, plan in plans.items()}
    chosen = spread(listing.samples, _SAMPLES)
    executor = Executor(jobs=jobs)
    began = time.monotonic()
    starts = [*executor.run(iter([(_start, (encoders, chosen[0]))] * executor.workers))]
    start_seconds += time.monotonic() - began - max(starts)
    augment_seconds = max(starts) + import_seconds
    portions = [chosen[first :: executor.workers] for first in range(min(executor.workers, len(chosen)))]
    kept = -(-_KEPT // len(portions))
    arguments = [(encoders, portion, seconds, kept) for portion in portions]
    results = [*executor.run(iter([(_try_portion, each) for each in arguments]))]
    failed = [failure for result in results for failure in result.failed]
    tried = [each for result in results for each in result.tried]
    warm = [each for one in results for each in one.tried[_WARM_UP if len(one.tried) >= 4 * _WARM_UP else 0 :]]
    if not tried:
        path, reason = failed[0]
        raise SourceError(f"none of the {len(failed)} samples that were tried could be used; {path!r}: {reason}")
    paths = statistics.mean(len(sample.path) for sample in chosen) + _SAMPLE_BYTES
    found = {}
    for number, plan in plans.items():
        known = [result.kept[at][number] for result in results for at in range(len(result.kept))]
        cache, write_seconds, finish_seconds = _write_cache(plan, known, folder / f"{number}", len(listing.samples))
        found[number] = Candidate(
            recipe=plan.recipe,
            samples=len(listing.samples),
            blocks=len(plan.blocks),
            workers=executor.workers,
            start_seconds=start_seconds,
            augment_seconds=augment_seconds,
            sample_seconds=statistics.mean(each.load + each.clean[number] for each in warm),
            write_seconds=write_seconds,
            finish_seconds=finish_seconds,
            sample_bytes=paths,
            clean=_mean([each.records[number][0] for each in tried], [each.records[number][0] for each in warm]),
            augmented=_mean([each.records[number][1] for each in tried], [each.records[number][1] for each in warm]),
            cache=cache,
            images=[one.clean[IMAGE] for one in known],
        )
    return Candidates(found, left_out, len(listing.samples), len(tried) + len(failed), failed)


def _first_plan(
    source: Source, listing: Listing, recipes: Sequence[Recipe], labels: LabelKind
) -> tuple[BuildPlan, dict[int, str]]:
    """Return the plan of the first recipe that can be used, without variants, and why those before it cannot be.

    Raises SourceError, and what the first recipe raises where none can be used.
    """
    errors: dict[int, TpucacheError] = {}
    for number, recipe in enumerate(recipes):
        try:
            plan = plan_build(source, listing, replace(recipe, variants=0), BuildOptions(labels=labels))
        except (DependencyError, RecipeError) as error:
            errors[number] = error
            continue
        if plan.fields[0].name != IMAGE:
            raise SourceError(f"{source_name(source)} has no images, whose codecs and sizes could be compared")
        return plan, {number: str(error) for number, error in errors.items()}
    raise errors[0]


def _import_augmentation(source: Source, first: BuildPlan, recipes: Sequence[Recipe]) -> float:
    """Load what augments, which a build without variants does not; return the seconds."""
    began = time.monotonic()
    for recipe in recipes:
        if recipe.variants:
            with contextlib.suppress(DependencyError, RecipeError):  # raised again where the recipe is planned
                with_recipe(first, source, recipe)
                break
    return time.monotonic() - began


def _plans(
    source: Source, first: BuildPlan, recipes: Sequence[Recipe], left_out: dict[int, str]
) -> dict[int, BuildPlan]:
    """Return the plan of each recipe by its number, and add to `left_out` why others cannot be used.

    Raises DependencyError or RecipeError where none can be.
    """
    plans: dict[int, BuildPlan] = {}
    errors: list[TpucacheError] = []
    for number, recipe in enumerate(recipes):
        if number in left_out:
            continue
        try:
            plan = with_recipe(first, source, recipe)
            blank = {each.name: np.zeros(each.shape, each.dtype) for each in plan.fields}
            _encoder(source, plan).to_records(blank)  # needs the library that encodes
        except (DependencyError, RecipeError) as error:
            left_out[number] = str(error)
            errors.append(error)
        else:
            plans[number] = plan
    if not plans:
        raise errors[0]
    return plans


def _encoder(source: Source, plan: BuildPlan) -> SampleEncoder:
    rule = plan.label_rule
    return SampleEncoder(source, plan.recipe, plan.augmentation, plan.fields, rule, is_labelled=rule is None)


def _start(encoders: dict[int, SampleEncoder], sample: Sample) -> float:
    """Make a sample's records once, so that libraries are imported; return the seconds of the augmentation."""
    return sum(each.augment for each in _try_portion(encoders, [sample], 0.0, 0).tried)


class _Tried(NamedTuple):
    """A sample that was tried: seconds of loading it, and of augmenting it once in each size.

    By the number of the recipe: seconds of its clean arrays, and the costs of a clean and an augmented record.
    """

    load: float
    augment: float
    clean: dict[int, float]
    records: dict[int, tuple[Cost, Cost]]


class _Kept(NamedTuple):
    """A sample's clean arrays, and its records of all bands: of the clean variant, then of an augmented one."""

    clean: dict[str, Array]
    records: list[bytes]


class _Portion(NamedTuple):
    """What a worker found out of its samples."""

    tried: list[_Tried]
    kept: list[dict[int, _Kept]]
    failed: list[tuple[str, str]]


def _try_portion(encoders: dict[int, SampleEncoder], samples: Sequence[Sample], seconds: float, keep: int) -> _Portion:
    """Try samples until the time is up, but a few at least; return the records of the first ones."""
    keep_freed_memory()  # as in a build: without it, encoding takes up to twice as long
    end = time.monotonic() + seconds
    portion = _Portion([], [], [])
    first, count = 0, 1
    while first < len(samples) and (len(portion.tried) < _LEAST or time.monotonic() < end):
        _try_group(encoders, samples[first : first + count], portion, keep)
        first, count = first + count, min(2 * count, _GROUP)
    return portion


def _try_group(encoders: dict[int, SampleEncoder], samples: Sequence[Sample], portion: _Portion, keep: int) -> None:
    """Make the records of a few samples by each recipe, one recipe after another, as builds do."""
    keys = {number: _without_codec(encoder.recipe) for number, encoder in encoders.items()}
    alike = {keys[number]: encoder for number, encoder in encoders.items()}
    loads: list[float] = []
    arrays: list[dict[str, _Arrays]] = []
    for sample in samples:
        try:
            item, load = _timed(next(iter(encoders.values())).load, sample)
            arrays.append({key: _make_arrays(encoder, item, sample) for key, encoder in alike.items()})
        except SampleError as error:
            portion.failed.append((sample.path, error.reason))
        else:
            loads.append(load)
    made = {number: [_encode(encoder, each[keys[number]]) for each in arrays] for number, encoder in encoders.items()}
    for position, (load, each) in enumerate(zip(loads, arrays, strict=True)):
        of = {number: each[key] for number, key in keys.items()}
        portion.tried.append(
            _Tried(
                load,
                sum(one.augment_seconds for one in each.values()),
                {number: one.clean_seconds for number, one in of.items()},
                {number: records[position][0] for number, records in made.items()},
            )
        )
        if len(portion.kept) < keep:
            portion.kept.append({number: _Kept(of[number].clean, made[number][position][1]) for number in made})


class _Arrays(NamedTuple):
    """A sample's arrays in one size, clean and augmented once, and the seconds that each took."""

    clean: dict[str, Array]
    clean_seconds: float
    augmented: dict[str, Array]
    augment_seconds: float


def _make_arrays(encoder: SampleEncoder, item: Item, sample: Sample) -> _Arrays:
    """Return what the encoders of one size encode. Raises SampleError."""
    (clean, *_), seconds = _timed(clean_and_count, item, encoder.fields, encoder.recipe, sample.path)
    augmented = _timed(encoder.augment, clean, sample, 1) if encoder.recipe.variants else (clean, 0.0)
    return _Arrays(clean, seconds, *augmented)


def _encode(encoder: SampleEncoder, arrays: _Arrays) -> tuple[tuple[Cost, Cost], list[bytes]]:
    """Return the costs of a clean and of an augmented record, and the records."""
    records, seconds = _timed(encoder.to_records, arrays.clean)
    clean = Cost(_bytes(records, encoder.fields), seconds)
    if not encoder.recipe.variants:
        return (clean, clean), records
    further, seconds = _timed(encoder.to_records, arrays.augmented)
    augmented = Cost(_bytes(further, encoder.fields), arrays.augment_seconds + seconds)
    return (clean, augmented), [*records, *further]


def _timed(function: Any, *arguments: Any) -> tuple[Any, float]:
    """Return what a function returns, and the seconds that it took."""
    began = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - began


def _without_codec(recipe: Recipe) -> str:
    """Return a text that is equal for recipes of the same clean arrays."""
    whole = {**recipe.to_dict(), "has_variants": bool(recipe.variants)}
    return json.dumps({name: value for name, value in whole.items() if name not in _OF_CODEC}, sort_keys=True)


def _bytes(records: Sequence[bytes], fields: Sequence[Field]) -> float:
    return sum(on_disk_bytes(len(record), fields) for record in records)


def _mean(tried: Sequence[Cost], warm: Sequence[Cost]) -> Cost:
    """Return the mean bytes of what was tried, and the mean seconds of what counts of it."""
    return Cost(statistics.mean(each.bytes for each in tried), statistics.mean(each.seconds for each in warm))


@dataclass(frozen=True)
class _KnownRecords(SampleEncoder):
    """Gives records that are made already, over and over."""

    known: Sequence[_Kept] = field(default=())

    def load(self, sample: Sample) -> Item:
        """Return nothing: the records are known."""
        return Item({})

    def encode(self, sample: Sample, parts: Sequence[Part], item: Item | None = None) -> EncodedSample:
        """Return the records of one of the known samples."""
        one = self.known[sample.number % len(self.known)]
        variants = len(one.records) // len(part_layouts(self.fields))
        made = dict(zip(parts_of(range(variants), self.fields), one.records, strict=True))
        return EncodedSample(Item({}), one.clean, [made[part] for part in parts], [{}] * (1 + variants), {})


def _write_cache(plan: BuildPlan, known: Sequence[_Kept], folder: Path, most: int) -> tuple[Path, float, float]:
    """Write a cache of known records, repeated up to `most` times in all.

    Return it, the seconds that writing a record takes, and those of the tables of all. Waiting for the disk is not
    counted: in a build, other workers go on meanwhile.
    """
    bands = len(part_layouts(plan.fields))  # of the clean variant, which is what is read
    mean = statistics.mean(sum(map(len, one.records[:bands])) for one in known)
    count = min(most, _CACHE_RECORDS, max(2 * len(known), int(_CACHE_BYTES / mean)))
    samples = [Sample(number, f"{number}", bytes=1) for number in range(count)]
    recipe = replace(plan.recipe, variants=min(1, plan.recipe.variants))
    plan = replace(
        plan,
        recipe=recipe,
        listing=Listing(samples),
        blocks=plan_blocks(samples, plan.fields, recipe),
        label_rule=LabelRule(None),
    )
    encoder = _KnownRecords(
        _NoSource(), recipe, plan.augmentation, plan.fields, plan.label_rule, is_labelled=False, known=known
    )
    work = folder / WORK_NAME
    work.mkdir(parents=True)
    began = time.process_time()
    with hold(work) as run:
        context = BuildContext(encoder, work, folder, skip_errors=False, run=run)
        shards = Scheduler(context, plan.blocks).build(Executor(jobs=1))
        write_seconds = (time.process_time() - began) / (count * (1 + recipe.variants))
        _, finish_seconds = _timed(finish_cache, folder, plan, shards)
    shutil.rmtree(work)
    return folder, write_seconds, finish_seconds


class _NoSource:
    """The source of records that are made already."""

    def list(self) -> Listing:
        return Listing([])

    def load(self, sample: Sample) -> Item:
        raise SampleError(sample.path, "is of no source")
