"""Shards mapped into memory, where nobody can cut them short.

Copying records out of a map is as fast as out of memory of one's own, without a second copy of them. But reading a page
that a file no longer has ends the process. So a shard is mapped only where that cannot happen: on a file system that is
mounted read-only, or as a sealed memory file. All others are read with `pread`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
import weakref
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache import system
from tpucache.errors import DamageError
from tpucache.loading.reading.memory import BUDGET
from tpucache.native import Addresses, can_populate, libc, populate
from tpucache.store.files import ThreadLock
from tpucache.store.index import Numbers, Rows
from tpucache.store.reader import ShardReader

_UNKNOWN: Final = 0
_NOT_MAPPED: Final = -1
_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 2
_PIECE_BITS: Final = 21  # 2 MiB of a map, read and entered in the page table at once: a third of the cost of one record
_PIECE: Final = 1 << _PIECE_BITS
_PROBES: Final = 4
PREPARE_SECONDS: Final = 0.5  # two threads enter 7 GB of pages in this time, or copy 2 GB into memory that is there
_FAILED: Final = ctypes.c_void_p(-1).value


def cannot_shrink(number: int) -> bool:
    """Return whether nobody can cut an open file short: its file system is mounted read-only, or it is sealed."""
    with contextlib.suppress(OSError):  # most file systems have no seals
        if system.fcntl is not None and system.fcntl.fcntl(number, _F_GET_SEALS) & _F_SEAL_SHRINK:
            return True
    return system.is_read_only(number)


class ShardMaps:
    """Maps of a cache's shards, each made when a record of it is first asked for, within the process's budget.

    The pages of a record are read before they are touched, so that one that cannot be read is an error. Where its
    neighbours are in the page cache, too, they are entered in the page table together. Threads may share one. A pickled
    copy begins empty.
    """

    def __init__(self, reader: ShardReader, records: int) -> None:
        """Map nothing yet; there are `records` in the index."""
        self._reader = reader
        self._bases = np.zeros(len(reader.shards), np.int64)  # addresses of the maps
        self._present = np.zeros(records, np.bool_)  # records whose pages were read
        pieces = [(entry.bytes + _PIECE - 1) >> _PIECE_BITS for entry in reader.shards]
        self._first_piece = np.cumsum([0, *pieces])  # each shard's, numbered over all of them
        self._whole = np.zeros(int(self._first_piece[-1]), np.bool_)  # pieces that were read as a whole
        self._lock = ThreadLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardMaps, (self._reader, len(self._present))  # the copy in another process begins empty

    @property
    def mapped(self) -> int:
        """Bytes of the shards that are mapped."""
        return sum(
            entry.bytes for entry, base in zip(self._reader.shards, self._bases.tolist(), strict=True) if base > 0
        )

    def is_present(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return which records lie in maps, and were read: bool (n,)."""
        present: npt.NDArray[np.bool_] = self._present[numbers]
        return present

    def can_map(self, shard: int) -> bool:
        """Return whether a shard may be mapped here. Raises DamageError when it cannot be opened."""
        return self._reader.is_whole and can_populate() and cannot_shrink(self._reader.file(shard).number)

    def addresses(self, numbers: Numbers, rows: Rows) -> Addresses:
        """Return where the records of index rows lie in maps: int64 (n,), 0 for those that are not mapped.

        Raises DamageError for a row that points outside of its shard, and for pages that cannot be read.
        """
        shards = rows["shard"].astype(np.int64)
        bases = self._bases.take(shards, mode="clip")  # a shard that is not there is refused when it is opened
        if (bases == _UNKNOWN).any():
            unknown, first = np.unique(np.where(bases == _UNKNOWN, shards, -1), return_index=True)
            self._map(rows[first[unknown >= 0]])
            bases = self._bases[shards]
        found: Addresses = np.where(bases > 0, bases + rows["offset"].astype(np.int64), 0)
        absent = np.flatnonzero((found > 0) & ~self._present[numbers])
        if len(absent):
            self._read_pages(found[absent], rows[absent])
            self._present[numbers[absent]] = True
        return found

    def prepare(self, rows: Rows, threads: int) -> None:
        """Map the shards of some records, one of each, and enter what of them is in the page cache, for a moment.

        What is out of the page cache, or takes longer, is left to be read when it is asked for. Raises StoreError.
        """
        end = time.monotonic() + PREPARE_SECONDS
        reader = self._reader

        def read(piece: int) -> None:
            if time.monotonic() < end:
                self._read_piece(piece)

        with ThreadPoolExecutor(threads, "tpucache-prepare") as pool:  # it starts no thread before there is work
            for row in rows:
                shard = int(row["shard"])
                if time.monotonic() > end or not reader.is_in_memory(shard, int(row["offset"])):
                    return
                if self._bases[shard] == _UNKNOWN:
                    self._map(row.reshape(1))
                first, stop = self._first_piece[shard : shard + 2].tolist()
                missing = first + np.flatnonzero(~self._whole[first:stop])
                deque(pool.map(read, missing.tolist()), 0)

    def block(self, shard: int) -> npt.NDArray[np.uint8]:
        """Return all bytes of a mapped shard, read-only; this object is to be kept as long as they are used."""
        return _bytes_at(int(self._bases[shard]), self._reader.shards[shard].bytes)

    def _map(self, rows: Rows) -> None:
        """Map the shards of some records, one of each, if they may be mapped and the budget has room.

        The record is compared with its checksum before.
        """
        reader = self._reader
        sizes = {shard: reader.shards[shard].bytes for shard in rows["shard"].tolist() if self.can_map(shard)}
        with self._lock:
            new = {shard: size for shard, size in sizes.items() if self._bases[shard] == _UNKNOWN}
            has_room = BUDGET.take(self, sum(new.values()), is_used=False)  # looking costs as much as opening ten files
            for row in rows[self._bases[rows["shard"]] == _UNKNOWN]:
                shard = int(row["shard"])
                is_wanted = shard in new and (has_room or BUDGET.take(self, new[shard], is_used=False))
                base = _map_file(reader.file(shard).number, new[shard]) if is_wanted else 0
                if base:
                    unmap = weakref.finalize(self, libc.munmap, ctypes.c_void_p(base), ctypes.c_size_t(new[shard]))
                    unmap.atexit = False  # a thread may still copy then
                    self._check(base, row.reshape(1))
                self._bases[shard] = base or _NOT_MAPPED

    def _check(self, base: int, row: Rows) -> None:
        """Compare a record with its checksum: the file may be another's of the same size."""
        found = base + row["offset"].astype(np.int64)
        self._read_pages(found, row)
        self._reader.check(row[0], zlib.crc32(_bytes_at(int(found[0]), int(row["length"][0])).data))

    def _read_pages(self, addresses: Addresses, rows: Rows) -> None:
        """Read the pages of records, whole pieces where they seem to be in the page cache. Raises DamageError."""
        self._reader.check_inside(rows)
        shards, lengths = rows["shard"].astype(np.int64), rows["length"].astype(np.int64)
        starts = rows["offset"].astype(np.int64)
        first = self._first_piece[shards] + (starts >> _PIECE_BITS)
        last = self._first_piece[shards] + ((starts + np.maximum(lengths, 1) - 1) >> _PIECE_BITS)
        pieces = np.concatenate([first, last])
        missing = np.unique(pieces[~self._whole[pieces]])
        # Threads whose first batches touch the same pieces begin in different places, and so share the work.
        for piece in np.roll(missing, threading.get_ident() >> 12).tolist():
            self._read_piece(piece)
        is_read = self._whole[first] & self._whole[last] & (last - first < 2)
        for at in np.flatnonzero(~is_read).tolist():
            self._populate(int(addresses[at]), int(lengths[at]), int(shards[at]))

    def _read_piece(self, piece: int) -> None:
        """Read a piece of a map if some of its bytes, spread over it, are in the page cache."""
        reader = self._reader
        shard = int(np.searchsorted(self._first_piece, piece, "right")) - 1
        start = (piece - int(self._first_piece[shard])) << _PIECE_BITS
        length = min(_PIECE, reader.shards[shard].bytes - start)
        probes = range(start, start + length, max(1, length // _PROBES))
        if self._whole[piece] or self._bases[shard] <= 0:
            return
        if all(reader.is_in_memory(shard, place) for place in probes):
            self._populate(int(self._bases[shard]) + start, length, shard)
            self._whole[piece] = True

    def _populate(self, start: int, length: int, shard: int) -> None:
        first = start & -mmap.PAGESIZE
        if not populate(first, start + length - first):
            name = self._reader.shards[shard].name
            raise DamageError(f"Shard {name} cannot be read: the disk or the network returned an error")


def _bytes_at(start: int, length: int) -> npt.NDArray[np.uint8]:
    memory: Any = (ctypes.c_ubyte * length).from_address(start)
    found: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    found.flags.writeable = False
    return found


def _map_file(number: int, size: int) -> int:
    """Return the address of a shared, read-only map of an open file; 0 where there is none."""
    start: int | None = libc.mmap(
        None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, number, ctypes.c_long(0)
    )
    return 0 if start == _FAILED or start is None else start
