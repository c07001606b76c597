"""Fetcher: threads that read the pieces of a cache from its URL, in the order in which they will be needed.

A plan says which records will be read, far ahead. The pieces that they lie in are fetched in the order of their first
use. Each record is compared with its checksum before anybody is given it. Pieces for which there is room are kept on
the disk; of the others the next ones are kept in memory until all that the plan needs of them was read. Where one of
several hosts reads its part of each epoch, pieces on the disk give way to those that are needed sooner.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import random
import threading
import time
import weakref
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from http.client import HTTPException
from typing import Any, Final, Protocol

import numpy as np

from tpucache import signals
from tpucache.errors import DamageError, StoreError
from tpucache.machine import available_memory
from tpucache.store.index import Numbers, Rows
from tpucache.store.reader import NetworkUse
from tpucache.store.remote.http import ChangedError, HttpError
from tpucache.store.remote.local import LocalCopy
from tpucache.store.remote.pieces import PIECE_BYTES, Bools, Pieces, Run
from tpucache.store.remote.plan import Forecast, Plan

_LEAST_THREADS: Final = 4
_MOST_THREADS: Final = 16
_TRIES: Final = 6
_TRY_SECONDS: Final = 35.0  # after which a request is not repeated any more: nobody waits longer than a minute
_FIRST_PAUSE: Final = 0.2
_CHANCE: Final = random.Random()  # its own: the program's random numbers stay as its seed makes them
_REFUSED: Final = (401, 403)  # statuses of a web server
_LAST_SECONDS: Final = 2.0  # for what is being fetched when the interpreter ends
_FIRST_SECONDS: Final = 0.5  # after which a plan is followed although nobody has asked for its first records
_CHECKS: Final = 3  # times that bytes with a wrong checksum are asked for
_POLL: Final = 0.02  # seconds after which what another process fetches is looked at again
_RING_SHARE: Final = 4  # a quarter of the free memory at most for pieces that are not kept
_RING_BYTES: Final = 2 << 30
_LEAST_RING: Final = 8  # pieces
_MOST_USES: Final = 1_000_000  # of pieces that a forecast looks ahead
_COUNT_PAUSE: Final = 100  # times as long as counting what is kept takes, before it is counted again
_WAITING_SHARE: Final = 0.5  # of the time, all threads together, above which readers wait for the network
#: Requests that begin together also wait for their answers together: the link is to send so many times as long.
_BUSY_TIMES: Final = 20
_LONGEST_SECOND: Final = 3.0  # of what counts as a second of reading without a pause
#: Of a piece, the share that has to be needed at once for the whole piece to be read instead of these records.
_WHOLE_SHARE: Final = 4

_log: Final = logging.getLogger("tpucache")

_living: Final[weakref.WeakSet[Fetcher]] = weakref.WeakSet()


class Store(Protocol):
    """What files are read from: a web server or an object store. Threads may share one."""

    def read_into(self, name: str, start: int, target: memoryview, size: int) -> None:
        """Read bytes of a file of `size` bytes from `start` into all of `target`, once.

        Raises ChangedError where it is not the version that was read before, OSError, EOFError, HTTPException.
        """
        ...


class Flight:
    """A piece, or a part of one, that is asked for: `data` once it is here and not on the disk, or the error.

    One that is urgent, a few records that somebody waits for, is fetched beside the piece that they are of.
    """

    def __init__(self, run: Run, piece: int, *, is_urgent: bool = False) -> None:
        self.run, self.piece, self.is_urgent = run, piece, is_urgent
        self.data: memoryview | None = None
        self.error: Exception | None = None
        self.has_begun = self.is_done = False

    @functools.cached_property
    def numbers(self) -> frozenset[int]:
        """The numbers of its records."""
        return frozenset(self.run.numbers.tolist())

    def narrow(self, run: Run) -> None:
        """Fetch less: what of its run has not come onto the disk since it was asked for."""
        self.run = run
        self.__dict__.pop("numbers", None)

    def bytes(self, start: int, stop: int) -> memoryview:
        """Return some of its bytes, counted from its start, of one that is not on the disk."""
        return memoryview(b"") if self.data is None else self.data[start:stop]


class Fetcher:
    """Fetches pieces for one process. It starts its threads when the first piece is asked for."""

    def __init__(
        self, store: Store, local: LocalCopy, pieces: Pieces, describe: Callable[[int], str], url: str
    ) -> None:
        """Take what is read from and where it is kept; `describe` says which sample a record of the index is of."""
        self.process = os.getpid()
        self._store, self.local, self._pieces, self._describe, self._url = store, local, pieces, describe, url
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for those who wait for records
        self._idle = threading.Condition(lock)  # for threads that wait for work
        self._urgent: deque[Flight] = deque()  # few records that somebody waits for
        self._wanted: deque[int] = deque()  # pieces that somebody waits for, or will
        self._elsewhere: deque[tuple[int, Run]] = deque()  # what of pieces that another process fetches is needed
        self._plans: list[tuple[weakref.ref[Any], Plan]] = []  # the newest first
        self._flights: dict[int, Flight] = {}  # of each piece one, but for urgent ones
        self._coming: dict[int, list[Flight]] = {}  # urgent ones onto the disk, of each piece
        self._ring: OrderedDict[int, list[Flight]] = OrderedDict()  # pieces in memory, those read longest ago first
        self._ring_most = max(_LEAST_RING, min(_RING_BYTES, available_memory() // _RING_SHARE) // PIECE_BYTES)
        self._buffers: list[bytearray] = []  # that nobody uses now
        self._threads: list[threading.Thread] = []
        self._pinned: Counter[int] = Counter()  # reads of pieces that are under way
        self._working = 0  # threads at work at pieces
        self._is_closed = False
        self._kept = (-1.0, 0, 0)  # when the bytes on the disk are to be counted again, of which bands, how many
        self._first = set[Plan | None]()  # those whose first records are about to be asked for
        self._began = 0.0  # when somebody first waited
        self._settled = set[int]()  # shards of which all is here, and stays
        self.statistics = Statistics()
        _living.add(self)

    def expect(
        self, owner: object, windows: Iterator[Rows], further: Callable[[], Iterator[Rows]] | None = None
    ) -> None:
        """Fetch what these windows need, in their order, instead of what the same owner expected before.

        `further` gives them once more, and those of later epochs: where not all can be kept, it decides what is.
        """
        plan = Plan(windows, self._pieces, further)
        with self._changed:
            self._plans = [(weakref.ref(owner), plan), *(one for one in self._plans if one[0]() not in (None, owner))]
            self._start(_LEAST_THREADS)
            self._wake()

    @contextlib.contextmanager
    def pinned(self, pieces: Numbers) -> Iterator[None]:
        """Keep pieces that are on the disk there, until they were read."""
        unique = np.unique(pieces).tolist()
        with self._changed:
            self._pinned.update(unique)
        try:
            yield
        finally:
            with self._changed:
                self._pinned.subtract(unique)

    def get(self, numbers: Numbers, pieces: Numbers, rows: Rows) -> dict[int, Flight]:
        """Wait until records are here, given by their numbers, pinned pieces and whole index rows.

        Returns those that are not on the disk, by their place among the numbers. Raises DamageError, StoreError.
        """
        found = self._wait(numbers, pieces, rows)
        with self._changed:
            self._note_read(pieces)
            self.statistics.needed += int(rows["length"].sum())
        return found

    def _wait(self, numbers: Numbers, pieces: Numbers, rows: Rows, first_of: Plan | None = None) -> dict[int, Flight]:
        """Wait until records are here; those that are the first of a plan are read before all else."""
        found: dict[int, Flight] = {}
        local = self.local
        began = time.monotonic()
        self._began = self._began or began
        own: list[Flight] = []
        is_waiting = False
        while True:
            missing = np.flatnonzero(~local.has(numbers))
            missing = missing[[at not in found for at in missing.tolist()]] if found else missing
            if not len(missing):
                break
            with self._changed:
                self._collect(found, own, numbers, pieces, missing)
                missing = missing[~local.has(numbers[missing])]  # what has come meanwhile is not asked for again
                missing = missing[[at not in found for at in missing.tolist()]]
                if len(missing):
                    self._first.discard(first_of)  # from here on they are the next in line, and others may follow
                    self._ask(numbers, pieces, rows, missing, own, is_first=first_of is not None)
                    self._changed.wait(_POLL)
                    is_waiting = True
            if signals.is_leaving():  # whoever ends this reader would wait as long as a server that stands still
                raise StoreError(f"{self._url}: nobody waits for it any more, because the command is interrupted")
        if is_waiting:
            with self._changed:
                self.statistics.waited += time.monotonic() - began
        return found

    @property
    def is_at_start(self) -> bool:
        """Whether nobody has asked for the first records of what is expected yet."""
        return bool(self._plans) and any(not plan.has_begun for _, plan in self._plans)

    @property
    def follows_a_plan(self) -> bool:
        """Whether somebody who still exists has said what will be read."""
        return any(owner() is not None for owner, _ in list(self._plans))

    def fetch_first(self, numbers: Numbers, pieces: Numbers, rows: Rows) -> None:
        """Fetch records before all else, each by itself, if they are the first of what is expected.

        Raises DamageError, StoreError.
        """
        with self._changed:
            plan = next((plan for _, plan in self._plans if not plan.has_begun), None)
            try:
                if plan is None or not plan.begins_with(rows):
                    return
            except Exception as error:  # noqa: BLE001  # whoever waits for something raises it
                self._give_up(error)
                return
            plan.has_begun = True
            self._first.add(plan)
        try:
            # What the disk has no room for would not be here any more when it is read.
            if all(map(self.local.make_room, dict.fromkeys(pieces.tolist()))):
                self._wait(numbers, pieces, rows, first_of=plan)
        finally:
            with self._changed:
                self._first.discard(plan)
                self._wake()

    @property
    def is_busy(self) -> bool:
        """Whether pieces come onto the disk, and readers have not waited for them for much of the time.

        Before the first records were read it is: the first batch is to come soon.
        """
        if not self._working or self.local.is_full:
            return False
        return not self.statistics.needed or self.statistics.waited <= _WAITING_SHARE * (time.monotonic() - self._began)

    def settle(self, shard: int) -> bool:
        """Return whether all records of a shard are here, and none of them will be given up from now on."""
        if not self.local.has_room_for_all:
            return False
        numbers = self._pieces.cache.rows_of(self._pieces.shards[shard])
        with self._changed:
            if self.local.has(numbers).all():
                self._settled.add(shard)
            return shard in self._settled

    def use(self, bands: int) -> NetworkUse:
        """Return what was read so far, and what of the first bands is on the disk, as it was a moment ago."""
        total = sum(entry.bytes for entry in self._pieces.shards if entry.band < bands)
        records = bands * self._pieces.cache.rows_a_band
        until, counted, kept = self._kept
        if (now := time.monotonic()) >= until or counted != bands:
            kept = int(total * self.local.count(records) / max(1, records))
            taken = time.monotonic() - now
            self._kept = now + _COUNT_PAUSE * taken, bands, kept
        return self.statistics.use(kept, total)

    def close(self, patience: float = 0.0) -> None:
        """End the threads; what is being fetched is finished first, for which it waits so many seconds at most."""
        if self.process != os.getpid():
            return
        with self._changed:
            self._is_closed = True
            self._idle.notify_all()
        until = time.monotonic() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():  # it may be the last that refers to this
                thread.join(max(0.0, until - time.monotonic()))

    def _collect(
        self, found: dict[int, Flight], own: list[Flight], numbers: Numbers, pieces: Numbers, missing: Numbers
    ) -> None:
        """Enter what has come since into `found`. Raises the error of what could not be fetched."""
        for at in missing.tolist():
            for flight in self._ring.get(int(pieces[at]), ()):
                if int(numbers[at]) in flight.numbers:
                    found[at] = flight
        for flight in [each for each in own if each.is_done]:
            own.remove(flight)
            if flight.error is not None:
                raise flight.error
            if flight.data is not None:
                places = dict(zip(flight.run.numbers.tolist(), range(len(flight.run.numbers)), strict=True))
                found.update({at: flight for at in missing.tolist() if int(numbers[at]) in places})

    def _ask(
        self, numbers: Numbers, pieces: Numbers, rows: Rows, missing: Numbers, own: list[Flight], *, is_first: bool
    ) -> None:
        """Ask for what is missing and was not asked for: single records where few are needed at once, or pieces.

        Single records come soon, but whole pieces faster. So the records of a plan's first batch are read by
        themselves, and few that no plan names.
        """
        asked = {flight.piece for flight in own}
        wanted: list[int] = []
        for piece in dict.fromkeys(pieces[missing].tolist()):  # in the order in which they are needed
            if piece in asked:
                continue
            part = missing[pieces[missing] == piece]
            if piece in self._coming and self._are_here_soon(numbers[part], piece).all():
                own.extend(self._coming[piece])
                continue
            flying = self._flights.get(piece)
            # What has not begun comes after all that is first: waiting for it would have no end.
            if flying is None or (is_first and not flying.has_begun):
                is_planned = any(plan.needed.get(piece) for _, plan in self._plans)
                planned = (run for _, plan in self._plans if (run := plan.run_of(piece, numbers[part])) is not None)
                few, run = int(rows["length"][part].sum()), next(planned, self._pieces.run(piece))
                if is_first or (few * _WHOLE_SHARE < run.stop - run.start and not is_planned):
                    flights = [Flight(each, piece, is_urgent=True) for each in self._pieces.runs(rows[part])]
                    self._urgent.extend(flights)
                    own.extend(flights)
                    if self.local.make_room(piece):
                        self._coming.setdefault(piece, []).extend(flights)
                        if not is_planned:
                            self._wanted.append(piece)
                    continue
                self._flights[piece] = Flight(self._lacking(run, piece), piece)
                wanted.append(piece)
            own.append(self._flights[piece])
        self._wanted.extendleft(reversed(wanted))
        self._start(_MOST_THREADS if self._urgent else _LEAST_THREADS)
        self._wake()

    def _note_read(self, pieces: Numbers) -> None:
        """Count records as read: what a plan needs no more makes room in memory."""
        unique, counts = np.unique(pieces, return_counts=True)
        for piece, count in zip(unique.tolist(), counts.tolist(), strict=True):
            for _, plan in self._plans:
                if plan.needed.get(piece):
                    plan.needed[piece] -= count
                    break
        if self.local.is_full:
            self._wake()

    def _wake(self) -> None:
        """Wake as many threads as may begin something: each that is woken in vain takes time from those that work."""
        self._idle.notify(len(self._urgent) + max(1, self.statistics.width - self._working))

    def _start(self, threads: int) -> None:
        """Have at least so many threads."""
        while len(self._threads) < threads:
            thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name="tpucache-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next_flight(self) -> Flight | None:
        """Return what is to be fetched next; None where there is nothing now."""
        if self._urgent:
            return self._urgent.popleft()
        earliest = time.monotonic() - _FIRST_SECONDS
        is_early = any(not plan.has_begun and plan.made > earliest for _, plan in self._plans)
        if self._first or is_early or self._working >= self.statistics.width:
            return None  # what a plan needs first comes before all else
        for _ in range(len(self._elsewhere)):
            if (flight := self._take(*self._elsewhere.popleft())) is not None:
                return flight
        for _ in range(len(self._wanted)):
            piece = self._wanted.popleft()
            if (flight := self._take(piece, self._pieces.run(piece))) is not None:
                return flight
        self._plans = [one for one in self._plans if one[0]() is not None]
        for _, plan in self._plans:
            while (needed := plan.peek()) is not None:
                piece, run = needed
                flying = self._flights.get(piece)
                if flying is not None and not flying.numbers >= {*self._lacking(run, piece).numbers.tolist()}:
                    break  # another part of it comes first
                if not (self.local.make_room(piece) or self._replace(plan, piece) or self._ring_has_room()):
                    break
                plan.pop()
                if flying is None and (flight := self._take(piece, run)) is not None:
                    return flight
        return None

    def _take(self, piece: int, run: Run) -> Flight | None:
        """Return what is to be fetched of a piece, with its lock; None if it is here, or another process fetches it."""
        flight = self._flights.get(piece)
        is_here = any(each.numbers >= {*run.numbers.tolist()} for each in self._ring.get(piece, ()))
        if not is_here and not self.local.lock(piece):
            self._elsewhere.append((piece, run))
            return None
        # With the lock: no other process fetches it now.
        if not is_here and self._are_here_soon(run.numbers, piece).all():
            self.local.unlock(piece)
            is_here = True
        if is_here:
            if flight is not None:
                self._land(flight)
            return None
        if flight is None:
            flight = self._flights[piece] = Flight(self._lacking(run, piece), piece)
        else:  # another process may have fetched a part before this one had the lock
            flight.narrow(self._lacking(flight.run, piece))
        return flight

    def _are_here_soon(self, numbers: Numbers, piece: int) -> Bools:
        """Return which records of a piece are on the disk, or come there before it, as somebody waits: bool (n,)."""
        found = self.local.has(numbers)
        for flight in self._coming.get(piece, ()):
            found |= np.isin(numbers, flight.run.numbers)
        return found

    def _lacking(self, run: Run, piece: int) -> Run:
        """Return what of a run of a piece is not on the disk, nor soon: from the first such record to the last."""
        at = np.flatnonzero(~self._are_here_soon(run.numbers, piece))
        if len(at) in (0, len(run.numbers)):
            return run
        first, last = run.rows[at[0]], run.rows[at[-1]]
        return self._pieces.part(piece, int(first["offset"]), int(last["offset"]) + int(last["length"]))

    def _replace(self, plan: Plan, piece: int) -> bool:
        """Keep a piece instead of others, if this plan needs it sooner and nobody needs those now; return whether."""
        if plan.forecast is None:
            return False

        def is_free(other: int) -> bool:
            is_needed = any(each.needed.get(other, 0) > 0 for _, each in self._plans)
            is_used = is_needed or self._pinned.get(other) or other in self._flights
            return not (is_used or self._pieces.shard_of(other) in self._settled)

        later = plan.forecast.later_than(piece, self.local.kept)
        return self.local.replace(filter(is_free, later), piece)

    def _foresee(self) -> None:
        """Make the newest plan's forecast, once the disk is full and if no other process keeps pieces on it."""
        with self._changed:
            plan = self._plans[0][1] if self._plans and not self._is_closed else None
            if plan is None or plan.further is None or not (self.local.is_full and self.local.is_alone()):
                return
            further, plan.further = plan.further, None
        with contextlib.suppress(DamageError):  # whoever reads these records raises it
            forecast = Forecast(further(), self._pieces, _MOST_USES)
            with self._changed:
                plan.take(forecast)

    def _ring_has_room(self) -> bool:
        if len(self._ring) + len(self._flights) < self._ring_most:
            return True
        for piece in self._ring:
            if not any(plan.needed.get(piece, 0) > 0 for _, plan in self._plans):
                del self._ring[piece]
                return True
        return False

    def _work(self) -> bool:
        """Fetch one piece, or wait a moment for one; return whether to go on."""
        self._foresee()
        with self._changed:
            flight = None
            try:
                flight = None if self._is_closed else self._next_flight()
            except Exception as error:  # noqa: BLE001  # whoever waits for something raises it
                self._give_up(error)
            if flight is None:
                self._idle.wait(_FIRST_SECONDS if self.is_at_start else 1.0)
                return not self._is_closed
            flight.has_begun = True
            self._working += not flight.is_urgent
        try:
            self._fetch(flight)
        except Exception as error:  # noqa: BLE001  # whoever waits for it raises it
            flight.error = error
        with self._changed:
            self._working -= not flight.is_urgent
            if not flight.is_urgent:
                self.local.unlock(flight.piece)
                if flight.data is not None:
                    self._ring.setdefault(flight.piece, []).append(flight)
                    while len(self._ring) > self._ring_most:
                        self._ring.popitem(last=False)
            self._land(flight)
            self._start(self.statistics.width)
        return True

    def _give_up(self, error: Exception) -> None:
        """Follow no plan any more, and tell those who wait for what nobody has begun to fetch why."""
        self._plans.clear()
        self._wanted.clear()
        self._elsewhere.clear()
        for flight in [each for each in self._flights.values() if not each.has_begun]:
            flight.error = error if isinstance(error, StoreError) else StoreError(f"{self._url}: {error}")
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Tell those who wait for a flight that it is done."""
        flight.is_done = True
        if not flight.is_urgent:
            self._flights.pop(flight.piece, None)
        elif flight in (coming := self._coming.get(flight.piece, [])):
            coming.remove(flight)
            if not coming:
                del self._coming[flight.piece]
        self._changed.notify_all()

    def _fetch(self, flight: Flight) -> None:
        """Fetch a piece or some records of one, onto the disk if there is room for the piece. Raises what is wrong."""
        if self.local.make_room(flight.piece):
            for run in self._runs_of(flight):
                data = self._read_checked(run)
                if not self.local.write(run, data):
                    break
                if not flight.is_urgent and len(self._buffers) < len(self._threads) and isinstance(data.obj, bytearray):
                    self._buffers.append(data.obj)
            else:
                return
        flight.data = self._read_checked(flight.run)

    def _runs_of(self, flight: Flight) -> list[Run]:
        """Return what is still to be read of a flight: its run, without longer parts that are here, or soon are."""
        run = flight.run
        if flight.is_urgent:
            return [run]
        with self._changed:
            at = np.flatnonzero(~self._are_here_soon(run.numbers, flight.piece))
        return [*self._pieces.runs(run.rows[at])]

    def _buffer(self, size: int) -> memoryview:
        """Return memory for so many bytes: one that was used before, as the system takes time to give new pages."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            buffer = self._buffers.pop()
            if len(buffer) >= size:
                return memoryview(buffer)[:size]
        return memoryview(bytearray(size))

    def _read_checked(self, run: Run) -> memoryview:
        """Return the bytes of a run, each record compared with its checksum. Raises DamageError, StoreError."""
        shard = self._pieces.shards[run.shard]
        name, size = shard.name, shard.bytes
        wrong = -1
        for _ in range(_CHECKS):
            data = self._read(name, size, run)
            starts = (run.rows["offset"].astype(np.int64) - run.start).tolist()
            ends = (np.array(starts) + run.rows["length"]).tolist()
            sums = zip(starts, ends, run.rows["crc32"].tolist(), strict=True)
            wrong = next((at for at, (start, end, crc) in enumerate(sums) if zlib.crc32(data[start:end]) != crc), -1)
            if wrong < 0:
                return data
        where = self._describe(int(run.numbers[wrong]))
        raise DamageError(
            f"{self._url}/{name} holds other bytes than the index says, in the record of {where}, {_CHECKS} times in a "
            "row: the cache was damaged or replaced at the URL. Verify it where it was built, and push it again"
        )

    def _read(self, name: str, size: int, run: Run) -> memoryview:
        """Return the bytes of a run, asked for again at growing intervals after an error that may pass."""
        data = self._buffer(run.stop - run.start)
        began = time.monotonic()
        for tried in range(1, _TRIES + 1):
            start = time.monotonic()
            try:
                self._store.read_into(name, run.start, data, size)
            except ChangedError as error:
                raise StoreError(
                    f"{self._url}: {error}. A cache that was built anew is another one: open its URL again"
                ) from None
            except (OSError, EOFError, HTTPException) as error:
                self.statistics.failures += 1
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                is_final = isinstance(error, FileNotFoundError) or (isinstance(error, HttpError) and error.is_final)
                if isinstance(error, PermissionError) or getattr(error, "status", None) in _REFUSED:
                    raise StoreError(
                        f"{self._url}/{name}: {reason}. The server refuses to give it: check that the URL and the keys "
                        "or the password may read it, and are still valid, and go on from the last checkpoint"
                    ) from None
                if is_final or tried == _TRIES or time.monotonic() - began > _TRY_SECONDS:
                    raise StoreError(
                        f"{self._url}/{name}: {reason}, after {tried} tries. Check the network and the URL"
                    ) from None
                time.sleep(_FIRST_PAUSE * 2 ** (tried - 1) * _CHANCE.uniform(0.5, 1.5))
            else:
                self.statistics.count(len(data), time.monotonic() - start)
                return data
        raise StoreError(f"{self._url}/{name} cannot be read")


