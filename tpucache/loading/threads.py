"""Threads that read batches ahead; where there are more threads than batches, several read one batch."""

from __future__ import annotations

import functools
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from tpucache.errors import UsageError

T = TypeVar("T")
Self = TypeVar("Self", bound="ReadingThreads")

LEAST_ROWS: Final = 8  # in a part of a batch: handing it to another thread costs time, too
_SPARE: Final = 2  # parts for each thread: none waits while another finishes a batch


def refuse_fork(began: int) -> None:
    """Raise UsageError unless this is the process where an iteration began: another one would wait for ever.

    A forked process has the iterator, but not the threads that read for it.
    """
    if os.getpid() != began:
        raise UsageError(
            f"this iteration was begun in process {began}, and a forked process lacks the threads that read ahead for "
            "it: begin a new iteration here, such as `for batch in loader`"
        )


class ReadingThreads:
    """A pool of threads for as long as an iteration lasts, at work at `ahead` batches at once."""

    def __init__(self, threads: int, ahead: int) -> None:
        """Start no thread before there is work."""
        #: Raises UsageError in a process that was forked from the one where the iteration began.
        self.check = functools.partial(refuse_fork, os.getpid())
        self._parts = 1 if threads <= ahead else -(-_SPARE * threads // ahead)
        self._readers = ThreadPoolExecutor(threads, "tpucache-read")
        self._hints = ThreadPoolExecutor(threads, "tpucache-hint")

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending():  # the interpreter has ended the threads, and taken apart the modules that would end them
            return
        self._hints.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def hint(self, work: Callable[[], None]) -> None:
        """Do something in another thread: a hint may block while a disk is busy or far away."""
        self._hints.submit(work)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread read a batch."""
        return self._readers.submit(work)

    def divide(self, work: Callable[[int, int], None], rows: int) -> None:
        """Do `work(start, stop)` for all rows of a batch, in this thread and in idle ones."""
        parts = min(self._parts, rows // LEAST_ROWS)
        if parts < 2:
            work(0, rows)
            return
        bounds = deque((rows * part // parts, rows * (part + 1) // parts) for part in range(parts))

        def work_at_parts() -> None:
            while True:
                try:
                    part = bounds.popleft()  # one operation, so that no two threads get the same
                except IndexError:
                    return
                work(*part)

        helpers = [self._readers.submit(work_at_parts) for _ in range(parts - 1)]
        try:
            work_at_parts()
        finally:
            bounds.clear()
            # This thread waits only for helpers at work, and these wait for nobody.
            running = [helper for helper in helpers if not helper.cancel()]
            errors = [error for helper in running if (error := helper.exception()) is not None]
        if errors:
            raise errors[0]
