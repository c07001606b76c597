"""dry_run: lists a source and encodes a few samples, to show what a warmup would do. It writes no files."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tpucache.errors import SampleError, SourceError
from tpucache.recipe import Recipe
from tpucache.store.fields import IMAGE
from tpucache.warmup.blocks import samples_a_task
from tpucache.warmup.build_options import BuildOptions, options_by_name
from tpucache.warmup.estimate import Estimate, Remaining, Trials, estimate
from tpucache.warmup.plan import BuildPlan, make_encoder, meant_source, plan_build
from tpucache.warmup.records import naming
from tpucache.warmup.records.encode import EncodedSample, SampleEncoder
from tpucache.warmup.records.presize import open_image
from tpucache.warmup.run.folder import check_source, finished_cache
from tpucache.warmup.sources import to_source
from tpucache.warmup.sources.folder import NO_SUFFIX
from tpucache.warmup.sources.source import Items, Label, Sample, Source, source_name
from tpucache.warmup.tables import label_column, label_facts

_TRIED: Final = 64
_SECONDS: Final = 8.0


@dataclass(frozen=True)
class Tried:
    """A sample that was tried: its path, its label, and the reason why the sample cannot be used, or ""."""

    path: str
    label: Label
    reason: str = ""


@dataclass(frozen=True)
class DryRun:
    """What a warmup would do.

    `files` counts the samples by suffix, and `left_out` the other files. `tried` are a few samples, spread over the
    source; `sizes` are their (width, height), and `kinds` counts their file formats and modes. `labels`, `classes` and
    `class_counts` are those of a manifest; if labels are stored in the samples, only the tried samples count. `listed`
    are samples with a fault in the listing, such as a bad label: without `on_error="skip"`, a build refuses them before
    it begins. `estimate` includes all variants, and `jobs` is the number of workers.
    """

    samples: int
    files: Mapping[str, int]
    left_out: Mapping[str, int]
    tried: Sequence[Tried]
    listed: Sequence[Tried]
    sizes: Sequence[tuple[int, int]]
    kinds: Mapping[str, int]
    labels: Mapping[str, Any]
    classes: tuple[str, ...]
    class_counts: tuple[int, ...]
    estimate: Estimate
    jobs: int

    @property
    def failed(self) -> list[Tried]:
        """The samples that were tried and cannot be used."""
        return [tried for tried in self.tried if tried.reason]

    @property
    def seconds(self) -> float:
        """The estimated seconds of the warmup with all its workers."""
        return self.estimate.process_seconds / self.jobs

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "samples": self.samples,
            "files": dict(self.files),
            "left_out": dict(self.left_out),
            "tried": len(self.tried),
            "failed": [{"path": tried.path, "reason": tried.reason} for tried in self.failed],
            "listed": [{"path": tried.path, "reason": tried.reason} for tried in self.listed],
            "sizes": {name: list(size) for name, size in self.size_range().items()},
            "kinds": dict(self.kinds),
            "labels": dict(self.labels),
            "classes": list(self.classes),
            "class_counts": list(self.class_counts),
            "records": self.estimate.records,
            "bytes": self.estimate.bytes,
            "working_bytes": self.estimate.spooled,
            "free_bytes": self.estimate.free,
            "process_seconds": self.estimate.process_seconds,
            "seconds": self.seconds,
        }

    def size_range(self) -> dict[str, tuple[int, int]]:
        """Return the smallest, median and largest width and height, independently; an empty dict without images."""
        if not self.sizes:
            return {}
        widths, heights = zip(*self.sizes, strict=True)
        return {
            "smallest": (min(widths), min(heights)),
            "median": (statistics.median_low(widths), statistics.median_low(heights)),
            "largest": (max(widths), max(heights)),
        }


@options_by_name(BuildOptions)
def dry_run(
    source: str | Path | Source | Items, cache: str | Path, recipe: Recipe | None = None, *, options: BuildOptions
) -> DryRun:
    """Return what `build_cache` would do with the same source, recipe and options. No file is written.

    The options are the fields of BuildOptions, given by name. The result lists samples that fail. Raises the errors of
    `build_cache` that concern the source as a whole, the recipe or the existing cache.
    """
    recipe, cache = recipe or Recipe(), Path(cache).absolute()
    if isinstance(source, (str, Path)):
        check_source(source, cache)
    source = meant_source(to_source(source), cache, options)
    listing = source.list()
    if not listing.samples:
        raise SourceError(f"{source_name(source)} has no samples")
    plan = plan_build(source, listing, recipe, options, finished_cache(cache))
    look = _Look(recipe)
    encoder = make_encoder(source, recipe, plan)
    above = next(folder for folder in (cache, *cache.parents) if folder.exists())
    trials = Trials(_TRIED, _SECONDS, margin=0.0, look=look.take)
    expected = estimate(encoder, _all_of(plan), above, options.jobs, trials=trials)
    column, names, counts = _labels(plan, look.tried)
    suffixes = (PurePosixPath(each.path.partition("#")[0]).suffix.lower() or NO_SUFFIX for each in listing.samples)
    return DryRun(
        samples=len(listing.samples),
        files=dict(Counter(suffixes).most_common()),
        left_out=listing.left_out,
        tried=look.tried,
        listed=_listed(plan, encoder),
        sizes=look.sizes,
        kinds=dict(look.kinds.most_common()),
        labels=label_facts(options.labels, column, bool(names), plan.unused_labels),
        classes=names,
        class_counts=counts,
        estimate=expected,
        jobs=options.jobs or os.cpu_count() or 1,
    )


class _Look:
    """Collects labels, sizes and formats of the tried samples."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.tried: list[Tried] = []
        self.sizes: list[tuple[int, int]] = []
        self.kinds = Counter[str]()

    def take(self, sample: Sample, result: EncodedSample | SampleError) -> None:
        if isinstance(result, SampleError):
            self.tried.append(Tried(sample.path, sample.label, reason=result.reason))
            return
        label = sample.label if sample.label is not None else result.item.label
        self.tried.append(Tried(sample.path, label))
        image = result.item.fields.get(IMAGE)
        if image is not None:
            with naming(sample.path), open_image(image, self._recipe) as opened:
                self.sizes.append(opened.size)
                self.kinds[opened.kind] += 1


def _listed(plan: BuildPlan, encoder: SampleEncoder) -> list[Tried]:
    samples = (sample for block in plan.blocks for sample in block.samples)
    faults = ((sample, encoder.listed_fault(sample)) for sample in samples)
    return [Tried(sample.path, sample.label, reason=reason) for sample, reason in faults if reason]


def _all_of(plan: BuildPlan) -> Remaining:
    blocks = plan.blocks
    samples = [(sample, block.variants) for block in blocks for sample in block.samples]
    most = max((samples_a_task(block, plan.fields, len(samples)) for block in blocks), default=0)
    return Remaining(samples, [len(block.samples) * len(block.variants) for block in blocks], most)


def _labels(plan: BuildPlan, tried: Sequence[Tried]) -> tuple[Any, tuple[str, ...], tuple[int, ...]]:
    """Return the column of labels (None without labels), the classes, and the number of samples of each class."""
    every: Sequence[Sample | Tried] = plan.listing.samples
    if plan.label_place != "listed":
        every = [each for each in tried if not each.reason]
    pairs = [(each.label, each.path) for each in every if each.label is not None]
    if not pairs:
        return None, (), ()
    labels, paths = zip(*pairs, strict=True)
    return label_column(labels, paths, plan.listing.classes)
