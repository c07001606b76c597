"""Plans: which pieces of a cache will be needed, and when, by what loaders say that they will read."""

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

#: When a piece is needed next that no known epoch needs.
NEVER: Final = np.iinfo(np.int64).max

#: Where a part of a piece between these shares is needed, it is read alone. Smaller parts take longer than pieces.
_LEAST_PART: Final = 1 / 8
_MOST_PART: Final = 3 / 4
_FIRST_SECONDS: Final = 0.5  # after which a plan is followed although nobody has asked for its first records


class Window(NamedTuple):
    """Records that are needed at about the same time: the pieces that they lie in, in order, and what to read of each.

    `counts` are the records that are needed of each piece, and `first` is the index row of the very first.
    """

    runs: list[tuple[int, RecordRun]]
    counts: dict[int, int]
    first: np.void | None


class FetchPlan:
    """Which pieces one loader will need, in their order, read from the loader one window at a time.

    `read` runs the loader's code and takes long: one thread at a time calls it, without the fetcher's lock. All else is
    quick, and guarded by that lock.
    """

    def __init__(
        self, windows: Iterator[Rows], pieces: Pieces, further: Callable[[], Iterator[Rows]] | None = None
    ) -> None:
        """Take the index rows that will be read, in their order, some thousand at a time.

        `further` gives the same windows once more, and those of later epochs after them.
        """
        self._windows, self._pieces = windows, pieces
        self._next: deque[tuple[int, RecordRun]] = deque()
        self._first: np.void | None = None  # the index row of the first record that is needed
        self._windows_read = 0
        self._made = time.monotonic()
        self.is_over = False  # there are no more windows
        self.is_being_read = False
        self.has_begun = False  # somebody reads the first record that is needed
        self.is_starting = False  # and is about to ask for it
        self.needed: Counter[int] = Counter()  # records of each piece that are still to be read
        self.further = further
        self.forecast: Forecast | None = None

    def read(self) -> Window | None:
        """Read the next window from the loader, None at the end."""
        rows = next(self._windows, None)
        if rows is None:
            return None
        if not len(rows):  # all that is read is kept in memory
            return Window([], {}, None)
        found = self._pieces.of(rows)[1]
        unique, first, counts = np.unique(found, return_index=True, return_counts=True)
        runs = self._runs(rows, found, unique[np.argsort(first)])
        return Window([*runs], dict(zip(unique.tolist(), counts.tolist(), strict=True)), rows[0])

    def add(self, window: Window | None) -> None:
        """Take a window that was read."""
        self.is_being_read = False
        if window is None:
            self.is_over = True
            self.has_begun = self.has_begun or self._first is None  # nothing is needed
            return
        self._first = window.first if self._first is None else self._first
        self._next.extend(window.runs)
        self.needed.update(window.counts)
        self._windows_read += 1
        if self.forecast is not None:
            self.forecast.go_to(self._windows_read)

    @property
    def is_unread(self) -> bool:
        """Whether somebody should read its next window now."""
        return not (self._next or self.is_over or self.is_being_read)

    @property
    def holds_others_back(self) -> bool:
        """Whether somebody will ask for its first records in a moment: they come before all else."""
        return self.is_starting or (not self.has_begun and time.monotonic() < self._made + _FIRST_SECONDS)

    def begins_with(self, rows: Rows) -> bool:
        """Return whether the first record that is needed is one of these."""
        first = self._first
        return first is not None and bool(
            ((rows["shard"] == first["shard"]) & (rows["offset"] == first["offset"])).any()
        )

    def peek(self) -> tuple[int, RecordRun] | None:
        """Return the next piece, and the run to read if it is not here; None at the end of the windows read so far."""
        return self._next[0] if self._next else None

    def pop(self) -> None:
        """Go on to the piece after the next."""
        self._next.popleft()

    def run_of(self, piece: int, numbers: Numbers) -> RecordRun | None:
        """Return the run to read of a piece, if that is planned and has all of these records, else None."""
        runs = (run for each, run in self._next if each == piece)
        return next((run for run in runs if np.isin(numbers, run.numbers).all()), None)

    def take(self, forecast: Forecast) -> None:
        """Use a forecast, which was made meanwhile from the windows of `further`."""
        forecast.go_to(self._windows_read)
        self.forecast = forecast

    def _runs(self, rows: Rows, pieces: Numbers, order: Numbers) -> Iterator[tuple[int, RecordRun]]:
        """Yield pieces with the run to read of each: the whole piece, or one part where that is enough.

        A host that reads its share of an epoch needs parts. Where a window has only a few records of each piece,
        because all are mixed, whole pieces are read: later windows need the other records.
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
    """The plans of all owners that still exist, the newest first. The fetcher's lock guards it."""

    def __init__(self) -> None:
        self._plans: list[tuple[weakref.ref[Any], FetchPlan]] = []

    def __iter__(self) -> Iterator[FetchPlan]:
        return iter([plan for owner, plan in self._plans if owner() is not None])

    def put(self, owner: object, plan: FetchPlan) -> None:
        """Take an owner's plan in place of the one before."""
        self.drop_those_without_owner()
        self._plans = [(weakref.ref(owner), plan), *(one for one in self._plans if one[0]() is not owner)]

    def drop(self, plan: FetchPlan) -> None:
        """Forget a plan."""
        self._plans = [one for one in self._plans if one[1] is not plan]

    def drop_those_without_owner(self) -> None:
        """Forget the plans of owners that exist no more."""
        self._plans = [one for one in self._plans if one[0]() is not None]

    def clear(self) -> None:
        """Forget all plans."""
        self._plans = []

    @property
    def are_at_start(self) -> bool:
        """Whether nobody has asked for the first records of one of them yet."""
        return any(not plan.has_begun for plan in self)

    def need(self, piece: int) -> bool:
        """Return whether records of a piece are still to be read in the windows that were read so far."""
        return any(plan.needed.get(piece, 0) > 0 for plan in self)

    def run_of(self, piece: int, numbers: Numbers) -> RecordRun | None:
        """Return the run that a plan will read of a piece, if it has all of these records, else None."""
        return next((run for plan in self if (run := plan.run_of(piece, numbers)) is not None), None)

    def note_read(self, pieces: Numbers) -> None:
        """Count records as read, given by the pieces that they lie in."""
        plans = [*self]
        unique, counts = np.unique(pieces, return_counts=True)
        for piece, count in zip(unique.tolist(), counts.tolist(), strict=True):
            plan = next((plan for plan in plans if plan.needed.get(piece, 0) > 0), None)
            if plan is not None:
                plan.needed[piece] -= count


