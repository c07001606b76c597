"""Pieces: the runs of whole records, of about 8 MiB, in which the shards of a cache at a URL are read and kept.

All pieces of a shard have the same number of records, except the last. So the manifest alone gives the numbers of all
pieces; where one begins and ends is looked up in the index when it is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError
from tpucache.store.cache import Cache
from tpucache.store.files import ThreadLock
from tpucache.store.index import Numbers, Rows

PIECE_BYTES: Final = 8 << 20

#: Two records with more bytes than these between them are read by two requests. A link of 150 MB/s sends as much in
#: the 20 ms before an answer, divided by the 16 requests that wait at once.
_GAP_BYTES: Final = 192 << 10
#: Bytes of a shard for each record in addition to the record: the rest of its last page, and LMDB's own pages.
_SLACK_BYTES: Final = 64 << 10
_MOST_TABLES: Final = 256

Bools = npt.NDArray[np.bool_]


class RecordRun(NamedTuple):
    """Some consecutive records of a shard, which has a number: its bytes, and the records' numbers and index rows."""

    shard: int
    start: int
    stop: int
    numbers: Numbers
    rows: Rows


class _Table(NamedTuple):
    """The rows of a shard's records, and their numbers, both in the order of their offsets."""

    rows: Rows
    numbers: Numbers


class Pieces:
    """The pieces of a cache, numbered from 0, shard by shard in the manifest's order. Threads may share one."""

    def __init__(self, cache: Cache) -> None:
        """Take an opened cache; its index is read when pieces are looked up."""
        self.cache = cache
        self.shards, self.bands = cache.manifest.shards, len(cache.manifest.layouts)
        self._sizes = np.array([_records_in_a_piece(entry.bytes, entry.records) for entry in self.shards], np.int64)
        counts = [-(-entry.records // int(each)) for entry, each in zip(self.shards, self._sizes, strict=True)]
        self._first = np.cumsum([0, *counts])
        self._tables: OrderedDict[int, _Table] = OrderedDict()
        self._lock = ThreadLock()

    def __len__(self) -> int:
        return int(self._first[-1])

    def numbers_at(self, rows: Rows) -> Numbers:
        """Return the numbers of the records in which index rows, or parts of them, lie: int64 (n,).

        Raises DamageError for a row that lies in no record.
        """
        return self._find(rows)[0]

    def of(self, rows: Rows) -> tuple[Numbers, Numbers]:
        """Return the numbers of the records at these index rows, and those of the pieces that they lie in."""
        return self._find(rows)

    def run(self, piece: int) -> RecordRun:
        """Return a whole piece. Raises DamageError where the index has records outside of their shard."""
        shard = self.shard_of(piece)
        each, table = int(self._sizes[shard]), self._table(shard)
        first = (piece - int(self._first[shard])) * each
        return self._run(shard, table, slice(first, first + each))

    def part(self, piece: int, start: int, stop: int) -> RecordRun:
        """Return the records of a piece that lie between two places of its shard. Raises DamageError."""
        run = self.run(piece)
        first, last = np.searchsorted(run.rows["offset"], [start, stop]).tolist()
        return self._run(run.shard, _Table(run.rows, run.numbers), slice(first, last))

    def runs(self, rows: Rows) -> Iterator[RecordRun]:
        """Yield runs that hold some records, given by their whole rows: those close to each other are in one.

        Records between them belong to the run, too: they are read with it, and need not be read again.
        """
        for shard in np.unique(rows["shard"]).tolist():
            table = self._table(shard)
            offsets = np.unique(rows["offset"][rows["shard"] == shard])
            at = np.searchsorted(table.rows["offset"], offsets)
            found = table.rows[at]
            starts, stops = found["offset"].astype(np.int64), (found["offset"] + found["length"]).astype(np.int64)
            far = (np.diff(at) > 1) & (starts[1:] > stops[:-1] + _GAP_BYTES)
            for part in np.split(at, np.flatnonzero(far) + 1):
                yield self._run(shard, table, slice(int(part[0]), int(part[-1]) + 1))

    def own_bytes(self, piece: int) -> tuple[int, int]:
        """Return where the bytes begin and end that belong to this piece alone. Raises DamageError."""
        run = self.run(piece)
        start, stop = run.start, run.stop
        if piece > 0 and (before := self.run(piece - 1)).shard == run.shard:
            start = max(start, before.stop)
        if piece + 1 < len(self) and (after := self.run(piece + 1)).shard == run.shard:
            stop = min(stop, after.start)
        return start, max(start, stop)

    def shard_of(self, piece: int) -> int:
        """Return the number of the shard that has a piece."""
        return int(np.searchsorted(self._first, piece, "right")) - 1

    def bytes_of(self, piece: int) -> int:
        """Return the bytes of a piece. Raises DamageError."""
        run = self.run(piece)
        return run.stop - run.start

    def _find(self, rows: Rows) -> tuple[Numbers, Numbers]:
        numbers, pieces = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        shards = rows["shard"].astype(np.int64)
        for shard in np.unique(shards).tolist():
            chosen = np.flatnonzero(shards == shard)
            table = self._table(shard)
            offsets = rows["offset"][chosen]
            at = np.searchsorted(table.rows["offset"], offsets, "right") - 1
            ends = table.rows["offset"][at] + table.rows["length"][at]
            if (at < 0).any() or (offsets + rows["length"][chosen] > ends).any():
                raise DamageError(f"the index has no record at these bytes of {self.shards[shard].name}: open it again")
            numbers[chosen] = table.numbers[at]
            pieces[chosen] = self._first[shard] + at // self._sizes[shard]
        return numbers, pieces

    def _table(self, shard: int) -> _Table:
        with self._lock:
            if shard in self._tables:
                self._tables.move_to_end(shard)
                return self._tables[shard]
        entry = self.shards[shard]
        numbers = self.cache.rows_of(entry)
        rows = self.cache.index[numbers]
        order = np.argsort(rows["offset"], kind="stable")
        table = _Table(rows[order], numbers[order])
        with self._lock:
            self._tables[shard] = table
            while len(self._tables) > _MOST_TABLES:
                self._tables.popitem(last=False)
        return table

    def _run(self, shard: int, table: _Table, part: slice) -> RecordRun:
        rows, numbers = table.rows[part], table.numbers[part]
        start = int(rows["offset"][0])
        stop = int((rows["offset"] + rows["length"]).max())
        self._check(shard, start, stop, rows)
        return RecordRun(shard, start, stop, numbers, rows)

    def _check(self, shard: int, start: int, stop: int, rows: Rows) -> None:
        """Raise DamageError for a run that is not inside its shard, or much longer than its records."""
        most = int(rows["length"].astype(np.int64).sum()) + len(rows) * _SLACK_BYTES
        entry = self.shards[shard]
        if entry.deleted:  # records of deleted samples lie between the others
            most = entry.bytes
        if not 0 <= start <= stop <= entry.bytes or stop - start > most:
            raise DamageError(
                f"the index has records of {entry.name} at the bytes {start:,} to {stop:,} of {entry.bytes:,}, which "
                "no writer writes: the cache at the URL is damaged, verify it where it was built"
            )


def _records_in_a_piece(size: int, records: int) -> int:
    return max(1, min(records, round(PIECE_BYTES * records / max(1, size))))
