"""Reads samples ahead in threads while a worker encodes earlier ones, if the storage is slow to answer."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tpucache.warmup.sources.source import Item, Sample, Source, loads_in_threads

#: The most files that a worker reads at once, and the most bytes that it has read ahead.
MOST_FILES: Final = 32
MOST_BYTES: Final = 64 << 20
_UNKNOWN_BYTES: Final = MOST_BYTES // MOST_FILES
#: Storage that needs more time for a file is slow. A local disk needs less; a thread costs a tenth of this.
_LATE_SECONDS: Final = 0.002
_WEIGHT: Final = 0.2  # weight of the newest time in a moving mean
#: If the storage is not slow, only one of this many samples is timed.
_MEASURED_EVERY: Final = 16
_MOST_WAITING: Final = 0.05  # as a share of a task's time


class Lateness:
    """Moving means of how long a worker waits for one sample, and how long it works on one, in seconds.

    Concurrent threads may lose an update of a mean, which does no harm.
    """

    def __init__(self) -> None:
        self._wait: float | None = None
        self._work: float | None = None

    def waited(self, seconds: float) -> None:
        """Add the time that the storage took to answer for one sample."""
        self._wait = _mean(self._wait, seconds)

    def worked(self, seconds: float) -> None:
        """Add the time that the worker spent on one sample, from receiving it to asking for the next one."""
        self._work = _mean(self._work, seconds)

    @property
    def files(self) -> int:
        """How many files to read at once, so that the worker need not wait; 0 if the storage is not slow."""
        return min(MOST_FILES, 2 + math.ceil(self._samples_a_wait)) if self._samples_a_wait else 0

    @property
    def samples_a_task(self) -> int:
        """The least number of samples in a task, so that a task spends little of its time waiting for the first one."""
        return max(1, math.ceil(self._samples_a_wait / _MOST_WAITING))

    @property
    def _samples_a_wait(self) -> float:
        """How many samples a worker could process while it waits for the storage to deliver one.

        It is 0 if the mean wait is at most `_LATE_SECONDS`.
        """
        wait = self._wait or 0.0
        return wait / max(self._work or wait, 1e-4) if wait > _LATE_SECONDS else 0.0


@functools.lru_cache(maxsize=1)
def lateness_of(_work: Path) -> Lateness:
    """Return the measurements that this process has made of the storage. They begin anew with another work folder."""
    return Lateness()


class LoadAhead:
    """Returns the items of samples in order. Use it in a `with` block, which ends its threads."""

    def __init__(
        self, load: Callable[[Sample], Item], source: Source, samples: Iterable[Sample], lateness: Lateness
    ) -> None:
        """Prepare to load `samples`, in this order, with the function `load`. This does not read them yet.

        If the storage is slow, and the source allows loading in threads, several threads call the function. Otherwise
        the calling thread does.
        """
        self._load, self._lateness = load, lateness
        self._left = deque(samples if loads_in_threads(source) else ())
        self._ahead: deque[tuple[Sample, Future[Item]]] = deque()
        self._bytes = 0  # of the items read ahead
        self._pool: ThreadPoolExecutor | None = None
        self._returned: float | None = None
        self._is_at_once = False
        self._turns = itertools.cycle(range(_MEASURED_EVERY))

    def __enter__(self) -> LoadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def load(self, sample: Sample) -> Item:
        """Return a sample's item, or raise the error of loading it. Samples before it cannot be loaded any more."""
        if next(self._turns) and self._is_at_once:
            return self._load(sample)
        if self._returned is not None and not self._is_at_once:
            self._lateness.worked(time.monotonic() - self._returned)
        try:
            while self._ahead and self._ahead[0][0] is not sample:
                self._take().cancel()
            while not self._ahead and self._left and self._left[0] is not sample:
                self._left.popleft()
            self._read_ahead()
            if self._ahead:
                return self._take().result()
            if self._left:
                self._left.popleft()
            return self._timed(sample)
        finally:
            self._is_at_once = not self._ahead and not self._lateness.files
            self._returned = time.monotonic()

    def _read_ahead(self) -> None:
        """Start reading until as many files are being read as `Lateness.files` says."""
        files = self._lateness.files
        while self._left and len(self._ahead) < files:
            size = self._left[0].bytes or _UNKNOWN_BYTES
            if self._ahead and self._bytes + size > MOST_BYTES:
                break
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MOST_FILES, "tpucache-load")
            sample = self._left.popleft()
            self._ahead.append((sample, self._pool.submit(self._timed, sample)))
            self._bytes += size

    def _take(self) -> Future[Item]:
        sample, future = self._ahead.popleft()
        self._bytes -= sample.bytes or _UNKNOWN_BYTES
        return future

    def _timed(self, sample: Sample) -> Item:
        began, busy = time.monotonic(), time.thread_time()
        try:
            return self._load(sample)
        finally:
            self._lateness.waited(max(0.0, time.monotonic() - began - (time.thread_time() - busy)))


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _WEIGHT * (newest - before)
