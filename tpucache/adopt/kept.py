"""Find, build and remove the caches of drop-in data sets. The caches are stored in these folders:

FOLDER/datasets/train-1f0c…/       one data set and recipe; the name ends with a digest of their identity
    7b52…/                         the cache for one state of the data set's pictures, named by the state's digest
    7b52….use                      locked by each process that reads or builds the cache
    .removed-9d41…/                a cache that is being removed, or whose removal was interrupted
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tpucache.adopt.growing import start_building
from tpucache.errors import BuildError, DamageError, FormatError, SampleError, StoreError
from tpucache.progress import LateProgress, note
from tpucache.store.cache import Cache
from tpucache.store.files import OpenFile, check_is_local
from tpucache.store.format import WORK_NAME, is_cache_file
from tpucache.store.growing import LOCK_NAME
from tpucache.store.lock import flock, is_held
from tpucache.store.remote.cache import check_own, default_directory
from tpucache.text import duration_text, size_text
from tpucache.warmup.run.folder import HeldError, finished_cache

if TYPE_CHECKING:
    from tpucache.recipe import Recipe
    from tpucache.warmup.build_options import OnError
    from tpucache.warmup.estimate import Estimate
    from tpucache.warmup.sources.source import Source

#: The name of the folder for all data sets, below the user's cache folder.
FOLDER: Final = "datasets"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_NAME: Final = 40
_PLACE: Final = re.compile(r".+-[0-9a-f]{16}")  # the folder of a data set and recipe
_STATE: Final = re.compile(r"[0-9a-f]{1,32}")
_REMOVED: Final = ".removed-"
_ANY: Final = re.compile(rf"{_STATE.pattern}|{re.escape(_REMOVED)}[0-9a-f]{{16}}")


@dataclass(frozen=True)
class BuildChoices:
    """How the cache of a data set is built: three arguments of `build_cache`."""

    recipe: Recipe
    jobs: int | None = None
    on_error: OnError = "fail"


class KeptFolder(NamedTuple):
    """The folder of the cache of a data set.

    `name` is the data set's name, `directory` the folder, and `bytes` the size of its files on disk. `problem` says why
    the cache cannot be read, "" if it can: for example, its build has not ended.
    """

    name: str
    directory: Path
    bytes: int
    problem: str

    def to_dict(self) -> dict[str, Any]:
        """Return the folder as JSON values; `is_finished` is whether the cache can be read."""
        return {**self._asdict(), "directory": str(self.directory), "is_finished": not self.problem}


def list_folders(below: str | Path | None = None) -> list[KeptFolder]:
    """Return the caches of data sets below a folder (by default `default_directory()`), the largest first.

    Caches that cannot be read are in the list, too. Other folders are left out, and links are not followed.
    """
    found = []
    for place in _folders(_base(below) / FOLDER, _PLACE):
        for directory in _folders(place, _ANY):
            if any(map(_is_ours, _names(directory))):
                name = place.name.rpartition("-")[0]
                found.append(KeptFolder(name, directory, _size(directory), _problem(directory)))
    return sorted(found, key=lambda each: -each.bytes)


def clear_folder(kept: KeptFolder) -> None:
    """Remove the cache of a data set."""
    directory = kept.directory
    try:
        check_own(directory, directory.parents[2])
        if foreign := [name for name in _names(directory) if not _is_ours(name)]:
            raise StoreError(
                f"{directory}, the cache of {kept.name}, has files that are not of a cache, such as {foreign[0]}: "
                "move these files away"
            )
        _remove(directory)
    except OSError as error:
        raise StoreError(f"{directory} cannot be removed: {error}. Check the folder's permissions") from error
    if directory.exists():
        raise StoreError(
            f"{directory}, the cache of {kept.name}, is in use: end the process that reads or builds it (if there "
            "is no such process, the file system has no locks: remove the folder yourself)"
        )
    with contextlib.suppress(OSError):  # it has caches of other states
        directory.parent.rmdir()


def _base(below: str | Path | None) -> Path:
    folder = default_directory() if below is None else below
    check_is_local(folder)
    return Path(folder).expanduser().absolute()


def _folders(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(each.path) for each in entries if name.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError:
        return []


def _is_ours(name: str) -> bool:
    return name == WORK_NAME or is_cache_file(name)


def _problem(directory: Path) -> str:
    if directory.name.startswith(_REMOVED):
        return "half removed"
    try:
        if finished_cache(directory) is not None:
            return ""
    except (StoreError, OSError) as error:
        return f"damaged ({error})"
    return "unfinished" if (directory / WORK_NAME).is_dir() else "without its manifest"


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # another process has just removed it
            total += path.lstat().st_blocks * 512
    return total


class KeptCache(NamedTuple):
    """A cache that was found or built. As long as the lock `use` exists, no other process removes the cache."""

    cache: Cache
    use: Use


class Kept:
    """All caches of one data set and recipe. There is one cache for each state of the pictures."""

    def __init__(self, name: str, identity: Any, below: str | Path | None) -> None:
        """Compute the path of the folder for these caches; the folder is not made yet.

        `name` is the data set's name, for the folder's name and for messages. `identity` (JSON values) differs for each
        data set and recipe. `below` is the folder for all data sets, by default `default_directory()`.
        """
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        plain = _UNSAFE.sub("_", name).strip("._")[:_LONGEST_NAME] or "set"
        self.name = name
        self.folder = _base(below) / FOLDER / f"{plain}-{digest}"

    def states(self) -> list[str]:
        """Return the states that have a cache, finished or not."""
        return [path.name for path in _folders(self.folder, _STATE)]

    def namesakes(self) -> int:
        """Return the number of folders for other data sets and recipes of the same name."""
        name = self.folder.name.rpartition("-")[0]
        return len({*_folders(self.folder.parent, re.compile(rf"{re.escape(name)}-[0-9a-f]{{16}}"))} - {self.folder})

    def open(self, state: str, on_error: OnError) -> KeptCache | None:
        """Return the finished cache for a state of the pictures, or None if there is none that can be read.

        This needs no permission to write.
        """
        directory = self.folder / state
        try:
            if not directory.is_dir():
                return None
            check_own(directory, self.folder.parents[1])
            use = Use(directory)  # before the cache is opened, so that no other process removes it
            cache = finished_cache(directory)
        except (DamageError, FileNotFoundError, PermissionError):  # building repairs it, or raises the error
            return None
        except FormatError as error:
            raise FormatError(
                f"{error}. This is the cache of {self.name}: remove {directory}, and it will be built again"
            ) from error
        if cache is None:
            return None
        if cache.manifest.skipped and on_error == "fail":
            skipped = cache.manifest.skipped[0]
            raise SampleError(skipped.path, f"{skipped.reason}; or leave such samples out with on_error='skip'")
        return KeptCache(cache, use)

    def build(
        self, state: str, source: Source, choices: BuildChoices, check: Callable[[], None] = lambda: None
    ) -> KeptCache:
        """Build the cache for a state of the pictures, or continue a build that was killed.

        If another process is building it, wait for that process. `check` is called at the end: if the source has
        changed, it raises an error, and the cache stays unfinished. After a build, caches of other states are removed
        unless a process reads them.
        """
        with self._writing(state) as directory:
            use, has_noted = Use(directory), False
            while (found := self.open(state, choices.on_error)) is None:
                try:
                    self._make(directory, source, choices, check)
                    self.remove_others(state)
                except HeldError as error:
                    if not has_noted:
                        note(f"{self.name}: waiting for the process that builds its cache: {error}")
                    has_noted = True
            return found._replace(use=use)

    def grow(self, state: str, source: Any, choices: BuildChoices, check: Callable[[], None]) -> KeptCache:
        """Let another process build the cache for a state of the pictures; return the cache once `source` is listed.

        If a process is building this cache already, no second build is started. `source` is a source, or a
        `functools.partial` that makes one. `check` is called at the end of the build, as by `build`. Both are pickled.
        An error of the build is raised by this call, or in a reader that waits for a record.
        """
        with self._writing(state) as directory:
            use, done = Use(directory), functools.partial(self.remove_others, state)
            others = self._arguments(directory, choices, check)
            return KeptCache(start_building(source, directory, {**others, "done": done})(), use)

    @contextlib.contextmanager
    def _writing(self, state: str) -> Iterator[Path]:
        """Yield the folder of a cache that is built in it. An OSError here or in the `with` block becomes a BuildError.

        What cannot be read there, and is no unfinished build, is removed.
        """
        directory = self.folder / state
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_own(self.folder, self.folder.parents[1])
            if (problem := _problem(directory)) != "unfinished" and problem and directory.is_dir():
                _remove(directory)
                if not directory.exists():
                    note(f"{self.name}: its cache was {problem}, and is built again")
            yield directory
        except OSError as error:
            raise BuildError(
                f"the cache of {self.name} cannot be kept in {self.folder}: {error}. Give another folder as cache=, or "
                "set TPUCACHE_DIR"
            ) from error

    def _arguments(self, directory: Path, choices: BuildChoices, check: Callable[[], None]) -> dict[str, Any]:
        announce = functools.partial(_announce, self.name, directory)
        return {**vars(choices), "check": check, "announce": announce}

    def _make(self, directory: Path, source: Source, choices: BuildChoices, check: Callable[[], None]) -> None:
        from tpucache.warmup.build import build_cache

        if directory.exists():
            note(f"{self.name}: continuing the cache that a stopped process has left unfinished")
        elif self.states():
            note(f"{self.name} has changed since its cache was made")
        began = time.monotonic()
        with LateProgress("build") as bar:
            others = self._arguments(directory, choices, check)
            manifest = build_cache(source, directory, on_progress=bar.show_build, **others)
        note(
            f"{self.name}: {manifest.samples:,} pictures, {size_text(manifest.total_bytes)}, "
            f"{duration_text(time.monotonic() - began)}; later runs with the same pictures will use this cache"
        )

    def remove(self, state: str) -> None:
        """Remove the cache for a state of the pictures, unless a process reads or builds it."""
        _remove(self.folder / state)

    def remove_others(self, state: str) -> None:
        """Remove the caches for all other states of the pictures, as by `remove`, and half removed ones."""
        for other in _folders(self.folder, _ANY):
            if other.name != state:
                _remove(other)


def _announce(name: str, directory: Path, expected: Estimate) -> None:
    note(
        f"{name}: decoding and resizing its pictures once, into {directory}: {expected.records:,} records, about "
        f"{size_text(expected.bytes)} ({size_text(expected.free)} are free)"
    )


class Use:
    """A shared lock that keeps other processes from removing a cache, as long as this object exists.

    A forked process, and a process that unpickles a copy, hold the lock, too. If the file system has no locks, or this
    user may not read or make the lock file, there is no lock.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = _shared_lock(_use_path(directory))

    def __reduce__(self) -> tuple[Any, ...]:
        return Use, (self._directory,)


