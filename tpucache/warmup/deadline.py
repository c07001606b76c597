"""Deadline: when a run has to stop."""

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

# What a time limit leaves for the samples that are being made and for the cleaning up after them.
_MARGIN_SHARE: Final = 0.1
_MARGIN_SECONDS: Final = 60.0
_LEAST_SECONDS: Final = 2.0


class _Late(BaseException):
    """Raised by the alarm: no Exception, so that nobody takes it for an error of a dataset."""


@dataclass(frozen=True)
class Deadline:
    """A moment in Unix time, which workers on other machines know, too; None: never."""

    at: float | None = None

    @classmethod
    def of(cls, time_limit: float | None) -> Deadline:
        """Return the deadline of a time limit in seconds from now, less a margin. Raises UsageError."""
        if time_limit is None:
            return cls()
        if not isinstance(time_limit, (int, float)) or not 0 <= time_limit < math.inf:
            raise UsageError(f"time_limit is a number of seconds from 0, not {time_limit!r}")
        return cls(time.time() + time_limit - min(_MARGIN_SECONDS, _MARGIN_SHARE * time_limit))

    @property
    def is_past(self) -> bool:
        """Whether it is time to stop."""
        return self.at is not None and time.time() >= self.at

    @contextlib.contextmanager
    def interrupting(self, activity: str) -> Iterator[None]:
        """Interrupt, in the main thread, what cannot check the time itself and writes nothing; it has two seconds.

        Raises UnfinishedError, which names what took so long.
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
                f"the time limit came while {activity}, and nothing was changed: run the same command again with a "
                "longer time limit"
            ) from None


NEVER: Final = Deadline()
