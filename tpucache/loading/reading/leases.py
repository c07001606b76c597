"""Maps files under a read lease, so that no program can truncate them while the maps are read.

Linux lets the owner of a file take a read lease on it. A program that then truncates the file or opens it for writing
has to wait until the lease is released, or for /proc/sys/fs/lease-break-time seconds, 45 by default. One thread of this
process asks the kernel a few times per second whether a program waits for a file. If so, no new read of its map begins.
When the running reads are done, the file is unmapped, the lease is released, and the other program continues.
Unlinking or renaming a file needs no lease and does not harm its map. See `man 2 fcntl`, "Leases".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import queue
import resource
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

from tpucache import machine
from tpucache.native import file_system, libc, map_file
from tpucache.store.files import ThreadLock, open_regular

#: The reasons why a file is not mapped under a lease.
Reason = Literal["other_owner", "open_for_writing", "not_local", "too_many_files", "no_leases", "given_back"]

#: The reasons in words.
REASONS: Final[dict[Reason, str]] = {
    "other_owner": "another user owns the files",
    "open_for_writing": "a program has the files open for writing",
    "not_local": "other machines may be able to change files on this file system",
    "too_many_files": "this process may open too few files",
    "no_leases": "this system gives no read leases",
    "given_back": "a program wanted to change the files",
}

_EVERY: Final = 0.2  # seconds between two checks of all leases
_SOON: Final = 0.005  # the same, while a map waits for its last read to end
_FRESH: Final = 5.0  # seconds; if the last check is older, a thread checks the leases itself before it reads a map
_LEAST_BREAK_SECONDS: Final = 4 * _FRESH  # the kernel must wait this long, so that a batch can be copied after a check
_SHARE: Final = 2  # leases use at most half of the files that the process may open
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

    While that code runs, the MapUse is a key of `uses`. A map is unmapped only when no MapUse is left that may read it.
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
    owner's `stop_reading(shard)`, which returns the uses that may still read the map, and `forget_maps()`, which is
    called in a forked process. Such a process does not inherit the map. It closes the inherited descriptor, which does
    not affect its parent's lease, and maps files itself.
    """

    def __init__(self, path: Path, original: int, owner: Any, shard: int) -> None:
        """Map the file at `path`."""
        if not _has_leases() or file_system(original) not in _LOCAL:
            raise NoLeaseError("not_local" if _has_leases() else "no_leases")
        if len(_WATCH.maps) >= _most_files() // _SHARE:
            raise NoLeaseError("too_many_files")
        self.owner, self.shard = weakref.ref(owner), shard
        self.base = self.size = 0
        self.is_taken = False
        try:
            # A new descriptor, because a lease belongs to an open file, which forked processes share.
            self.number = open_regular(path)
            _WATCH.add(self)
            try:
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
        """Unmap the file and release the lease, unless that was done before.

        This takes no lock, because finalizers call it.
        """
        if not _WATCH.remove(self):
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
        self._start()

    def remove(self, leased: LeasedMap) -> bool:
        was_watched = self.maps.pop(leased, self) is None
        self._ending.pop(leased, None)
        if was_watched and not self.maps:
            self._wake.put(None)
        return was_watched

    def look(self) -> None:
        """Check all leases."""
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

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_paused:
                self.seen = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="tpucache-leases", daemon=True)
                self._thread.start()

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


_WATCH: Final = _Watch()
os.register_at_fork(before=_WATCH.pause, after_in_parent=_WATCH.resume, after_in_child=_WATCH.forget)


def look_if_needed() -> None:
    """Check all leases if the watching thread has not done so for a while, because it did not get to run.

    The kernel breaks a lease only some time after a program wanted the file. Until then the map is safe to read.
    """
    if time.monotonic() - _WATCH.seen > _FRESH:
        _WATCH.look()


def refusal(path: Path, original: int) -> Reason | None:
    """Return why the file at `path`, which the descriptor `original` has open, cannot be leased; None if it can."""
    nobody = _Nobody()
    try:
        LeasedMap(path, original, nobody, 0).end()
    except NoLeaseError as error:
        return error.reason
    return None


class _Nobody:
    """The owner of a map that is never read."""

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
def _has_leases() -> bool:
    if not hasattr(machine.fcntl, "F_SETLEASE"):
        return False
    try:
        return int(_BREAK_TIME.read_text()) >= _LEAST_BREAK_SECONDS
    except (OSError, ValueError):
        return False


def _most_files() -> int:
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
