"""Fetcher: threads that fetch the records of a cache from its URL, in the order in which they will be needed.

A piece is about 8 MiB of a shard (`pieces.py`). A plan has the pieces that a loader will need (`plan.py`). It is read
from the loader one window at a time: an array of a few thousand index rows that the loader reads next. A request is for
records of one piece (`requests.py`). A free thread takes the first of these jobs that exists: an urgent request; a
request for a piece; the next piece of a plan, the newest plan first; reading the next window of a plan. A piece is kept
on the disk if there is room for it. Otherwise a limited number of pieces is kept in memory, each until the plan's
records in it were read. If the disk is full and no other process uses the local copy, pieces on the disk are replaced
by pieces that are needed sooner.

One lock guards requests and plans. It is held only briefly: threads do not hold it while they read from the URL, write
to the disk, or run a loader's iterator.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from tpucache import process
from tpucache.errors import StoreError
from tpucache.store.index import Numbers, Rows
from tpucache.store.remote.link import LEAST_REQUESTS, MOST_REQUESTS, Link
from tpucache.store.remote.local import LocalCopy
from tpucache.store.remote.pieces import Pieces
from tpucache.store.remote.plan import FetchPlan, FetchPlans, Forecast
from tpucache.store.remote.requests import FetchRequest, FetchRequests, NeededRecords

_LAST_SECONDS: Final = 2.0  # how long the exiting interpreter waits for running requests
_POLL: Final = 0.02  # seconds after which a waiting reader checks what other processes have fetched
_IDLE_SECONDS: Final = 1.0  # seconds after which an idle thread checks whether the fetcher still exists
_START_SECONDS: Final = 0.5  # `_IDLE_SECONDS` while the first records of a plan were not requested yet
_MOST_USES: Final = 1_000_000  # the limit of a forecast: windows times pieces

_log: Final = logging.getLogger("tpucache")

_living: Final[weakref.WeakSet[Fetcher]] = weakref.WeakSet()


class Fetcher:
    """Fetches records for one process. It starts its threads when the first record is needed."""

    def __init__(self, link: Link, local: LocalCopy, pieces: Pieces) -> None:
        self.process = os.getpid()
        self._link, self.local, self._pieces = link, local, pieces
        self.statistics = link.statistics
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for readers that wait for records
        self._idle = threading.Condition(lock)  # for threads that wait for work
        self._requests, self._plans = FetchRequests(pieces, local, self._changed), FetchPlans()
        self._threads: list[threading.Thread] = []
        self._working = 0  # threads that work on requests that are not urgent
        self._is_closed = False
        _living.add(self)

    def expect(
        self, owner: object, windows: Iterator[Rows], further: Callable[[], Iterator[Rows]] | None = None
    ) -> None:
        """Fetch records ahead, in the order in which `owner` will read them. Replaces the owner's earlier plan.

        `windows` yields arrays of a few thousand index rows, in this order. `further()` returns a new iterator over the
        same arrays, followed by those of later epochs: if the disk cannot keep all pieces, this order decides which
        pieces to keep. The fetcher's threads may run both iterators, one thread at a time.
        """
        plan = FetchPlan(windows, self._pieces, further)
        self._read_window(plan)  # the plan must have its first records before threads follow it
        with self._changed:
            self._plans.put(owner, plan)
            self._start(LEAST_REQUESTS)
            self._wake()

    def get(self, records: NeededRecords) -> dict[int, FetchRequest]:
        """Wait until records are on this machine, on the disk or in memory.

        Returns the requests that hold records in memory, by the records' positions in `records`; all other records are
        on the disk. The caller must be in a `with` block of `LocalCopy.pinned` for the records' pieces. Raises
        DamageError, StoreError.
        """
        found = self._wait(records)
        with self._changed:
            self._plans.note_read(records.pieces)
            self.statistics.needed += int(records.rows["length"].sum())
            if self.local.is_full:
                self._wake()  # records that were read may free memory for other pieces
        return found

    def fetch_first(self, records: NeededRecords) -> None:
        """If a plan begins with these records, fetch exactly these before anything else, and wait for them.

        Raises DamageError, StoreError.
        """
        with self._changed:
            plan = next((plan for plan in self._plans if not plan.has_begun), None)
            if plan is None or not plan.begins_with(records.rows):
                return
            plan.has_begun = plan.is_starting = True
        try:
            # Only if the disk has room for them: in memory they might be dropped before they are read.
            if all(map(self.local.make_room, dict.fromkeys(records.pieces.tolist()))):
                self._wait(records, first_of=plan)
        finally:
            with self._changed:
                plan.is_starting = False
                self._wake()

    def _wait(self, records: NeededRecords, first_of: FetchPlan | None = None) -> dict[int, FetchRequest]:
        """Wait until records are on this machine. Return the requests that hold records in memory.

        The requests are by the records' positions in `records`. If `first_of` is given, the records are the first ones
        of this plan, and are fetched first.
        """
        found, own = dict[int, FetchRequest](), list[FetchRequest]()
        began = time.monotonic()
        self.statistics.began = self.statistics.began or began
        has_waited = False
        while len(missing := self._missing(records, found)):
            with self._changed:
                self._requests.collect(records, missing, own, found)
                missing = self._missing(records, found)  # some may have arrived meanwhile
                if len(missing):
                    if first_of is not None:
                        first_of.is_starting = False  # they are first in the queue now, so other threads may go on
                    self._requests.ask(records, missing, own, self._plans, is_first=first_of is not None)
                    self._start(MOST_REQUESTS if self._requests.urgent else LEAST_REQUESTS)
                    self._wake()
                    self._changed.wait(_POLL)
                    has_waited = True
            if process.is_leaving():  # otherwise the process could not end while a server does not answer
                raise StoreError(
                    f"{self._link.url}: waiting for records was given up, because the command was interrupted"
                )
        if has_waited:
            with self._changed:
                self.statistics.waited += time.monotonic() - began
        return found

    def _missing(self, records: NeededRecords, found: dict[int, FetchRequest]) -> Numbers:
        """Return the positions in `records` of those that are neither on the disk nor, by `found`, in memory."""
        missing = np.flatnonzero(~self.local.has(records.numbers))
        return missing[[place not in found for place in missing.tolist()]] if found else missing

    @property
    def is_at_start(self) -> bool:
        """Whether there is a plan whose first records were not requested yet."""
        return self._plans.are_at_start

    @property
    def follows_a_plan(self) -> bool:
        """Whether there is a plan whose owner still exists."""
        return any(True for _ in self._plans)

    @property
    def is_busy(self) -> bool:
        """Whether pieces are being fetched to the disk while readers wait less than half of the time."""
        return bool(self._working) and not self.local.is_full and self.statistics.keeps_up

    def close(self, patience: float = 0.0) -> None:
        """End the threads after their current requests. Waits at most `patience` seconds until they have ended."""
        if self.process != os.getpid():
            return
        with self._changed:
            self._is_closed = True
            self._idle.notify_all()
        until = time.monotonic() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():  # a fetcher's own thread may hold the last reference to it
                thread.join(max(0.0, until - time.monotonic()))

    def _start(self, threads: int) -> None:
        while len(self._threads) < threads:
            thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name="tpucache-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _wake(self) -> None:
        """Wake as many idle threads as can find work. Waking more would slow down the threads that work."""
        self._idle.notify(len(self._requests.urgent) + max(1, self.statistics.width - self._working))

    def _work(self) -> bool:
        """Do one job, or wait a moment for one. Returns whether the thread should continue."""
        self._make_forecast()
        request, plan = None, None
        with self._changed:
            if self._is_closed:
                return False
            try:
                request = self._next()
            except Exception as error:  # noqa: BLE001  # the threads that wait for records raise it
                self._give_up(error)
            if request is not None:
                self._working += not request.is_urgent
            elif (plan := next((each for each in self._plans if each.is_unread), None)) is not None:
                plan.is_being_read = True
            else:
                self._idle.wait(_START_SECONDS if self.is_at_start else _IDLE_SECONDS)
        if plan is not None:
            self._read_window(plan)
        if request is not None:
            self._fulfil(request)
        return not self._is_closed

    def _next(self) -> FetchRequest | None:
        if (request := self._requests.next_urgent()) is not None:
            return request
        if self._working >= self.statistics.width or any(plan.holds_others_back for plan in self._plans):
            return None
        return self._requests.next_asked() or self._next_planned()

    def _next_planned(self) -> FetchRequest | None:
        self._plans.drop_those_without_owner()
        for plan in self._plans:
            while (needed := plan.peek()) is not None:
                piece, run = needed
                under_way = self._requests.by_piece.get(piece)
                if under_way is not None and not under_way.has(self._requests.lacking(run, piece)):
                    break  # other records of the piece are being fetched; this run is requested after them
                if not (
                    self.local.make_room(piece)
                    or self._replace(plan, piece)
                    or self._requests.has_room_in_memory(self._plans)
                ):
                    break
                plan.pop()
                if under_way is None:
                    self._requests.add(FetchRequest(run, piece))
                    if (request := self._requests.next_asked()) is not None:
                        return request
        return None

    def _replace(self, plan: FetchPlan, piece: int) -> bool:
        """Make room on the disk for a piece by removing pieces that are needed later. Returns whether that worked.

        Pieces that a plan or a request needs now are not removed.
        """
        if plan.forecast is None:
            return False
        later = plan.forecast.later_than(piece, self.local.kept)
        are_free = [each for each in later if not (self._plans.need(each) or self._requests.is_under_way(each))]
        return self.local.replace(are_free, piece)

    def _fulfil(self, request: FetchRequest) -> None:
        """Fetch a request's records, and mark it as done. An error is stored in the request."""
        try:
            self._fetch(request)
        except Exception as error:  # noqa: BLE001  # the threads that wait for it raise it
            request.error = error
        with self._changed:
            self._working -= not request.is_urgent
            self._requests.end(request)
            self._start(self.statistics.width)

    def _fetch(self, request: FetchRequest) -> None:
        """Read a request's records to the disk, or to memory if the disk is full. Raises DamageError, StoreError."""
        if self.local.make_room(request.piece):
            with self._changed:
                runs = self._requests.runs_of(request)
            for run in runs:
                data = self._link.read(run)
                if not self.local.write(run, data):
                    break
                if not request.is_urgent:
                    self._link.reuse(data)
            else:
                return
        request.data = self._link.read(request.run)

    def _read_window(self, plan: FetchPlan) -> None:
        """Read a plan's next window from its loader.

        If the loader's code raises an error, the plan ends: then records are fetched only when they are read.
        """
        try:
            window = plan.read()
        except Exception as error:  # noqa: BLE001  # the loader's code; damage to the cache is raised when it is read
            _log.warning("%s: from now on, records are fetched only when they are read: %s", self._link.url, error)
            window = None
        with self._changed:
            plan.add(window)
            self._wake()

    def _make_forecast(self) -> None:
        """Make the newest plan's forecast, once, if the disk is full and no other process uses the local copy."""
        with self._changed:
            plan = next(iter(self._plans), None) if not self._is_closed else None
            if plan is None or plan.further is None or not (self.local.is_full and self.local.is_alone()):
                return
            further, plan.further = plan.further, None
        try:
            forecast = Forecast(further(), self._pieces, _MOST_USES)
        except Exception as error:  # noqa: BLE001  # the loader's code; damage to the cache is raised when it is read
            _log.warning(
                "%s: parts of shards on the disk are not replaced by parts that are needed sooner: %s",
                self._link.url,
                error,
            )
            return
        with self._changed:
            plan.take(forecast)

    def _give_up(self, error: Exception) -> None:
        """Drop all plans. Requests that are not urgent and have not begun fail with `error`."""
        self._plans.clear()
        self._requests.fail(error if isinstance(error, StoreError) else StoreError(f"{self._link.url}: {error}"))


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter exits: stopping them inside compiled code would abort the process."""
    for fetcher in list(_living):
        fetcher.close(0.0 if process.is_leaving() else _LAST_SECONDS)


def _serve(fetcher: weakref.ref[Fetcher]) -> None:
    """Do a fetcher's jobs until the fetcher is closed or no longer exists. Each of its threads runs this function."""
    while (one := fetcher()) is not None and one._work():
        del one
