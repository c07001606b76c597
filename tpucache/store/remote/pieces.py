"""Pieces: the shards of a cache at a URL are fetched and kept in pieces of whole records, of about 8 MiB each.

All pieces of a shard have the same number of records, except the last. So pieces can be numbered with the manifest
alone. The index gives the bytes at which a piece begins and ends.
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

#: Two records with a larger gap between them are read by two requests. A link of 150 MB/s transfers 16 times this much
#: during a latency of 20 ms, which 16 parallel requests share.
_GAP_BYTES: Final = 192 << 10
#: The most bytes per record that a shard may have beyond the records: unused ends of pages, and LMDB's own pages.
_SLACK_BYTES: Final = 64 << 10
_MOST_TABLES: Final = 256

Bools = npt.NDArray[np.bool_]


class RecordRun(NamedTuple):
    """Consecutive records of a shard.

    `shard` is the shard's number. The records are in the shard's bytes from `start` to `stop`. `numbers` has the index
    row numbers of the records, int64 (n,), and `rows` their index rows, in the order of their offsets.
    """

    shard: int
    start: int
    stop: int
    numbers: Numbers
    rows: Rows


class _ShardRows(NamedTuple):
    """The records of one shard, in the order of their offsets: their index rows, and the numbers of these rows."""

    rows: Rows
    numbers: Numbers


class Pieces:
    """The pieces of a cache, numbered from 0, shard by shard in the manifest's order. Threads may share a Pieces."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.shards = cache.manifest.shards
        self._sizes = np.array([_records_in_a_piece(entry.bytes, entry.records) for entry in self.shards], np.int64)
        counts = [-(-entry.records // int(each)) for entry, each in zip(self.shards, self._sizes, strict=True)]
        self._first = np.cumsum([0, *counts])
        self._tables: OrderedDict[int, _ShardRows] = OrderedDict()
        self._lock = ThreadLock()

    def __len__(self) -> int:
        return int(self._first[-1])

    def of(self, rows: Rows) -> tuple[Numbers, Numbers]:
        """Return the number of each index row, and that of the piece with its record. Both arrays are int64 (n,).

        A row may also point at a part of a record. Raises DamageError for a row outside of all records.
        """
        return self._find(rows)

    def run(self, piece: int) -> RecordRun:
        """Return all records of a piece. Raises DamageError if the index has records outside their shard."""
        shard = self.shard_of(piece)
        each, table = int(self._sizes[shard]), self._table(shard)
        first = (piece - int(self._first[shard])) * each
        return self._run(shard, table, slice(first, first + each))

    def part(self, piece: int, start: int, stop: int) -> RecordRun:
        """Return a piece's records between two offsets in its shard. Raises DamageError for a damaged index."""
        run = self.run(piece)
        first, last = np.searchsorted(run.rows["offset"], [start, stop]).tolist()
        return self._run(run.shard, _ShardRows(run.rows, run.numbers), slice(first, last))

    def runs(self, rows: Rows) -> Iterator[RecordRun]:
        """Yield runs that cover the records of these index rows. Records close to each other share a run.

        Each run also has all other records in its byte range, so that the other records need not be fetched later.
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
        """Return the start and stop of the bytes in the shard that belong to this piece alone. Raises DamageError."""
        run = self.run(piece)
        start, stop = run.start, run.stop
        if piece > 0 and (before := self.run(piece - 1)).shard == run.shard:
            start = max(start, before.stop)
        if piece + 1 < len(self) and (after := self.run(piece + 1)).shard == run.shard:
            stop = min(stop, after.start)
        return start, max(start, stop)

    def shard_of(self, piece: int) -> int:
        """Return the number of the shard to which a piece belongs."""
        return int(np.searchsorted(self._first, piece, "right")) - 1

    def bytes_of(self, piece: int) -> int:
        """Return the size of a piece in bytes. Raises DamageError."""
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
                raise DamageError(
                    f"the index has no record at the requested bytes of {self.shards[shard].name}: open the URL again"
                )
            numbers[chosen] = table.numbers[at]
            pieces[chosen] = self._first[shard] + at // self._sizes[shard]
        return numbers, pieces

    def _table(self, shard: int) -> _ShardRows:
        with self._lock:
            if shard in self._tables:
                self._tables.move_to_end(shard)
                return self._tables[shard]
        entry = self.shards[shard]
        numbers = self.cache.rows_of(entry)
        rows = self.cache.index[numbers]
        order = np.argsort(rows["offset"], kind="stable")
        table = _ShardRows(rows[order], numbers[order])
        with self._lock:
            self._tables[shard] = table
            while len(self._tables) > _MOST_TABLES:
                self._tables.popitem(last=False)
        return table

    def _run(self, shard: int, table: _ShardRows, part: slice) -> RecordRun:
        rows, numbers = table.rows[part], table.numbers[part]
        start = int(rows["offset"][0])
        stop = int((rows["offset"] + rows["length"]).max())
        self._check(shard, start, stop, rows)
        return RecordRun(shard, start, stop, numbers, rows)

    def _check(self, shard: int, start: int, stop: int, rows: Rows) -> None:
        """Raise DamageError for a run that is not inside its shard, or is much longer than its records together."""
        most = int(rows["length"].astype(np.int64).sum()) + len(rows) * _SLACK_BYTES
        entry = self.shards[shard]
        if entry.deleted:  # records of deleted samples may lie between these records
            most = entry.bytes
        if not 0 <= start <= stop <= entry.bytes or stop - start > most:
            raise DamageError(
                f"the index has records of {entry.name} at the bytes {start:,} to {stop:,} of {entry.bytes:,}, where "
                "no record can be: the cache at the URL is damaged. Verify the cache where it was built"
            )


def _records_in_a_piece(size: int, records: int) -> int:
    return max(1, min(records, round(PIECE_BYTES * records / max(1, size))))
