"""build_cache: plan, share the work out, gather, and write the manifest last."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from tpucache.errors import SourceError
from tpucache.recipe import Recipe
from tpucache.store.format import WORK_NAME
from tpucache.store.manifest import Manifest
from tpucache.warmup.begin import begin, is_begun, make_plan, save_listing
from tpucache.warmup.builder import Builder, Standing
from tpucache.warmup.engine import Engine
from tpucache.warmup.estimate import (
    Estimate,
    check_kaggle_bytes,
    check_kaggle_files,
    check_room,
    estimate,
    kaggle_blocks,
)
from tpucache.warmup.finish import finish_cache
from tpucache.warmup.folder import cache_folder, remove_folder, remove_old_tables
from tpucache.warmup.job import Job
from tpucache.warmup.lock import hold
from tpucache.warmup.presize import slow_parts
from tpucache.warmup.sources import open_source
from tpucache.warmup.sources.base import Source

# What a time limit leaves for the tasks that are running and for the cleaning up after them.
_MARGIN_SHARE: Final = 0.1
_MARGIN_SECONDS: Final = 60.0

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
    engine: Engine | None = None,
    report: Callable[[Standing], None] = lambda standing: None,
    announce: Callable[[Estimate], None] | None = None,
) -> Manifest:
    """Build a cache of every sample of a source, finish one that was interrupted, or add to a finished one.

    The records are the same whatever `jobs` (default: all cores), the order of the workers, or how often the run was
    killed. A finished cache of the same source and recipe is returned as it stands; more samples or more variants are
    added to it, and nothing that stands is built again. `time_limit` is in seconds. `target` "kaggle" keeps within what
    Kaggle keeps. `announce` is told what there is to do, from a few samples tried first, and `report` how far it is.

    Raises SourceError or SampleError for the source, RecipeError for a recipe that cannot be built or is not the one
    the cache was begun with, UnfinishedError when the time is up, BuildError when a worker or the disk fails or the
    estimate does not fit. What stands is kept for the next run.
    """
    began = time.monotonic()
    source = source if not isinstance(source, (str, Path)) else open_source(source)
    recipe, cache = recipe or Recipe(), Path(cache)
    if target == "kaggle":
        recipe = dataclasses.replace(recipe, max_blocks=recipe.max_blocks or kaggle_blocks(recipe.variants))
    listing = source.list()
    if not listing.samples:
        raise SourceError(f"{source!r} has no samples")
    with cache_folder(cache):
        plan = make_plan(source, listing, recipe, cache)
        work = cache / WORK_NAME
        if plan.before is not None and not plan.blocks:
            if work.exists() and not is_begun(work, plan.before):
                _clear(cache, work, plan.before)
            return plan.before
        if target == "kaggle":
            standing = len(plan.before.shards) if plan.before else 0
            check_kaggle_files(standing + sum(len(block.variants) for block in plan.blocks))
        work.mkdir(exist_ok=True)
        with hold(work) as run:
            changed = begin(work, plan)
            if plan.fields[0].name == "image":
                for line in slow_parts():
                    _log.warning("%s", line)
            augmentation = plan.told["recipe"]["augmentation"]
            job = Job(source, recipe, augmentation, plan.fields, work, cache, on_error == "skip", run, plan.labels)
            deadline = None if time_limit is None else began + _usable(time_limit)
            builder = Builder(job, plan.blocks, report, deadline)
            if changed:
                builder.check_unchanged(changed)
                save_listing(work, plan)
            if announce is not None:
                expected = estimate(job, builder.left())
                announce(expected)
                check_room(expected, cache)
                if target == "kaggle":
                    check_kaggle_bytes(expected, cache)
            shards = builder.build(engine or Engine(jobs=jobs))
            manifest = finish_cache(cache, plan.told, plan.listing, shards, plan.before)
        _clear(cache, work, manifest)
        return manifest


def _usable(time_limit: float) -> float:
    return time_limit - min(_MARGIN_SECONDS, _MARGIN_SHARE * time_limit)


def _clear(cache: Path, work: Path, manifest: Manifest) -> None:
    """Leave nothing but the finished cache; the work folder goes last, as it tells that there may be more to remove."""
    remove_old_tables(cache, manifest)
    remove_folder(work)
