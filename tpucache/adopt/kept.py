"""Find, build and remove the caches of drop-in data sets. The caches are stored in these folders:

FOLDER/datasets/train-1f0c…/       one data set and recipe; the name ends with a digest of their identity
    7b52…/                         the cache for one state of the data set's pictures, named by the state's digest
    7b52….use                      locked by each process that reads or builds the cache
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

from tpucache.adopt.builder import start_building
from tpucache.errors import BuildError, DamageError, FormatError, NotACacheError, SampleError, StoreError
from tpucache.progress import note
from tpucache.store.cache import Cache
from tpucache.store.files import OpenFile
from tpucache.store.format import MANIFEST_NAME, WORK_NAME, is_cache_file
from tpucache.store.growing import LOCK_NAME
from tpucache.store.lock import flock, is_held
from tpucache.store.remote.cache import check_own, default_directory
from tpucache.text import duration_text, size_text

if TYPE_CHECKING:
    from tpucache.recipe import Recipe
    from tpucache.warmup.build_options import OnError
    from tpucache.warmup.estimate import Estimate
    from tpucache.warmup.sources.source import Source

#: The name of the folder for all data sets, below the user's cache folder.
FOLDER: Final = "datasets"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_NAME: Final = 40
_STATE: Final = re.compile(r"[0-9a-f]{1,32}")
_PLACE: Final = re.compile(r".+-[0-9a-f]{16}")  # the folder of a data set and recipe
_REMOVED: Final = ".removed-"  # prefix of a folder that is being removed


@dataclass(frozen=True)
class BuildChoices:
    """How the cache of a data set is built: three arguments of `build_cache`."""

    recipe: Recipe
    jobs: int | None = None
    on_error: OnError = "fail"


class KeptFolder(NamedTuple):
    """The folder of the cache of a data set.

    `name` is the data set's name, `directory` the folder, and `bytes` the size of its files on disk. `is_finished` is
    whether the whole cache was built.
    """

    name: str
    directory: Path
    bytes: int
    is_finished: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the folder as JSON values."""
        return {**self._asdict(), "directory": str(self.directory)}


def list_folders(below: str | Path | None = None) -> list[KeptFolder]:
    """Return the caches of data sets below a folder (by default `default_directory()`), the largest first.

    Unfinished caches are in the list, too. Other folders are left out, and links are not followed.
    """
    base = (Path(below) if below is not None else default_directory()).expanduser().absolute()
    found = []
    for place in _folders(base / FOLDER, _PLACE):
        for directory in _folders(place, _STATE):
            is_finished = (directory / MANIFEST_NAME).is_file()
            if is_finished or (directory / WORK_NAME).is_dir():
                name = place.name.rpartition("-")[0]
                found.append(KeptFolder(name, directory, _size(directory), is_finished))
    return sorted(found, key=lambda each: -each.bytes)


def clear_folder(kept: KeptFolder) -> None:
    """Remove the cache of a data set."""
    directory = kept.directory
    try:
        check_own(directory, directory.parents[2])
        names = sorted(path.name for path in directory.iterdir())
        if foreign := [name for name in names if name != WORK_NAME and not is_cache_file(name)]:
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


