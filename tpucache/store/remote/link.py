"""Link: reads records of a cache from its URL, compares them with their checksums, and measures the speed."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from http.client import HTTPException
from typing import Final, Protocol

import numpy as np

from tpucache.errors import DamageError, StoreError
from tpucache.store.arriving import NetworkUse
from tpucache.store.remote.http import ChangedError
from tpucache.store.remote.pieces import PIECE_BYTES, Pieces, RecordRun
from tpucache.store.remote.url_folder import PATIENT_SECONDS, Tries

LEAST_REQUESTS: Final = 4
MOST_REQUESTS: Final = 16

_CHECKS: Final = 3  # times that bytes with a wrong checksum are read
_REFUSED: Final = (401, 403)  # statuses of a web server
#: The running requests together ask for this many times the bytes that the link transfers during one latency.
_BUSY_TIMES: Final = 20
_LONGEST_SECOND: Final = 3.0  # a longer time between two answers is a pause, and does not count as the best second
_WAITING_SHARE: Final = 0.5  # the fraction of the time that readers (summed over threads) may wait for the network


class Store(Protocol):
    """The storage from which a Link reads files, such as a web server or an object store. Threads may share a Store."""

    def read_into(self, name: str, start: int, target: memoryview, size: int) -> None:
        """Fill `target` with bytes of the file `name`, which has `size` bytes, from the byte `start` on.

        Does not try again after an error. Raises ChangedError if the file was replaced since it was first read,
        OSError, EOFError, HTTPException.
        """
        ...


class Link:
    """Reads runs of consecutive records from a URL. Threads may share a Link; each thread reads one run at a time."""

    def __init__(self, store: Store, pieces: Pieces, describe: Callable[[int], str], url: str) -> None:
        """Store the storage from which to read, and the cache's pieces.

        `describe` takes an index row number, and returns the sample and the variant of this record as text. `url` is
        the URL without secrets.
        """
        self._store, self._shards, self._describe, self.url = store, pieces.shards, describe, url
        self._buffers: list[bytearray] = []  # unused memory
        self.statistics = LinkStatistics()

    def read(self, run: RecordRun) -> memoryview:
        """Return the bytes of a run, after comparing each record in it with its checksum.

        A run with a wrong checksum is read up to three times. Raises DamageError if the checksum stays wrong,
        StoreError if the URL cannot be read.
        """
        name, size = self._shards[run.shard].name, self._shards[run.shard].bytes
        wrong = -1
        for _ in range(_CHECKS):
            data = self._read(name, size, run)
            starts = run.rows["offset"].astype(np.int64) - run.start
            ends = starts + run.rows["length"]
            sums = zip(starts.tolist(), ends.tolist(), run.rows["crc32"].tolist(), strict=True)
            wrong = next((at for at, (start, end, crc) in enumerate(sums) if zlib.crc32(data[start:end]) != crc), -1)
            if wrong < 0:
                return data
        where = self._describe(int(run.numbers[wrong]))
        raise DamageError(
            f"{self.url}/{name} holds other bytes than the index says, in the record of {where}, {_CHECKS} times in a "
            "row: the cache was damaged or replaced at the URL. Verify the cache where it was built, and push it again"
        )

    def reuse(self, data: memoryview) -> None:
        """Keep the memory of `data` for later reads. The caller must not use `data` any more."""
        if len(self._buffers) < self.statistics.width and isinstance(data.obj, bytearray):
            self._buffers.append(data.obj)

    def _read(self, name: str, size: int, run: RecordRun) -> memoryview:
        """Read a run from the file `name` of `size` bytes; try again after temporary errors. Raises StoreError."""
        data, tries = self._buffer(run.stop - run.start), Tries(PATIENT_SECONDS)
        while True:
            began = time.monotonic()
            try:
                self._store.read_into(name, run.start, data, size)
            except ChangedError as error:
                raise StoreError(f"{self.url}: {error}. The cache was probably rebuilt: open its URL again") from None
            except (OSError, EOFError, HTTPException) as error:
                self.statistics.failures += 1
                pause = tries.pause_after(error)
                if pause is None:
                    raise self._failure(name, error, tries.failures) from None
                time.sleep(pause)
            else:
                self.statistics.count(len(data), time.monotonic() - began)
                return data

    def _buffer(self, size: int) -> memoryview:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            buffer = self._buffers.pop()
            if len(buffer) >= size:
                return memoryview(buffer)[:size]
        return memoryview(bytearray(size))

    def _failure(self, name: str, error: Exception, tries: int) -> StoreError:
        reason = f"{self.url}/{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if getattr(error, "status", None) in _REFUSED:
            return StoreError(
                f"{reason}. The server refuses to send this file: check the URL, and whether it needs a password, then "
                "go on from the last checkpoint"
            )
        if isinstance(error, PermissionError):
            return StoreError(
                f"{reason}. The server refuses to send this file: check that the URL is right, and that the keys or "
                "the password allow reading this file and are still valid, then go on from the last checkpoint"
            )
        return StoreError(f"{reason}, after {tries} tries. Check the network and the URL")


class LinkStatistics:
    """Counts the bytes and requests of a Link, and measures its speed and how long readers wait for records.

    Threads may share a LinkStatistics.
    """

    def __init__(self) -> None:
        self.bytes = self.needed = self.requests = self.failures = 0
        self.began = 0.0  # when a reader first waited for a record
        self.waited = 0.0
        self.latency = 1.0  # the duration of the fastest request, in seconds
        self._busy = 0.0  # seconds during which at least one request ran
        self._best = 0.0  # the highest rate of any second
        self._second = (0.0, 0)  # when the last second began, and the bytes before it
        self._last = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=64)
        self._lock = threading.Lock()

    def count(self, size: int, seconds: float) -> None:
        """Count a request that just ended: it transferred `size` bytes in `seconds`."""
        with self._lock:
            now = time.monotonic()
            self.bytes += size
            self.requests += 1
            self.latency = min(self.latency, seconds)
            self._busy += min(seconds, now - self._last) if self._last else seconds
            self._last = now
            self._marks.append((now, self.bytes))
            began, before = self._second
            if now - began >= 1.0:
                if began and now - began < _LONGEST_SECOND:
                    self._best = max(self._best, (self.bytes - before) / (now - began))
                self._second = (now, self.bytes)

    @property
    def width(self) -> int:
        """How many requests should run in parallel to use the network fully, given its latency and rate."""
        rate = 0.0
        if len(self._marks) > 1:
            (first, before), (last, after) = self._marks[0], self._marks[-1]
            rate = (after - before) / max(1e-6, last - first)
        return int(min(MOST_REQUESTS, max(LEAST_REQUESTS, 2 + _BUSY_TIMES * rate * self.latency / PIECE_BYTES)))

    @property
    def keeps_up(self) -> bool:
        """Whether readers wait less than half of the time. True until the first records were read."""
        return not self.needed or self.waited <= _WAITING_SHARE * (time.monotonic() - self.began)

    def use(self, kept: int, total: int) -> NetworkUse:
        """Return the network traffic so far. `kept` of the cache's `total` bytes are on this machine's disk."""
        with self._lock:
            rate = self.bytes / max(1e-6, self._busy)
            best = max(self._best, rate)
            return NetworkUse(
                self.bytes, self.needed, self.requests, self.failures, rate, best, self.waited, kept, total
            )