class Statistics:
    """Counts what is read from a URL, and how fast it comes."""

    def __init__(self) -> None:
        self.bytes = self.needed = self.requests = self.failures = 0
        self.waited = 0.0
        self.latency = 1.0  # the shortest time of an answer, in seconds
        self._busy = 0.0  # seconds in which anything was read
        self._best = 0.0
        self._second = (0.0, 0)  # when the last second began, and the bytes before it
        self._last = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=64)
        self._lock = threading.Lock()

    def count(self, size: int, seconds: float) -> None:
        """Note an answer that took so many seconds until now."""
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
        """How many requests for pieces fill the link, by its latency and its rate."""
        rate = 0.0
        if len(self._marks) > 1:
            (first, before), (last, after) = self._marks[0], self._marks[-1]
            rate = (after - before) / max(1e-6, last - first)
        return int(min(_MOST_THREADS, max(_LEAST_THREADS, 2 + _BUSY_TIMES * rate * self.latency / PIECE_BYTES)))

    def use(self, kept: int, total: int) -> NetworkUse:
        """Return the figures so far, with so many of a cache's bytes kept."""
        with self._lock:
            rate = self.bytes / max(1e-6, self._busy)
            best = max(self._best, rate)
            return NetworkUse(
                self.bytes, self.needed, self.requests, self.failures, rate, best, self.waited, kept, total
            )


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter does: it would stop them inside of compiled code, which aborts."""
    for fetcher in list(_living):
        fetcher.close(0.0 if signals.is_leaving() else _LAST_SECONDS)


def _serve(fetcher: weakref.ref[Fetcher]) -> None:
    """Work for a fetcher for as long as it exists."""
    while (one := fetcher()) is not None and one._work():
        del one