def _use_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.use")


def _shared_lock(path: Path) -> OpenFile | None:
    """Make a file if it is missing, and take a shared lock on it. Returns None if that is impossible."""
    while True:
        try:
            file = _open_lock(path)
        except OSError:
            try:
                file = OpenFile(path)
            except OSError:  # this process cannot write into the folder
                return None
        try:
            is_locked = flock(file.number, is_shared=True)
        except OSError:  # no locks
            return None
        if not is_locked:
            raise FileNotFoundError(f"{path.with_suffix('')} is being removed")
        with contextlib.suppress(FileNotFoundError):  # a process has just removed the cache and this file
            if os.path.samestat(os.fstat(file.number), path.stat()):
                return file


def _open_lock(path: Path) -> OpenFile:
    return OpenFile.of(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))


def _remove(directory: Path) -> None:
    """Remove a cache, finished or not, unless a process reads or builds it, or the system has no file locks."""
    if not directory.name.startswith(_REMOVED):
        path = _use_path(directory)
        file = _open_lock(path)
        try:
            is_used = is_held(directory / WORK_NAME / LOCK_NAME) or not flock(file.number)
            if is_used or not all(map(_is_ours, _names(directory))):
                return
            # It disappears in one step.
            directory = directory.rename(directory.with_name(f"{_REMOVED}{secrets.token_hex(8)}"))
            path.unlink()
        except OSError:  # the file system has no locks
            return
    shutil.rmtree(directory, ignore_errors=True)
