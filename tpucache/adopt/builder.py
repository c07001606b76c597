"""BuildProcess: another process that builds a cache while this one reads the cache. This file never imports torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from tpucache.errors import BuildError
from tpucache.machine import usable_cores
from tpucache.native import native
from tpucache.store.cache import Cache
from tpucache.store.growing import GrowingCache, Prospect, RecordMaker

#: The cache of a data set with fewer samples is built before it is read: that is faster than starting workers.
LEAST_GROWING: Final = 256

_END_SECONDS: Final = 5.0
#: The variables that limit the threads of libraries for arithmetic, as joblib sets them for its workers.
_THREADS: Final = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
)


def start_building(source: Any, directory: Path, others: Mapping[str, Any]) -> Callable[[], Cache]:
    """Start a process that builds the cache of a source, and return a function that opens the cache.

    The function returns as soon as the source is listed, while the process builds the cache. If the cache cannot be
    read before it is finished, the function waits until it is finished. The function raises the errors of
    `build_cache`. `source` is the first argument of `build_cache`, or a `functools.partial` that makes this argument;
    `others` are the other arguments by name.
    """
    builder = BuildProcess(source, directory, others)

    def open_cache() -> Cache:
        native()  # compile what reading needs while the other process starts; later it would slow the workers down
        prospect = builder.first_answer()
        return Cache.open(directory) if prospect is None else GrowingCache(directory, prospect, builder)

    return open_cache


class BuildProcess:
    """A process that builds a cache. The process ends when this object is garbage collected."""

    def __init__(self, source: Any, directory: Path, others: Mapping[str, Any]) -> None:
        from tpucache.warmup.growing import COMMAND, Request, send_request

        self._directory, self._source, self._others = directory, source, others
        self._error: BaseException | None = None
        self._is_finished = False
        self._owner = os.getpid()
        self._lock = threading.Lock()
        pipe, warnings = subprocess.PIPE, os.environ.get("PYTHONWARNINGS", "")
        # loky's resource tracker warns when it removes the shared memory of a process that was ended on purpose.
        environment = {
            **dict.fromkeys(_THREADS, str(max(1, usable_cores() // (others.get("jobs") or usable_cores())))),
            **os.environ,
            "PYTHONWARNINGS": f"{warnings},ignore:resource_tracker:UserWarning".strip(","),
        }
        # The builder gets a session of its own, so that Ctrl-C reaches only this process, which then ends the builder.
        self._process = subprocess.Popen(  # noqa: S603  # it is this interpreter
            [sys.executable, "-c", COMMAND],
            stdin=pipe,
            stdout=pipe,
            env=environment,
            start_new_session=os.name == "posix",
        )
        self._end = weakref.finalize(self, _end, self._process, self._owner)
        try:
            send_request(self._stream("stdin"), Request(source, str(directory), others), is_large=_is_large(source))
        except BrokenPipeError:
            pass  # the process has ended: `first_answer` returns its error
        except BaseException:
            self._end()
            raise

    def __reduce__(self) -> Any:
        return type(None), ()  # unpickled copies are None, because only the process that started the build may use it

    def first_answer(self) -> Prospect | None:
        """Wait until the source is listed, and return the parts of the manifest that are known then.

        Returns None if the cache is finished: it was finished before, or it cannot be read while it is built.
        """
        answer = self._read()
        if isinstance(answer, Prospect):
            return answer
        self._settle(answer)
        if self._error is not None:
            raise self._error
        return None

    def check(self) -> bool:
        """Return whether the calling process is the one that started the build; a forked copy of it is not."""
        if os.getpid() != self._owner:
            return False
        with self._lock:
            if self._error is None and not self._is_finished and self._process.poll() is not None:
                self._settle(self._read())
        if self._error is not None:
            raise self._error
        return True

    def maker(self) -> RecordMaker:
        """Return a function that builds single records in this process."""
        from tpucache.warmup.growing import Maker

        return Maker(self._source, self._directory, **self._others)

    def _settle(self, answer: object) -> None:
        """Store how the build ended: `answer` is the error, or anything else after a success."""
        self._process.wait()
        self._error = answer if isinstance(answer, BaseException) else None
        self._is_finished = self._error is None

    def _read(self) -> object:
        """Return the next answer of the building process; a BuildError if the process has ended without one."""
        try:
            return pickle.load(self._stream("stdout"))  # noqa: S301  # from a process that this one started
        except (EOFError, pickle.UnpicklingError):
            return BuildError(
                f"the process that builds {self._directory} ended with status {self._process.wait()}. The records that "
                "it has finished are kept: run this again to continue"
            )

    def _stream(self, name: str) -> BinaryIO:
        stream: BinaryIO = getattr(self._process, name)
        return stream


def _is_large(source: Any) -> bool:
    """Guess, before a source is listed, whether it has more than 256 samples (`LEAST_GROWING`).

    The files of a folder are counted. A `functools.partial` is large, because its caller has counted the samples. A
    source without a length is not.
    """
    if isinstance(source, functools.partial):
        return True
    if isinstance(source, (str, Path)):
        files = (name for _, _, names in os.walk(source) for name in names)
        return next(itertools.islice(files, LEAST_GROWING, None), None) is not None
    return hasattr(source, "__len__") and len(source) > LEAST_GROWING


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the building process by closing its standard input; kill it if it does not end soon.

    Do nothing in a fork, whose process id is not `owner`: only the process that started the build may end it.
    """
    if os.getpid() != owner:
        return
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
