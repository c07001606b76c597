"""What the threads of a process share: a lock that is safe after a fork, and values that are made once for all."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
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
