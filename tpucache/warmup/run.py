"""build_cache: plan, fan out over joblib's workers, gather, and write the manifest last."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import joblib
from joblib.externals.loky.process_executor import BrokenProcessPool

from tpucache.errors import BuildError, NotACacheError, RecipeError, SourceError
from tpucache.recipe import Recipe, differences
from tpucache.store.files import write_atomically
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.manifest import Manifest
from tpucache.warmup.augment import resolve
from tpucache.warmup.build import WORK_NAME, BlockTask, build_block
from tpucache.warmup.finish import finish_cache
from tpucache.warmup.lock import hold
from tpucache.warmup.plan import listing_sha256, plan_blocks
from tpucache.warmup.receipt import BuiltBlock, load_receipt
from tpucache.warmup.sources import open_source
from tpucache.warmup.sources.base import Listing, Source

_PLAN_NAME: Final = "plan.json"
_REMOVALS: Final = 10

#: Told after the plan is made (no block yet: samples that stand already) and after each block.
Report = Callable[[int, int, int], None]


def build_cache(
    source: str | Path | Source,
    cache: str | Path,
    recipe: Recipe | None = None,
    *,
    jobs: int | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    report: Report = lambda samples, total, skipped: None,
) -> Manifest:
    """Build a cache of every sample of a source, or finish one that was interrupted, and return its manifest.

    The records are the same whatever `jobs` (default: all cores), the order of the workers, or how often the run was
    killed. `report` is called with the samples dealt with so far, all samples, and those skipped. A finished cache of
    the same source and recipe is returned as it stands.

    Raises SourceError or SampleError for the source, RecipeError for a recipe that cannot be built or is not the one
    the cache was begun with, BuildError when a worker or the disk fails. What stands is kept for the next run.
    """
    source = source if not isinstance(source, (str, Path)) else open_source(source)
    recipe = recipe or Recipe()
    cache = Path(cache)
    listing = source.list()
    if not listing.samples:
        raise SourceError(f"{source!r} has no samples")
    plan = _plan(recipe, listing)
    with _work_folder(cache) as (work, run):
        with contextlib.suppress(NotACacheError):
            manifest = Manifest.load(cache)
            _check_plan(cache, {"recipe": manifest.recipe, "source": manifest.source}, plan)
            return manifest
        _begin(work, plan)
        blocks = plan_blocks(listing.samples, recipe)
        task = functools.partial(
            BlockTask,
            source=source,
            recipe=recipe,
            augmentation=plan["recipe"]["augmentation"],
            cache=cache,
            skip_errors=on_error == "skip",
            run=run,
        )
        built = _build_blocks(work, [task(block) for block in blocks], jobs, report)
        return finish_cache(cache, plan, listing, built)


def _plan(recipe: Recipe, listing: Listing) -> dict[str, Any]:
    """Return what a cache is begun with, as JSON values: a rerun must say the same."""
    augmentation = resolve(recipe.augment, recipe.height, recipe.width) if recipe.variants else {}
    return {
        "recipe": {**recipe.to_dict(), "augmentation": augmentation},
        "source": {"samples": len(listing.samples), "sha256": listing_sha256(listing)},
    }


@contextlib.contextmanager
def _work_folder(cache: Path) -> Iterator[tuple[Path, str]]:
    """Make the cache's folder and hold its work folder, yielding that and the run's name; a finished cache has none."""
    work = cache / WORK_NAME
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / MANIFEST_NAME).exists() and not work.exists() and any(cache.iterdir()):
            raise BuildError(
                f"{cache} is neither empty nor a cache: give a new folder, so that nothing of yours is written over"
            )
        work.mkdir(exist_ok=True)
        try:
            with hold(work) as run:
                yield work, run
        finally:
            if (cache / MANIFEST_NAME).exists():
                _remove(work)
    except OSError as error:
        raise BuildError(f"{cache} cannot be written: {error}") from error


def _remove(work: Path) -> None:
    """Remove the work folder, though an orphaned worker may just be putting a last file there. Raises OSError."""
    for _ in range(_REMOVALS):
        shutil.rmtree(work, ignore_errors=True)
    if work.exists():
        shutil.rmtree(work)


def _begin(work: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan down, or compare it with the one an interrupted run wrote; remove what that run left half-done."""
    path = work / _PLAN_NAME
    if path.exists():
        _check_plan(work.parent, json.loads(path.read_bytes()), plan)
    else:
        write_atomically(path, json.dumps(plan).encode())
    for leftover in (*work.glob("*.lmdb.*"), *work.glob("*.tmp"), *work.glob(".*.tmp")):
        leftover.unlink(missing_ok=True)


def _check_plan(cache: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = differences(before["recipe"], now["recipe"])
    variants = before["recipe"]["variants"], now["recipe"]["variants"]
    if variants[0] != variants[1]:
        changed.append(f"variants {variants[0]}, now {variants[1]}")
    if changed:
        raise RecipeError(
            f"{cache} was begun with another recipe: {'; '.join(changed)}. "
            "Give the same options to go on, or another folder to build anew."
        )
    if before["source"] != now["source"]:
        raise SourceError(
            f"{cache} was begun from {before['source']['samples']} samples, the source now has "
            f"{now['source']['samples']}, or others, in another order or with other labels. "
            "Bring the source back as it was to go on, or give another folder to build anew."
        )


def _build_blocks(work: Path, tasks: Sequence[BlockTask], jobs: int | None, report: Report) -> list[BuiltBlock]:
    """Return all blocks in order: those that stand, and the others built now."""
    total = sum(len(task.block.samples) for task in tasks)
    built: dict[int, BuiltBlock] = {}
    for task in tasks:
        standing = load_receipt(work, task.block.number)
        # What an earlier run was allowed to skip, this one may have to fail at.
        if standing is not None and (task.skip_errors or not standing.skipped):
            built[standing.number] = standing

    def tell() -> None:
        skipped = sum(len(block.skipped) for block in built.values())
        report(sum(len(block.sample_numbers) for block in built.values()) + skipped, total, skipped)

    tell()
    try:
        workers = joblib.Parallel(n_jobs=jobs or -1, batch_size=1, return_as="generator_unordered")
        missing = [task for task in tasks if task.block.number not in built]
        for block in workers(joblib.delayed(build_block)(task) for task in missing):
            built[block.number] = block
            tell()
    except BrokenProcessPool as error:
        raise BuildError(
            "A worker process died, most likely for want of memory. What it had finished stands: "
            "run the same warmup again, with fewer --jobs."
        ) from error
    return [built[task.block.number] for task in tasks]
