"""The folders of a build: the cache and, until it is finished, the work folder inside it, with its lock."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tpucache.errors import BuildError, DamageError, FormatError, NoRoomError, NotACacheError, UsageError
from tpucache.store import holding
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

#: What the system answers where a disk, or what this user may have of it, is full, or a file may not be as large.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def cache_folder(cache: Path) -> Iterator[None]:
    """Make a cache's folder, or refuse one that holds something else; a disk that fails inside is a BuildError.

    Folders that were made for it, and in which an error leaves nothing, are removed again.
    """
    refuse_version(cache)
    made: list[Path] = []
    try:
        made = _make_folders(cache)
        if (cache / CLAIM_NAME).exists():
            raise BuildError(
                f"{cache} is being copied, or was not copied to its end: finish that, or give another folder"
            )
        if not _is_cache(cache) and any(cache.iterdir()):
            raise BuildError(
                f"{cache} is neither empty nor a cache: give a new folder, so that nothing of yours is written over"
            )
        yield
    except OSError as error:
        raise disk_failure(cache, error) from error
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it is not empty: something was kept
                folder.rmdir()


def check_source(source: str | Path, cache: Path) -> None:
    """Raise UsageError when a source folder and the folder of a cache to be made are the same, or one holds the other.

    A cache that is there already, finished or not, may be finished and added to.
    """
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
    """Make a folder and those above it; return those that were not there, the innermost first. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def finished_cache(cache: Path) -> Cache | None:
    """Return the finished cache in a folder, None where there is none.

    Raises DamageError when a file is missing or has another size than the manifest says.
    """
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
            f"{folder} is damaged: {wrong[0]}{more}. Run `tpucache verify {folder} --repair SOURCE`, or copy it again"
        )


def disk_failure(place: Path, error: OSError) -> BuildError:
    """Return the error of a disk that is full or fails."""
    kind = NoRoomError if error.errno in _NO_ROOM else BuildError
    return kind(
        f"{place} cannot be written: {error}. What is finished is kept; make room or repair the disk, then run the "
        "same command again to continue."
    )


def remove_folder(folder: Path) -> None:
    """Remove a folder, although a worker that outlived its run may still write a file there. Raises OSError."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)


def remove_leftovers(work: Path) -> None:
    """Remove the half-written files of an interrupted run."""
    for leftover in (*work.glob("*.lmdb.*"), *work.glob("*.tmp"), *work.glob(".*.tmp")):
        leftover.unlink(missing_ok=True)


def remove_old_files(cache: Path, manifest: Manifest, *, is_thorough: bool = True) -> None:
    """Remove tables, shards and manifests of versions that no version of a cache names; nothing is being added to it.

    Nothing is removed where a version before is damaged, as it is not known which files it names. Where it need not be
    thorough, tables of lower generations are taken to be those of the versions before, which are read only then if
    there may be anything to remove.
    """
    listed = {entry.name for entry in manifest.files}
    listed |= {version_name(number) for number in range(1, manifest.number)}
    others = [path for path in cache.iterdir() if path.name not in listed and _is_of_cache(path.name)]
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


def _is_of_cache(name: str) -> bool:
    return any(kind.fullmatch(name) for kind in (TABLE_NAME, SHARD_NAME, VERSION_NAME))


def _is_earlier(name: str, generation: int) -> bool:
    """Return whether a name is that of a table of a lower generation."""
    found = TABLE_NAME.fullmatch(name)
    return found is not None and int(found[2] or 0) < generation


class HeldError(BuildError):
    """Another run holds the work folder."""


@contextmanager
def hold(work: Path) -> Iterator[str]:
    """Hold a work folder for this process alone, and yield the token of its hold, which its workers look for.

    Raises HeldError when another run holds it, OSError.
    """

    def refusal(holder: str) -> BuildError:
        return HeldError(f"another warmup is writing {work.parent} ({holder}): wait for it or stop it")

    with holding.hold(work / LOCK_NAME, refusal) as held:
        yield held.token


def is_held(work: Path, run: str) -> bool:
    """Return whether a run still holds its work folder: not when it was killed, nor when another one continues it."""
    return holding.is_held(work / LOCK_NAME, run)


def is_worked_on(work: Path) -> bool:
    """Return whether any run holds a work folder."""
    return holding.is_held(work / LOCK_NAME)
