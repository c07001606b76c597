"""Threads that fetch the pieces of a cache from its URL, in the order in which they will be read.

A piece is about 4 MiB of whole records of a shard. Threads take the pieces that readers wait for first, then those that
loaders have announced. The first batch does not wait for whole pieces: its records are read alone. One process of a
machine fetches a piece: the one with its lock in the local copy. A piece is kept on the disk if there is room,
otherwise in memory until the announced records in it were read. Pieces on the disk stay: if all are needed equally
often, others in their place would be no better.

One lock guards what is asked for. Threads do not hold it while they read from the URL, write to the disk, or run a
loader's iterator.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from http.client import HTTPException
from typing import Final, NamedTuple

import numpy as np

from tpucache import process
from tpucache.errors import DamageError, StoreError
from tpucache.machine import available_memory
from tpucache.store.ahead import is_collecting, say_no_thread
from tpucache.store.index import Numbers, Rows
from tpucache.store.reader import NetworkUse
from tpucache.store.remote.http import ChangedError
from tpucache.store.remote.local import PIECE_BYTES, LocalCopy, Piece, Pieces
from tpucache.store.remote.retry import PATIENT_SECONDS, Tries
from tpucache.store.remote.url import Remote

_CHECKS: Final = 3  # times that bytes with a wrong checksum are read
_REFUSED: Final = (401, 403)  # statuses of a web server

_LEAST_REQUESTS: Final = 4
_MOST_ALONE: Final = 16  # requests for single records
_MOST_REQUESTS: Final = 32
#: The running requests together ask for this many times the bytes that the link transfers during one latency.
_BUSY_TIMES: Final = 10
_LONGEST_SECOND: Final = 3.0  # a longer time between two answers is a pause, and does not count as the best second
_WAITING_SHARE: Final = 0.1  # the fraction of the time that readers (summed over threads) may wait for the network

_MEMORY_SHARE: Final = 4  # pieces in memory may take a quarter of the free memory,
_MOST_MEMORY: Final = 2 << 30  # and at most this many bytes,
_LEAST_IN_MEMORY: Final = 32  # but at least this many pieces

_ALONE_TIMES: Final = 2  # the first records of a plan are read alone if their pieces are this many times larger,
_ALONE_SHARE: Final = 16  # as are those that no plan announced, while these are at most 1/16 of all bytes read
_FIRST_SECONDS: Final = 0.5  # how long a plan's pieces wait for that first read

_LAST_SECONDS: Final = 2.0  # how long the exiting interpreter waits for running requests
_POLL: Final = 0.02  # seconds after which a waiting reader checks what other processes have fetched

_log: Final = logging.getLogger("tpucache")

_living: Final[weakref.WeakSet[Fetcher]] = weakref.WeakSet()


class Link:
    """Reads pieces from a URL, and compares each record with its checksum. Threads may share a Link."""

    def __init__(self, store: Remote, pieces: Pieces, describe: Callable[[int], str], url: str) -> None:
        self._store, self._shards, self._describe, self.url = store, pieces.shards, describe, url
        self._buffers: list[bytearray] = []  # unused memory
        self.statistics = LinkStatistics()
        self.close = store.close

    def read(self, piece: Piece) -> memoryview:
        entry, wrong = self._shards[piece.shard], -1
        for _ in range(_CHECKS):
            data = self._read(entry.name, entry.bytes, piece)
            starts = piece.rows["offset"].astype(np.int64) - piece.start
            ends = starts + piece.rows["length"]
            sums = zip(starts.tolist(), ends.tolist(), piece.rows["crc32"].tolist(), strict=True)
            wrong = next((at for at, (start, end, crc) in enumerate(sums) if zlib.crc32(data[start:end]) != crc), -1)
            if wrong < 0:
                return data
        where = self._describe(int(piece.numbers[wrong]))
        raise DamageError(
            f"{self.url}/{entry.name} holds other bytes than the index says, in the record of {where}, {_CHECKS} times "
            "in a row: the cache was damaged or replaced at the URL. Verify the cache where it was built, and push it "
            "again"
        )

    def reuse(self, data: memoryview) -> None:
        """Keep the memory of `data` for later reads. The caller must not use `data` any more."""
        if len(self._buffers) < self.statistics.width and isinstance(data.obj, bytearray):
            self._buffers.append(data.obj)

    def _read(self, name: str, size: int, piece: Piece) -> memoryview:
        data, tries = self._buffer(piece.stop - piece.start), Tries(PATIENT_SECONDS)
        while True:
            began = time.monotonic()
            try:
                self._store.read_into(name, piece.start, data, size)
            except ChangedError as error:
                raise StoreError(f"{self.url}: {error}. The cache was probably rebuilt: open its URL again") from None
            except (OSError, EOFError, HTTPException) as error:
                self.statistics.failures += 1
                if not tries.wait(error):
                    raise self._failure(name, error, tries.failures) from None
            else:
                self.statistics.count(len(data), time.monotonic() - began)
                return data

    def _buffer(self, size: int) -> memoryview:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            buffer = self._buffers.pop()
            if size <= len(buffer) <= 2 * size:  # a record alone would hold the memory of a whole piece
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
    """Counts the bytes and requests of a Link, and measures its speed and how long readers wait."""

    def __init__(self) -> None:
        self.bytes = self.needed = self.requests = self.failures = 0
        self.waited = 0.0
        self.settled = (0.0, -math.inf)  # when the first second ended, in which all wait, and the waiting before
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
            self._busy += min(seconds, now - self._last)
            self._last = now
            self._marks.append((now, self.bytes))
            began, before = self._second
            if now - began >= 1.0:
                if now - began < _LONGEST_SECOND:
                    self._best = max(self._best, (self.bytes - before) / (now - began))
                    if self.settled[1] < 0:
                        self.settled = now, self.waited
                self._second = (now, self.bytes)

    @property
    def width(self) -> int:
        """How many requests should run in parallel to use the network fully, given its latency and rate."""
        rate = 0.0
        if len(self._marks) > 1:
            (first, before), (last, after) = self._marks[0], self._marks[-1]
            rate = (after - before) / max(1e-6, last - first)
        return int(min(_MOST_REQUESTS, max(_LEAST_REQUESTS, 2 + _BUSY_TIMES * rate * self.latency / PIECE_BYTES)))

    def use(self, kept: int, total: int) -> NetworkUse:
        with self._lock:
            rate = self.bytes / max(1e-6, self._busy)
            counts = self.bytes, self.needed, self.requests, self.failures
            return NetworkUse(*counts, rate, max(self._best, rate), self.waited, kept, total)


class Held(NamedTuple):
    """The bytes of a piece in memory, which begin at the byte `start` of its shard."""

    start: int
    data: memoryview


class _Fetch:
    """A piece that is asked for. `held` has its bytes if it is done and there was no room for it on the disk.

    `part` is given for records of the piece that are read alone, into memory.
    """

    def __init__(self, piece: int, part: Piece | None = None) -> None:
        self.piece, self.part = piece, part
        self.held: Held | None = None
        self.error: Exception | None = None
        self.is_done = False


class _Plan:
    """What one owner, such as a loader, will read: the pieces that are not fetched yet, in the order of reading.

    The owner's iterator gives the order a window at a time. `left` has, for each piece, how many records of the windows
    so far are still to be read.
    """

    def __init__(self, owner: object, windows: Iterator[Rows], pieces: Pieces) -> None:
        self._owner, self._windows, self._of = weakref.ref(owner), windows, pieces.of
        self.pieces: deque[int] = deque()
        self._first: int | None = None  # the number of the first record, -1 once it was asked for
        self.until = time.monotonic() + _FIRST_SECONDS  # when the plan no longer waits for that
        self.left: Counter[int] = Counter()
        self.is_over = self.is_being_read = False

    def is_of(self, owner: object) -> bool:
        return self._owner() is owner

    @property
    def is_orphaned(self) -> bool:
        return self._owner() is None

    @property
    def is_unread(self) -> bool:
        """Whether a thread should read the next window now."""
        return not (self.pieces or self.is_over or self.is_being_read)

    def read(self) -> Numbers | None:
        """Return the piece of each record of the next window; None after the last. It runs the owner's code."""
        rows = next(self._windows, None)
        if rows is None:
            return None
        numbers, pieces = self._of(rows)
        self._first = int(numbers[0]) if self._first is None and len(numbers) else self._first
        return pieces

    def begins_in(self, numbers: Numbers) -> bool:
        """Return whether the first record is among these, the first time that it is."""
        if self._first not in numbers:
            return False
        self._first, self.until = -1, 0.0
        return True

    def add(self, found: Numbers | None) -> None:
        """Append a window that `read` returned."""
        self.is_being_read, self.is_over = False, found is None
        if found is not None:
            unique, first, counts = np.unique(found, return_index=True, return_counts=True)
            self.pieces.extend(unique[np.argsort(first)].tolist())
            self.left.update(dict(zip(unique.tolist(), counts.tolist(), strict=True)))


