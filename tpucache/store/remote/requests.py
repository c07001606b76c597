"""Requests for records: their states, and the order in which they are fetched.

A request is for records of one piece. It is in one of three states:

    asked   It waits in a queue. Later requests may overtake it. Records that arrive meanwhile are removed from it.
    begun   A thread reads it from the URL.
    done    Its records are on the disk, or in memory if the disk is full. If it failed, `error` is set.

Urgent requests are fetched first, in the order in which they were made: they are for a few records that a reader waits
for. Next come all other requests that a reader waits for, in the order in which the records are needed. If only a few
records of a piece were requested urgently, the piece's other records come next. Pieces that only plans need come last.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, deque
from typing import Final, NamedTuple

import numpy as np

from tpucache.errors import StoreError
from tpucache.machine import available_memory
from tpucache.store.index import Numbers, Rows
from tpucache.store.remote.local import LocalCopy
from tpucache.store.remote.pieces import PIECE_BYTES, Bools, Pieces, RecordRun
from tpucache.store.remote.plan import FetchPlans

_MEMORY_SHARE: Final = 4  # pieces in memory may take a quarter of the free memory
_MOST_MEMORY: Final = 2 << 30  # and at most this many bytes
_LEAST_IN_MEMORY: Final = 8  # but at least this many pieces
#: If a reader needs at least a quarter of a piece at once, the whole piece is fetched, otherwise only these records.
_WHOLE_SHARE: Final = 4


class NeededRecords(NamedTuple):
    """Records that a reader needs: `numbers` has their index row numbers, `pieces` the piece of each record.

    `rows` has their index rows. All three arrays have one element per record.
    """

    numbers: Numbers
    pieces: Numbers
    rows: Rows


class FetchRequest:
    """A request for records of one piece: it waits in a queue, has begun (a thread reads it), or is done."""

    def __init__(self, run: RecordRun, piece: int, *, is_urgent: bool = False) -> None:
        self.run, self.piece, self.is_urgent = run, piece, is_urgent
        self.data: memoryview | None = None  # the bytes of its run, if they are in memory
        self.error: Exception | None = None
        self.has_begun = self.is_done = False

    @functools.cached_property
    def numbers(self) -> frozenset[int]:
        """The index row numbers of the requested records."""
        return frozenset(self.run.numbers.tolist())

    def has(self, run: RecordRun) -> bool:
        """Return whether the request covers all records of a run."""
        return self.numbers >= {*run.numbers.tolist()}

    def narrow(self, run: RecordRun) -> None:
        """Reduce the request to a smaller run, because records outside this run have arrived meanwhile."""
        self.run = run
        self.__dict__.pop("numbers", None)

    def bytes(self, start: int, stop: int) -> memoryview:
        """Return the bytes `start` to `stop` of the request's run; b"" if the run is on the disk, not in memory."""
        return memoryview(b"") if self.data is None else self.data[start:stop]


