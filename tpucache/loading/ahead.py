"""Threads that read batches ahead, and a thread that prepares them ahead of the loop that uses them."""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from tpucache import process
from tpucache.errors import UsageError
from tpucache.machine import usable_cores
from tpucache.ondevice.resident import RecordBatch
from tpucache.options import option
from tpucache.store.ahead import Threads, is_collecting

#: The default number of reading threads: half of the cores, from two to eight. Eight threads copy faster than any
#: accelerator needs; the other cores are left for uploads and the training loop.
THREADS: Final = min(8, max(2, usable_cores() // 2))


def threads_option() -> Any:
    return option(THREADS, "threads that read the cache", metavar="N", minimum=1)


@dataclass(frozen=True)
class ReadingOptions:
    threads: int = threads_option()


T = TypeVar("T")

LEAST_ROWS: Final = 8  # rows per part of a batch: handing a part to another thread costs time, too
_SPARE: Final = 2  # parts per thread, so that no thread waits while another finishes a batch


def refuse_fork(began: int) -> None:
    """Raise UsageError unless this is the process, of the pid `began`, in which an iteration began."""
    if os.getpid() != began:
        raise UsageError(
            f"this iteration was begun in process {began}, and a forked process lacks the threads that read its "
            "batches: begin a new iteration here, such as `for batch in loader`"
        )


class Uncounted(NamedTuple):
    """A batch that is not counted in the loader's state yet. Call `confirm` when the batch is handed out."""

    batch: Any
    confirm: Callable[[], None]


class ReadingThreads:
    """The threads that read the batches of one iteration, up to `ahead` batches at the same time.

    If there are more threads than batches, several threads read one batch.
    """

    def __init__(self, threads: int, ahead: int) -> None:
        """Make the thread pools. A thread starts when there is work for it."""
        #: Raises UsageError in a process that was forked after the iteration began.
        self.check = functools.partial(refuse_fork, os.getpid())
        self._parts = 1 if threads <= ahead else -(-_SPARE * threads // ahead)
        self._stop = stop = threading.Event()
        outer = process.is_given_up()
        # Also where this thread's own work is given up, as that of a thread that prepares batches.
        self._readers = Threads(threads, "tpucache-read", process.give_up_when, (lambda: stop.is_set() or outer(),))
        self.submit = self._readers.submit
        self._hints = Threads(threads, "tpucache-hint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if sys.is_finalizing():  # the exiting interpreter has ended the threads already
            return
        self._stop.set()
        is_waiting = not is_collecting()
        self._hints.shutdown(is_waiting, cancel_futures=True)
        self._readers.shutdown(is_waiting, cancel_futures=True)

    def hint(self, work: Callable[[], None]) -> None:
        """Call `work`, which gives the kernel a hint, in another thread: a slow or busy disk may block the hint."""
        self._hints.submit(work)

    def divide(self, work: Callable[[int, int], None], rows: int) -> None:
        """Call `work(start, stop)` for parts of a batch's rows, in this thread and in idle reading threads."""
        parts = min(self._parts, rows // LEAST_ROWS)
        if parts < 2:
            work(0, rows)
            return
        bounds = deque((rows * part // parts, rows * (part + 1) // parts) for part in range(parts))

        def work_at_parts() -> None:
            while True:
                try:
                    part = bounds.popleft()  # atomic, so that no two threads get the same part
                except IndexError:
                    return
                work(*part)

        helpers = [self._readers.submit(work_at_parts) for _ in range(parts - 1)]
        try:
            work_at_parts()
        finally:
            bounds.clear()
            # This cannot deadlock: it waits only for helpers that are running, and a helper waits for no other thread.
            running = [helper for helper in helpers if not helper.cancel()]
            errors = [error for helper in running if (error := helper.exception()) is not None]
        if errors:
            raise errors[0]


Prepared = TypeVar("Prepared")

_DONE: Final = object()
#: The largest group of batches that one call prepares. Two threads are woken for each group, whatever its size.
_MOST_TOGETHER: Final = 64


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class Ahead(Generic[Prepared]):
    """Iterates over batches. A thread calls `prepare(batch, number)` for each batch, up to `depth` batches ahead.

    A CachedLoader counts a batch when the loop gets it prepared, not when the thread reads it. An error of reading or
    preparing is raised in the loop at that batch. Leaving the context ends the thread. `waited_seconds` is how long the
    loop has waited, `cpu_seconds` the CPU time of the thread.

    `together(batches, number)`, if given, prepares up to 64 batches, which `depth` counts as one, if they consist only
    of row numbers, because all of their records are in the device's memory.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        prepare: Callable[[Any, int], Prepared],
        depth: int = 2,
        first: int = 0,
        together: Callable[[Sequence[Any], int], Sequence[Prepared]] | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Store the batches. The first has the number `first`. The thread starts when the context is entered.

        `at_end` is called when the context is left and the thread has ended.
        """
        self.waited_seconds = 0.0
        self.cpu_seconds = 0.0
        self._batches, self._prepare, self._together, self._first = batches, prepare, together, first
        self._at_end, self._is_left = [] if at_end is None else [at_end], False
        self._iterator: Iterator[Any] = iter(())  # over the batches, once the context is entered
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item for each batch that may become ready
        for _ in range(depth):
            self._room.put(None)
        self._stop, self._has_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpucache-feed", daemon=True)

    @property
    def has_begun(self) -> bool:
        return self._thread.ident is not None

    def __enter__(self) -> Self:
        try:
            self._process, self._iterator = os.getpid(), self._begin()
            self._thread.start()
        except BaseException:
            self._call_at_end()
            raise
        # Also at exit: the interpreter would stop the thread inside compiled code, which aborts the process.
        self._end = weakref.finalize(self, _end, self._stop, self._room, self._has_ended, self._thread)
        return self

    def _begin(self) -> Iterator[Any]:
        batches = self._batches
        return batches.iterate_ahead() if hasattr(batches, "iterate_ahead") else iter(batches)

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            f"a {type(self).__name__} has a thread, so it cannot be sent to another process: give the loader to that "
            f"process, and make a {type(self).__name__} from the loader there"
        )

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        self._end()
        if not is_collecting():
            self._thread.join()
            self._call_at_end()
        elif self._has_ended.is_set():
            self._call_at_end()
        self._ready = queue.SimpleQueue()  # otherwise its batches stay in use

    def __iter__(self) -> Iterator[Prepared]:
        while True:
            refuse_fork(self._process)
            asked = time.perf_counter()
            item = process.wait_for(self._ready.get)
            self.waited_seconds += time.perf_counter() - asked
            if item is _DONE:
                return
            if isinstance(item, _Failure):
                raise item.error
            self._room.put(None)
            for prepared, confirm in item:
                if confirm is not None:
                    confirm()
                yield prepared
            del item

    def _run(self) -> None:
        batches, number = self._iterator, self._first
        process.give_up_when(self._stop.is_set)
        try:
            for group in self._grouped(batches):
                prepared = self._prepared([batch for batch, _ in group], number)
                self._room.get()
                if self._stop.is_set():
                    return
                self._ready.put([(each, confirm) for each, (_, confirm) in zip(prepared, group, strict=True)])
                self.cpu_seconds = time.thread_time()
                number += len(group)
                del group, prepared  # otherwise their buffers stay in use until the next batch is read
            self._ready.put(_DONE)
        except BaseException as error:  # noqa: BLE001  # the loop raises it again
            self._ready.put(_Failure(error))
        finally:
            # A generator must be closed in the thread that ran it, before the context ends.
            if isinstance(batches, Generator):
                batches.close()
            self._has_ended.set()
            if self._is_left:
                self._call_at_end()

    def _call_at_end(self) -> None:
        try:
            at_end = self._at_end.pop()
        except IndexError:  # the other thread calls it
            return
        at_end()

    def _prepared(self, batches: Sequence[Any], number: int) -> Sequence[Prepared]:
        if len(batches) > 1 and self._together is not None:
            return self._together(batches, number)
        return [self._prepare(batch, number + at) for at, batch in enumerate(batches)]

    def _grouped(self, batches: Iterator[Any]) -> Generator[list[tuple[Any, Callable[[], None] | None]], None, None]:
        group: list[tuple[Any, Callable[[], None] | None]] = []
        key: Hashable = None
        most = 1
        try:
            for item in batches:
                if self._stop.is_set():
                    return
                batch, confirm = item if isinstance(item, Uncounted) else (item, None)
                before, key = key, None if self._together is None else _shared(batch)
                if group and key != before:
                    yield group
                    group = []
                group.append((batch, confirm))
                del batch, confirm, item
                if key is None or len(group) >= most:
                    yield group
                    group, most = [], 1 if key is None else min(2 * most, _MOST_TOGETHER)
        except Exception:  # the batches before the error come first
            if group:
                yield group
            raise
        if group:
            yield group


def _shared(batch: Any) -> Hashable:
    """Return a key: consecutive batches with equal keys may be prepared together; a batch with None may not."""
    if isinstance(batch, tuple) and isinstance(batch[1], RecordBatch) and not batch[1].uploads:
        return id(batch[0]), len(batch[1].slots)
    return None


def _end(
    stop: threading.Event, room: queue.SimpleQueue[None], has_ended: threading.Event, thread: threading.Thread
) -> None:
    stop.set()
    room.put(None)
    # A forked process has no such thread.
    while not (is_collecting() or has_ended.wait(0.05)) and thread.is_alive():
        continue
