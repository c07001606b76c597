"""How often a request is tried again, and the pauses between the attempts."""

from __future__ import annotations

import errno
import math
import random
import time
from collections.abc import Callable
from http.client import InvalidURL
from typing import Final

_RETRIES: Final = 6
_FIRST_PAUSE: Final = 0.5
PATIENT_SECONDS: Final = 40.0  # together with the last attempt's timeout, a reader waits at most a minute
_CHANCE: Final = random.Random()  # a separate generator, so that the program's own random numbers do not change
# Other statuses from 400 to 499 are final: trying again gives the same answer. 408: timeout, 429: too many requests.
_PASSING: Final = (408, 429)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_FINAL: Final = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ValueError,
    InvalidURL,
)


class Tries:
    """The attempts of one request: at most seven. The pauses begin with half a second and double.

    They vary randomly, so that threads that failed together do not try again together.
    """

    def __init__(self, patience: float = math.inf) -> None:
        """Start the clock: no attempt begins later than `patience` seconds from now."""
        self.failures = 0
        self._until = time.monotonic() + patience

    def wait(self, error: Exception, on_pause: Callable[[float], None] = lambda pause: None) -> bool:
        """Count a failed attempt, and wait before the next one. Returns False if there is none."""
        self.failures += 1
        pause = _FIRST_PAUSE * 2 ** (self.failures - 1) * _CHANCE.uniform(0.5, 1.5)
        status = getattr(error, "status", None)
        is_final = getattr(error, "is_final", False) or isinstance(error, _FINAL)
        is_final |= isinstance(status, int) and 400 <= status < 500 and status not in _PASSING
        is_final |= isinstance(error, OSError) and error.errno in _FULL
        if is_final or self.failures > _RETRIES or time.monotonic() + pause > self._until:
            return False
        on_pause(pause)
        time.sleep(pause)
        return True
