"""Plans: which pieces of a cache will be needed, and when. Loaders announce the records that they will read."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.store.index import Numbers, Rows
from tpucache.store.remote.pieces import PIECE_BYTES, Pieces, RecordRun

#: The window number that stands for "never", as the next use of a piece that no planned epoch needs.
NEVER: Final = np.iinfo(np.int64).max

#: If a window needs between 1/8 and 3/4 of a piece, only this part is read. For smaller parts, separate requests would
#: take longer than reading the whole piece.
_LEAST_PART: Final = 1 / 8
_MOST_PART: Final = 3 / 4
_FIRST_SECONDS: Final = 0.5  # how long a plan waits for the request for its first records


class Window(NamedTuple):
    """A few thousand records that a loader reads one after the other.

    `runs` has a pair for each piece with such records, in the order in which they are needed: the piece, and the run to
    read in it. `counts` has the number of these records by piece. `first` is the index row of the first record; None if
    there are no records.
    """

    runs: list[tuple[int, RecordRun]]
    counts: dict[int, int]
    first: np.void | None


class FetchPlan:
    """The pieces that one loader will need, in order. The order comes from the loader, one window of records at a time.

    `read` runs the loader's code, which is slow: one thread at a time calls it, without the fetcher's lock. All other
    methods are fast, and are called with the lock held.
    """

    def __init__(
        self, windows: Iterator[Rows], pieces: Pieces, further: Callable[[], Iterator[Rows]] | None = None
    ) -> None:
        """Store the order in which the loader will read records.

        `windows` yields arrays of a few thousand index rows, in this order. `further` returns a new iterator over the
        same windows, followed by those of later epochs; a forecast is made from it if the disk is full.
        """
        self._windows, self._pieces = windows, pieces
        self._next: deque[tuple[int, RecordRun]] = deque()
        self._first: np.void | None = None  # the index row of the first record
        self._windows_read = 0
        self._made = time.monotonic()
        self.is_over = False  # there are no more windows
        self.is_being_read = False  # a thread reads the next window
        self.has_begun = False  # a reader wants the first record
        self.is_starting = False  # a reader is about to request the first record
        self.needed: Counter[int] = Counter()  # for each piece, the number of records that are still to be read
        self.further = further
        self.forecast: Forecast | None = None

    def read(self) -> Window | None:
        """Return the next window from the loader; None after the last window."""
        rows = next(self._windows, None)
        if rows is None:
            return None
        if not len(rows):  # the loader has all records of this window in memory
            return Window([], {}, None)
        found = self._pieces.of(rows)[1]
        unique, first, counts = np.unique(found, return_index=True, return_counts=True)
        runs = self._runs(rows, found, unique[np.argsort(first)])
        return Window([*runs], dict(zip(unique.tolist(), counts.tolist(), strict=True)), rows[0])

    def add(self, window: Window | None) -> None:
        """Append a window that `read` returned; None ends the plan."""
        self.is_being_read = False
        if window is None:
            self.is_over = True
            self.has_begun = self.has_begun or self._first is None  # there is no first record to wait for
            return
        self._first = window.first if self._first is None else self._first
        self._next.extend(window.runs)
        self.needed.update(window.counts)
        self._windows_read += 1
        if self.forecast is not None:
            self.forecast.go_to(self._windows_read)

    @property
    def is_unread(self) -> bool:
        """Whether a thread should read the next window now."""
        return not (self._next or self.is_over or self.is_being_read)

    @property
    def holds_others_back(self) -> bool:
        """Whether nothing else may be fetched yet, because a reader is about to request the plan's first records."""
        return self.is_starting or (not self.has_begun and time.monotonic() < self._made + _FIRST_SECONDS)

    def begins_with(self, rows: Rows) -> bool:
        """Return whether `rows` include the index row of the plan's first record."""
        first = self._first
        return first is not None and bool(
            ((rows["shard"] == first["shard"]) & (rows["offset"] == first["offset"])).any()
        )

    def peek(self) -> tuple[int, RecordRun] | None:
        """Return the next piece and the run to read in it; None at the end of the windows read so far."""
        return self._next[0] if self._next else None

    def pop(self) -> None:
        """Remove the piece that `peek` returns."""
        self._next.popleft()

    def run_of(self, piece: int, numbers: Numbers) -> RecordRun | None:
        """Return a planned run that is in this piece and has all records with these row numbers, or None."""
        runs = (run for each, run in self._next if each == piece)
        return next((run for run in runs if np.isin(numbers, run.numbers).all()), None)

    def take(self, forecast: Forecast) -> None:
        """Use a new forecast, made from `further`, and move it on to the window that was read last."""
        forecast.go_to(self._windows_read)
        self.forecast = forecast

    def _runs(self, rows: Rows, pieces: Numbers, order: Numbers) -> Iterator[tuple[int, RecordRun]]:
        """Yield each piece with the run to read in it: the whole piece, or a part of it if that is enough.

        `rows` are the index rows of a window, `pieces` has the piece of each row, and `order` has each piece once.
        Parts are enough for a host that reads only its share of each epoch. In a full shuffle, the records of a window
        are scattered over all pieces: whole pieces are read, because later windows need the other records.
        """
        starts = np.full(len(self._pieces), NEVER)
        stops = np.zeros(len(self._pieces), np.int64)
        np.minimum.at(starts, pieces, rows["offset"].astype(np.int64))
        np.maximum.at(stops, pieces, (rows["offset"] + rows["length"]).astype(np.int64))
        spans = stops[order] - starts[order]
        are_large = np.maximum(spans, spans.mean()) >= _LEAST_PART * PIECE_BYTES
        are_parts = are_large & (spans <= _MOST_PART * PIECE_BYTES)
        for piece, is_part in zip(order.tolist(), are_parts.tolist(), strict=True):
            run = self._pieces.part(piece, starts[piece], stops[piece]) if is_part else self._pieces.run(piece)
            yield piece, run


