"""Deadline: the time at which a run must stop."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tpucache.errors import UnfinishedError, UsageError

# The deadline is this much before the time limit, so that running tasks can finish and files can be cleaned up.
_MARGIN_SHARE: Final = 0.1
_MARGIN_SECONDS: Final = 60.0
_LEAST_SECONDS: Final = 2.0


class _Late(BaseException):
    """Raised at the deadline. Not an Exception, so that code that catches a user's errors does not catch it."""


@dataclass(frozen=True)
class Deadline:
    """The time when a run must stop: `at`, in seconds of Unix time, so that workers on other machines can use it.

    If `at` is None, the run never has to stop.
    """

    at: float | None = None

    @classmethod
    def of(cls, time_limit: float | None) -> Deadline:
        """Return the deadline for a time limit in seconds from now; None: no deadline."""
        if time_limit is None:
            return cls()
        if not isinstance(time_limit, (int, float)) or not 0 <= time_limit < math.inf:
            raise UsageError(f"time_limit must be a number of seconds from 0, not {time_limit!r}")
        return cls(time.time() + time_limit - min(_MARGIN_SECONDS, _MARGIN_SHARE * time_limit))

    @property
    def is_past(self) -> bool:
        return self.at is not None and time.time() >= self.at

    @contextlib.contextmanager
    def interrupting(self, activity: str) -> Iterator[None]:
        """Interrupt the body of the `with` statement at the deadline, but not in its first two seconds.

        The body must not write files.
        """
        if self.at is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            raise _Late

        handler = signal.signal(signal.SIGALRM, stop)
        timer = signal.setitimer(signal.ITIMER_REAL, max(_LEAST_SECONDS, self.at - time.time()))
        try:
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, *timer)
                signal.signal(signal.SIGALRM, handler)
        except _Late:
            raise UnfinishedError(
                f"the time limit came while {activity}, and nothing was built: run the same command again with a "
                "longer time limit"
            ) from None


NEVER: Final = Deadline()
