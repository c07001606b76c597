"""Threads that read batches ahead. If there are more threads than batches, several threads read one batch."""

from __future__ import annotations

import functools
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Self, TypeVar

from tpucache.errors import UsageError

T = TypeVar("T")

LEAST_ROWS: Final = 8  # rows per part of a batch: handing a part to another thread costs time, too
_SPARE: Final = 2  # parts per thread, so that no thread waits while another finishes a batch


def refuse_fork(began: int) -> None:
    """Raise UsageError unless this is the process in which an iteration began; `began` is that process's pid.

    A forked process has the iterator, but not the threads that read for it, so it would wait forever.
    """
    if os.getpid() != began:
        raise UsageError(
            f"this iteration was begun in process {began}, and a forked process lacks the threads that read its "
            "batches: begin a new iteration here, such as `for batch in loader`"
        )


class ReadingThreads:
    """The threads that read the batches of one iteration, up to `ahead` batches at the same time.

    If there are more threads than batches, several threads read one batch.
    """

    def __init__(self, threads: int, ahead: int) -> None:
        """Make the thread pools. A thread starts when there is work for it."""
        #: Raises UsageError in a process that was forked after the iteration began.
        self.check = functools.partial(refuse_fork, os.getpid())
        self._parts = 1 if threads <= ahead else -(-_SPARE * threads // ahead)
        self._readers = ThreadPoolExecutor(threads, "tpucache-read")
        self._hints = ThreadPoolExecutor(threads, "tpucache-hint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending():  # the exiting interpreter has ended the threads already
            return
        self._hints.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def hint(self, work: Callable[[], None]) -> None:
        """Call `work`, which gives the kernel a hint, in another thread: a slow or busy disk may block the hint."""
        self._hints.submit(work)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Let a thread call `work`, which reads a batch."""
        return self._readers.submit(work)

    def divide(self, work: Callable[[int, int], None], rows: int) -> None:
        """Call `work(start, stop)` for parts of a batch's rows, in this thread and in idle reading threads.

        Return when all parts are done.
        """
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