class FetchPlans:
    """The plan of each owner that still exists, the newest first. Callers hold the fetcher's lock.

    An owner is an object that reads records, such as a loader.
    """

    def __init__(self) -> None:
        self._plans: list[tuple[weakref.ref[Any], FetchPlan]] = []

    def __iter__(self) -> Iterator[FetchPlan]:
        return iter([plan for owner, plan in self._plans if owner() is not None])

    def put(self, owner: object, plan: FetchPlan) -> None:
        """Set an owner's plan, which replaces the owner's earlier plan."""
        self.drop_those_without_owner()
        self._plans = [(weakref.ref(owner), plan), *(one for one in self._plans if one[0]() is not owner)]

    def drop(self, plan: FetchPlan) -> None:
        """Remove a plan."""
        self._plans = [one for one in self._plans if one[1] is not plan]

    def drop_those_without_owner(self) -> None:
        """Remove the plans of owners that no longer exist."""
        self._plans = [one for one in self._plans if one[0]() is not None]

    def clear(self) -> None:
        """Remove all plans."""
        self._plans = []

    @property
    def are_at_start(self) -> bool:
        """Whether there is a plan whose first records were not requested yet."""
        return any(not plan.has_begun for plan in self)

    def need(self, piece: int) -> bool:
        """Return whether a plan still needs records of a piece in the windows that were read so far."""
        return any(plan.needed.get(piece, 0) > 0 for plan in self)

    def run_of(self, piece: int, numbers: Numbers) -> RecordRun | None:
        """Return a planned run that is in this piece and has all records with these row numbers, or None."""
        return next((run for plan in self if (run := plan.run_of(piece, numbers)) is not None), None)

    def note_read(self, pieces: Numbers) -> None:
        """Count records as read, in the newest plan that needs their pieces. `pieces` has the piece of each record."""
        plans = [*self]
        unique, counts = np.unique(pieces, return_counts=True)
        for piece, count in zip(unique.tolist(), counts.tolist(), strict=True):
            plan = next((plan for plan in plans if plan.needed.get(piece, 0) > 0), None)
            if plan is not None:
                plan.needed[piece] -= count


class Forecast:
    """For each piece, the next window of a plan that needs it.

    If the disk is full, the piece whose next use is latest is removed first. This is Belady's rule, which needs the
    fewest reads (A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966). The
    rule needs the future order, which loaders know for all epochs. NoPFS uses this rule for training, too (Dryden et
    al., SC'21).
    """

    def __init__(self, windows: Iterator[Rows], pieces: Pieces, most_uses: int) -> None:
        """Read windows, which are arrays of index rows, to find when each piece is needed.

        Each window that needs a piece counts as one use of that piece. Reading stops at the last window, or once
        `most_uses` uses were counted.
        """
        self._pieces_of: list[Numbers] = []
        uses = 0
        for rows in windows:
            self._pieces_of.append(np.unique(pieces.of(rows)[1]))
            uses += len(self._pieces_of[-1])
            if uses >= most_uses:
                break
        self._now = 0
        self.next_use: npt.NDArray[np.int64] = np.full(len(pieces), NEVER)
        self._later: list[npt.NDArray[np.int64]] = []  # for each window, the next later use of each of its pieces
        for number, needed in reversed([*enumerate(self._pieces_of)]):
            self._later.append(self.next_use[needed])
            self.next_use[needed] = number
        self._later.reverse()

    def go_to(self, window: int) -> None:
        """Move on to the window with this number: the windows before it were read."""
        for needed, later in itertools.islice(zip(self._pieces_of, self._later, strict=True), self._now, window):
            self.next_use[needed] = later
        self._now = max(self._now, window)

    def later_than(self, piece: int, kept: Numbers) -> list[int]:
        """Return the pieces of `kept` that are needed later than this piece, the latest first."""
        uses = self.next_use[kept]
        order = np.argsort(-uses, kind="stable")
        chosen: list[int] = kept[order][uses[order] > self.next_use[piece]].tolist()
        return chosen