class Fetcher:
    """Fetches pieces for one process. It starts its threads when the first piece is needed."""

    def __init__(self, link: Link, local: LocalCopy, pieces: Pieces) -> None:
        self.process = os.getpid()
        self._link, self.local, self._pieces = link, local, pieces
        self.statistics = link.statistics
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for readers that wait for pieces
        self._idle = threading.Condition(lock)  # for threads that wait for work
        self._asked: dict[int, _Fetch] = {}  # pieces that readers wait for and no thread fetches yet, in order
        self._begun: dict[int, _Fetch] = {}  # pieces that threads of this process fetch; it has their locks
        self._alone: deque[_Fetch] = deque()  # records that readers wait for and no thread reads yet
        self._alone_bytes = 0
        self._plans: list[_Plan] = []  # the newest first
        self._memory: OrderedDict[int, Held] = OrderedDict()
        room = min(_MOST_MEMORY, available_memory() // _MEMORY_SHARE)
        self._most_in_memory = max(_LEAST_IN_MEMORY, room // PIECE_BYTES)
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        _living.add(self)

    def expect(self, owner: object, windows: Iterator[Rows] | None) -> None:
        """Fetch records ahead, in the order in which `owner` will read them. Replaces the owner's earlier order.

        `windows` yields arrays of a few thousand index rows; the fetcher's threads may run it, one at a time. None
        means that nothing is to be fetched.
        """
        plan = None if windows is None else _Plan(owner, windows, self._pieces)
        if plan is not None:
            self._read_window(plan)  # the plan must have its first pieces before threads follow it
        with self._changed:
            self._plans = [each for each in self._plans if not (each.is_of(owner) or each.is_orphaned)]
            if plan is not None:
                self._plans.insert(0, plan)
                self._start(_LEAST_REQUESTS)
                self._wake()

    def get(self, rows: Rows, numbers: Numbers, pieces: Numbers) -> dict[int, Held]:
        """Wait until some records are on this machine. Returns those that are only in memory, by their numbers."""
        alone = self._read_alone(rows, numbers, pieces)
        left = pieces[[number not in alone for number in numbers.tolist()]] if alone else pieces
        wanted = np.array([*dict.fromkeys(left.tolist())], np.int64)  # in the order in which they are needed
        found: dict[int, Held] = {}
        own: dict[int, _Fetch] = {}
        while missing := [piece for piece in wanted[~self.local.has(wanted)].tolist() if piece not in found]:
            with self._changed:
                for piece in missing:
                    self._look_for(piece, own, found)
                if not found.keys() >= {*missing}:
                    self._start(_LEAST_REQUESTS)
                    self._wake()
                    self._wait()
        with self._changed:
            if own or alone or found or self._plans:
                self.statistics.needed += int(rows["length"].sum())
            self._note_read(pieces)
        places = zip(numbers.tolist(), pieces.tolist(), strict=True)
        return {number: found[piece] for number, piece in places if piece in found} | alone

    def _read_alone(self, rows: Rows, numbers: Numbers, pieces: Numbers) -> dict[int, Held]:
        """Read records without the rest of their pieces, where waiting for the pieces would take much longer."""
        with self._changed:
            begin = [plan.begins_in(numbers) for plan in self._plans]
            if begin and not any(begin):
                return {}
            missing = np.unique(pieces[~(self.local.has(pieces) | np.isin(pieces, [*self._memory]))]).tolist()
            own = {_Fetch(-1, each): each for piece in missing for each in self._pieces.parts(piece, numbers)}
            size = sum(part.stop - part.start for part in own.values())
            most = sum(each.stop - each.start for each in map(self._pieces.__getitem__, missing)) / _ALONE_TIMES
            if self._alone_bytes and not begin:
                most = min(most, self.statistics.bytes / _ALONE_SHARE - self._alone_bytes)
            if size >= most:
                return {}
            self._alone_bytes += size
            self._alone.extend(own)
            self._start(min(_MOST_ALONE, len(own)))
            self._idle.notify(len(own))
            while not all(fetch.is_done for fetch in own):
                self._wait()
        if error := next((fetch.error for fetch in own if fetch.error is not None), None):
            raise error
        return {number: fetch.held for fetch, part in own.items() for number in part.numbers.tolist() if fetch.held}

    def _wait(self) -> None:
        """Wait a moment for other threads. The caller holds the lock."""
        began = time.monotonic()
        self._changed.wait(_POLL)
        self.statistics.waited += time.monotonic() - began
        # Otherwise the process could not end while a server does not answer, and no thread fetches any more.
        if process.is_leaving() or self._is_closed:
            raise StoreError(f"{self._link.url}: waiting for records was given up, because reading was ended")

    def _look_for(self, piece: int, own: dict[int, _Fetch], found: dict[int, Held]) -> None:
        if piece in self._memory:
            found[piece] = self._memory[piece]
            return
        fetch = own.get(piece)
        if fetch is None or (fetch.is_done and fetch.held is None and fetch.error is None):
            fetch = self._begun.get(piece) or self._asked.setdefault(piece, _Fetch(piece))
            own[piece] = fetch
        elif fetch.error is not None:
            raise fetch.error
        elif fetch.held is not None:
            found[piece] = fetch.held

    def _note_read(self, pieces: Numbers) -> None:
        """Count records as read, in the newest plan that needs their pieces."""
        for piece, count in Counter(pieces.tolist()).items():
            if plan := next((plan for plan in self._plans if plan.left[piece] > 0), None):
                plan.left[piece] -= count
        if self.local.is_full:
            self._wake()  # pieces that were read leave the memory to others

    @property
    def is_busy(self) -> bool:
        """Whether pieces are being fetched to the disk while readers hardly wait for them."""
        began, before = self.statistics.settled
        keeps_up = self.statistics.waited - before <= _WAITING_SHARE * (time.monotonic() - began)
        return bool(self._begun) and not self.local.is_full and keeps_up

    def close(self, patience: float = 0.0) -> None:
        """End the threads after their current requests. Waits at most `patience` seconds until they have ended."""
        if self.process != os.getpid():
            return
        with self._changed:
            self._is_closed = True
            self._idle.notify_all()
        until = time.monotonic() + patience
        for thread in () if is_collecting() else self._threads:
            if thread is not threading.current_thread():  # a fetcher's own thread may hold the last reference to it
                thread.join(max(0.0, until - time.monotonic()))
        self._link.close()

    def _start(self, threads: int) -> None:
        while len(self._threads) < threads:
            thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name="tpucache-fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise StoreError(
                        f"{self._link.url}: records cannot be fetched: {error}. Raise `ulimit -u`"
                    ) from error
                say_no_thread()
                return
            self._threads.append(thread)

    def _wake(self) -> None:
        """Wake as many idle threads as can find work. Waking more would slow down the threads that work."""
        self._idle.notify(max(1, self.statistics.width - len(self._begun)))

    def work(self) -> bool:
        """Do one job, or wait a moment for one. Returns whether the thread should continue."""
        fetch, plan = None, None
        with self._changed:
            if self._is_closed:
                return False
            try:
                fetch = self._next()
            except Exception as error:  # noqa: BLE001  # the threads that wait for records raise it
                self._give_up(error)
            if fetch is None:
                if (plan := next((each for each in self._plans if each.is_unread), None)) is None:
                    self._idle.wait(1.0)  # then look whether the fetcher still exists
                else:
                    plan.is_being_read = True
        if plan is not None:
            self._read_window(plan)
        if fetch is not None:
            self._fulfil(fetch)
        return not self._is_closed

    def _next(self) -> _Fetch | None:
        """Begin to fetch the next piece: lock it for this process. Returns None if there is none, or no room."""
        if self._alone:
            return self._alone.popleft()
        if len(self._begun) >= self.statistics.width or any(time.monotonic() < plan.until for plan in self._plans):
            return None
        for fetch in [*self._asked.values()]:
            if self._begin(fetch):  # else another process fetches it
                return fetch
        self._plans = [plan for plan in self._plans if not plan.is_orphaned]
        for plan in self._plans:
            while plan.pieces:
                piece = plan.pieces[0]
                is_expected = piece in self._asked or piece in self._begun or piece in self._memory
                is_missing = not (is_expected or self.local.has(np.array([piece])).all())
                if is_missing and not (self.local.make_room(piece) or self._has_room_in_memory()):
                    break
                plan.pieces.popleft()
                if is_missing and self._begin(fetch := _Fetch(piece)):
                    return fetch
        return None

    def _begin(self, fetch: _Fetch) -> bool:
        """Lock a piece for this process. Returns False if another process has locked it, or it is on the disk."""
        piece = fetch.piece
        if not self.local.lock(piece):
            return False
        self._asked.pop(piece, None)
        if self.local.has(np.array([piece])).all():  # another process has just fetched it
            self.local.unlock(piece)
            fetch.is_done = True
            self._changed.notify_all()
            return False
        self._begun[piece] = fetch
        return True

    def _has_room_in_memory(self) -> bool:
        """Return whether there is memory for one more piece, after dropping one that no plan needs any more."""
        if len(self._memory) + len(self._begun) < self._most_in_memory:
            return True
        needed = {piece for plan in self._plans for piece, left in plan.left.items() if left > 0}
        unneeded = next((piece for piece in self._memory if piece not in needed), None)
        if unneeded is not None:
            del self._memory[unneeded]
        return unneeded is not None

    def _fulfil(self, fetch: _Fetch) -> None:
        """Fetch a piece to the disk, or to memory if the disk is full. An error is stored in `fetch`."""
        try:
            number, piece = fetch.piece, fetch.part or self._pieces[fetch.piece]
            data = self._link.read(piece)
            if not fetch.part and self.local.make_room(number) and self.local.write(number, piece, data):
                self._link.reuse(data)
            else:
                fetch.held = Held(piece.start, data)
        except Exception as error:  # noqa: BLE001  # the threads that wait for it raise it
            fetch.error = error
        with self._changed:
            fetch.is_done = True
            if fetch.part is None:
                self.local.unlock(fetch.piece)
                del self._begun[fetch.piece]
                if fetch.held is not None:
                    self._memory[fetch.piece] = fetch.held
                    while len(self._memory) > self._most_in_memory:
                        self._memory.popitem(last=False)
            self._changed.notify_all()
            self._start(self.statistics.width)

    def _read_window(self, plan: _Plan) -> None:
        """Read a plan's next window. If its owner's code raises an error, the plan ends."""
        try:
            window = plan.read()
        except Exception as error:  # noqa: BLE001  # the loader's code; damage to the cache is raised when it is read
            _log.warning("%s: from now on, records are fetched only when they are read: %s", self._link.url, error)
            window = None
        with self._changed:
            plan.add(window)
            self._wake()

    def _give_up(self, error: Exception) -> None:
        """Drop all plans, and let all pieces that readers wait for and that have not begun fail with `error`."""
        self._plans, asked, self._asked = [], [*self._asked.values(), *self._alone], {}
        self._alone.clear()
        for fetch in asked:
            fetch.error = error if isinstance(error, StoreError) else StoreError(f"{self._link.url}: {error}")
            fetch.is_done = True
        self._changed.notify_all()


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter exits: stopping them inside compiled code would abort the process."""
    for fetcher in list(_living):
        fetcher.close(0.0 if process.is_leaving() else _LAST_SECONDS)


def _serve(fetcher: weakref.ref[Fetcher]) -> None:
    """Do a fetcher's jobs until the fetcher is closed or no longer exists. Each of its threads runs this function."""
    while (one := fetcher()) is not None and one.work():
        del one