class FetchRequests:
    """The requests of a process that are not done, and the pieces in memory. Callers hold the fetcher's lock.

    Two rules hold whenever the lock is free:

    - For each piece there is at most one request that is not urgent. While a thread reads the piece, this process holds
      the piece's lock in the local copy. So only one process on this machine fetches the piece.
    - An urgent request needs no such lock. Another process, or the request for the piece, may fetch the same bytes,
      too: both write the same data.
    """

    def __init__(self, pieces: Pieces, local: LocalCopy, changed: threading.Condition) -> None:
        """Begin without requests. `changed` is notified whenever a request is done."""
        self._pieces, self._local, self._changed = pieces, local, changed
        self.urgent: deque[FetchRequest] = deque()
        self.asked: deque[FetchRequest] = deque()
        self.by_piece: dict[int, FetchRequest] = {}  # requests that are not urgent, asked or begun
        self._urgent_by_piece: dict[int, list[FetchRequest]] = {}  # urgent requests whose pieces have disk space
        #: The done requests whose records are in memory, by piece, the oldest piece first.
        self._in_memory: OrderedDict[int, list[FetchRequest]] = OrderedDict()
        room = min(_MOST_MEMORY, available_memory() // _MEMORY_SHARE)
        self._most_in_memory = max(_LEAST_IN_MEMORY, room // PIECE_BYTES)

    def ask(
        self, records: NeededRecords, missing: Numbers, own: list[FetchRequest], plans: FetchPlans, *, is_first: bool
    ) -> None:
        """Request the records at the positions `missing` of `records`, and add the requests to the caller's list `own`.

        Single records arrive sooner, but whole pieces have a higher rate. So records are requested without the rest of
        their piece only if they are the first of a plan (`is_first`), or if they are few and no plan needs the piece.
        """
        already = {request.piece for request in own}
        waited = list[FetchRequest]()
        for piece in dict.fromkeys(records.pieces[missing].tolist()):  # in the order in which they are needed
            if piece in already:
                continue
            places = missing[records.pieces[missing] == piece]
            numbers, rows = records.numbers[places], records.rows[places]
            if piece in self._urgent_by_piece and self.are_here_soon(numbers, piece).all():
                own.extend(self._urgent_by_piece[piece])
                continue
            request, is_planned = self.by_piece.get(piece), plans.need(piece)
            # First records must not wait for a request that has not begun: it waits for the first records itself.
            if request is None or not (request.has_begun or (is_planned and not is_first)):
                run = plans.run_of(piece, numbers) or self._pieces.run(piece)
                are_few = int(rows["length"].sum()) * _WHOLE_SHARE < run.stop - run.start
                if is_first or (are_few and not is_planned):
                    own.extend(self._ask_urgently(piece, rows, has_rest=not is_planned))
                    continue
                if request is None:
                    request = self.by_piece[piece] = FetchRequest(self.lacking(run, piece), piece)
                else:
                    self.asked.remove(request)
                waited.append(request)
            own.append(request)
        self.asked.extendleft(reversed(waited))

    def _ask_urgently(self, piece: int, rows: Rows, *, has_rest: bool) -> list[FetchRequest]:
        """Request some records of a piece urgently.

        If `has_rest` and the disk has room for the piece, also request the whole piece, last in the queue.
        """
        requests = [FetchRequest(run, piece, is_urgent=True) for run in self._pieces.runs(rows)]
        self.urgent.extend(requests)
        if self._local.make_room(piece):
            self._urgent_by_piece.setdefault(piece, []).extend(requests)
            if has_rest and piece not in self.by_piece:
                self.add(FetchRequest(self._pieces.run(piece), piece))
        return requests

    def add(self, request: FetchRequest) -> None:
        """Append a request for a piece to the queue."""
        self.by_piece[request.piece] = request
        self.asked.append(request)

    def collect(
        self, records: NeededRecords, missing: Numbers, own: list[FetchRequest], found: dict[int, FetchRequest]
    ) -> None:
        """Find the requests that hold the missing records in memory, and add them to `found`.

        `missing` has the positions in `records` of the missing records. The keys of `found` are such positions. Also
        removes done requests from `own`. Raises the error of a request in `own` that failed.
        """
        for place in missing.tolist():
            for request in self._in_memory.get(int(records.pieces[place]), ()):
                if int(records.numbers[place]) in request.numbers:
                    found[place] = request
        for request in [each for each in own if each.is_done]:
            own.remove(request)
            if request.error is not None:
                raise request.error
            if request.data is not None:
                places = [place for place in missing.tolist() if int(records.numbers[place]) in request.numbers]
                found.update(dict.fromkeys(places, request))

    def next_urgent(self) -> FetchRequest | None:
        """Begin the next urgent request, and return it; None if there is none."""
        if not self.urgent:
            return None
        request = self.urgent.popleft()
        request.has_begun = True
        return request

    def next_asked(self) -> FetchRequest | None:
        """Begin the next request for a piece that no other process is reading, and return it; None if there is none."""
        of_others, found = list[FetchRequest](), None
        while self.asked and found is None:
            request = self.asked.popleft()
            if not self._begin(request):
                of_others.append(request)
            elif not request.is_done:
                found = request
        self.asked.extendleft(reversed(of_others))
        return found

    def _begin(self, request: FetchRequest) -> bool:
        """Begin a request; if nothing is missing, end it at once. Returns False if another process reads its piece.

        Once the piece is locked, records that other processes have fetched meanwhile are removed from the request.
        """
        piece = request.piece
        if not any(each.has(request.run) for each in self._in_memory.get(piece, ())):
            if not self._local.lock(piece):
                return False
            if not self.are_here_soon(request.run.numbers, piece).all():
                request.narrow(self.lacking(request.run, piece))
                request.has_begun = True
                return True
            self._local.unlock(piece)
        self.end(request)
        return True

    def end(self, request: FetchRequest) -> None:
        """Mark a request as done, and wake the threads that wait for it."""
        request.is_done = True
        piece = request.piece
        if request.is_urgent:
            urgent = self._urgent_by_piece.get(piece, [])
            if request in urgent:
                urgent.remove(request)
            if not urgent:
                self._urgent_by_piece.pop(piece, None)
        else:
            self.by_piece.pop(piece, None)
            if request.has_begun:
                self._local.unlock(piece)
            if request.data is not None:
                self._in_memory.setdefault(piece, []).append(request)
                while len(self._in_memory) > self._most_in_memory:
                    self._in_memory.popitem(last=False)
        self._changed.notify_all()

    def fail(self, error: StoreError) -> None:
        """Let all requests that are not urgent and have not begun fail with an error."""
        self.asked.clear()
        for request in [each for each in self.by_piece.values() if not each.has_begun]:
            request.error = error
            self.end(request)

    def are_here_soon(self, numbers: Numbers, piece: int) -> Bools:
        """Return which of the records `numbers` of a piece are on the disk, or in an urgent request: bool (n,)."""
        found = self._local.has(numbers)
        for request in self._urgent_by_piece.get(piece, ()):
            found |= np.isin(numbers, request.run.numbers)
        return found

    def lacking(self, run: RecordRun, piece: int) -> RecordRun:
        """Return the part of a run from the first to the last record for which `are_here_soon` is False.

        If there is no such record, the run itself is returned.
        """
        places = np.flatnonzero(~self.are_here_soon(run.numbers, piece))
        if len(places) in (0, len(run.numbers)):
            return run
        first, last = run.rows[places[0]], run.rows[places[-1]]
        return self._pieces.part(piece, int(first["offset"]), int(last["offset"]) + int(last["length"]))

    def runs_of(self, request: FetchRequest) -> list[RecordRun]:
        """Return the runs to read for a request.

        If the request is not urgent, records on the disk or in urgent requests are left out, except those in small gaps
        between two records that are read.
        """
        if request.is_urgent:
            return [request.run]
        places = np.flatnonzero(~self.are_here_soon(request.run.numbers, request.piece))
        return [*self._pieces.runs(request.run.rows[places])]

    def is_under_way(self, piece: int) -> bool:
        """Return whether there is a request for records of a piece."""
        return piece in self.by_piece or piece in self._urgent_by_piece

    def has_room_in_memory(self, plans: FetchPlans) -> bool:
        """Return whether there is memory for one more piece.

        If the memory is full, one piece that no plan needs any more is dropped first, if there is such a piece.
        """
        if len(self._in_memory) + len(self.by_piece) < self._most_in_memory:
            return True
        unneeded = next((piece for piece in self._in_memory if not plans.need(piece)), None)
        if unneeded is not None:
            del self._in_memory[unneeded]
        return unneeded is not None
