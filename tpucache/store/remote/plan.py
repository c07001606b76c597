"""Plan and Forecast: which pieces of a cache will be needed, and when, by what a loader says that it will read."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.store.index import Numbers, Rows
from tpucache.store.remote.pieces import PIECE_BYTES, Pieces, Run

#: When a piece is needed next that no known epoch needs.
NEVER: Final = np.iinfo(np.int64).max
#: Of a piece, the shares between which a part is read by itself. Many smaller requests would take longer than pieces.
_LEAST_PART: Final = 1 / 8
_MOST_PART: Final = 3 / 4


class Plan:
    """Which pieces will be needed, in their order; it is read no further ahead than there is room for."""

    def __init__(
        self, windows: Iterator[Rows], pieces: Pieces, further: Callable[[], Iterator[Rows]] | None = None
    ) -> None:
        """Take the index rows that will be read, in their order, some thousand at a time.

        `further` gives the same windows once more, and those of later epochs after them.
        """
        self._windows, self._pieces = windows, pieces
        self._next: deque[tuple[int, Run]] = deque()
        self._read = 0  # windows
        self.further = further
        self.forecast: Forecast | None = None
        self.needed: Counter[int] = Counter()  # records of pieces that are still to be read
        self._first: np.void | None = None  # the index row of what is needed first
        self.made = time.monotonic()
        self.has_begun = False  # somebody has asked for what is needed first

    def begins_with(self, rows: Rows) -> bool:
        """Return whether the first record that is needed is one of these."""
        self.peek()
        first = self._first
        return first is not None and bool(
            ((rows["shard"] == first["shard"]) & (rows["offset"] == first["offset"])).any()
        )

    def peek(self) -> tuple[int, Run] | None:
        """Return the next piece, and what of it is to be fetched if it is not here; None at the end."""
        while not self._next:
            rows = next(self._windows, None)
            if rows is None:
                return None
            if len(rows):  # none where all that is read is kept in memory
                self._first = rows[0] if self._first is None else self._first
                found = self._pieces.of(rows)[1]
                unique, first, counts = np.unique(found, return_index=True, return_counts=True)
                self._next.extend(self._runs(rows, found, unique[np.argsort(first)]))
                self.needed.update(dict(zip(unique.tolist(), counts.tolist(), strict=True)))
            self._read += 1
            if self.forecast is not None:
                self.forecast.go_to(self._read)
        return self._next[0]

    def run_of(self, piece: int, numbers: Numbers) -> Run | None:
        """Return what of a piece is to be fetched next if it has all of these records, else None."""
        runs = (run for each, run in self._next if each == piece)
        return next((run for run in runs if np.isin(numbers, run.numbers).all()), None)

    def pop(self) -> None:
        """Go on to the piece after the next."""
        self._next.popleft()

    def _runs(self, rows: Rows, pieces: Numbers, order: Numbers) -> Iterator[tuple[int, Run]]:
        """Yield some pieces with what is needed of each: all, but for where only a part of it is, in one run.

        A host that reads its share of an epoch needs parts. Where each piece has but few of a window's records, which
        is so if all are mixed, whole pieces are read: the other records will be needed, too.
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

    def take(self, forecast: Forecast) -> None:
        """Use a forecast, which was made meanwhile of what `further` gives."""
        forecast.go_to(self._read)
        self.forecast = forecast


class Forecast:
    """When each piece is needed next: what is needed last is given up first, and nothing can read less.

    That is the rule of Belady (A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
    5(2), 1966), possible here because epochs' orders are known; for training it is NoPFS's (Dryden et al., SC'21).
    """

    def __init__(self, windows: Iterator[Rows], pieces: Pieces, most_uses: int) -> None:
        """Take the windows of several epochs, as many as need so many pieces together."""
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
