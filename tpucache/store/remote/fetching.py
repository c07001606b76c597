"""Fetcher: threads that bring the records of a cache from its URL, in the order in which they will be needed.

A thread does the first of these that there is to do: an urgent request; a request for a piece; the next piece of a
plan, the newest plan first; reading the next window of a plan. Pieces for which there is room are kept on the disk. Of
the others the next ones are kept in memory until all that the plan needs of them was read. Where one of several hosts
reads its part of each epoch, pieces on the disk give way to those that are needed sooner.

One lock guards requests and plans. It is held for moments: reading from the URL, writing to the disk, and what loaders
say that they will read come without it.
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

from tpucache import signals
from tpucache.errors import StoreError
from tpucache.store.index import Numbers, Rows
from tpucache.store.remote.link import LEAST_REQUESTS, MOST_REQUESTS, Link
from tpucache.store.remote.local import LocalCopy
from tpucache.store.remote.pieces import Pieces
from tpucache.store.remote.plan import FetchPlan, FetchPlans, Forecast
from tpucache.store.remote.requests import FetchRequest, FetchRequests, NeededRecords

_LAST_SECONDS: Final = 2.0  # for requests under way when the interpreter ends
_POLL: Final = 0.02  # seconds after which a reader looks again at what other processes have brought
_IDLE_SECONDS: Final = 1.0  # after which a thread without work looks whether somebody still needs it
_START_SECONDS: Final = 0.5  # the same, while nobody has asked for the first records of a plan
_MOST_USES: Final = 1_000_000  # of pieces that a forecast looks ahead

_log: Final = logging.getLogger("tpucache")

_living: Final[weakref.WeakSet[Fetcher]] = weakref.WeakSet()


class Fetcher:
    """Brings records for one process. It starts its threads when the first record is asked for."""

    def __init__(self, link: Link, local: LocalCopy, pieces: Pieces) -> None:
        """Take what records are read from, and the folder that they are written to."""
        self.process = os.getpid()
        self._link, self.local, self._pieces = link, local, pieces
        self.statistics = link.statistics
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for those who wait for records
        self._idle = threading.Condition(lock)  # for threads that wait for work
        self._requests, self._plans = FetchRequests(pieces, local, self._changed), FetchPlans()
        self._threads: list[threading.Thread] = []
        self._working = 0  # threads at work at requests that are not urgent
        self._is_closed = False
        _living.add(self)

    def expect(
        self, owner: object, windows: Iterator[Rows], further: Callable[[], Iterator[Rows]] | None = None
    ) -> None:
        """Fetch what these windows need, in their order, instead of what the same owner expected before.

        `further` gives them once more, and those of later epochs: where not all can be kept, it decides what is. Both
        are used by one thread at a time, which may be another one than the owner's.
        """
        plan = FetchPlan(windows, self._pieces, further)
        self._read_window(plan)  # so that it is known what comes first
        with self._changed:
            self._plans.put(owner, plan)
            self._start(LEAST_REQUESTS)
            self._wake()

    def get(self, records: NeededRecords) -> dict[int, FetchRequest]:
        """Wait until records are here, which are pinned in the local copy.

        Returns the requests that brought those that are not on the disk, by their places. Raises DamageError,
        StoreError.
        """
        found = self._wait(records)
        with self._changed:
            self._plans.note_read(records.pieces)
            self.statistics.needed += int(records.rows["length"].sum())
            if self.local.is_full:
                self._wake()  # what a plan needs no more makes room in memory
        return found

    def fetch_first(self, records: NeededRecords) -> None:
        """Fetch records before all else, each by itself, if they are the first of what is expected.

        Raises DamageError, StoreError.
        """
        with self._changed:
            plan = next((plan for plan in self._plans if not plan.has_begun), None)
            if plan is None or not plan.begins_with(records.rows):
                return
            plan.has_begun = plan.is_starting = True
        try:
            # What the disk has no room for would not be here any more when it is read.
            if all(map(self.local.make_room, dict.fromkeys(records.pieces.tolist()))):
                self._wait(records, first_of=plan)
        finally:
            with self._changed:
                plan.is_starting = False
                self._wake()

    def _wait(self, records: NeededRecords, first_of: FetchPlan | None = None) -> dict[int, FetchRequest]:
        """Wait until records are here; those that are the first of a plan are read before all else."""
        found, own = dict[int, FetchRequest](), list[FetchRequest]()
        began = time.monotonic()
        self.statistics.began = self.statistics.began or began
        has_waited = False
        while len(missing := self._missing(records, found)):
            with self._changed:
                self._requests.collect(records, missing, own, found)
                missing = self._missing(records, found)  # what has come meanwhile is not asked for again
                if len(missing):
                    if first_of is not None:
                        first_of.is_starting = False  # from here on they are the next in line, and others may follow
                    self._requests.ask(records, missing, own, self._plans, is_first=first_of is not None)
                    self._start(MOST_REQUESTS if self._requests.urgent else LEAST_REQUESTS)
                    self._wake()
                    self._changed.wait(_POLL)
                    has_waited = True
            if signals.is_leaving():  # whoever ends this reader would wait as long as a server that stands still
                raise StoreError(f"{self._link.url}: nobody waits for it any more, because the command is interrupted")
        if has_waited:
            with self._changed:
                self.statistics.waited += time.monotonic() - began
        return found

    def _missing(self, records: NeededRecords, found: dict[int, FetchRequest]) -> Numbers:
        """Return the places of records that are neither on the disk nor found in memory."""
        missing = np.flatnonzero(~self.local.has(records.numbers))
        return missing[[place not in found for place in missing.tolist()]] if found else missing

    @property
    def is_at_start(self) -> bool:
        """Whether nobody has asked for the first records of a plan yet."""
        return self._plans.are_at_start

    @property
    def follows_a_plan(self) -> bool:
        """Whether somebody who still exists has said what will be read."""
        return any(True for _ in self._plans)

    @property
    def is_busy(self) -> bool:
        """Whether pieces come onto the disk, and readers have not waited for them for much of the time."""
        return bool(self._working) and not self.local.is_full and self.statistics.keeps_up

    def close(self, patience: float = 0.0) -> None:
        """End the threads after their requests under way, for which it waits `patience` seconds at most."""
        if self.process != os.getpid():
            return
        with self._changed:
            self._is_closed = True
            self._idle.notify_all()
        until = time.monotonic() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():  # it may be the last that refers to this
                thread.join(max(0.0, until - time.monotonic()))

    def _start(self, threads: int) -> None:
        """Start threads until there are this many."""
        while len(self._threads) < threads:
            thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name="tpucache-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _wake(self) -> None:
        """Wake as many threads as may begin something: each that is woken in vain takes time from those that work."""
        self._idle.notify(len(self._requests.urgent) + max(1, self.statistics.width - self._working))

    def _work(self) -> bool:
        """Do one thing, or wait a moment for one; return whether to go on."""
        self._make_forecast()
        request, plan = None, None
        with self._changed:
            if self._is_closed:
                return False
            try:
                request = self._next()
            except Exception as error:  # noqa: BLE001  # whoever waits for something raises it
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
        """Begin the request that is next; None where there is nothing to begin now."""
        if (request := self._requests.next_urgent()) is not None:
            return request
        if self._working >= self.statistics.width or any(plan.holds_others_back for plan in self._plans):
            return None
        return self._requests.next_asked() or self._next_planned()

    def _next_planned(self) -> FetchRequest | None:
        """Begin the next request for what a plan needs, where there is room for it."""
        self._plans.drop_those_without_owner()
        for plan in self._plans:
            while (needed := plan.peek()) is not None:
                piece, run = needed
                under_way = self._requests.by_piece.get(piece)
                if under_way is not None and not under_way.has(self._requests.lacking(run, piece)):
                    break  # another part of it comes first
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
        """Keep a piece in place of others that this plan needs later and nobody needs now; return whether."""
        if plan.forecast is None:
            return False
        later = plan.forecast.later_than(piece, self.local.kept)
        are_free = [each for each in later if not (self._plans.need(each) or self._requests.is_under_way(each))]
        return self.local.replace(are_free, piece)

    def _fulfil(self, request: FetchRequest) -> None:
        """Bring what a request asks for, and end it."""
        try:
            self._bring(request)
        except Exception as error:  # noqa: BLE001  # whoever waits for it raises it
            request.error = error
        with self._changed:
            self._working -= not request.is_urgent
            self._requests.end(request)
            self._start(self.statistics.width)

    def _bring(self, request: FetchRequest) -> None:
        """Read what a request asks for, onto the disk if that has room for it. Raises DamageError, StoreError."""
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
        """Have a plan read its next window. Where that fails, the plan is over: its records come when they are read."""
        try:
            window = plan.read()
        except Exception as error:  # noqa: BLE001  # the loader's own code; readers raise what is wrong with the cache
            _log.warning("%s: records are fetched only when they are read: %s", self._link.url, error)
            window = None
        with self._changed:
            plan.add(window)
            self._wake()

    def _make_forecast(self) -> None:
        """Make the newest plan's forecast, once the disk is full and if no other process keeps pieces on it."""
        with self._changed:
            plan = next(iter(self._plans), None) if not self._is_closed else None
            if plan is None or plan.further is None or not (self.local.is_full and self.local.is_alone()):
                return
            further, plan.further = plan.further, None
        try:
            forecast = Forecast(further(), self._pieces, _MOST_USES)
        except Exception as error:  # noqa: BLE001  # the loader's own code; readers raise what is wrong with the cache
            _log.warning("%s: no piece on the disk is replaced by one that is needed sooner: %s", self._link.url, error)
            return
        with self._changed:
            plan.take(forecast)

    def _give_up(self, error: Exception) -> None:
        """Follow no plan any more, and end all requests that have not begun with an error."""
        self._plans.clear()
        self._requests.fail(error if isinstance(error, StoreError) else StoreError(f"{self._link.url}: {error}"))


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter does: it would stop them inside of compiled code, which aborts."""
    for fetcher in list(_living):
        fetcher.close(0.0 if signals.is_leaving() else _LAST_SECONDS)


def _serve(fetcher: weakref.ref[Fetcher]) -> None:
    """Work for a fetcher for as long as it exists."""
    while (one := fetcher()) is not None and one._work():
        del one
