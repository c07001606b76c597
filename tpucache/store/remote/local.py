"""LocalCopy: the local copy of a cache at a URL: sparse files with the shards' names, filled piece by piece.

An unwritten part of a sparse file reads as zeros without an error, and other programs may remove, replace or truncate a
file at any time. So each process compares each record with its checksum before its first use, and again unless the
shard's file keeps its inode, size and times. While a file changes, on a network file system, and if other users may
write to the file, records are compared at every read.

The file `state` has one byte per piece. A piece with a wrong record is fetched again. Processes of one machine share
the folder: the one that holds the lock of a piece fetches it, and locks end with their process. No piece is removed. If
`state` is missing or does not fit, the shards' files are removed when the folder is opened. Links in the folder are not
followed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import operator
import os
import shutil
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, StoreError
from tpucache.native import file_system
from tpucache.store.cache import Cache
from tpucache.store.fields import CHUNK_BYTES, usual_bytes
from tpucache.store.files import OpenFile, OpenFolder, ThreadLock, refuse_too_many_files
from tpucache.store.index import Numbers, Rows
from tpucache.store.lock import flock, lock_byte, unlock_byte

PIECE_BYTES: Final = 4 << 20
_GAP_BYTES: Final = 192 << 10  # between two records that are read alone, by one request
#: The most bytes per record that a shard may have beyond the records: unused ends of pages, and LMDB's own pages.
_SLACK_BYTES: Final = 64 << 10
_MOST_TABLES: Final = 256


class Piece(NamedTuple):
    """Whole records of a shard, in its bytes from `start` to `stop`, in the order of their offsets.

    `numbers` has the index row numbers of the records, and `rows` their index rows.
    """

    shard: int
    start: int
    stop: int
    numbers: Numbers
    rows: Rows


class Pieces:
    """The pieces of a cache, numbered from 0, shard by shard in the manifest's order.

    The manifest alone numbers them. They divide the chunks of a block order, which then need no records of others.
    """

    def __init__(self, cache: Cache, piece_bytes: int | None = None) -> None:
        manifest = cache.manifest
        self.cache, self.shards = cache, manifest.shards
        most = PIECE_BYTES if piece_bytes is None else piece_bytes
        chunk = max(1, CHUNK_BYTES // usual_bytes(manifest.fields))
        size = chunk * max(1, manifest.total_bytes) / max(1, manifest.records)
        parts, length = min(chunk, max(1, round(size / most))), chunk * max(1, round(most / size))
        #: For each shard, the places in it where pieces begin, and its end.
        self._edges = [
            np.flatnonzero(np.diff((np.arange(each.records) + each.first) * parts // length, prepend=-1, append=-2))
            for each in self.shards
        ]
        self._first = np.cumsum([0, *(len(edges) - 1 for edges in self._edges)])
        #: The bytes that each piece counts for: records of a shard have equal shares of its file.
        self.bytes = np.concatenate(
            [
                np.diff(edges * each.bytes // max(1, each.records))
                for edges, each in zip(self._edges, self.shards, strict=True)
            ]
        )
        self._table = functools.lru_cache(_MOST_TABLES)(functools.partial(_records_of, cache))

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, piece: int) -> Piece:
        shard = int(np.searchsorted(self._first, piece, "right")) - 1
        rows, numbers = self._table(shard)
        own = slice(*self._edges[shard][piece - self._first[shard] :][:2])
        rows, numbers = rows[own], numbers[own]
        start, stop = int(rows["offset"][0]), int((rows["offset"] + rows["length"]).max())
        self._check(shard, start, stop, rows)
        return Piece(shard, start, stop, numbers, rows)

    def parts(self, number: int, wanted: Numbers) -> Iterator[Piece]:
        """Yield the parts of a piece with the records `wanted`; records that are close to each other share a part."""
        shard, _, _, numbers, rows = self[number]
        at = np.flatnonzero(np.isin(numbers, wanted))
        starts = rows["offset"].astype(np.int64)
        stops = starts + rows["length"]
        for near in np.split(at, np.flatnonzero(starts[at[1:]] - stops[at[:-1]] > _GAP_BYTES) + 1):
            part = slice(near[0], near[-1] + 1)
            yield Piece(shard, int(starts[near[0]]), int(stops[near[-1]]), numbers[part], rows[part])

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
            pieces[chosen] = self._first[shard] + np.searchsorted(self._edges[shard], at, "right") - 1
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


STATE_NAME: Final = "state"

_HEADER: Final = 4096
_MAGIC: Final = b"tpucache local copy 4\n"
_PATIENCE: Final = 20.0  # seconds to wait for a lock that other processes hold only briefly
# A piece's byte: there is nothing of it, space on the disk is reserved for it, or it was written.
_NOTHING, _RESERVED, _WRITTEN = 0, 1, 2
_MOST_OPEN: Final = 256  # files
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHARE: Final = 0.8  # the fraction of the free disk that is used by default
#: Two changes within one tick of a file system's clock get the same time. The longest tick of any file system is 2 s.
_TICK_NS: Final = 2_000_000_000
#: File systems whose files only this machine changes, so that `fstat` shows each change at once (`man 2 statfs`).
LOCAL_FILE_SYSTEMS: Final = {
    0xEF53,  # ext2, ext3, ext4
    0x58465342,  # XFS
    0x9123683E,  # Btrfs
    0xF2F52010,  # F2FS
    0x2FC12FC1,  # ZFS
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
}

Bools = npt.NDArray[np.bool_]

_log: Final = logging.getLogger("tpucache")


_OF_FILE: Final = operator.attrgetter(
    "st_dev", "st_ino", "st_nlink", "st_uid", "st_mode", "st_size", "st_mtime_ns", "st_ctime_ns"
)


class Moment(NamedTuple):
    """The status of an open file. Once the status `is_settled`, every change of the file alters it."""

    device: int
    inode: int
    links: int
    owner: int
    mode: int
    bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: OpenFile) -> Moment:
        return cls(*_OF_FILE(os.fstat(file.number)))

    @property
    def is_settled(self) -> bool:
        """Whether every later change of the file is certain to alter this status, on a local file system.

        It is so if only this user may write the file, it has a single name, and its last change was two seconds ago.
        """
        is_own = self.owner == os.geteuid() and not self.mode & (stat.S_IWGRP | stat.S_IWOTH)
        return is_own and self.links == 1 and self.changed_ns + _TICK_NS < time.time_ns()


class LocalCopy:
    """The local folder of a cache at a URL. Threads may share a LocalCopy; a forked process must make its own."""

    def __init__(self, directory: Path, pieces: Pieces, most_bytes: int | None) -> None:
        """Open the folder. It keeps at most `most_bytes` of shards (None: 80 % of the free disk)."""
        self.directory, self._pieces = directory, pieces
        self._files: OrderedDict[int, _SparseFile] = OrderedDict()
        self._lock, self._files_lock = ThreadLock(), ThreadLock()
        self.is_full = self._has_warned = False
        self._state = np.zeros(len(pieces), np.uint8)  # may lag behind what other processes wrote
        records = pieces.cache.manifest.records
        self._proven = np.zeros(records, np.bool_)  # records that this process compared with their checksums
        self._moments: dict[int, Moment] = {}  # the status of a shard's file when its records were proven
        try:
            self._folder = OpenFolder(directory)
            self._file = OpenFile.of(self._folder.open(STATE_NAME, os.O_RDWR | os.O_CREAT))
            if not flock(self._file.number, is_shared=True):  # while it is open, nobody removes the folder
                raise BlockingIOError(errno.EWOULDBLOCK, "it is being removed")
            self._is_local = file_system(self._file.number) in LOCAL_FILE_SYSTEMS
            with self._locked_header():
                self._prepare()
        except OSError as error:
            raise StoreError(
                f"{directory} cannot keep what is read from the URL: {error}. Give another folder as cache_dir"
            ) from error
        free = shutil.disk_usage(directory).free
        self._most = int(_SHARE * (free + self._taken())) if most_bytes is None else most_bytes

    def _taken(self) -> int:
        return int(self._pieces.bytes[self._look() > _NOTHING].sum())

    def has(self, pieces: Numbers) -> Bools:
        """Return which of these pieces are in this folder: bool (n,). They need no fetching, but may be damaged."""
        found: Bools = self._state[pieces] == _WRITTEN
        return found if found.all() else self._look()[pieces] == _WRITTEN

    def are_proven(self, shard: int, numbers: Numbers, now: Moment) -> Bools:
        """Return which records of a shard this process has compared with their checksums, if its file still has the
        status `now`.

        The caller must compare this status again after it has read the records: if it differs, they may be wrong.
        """
        with self._files_lock:
            if self._moments.get(shard) == now:
                return self._proven[numbers]
        return np.zeros(len(numbers), np.bool_)

    def moment(self, shard: int) -> Moment:
        """Return the status of a shard's file, which is opened again if it was removed or has another size."""
        file = self.file(shard)
        found = Moment.of(file)
        if found.links and found.bytes == file.bytes:
            return found
        self._renew(shard)
        return Moment.of(self.file(shard))

    def note_compared(self, shard: int, numbers: Numbers, pieces: Numbers, is_right: Bools, before: Moment) -> None:
        if self._is_local and before.is_settled:
            with self._files_lock:
                if self._moments.get(shard) != before:
                    self._moments[shard] = before
                    self._proven[self._records_of(shard)] = False
                self._proven[numbers[is_right]] = True
        self._forget(pieces[~is_right])

    def make_room(self, piece: int) -> bool:
        """Reserve space for a piece if the limit of bytes allows it. Returns whether the piece has space now."""
        if self._state[piece] > _NOTHING:
            return True
        if self.is_full:
            return False
        try:
            with self._locked_header():
                if self._look()[piece] == _NOTHING:
                    if self._taken() + self._pieces.bytes[piece] > self._most:
                        self.is_full = True
                        return False
                    self._set(piece, _RESERVED)
        except OSError as error:
            self._note_full(error)
            return False
        return True

    def write(self, number: int, piece: Piece, data: memoryview) -> bool:
        try:
            file, at = self._open_file(piece.shard), 0
            if not Moment.of(file).links:  # the file was removed: new data in it would be lost
                self._renew(piece.shard)
                file = self._open_file(piece.shard)
            while at < len(data):
                at += os.pwrite(file.number, data[at:], piece.start + at)
            self._set(number, _WRITTEN)
        except OSError as error:
            self._note_full(error)
            return False
        return True

    def file(self, shard: int) -> _SparseFile:
        try:
            return self._open_file(shard)
        except OSError as error:
            refuse_too_many_files(error)
            raise StoreError(f"{self.directory} cannot be read: {error}. Give another folder as cache_dir") from error

    def lock(self, piece: int) -> bool:
        """Take the lock of a piece without waiting. Returns False if another process has it."""
        return lock_byte(self._file.number, _HEADER + piece)

    def unlock(self, piece: int) -> None:
        unlock_byte(self._file.number, _HEADER + piece)

    def _open_file(self, shard: int) -> _SparseFile:
        with self._files_lock:
            if shard in self._files:
                self._files.move_to_end(shard)
                return self._files[shard]
            entry = self._pieces.shards[shard]
            file = self._files[shard] = _SparseFile(self._folder, entry.name, entry.bytes)
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)  # it is closed when nothing refers to it
            return file

    def _prepare(self) -> None:
        """Read the file `state`. If it is new or does not fit this cache, write an empty state, and remove the shards.

        The caller has locked the header.
        """
        number, size = self._file.number, _HEADER + len(self._state)
        names = os.listdir(self._folder.number)  # noqa: PTH208  # a Path has no open folder
        if os.fstat(number).st_size != size or os.pread(number, len(_MAGIC), 0) != _MAGIC:
            for entry in self._pieces.shards:  # without a state, the contents of these files are unknown
                if entry.name in names:
                    os.unlink(entry.name, dir_fd=self._folder.number)
            os.ftruncate(number, 0)
            os.posix_fallocate(number, 0, size)
            os.pwrite(number, _MAGIC, 0)
            return
        lost = [shard for shard, entry in enumerate(self._pieces.shards) if entry.name not in names]
        pieces = self._pieces.of_shards(np.array(lost, np.int64))
        self._forget(pieces[self._look()[pieces] == _WRITTEN])

    def _look(self) -> npt.NDArray[np.uint8]:
        data = os.pread(self._file.number, len(self._state), _HEADER)
        found = self._state = np.frombuffer(data.ljust(len(self._state), b"\0"), np.uint8).copy()
        return found  # another thread may put what it read before into `_state`

    def _set(self, piece: int, state: int) -> None:
        os.pwrite(self._file.number, bytes([state]), _HEADER + piece)
        self._state[piece] = state

    def _forget(self, pieces: Numbers) -> None:
        for piece in np.unique(pieces).tolist():
            self._set(piece, _RESERVED)

    def _renew(self, shard: int) -> None:
        """Forget a shard's open file, because it was removed or truncated: the next use opens it again."""
        with self._files_lock:
            self._files.pop(shard, None)
            self._moments.pop(shard, None)
            self._proven[self._records_of(shard)] = False

    def _records_of(self, shard: int) -> Numbers:
        return self._pieces.cache.rows_of(self._pieces.shards[shard])

    def _note_full(self, error: OSError) -> None:
        """Keep no more pieces, and log that once. Raises StoreError if an error is not that of a full disk."""
        if error.errno not in _FULL:
            raise StoreError(
                f"{self.directory} cannot be written: {error}. Give another folder as cache_dir"
            ) from error
        with self._lock:
            is_first, self._has_warned, self.is_full = not self._has_warned, True, True
        if is_first:
            _log.warning(
                "%s: %s. Records that are not on this disk yet are read from the URL in every epoch; free some space, "
                "or give another cache_dir",
                self.directory,
                error.strerror,
            )

    @contextlib.contextmanager
    def _locked_header(self) -> Iterator[None]:
        until = time.monotonic() + _PATIENCE
        with self._lock:
            while not lock_byte(self._file.number, 0):
                if time.monotonic() > until:
                    raise StoreError(
                        f"another process has locked {self.directory / STATE_NAME} and does not release it: end that "
                        "process"
                    )
                time.sleep(0.002)
            try:
                yield
            finally:
                unlock_byte(self._file.number, 0)


class _SparseFile(OpenFile):
    """A sparse file of a given size, open for reading and writing. Unwritten parts take no disk space."""

    def __init__(self, folder: OpenFolder, name: str, size: int) -> None:
        self.number = folder.open(name, os.O_RDWR | os.O_CREAT)
        self.bytes = size
        if os.fstat(self.number).st_size != size:  # it is new or was truncated; checksums find missing records
            os.ftruncate(self.number, size)
