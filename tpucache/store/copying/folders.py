"""Folders as the targets of a command: where they are, whether two are the same, and a lock on one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpucache.errors import StoreError, UsageError
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.manifest import Manifest


def folder_path(place: str | Path) -> Path:
    """Return a local folder that is given as a path or a file:// URL. Raises UsageError for any other URL."""
    text = os.fspath(place)
    scheme, separator, rest = text.partition("://")
    if not text.strip() or "\0" in text:
        raise UsageError(f"{text!r} names no folder")
    if not separator or "/" in scheme:
        return Path(place)
    if scheme != "file":
        raise UsageError(f"a folder of this machine is needed, not a {scheme}:// URL")
    return Path(rest.removeprefix("localhost"))


def check_apart(source: Path, target: Path) -> None:
    """Raise UsageError when a cache and the folder to write are the same one, or one is inside the other.

    Symbolic links, relative paths and folders that are mounted twice are seen through; neither has to exist.
    """
    real_source, real_target = _resolve(source), _resolve(target)
    if _is_same(real_source, real_target):
        raise UsageError(f"{target} is the cache itself: give another folder")
    if any(_is_same(real_source, parent) for parent in real_target.parents):
        raise UsageError(f"{target} is inside the cache {source}: give a folder outside of it")
    if any(_is_same(real_target, parent) for parent in real_source.parents):
        raise UsageError(f"the cache {source} is inside {target}: give a folder that does not hold it")


def check_no_cache_file(path: Path) -> None:
    """Raise UsageError where a path, to be written for somebody else, is a file of a finished cache."""
    place = path.resolve()
    try:
        manifest = Manifest.load(place.parent)
    except StoreError:
        return
    if place.name in (MANIFEST_NAME, *(entry.name for entry in manifest.files)):
        raise UsageError(f"{path} is a file of the cache in {place.parent}: give another path to write to")


def is_same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths lead to one folder, through whatever links or mounts."""
    return _is_same(_resolve(one), _resolve(other))


@contextmanager
def hold_folder(folder: Path, doing: str) -> Iterator[None]:
    """Make a folder and lock it for this process; the kernel releases the lock however the process ends.

    Raises StoreError when another process has locked it, OSError when it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another process is {doing} {folder}: wait for it or stop it") from None
        yield
    finally:
        os.close(descriptor)


def _resolve(path: Path) -> Path:
    try:
        resolved = path.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path} cannot be followed to a folder: {error}") from error
    # Up to Python 3.12 resolving a loop of links raises; later it leaves the link in the path.
    if any(each.is_symlink() for each in (resolved, *resolved.parents)):
        raise UsageError(f"{path} cannot be followed to a folder: its links lead in a loop")
    return resolved


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one == other or one.samefile(other)
    except OSError:  # one of them does not exist
        return False
