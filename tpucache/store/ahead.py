"""Asks storage that answers late, as a network mount does, for many things at once."""

from __future__ import annotations

import functools
import gc
import io
import itertools
import logging
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, NamedTuple, ParamSpec, Self, TypeVar

from tpucache import machine
from tpucache.store.files import CHUNK, OpenFile, ThreadLock, ask_for, is_late, open_regular

Asked = ParamSpec("Asked")
Made = TypeVar("Made")
Wanted = TypeVar("Wanted")
Loaded = TypeVar("Loaded")

#: Limits: how many items (files, or pieces of files) are loaded in parallel, and their total size in bytes.
MOST_FILES: Final = 64
MOST_BYTES: Final = 64 << 20
#: How many files are opened before their first piece is loaded, if the storage answers late.
_OPENED_AHEAD: Final = 8
_WEIGHT: Final = 0.2  # weight of the newest time in a moving mean
#: While the storage does not answer late, only one of this many loads is timed.
_MEASURED_EVERY: Final = 16
_MOST_WAITING: Final = 0.05  # the largest share of a task's time in which it may wait for its first file
#: Limits of `map_ahead`: calls at the same time, and calls after which it tries again whether the storage is late.
_MOST_CALLS: Final = 128
_CALLS_A_TRIAL: Final = 4096
#: Bytes that `open_scanned` reads at once, and for which it asks the kernel before, if the storage answers late.
_SCANNED_BYTES: Final = 1 << 20
_SCANNED_AHEAD: Final = 4 << 20

#: More than the stack of a thread takes.
_STACK_BYTES: Final = 16 << 20

_log: Final = logging.getLogger("tpucache")


class _Value(Generic[Made]):
    """A value that may not be made yet. The lock is for the thread that makes it."""

    def __init__(self) -> None:
        self.lock: Final = ThreadLock()
        self.made: list[Made] = []


class ThreadCache(Generic[Asked, Made]):
    """A function that remembers its values like `functools.lru_cache`, and makes each in one thread; others wait for
    it.

    If the function raises an error, the next thread calls it again.
    """

    def __init__(self, function: Callable[Asked, Made], most: int | None) -> None:
        self._function = function
        self._lock = ThreadLock()
        self._values: Any = functools.lru_cache(most)(lambda *_, **__: _Value[Made]())
        functools.update_wrapper(self, function)

    def __call__(self, *values: Asked.args, **named: Asked.kwargs) -> Made:
        with self._lock:
            value: _Value[Made] = self._values(*values, **named)
        if not value.made:
            with value.lock:
                if not value.made:
                    value.made.append(self._function(*values, **named))
        return value.made[0]

    def cache_clear(self) -> None:
        with self._lock:
            self._values.cache_clear()


def cached_for_threads(most: int | None) -> Callable[[Callable[Asked, Made]], ThreadCache[Asked, Made]]:
    """Return a decorator that makes a function a ThreadCache of `most` values; None: all."""

    return lambda function: ThreadCache(function, most)


@cached_for_threads(1)
def say_no_thread() -> None:
    """Log, once, that no thread can start, so that everything takes longer.

    Where there is no memory for a thread's stack, nothing is logged: the error that memory is short follows.
    """
    try:
        mmap.mmap(-1, _STACK_BYTES).close()
    except OSError:
        return
    _log.warning(
        "no more threads can be started, because processes are limited: what they would do takes longer. "
        "Raise the limit (`ulimit -u`, or that of the container)"
    )


#: The number of the thread that collects garbage, if any does.
_collecting: list[int] = []


def is_collecting() -> bool:
    """Return whether this thread collects garbage: it must not wait, as it may hold a lock or be what it waits for."""
    return threading.get_ident() in _collecting


def _note_collection(
    phase: str, _: object, collecting: list[int] = _collecting, thread: Callable[[], int] = threading.get_ident
) -> None:
    # When the interpreter exits, module globals may be gone already; a default argument is not.
    collecting[:] = [thread()] if phase == "start" else []


gc.callbacks.append(_note_collection)


class Threads(ThreadPoolExecutor):
    """A pool of threads. If no thread can start, the caller does the work itself, which another may do once more."""

    def submit(self, function: Callable[Asked, Made], /, *values: Asked.args, **named: Asked.kwargs) -> Future[Made]:
        try:
            return super().submit(function, *values, **named)
        except RuntimeError as error:
            if "new thread" not in str(error):  # the pool was shut down
                raise
        say_no_thread()
        done: Future[Made] = Future()
        try:
            done.set_result(function(*values, **named))
        except Exception as error:  # noqa: BLE001  # it is raised where the result is asked for
            done.set_exception(error)
        return done

    def __exit__(self, *_: object) -> None:
        self.shutdown(wait=not is_collecting())


