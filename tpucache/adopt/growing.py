"""open_or_build: a cache that is built while its first epoch is read."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from tpucache.errors import BuildError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.recipe import Recipe
from tpucache.store.files import is_url
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.growing import GrowingCache, Prospect

if TYPE_CHECKING:
    from tpucache.loading.reading.reader import InMemory
    from tpucache.warmup.build_options import LabelKind, OnError
    from tpucache.warmup.sources.source import Items, Source

_END_SECONDS: Final = 2.0


def open_or_build(
    source: str | Path | Source | Items,
    cache: str | Path,
    recipe: Recipe | None = None,
    *,
    jobs: int | None = None,
    on_error: OnError = "fail",
    labels: LabelKind = "auto",
    classes: str | Path | Sequence[str] | None = None,
    missing_label: Sequence[str] = (),
    pad: int | None = None,
    truncate: bool = False,
    in_memory: InMemory = "auto",
) -> CachedDataset:
    """Open the cache of a source, and build what is missing while it is read.

    It returns once the source is listed. Another process builds, with `jobs` workers (default: all cores), in the order
    in which loaders read; whoever asks for a record that is not made yet waits for it. Batches are those of the
    finished cache, and in the end the folder is what `build_cache` writes, whose arguments the others are. What is made
    when this process ends is kept, and the next call continues. Several processes may open the same cache: one of them
    builds, and another one takes over if it ends.

    What is known at the end alone waits for the end: the statistics by which images are normalised, the digest in a
    loader's state, and columns of the samples table that only decoding gives. All of the cache is built before this
    returns where the number of samples or their labels are known at the end alone, which are `on_error="skip"` and
    labels that are in the samples, and where a finished cache is added to.

    Raises what `build_cache` raises, here or from the loader that waits.
    """
    if is_url(cache):
        raise UsageError(f"{cache} is a URL: a cache that is read while it is built is in a folder of this machine")
    directory = Path(cache).absolute()
    others: dict[str, Any] = {
        "recipe": recipe,
        "jobs": jobs,
        "on_error": on_error,
        "labels": labels,
        "classes": classes,
        "missing_label": tuple(missing_label),
        "pad": pad,
        "truncate": truncate,
    }
    if (directory / MANIFEST_NAME).exists():
        from tpucache.warmup.build import build_cache

        build_cache(source, directory, **others)
        return CachedDataset(directory, in_memory=in_memory)
    builder = BuildProcess(source, directory, others)
    prospect = builder.first_answer()
    if prospect is None:
        return CachedDataset(directory, in_memory=in_memory)
    return CachedDataset(GrowingCache(directory, prospect, builder), in_memory=in_memory)


class BuildProcess:
    """The process that builds a cache; it ends when nothing refers to this any more."""

    def __init__(self, source: Any, directory: Path, others: dict[str, Any]) -> None:
        """Start it. Raises BuildError."""
        from tpucache.warmup.growing import COMMAND, Request, send_request

        self._directory = directory
        self._error: BaseException | None = None
        self._is_finished = False
        self._owner = os.getpid()
        self._lock = threading.Lock()
        pipe, warnings = subprocess.PIPE, os.environ.get("PYTHONWARNINGS", "")
        # Where it is ended, what loky has in shared memory is removed by another process, which need not say so.
        environment = {**os.environ, "PYTHONWARNINGS": f"{warnings},ignore:resource_tracker:UserWarning".strip(",")}
        # In a session of its own: Ctrl-C is for the process that reads, with which this one ends.
        self._process = subprocess.Popen(  # noqa: S603  # it is this interpreter
            [sys.executable, "-c", COMMAND],
            stdin=pipe,
            stdout=pipe,
            env=environment,
            start_new_session=os.name == "posix",
        )
        self._end = weakref.finalize(self, _end, self._process, self._owner)
        try:
            send_request(self._stream("stdin"), Request(source, str(directory), others))
        except BrokenPipeError:
            pass  # its end is noticed when its answer is read
        except BaseException:
            self._end()
            raise

    def __reduce__(self) -> Any:
        return _none, ()  # it belongs to the process that has started it

    def first_answer(self) -> Prospect | None:
        """Wait for what is known of the cache, or, as None, until it is finished. Raises what the build fails with."""
        answer = self._read()
        if isinstance(answer, Prospect):
            return answer
        self._settle(answer)
        if self._error is not None:
            raise self._error
        return None

    def check(self) -> bool:
        """Return whether this process has started it; raise what the build has failed with, if it has."""
        if os.getpid() != self._owner:
            return False
        with self._lock:
            if self._error is None and not self._is_finished and self._process.poll() is not None:
                self._settle(self._read())
        if self._error is not None:
            raise self._error
        return True

    def _settle(self, answer: object) -> None:
        """Note how the build has ended."""
        self._process.wait()
        self._error = answer if isinstance(answer, BaseException) else None
        self._is_finished = self._error is None

    def _read(self) -> object:
        """Return the next answer. A process that has ended without one is an error."""
        try:
            return pickle.load(self._stream("stdout"))  # noqa: S301  # of a process that this one has started
        except (EOFError, pickle.UnpicklingError):
            return BuildError(
                f"the process that builds {self._directory} has ended with status {self._process.wait()}. What it had "
                "finished is kept: run this again to continue"
            )

    def _stream(self, name: str) -> BinaryIO:
        stream: BinaryIO = getattr(self._process, name)
        return stream


def _none() -> None:
    return None


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process that builds: it does when its standard input ends."""
    if os.getpid() != owner:
        return
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
