"""Threads of a process: a lock that is safe after a fork, a pool, and values that are made once for all threads."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, ParamSpec, TypeVar

Asked = ParamSpec("Asked")
Made = TypeVar("Made")


class ThreadLock:
    """A lock for the threads of one process that is safe after a fork: `with lock: ...`.

    If a process is forked while a thread holds an ordinary lock, the child inherits a locked lock but not the thread
    that would unlock it, and waits forever. A ThreadLock has one ordinary lock for each process. The fork may happen in
    the middle of a `with` block, so the guarded data must be valid after each single statement.
    """

    def __init__(self) -> None:
        self._by_process: dict[int, threading.Lock] = {}

    def __enter__(self) -> None:
        self._by_process.setdefault(os.getpid(), threading.Lock()).acquire()

    def __exit__(self, *_: object) -> None:
        self._by_process[os.getpid()].release()


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor that makes do with fewer threads, or none, where the system allows no more.

    It is for functions that only read: if there is no thread at all, the caller runs the function, and a thread that
    can be started later may run it again.
    """

    def submit(self, function: Callable[Asked, Made], /, *values: Asked.args, **named: Asked.kwargs) -> Future[Made]:
        """Schedule a call of the function, and return its Future."""
        try:
            return super().submit(function, *values, **named)
        except RuntimeError:  # "can't start new thread", or the pool was shut down
            if self._threads or self._shutdown:
                raise
        future: Future[Made] = Future()
        try:
            future.set_result(function(*values, **named))
        except BaseException as error:  # noqa: BLE001  # it is raised by future.result(), as with a thread
            future.set_exception(error)
        return future

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


class _Value(Generic[Made]):
    """A value that may not be made yet. The lock is for the thread that makes it."""

    def __init__(self) -> None:
        self.lock: Final = ThreadLock()
        self.made: list[Made] = []


class ThreadCache(Generic[Asked, Made]):
    """A function that remembers its values like `functools.lru_cache`, and makes each of them in one thread.

    With `lru_cache`, threads that ask for a value at the same time all call the function. Here the others wait for the
    first. If it raises an error, the next thread calls the function again.
    """

    def __init__(self, function: Callable[Asked, Made], most: int | None) -> None:
        self._function = function
        self._lock = ThreadLock()
        self._values: Any = functools.lru_cache(most)(lambda *_, **__: _Value[Made]())
        functools.update_wrapper(self, function)

    def __call__(self, *values: Asked.args, **named: Asked.kwargs) -> Made:
        """Return the value for these arguments, which must be hashable."""
        with self._lock:
            value: _Value[Made] = self._values(*values, **named)
        if not value.made:
            with value.lock:
                if not value.made:
                    value.made.append(self._function(*values, **named))
        return value.made[0]

    def cache_clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._values.cache_clear()


def cached_for_threads(most: int | None) -> Callable[[Callable[Asked, Made]], ThreadCache[Asked, Made]]:
    """Return a decorator that makes a function a ThreadCache, which keeps `most` values; None: all."""

    def decorate(function: Callable[Asked, Made]) -> ThreadCache[Asked, Made]:
        return ThreadCache(function, most)

    return decorate
