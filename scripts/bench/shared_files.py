"""A cache of millions of records, and a simulated file system to read it from, where every request takes time.

The shards are names of one sparse file, so that the cache takes no more room than its tables.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar
from unittest import mock

import numpy as np

from tpucache.loading.threads import LEAST_ROWS, ReadingThreads
from tpucache.store.fields import Field
from tpucache.store.files import OpenFile, sha256_file
from tpucache.store.format import INDEX_DTYPE, INDEX_NAME, SAMPLES_NAME, Part, shard_name
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry, Statistics
from tpucache.store.samples import Strings, encode_columns

T = TypeVar("T")

CLASSES: Final = 1000
_PAGE: Final = 4096
_PAGE_HEADER: Final = 16
_PATH_BYTES: Final = 20
_TICK: Final = 1e-4  # seconds
_NEVER: Final = (math.inf, math.inf)


def write_huge(directory: Path, records: int, image: Field, shard_bytes: int = 1 << 27) -> None:
    """Write a cache of `records` records of zeros, all but its shards (`link_shards`)."""
    stride = -(-(image.nbytes + _PAGE_HEADER) // _PAGE) * _PAGE  # LMDB puts a record into pages of its own
    each = (shard_bytes - 2 * _PAGE) // stride
    rows, numbers = np.zeros(records, INDEX_DTYPE), np.arange(records)
    rows["shard"], rows["offset"] = numbers // each, numbers % each * stride + 2 * _PAGE + _PAGE_HEADER
    rows["length"], rows["crc32"] = image.nbytes, zlib.crc32(bytes(image.nbytes))
    np.save(directory / INDEX_NAME, rows)
    ends = np.arange(_PATH_BYTES, (records + 1) * _PATH_BYTES, _PATH_BYTES)
    columns: dict[str, np.ndarray[Any, Any] | Strings] = {
        "number": numbers.astype(np.uint64),
        "path": Strings(np.full(records * _PATH_BYTES, ord("a"), np.uint8), ends),
        "label": (numbers % CLASSES).astype(np.uint16),
    }
    (directory / SAMPLES_NAME).write_bytes(encode_columns(columns))
    shards = tuple(
        ShardEntry(
            shard_name(Part(0), block), shard_bytes, "0" * 64, 0, block, first, min(each, records - first), "0" * 64
        )
        for block, first in enumerate(range(0, records, each))
    )
    paths = [directory / name for name in (INDEX_NAME, SAMPLES_NAME)]
    tables = tuple(FileEntry(path.name, path.stat().st_size, sha256_file(path)) for path in paths)
    classes = tuple(f"class {label}" for label in range(CLASSES))
    empty = Statistics()
    Manifest(records, (0,), (image,), classes, shards, tables, (), empty, "0" * 64, {}, {}, {}).save(directory)


def link_shards(directory: Path, shards: Sequence[ShardEntry]) -> None:
    """Give one file of zeros the names of all shards."""
    first = directory / shards[0].name
    with first.open("wb") as file:
        file.truncate(shards[0].bytes)
    for entry in shards[1:]:
        os.link(first, directory / entry.name)


@dataclass(frozen=True)
class Sharing:
    """A host's share of a file system: seconds a request, bytes a second, and how many requests may be under way.

    Where it does not `read_ahead`, it ignores what the kernel is asked to read ahead.
    """

    latency: float
    bandwidth: float
    requests: int
    read_ahead: bool = True


class SharedFiles:
    """Counts how long reads of this process would take on a shared file system, without a wait: `now` moves instead.

    What is read, or read ahead, stays in the page cache.
    """

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        #: The time of the thread that reads, in seconds.
        self.now = 0.0
        #: Requests of data, and their bytes.
        self.requests, self.bytes = 0, 0
        self._begun: Counter[int] = Counter()  # requests that begin within each latency
        self._carried: Counter[int] = Counter()  # bytes within each tick
        self._names: dict[int, str] = {}  # of shards that were opened meanwhile, by their descriptors
        self._pages: dict[tuple[str, int], tuple[float, float]] = {}  # when a page was asked for, and when it is here
        self._preadv = os.preadv

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the calls by which a cache is read, also for loaders that are made meanwhile: they map nothing."""
        shared = self

        class SharedFile(OpenFile):
            def __init__(self, path: Path) -> None:
                shared.now = shared._request(shared.now, 0)
                super().__init__(path)
                shared._names[self.number] = path.name

        with contextlib.ExitStack() as stack:
            for name, replacement in (
                ("tpucache.system.preadv", self._read),
                ("os.preadv", self._read),  # which asks what is in the page cache
                ("os.posix_fadvise", self._read_ahead),
                ("tpucache.store.reader.OpenFile", SharedFile),
                ("tpucache.loading.reading.record_reader.native", lambda: None),  # its reads would not come by here
                ("tpucache.loading.reading.maps.can_populate", lambda: False),  # nor would what is mapped
            ):
                stack.enter_context(mock.patch(name, replacement))
            yield

    def _request(self, begin: float, length: int) -> float:
        """Send a request; return when its answer is here.

        Threads are played one after the other, so that a request may come later than others that begin after it: it
        takes what those before and after have left of the line.
        """
        latency, ticks = self._sharing.latency, self._sharing.bandwidth * _TICK
        turn = int(begin / latency)
        while self._begun[turn] >= self._sharing.requests:
            turn += 1
            begin = turn * latency
        self._begun[turn] += 1
        tick, left = int(begin / _TICK), length
        while left:
            part = min(left, int(ticks) - self._carried[tick])
            self._carried[tick] += part
            left -= part
            tick += left > 0
        self.requests += length > 0
        self.bytes += length
        end = max(begin, (tick + self._carried[tick] / ticks) * _TICK) if length else begin
        return end + latency

    def _here(self, number: int, offset: int, length: int) -> float | None:
        """Return when all pages of a part of a file are in memory, or None where some were not asked for by now."""
        name = self._names.get(number, str(number))
        found = [self._pages.get((name, page), _NEVER) for page in _pages(offset, length)]
        return None if any(asked > self.now for asked, _ in found) else max(here for _, here in found)

    def _get(self, number: int, offset: int, length: int) -> float:
        """Request a part of a file; return when it is in memory."""
        name, here = self._names.get(number, str(number)), self._request(self.now, length)
        for page in _pages(offset, length):
            self._pages[name, page] = min(self._pages.get((name, page), _NEVER), (self.now, here))
        return here

    def _read(self, number: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        length = sum(map(len, buffers))
        here = self._here(number, offset, length)
        if flags & os.RWF_NOWAIT and (here is None or here > self.now):
            raise BlockingIOError
        self.now = max(self.now, self._get(number, offset, length) if here is None else here)
        return self._preadv(number, buffers, offset)

    def _read_ahead(self, number: int, offset: int, length: int, advice: int) -> None:
        if self._sharing.read_ahead and self._here(number, offset, length) is None:
            self._get(number, offset, length)


class SimulatedThreads(ReadingThreads):
    """The threads of a loader, played one after the other in the time of `files`."""

    files: ClassVar[SharedFiles]
    #: When each batch is read.
    ready: ClassVar[list[float]]

    def __init__(self, threads: int, ahead: int) -> None:
        super().__init__(threads, ahead)
        self._free = [0.0] * threads
        self._hints_free = [0.0] * threads

    @classmethod
    @contextlib.contextmanager
    def in_place(cls, files: SharedFiles) -> Iterator[None]:
        """Replace the threads of loaders, whose reads `files` gets."""
        cls.files, cls.ready = files, []
        with mock.patch("tpucache.loading.loader.ReadingThreads", cls), files.in_place():
            yield

    def hint(self, work: Callable[[], None]) -> None:
        """Do what another thread would do meanwhile."""
        now, first = self.files.now, self._hints_free.index(min(self._hints_free))
        self.files.now = max(now, self._hints_free[first])
        work()
        self._hints_free[first], self.files.now = self.files.now, now

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Read a batch in the thread that is free first."""
        now, first = self.files.now, self._free.index(min(self._free))
        self._free[first] = self.files.now = max(now, self._free[first])
        future: Future[T] = Future()
        future.set_result(work())
        self._free[first] = max(self._free[first], self.files.now)
        self.ready.append(self.files.now)
        self.files.now = now
        return future

    def divide(self, work: Callable[[int, int], None], rows: int) -> None:
        """Do each part in the thread that is free first."""
        began, end = self.files.now, self.files.now
        parts = max(1, min(self._parts, rows // LEAST_ROWS))
        for part in range(parts):
            first = self._free.index(min(self._free))
            self.files.now = max(began, self._free[first])
            work(rows * part // parts, rows * (part + 1) // parts)
            self._free[first] = self.files.now
            end = max(end, self.files.now)
        self.files.now = end


def _pages(offset: int, length: int) -> range:
    return range(offset // _PAGE, (offset + length - 1) // _PAGE + 1)
