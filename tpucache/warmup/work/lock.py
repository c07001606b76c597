"""The lock of a work folder: one run a cache, and how a worker learns that its run is gone."""

from __future__ import annotations

import fcntl
import io
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tpucache.errors import BuildError

_NAME: Final = "lock"
# A worker that was orphaned by a kill may be looking at the lock just now.
_PATIENCE_SECONDS: Final = 2.0


@contextmanager
def hold(work: Path) -> Iterator[str]:
    """Hold a work folder for this process alone, and yield the run's name for its workers.

    The kernel lets go of the lock in whatever way the process ends. Raises BuildError when another run holds it.
    """
    with (work / _NAME).open("a+") as file:
        waited = time.monotonic() + _PATIENCE_SECONDS
        while not _take(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > waited:
                raise BuildError(f"another warmup is writing {work.parent}: wait for it or stop it")
            time.sleep(0.05)
        run = uuid.uuid4().hex
        file.truncate(0)
        file.write(run)
        file.flush()
        yield run


def is_held(work: Path, run: str) -> bool:
    """Return whether a run still holds its work folder: not when it was killed, nor when another one continues it."""
    try:
        with io.FileIO(work / _NAME) as file:
            return file.readall() == run.encode() and not _take(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _take(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
