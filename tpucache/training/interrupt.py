"""Says when a run has to stop: on Ctrl-C, SIGTERM, or a time limit.

The run first finishes the current batch and saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from tpucache import process
from tpucache.errors import UnfinishedError

# The part of a time limit that is kept for saving and exiting.
_MARGIN_SHARE: Final = 0.1
_MARGIN_SECONDS: Final = 60.0
# Reasons to stop; if the processes have different reasons, the one with the largest number counts.
_LATE, _SIGNALLED = 1, 2


class Stopped(UnfinishedError):
    """Raised when a run has to stop. Nothing is half done then: the run is between two batches, or waits for data."""


class StopRequest:
    """Says whether a run has to stop, because of a signal or its time limit."""

    def __init__(self, time_limit: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Let the run stop `time_limit` seconds from now, less a margin in which it is saved.

        None is no limit.
        """
        self._clock = clock
        self._deadline = None
        if time_limit is not None:
            self._deadline = clock() + time_limit - min(_MARGIN_SECONDS, _MARGIN_SHARE * time_limit)
        self._is_signalled = False
        self._largest: Callable[[int], float] = lambda reason: reason
        self._is_alone = True
        self._agreed = 0

    def share(self, largest: Callable[[int], float], *, is_alone: bool = False) -> None:
        """From now on, let all processes stop together when one of them has a reason to stop.

        All processes must ask equally often whether they have to stop, unless there is only one process (`is_alone`).
        """
        self._largest, self._is_alone = largest, is_alone

    @property
    def is_due(self) -> bool:
        is_late = self._deadline is not None and self._clock() >= self._deadline
        own = _SIGNALLED if self._is_signalled else _LATE if is_late else 0
        self._agreed = int(self._largest(own))
        return bool(self._agreed)

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the run has to stop, at least 0; None without a time limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def check(self, where: str) -> None:
        """Raise Stopped when the run has to stop now; `where` is the run's position, such as "after step 8 of 9"."""
        if self.is_due:
            reason = "interrupted" if self._agreed == _SIGNALLED else "the time limit was reached"
            if self._agreed == _SIGNALLED:
                process.leave()
            raise Stopped(_text(reason, where))

    def to_error(self, stopped: Stopped) -> BaseException:
        """Return the error to raise from a stopped run: KeyboardInterrupt after a signal, otherwise UnfinishedError."""
        return KeyboardInterrupt(str(stopped)) if self._agreed == _SIGNALLED else UnfinishedError(str(stopped))

    def on_signals(self) -> AbstractContextManager[None]:
        """Return a context in which a first SIGINT or SIGTERM asks the run to stop, and a second signal interrupts it.

        A process that trains alone also stops while it waits for data, because nothing is half done then.
        """
        return process.stoppable(self._take_signal)

    def _take_signal(self) -> BaseException | None:
        """Return the error to raise for a signal, or None if the run stops later, at its next `check`."""
        self._is_signalled = True
        if process.is_waiting() and self._is_alone:
            self._agreed = _SIGNALLED
            return Stopped(_text("interrupted", "while waiting for data"))
        return None


def _text(reason: str, where: str) -> str:
    return f"{reason} {where}: run the same command with --resume to continue"
