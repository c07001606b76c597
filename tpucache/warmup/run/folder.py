"""The folders of a build: the cache's folder and, while a build is unfinished, the work folder in it, with its plan."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tpucache.errors import (
    BuildError,
    DamageError,
    FormatError,
    NoRoomError,
    NotACacheError,
    RecipeError,
    SourceError,
    UsageError,
)
from tpucache.recipe import EXTENT
from tpucache.store import lock
from tpucache.store.cache import Cache
from tpucache.store.copying import CLAIM_NAME
from tpucache.store.files import check_apart, read_file, write_atomically
from tpucache.store.format import (
    MANIFEST_NAME,
    SHARD_NAME,
    TABLE_NAME,
    TIMES_NAME,
    VERSION_NAME,
    WORK_NAME,
    version_name,
)
from tpucache.store.growing import LOCK_NAME, new_identity
from tpucache.store.history import refuse_version, version_files
from tpucache.store.manifest import Manifest
from tpucache.store.samples import Column, SampleTable, Strings, encode_columns
from tpucache.text import parse_json
from tpucache.warmup.library_versions import version_differences, versions
from tpucache.warmup.listing import SIZE_COLUMN, check_asked, compare_sizes, recipe_differences, sizes_of
from tpucache.warmup.plan import BuildPlan
from tpucache.warmup.sources.source import Sample

_log: Final = logging.getLogger("tpucache")

_REMOVALS: Final = 10

#: The errors of a full disk, an exhausted quota, and a file above the size limit.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def cache_folder(cache: Path) -> Iterator[None]:
    refuse_version(cache)
    made: list[Path] = []
    try:
        made = _make_folders(cache)
        if (cache / CLAIM_NAME).exists():
            raise BuildError(
                f"{cache} is being copied, or was not copied to its end: finish the copy, or give another folder"
            )
        if not _is_cache(cache) and any(cache.iterdir()):
            raise BuildError(
                f"{cache} is neither empty nor a cache: give a new folder, so that none of your files is overwritten"
            )
        yield
    except OSError as error:
        raise disk_failure(cache, error) from error
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # the folder is not empty
                folder.rmdir()


def check_source(source: str | Path, cache: Path) -> None:
    """Raise UsageError if a source folder and a new cache's folder are the same, or if one contains the other."""
    if not Path(source).is_dir() or _is_cache(cache):
        return
    try:
        check_apart(Path(source), cache)
    except UsageError as error:
        raise UsageError(
            f"the cache {cache} and its source {source} are the same folder, or one is inside the other: give another "
            "folder for the cache"
        ) from error


def _is_cache(cache: Path) -> bool:
    return (cache / MANIFEST_NAME).exists() or (cache / WORK_NAME).exists()


def _make_folders(folder: Path) -> list[Path]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def finished_cache(cache: Path) -> Cache | None:
    """Return the finished cache in a folder, or None if there is none."""
    try:
        opened = Cache.open(cache)
    except NotACacheError:
        return None
    _check_files(opened)
    return opened


def _check_files(cache: Cache) -> None:
    folder, wrong = cache.directory, []
    for entry in cache.manifest.files:
        try:
            size = (folder / entry.name).stat().st_size
        except FileNotFoundError:
            wrong.append(f"{entry.name} is missing")
            continue
        if size != entry.bytes:
            wrong.append(f"{entry.name} is {size:,} bytes, the manifest says {entry.bytes:,}")
    if wrong:
        more = f" and {len(wrong) - 1:,} other files are damaged" if len(wrong) > 1 else ""
        raise DamageError(
            f"{folder} is damaged: {wrong[0]}{more}. Run `tpucache verify {folder} --repair SOURCE`, or "
            "copy the cache again"
        )


def disk_failure(place: Path, error: OSError) -> BuildError:
    """Return the error to raise when a disk is full or fails."""
    kind = NoRoomError if error.errno in _NO_ROOM else BuildError
    return kind(
        f"{place} cannot be written: {error}. What is finished is kept; make room or repair the disk, then run the "
        "same command again to continue."
    )


def remove_folder(folder: Path) -> None:
    """Remove a folder, even if a worker of a killed run still writes files there."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)


def remove_leftovers(work: Path) -> None:
    for leftover in (*work.glob("*.lmdb.*"), *work.glob("*.tmp"), *work.glob(".*.tmp")):
        leftover.unlink(missing_ok=True)


def remove_old_files(cache: Path, manifest: Manifest, *, is_thorough: bool = True) -> None:
    """Remove tables, shards and manifests that belong to no version of a cache.

    Nothing is removed if the files of an earlier version are not known. Without `is_thorough`, its manifests are not
    read, and tables with a lower generation (the number in the name) are kept.
    """
    listed = {entry.name for entry in manifest.files}
    listed |= {version_name(number) for number in range(1, manifest.number)}
    others = [
        path
        for path in cache.iterdir()
        if path.name not in listed and any(kind.fullmatch(path.name) for kind in (TABLE_NAME, SHARD_NAME, VERSION_NAME))
    ]
    if not manifest.parents:
        others += [path for path in [cache / TIMES_NAME] if path.exists()]
    elif not is_thorough:
        others = [path for path in others if not _is_earlier(path.name, manifest.generation)]
    if others and manifest.parents:
        try:
            listed = {entry.name for entry in version_files(cache, manifest)}
        except (DamageError, FormatError):
            return
    for path in others:
        if path.name not in listed:
            path.unlink(missing_ok=True)


def _is_earlier(name: str, generation: int) -> bool:
    found = TABLE_NAME.fullmatch(name)
    return found is not None and int(found[2] or 0) < generation


class HeldError(BuildError):
    """Another process has locked the work folder, or has just finished the cache."""


@contextlib.contextmanager
def hold(work: Path) -> Iterator[str]:
    """Lock a work folder for this process, for the `with` block, and yield the lock's token."""

    def refusal(holder: str) -> BuildError:
        return HeldError(f"another process is writing {work.parent} ({holder}): wait until it ends, or stop it")

    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(lock.hold(work / LOCK_NAME, refusal))
        except FileNotFoundError as error:  # that process has just finished the cache, and removed the folder
            raise refusal("it has just ended") from error
        yield held.token


