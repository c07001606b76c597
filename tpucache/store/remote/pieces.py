"""Pieces: the shards of a cache at a URL are fetched and kept in pieces of whole records, of about 8 MiB each."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import numpy as np

from tpucache.errors import DamageError
from tpucache.store.cache import Cache
from tpucache.store.index import Numbers, Rows

PIECE_BYTES: Final = 8 << 20
#: The most bytes per record that a shard may have beyond the records: unused ends of pages, and LMDB's own pages.
_SLACK_BYTES: Final = 64 << 10
_MOST_TABLES: Final = 256


class Piece(NamedTuple):
    """Whole records of a shard, in its bytes from `start` to `stop`.

    `numbers` has the index row numbers of the records, and `rows` their index rows, in the order of their offsets.
    """

    shard: int
    start: int
    stop: int
    numbers: Numbers
    rows: Rows


class Pieces:
    """The pieces of a cache, numbered from 0, shard by shard in the manifest's order.

    All pieces of a shard but the last have the same number of records, so that the manifest alone numbers them.
    """

    def __init__(self, cache: Cache, piece_bytes: int | None = None) -> None:
        self.cache, self.shards = cache, cache.manifest.shards
        most = PIECE_BYTES if piece_bytes is None else piece_bytes
        self._sizes = np.array(
            [max(1, min(each.records, round(most * each.records / max(1, each.bytes)))) for each in self.shards],
            np.int64,
        )
        records = np.array([each.records for each in self.shards], np.int64)
        sizes = np.array([each.bytes for each in self.shards], np.int64)
        counts = -(-records // self._sizes)
        self._first = np.concatenate([[0], np.cumsum(counts)])
        #: The bytes that each piece counts for: the pieces of a shard have equal shares of its file.
        self.bytes = np.repeat(sizes // np.maximum(1, counts), counts)
        has_pieces = counts > 0
        self.bytes[self._first[1:][has_pieces] - 1] += (sizes % np.maximum(1, counts))[has_pieces]
        self._table = functools.lru_cache(_MOST_TABLES)(functools.partial(_records_of, cache))

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, piece: int) -> Piece:
        shard = int(np.searchsorted(self._first, piece, "right")) - 1
        each, (rows, numbers) = int(self._sizes[shard]), self._table(shard)
        first = (piece - int(self._first[shard])) * each
        rows, numbers = rows[first : first + each], numbers[first : first + each]
        start, stop = int(rows["offset"][0]), int((rows["offset"] + rows["length"]).max())
        self._check(shard, start, stop, rows)
        return Piece(shard, start, stop, numbers, rows)

    def of(self, rows: Rows) -> tuple[Numbers, Numbers]:
        """Return the number of each index row, and that of the piece with its record. Both arrays are int64 (n,)."""
        numbers, pieces = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        shards = rows["shard"].astype(np.int64)
        for shard in np.unique(shards).tolist():
            chosen = np.flatnonzero(shards == shard)
            table, table_numbers = self._table(shard)
            offsets = rows["offset"][chosen]
            at = np.searchsorted(table["offset"], offsets, "right") - 1
            ends = table["offset"][at] + table["length"][at]
            if (at < 0).any() or (offsets + rows["length"][chosen] > ends).any():
                raise DamageError(
                    f"the index has no record at the requested bytes of {self.shards[shard].name}: open the URL again"
                )
            numbers[chosen] = table_numbers[at]
            pieces[chosen] = self._first[shard] + at // self._sizes[shard]
        return numbers, pieces

    def of_shards(self, shards: Numbers) -> Numbers:
        return np.concatenate(
            [np.arange(self._first[each], self._first[each + 1]) for each in shards.tolist()] or [np.arange(0)]
        )

    def _check(self, shard: int, start: int, stop: int, rows: Rows) -> None:
        """Raise DamageError for a piece that is not inside its shard, or is much longer than its records together."""
        entry = self.shards[shard]
        most = int(rows["length"].astype(np.int64).sum()) + len(rows) * _SLACK_BYTES
        if entry.deleted:  # records of deleted samples may lie between these records
            most = entry.bytes
        if not 0 <= start <= stop <= entry.bytes or stop - start > most:
            raise DamageError(
                f"the index has records of {entry.name} at the bytes {start:,} to {stop:,} of {entry.bytes:,}, where "
                "no record can be: the cache at the URL is damaged. Verify the cache where it was built"
            )


def _records_of(cache: Cache, shard: int) -> tuple[Rows, Numbers]:
    numbers = cache.rows_of(cache.manifest.shards[shard])
    rows = cache.index[numbers]
    order = np.argsort(rows["offset"], kind="stable")
    return rows[order], numbers[order]
