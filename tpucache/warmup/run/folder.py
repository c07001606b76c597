"""The folders of a build: the cache's folder and, while a build is unfinished, the work folder in it, with a lock."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tpucache.errors import BuildError, DamageError, FormatError, NoRoomError, NotACacheError, UsageError
from tpucache.store import lock
from tpucache.store.cache import Cache
from tpucache.store.copying import CLAIM_NAME
from tpucache.store.files import check_apart
from tpucache.store.format import (
    MANIFEST_NAME,
    SHARD_NAME,
    TABLE_NAME,
    TIMES_NAME,
    VERSION_NAME,
    WORK_NAME,
    version_name,
)
from tpucache.store.growing import LOCK_NAME
from tpucache.store.history import refuse_version, version_files
from tpucache.store.manifest import Manifest

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

    If an earlier version's manifest is damaged, nothing is removed, because the files of that version are not known.
    Without `is_thorough`, tables with a lower generation (the number in the name) than this manifest's are kept:
    otherwise the manifests of earlier versions would have to be read.
    """
    listed = {entry.name for entry in manifest.files}
    listed |= {version_name(number) for number in range(1, manifest.number)}
    others = [path for path in cache.iterdir() if path.name not in listed and _is_cache_file(path.name)]
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


def _is_cache_file(name: str) -> bool:
    return any(kind.fullmatch(name) for kind in (TABLE_NAME, SHARD_NAME, VERSION_NAME))


def _is_earlier(name: str, generation: int) -> bool:
    found = TABLE_NAME.fullmatch(name)
    return found is not None and int(found[2] or 0) < generation


class HeldError(BuildError):
    """Another process has locked the work folder, or has just finished the cache."""


@contextmanager
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


def is_held(work: Path, run: str) -> bool:
    """Return whether the run with the token `run` still has the lock of its work folder.

    A run loses the lock when it is killed, or when a later run takes the lock.
    """
    return lock.is_held(work / LOCK_NAME, run)


def is_worked_on(work: Path) -> bool:
    return lock.is_held(work / LOCK_NAME)
