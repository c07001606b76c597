"""A function that answers late, and counts how many threads wait for it at a time."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any


class SlowAnswers:
    """Calls `function` after a pause; `most` is how many calls there were at the same time, and `calls` in all."""

    def __init__(self, function: Callable[..., Any], seconds: float = 0.005) -> None:
        self.function, self.seconds = function, seconds
        self.most = self.calls = self._now = 0
        self._lock = threading.Lock()

    def __get__(self, owner: object, _: type | None = None) -> Callable[..., Any]:
        """Be a method, too, where it replaces one."""
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *values: Any, **named: Any) -> Any:
        with self._lock:
            self._now, self.calls = self._now + 1, self.calls + 1
            self.most = max(self.most, self._now)
        try:
            time.sleep(self.seconds)
            return self.function(*values, **named)
        finally:
            with self._lock:
                self._now -= 1
