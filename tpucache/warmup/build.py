"""build_cache: plan, share the work out, gather, and write the manifest last."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from tpucache.errors import SourceError, UsageError
from tpucache.recipe import Recipe
from tpucache.store.fields import IMAGE
from tpucache.store.format import WORK_NAME
from tpucache.store.manifest import Manifest
from tpucache.warmup.deadline import Deadline
from tpucache.warmup.planning.estimate import (
    Estimate,
    check_kaggle_bytes,
    check_kaggle_files,
    check_room,
    estimate,
    kaggle_blocks,
)
from tpucache.warmup.planning.plan import PLAN_NAME, Plan, begin, is_begun, make_plan, save_listing, version_differences
from tpucache.warmup.records.presize import slow_parts
from tpucache.warmup.running.consistency import check_records, known_records
from tpucache.warmup.running.context import Job
from tpucache.warmup.running.executor import Engine
from tpucache.warmup.running.scheduler import Builder, Standing
from tpucache.warmup.sources import LabelKind, label_source, open_source
from tpucache.warmup.sources.base import Source
from tpucache.warmup.tables import finish_cache
from tpucache.warmup.work.folder import cache_folder, check_source, remove_folder, remove_old_tables
from tpucache.warmup.work.lock import hold

_ADVICE: Final = "make room, or use another folder, --codec jpeg, a smaller --size or fewer --variants"
_ADVICE_ADDING: Final = "make room, or add fewer variants or samples"
_ADVICE_RESUMING: Final = "make room, then run the same command again; what is finished is kept"

_log: Final = logging.getLogger("tpucache")


def build_cache(
    source: str | Path | Source,
    cache: str | Path,
    recipe: Recipe | None = None,
    *,
    jobs: int | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    time_limit: float | None = None,
    target: Literal["kaggle"] | None = None,
    labels: LabelKind = "auto",
    engine: Engine | None = None,
    report: Callable[[Standing], None] = lambda standing: None,
    announce: Callable[[Estimate], None] | None = None,
) -> Manifest:
    """Build a cache of every sample of a source, finish one that was interrupted, or add to a finished one.

    The records are the same whatever `jobs` (default: all cores), the order of the workers, or how often the run was
    killed. A finished cache of the same source and recipe is returned as it stands; more samples or more variants are
    added to it, and nothing that stands is built again. `time_limit` is in seconds. `target` "kaggle" keeps within what
    Kaggle keeps. `labels` says what labels are: by "auto", whole numbers are classes. `announce` is called with what
    there is to do, from a few samples tried first, and `report` with the progress.

    Raises UsageError for values that no argument has, SourceError or SampleError for the source, RecipeError for a
    recipe that cannot be built or is not the one the cache was begun with, UnfinishedError when the time is up,
    BuildError when a worker or the disk fails or the estimate does not fit, DamageError when a finished cache lacks a
    file or a part of one. What was done is kept for the next run.
    """
    deadline = Deadline.of(time_limit)
    recipe = recipe or Recipe()
    cache = Path(cache).absolute()  # workers that are used again may be in another folder
    if isinstance(source, (str, Path)):
        check_source(source, cache)
        source = open_source(source)
    if on_error not in ("fail", "skip"):
        raise UsageError(f'on_error is "fail" or "skip", not {on_error!r}')
    if target not in (None, "kaggle"):
        raise UsageError(f'target is "kaggle" or left out, not {target!r}')
    source = label_source(source, labels)
    engine = engine or Engine(jobs=jobs)
    if target == "kaggle":
        recipe = dataclasses.replace(recipe, max_blocks=recipe.max_blocks or kaggle_blocks(recipe.variants))
    with deadline.interrupting("the source was listed"):
        listing = source.list()
    if not listing.samples:
        raise SourceError(f"{source!r} has no samples")
    with cache_folder(cache):
        with deadline.interrupting("the first samples were tried"):
            plan = make_plan(source, listing, recipe, cache, labels)
        work = cache / WORK_NAME
        if plan.before is not None and not plan.blocks:
            if work.exists() and not is_begun(work, plan.before):
                _clear(cache, work, plan.before)
            return plan.before
        if target == "kaggle":
            existing = len(plan.before.shards) if plan.before else 0
            check_kaggle_files(existing + sum(len(block.variants) for block in plan.blocks))
        augmentation = plan.told["recipe"]["augmentation"]
        skip = on_error == "skip"
        job = Job(source, recipe, augmentation, plan.fields, work, cache, skip, "", plan.labels, deadline)

        if plan.before is not None:
            other_versions = tuple(version_differences(plan.before.created_by))
            job = dataclasses.replace(job, other_versions=other_versions)
            with deadline.interrupting("samples of the cache were compared"):
                check_records(job, plan.listing.samples, known_records(cache, plan.before))

        def announce_work(builder: Builder, advice: str) -> None:
            if announce is not None:
                expected = estimate(job, builder.remaining(), engine.jobs)
                announce(expected)
                check_room(expected, cache, advice)
                if target == "kaggle":
                    check_kaggle_bytes(expected, cache)

        manifest = _build(job, plan, engine, report, announce_work)
        _clear(cache, work, manifest)
        return manifest


def _build(
    job: Job,
    plan: Plan,
    engine: Engine,
    report: Callable[[Standing], None],
    announce: Callable[[Builder, str], None],
) -> Manifest:
    """Build what a plan says, from what an interrupted run made of it on; `announce` may refuse that."""
    resumed = (job.work / PLAN_NAME).exists()
    if not resumed:  # so that a refusal leaves nothing behind
        announce(Builder(job, plan.blocks), _ADVICE if plan.before is None else _ADVICE_ADDING)
    job.work.mkdir(exist_ok=True)
    with hold(job.work) as run:
        changed, other = begin(job.work, plan)
        if plan.fields[0].name == IMAGE:
            for line in slow_parts():
                _log.warning("%s", line)
        job = dataclasses.replace(job, run=run, other_versions=tuple(sorted({*job.other_versions, *other})))
        builder = Builder(job, plan.blocks, report)
        if changed:
            builder.check_unchanged(changed)
            save_listing(job.work, plan)
        with job.deadline.interrupting("samples were compared with those that are done"):
            check_records(job, plan.listing.samples, builder.known)
        if resumed:
            announce(builder, _ADVICE_RESUMING)
        shards = builder.build(engine)
        return finish_cache(job.shards, plan.told, plan.listing, shards, plan.before)


def _clear(cache: Path, work: Path, manifest: Manifest) -> None:
    """Leave nothing but the finished cache; the work folder goes last, as it tells that there may be more to remove."""
    remove_old_tables(cache, manifest)
    remove_folder(work)