def is_held(work: Path, run: str | None = None) -> bool:
    """Return whether a run has the lock of a work folder: any run, or the one with the token `run`."""
    return lock.is_held(work / LOCK_NAME, run)


PLAN_NAME: Final = "plan.json"
_LISTING_NAME: Final = "listing.npz"
#: The files that another machine needs to continue a build.
PLAN_FILES: Final = (_LISTING_NAME, PLAN_NAME)


def build_identity(work: Path) -> str:
    """Return the identity of the build in a work folder; "" if there is none."""
    return str(_read_plan(work)["build"]) if has_plan(work) else ""


def has_plan(work: Path) -> bool:
    """Return whether a build was started in a work folder."""
    return (work / PLAN_NAME).exists()


def is_adding_to(work: Path, manifest: Manifest) -> bool:
    """Return whether a work folder has an unfinished addition to the cache of `manifest`. It must not be removed."""
    with hold(work):
        try:
            saved = _read_plan(work)
        except FileNotFoundError:
            return False
        return bool(saved["before"] == manifest.identity)


class Begun(NamedTuple):
    """A build that has begun: its identity and, if another run began it, what differs now.

    `resized` are samples of another size, and `other_versions` describes libraries.
    """

    build: str
    resized: list[Sample]
    other_versions: tuple[str, ...]


def begin_or_continue(work: Path, plan: BuildPlan, *, is_sent: bool = False) -> Begun:
    """Write a plan and the listing of its source, or compare the plan with that of an interrupted run.

    If that run has built nothing, the new plan replaces its plan.
    """
    if has_plan(work):
        try:
            return compare_plan(work, plan)
        except (RecipeError, SourceError):
            if is_sent or any(path.name.startswith(("shard-", "spool-")) for path in work.iterdir()):
                raise
    save_listing(work, plan)
    build = new_identity()
    write_atomically(work / PLAN_NAME, json.dumps({**_content(plan), "build": build}).encode())
    return Begun(build, [], ())


def save_listing(work: Path, plan: BuildPlan) -> None:
    """Write the paths and sizes of all samples, so that a later run can report how the source has changed."""
    samples = plan.listing.samples
    paths: Column = Strings.pack([sample.path for sample in samples])
    write_atomically(work / _LISTING_NAME, encode_columns({"path": paths, SIZE_COLUMN: sizes_of(samples)}))


def _read_plan(work: Path) -> dict[str, Any]:
    path = work / PLAN_NAME
    try:
        content = parse_json(read_file(path))
        if not isinstance(content, dict):
            raise ValueError(f"it is a {type(content).__name__}, not an object")
        if not re.fullmatch("[0-9a-f]{48}", str(content.get("build"))):
            raise ValueError("it has no identity of its build, so another release of tpucache wrote it")
    except ValueError as error:
        raise BuildError(f"{path} cannot be read: {error}. Remove {work} to give up the unfinished build") from error
    return content


def compare_plan(work: Path, plan: BuildPlan) -> Begun:
    """Compare a plan with the plan in a work folder, and warn of other versions of libraries."""
    saved, now = _read_plan(work), json.loads(json.dumps(_content(plan)))
    cache, samples = work.parent, plan.listing.samples
    _check_recipe(work, saved["recipe"], now["recipe"])
    check_asked(cache, saved["asked"], now["asked"])
    table = SampleTable(work / _LISTING_NAME, saved["source"]["samples"])
    changes = compare_sizes(table, samples)
    if saved["source"] != now["source"]:
        raise SourceError(
            f"{cache} was started from {saved['source']['samples']} samples, the source now has {len(samples)}; "
            f"{str(changes) or 'the order, labels or columns of samples differ'}. "
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
    resized = [sample for sample in samples if sample.path in changes.changed]
    return Begun(saved["build"], resized, tuple(other))


def _check_recipe(work: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = recipe_differences(saved, now)
    changed += [f"{name} {saved[name]}, now {now[name]}" for name in EXTENT if saved[name] != now[name]]
    if changed:
        raise RecipeError(
            f"{work.parent} was started with another recipe: {'; '.join(changed)}. Give the same options to continue, "
            f"another folder to build anew, or remove {work} to give up the unfinished build."
        )


def _content(plan: BuildPlan) -> dict[str, Any]:
    return {
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
