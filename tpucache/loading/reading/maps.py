"""Maps shards into memory where no program can truncate them.

Copying records from a map is as fast as from private memory, and the page cache is the only copy. But reading a mapped
page of a file that was truncated kills the process. So a shard is mapped only on a file system that is mounted
read-only, as a sealed memory file, or under a read lease. All other shards are read with `pread`.

Linux lets the owner of a file take a read lease on it (`man 2 fcntl`, "Leases"). A program that then truncates the file
or opens it for writing waits until the lease is released, or for /proc/sys/fs/lease-break-time seconds, 45 by default.
One thread of this process asks the kernel a few times per second whether a program waits. If so, no new read of that
map begins; when the running reads are done, the file is unmapped and the lease released. Unlinking or renaming a file
needs no lease and does not harm its map.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import queue
import resource
import signal
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tpucache import machine
from tpucache.errors import DamageError
from tpucache.loading.reading.memory import BUDGET
from tpucache.native import Addresses, can_populate, file_system, libc, map_file, populate
from tpucache.store.ahead import Threads, say_no_thread
from tpucache.store.files import ThreadLock, open_regular
from tpucache.store.index import Numbers, Rows
from tpucache.store.reader import ShardReader

#: The reasons why a file is not mapped under a lease.
Reason = Literal[
    "other_owner", "open_for_writing", "not_local", "too_many_files", "no_leases", "no_thread", "given_back"
]

#: The reasons in words.
REASONS: Final[dict[Reason, str]] = {
    "other_owner": "another user owns the files",
    "open_for_writing": "a program has the files open for writing",
    "not_local": "other machines may be able to change files on this file system",
    "too_many_files": "this process may open too few files",
    "no_leases": "this system gives no read leases",
    "no_thread": "no thread can be started that watches read leases",
    "given_back": "a program wanted to change the files",
}

_EVERY: Final = 0.2  # seconds between two checks of all leases
_SOON: Final = 0.005  # the same, while a map waits for its last read to end
_FRESH: Final = 5.0  # seconds; if the last check is older, a thread checks the leases itself before it reads a map
_LEAST_BREAK_SECONDS: Final = 4 * _FRESH  # the kernel must wait this long, so that a batch can be copied after a check
_SHARE: Final = (
    2  # leases use at most half of the files that may be open; maps beyond half of the free memory are evicted
)
#: File systems that no other machine can change, by `struct statfs.f_type` (`man 2 statfs`).
_LOCAL: Final = {
    0xEF53,  # ext2, ext3, ext4
    0x58465342,  # XFS
    0x9123683E,  # Btrfs
    0xF2F52010,  # F2FS
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
}
_BREAK_TIME: Final = Path("/proc/sys/fs/lease-break-time")
_DONT_FORK: Final = 10  # MADV_DONTFORK

_REASON_OF: Final[dict[int, Reason]] = {
    errno.EACCES: "other_owner",
    errno.EPERM: "other_owner",
    errno.EAGAIN: "open_for_writing",
    errno.EMFILE: "too_many_files",
    errno.ENFILE: "too_many_files",
}


class NoLeaseError(Exception):
    """A file cannot be mapped under a lease. This error is handled internally."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(REASONS[reason])
        self.reason = reason


class MapUse:
    """Marks a part of the code in which a thread reads memory maps: `with MapUse(uses): ...`.

    Meanwhile the MapUse is a key of `uses`. A map is unmapped only when no MapUse is left that may read it.
    """

    __slots__ = ("_uses",)

    def __init__(self, uses: dict[MapUse, None]) -> None:
        self._uses = uses

    def __enter__(self) -> None:
        self._uses[self] = None

    def __exit__(self, *_: object) -> None:
        self._uses.pop(self, None)

    @property
    def is_over(self) -> bool:
        """Whether the `with` block has ended. This is also True before the block has begun."""
        return self not in self._uses


