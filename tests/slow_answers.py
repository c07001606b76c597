"""A function that answers late, and counts how many threads wait for it at a time."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any


class SlowAnswers:
    """Calls `function` after a pause; `most` is how many calls there were at the same time, and `calls` in all.

    The calls of threads wait, at most a minute, until there were `together` calls at the same time: however slowly a
    machine starts its threads, `most` is at least that if there can be as many. The test's own thread only pauses.
    """

    def __init__(self, function: Callable[..., Any], seconds: float = 0.005, *, together: int = 3) -> None:
        self.function, self.seconds, self.together = function, seconds, together
        self.most = self.calls = self._now = 0
        self._own, self._met = threading.get_ident(), threading.Event()
        self._lock = threading.Lock()

    def __get__(self, owner: object, _: type | None = None) -> Callable[..., Any]:
        """Be a method, too, where it replaces one."""
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *values: Any, **named: Any) -> Any:
        with self._lock:
            self._now, self.calls = self._now + 1, self.calls + 1
            self.most = max(self.most, self._now)
            if self.most >= self.together:
                self._met.set()
        try:
            time.sleep(self.seconds)
            if threading.get_ident() != self._own and not self._met.wait(60):
                self._met.set()  # so that a test fails after one minute, not after one for each call
            return self.function(*values, **named)
        finally:
            with self._lock:
                self._now -= 1