class Forecast:
    """When each piece is needed next: the piece that is needed last is given up first, and no other rule reads less.

    That is the rule of Belady (A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
    5(2), 1966), possible here because epochs' orders are known; for training it is NoPFS's (Dryden et al., SC'21).
    """

    def __init__(self, windows: Iterator[Rows], pieces: Pieces, most_uses: int) -> None:
        """Take the windows of several epochs, until they need `most_uses` pieces together."""
        self._pieces_of: list[Numbers] = []
        uses = 0
        for rows in windows:
            self._pieces_of.append(np.unique(pieces.of(rows)[1]))
            uses += len(self._pieces_of[-1])
            if uses >= most_uses:
                break
        self._now = 0
        self.next_use: npt.NDArray[np.int64] = np.full(len(pieces), NEVER)
        self._later: list[npt.NDArray[np.int64]] = []  # of each window's pieces, the window that needs them next
        for number, needed in reversed([*enumerate(self._pieces_of)]):
            self._later.append(self.next_use[needed])
            self.next_use[needed] = number
        self._later.reverse()

    def go_to(self, window: int) -> None:
        """Take the windows before this one as read."""
        for needed, later in itertools.islice(zip(self._pieces_of, self._later, strict=True), self._now, window):
            self.next_use[needed] = later
        self._now = max(self._now, window)

    def later_than(self, piece: int, kept: Numbers) -> list[int]:
        """Return those of some pieces that are needed later than this one, the latest first."""
        uses = self.next_use[kept]
        order = np.argsort(-uses, kind="stable")
        chosen: list[int] = kept[order][uses[order] > self.next_use[piece]].tolist()
        return chosen
