"""LocalCopy: what this machine has of a cache at a URL: sparse files with the shards' names, filled record by record.

A part of a sparse file that was not written reads as zeros, without an error. So one byte for each record, in the file
`state`, says whether the record is there, and it is set after the record was written and compared with its checksum.
Processes of one machine share the folder: each piece is fetched by the one that holds its lock. Locks end with their
process. What was written before the machine last started is compared again when it is used, because a power cut may
have lost it. What was kept is given up only for what is needed sooner, and only by a process that has the folder alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import shutil
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import StoreError
from tpucache.native import free_part
from tpucache.store.files import OpenFile, ThreadLock
from tpucache.store.index import Numbers
from tpucache.store.manifest import Manifest
from tpucache.store.remote.pieces import Bools, Pieces, Run
from tpucache.system import fcntl

STATE_NAME: Final = "state"

_HEADER: Final = 4096
_MAGIC: Final = b"tpucache local copy 1\n"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_BOOT_BYTES: Final = 64
_SUM_AT: Final = 128  # bytes of the pieces that there is room for, uint64
_USERS: Final = 1  # the byte that every open copy has locked with others, and one alone that gives pieces up
_PATIENCE: Final = 20.0  # seconds for a lock that is held for a moment
#: A record's byte. What is neither is to be fetched.
_THERE: Final = 1
_UNPROVEN: Final = 2
#: A piece's byte: there is room for it on the disk.
_KEPT: Final = 1
_MOST_OPEN: Final = 64  # files
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHARE: Final = 0.8  # of the free disk that is taken at most, unless the user says how much

_log: Final = logging.getLogger("tpucache")


class LocalCopy:
    """The folder of a cache at a URL on this machine. Threads may share one; a forked process makes another one."""

    def __init__(self, directory: Path, manifest: Manifest, pieces: Pieces, most_bytes: int | None) -> None:
        """Open the folder, which is made if it is not there, to keep at most so many bytes of shards.

        None means all of it where it fits into 80 % of the free disk, else as much as does. Raises StoreError.
        """
        self.directory, self._pieces, self._manifest = directory, pieces, manifest
        self._files: OrderedDict[int, OpenFile] = OrderedDict()
        self._lock, self._files_lock, self._full_lock = ThreadLock(), ThreadLock(), ThreadLock()
        self._held: set[int] = set()  # pieces that this process has the lock of
        self.is_full = self._has_warned = False
        self._gives_up = True  # until the file system cannot free parts of files
        try:
            self._number = os.open(directory / STATE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._number, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as long as it is open, nobody removes the folder
            with self._locked_header():
                _try_lock(self._number, _USERS, fcntl.F_RDLCK)
                size = _HEADER + len(pieces) + manifest.records
                if os.fstat(self._number).st_size != size:
                    os.ftruncate(self._number, 0)
                state = self._map(size)  # all processes see what one writes
                self._sum = state[_SUM_AT : _SUM_AT + 8].view(np.uint64)
                self._kept, self._there = state[_HEADER : _HEADER + len(pieces)], state[_HEADER + len(pieces) :]
                self._prepare(state)
        except OSError as error:
            raise StoreError(
                f"{directory} cannot keep what is read from the URL: {error}. Give another folder as cache_dir"
            ) from error
        free = shutil.disk_usage(directory).free
        self._most = int(_SHARE * (free + self.kept_bytes)) if most_bytes is None else most_bytes

    def __del__(self, close: Any = os.close) -> None:
        if hasattr(self, "_number"):
            close(self._number)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pieces that there is room for."""
        return int(self._sum[0])

    @property
    def has_room_for_all(self) -> bool:
        """Whether all shards may be kept, so that nothing is given up for something else."""
        return not self.is_full and self._most >= sum(entry.bytes for entry in self._manifest.shards)

    @property
    def kept(self) -> Numbers:
        """The pieces that there is room for: int64 (n,)."""
        return np.flatnonzero(self._kept)

    def count(self, records: int) -> int:
        """Return how many of the first so many records are there, and were compared with their checksum."""
        return int(np.count_nonzero(self._there[:records] == _THERE))

    def has(self, numbers: Numbers) -> Bools:
        """Return which records are there and were compared with their checksum: bool (n,)."""
        found: Bools = self._there[numbers] == _THERE
        return found

    def is_unproven(self, numbers: Numbers) -> Bools:
        """Return which records were written before the machine last started: bool (n,)."""
        found: Bools = self._there[numbers] == _UNPROVEN
        return found

    def prove(self, run: Run) -> None:
        """Compare records that were written before the machine last started with their checksums."""
        file = self.file(run.shard)
        for number, row in zip(run.numbers.tolist(), run.rows, strict=True):
            if self._there[number] == _UNPROVEN:
                data = os.pread(file.number, int(row["length"]), int(row["offset"]))
                is_right = len(data) == row["length"] and zlib.crc32(data) == row["crc32"]
                self._there[number] = _THERE if is_right else 0

    def make_room(self, piece: int) -> bool:
        """Return whether a piece may be kept. One that there is room for may be kept until it is given up."""
        if self._kept[piece]:
            return True
        if self.is_full:
            return False
        with self._locked_header():
            return self._make_room(piece)

    def is_alone(self) -> bool:
        """Return whether no other process, and no other dataset of this one, keeps pieces in this folder."""
        with self._locked_header(), self._alone() as is_alone:
            return is_alone

    def replace(self, others: Iterable[int], piece: int) -> bool:
        """Give up as many of some other pieces, in this order, as there is room needed for a piece; return whether.

        Nobody may be reading these others. Nothing is given up where another process may be.
        """
        if not self._gives_up:
            return False
        with self._locked_header(), self._alone() as is_alone:
            if not is_alone:
                return False
            found = iter(others)
            while not self._make_room(piece):
                other = next(found, None)
                if other is None or not self._give_up(other):
                    return False
        return True

    def write(self, run: Run, data: memoryview) -> bool:
        """Write a run whose records were compared with their checksums; return whether there was room on the disk.

        Where there was none, that is logged once, and nothing more is kept. Raises StoreError.
        """
        try:
            file, at = self.file(run.shard), 0
            while at < len(data):
                at += os.pwrite(file.number, data[at:], run.start + at)
        except OSError as error:
            if error.errno not in _FULL:
                raise StoreError(
                    f"{self.directory} cannot be written: {error}. Give another folder as cache_dir"
                ) from error
            self._note_full(error)
            return False
        self._there[run.numbers] = _THERE
        return True

    def file(self, shard: int) -> OpenFile:
        """Return a shard's sparse file, open for reading and writing. Raises OSError, StoreError."""
        with self._files_lock:
            if shard in self._files:
                self._files.move_to_end(shard)
                return self._files[shard]
            entry = self._manifest.shards[shard]
            file = self._files[shard] = _SparseFile(self.directory / entry.name, entry.bytes)
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)  # it is closed once nobody uses it
            return file

    def lock(self, piece: int) -> bool:
        """Take the lock of a piece, without waiting; return whether this thread has it now."""
        with self._lock:
            if piece in self._held or not _try_lock(self._number, _HEADER + piece, fcntl.F_WRLCK):
                return False
            self._held.add(piece)
            return True

    def unlock(self, piece: int) -> None:
        """Give the lock of a piece back."""
        with self._lock:
            self._held.discard(piece)
            _try_lock(self._number, _HEADER + piece, fcntl.F_UNLCK)

    def _map(self, size: int) -> npt.NDArray[np.uint8]:
        """Map the file `state`: uint8 (size,); memory of this process alone where the disk has no room for it."""
        try:
            os.posix_fallocate(self._number, 0, size)  # writing to a map of what the disk has no room for is a SIGBUS
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._note_full(error)
            return np.zeros(size, np.uint8)
        return np.frombuffer(mmap.mmap(self._number, size), np.uint8)

    def _note_full(self, error: OSError) -> None:
        """Keep nothing more, and say so once."""
        with self._full_lock:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _log.warning(
                "%s: %s. What is not kept so far is read from the URL in every epoch; free some space, or give "
                "another cache_dir",
                self.directory,
                error.strerror,
            )
        self.is_full = True

    def _make_room(self, piece: int) -> bool:
        """Count a piece among those that there is room for, if there is; return whether. The header is locked."""
        size = self._pieces.bytes_of(piece)
        if not self._kept[piece]:
            if self.kept_bytes + size > self._most:
                self.is_full = True
                return False
            self._kept[piece] = _KEPT
            self._sum[0] += size
        return True

    def _give_up(self, piece: int) -> bool:
        """Free what a piece takes of the disk; return whether that was possible. The header is locked."""
        run = self._pieces.run(piece)
        before = self._there[run.numbers]
        self._there[run.numbers] = 0  # first: from here on it is a hole
        if not free_part(self.file(run.shard).number, *self._pieces.own_bytes(piece)):
            self._there[run.numbers] = before
            self._gives_up = False
            return False
        self._kept[piece] = 0
        self._sum[0] -= run.stop - run.start
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Lock the folder's users out, if there are none; give whether. The header is locked, so that none can come."""
        is_alone = _try_lock(self._number, _USERS, fcntl.F_WRLCK)
        try:
            yield is_alone
        finally:
            if is_alone:
                _try_lock(self._number, _USERS, fcntl.F_RDLCK)

    def _prepare(self, state: npt.NDArray[np.uint8]) -> None:
        """Note which start of the machine it is, and that what was written before it is unproven."""
        now = _MAGIC + _BOOT.read_bytes().strip()[:_BOOT_BYTES] if _BOOT.exists() else _MAGIC
        if bytes(state[: len(now)]) != now:
            is_other = bytes(state[: len(_MAGIC)]) != _MAGIC
            self._there[self._there != 0] = 0 if is_other else _UNPROVEN
            state[: len(now)] = np.frombuffer(now, np.uint8)

    @contextlib.contextmanager
    def _locked_header(self) -> Iterator[None]:
        """Hold the lock of the folder's header, which every process has for a moment alone. Raises StoreError."""
        until = time.monotonic() + _PATIENCE
        with self._lock:
            while not _try_lock(self._number, 0, fcntl.F_WRLCK):
                if time.monotonic() > until:
                    raise StoreError(
                        f"another process has locked {self.directory / STATE_NAME} and does not go on: end it"
                    )
                time.sleep(0.002)
            try:
                yield
            finally:
                _try_lock(self._number, 0, fcntl.F_UNLCK)


class _SparseFile(OpenFile):
    """A file of a given size, open for reading and writing, whose missing parts take no room."""

    def __init__(self, path: Path, size: int) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        found = os.fstat(self.number).st_size
        if found == 0:
            os.ftruncate(self.number, size)
        elif found != size:
            raise StoreError(f"{path} is {found:,} bytes and not {size:,}: remove its folder, which is filled again")


def _try_lock(number: int, byte: int, kind: int) -> bool:
    """Take or give back the lock of a byte of an open file, without waiting; return whether that was possible.

    The lock belongs to the open file and ends when it is closed. Locks that wait are not used: the system refuses them
    where processes wait for each other in a circle. Raises OSError.
    """
    try:
        fcntl.fcntl(number, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