class Lateness:
    """Moving means, in seconds, of the wait for one file and of the work on it. Threads may lose an update, which is
    harmless.
    """

    def __init__(self, wait: float = 0.0) -> None:
        """Begin with `wait`, the seconds that an earlier answer took; 0 if unknown."""
        self._wait: float | None = wait or None
        self._work: float | None = None

    def waited(self, seconds: float) -> None:
        self._wait = _mean(self._wait, seconds)

    def worked(self, seconds: float) -> None:
        """Add the seconds between receiving one file and asking for the next."""
        self._work = _mean(self._work, seconds)

    @property
    def files(self) -> int:
        """How many files to read in parallel, so that the caller need not wait; 0 if the storage answers fast."""
        if self._work is None:  # as many as possible, so that there is one wait before the work begins, and not two
            return MOST_FILES if is_late(self._wait or 0.0) else 0
        return min(MOST_FILES, 2 + math.ceil(self._files_a_wait)) if self._files_a_wait else 0

    @property
    def samples_a_task(self) -> int:
        """How many samples a task needs, so that it waits for the first at most 5 % of its time."""
        return max(1, math.ceil(self._files_a_wait / _MOST_WAITING))

    @property
    def _files_a_wait(self) -> float:
        wait = self._wait or 0.0
        return wait / max(self._work or wait, 1e-4) if is_late(wait) else 0.0


class ReadAhead(Generic[Wanted, Loaded]):
    """Loads items in a known order, several in parallel if the storage answers late. Use it in a `with` block."""

    def __init__(
        self,
        load: Callable[[Wanted], Loaded],
        wanted: Iterable[Wanted],
        size: Callable[[Wanted], int],
        lateness: Lateness,
    ) -> None:
        """Prepare to load the items `wanted` in this order; none is loaded yet.

        If the storage answers late, threads load items of at most 64 MiB (by `size`) ahead. Otherwise, and for items
        that are not in `wanted`, the method `load` loads them.
        """
        self._load, self._size, self._lateness = load, size, lateness
        self._left = deque(wanted)
        self._ahead: deque[tuple[Wanted, Future[Loaded]]] = deque()
        self._bytes = 0  # of the items loaded ahead
        self._pool: Threads | None = None
        self._returned: float | None = None
        self._is_at_once = False
        self._turns = itertools.cycle(range(_MEASURED_EVERY))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def load(self, item: Wanted) -> Loaded:
        if next(self._turns) and self._is_at_once:
            return self._load(item)
        if self._returned is not None and not self._is_at_once:
            self._lateness.worked(time.monotonic() - self._returned)
        try:
            while self._ahead and self._ahead[0][0] is not item:
                self._take().cancel()
            while not self._ahead and self._left and self._left[0] is not item:
                self._left.popleft()
            self._read_ahead()
            if self._ahead:
                return self._take().result()
            if self._left:
                self._left.popleft()
            return self._timed(item)
        finally:
            self._is_at_once = not self._ahead and not self._most
            self._returned = time.monotonic()

    @property
    def _most(self) -> int:
        return self._lateness.files

    def _read_ahead(self) -> None:
        files = self._most
        while self._left and len(self._ahead) < files:
            size = self._size(self._left[0])
            if self._ahead and self._bytes + size > MOST_BYTES:
                break
            if self._pool is None:
                self._pool = Threads(MOST_FILES, "tpucache-load")
            item = self._left.popleft()
            self._ahead.append((item, self._pool.submit(self._timed, item)))
            self._bytes += size

    def _take(self) -> Future[Loaded]:
        item, future = self._ahead.popleft()
        self._bytes -= self._size(item)
        return future

    def _timed(self, item: Wanted) -> Loaded:
        began, busy = time.monotonic(), time.thread_time()
        try:
            return self._load(item)
        finally:
            self._lateness.waited(max(0.0, time.monotonic() - began - (time.thread_time() - busy)))


def map_ahead(ask: Callable[[Wanted], Loaded], wanted: Iterable[Wanted]) -> Iterator[Loaded]:
    """Yield `ask(item)` for each item, in order; if the storage answers late, threads call the function at once."""
    left = iter(wanted)
    while (yield from _until_late(ask, left)):
        some = itertools.islice(left, _CALLS_A_TRIAL)
        with Threads(_MOST_CALLS, "tpucache-ask") as pool:
            asked = deque(pool.submit(ask, item) for item in itertools.islice(some, _MOST_CALLS))
            try:
                while asked:
                    yield asked.popleft().result()
                    asked.extend(pool.submit(ask, item) for item in itertools.islice(some, 1))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _until_late(ask: Callable[[Wanted], Loaded], left: Iterator[Wanted]) -> Generator[Loaded, None, bool]:
    """Yield answers until one was late, and return True; return False when no item is left."""
    for item in left:
        began, busy = time.monotonic(), time.thread_time()
        answer = ask(item)
        waited = time.monotonic() - began - (time.thread_time() - busy)
        yield answer
        if is_late(waited):
            return True
        yield from map(ask, itertools.islice(left, _MEASURED_EVERY - 1))
    return False