class LeasedMap:
    """A map of a whole file, the lease that protects it, and the descriptor to which the lease belongs.

    All three end when the owner is freed, or when another program wants to change the file. Any thread may call the
    owner's `stop_reading(shard)`, which returns the uses that may still read the map, and `forget_maps()`, in a forked
    process, which does not inherit the map. It closes the inherited descriptor, which does not affect its parent's
    lease, and maps files itself.
    """

    def __init__(self, path: Path, original: int, owner: Any, shard: int) -> None:
        if not has_leases() or file_system(original) not in _LOCAL:
            raise NoLeaseError("not_local" if has_leases() else "no_leases")
        if len(WATCH.maps) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE:
            raise NoLeaseError("too_many_files")
        self.owner, self.shard = weakref.ref(owner), shard
        self.base = self.size = 0
        self.is_taken = False
        try:
            # A new descriptor, because a lease belongs to an open file, which forked processes share.
            self.number = open_regular(path)
            try:
                WATCH.add(self)
                self._take(os.fstat(original))
            except BaseException:
                self.end()
                raise
        except OSError as error:
            raise NoLeaseError(_REASON_OF.get(error.errno or 0, "no_leases")) from error
        # Not at exit: a thread may still be copying. The kernel cleans up.
        weakref.finalize(owner, self.end).atexit = False

    def _take(self, original: os.stat_result) -> None:
        fcntl = machine.fcntl
        # By default the kernel would send a signal that ends the process. SIGURG is ignored by default, and without an
        # owner no signal is sent. Taking the lease sets the owner, so it is unset afterwards.
        fcntl.fcntl(self.number, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(self.number, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(self.number, fcntl.F_SETOWN, 0)
        found = os.fstat(self.number)
        if (found.st_dev, found.st_ino, found.st_size) != (original.st_dev, original.st_ino, original.st_size):
            raise NoLeaseError("given_back")  # replaced or truncated meanwhile
        self.size = found.st_size
        self.base = map_file(self.number, self.size)
        if not self.base:
            raise NoLeaseError("no_leases")
        if libc.madvise(ctypes.c_void_p(self.base), ctypes.c_size_t(self.size), _DONT_FORK):
            raise NoLeaseError("no_leases")
        self.is_taken = True  # from now on, the watching thread may end it
        if not self.is_held():
            raise NoLeaseError("given_back")

    def is_held(self) -> bool:
        """Return whether the lease is intact: no program waits to change the file."""
        return bool(_quick_fcntl()(self.number, machine.fcntl.F_GETLEASE) == machine.fcntl.F_RDLCK)

    def end(self) -> None:
        """Unmap the file and release the lease, unless that was done before. No lock is taken: finalizers call this."""
        if not WATCH.remove(self):
            return
        if self.base:
            libc.munmap(ctypes.c_void_p(self.base), ctypes.c_size_t(self.size))
        # Closing alone does not release the lease if another process, such as a forked one, has the descriptor open.
        with contextlib.suppress(OSError):  # the lease may not have been granted
            machine.fcntl.fcntl(self.number, machine.fcntl.F_SETLEASE, machine.fcntl.F_UNLCK)
        with contextlib.suppress(OSError):
            os.close(self.number)


class _Watch:
    """Checks all leases of the process in one thread. The thread ends when no lease is left."""

    def __init__(self) -> None:
        self.maps: dict[LeasedMap, None] = {}
        self.seen = 0.0  # the `time.monotonic()` at which the last check of all leases began
        self._ending: dict[LeasedMap, list[MapUse]] = {}  # maps to be ended, with the uses that may still read them
        self._thread: threading.Thread | None = None
        self._is_paused = False
        self._lock = ThreadLock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # reentrant, because finalizers put into it

    def add(self, leased: LeasedMap) -> None:
        self.maps[leased] = None
        if not self._start():
            raise NoLeaseError("no_thread")

    def remove(self, leased: LeasedMap) -> bool:
        was_watched = self.maps.pop(leased, self) is None
        self._ending.pop(leased, None)
        if was_watched and not self.maps:
            self._wake.put(None)
        return was_watched

    def look(self) -> None:
        now = time.monotonic()
        for leased in list(self.maps):
            if leased.is_taken and leased not in self._ending and not leased.is_held():
                owner = leased.owner()
                self._ending[leased] = [] if owner is None else list(owner.stop_reading(leased.shard))
        self.seen = now

    def pause(self) -> None:
        self._is_paused = True
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.put(None)
            thread.join()

    def resume(self) -> None:
        self._is_paused = False
        if self.maps:
            self._start()

    def forget(self) -> None:
        """Close the descriptors that this forked process inherited."""
        maps = list(self.maps)
        self.__init__()  # type: ignore[misc]  # a new lock, and no thread
        for leased in maps:
            with contextlib.suppress(OSError):
                os.close(leased.number)
            owner = leased.owner()
            if owner is not None:
                owner.forget_maps()

    def _start(self) -> bool:
        """Start the thread, and return whether it runs, or will after a fork."""
        with self._lock:
            if self._thread is None and not self._is_paused:
                self.seen = time.monotonic()
                thread = threading.Thread(target=self._run, name="tpucache-leases", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    say_no_thread()
                    return False
                self._thread = thread
            return True

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=_SOON if self._ending else _EVERY)
            self.look()
            for leased, uses in list(self._ending.items()):
                if all(use.is_over for use in uses):
                    leased.end()
            with self._lock:
                if self._is_paused or not self.maps:
                    self._thread = None
                    return


WATCH: Final = _Watch()
os.register_at_fork(before=WATCH.pause, after_in_parent=WATCH.resume, after_in_child=WATCH.forget)


def look_if_needed() -> None:
    """Check all leases if the watching thread has not done so for a while, because it did not get to run.

    The kernel breaks a lease only some time after a program wanted the file. Until then the map is safe to read.
    """
    if time.monotonic() - WATCH.seen > _FRESH:
        WATCH.look()


def refusal(path: Path, original: int) -> Reason | None:
    """Return why the file at `path`, which the descriptor `original` has open, cannot be leased; None if it can."""
    nobody = _Nobody()
    try:
        LeasedMap(path, original, nobody, 0).end()
    except NoLeaseError as error:
        return error.reason
    return None


class _Nobody:
    def stop_reading(self, shard: int) -> Iterable[MapUse]:
        return ()

    def forget_maps(self) -> None:
        """Do nothing, as the map is never read."""


@functools.cache
def _quick_fcntl() -> Callable[[int, int], int]:
    """Return C's fcntl as a function that does not release the interpreter's lock.

    While other threads compute, getting the lock back takes 5 ms, and one check of all leases may make a thousand
    calls.
    """
    found: Callable[[int, int], int] = ctypes.PyDLL(None).fcntl
    return found


@functools.cache
def has_leases(break_time: Path = _BREAK_TIME) -> bool:
    if not hasattr(machine.fcntl, "F_SETLEASE"):
        return False
    try:
        return int(break_time.read_text()) >= _LEAST_BREAK_SECONDS
    except (OSError, ValueError):
        return False


_UNKNOWN: Final = 0
_NOT_MAPPED: Final = -1
_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 2
_PIECE_BITS: Final = 21  # pages are entered in the page table 2 MiB at a time: a third of the cost of single records
_PIECE: Final = 1 << _PIECE_BITS
_PROBES: Final = 4
PREPARE_SECONDS: Final = 0.5  # in this time two threads map 7 GB of pages, or copy 2 GB into allocated memory

#: How a shard is mapped, or why it is not. "no_maps": the kernel cannot read mapped pages ahead. "being_fetched": the
#: shard comes over a network.
How = Literal["read_only", "lease", "no_maps", "being_fetched"] | Reason
MAPPED: Final = ("read_only", "lease")
#: The methods and reasons of `How` in words, for users.
TEXTS: Final[dict[How, str]] = {
    "read_only": "mapped: no program can truncate it",
    "lease": "mapped under a read lease",
    "no_maps": "read from files: this system cannot read maps ahead",
    "being_fetched": "read from files: the cache comes over a network",
    **{reason: f"read from files: {text}" for reason, text in REASONS.items()},
}


def cannot_shrink(number: int) -> bool:
    """Return whether no program can truncate an open file: a file on a read-only mount, or a sealed memory file."""
    with contextlib.suppress(OSError):  # most file systems have no seals
        if machine.fcntl.fcntl(number, _F_GET_SEALS) & _F_SEAL_SHRINK:
            return True
    return machine.is_read_only(number)


class ShardMaps:
    """Maps of a cache's shards. A shard is mapped when one of its records is first needed.

    Maps take no memory from the budget, because they are the page cache. The pages of a record are read before they are
    touched, so that an unreadable page raises an error. If the neighbouring pages are in the page cache, all of them
    are entered in the page table together. Threads may share one object. Pickled and forked copies start empty.

    Addresses and blocks are valid only inside the block in which they were returned: `with MapUse(maps.uses): ...`.
    """

    def __init__(self, reader: ShardReader, records: int) -> None:
        self._reader = reader
        self._present = np.zeros(records, np.bool_)  # records whose pages were read and are expected to stay in memory
        self._asked = np.zeros(records, np.bool_)  # records that the kernel was asked for, and that were not read since
        self._how: dict[int, How] = {}  # by shard
        #: No map ends inside `with MapUse(maps.uses)`, so that a thread can read maps. Keep this block short.
        self.uses: dict[MapUse, None] = {}
        self._lock = ThreadLock()
        self._bases_lock = ThreadLock()  # held only briefly
        self._find_shards()

    def _look_for_shards(self) -> bool:
        """Prepare to map the shards of a cache that was still being built before."""
        if not self._may_map and len(self._bases) == 1 and self._reader.shards:
            with self._lock:
                if len(self._bases) == 1:
                    self._find_shards()
        return self._may_map

    def _find_shards(self) -> None:
        """Make the tables of the maps' addresses and of the pieces that were read.

        While a cache is being built, the reader has no shards.
        """
        reader = self._reader
        # Addresses of the maps. The last one stands for shards that do not exist; reading these raises an error.
        self._bases = np.zeros(len(reader.shards) + 1, np.int64)
        self._bases[-1] = _NOT_MAPPED
        pieces = [(entry.bytes + _PIECE - 1) >> _PIECE_BITS for entry in reader.shards]
        self._first_piece = np.cumsum([0, *pieces])  # the number of each shard's first piece
        self._whole = np.zeros(int(self._first_piece[-1]), np.bool_)  # pieces that were read completely
        self._stays = np.zeros(len(self._bases), np.bool_)  # shards whose pages are expected to stay in memory
        self._may_map = bool(reader.shards)  # False once it is clear that no shard can be mapped

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardMaps, (self._reader, len(self._present))  # a copy in another process starts empty

    @property
    def how(self) -> dict[str, int]:
        """The number of mapped shards by method, and of other shards by the reason why they are not mapped."""
        found: list[str] = list(self._how.values())
        return {each: found.count(each) for each in dict.fromkeys(found)}

    def is_present(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return which records are in mapped pages that were read before and probably stay in memory: bool (n,)."""
        present: npt.NDArray[np.bool_] = self._present[numbers]
        return present

    def note_asked(self, numbers: Numbers) -> None:
        """Note that the kernel was asked for these records, so that `addresses` need not ask again."""
        self._asked[numbers] = True

    def how_to_map(self, shard: int) -> How:
        """Return the method by which a shard is mapped or could be mapped, or else the reason why it cannot."""
        if shard in self._how:
            return self._how[shard]
        if self._reader.arriving is not None:
            return "being_fetched"
        if not can_populate():
            return "no_maps"
        number = self._reader.file(shard).number
        if cannot_shrink(number):
            return "read_only"
        return refusal(self._reader.path(shard), number) or "lease"

    def addresses(self, numbers: Numbers, rows: Rows) -> Addresses:
        """Return the addresses of records in maps: int64 (n,), 0 for records that are not mapped."""
        if not self._may_map and (len(self._bases) > 1 or not self._look_for_shards()):
            return np.zeros(len(rows), np.int64)
        look_if_needed()
        shards = np.minimum(rows["shard"], len(self._bases) - 1).astype(np.int64)
        bases = self._bases[shards]
        if (bases == _UNKNOWN).any():
            unknown, first = np.unique(np.where(bases == _UNKNOWN, shards, -1), return_index=True)
            self._map(rows[first[unknown >= 0]])
            bases = self._bases[shards]
        offsets = rows["offset"].astype(np.int64)
        found: Addresses = np.where(bases > 0, bases + offsets, 0)
        absent = np.flatnonzero((found > 0) & ~self._present[numbers])
        if len(absent):
            # Page faults without a hint would also read the pages around each.
            self._reader.hint(rows[absent[~self._asked[numbers[absent]]]])
            self._asked[numbers[absent]] = False  # by the next time, the pages may have been evicted
            self._read_pages(found[absent], rows[absent])
            self._present[numbers[absent]] = self._stays[shards[absent]]
            look_if_needed()  # the disk may have been slow
            bases = self._bases[shards]
            found = np.where(bases > 0, bases + offsets, 0)
        return found

    def prepare(self, rows: Rows, threads: int) -> None:
        """Map shards, and enter their pages in the page table, in at most 0.5 s. `rows` has one index row per shard."""
        self._look_for_shards()
        end = time.monotonic() + PREPARE_SECONDS
        reader = self._reader
        reader.open_all(rows["shard"].tolist())

        def read(piece: int) -> None:
            if time.monotonic() < end:
                with MapUse(self.uses):
                    self._read_piece(piece)

        with Threads(threads, "tpucache-prepare") as pool:  # starts a thread only when there is work
            for row in rows:
                shard = int(row["shard"])
                if time.monotonic() > end or not reader.is_in_memory(shard, int(row["offset"])):
                    return
                if self._bases[shard] == _UNKNOWN:
                    with MapUse(self.uses):
                        self._map(row.reshape(1))
                first, stop = self._first_piece[shard : shard + 2].tolist()
                missing = first + np.flatnonzero(~self._whole[first:stop])
                deque(pool.map(read, missing.tolist()), 0)

    def block(self) -> tuple[npt.NDArray[np.uint8], int]:
        """Return the memory from the start of the first map to the end of the last, uint8 read-only, and its address.

        Do not touch the bytes between maps.
        """
        bases = self._bases
        mapped = np.flatnonzero(bases > 0)
        sizes = np.array([self._reader.shards[shard].bytes for shard in mapped.tolist()], np.int64)
        start = int(bases[mapped].min())
        return _bytes_at(start, int((bases[mapped] + sizes).max()) - start), start

    def stop_reading(self, shard: int) -> Iterable[MapUse]:
        """Stop using a shard's map in new reads. Returns the uses that may still read it.

        From now on, each record of the shard is compared with its checksum.
        """
        self._reader.distrust(shard)
        with self._bases_lock:
            self._how[shard] = "given_back"
            self._bases[shard] = _NOT_MAPPED
        return list(self.uses)

    def forget_maps(self) -> None:
        """Forget all leased maps. Called in a forked process, in which the files are not mapped."""
        for shard, how in list(self._how.items()):
            if how == "lease":
                self._bases[shard] = _UNKNOWN
                self._may_map = True
                del self._how[shard]
        self._present[:] = False
        self._whole[:] = False
        self.uses.clear()

    def _map(self, rows: Rows) -> None:
        """Map shards if that is safe, and compare these records with their checksums before the maps are used."""
        with self._lock:
            rows = rows[self._bases[rows["shard"]] == _UNKNOWN]
            if not len(rows):
                return
            mapped = sum(self._reader.shards[shard].bytes for shard in np.flatnonzero(self._bases > 0).tolist())
            self._reader.open_all(np.unique(rows["shard"]).tolist())
            room = BUDGET.available() // _SHARE - mapped  # once per call: it costs as much as opening ten files
            for row in rows:
                shard = int(row["shard"])
                base, how = self._map_shard(shard)
                if base:
                    room -= self._reader.shards[shard].bytes
                    self._stays[shard] = room >= 0
                    self._check(base, row.reshape(1))
                with self._bases_lock:
                    if self._how.get(shard) != "given_back":  # `stop_reading` may have been called meanwhile
                        self._how[shard] = how
                        self._bases[shard] = base or _NOT_MAPPED
            self._may_map = bool((self._bases != _NOT_MAPPED).any())

    def _map_shard(self, shard: int) -> tuple[int, How]:
        how: How
        if self._reader.arriving is not None:
            return 0, "being_fetched"
        if not can_populate():
            return 0, "no_maps"
        file = self._reader.file(shard)
        if not cannot_shrink(file.number):
            try:
                return LeasedMap(self._reader.path(shard), file.number, self, shard).base, "lease"
            except NoLeaseError as error:
                return 0, error.reason
        size = self._reader.shards[shard].bytes
        base = map_file(file.number, size)
        if base:
            unmap = weakref.finalize(self, libc.munmap, ctypes.c_void_p(base), ctypes.c_size_t(size))
            unmap.atexit = False  # at exit, a thread may still be copying
        how = "read_only" if base else "no_maps"
        return base, how

    def _check(self, base: int, row: Rows) -> None:
        """Compare a record with its checksum: the file may belong to another cache and have the same size."""
        found = base + row["offset"].astype(np.int64)
        self._read_pages(found, row)
        self._reader.check(row[0], zlib.crc32(_bytes_at(int(found[0]), int(row["length"][0])).data))

    def _read_pages(self, addresses: Addresses, rows: Rows) -> None:
        """Read the pages of records into memory, or whole pieces of 2 MiB if the pieces are in the page cache."""
        self._reader.check_inside(rows)
        shards, lengths = rows["shard"].astype(np.int64), rows["length"].astype(np.int64)
        starts = rows["offset"].astype(np.int64)
        first = self._first_piece[shards] + (starts >> _PIECE_BITS)
        last = self._first_piece[shards] + ((starts + np.maximum(lengths, 1) - 1) >> _PIECE_BITS)
        pieces = np.concatenate([first, last])
        missing = np.unique(pieces[~self._whole[pieces]])
        # Threads begin at different pieces. If their first batches need the same pieces, they share the work.
        for piece in np.roll(missing, threading.get_ident() >> 12).tolist():
            self._read_piece(piece)
        is_read = self._whole[first] & self._whole[last] & (last - first < 2)
        for at in np.flatnonzero(~is_read).tolist():
            if self._bases[shards[at]] != _NOT_MAPPED:  # it may have been unmapped meanwhile
                self._populate(int(addresses[at]), int(lengths[at]), int(shards[at]))

    def _read_piece(self, piece: int) -> None:
        """Enter a piece of a map (2 MiB) in the page table, if a few sampled bytes of it are in the page cache."""
        reader = self._reader
        shard = int(np.searchsorted(self._first_piece, piece, "right")) - 1
        start = (piece - int(self._first_piece[shard])) << _PIECE_BITS
        length = min(_PIECE, reader.shards[shard].bytes - start)
        probes = range(start, start + length, max(1, length // _PROBES))
        if self._whole[piece] or self._bases[shard] <= 0 or not self._stays[shard]:
            return
        if all(reader.is_in_memory(shard, place) for place in probes):
            self._populate(int(self._bases[shard]) + start, length, shard)
            self._whole[piece] = True

    def _populate(self, start: int, length: int, shard: int) -> None:
        first = start & -mmap.PAGESIZE
        if not populate(first, start + length - first):
            name = self._reader.shards[shard].name
            raise DamageError(
                f"Shard {name} cannot be read: the disk or the network returned an error. Try again, or copy the cache "
                "again"
            )


class _Memory:
    """Read-only memory at an address, for numpy."""

    def __init__(self, start: int, length: int) -> None:
        self.__array_interface__ = {"data": (start, True), "shape": (length,), "typestr": "|u1", "version": 3}


def _bytes_at(start: int, length: int) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = np.asarray(_Memory(start, length))
    return found
