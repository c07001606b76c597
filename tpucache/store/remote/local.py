"""LocalCopy: the local copy of a cache at a URL: sparse files with the shards' names, filled record by record.

An unwritten part of a sparse file reads as zeros without an error, and other programs may remove, replace or truncate a
file at any time. So each process compares each record with its checksum before its first use. It need not repeat that
as long as the shard's file keeps its inode, size and times. While a file changes, on a network file system, and if
other users may write to the file, records are compared at every read.

The file `state` has one byte per record, which is 1 if the record was fetched. A record with a wrong checksum is
fetched again. Processes of one machine share the folder: the process that holds the lock of a piece fetches it, and
locks end with their process. A piece is removed only to make room for a piece that is needed sooner, only by a process
that uses the folder alone, and never while this process reads it. If the file `state` is missing or does not fit, the
shards' files are removed when the folder is opened. Links in the folder are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import shutil
import stat
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from tpucache.errors import StoreError
from tpucache.native import file_system, free_part
from tpucache.store.files import OpenFile, OpenFolder, ThreadLock, refuse_too_many_files
from tpucache.store.index import Numbers, Rows
from tpucache.store.lock import flock, lock_byte, unlock_byte
from tpucache.store.manifest import Manifest
from tpucache.store.remote.pieces import Bools, Pieces, RecordRun

STATE_NAME: Final = "state"

_HEADER: Final = 4096
_MAGIC: Final = b"tpucache local copy 1\n"
_SUM_AT: Final = 128  # the offset of the total size of all kept pieces, uint64
_USERS: Final = 1  # the byte on which every LocalCopy holds a shared lock; removing pieces needs an exclusive lock
_PATIENCE: Final = 20.0  # seconds to wait for a lock that other processes hold only briefly
_KEPT: Final = 1  # a piece's byte: space on the disk is reserved for it
_THERE: Final = 1  # a record's byte: it was written
_BLOCK: Final = 4096  # bytes of the state per read
_MOST_OPEN: Final = 256  # files
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COUNT_PAUSE: Final = 100  # a count of the records is valid for this many times the processor time that it took
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
        """Return the status of an open file. Raises OSError."""
        return cls(*_OF_FILE(os.fstat(file.number)))

    @property
    def is_settled(self) -> bool:
        """Whether every later change of the file is certain to alter this status.

        It is so if only this user may write the file, the file has a single name (no other hard links), and its last
        change is more than two seconds old: two changes within one tick of the file system's clock get the same time.
        The caller must check that the file system is local; others may show a change late.
        """
        is_own = self.owner == os.geteuid() and not self.mode & (stat.S_IWGRP | stat.S_IWOTH)
        return is_own and self.links == 1 and self.changed_ns + _TICK_NS < time.time_ns()


class LocalCopy:
    """The local folder of a cache at a URL. Threads may share a LocalCopy; a forked process must make its own."""

    def __init__(self, directory: Path, manifest: Manifest, pieces: Pieces, most_bytes: int | None) -> None:
        """Open the folder. It keeps at most `most_bytes` of shards (None: 80 % of the free disk). Raises StoreError."""
        self.directory, self._pieces, self._manifest = directory, pieces, manifest
        self._files: OrderedDict[int, _SparseFile] = OrderedDict()
        self._lock, self._files_lock, self._full_lock = ThreadLock(), ThreadLock(), ThreadLock()
        self._held: set[int] = set()  # pieces whose locks this process holds
        self._stay_lock = ThreadLock()  # guards `_pinned` and `_whole`, which keep pieces from being removed
        self._pinned: Counter[int] = Counter()  # the number of running reads of each piece
        self._whole: set[int] = set()  # shards that are complete and whose pieces are not removed
        self._counted = (-1.0, 0, 0)  # when `count` counts again, its last argument and its last result
        self.is_full = self._has_warned = False
        self._can_remove = True  # False once the file system turns out not to free parts of files
        self._is_shared = True  # False if the disk has no room for the state
        self._kept, self._sum = np.zeros(len(pieces), np.uint8), 0
        self._there = np.zeros(manifest.records, np.bool_)  # may lag behind what other processes wrote
        self._proven = np.zeros(manifest.records, np.bool_)  # records that this process compared with their checksums
        self._moments: dict[int, Moment] = {}  # the status of a shard's file when its records were proven
        try:
            self._folder = OpenFolder(directory)
            self._state = OpenFile.of(self._folder.open(STATE_NAME, os.O_RDWR | os.O_CREAT))
            if not flock(self._number, is_shared=True):  # while it is open, nobody removes the folder
                raise BlockingIOError(errno.EWOULDBLOCK, "it is being removed")
            self._is_local = file_system(self._number) in LOCAL_FILE_SYSTEMS
            with self._locked_header():
                self._prepare(is_alone=lock_byte(self._number, _USERS))
                lock_byte(self._number, _USERS, is_shared=True)
        except OSError as error:
            raise StoreError(
                f"{directory} cannot keep what is read from the URL: {error}. Give another folder as cache_dir"
            ) from error
        free = shutil.disk_usage(directory).free
        self._most = int(_SHARE * (free + self.kept_bytes)) if most_bytes is None else most_bytes

    @property
    def _number(self) -> int:
        return self._state.number

    @property
    def kept_bytes(self) -> int:
        """The total size of the kept pieces in bytes."""
        return self._sum

    @property
    def has_room_for_all(self) -> bool:
        """Whether there is room for all shards, so that no piece has to be removed."""
        return not self.is_full and self._most >= sum(entry.bytes for entry in self._manifest.shards)

    @property
    def kept(self) -> Numbers:
        """The numbers of the kept pieces: int64 (n,)."""
        return np.flatnonzero(self._kept)

    def count(self, records: int) -> int:
        """Return how many of the first `records` records this folder has. The answer may be a moment old."""
        until, counted, found = self._counted
        if (now := time.monotonic()) >= until or counted != records:
            began = time.thread_time()  # while other threads run, this one takes no more of the processor
            self._look_up(np.flatnonzero(~self._there[:records]))
            found = int(np.count_nonzero(self._there[:records]))
            self._counted = now + _COUNT_PAUSE * (time.thread_time() - began), records, found
        return found

    def has(self, numbers: Numbers) -> Bools:
        """Return which of these records are in this folder: bool (n,). They need no fetching, but may be damaged."""
        found: Bools = self._there[numbers]
        if not found.all():
            self._look_up(numbers[~found])
            found = self._there[numbers]
        return found

    def proven_since(self, shard: int, numbers: Numbers) -> tuple[Bools, Moment | None]:
        """Return which records of a shard are proven, bool (n,), and the file's status when they were proven.

        A record is proven if this process has compared it with its checksum, and the file has not changed since then.
        After reading records, the caller must compare this status with the present one: if they differ, the records may
        be wrong. The status is None if no record is proven. Raises OSError, StoreError.
        """
        if shard in self._moments:
            now = Moment.of(self.file(shard))
            with self._files_lock:
                if self._moments.get(shard) == now:
                    return self._proven[numbers], now
        return np.zeros(len(numbers), np.bool_), None

    def read(self, shard: int, numbers: Numbers, rows: Rows) -> list[bytes | None]:
        """Read records of a shard and compare them with their checksums. Wrong records are None in the result.

        The pieces of wrong records will be fetched again. Raises OSError, StoreError.
        """
        before, file = self.moment(shard), self.file(shard)
        found: list[bytes | None] = []
        for offset, length, crc32 in rows[["offset", "length", "crc32"]].tolist():
            data = os.pread(file.number, length, offset)
            found.append(data if len(data) == length and zlib.crc32(data) == crc32 else None)
        self.note_compared(shard, numbers, rows, np.array([data is not None for data in found]), before)
        return found

    def moment(self, shard: int) -> Moment:
        """Return the status of a shard's file, which is opened again if it was removed or has another size.

        Raises OSError, StoreError.
        """
        file = self.file(shard)
        found = Moment.of(file)
        if found.links and found.bytes == file.bytes:
            return found
        self._renew(shard)
        return Moment.of(self.file(shard))

    def note_compared(self, shard: int, numbers: Numbers, rows: Rows, is_right: Bools, before: Moment) -> None:
        """Note which records of a shard had the right checksum (`is_right`, bool) when they were read from its file.

        `before` is the file's status before the reading. Right records need not be compared again, unless the file is
        on a network file system, or `before.is_settled` is false. The pieces of wrong records will be fetched again.
        """
        if self._is_local and before.is_settled:
            with self._files_lock:
                if self._moments.get(shard) != before:
                    self._moments[shard] = before
                    self._proven[self._pieces.cache.rows_of(self._manifest.shards[shard])] = False
                self._proven[numbers[is_right]] = True
        if not is_right.all():
            self._forget_pieces(numbers[~is_right], rows[~is_right])

    def make_room(self, piece: int) -> bool:
        """Count a piece as kept if the limit of bytes allows it. Returns whether the piece is kept now."""
        if self._kept[piece]:
            return True
        if self.is_full:
            return False
        with self._locked_header():
            return self._make_room(piece)

    def is_alone(self) -> bool:
        """Return whether this object alone uses the folder: no other process, and no other dataset of this process."""
        with self._locked_header(), self._alone() as is_alone:
            return is_alone

    def replace(self, others: Sequence[int], piece: int) -> bool:
        """Remove pieces of `others`, from the first on, until `piece` has space. Returns whether it has space now.

        Pieces that `pinned` or `stays_whole` protects are skipped. Nothing is removed if another process uses the
        folder, or if the file system cannot free parts of files.
        """
        if not self._can_remove:
            return False
        with self._locked_header(), self._alone() as is_alone:
            if not is_alone:
                return False
            left = iter(others)
            while not self._make_room(piece):
                other = next(left, None)
                if other is None:
                    return False
                with self._stay_lock:  # no thread begins to read it meanwhile
                    if not (self._pinned[other] or self._pieces.shard_of(other) in self._whole or self._remove(other)):
                        return False
        return True

    @contextlib.contextmanager
    def pinned(self, pieces: Numbers) -> Iterator[None]:
        """Keep `pieces`, which are piece numbers, from being removed while the `with` block runs."""
        unique = np.unique(pieces).tolist()
        with self._stay_lock:
            self._pinned.update(unique)
        try:
            yield
        finally:
            with self._stay_lock:
                self._pinned.subtract(unique)

    def stays_whole(self, shard: int) -> bool:
        """Return whether this folder has all records of a shard, and will not remove any of them from now on."""
        if not self.has_room_for_all:
            return False
        numbers = self._pieces.cache.rows_of(self._manifest.shards[shard])
        with self._stay_lock:
            if self.has(numbers).all():
                self._whole.add(shard)
            return shard in self._whole

    def write(self, run: RecordRun, data: memoryview) -> bool:
        """Write the bytes `data` of a run into its shard's file. Returns False if the disk is full.

        The records must have been compared with their checksums. A full disk is logged once, and no more pieces are
        kept. Raises StoreError.
        """
        try:
            file, at = self._open_file(run.shard), 0
            if not Moment.of(file).links:  # the file was removed: new data in it would be lost
                self._renew(run.shard)
                file = self._open_file(run.shard)
            while at < len(data):
                at += os.pwrite(file.number, data[at:], run.start + at)
        except OSError as error:
            if error.errno not in _FULL:
                raise StoreError(
                    f"{self.directory} cannot be written: {error}. Give another folder as cache_dir"
                ) from error
            self._note_full(error)
            return False
        self._note(run.numbers, is_there=True)
        return True

    def file(self, shard: int) -> _SparseFile:
        """Open a shard's sparse file for reading and writing. Raises StoreError."""
        try:
            return self._open_file(shard)
        except OSError as error:
            refuse_too_many_files(error)
            raise StoreError(f"{self.directory} cannot be read: {error}. Give another folder as cache_dir") from error

    def _open_file(self, shard: int) -> _SparseFile:
        with self._files_lock:
            if shard in self._files:
                self._files.move_to_end(shard)
                return self._files[shard]
            entry = self._manifest.shards[shard]
            file = self._files[shard] = _SparseFile(self._folder, entry.name, entry.bytes)
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)  # it is closed when nothing refers to it
            return file

    def lock(self, piece: int) -> bool:
        """Take the lock of a piece without waiting. Returns whether this thread holds it now."""
        with self._lock:
            if piece in self._held or not lock_byte(self._number, _HEADER + piece):
                return False
            self._held.add(piece)
            return True

    def unlock(self, piece: int) -> None:
        """Release the lock of a piece."""
        with self._lock:
            self._held.discard(piece)
            unlock_byte(self._number, _HEADER + piece)

    def _prepare(self, *, is_alone: bool) -> None:
        """Read the file `state`. If it is new or does not fit this cache, write an empty state. Raises OSError.

        Without a usable state, the shards' files are removed if `is_alone`. The caller has locked the header.
        """
        size = _HEADER + len(self._kept) + len(self._there)
        is_right = os.fstat(self._number).st_size == size and os.pread(self._number, len(_MAGIC), 0) == _MAGIC
        names = {each.name for each in os.scandir(self._folder.number)}
        if not is_right:
            if is_alone:  # without a state, the contents of these files are unknown
                for entry in self._manifest.shards:
                    if entry.name in names:
                        os.unlink(entry.name, dir_fd=self._folder.number)
            os.ftruncate(self._number, 0)
        try:
            os.posix_fallocate(self._number, 0, size)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._note_full(error)
            self._is_shared = False
            return
        if not is_right:
            os.pwrite(self._number, _MAGIC, 0)
            return
        self._read_kept()
        self._look_up(np.arange(len(self._there)))
        if self._there.any():
            for entry in self._manifest.shards:
                if entry.name not in names:
                    numbers = self._pieces.cache.rows_of(entry)
                    if self._there[numbers].any():
                        self._note(numbers, is_there=False)

    def _read_kept(self) -> None:
        """Read which pieces are kept, and their total size: another process may have changed both."""
        if self._is_shared:
            data = os.pread(self._number, len(self._kept), _HEADER)
            self._kept[: len(data)] = np.frombuffer(data, np.uint8)
            self._sum = int.from_bytes(os.pread(self._number, 8, _SUM_AT), "little")

    def _write_kept(self, piece: int, *, is_kept: bool, change: int) -> None:
        """Record in the file `state` whether a piece is kept, and add `change` bytes to the total size there.

        The caller has locked the header.
        """
        self._kept[piece] = _KEPT * is_kept
        self._sum = max(0, self._sum + change)
        self._write(self._kept[piece : piece + 1].tobytes(), _HEADER + piece)
        self._write(self._sum.to_bytes(8, "little"), _SUM_AT)

    def _look_up(self, numbers: Numbers) -> None:
        """Look up in the file `state` which of these records other processes have written."""
        if not self._is_shared:
            return
        start = _HEADER + len(self._kept)
        for block in np.unique(numbers // _BLOCK).tolist():
            data = os.pread(self._number, min(_BLOCK, len(self._there) - block * _BLOCK), start + block * _BLOCK)
            self._there[block * _BLOCK : block * _BLOCK + len(data)] |= np.frombuffer(data, np.uint8) == _THERE

    def _note(self, numbers: Numbers, *, is_there: bool) -> None:
        """Record in the file `state` whether this folder has these records."""
        edges = np.flatnonzero(np.diff(ordered := np.sort(numbers)) != 1) + 1
        for part in np.split(ordered, edges):
            self._write(bytes([_THERE * is_there]) * len(part), _HEADER + len(self._kept) + int(part[0]))
        self._there[numbers] = is_there

    def _write(self, data: bytes, start: int) -> None:
        """Write into the file `state`, unless the disk has no room for it."""
        if not self._is_shared:
            return
        try:
            os.pwrite(self._number, data, start)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._is_shared = False
            self._note_full(error)

    def _forget_pieces(self, numbers: Numbers, rows: Rows) -> None:
        for piece in np.unique(self._pieces.of(rows)[1]).tolist():
            self._note(self._pieces.run(piece).numbers, is_there=False)
        self._note(numbers, is_there=False)

    def _renew(self, shard: int) -> None:
        """Forget a shard's open file, because the file was removed or truncated: the next use opens it again."""
        with self._files_lock:
            self._files.pop(shard, None)
            self._moments.pop(shard, None)
            self._proven[self._pieces.cache.rows_of(self._manifest.shards[shard])] = False

    def _note_full(self, error: OSError) -> None:
        """Keep no more pieces, and log that once."""
        with self._full_lock:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _log.warning(
                "%s: %s. Records that are not on this disk yet are read from the URL in every epoch; free some space, "
                "or give another cache_dir",
                self.directory,
                error.strerror,
            )
        self.is_full = True

    def _make_room(self, piece: int) -> bool:
        """Count a piece as kept, and return True. If the limit of bytes forbids it, set `is_full`, and return False.

        The caller has locked the header of the file `state`.
        """
        size = self._pieces.bytes_of(piece)
        if not self._kept[piece]:
            if self.kept_bytes + size > self._most:
                self.is_full = True
                return False
            self._write_kept(piece, is_kept=True, change=size)
        return True

    def _remove(self, piece: int) -> bool:
        """Remove a piece from the disk. Returns False if the file system cannot free parts of files.

        The caller has locked the header of the file `state`.
        """
        run = self._pieces.run(piece)
        there = run.numbers[self._there[run.numbers]]
        self._note(run.numbers, is_there=False)  # first, because the space is about to become a hole
        if not free_part(self.file(run.shard).number, *self._pieces.own_bytes(piece)):
            self._note(there, is_there=True)
            self._can_remove = False
            return False
        self._write_kept(piece, is_kept=False, change=run.start - run.stop)
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Take the folder for this object alone, if nothing else uses it. The context returns whether that worked.

        The caller has locked the header, so that no other process can begin to use the folder.
        """
        is_alone = lock_byte(self._number, _USERS)
        try:
            yield is_alone
        finally:
            if is_alone:
                lock_byte(self._number, _USERS, is_shared=True)

    @contextlib.contextmanager
    def _locked_header(self) -> Iterator[None]:
        """Lock and read the header of the file `state`. Each process holds the lock only briefly. Raises StoreError."""
        until = time.monotonic() + _PATIENCE
        with self._lock:
            while not lock_byte(self._number, 0):
                if time.monotonic() > until:
                    raise StoreError(
                        f"another process has locked {self.directory / STATE_NAME} and does not release it: end that "
                        "process"
                    )
                time.sleep(0.002)
            try:
                self._read_kept()
                yield
            finally:
                unlock_byte(self._number, 0)


class _SparseFile(OpenFile):
    """A sparse file of a given size, open for reading and writing. Unwritten parts take no disk space."""

    def __init__(self, folder: OpenFolder, name: str, size: int) -> None:
        self.number = folder.open(name, os.O_RDWR | os.O_CREAT)
        self.bytes = size
        if os.fstat(self.number).st_size != size:  # it is new or was truncated; checksums find missing records
            os.ftruncate(self.number, size)
