"""Where the caches of drop-in data sets are kept: each is built once and found again.

FOLDER/datasets/train-1f0c…/       one data set and recipe: its path, or what else tells it from others
    7b52…/                         the cache of the state that its pictures are in
    7b52….lock                     while a process builds it
    7b52….use                      locked by every process that reads it
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

from tpucache.adopt.builder import open_growing
from tpucache.errors import BuildError, DamageError, FormatError, NotACacheError, SampleError
from tpucache.progress import note
from tpucache.store.cache import Cache
from tpucache.store.files import OpenFile
from tpucache.store.format import MANIFEST_NAME, WORK_NAME
from tpucache.store.growing import LOCK_NAME
from tpucache.store.holding import hold, is_held
from tpucache.store.remote.cache import check_own, default_directory
from tpucache.system import fcntl
from tpucache.units import duration_text, size_text

if TYPE_CHECKING:
    from tpucache.recipe import Recipe
    from tpucache.warmup.build_options import OnError
    from tpucache.warmup.estimate import Estimate
    from tpucache.warmup.sources.source import Source

#: Below the folder for what this user keeps.
FOLDER: Final = "datasets"
_NAME: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST: Final = 40
_WAIT_SECONDS: Final = 0.1
_STATE: Final = re.compile(r"[0-9a-f]{1,32}")
_REMOVED: Final = ".removed-"  # the beginning of the name of what is being removed


@dataclass(frozen=True)
class BuildChoices:
    """How the cache of a data set is built: as the arguments of these names of `build_cache`."""

    recipe: Recipe
    jobs: int | None = None
    on_error: OnError = "fail"


class KeptCache(NamedTuple):
    """A cache, what keeps it from being removed as long as it is referred to, and whether it was made now.

    One that an earlier process began, or another one made meanwhile, was not made now.
    """

    cache: Cache
    use: Use
    is_new: bool = False


class Kept:
    """The caches of one data set by one recipe: one for each state that its pictures were in."""

    def __init__(self, name: str, identity: Any, below: str | Path | None) -> None:
        """Take what the data set is called, JSON values that tell it from all others, and a folder (None: the usual).

        Nothing is made yet.
        """
        base = Path(below) if below is not None else default_directory()
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        plain = _NAME.sub("_", name).strip("._")[:_LONGEST] or "set"
        self.name = name
        self.folder = base.expanduser().absolute() / FOLDER / f"{plain}-{digest}"

    def states(self) -> list[str]:
        """Return the states that have a cache, finished or not."""
        try:
            with os.scandir(self.folder) as entries:
                return sorted(entry.name for entry in entries if _STATE.fullmatch(entry.name) and entry.is_dir())
        except OSError:  # there is none; where it cannot be read or made, building raises an error
            return []

    def open(self, state: str, on_error: OnError) -> KeptCache | None:
        """Return the finished cache of a state, None where there is none. Nothing has to be written for it.

        Raises StoreError for a folder of somebody else, and for a cache that is damaged; SampleError for one that lacks
        a sample which could not be used, unless that `on_error` is to be skipped.
        """
        directory = self.folder / state
        try:
            if not (directory / MANIFEST_NAME).is_file():
                return None
            check_own(self.folder)
            check_own(directory)
            use = Use(directory)  # before it is opened: so it stays
            cache = Cache.open(directory)
            _check_sizes(cache)
        except (NotACacheError, FileNotFoundError, PermissionError):  # of the last, `build` tells
            return None
        except (DamageError, FormatError) as error:
            raise type(error)(
                f"{error}. It is a cache that was made of {self.name}: remove {directory}, and it is made anew"
            ) from error
        if cache.manifest.skipped and on_error == "fail":
            skipped = cache.manifest.skipped[0]
            raise SampleError(skipped.path, f"{skipped.reason}; or leave such samples out with on_error='skip'")
        return KeptCache(cache, use)

    def build(
        self, state: str, source: Source, choices: BuildChoices, check: Callable[[], None] = lambda: None
    ) -> KeptCache:
        """Build the cache of a state, or continue where a process was killed; wait where another one builds it.

        `check` is called at the end and raises what is wrong with the source: then nothing is kept. Caches of other
        states, which no process reads, are removed after that. Raises what `build_cache` raises, and BuildError where
        the folder cannot be written.
        """
        with self._writing(), self._alone(state):
            if (found := self.open(state, choices.on_error)) is not None:
                return found
            is_new = not (self.folder / state).exists()
            if not is_new:
                note(f"{self.name}: what a process that was stopped has left of its cache is continued")
            elif self.states():
                note(f"{self.name} has changed since its cache was made")
            self._make(self.folder / state, source, choices, check)
            self.remove_others(state)
            found = self.open(state, choices.on_error)
        if found is None:
            raise BuildError(f"{self.folder / state} was removed while it was made: run this again")
        return found._replace(is_new=is_new)

    def grow(self, state: str, source: Any, choices: BuildChoices, check: Callable[[], None]) -> KeptCache:
        """Return the cache of a state at once: another process builds it while it is read.

        Where a process builds it already, its records are read. `source`, which may be a `functools.partial` that makes
        it, and `check` are pickled. What `build` raises, this raises, or whoever waits for a record.
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
            return KeptCache(open_growing(source, self.folder / state, others), use, is_new=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Make the folder of the caches; raise BuildError where what is done in it is refused by the system."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_own(self.folder)
            yield
        except OSError as error:
            raise BuildError(
                f"the cache of {self.name} cannot be kept in {self.folder}: {error}. Give another folder as cache=, or "
                "set TPUCACHE_DIR"
            ) from error

    def remove(self, state: str) -> None:
        """Remove what there is of a state, unless a process reads or builds it. Raises OSError."""
        if not is_held(self._lock(state)):
            _remove(self.folder / state)

    def _lock(self, state: str) -> Path:
        return self.folder / f"{state}.lock"

    @contextlib.contextmanager
    def _alone(self, state: str) -> Iterator[None]:
        """Wait until no other process builds a state, and keep others from it."""
        is_told = False
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(hold(self._lock(state), _HeldError))
                    if is_held(self.folder / state / WORK_NAME / LOCK_NAME):  # by one that is read while it is built
                        time.sleep(_WAIT_SECONDS)
                        raise _HeldError("another process")
                except _HeldError as error:
                    if not is_told:
                        note(f"{self.name}: waiting for {error}, which makes its cache")
                    is_told = True
                    continue
                yield
                return

    def _make(self, directory: Path, source: Source, choices: BuildChoices, check: Callable[[], None]) -> None:
        from tpucache.progress import BuildBar
        from tpucache.warmup.build import build_cache

        began, bar = time.monotonic(), BuildBar("build")
        try:
            manifest = build_cache(
                source,
                directory,
                choices.recipe,
                jobs=choices.jobs,
                on_error=choices.on_error,
                on_progress=bar.show,
                announce=functools.partial(_announce, self.name, directory),
                check=check,
            )
        finally:
            bar.close()
        note(
            f"{self.name}: {manifest.samples:,} pictures, {size_text(manifest.total_bytes)}, "
            f"{duration_text(time.monotonic() - began)}; found again from now on"
        )

    def remove_others(self, state: str) -> None:
        """Remove the caches of all states but one, which no process reads. Raises OSError."""
        for other in self.states():
            if other != state:
                self.remove(other)


def _announce(name: str, directory: Path, expected: Estimate) -> None:
    note(
        f"{name}: its pictures are decoded and resized once, into {directory}: {expected.records:,} records, about "
        f"{size_text(expected.bytes)} ({size_text(expected.free)} are free)"
    )


class _HeldError(BuildError):
    """Another process builds a cache; the text says which."""


class Use:
    """Says to other processes, as long as it is referred to, that this one reads a cache.

    A process that is forked, or given a pickled copy, says so, too. Where the file system has no locks, or nobody but
    the owner may write, nothing is said, and nothing removed.
    """

    def __init__(self, directory: Path) -> None:
        """Take a cache's folder. Raises FileNotFoundError where it is being removed."""
        self._directory = directory
        self._lock = _read_lock(_use_path(directory))

    def __reduce__(self) -> tuple[Any, ...]:
        return Use, (self._directory,)


def _use_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.use")


def _read_lock(path: Path) -> OpenFile | None:
    """Lock a file together with all others who read, and make it where there is none; None where that cannot be.

    Raises FileNotFoundError while somebody has locked it alone, to remove what it stands for.
    """
    while fcntl is not None:
        try:
            file = _open_lock(path)
        except OSError:
            try:
                file = OpenFile(path)
            except OSError:  # in a folder that this process cannot write
                return None
        try:
            fcntl.flock(file.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.number), path.stat()):
                return file
        except BlockingIOError:
            raise FileNotFoundError(f"{path.with_suffix('')} is being removed") from None
        except FileNotFoundError:  # whoever has removed the cache has removed this file, too
            continue
        except OSError:
            return None
    return None


def _open_lock(path: Path) -> OpenFile:
    return OpenFile.of(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))


def _remove(directory: Path) -> None:
    """Remove a cache, or an unfinished one, unless a process reads it. Raises OSError."""
    if fcntl is None:
        return
    path = _use_path(directory)
    file = _open_lock(path)
    try:
        fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.rename(directory.with_name(f"{_REMOVED}{secrets.token_hex(8)}"))  # all of it goes at once
        path.unlink()
    except OSError:  # it is in use, or nobody can say whether it is
        return
    for each in directory.parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(each, ignore_errors=True)


def _check_sizes(cache: Cache) -> None:
    """Raise DamageError where a file of a cache is missing or cut short, as by whoever tidies up a cache folder."""
    for entry in cache.manifest.files:
        path = cache.directory / entry.name
        found = path.stat().st_size if path.exists() else None
        if found != entry.bytes:
            raise DamageError(f"{path} has {found or 0:,} bytes, and {entry.bytes:,} by the manifest")
