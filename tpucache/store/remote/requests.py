"""Requests: the records that are asked for, the order in which they are read, and how each request ended.

A request is for records of one piece. It is in one of three states:

    asked   It waits for its turn. Another request may overtake it, and records that arrive meanwhile are taken out.
    begun   A thread reads it from the URL.
    done    Its records are on the disk; or the disk has no room, and they are in memory; or its `error` says why not.

Urgent requests, for a few records that somebody waits for, are read first, in the order in which they were asked for.
Next come the requests that somebody waits for, in the order in which their records are needed, and then the rest of
pieces of which somebody has asked for a few records. What plans need comes last.
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

_MEMORY_SHARE: Final = 4  # a quarter of the free memory at most for pieces that are not on the disk
_MOST_MEMORY: Final = 2 << 30  # bytes
_LEAST_IN_MEMORY: Final = 8  # pieces
#: Where at least a quarter of a piece is needed at once, the whole piece is read; otherwise only those records.
_WHOLE_SHARE: Final = 4


class NeededRecords(NamedTuple):
    """Records that somebody reads: their numbers in the index, the pieces that they lie in, and their index rows."""

    numbers: Numbers
    pieces: Numbers
    rows: Rows


class FetchRequest:
    """Records of a piece that are asked for, in one of the states above."""

    def __init__(self, run: RecordRun, piece: int, *, is_urgent: bool = False) -> None:
        self.run, self.piece, self.is_urgent = run, piece, is_urgent
        self.data: memoryview | None = None  # the bytes of its run, where they are not on the disk
        self.error: Exception | None = None
        self.has_begun = self.is_done = False

    @functools.cached_property
    def numbers(self) -> frozenset[int]:
        """The numbers of its records."""
        return frozenset(self.run.numbers.tolist())

    def has(self, run: RecordRun) -> bool:
        """Return whether it brings all records of a run."""
        return self.numbers >= {*run.numbers.tolist()}

    def narrow(self, run: RecordRun) -> None:
        """Ask for less: for those of its records that have not come onto the disk since."""
        self.run = run
        self.__dict__.pop("numbers", None)

    def bytes(self, start: int, stop: int) -> memoryview:
        """Return some of its bytes, counted from the start of its run; none where they are on the disk."""
        return memoryview(b"") if self.data is None else self.data[start:stop]


class FetchRequests:
    """The requests of a process that are asked for or begun, and pieces in memory. The fetcher's lock guards it.

    Two things hold while the lock is free:

    - Of each piece there is at most one request that is not urgent. From its beginning to its end this process holds
      the piece's lock in the folder. So of all processes on this machine, one reads the piece.
    - An urgent request needs no such lock. Another process, or the request for the piece, may read the same bytes; both
      write the same.
    """

    def __init__(self, pieces: Pieces, local: LocalCopy, changed: threading.Condition) -> None:
        """Take the folder that records are written to; `changed` is notified when a request is done."""
        self._pieces, self._local, self._changed = pieces, local, changed
        self.urgent: deque[FetchRequest] = deque()
        self.asked: deque[FetchRequest] = deque()
        self.by_piece: dict[int, FetchRequest] = {}  # those that are not urgent, asked or begun
        self._urgent_by_piece: dict[int, list[FetchRequest]] = {}  # those for pieces that the disk has room for
        #: Those that brought their records into memory, by piece, in the order in which the pieces came.
        self._in_memory: OrderedDict[int, list[FetchRequest]] = OrderedDict()
        room = min(_MOST_MEMORY, available_memory() // _MEMORY_SHARE)
        self._most_in_memory = max(_LEAST_IN_MEMORY, room // PIECE_BYTES)

    def ask(
        self, records: NeededRecords, missing: Numbers, own: list[FetchRequest], plans: FetchPlans, *, is_first: bool
    ) -> None:
        """Ask for those of some records that are missing, given by their places, and add the requests to `own`.

        Single records come soon, but whole pieces faster. So the first records of a plan are read by themselves, and so
        are few records that no plan names.
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
            # The first records do not wait for a request that has not begun: it waits until they are asked for.
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
        """Ask for some records of a piece before all else, and for the rest after all that somebody waits for."""
        requests = [FetchRequest(run, piece, is_urgent=True) for run in self._pieces.runs(rows)]
        self.urgent.extend(requests)
        if self._local.make_room(piece):
            self._urgent_by_piece.setdefault(piece, []).extend(requests)
            if has_rest and piece not in self.by_piece:
                self.add(FetchRequest(self._pieces.run(piece), piece))
        return requests

    def add(self, request: FetchRequest) -> None:
        """Add a request for a piece after all others."""
        self.by_piece[request.piece] = request
        self.asked.append(request)

    def collect(
        self, records: NeededRecords, missing: Numbers, own: list[FetchRequest], found: dict[int, FetchRequest]
    ) -> None:
        """Enter into `found` the requests that brought missing records into memory, by the places of these records.

        Those of the `own` requests that are done are removed. Raises the error of one.
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
        """Begin the next urgent request; None where there is none."""
        if not self.urgent:
            return None
        request = self.urgent.popleft()
        request.has_begun = True
        return request

    def next_asked(self) -> FetchRequest | None:
        """Begin the next request for a piece; None where there is none, or where other processes read all of them."""
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
        """Begin a request, or end it at once where nothing is missing; return False if another process reads its piece.

        What another process has brought since is taken out of the request once this process has the piece's lock.
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
        """Take a request as done, and tell those who wait for it."""
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
        """End all requests for pieces that have not begun, with an error."""
        self.asked.clear()
        for request in [each for each in self.by_piece.values() if not each.has_begun]:
            request.error = error
            self.end(request)

    def are_here_soon(self, numbers: Numbers, piece: int) -> Bools:
        """Return which records of a piece are on the disk, or will come there by an urgent request: bool (n,)."""
        found = self._local.has(numbers)
        for request in self._urgent_by_piece.get(piece, ()):
            found |= np.isin(numbers, request.run.numbers)
        return found

    def lacking(self, run: RecordRun, piece: int) -> RecordRun:
        """Return the part of a run that is not on the disk, nor soon: from the first such record to the last."""
        places = np.flatnonzero(~self.are_here_soon(run.numbers, piece))
        if len(places) in (0, len(run.numbers)):
            return run
        first, last = run.rows[places[0]], run.rows[places[-1]]
        return self._pieces.part(piece, int(first["offset"]), int(last["offset"]) + int(last["length"]))

    def runs_of(self, request: FetchRequest) -> list[RecordRun]:
        """Return the runs to read for a request: its own, without longer parts that are here, or will be soon."""
        if request.is_urgent:
            return [request.run]
        places = np.flatnonzero(~self.are_here_soon(request.run.numbers, request.piece))
        return [*self._pieces.runs(request.run.rows[places])]

    def is_under_way(self, piece: int) -> bool:
        """Return whether records of a piece are asked for."""
        return piece in self.by_piece or piece in self._urgent_by_piece

    def has_room_in_memory(self, plans: FetchPlans) -> bool:
        """Return whether memory has room for one more piece; drop one that no plan needs any more if that helps."""
        if len(self._in_memory) + len(self.by_piece) < self._most_in_memory:
            return True
        unneeded = next((piece for piece in self._in_memory if not plans.need(piece)), None)
        if unneeded is not None:
            del self._in_memory[unneeded]
        return unneeded is not None
