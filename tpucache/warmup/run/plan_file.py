"""The plan of an unfinished build, in its work folder. A later run continues the build only if its plan is the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tpucache.errors import BuildError, RecipeError, SourceError
from tpucache.recipe import EXTENT
from tpucache.store.files import read_file, write_atomically
from tpucache.store.manifest import Manifest
from tpucache.store.samples import Column, SampleTable, Strings, encode_columns
from tpucache.text import parse_json
from tpucache.warmup.library_versions import version_differences, versions
from tpucache.warmup.listing import SIZE_COLUMN, check_asked, recipe_differences, sample_difference, sizes_of
from tpucache.warmup.plan import BuildPlan
from tpucache.warmup.run.folder import hold
from tpucache.warmup.sources.source import Sample

_PLAN_NAME: Final = "plan.json"
_LISTING_NAME: Final = "listing.npz"
#: The files that another machine needs to continue a build.
PLAN_FILES: Final = (_LISTING_NAME, _PLAN_NAME)

_log: Final = logging.getLogger("tpucache")


def has_plan(work: Path) -> bool:
    """Return whether a build was started in a work folder."""
    return (work / _PLAN_NAME).exists()


def is_adding_to(work: Path, manifest: Manifest) -> bool:
    """Return whether a work folder has an unfinished addition to the cache of `manifest`. It must not be removed."""
    with hold(work):
        try:
            saved = _read_plan(work)
        except FileNotFoundError:
            return False
        return bool(saved["before"] == manifest.identity)


def save_or_compare_plan(work: Path, plan: BuildPlan, *, is_sent: bool = False) -> tuple[list[Sample], tuple[str, ...]]:
    """Write a plan and the listing of its source, or compare the plan with that of an interrupted run.

    If the interrupted run has built nothing, for example because its first sample could not be used, the new plan
    replaces the plan of that run.
    """
    if has_plan(work):
        try:
            return compare_plan(work, plan)
        except (RecipeError, SourceError):
            if is_sent or _has_results(work):
                raise
    save_listing(work, plan)
    write_atomically(work / _PLAN_NAME, _encode(plan))
    return [], ()


def save_listing(work: Path, plan: BuildPlan) -> None:
    """Write the paths and sizes of all samples, so that a later run can report how the source has changed."""
    samples = plan.listing.samples
    paths: Column = Strings.pack([sample.path for sample in samples])
    write_atomically(work / _LISTING_NAME, encode_columns({"path": paths, SIZE_COLUMN: sizes_of(samples)}))


def _has_results(work: Path) -> bool:
    return any(path.name.startswith(("shard-", "spool-")) for path in work.iterdir())


def _read_plan(work: Path) -> dict[str, Any]:
    path = work / _PLAN_NAME
    try:
        content = parse_json(read_file(path))
        if not isinstance(content, dict):
            raise ValueError(f"it is a {type(content).__name__}, not an object")
    except ValueError as error:
        raise BuildError(f"{path} cannot be read: {error}. Remove {work} to give up the unfinished build") from error
    return content


def compare_plan(work: Path, plan: BuildPlan) -> tuple[list[Sample], tuple[str, ...]]:
    """Compare a plan with the plan in a work folder, and warn of other versions of libraries."""
    saved, now = _read_plan(work), json.loads(_encode(plan))
    cache, samples = work.parent, plan.listing.samples
    _check_recipe(work, saved["recipe"], now["recipe"])
    check_asked(cache, saved["asked"], now["asked"])
    table = SampleTable(work / _LISTING_NAME, saved["source"]["samples"])
    if saved["source"] != now["source"]:
        raise SourceError(
            f"{cache} was started from {saved['source']['samples']} samples, the source now has {len(samples)}; "
            f"{sample_difference(table, samples)}. "
            "Bring the source back as it was to continue, or give another folder to build anew."
        )
    labels = saved["labels"]["asked"]
    if labels != plan.labels:
        raise SourceError(
            f"{cache} was started with --labels {labels}, now {plan.labels}: give the same options to continue"
        )
    if (saved["before"], saved["fields"], saved["retry"]) != (now["before"], now["fields"], now["retry"]):
        raise BuildError(
            f"{cache} has changed since this build began, or only one of its runs had --retry: remove {work} to give "
            "up the unfinished build"
        )
    if other := version_differences(saved["versions"]):
        _log.warning(
            "%s was started with other versions of libraries, so records may differ: %s", cache, "; ".join(other)
        )
    sizes: Any = table[SIZE_COLUMN]
    changed = [s for s, size in zip(samples, sizes.tolist(), strict=True) if 0 < size != s.bytes > 0]
    return changed, tuple(other)


def _check_recipe(work: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = recipe_differences(saved, now)
    changed += [f"{name} {saved[name]}, now {now[name]}" for name in EXTENT if saved[name] != now[name]]
    if changed:
        raise RecipeError(
            f"{work.parent} was started with another recipe: {'; '.join(changed)}. Give the same options to continue, "
            f"another folder to build anew, or remove {work} to give up the unfinished build."
        )


def _encode(plan: BuildPlan) -> bytes:
    content = {
        "recipe": plan.full_recipe,
        "source": plan.source,
        "labels": {"asked": plan.labels, "unused": list(plan.unused_labels)},
        "left_out": dict(plan.listing.left_out),
        "asked": dict(plan.listing.asked),
        "fields": [field.to_dict() for field in plan.fields],
        "before": plan.existing.manifest.identity if plan.existing else "",
        "retry": plan.is_retry,
        "versions": versions(),
    }
    return json.dumps(content).encode()
