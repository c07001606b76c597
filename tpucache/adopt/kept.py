"""Find, build and remove the caches of drop-in data sets. The caches are stored in these folders:

FOLDER/datasets/train-1f0c…/       one data set and recipe; the name ends with a digest of their identity
    7b52…/                         the cache for one state of the data set's pictures, named by the state's digest; each
                                   process that reads or builds it has a shared lock on this folder
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tpucache.adopt.growing import LEAST_GROWING, BuildProcess
from tpucache.errors import BuildError, DamageError, FormatError, SampleError, SourceError, StoreError
from tpucache.progress import Progress, note
from tpucache.recipe import Recipe, fingerprint
from tpucache.store.cache import Cache
from tpucache.store.files import OpenFolder
from tpucache.store.format import WORK_NAME, is_cache_file
from tpucache.store.growing import LOCK_NAME
from tpucache.store.lock import flock, is_held
from tpucache.store.remote.cache import cache_directory, check_own, disk_bytes
from tpucache.text import duration_text, size_text
from tpucache.warmup.run.folder import HeldError, finished_cache

if TYPE_CHECKING:
    from tpucache.warmup.build_options import OnError
    from tpucache.warmup.estimate import Estimate
    from tpucache.warmup.sources.source import Source

#: The name of the folder for all data sets, below the user's cache folder.
FOLDER: Final = "datasets"
_LONGEST_NAME: Final = 40
_PLACE: Final = re.compile(r".+-[0-9a-f]{16}")  # the folder of a data set and recipe
_STATE: Final = re.compile(r"[0-9a-f]{1,32}")
_REMOVED: Final = ".removed-"
_UNFINISHED: Final = "unfinished"
_ANY: Final = re.compile(rf"{_STATE.pattern}|{re.escape(_REMOVED)}[0-9a-f]{{16}}")


@dataclass(frozen=True)
class BuildChoices:
    """How the cache of a data set is built: three arguments of `build_cache`."""

    recipe: Recipe
    jobs: int | None
    on_error: OnError


class KeptFolder(NamedTuple):
    """The folder of the cache of the data set `name`, with so many `bytes` of files.

    `problem` says why the cache cannot be read, "" if it can.
    """

    name: str
    directory: Path
    bytes: int
    problem: str

    def to_dict(self) -> dict[str, Any]:
        """Return the folder as JSON values; `is_finished` is whether the cache can be read."""
        return {**self._asdict(), "directory": str(self.directory), "is_finished": not self.problem}


def list_folders(below: str | Path | None = None) -> list[KeptFolder]:
    """Return the caches of data sets below a folder (by default `cache_directory()`), the largest first.

    Caches that cannot be read are in the list, too. Other folders are left out, and links are not followed.
    """
    found = [
        KeptFolder(place.name.rpartition("-")[0], directory, disk_bytes(directory), _problem(directory))
        for place in _folders(cache_directory(below) / FOLDER, _PLACE)
        for directory in _folders(place, _ANY)
        if any(map(_is_ours, _names(directory)))
    ]
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


def _folders(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(each.path) for each in entries if name.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in directory.iterdir())
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
    return _UNFINISHED if (directory / WORK_NAME).is_dir() else "without its manifest"


class KeptCache(NamedTuple):
    """A cache that was found or built. As long as the lock `use` exists, no other process removes the cache."""

    cache: Cache
    use: Use


class Kept:
    """All caches of one data set and recipe. There is one cache for each state of the pictures."""

    def __init__(self, name: str, identity: Any, below: str | Path | None, choices: BuildChoices) -> None:
        """Take the data set's name, for the folder and for messages, and JSON values that differ for each data set.

        `below` is the folder for all data sets, by default `cache_directory()`.
        """
        told = json.dumps([identity, fingerprint(choices.recipe.to_dict())], sort_keys=True)
        self._plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._")[:_LONGEST_NAME] or "set"
        self.name, self._choices = name, choices
        digest = hashlib.sha256(told.encode()).hexdigest()[:16]
        self.folder = cache_directory(below) / FOLDER / f"{self._plain}-{digest}"

    def states(self) -> list[Path]:
        """Return the folders of the states that have a cache, finished or not."""
        return _folders(self.folder, _STATE)

    def namesakes(self) -> int:
        """Return the number of folders for other data sets and recipes of the same name."""
        places = re.compile(rf"{re.escape(self._plain)}-[0-9a-f]{{16}}")
        return len({*_folders(self.folder.parent, places)} - {self.folder})

    def _find(self, state: str) -> KeptCache | None:
        """Return the finished cache for a state of the pictures, or None if there is none that can be read.

        This needs no permission to write.
        """
        directory = self.folder / state
        try:
            check_own(directory, self.folder.parents[1])
            use = Use(directory)  # before the cache is opened, so that no other process removes it
            cache = finished_cache(directory)
        except (DamageError, FileNotFoundError, NotADirectoryError, PermissionError):  # building repairs it
            return None
        except FormatError as error:
            raise FormatError(
                f"{error}. This is the cache of {self.name}: remove {directory}, and it will be built again"
            ) from error
        if cache is None:
            return None
        if cache.manifest.skipped and self._choices.on_error == "fail":
            skipped = cache.manifest.skipped[0]
            raise SampleError(skipped.path, f"{skipped.reason}; or leave such samples out with on_error='skip'")
        return KeptCache(cache, use)

    def open(self, state: str, source: Any, find: Callable[[], str], samples: int = 0) -> KeptCache:
        """Return the cache for a state of the pictures. Build it if there is none, or continue a build that was killed.

        `source` is a source, or a `functools.partial` that makes one. If `find`, called at the end, returns another
        state, a SourceError is raised, and nothing is kept. After a build, caches of other states are removed unless a
        process reads them.

        If another process is building the cache, wait for that process. If many `samples` are named, another process
        builds, and the cache is returned once the source is listed: an error of the build is raised by this call, or in
        a reader that waits for a record. `source` and `find` are pickled.
        """
        if found := self._find(state):
            return found
        directory, name = self.folder / state, self.name

        def check() -> None:
            if find() != state:
                raise SourceError(
                    f"pictures of {name} were changed while its cache was made: run this again when no other program "
                    "writes there"
                )

        def announce(expected: Estimate) -> None:
            note(
                f"{name}: decoding and resizing its pictures once, into {directory}: {expected.records:,} records, "
                f"about {size_text(expected.bytes)} ({size_text(expected.free)} are free)"
            )

        others: dict[str, Any] = {**vars(self._choices), "check": check, "announce": announce}
        with self._writing(directory):
            use, has_noted = Use(directory), False
            if samples >= LEAST_GROWING and self._choices.on_error == "fail":
                done = functools.partial(self.remove_others, state)
                return KeptCache(BuildProcess(source, directory, {**others, "done": done}).open(), use)
            source = source() if isinstance(source, functools.partial) else source
            while not (found := self._find(state)):
                try:
                    self._make(directory, source, others)
                    self.remove_others(state)
                except HeldError as error:
                    if not has_noted:
                        note(f"{self.name}: waiting for the process that builds its cache: {error}")
                    has_noted = True
            return found

    @contextlib.contextmanager
    def _writing(self, directory: Path) -> Iterator[None]:
        """Make the folder of a cache. An OSError here or in the `with` block becomes a BuildError.

        What is there, and can neither be read nor continued, is removed.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_own(self.folder, self.folder.parents[1])
            if _names(directory) and (problem := _problem(directory)) not in ("", _UNFINISHED):
                _remove(directory)
                if not directory.exists():
                    note(f"{self.name}: its cache was {problem}, and is built again")
            directory.mkdir(exist_ok=True)
            yield
        except OSError as error:
            raise BuildError(
                f"the cache of {self.name} cannot be kept in {self.folder}: {error}. Give another folder as cache=, or "
                "set TPUCACHE_DIR"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # it is not empty
                directory.rmdir()

    def _make(self, directory: Path, source: Source, others: Mapping[str, Any]) -> None:
        from tpucache.warmup.build import build_cache

        if _names(directory):
            note(f"{self.name}: continuing the cache that a stopped process has left unfinished")
        elif len(self.states()) > 1:
            note(f"{self.name} has changed since its cache was made")
        began = time.monotonic()
        with Progress(None, "build") as bar:
            manifest = build_cache(source, directory, on_progress=bar.show_build, **others)
        note(
            f"{self.name}: {manifest.samples:,} pictures, {size_text(manifest.total_bytes)}, "
            f"{duration_text(time.monotonic() - began)}; later runs with the same pictures will use this cache"
        )

    def remove(self, directory: Path) -> None:
        with contextlib.suppress(OSError):  # another process has just removed it
            _remove(directory)

    def remove_others(self, state: str) -> None:
        """Remove the caches for all other states of the pictures, and half removed ones, as by `remove`."""
        for other in _folders(self.folder, _ANY):
            if other.name != state:
                self.remove(other)


class Use:
    """A shared lock that keeps other processes from removing a cache, as long as this object exists.

    A forked process, and a process that unpickles a copy, hold the lock, too. If the file system has no locks, there is
    no lock. Raises FileNotFoundError if the cache is being removed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._folder = directory, OpenFolder(directory)
        is_locked = True
        with contextlib.suppress(OSError):  # no locks
            is_locked = flock(self._folder.number, is_shared=True)
        if not is_locked or not os.path.samestat(os.fstat(self._folder.number), directory.stat()):
            raise FileNotFoundError(f"{directory} is being removed")

    def __reduce__(self) -> tuple[Any, ...]:
        return Use, (self._directory,)


def _remove(directory: Path) -> None:
    """Remove a cache, finished or not, unless a process reads or builds it, or the system has no file locks."""
    if not directory.name.startswith(_REMOVED):
        folder, is_free = OpenFolder(directory), False
        with contextlib.suppress(OSError):  # no locks
            is_free = flock(folder.number) and not is_held(directory / WORK_NAME / LOCK_NAME)
        if not is_free or not all(map(_is_ours, _names(directory))):
            return
        # It disappears in one step.
        directory = directory.rename(directory.with_name(f"{_REMOVED}{secrets.token_hex(8)}"))
    shutil.rmtree(directory, ignore_errors=True)