class _AskingFile(io.FileIO):
    """A file that asks the kernel, in each read, for the next 4 MiB at once."""

    def readinto(self, buffer: Any, /) -> int | None:
        ask_for(self.fileno(), self.tell(), _SCANNED_AHEAD)
        return super().readinto(buffer)


def open_scanned(path: Path) -> BinaryIO:
    """Open a regular file whose headers are read in order; if the storage answers late, with a buffer of 1 MiB."""
    number = open_regular(path)
    began, busy = time.monotonic(), time.thread_time()
    try:
        machine.pread(number, 1, 0)
    except BaseException:
        os.close(number)
        raise
    if is_late(time.monotonic() - began - (time.thread_time() - busy)):
        return io.BufferedReader(_AskingFile(number), _SCANNED_BYTES)
    return os.fdopen(number, "rb")


class WholeFile:
    """One file that is read from its start to its end. Threads may read several pieces of it at once."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        #: The number of bytes that the file has; None before the first read.
        self.found: int | None = None
        # Byte `size`, the first one after the end, is in a piece, too: so a file that has grown is read beyond `size`.
        self.pieces = [FilePiece(self, at) for at in range(0, size + 1, CHUNK)]
        self._opened: OpenFile | None = None
        self._lock = threading.Lock()

    def open(self) -> OpenFile | None:
        """Open the file if it is not open, and return it; None if it does not have `self.size` bytes."""
        with self._lock:
            if self._opened is None:
                self.found = self.path.stat().st_size
                if self.found != self.size:
                    return None
                self._opened = OpenFile(self.path)
            return self._opened

    def close(self) -> None:
        """Close the file as soon as no thread reads it any more. Reading opens it again."""
        with self._lock:
            self._opened = None

    def read(self, offset: int, *, is_late: bool = False) -> bytes:
        """Return 4 MiB (`CHUNK`) of the file from `offset` on, or less at its end; b"" if its size is wrong.

        With `is_late`, the kernel is asked for all these bytes at once, and not for one small part after another.
        """
        file = self.open()  # stays open as long as this refers to it
        if file is None:
            return b""
        if is_late:
            ask_for(file.number, offset, min(CHUNK, self.size - offset))
        data = machine.pread(file.number, CHUNK, offset)
        while len(data) < CHUNK and (more := machine.pread(file.number, CHUNK - len(data), offset + len(data))):
            data += more
        return data


class FilePiece(NamedTuple):
    file: WholeFile
    offset: int


class FilesAhead(ReadAhead[FilePiece, bytes]):
    """Reads whole files one after the other. If the storage answers late, the next pieces are read ahead of time."""

    def __init__(self, files: Iterable[WholeFile], lateness: Lateness) -> None:
        self._files = list(files)
        self._positions = {file: at for at, file in enumerate(self._files)}
        self._opened = 0  # the position after the last file that a thread opens
        pieces = itertools.chain.from_iterable(file.pieces for file in self._files)
        super().__init__(self._read_piece, pieces, lambda piece: min(CHUNK, piece.file.size - piece.offset), lateness)

    def chunks(self, file: WholeFile) -> Iterator[bytes]:
        """Yield the bytes of a file, a piece at a time; nothing if the file's size is not `file.size`."""
        try:
            for piece in file.pieces:
                data = self.load(piece)
                if data:
                    yield data
                if len(data) < CHUNK:
                    break
        finally:
            file.close()

    @property
    def _most(self) -> int:
        # As many as the limit of bytes allows. The mean time of work would give too few: `verify` works long after the
        # last piece of a shard, and then needs the pieces of the next shard faster than storage would deliver them.
        return MOST_FILES if self._lateness.files else 0

    def _read_ahead(self) -> None:
        super()._read_ahead()
        if self._left and self._pool is not None:
            # Opening takes several answers of the storage. While they come, the pieces of earlier files are loaded.
            first = self._positions[self._left[0].file]
            for file in self._files[max(first, self._opened) : first + _OPENED_AHEAD]:
                self._pool.submit(file.open)  # an error is raised again when the file is read
            self._opened = max(self._opened, first + _OPENED_AHEAD)

    def _read_piece(self, piece: FilePiece) -> bytes:
        return piece.file.read(piece.offset, is_late=self._lateness.files > 0)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _WEIGHT * (newest - before)