def _folders(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(each.path) for each in entries if name.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # another process has just removed it
            total += path.lstat().st_blocks * 512
    return total


class KeptCache(NamedTuple):
    """A cache that was found or built. As long as the lock `use` exists, no other process removes the cache.

    `is_new` is whether this call has built the whole cache. It is False if an earlier process began the cache, or if
    another process built it meanwhile.
    """

    cache: Cache
    use: Use
    is_new: bool = False


class Kept:
    """All caches of one data set and recipe. There is one cache for each state of the pictures."""

    def __init__(self, name: str, identity: Any, below: str | Path | None) -> None:
        """Compute the path of the folder for these caches; the folder is not made yet.

        `name` is the data set's name, for the folder's name and for messages. `identity` (JSON values) differs for each
        data set and recipe. `below` is the folder for all data sets, by default `default_directory()`.
        """
        base = Path(below) if below is not None else default_directory()
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        plain = _UNSAFE.sub("_", name).strip("._")[:_LONGEST_NAME] or "set"
        self.name = name
        self.folder = base.expanduser().absolute() / FOLDER / f"{plain}-{digest}"

    def states(self) -> list[str]:
        """Return the states that have a cache, finished or not."""
        return [path.name for path in _folders(self.folder, _STATE)]

    def open(self, state: str, on_error: OnError) -> KeptCache | None:
        """Return the finished cache for a state of the pictures, or None if there is none that can be read.

        This needs no permission to write.
        """
        directory = self.folder / state
        try:
            if not (directory / MANIFEST_NAME).is_file():
                return None
            check_own(directory, self.folder.parents[1])
            use = Use(directory)  # before the cache is opened, so that no other process removes it
            cache = Cache.open(directory)
            _check_sizes(cache)
        except (NotACacheError, FileNotFoundError, PermissionError):  # without permission, `build` raises the error
            return None
        except (DamageError, FormatError) as error:
            raise type(error)(
                f"{error}. This is the cache of {self.name}: remove {directory}, and it will be built again"
            ) from error
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
        from tpucache.warmup.run.folder import HeldError

        directory, has_noted, is_new = self.folder / state, False, False
        with self._writing():
            use = Use(directory)
            while (found := self.open(state, choices.on_error)) is None:
                if is_new:
                    raise BuildError(f"{directory} was removed while it was built: run this again")
                is_begun = directory.exists()
                try:
                    self._make(directory, source, choices, check)
                    is_new = not is_begun
                    self.remove_others(state)
                except HeldError as error:
                    if not has_noted:
                        note(f"{self.name}: waiting for the process that builds its cache: {error}")
                    has_noted = True
            return found._replace(use=use, is_new=is_new)

    def grow(self, state: str, source: Any, choices: BuildChoices, check: Callable[[], None]) -> KeptCache:
        """Let another process build the cache for a state of the pictures; return the cache once `source` is listed.

        If a process is building this cache already, no second build is started. `source` is a source, or a
        `functools.partial` that makes one. `check` is called at the end of the build, as by `build`. Both are pickled.
        An error of the build is raised by this call, or in a reader that waits for a record.
        """
        with self._writing():
            use = Use(self.folder / state)
            others = {
                "recipe": choices.recipe,
                "jobs": choices.jobs,
                "check": check,
                "announce": functools.partial(_announce, self.name, self.folder / state),
                "done": functools.partial(self.remove_others, state),
            }
            return KeptCache(start_building(source, self.folder / state, others)(), use, is_new=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Make the folder of the caches. An OSError here or in the `with` block becomes a BuildError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_own(self.folder, self.folder.parents[1])
            yield
        except OSError as error:
            raise BuildError(
                f"the cache of {self.name} cannot be kept in {self.folder}: {error}. Give another folder as cache=, or "
                "set TPUCACHE_DIR"
            ) from error

    def _make(self, directory: Path, source: Source, choices: BuildChoices, check: Callable[[], None]) -> None:
        from tpucache.progress import LateProgress
        from tpucache.warmup.build import build_cache

        if directory.exists():
            note(f"{self.name}: continuing the cache that a stopped process has left unfinished")
        elif self.states():
            note(f"{self.name} has changed since its cache was made")
        began = time.monotonic()
        with LateProgress("build") as bar:
            manifest = build_cache(
                source,
                directory,
                choices.recipe,
                jobs=choices.jobs,
                on_error=choices.on_error,
                on_progress=bar.show_build,
                announce=functools.partial(_announce, self.name, directory),
                check=check,
            )
        note(
            f"{self.name}: {manifest.samples:,} pictures, {size_text(manifest.total_bytes)}, "
            f"{duration_text(time.monotonic() - began)}; later runs will use this cache"
        )

    def remove(self, state: str) -> None:
        """Remove the cache for a state of the pictures, unless a process reads or builds it."""
        _remove(self.folder / state)

    def remove_others(self, state: str) -> None:
        """Remove the caches for all other states of the pictures, as by `remove`."""
        for other in self.states():
            if other != state:
                self.remove(other)


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
    path = _use_path(directory)
    file = _open_lock(path)
    if is_held(directory / WORK_NAME / LOCK_NAME):
        return
    with contextlib.suppress(OSError):  # the file system has no locks
        if flock(file.number):
            directory.rename(directory.with_name(f"{_REMOVED}{secrets.token_hex(8)}"))  # it disappears in one step
            path.unlink()
            for each in directory.parent.glob(f"{_REMOVED}*"):
                shutil.rmtree(each, ignore_errors=True)


def _check_sizes(cache: Cache) -> None:
    """Raise DamageError if a file of a cache is missing or has the wrong size: somebody may have removed old files."""
    for entry in cache.manifest.files:
        path = cache.directory / entry.name
        if not path.exists():
            raise DamageError(f"{path} is missing")
        if (found := path.stat().st_size) != entry.bytes:
            raise DamageError(f"{path} has {found:,} bytes, but the manifest says {entry.bytes:,}")
