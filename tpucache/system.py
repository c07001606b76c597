"""System calls that only some systems have, and replacements where they are missing.

Reading a cache needs none of them: macOS lacks `posix_fadvise`, `memfd_create` and `sched_getaffinity`; Windows also
lacks `fcntl`, `resource`, `preadv` and `statvfs`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

#: Flags that open a file for reading as bytes, without waiting if it is a pipe; programs do not inherit the file.
READ: Final[int] = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
#: Flags to open a folder; None if that is not possible.
FOLDER: Final[int | None] = (os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if hasattr(os, "O_DIRECTORY") else None

_position = threading.Lock()  # held while `_pread` moves the position of a file and reads at it

#: Parameters of glibc's `mallopt` (malloc.h). The first is the free memory that the process keeps, the second the size
#: from which on each block gets a memory map of its own. glibc allows at most 32 MB for the second.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 1 << 28
_LARGEST_KEPT: Final = 1 << 25
#: A flag of Linux's `sync_file_range` (fs.h): begin writing the pages of the range that are not being written yet.
_WRITE_RANGE: Final = 2


def _find_module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


#: Python's modules of these names; None on Windows.
fcntl: Final[Any] = _find_module("fcntl")
resource: Final[Any] = _find_module("resource")


def _pread(number: int, length: int, offset: int) -> bytes:
    with _position:
        os.lseek(number, offset, os.SEEK_SET)
        return os.read(number, length)


def _preadv(number: int, buffers: Sequence[Any], offset: int) -> int:
    done = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        data = pread(number, len(view), offset + done)
        view[: len(data)] = data
        done += len(data)
        if len(data) < len(view):
            break
    return done


#: `os.pread` and `os.preadv`: read at a position of an open file; several threads may call them.
pread: Final[Callable[[int, int, int], bytes]] = getattr(os, "pread", _pread)
preadv: Final[Callable[[int, Sequence[Any], int], int]] = getattr(os, "preadv", _preadv)


# Linux reads no more than a device's read-ahead window for one hint and drops the rest; 128 KiB is its default.
_HINT_BYTES: Final = 128 << 10


def read_ahead(number: int, offset: int, length: int) -> None:
    """Ask the kernel to read `length` bytes of an open file ahead, from `offset` on, if the system has such a call.

    Raises OSError if the call fails, OverflowError if a number is too large for the call.
    """
    if hasattr(os, "posix_fadvise"):
        for start in range(offset, offset + length, _HINT_BYTES):
            os.posix_fadvise(number, start, min(_HINT_BYTES, offset + length - start), os.POSIX_FADV_WILLNEED)


def begin_writing(number: int) -> None:
    """Ask Linux to begin writing an open file from the page cache to the disk. This does not wait for the disk.

    A later `fsync` then waits less. On other systems, and on file systems without such a call, this does nothing.
    """
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError, TypeError):  # the C library has no such function
        call = ctypes.CDLL(None).sync_file_range
        call(number, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE_RANGE)


def waits() -> int:
    """Return how often this thread has waited so far, for storage or for another thread; 0 if that is unknown."""
    who = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if who is None else int(resource.getrusage(who).ru_nvcsw)


def is_in_page_cache(number: int, offset: int) -> bool:
    """Return whether the byte at `offset` of an open file is in the page cache; False if that is unknown.

    Raises OverflowError if the offset is too large for the system.
    """
    try:
        return os.preadv(number, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # BlockingIOError: it is not in the cache
        return False


def is_read_only(number: int) -> bool:
    """Return whether an open file is on a read-only mount; False if that is unknown."""
    return hasattr(os, "statvfs") and bool(os.statvfs(number).f_flag & os.ST_RDONLY)


def open_memory_file() -> int:
    """Open a file without a name, in memory if the system has such files, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tpucache", os.MFD_CLOEXEC)
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes; 0 if unknown."""
    if resource is None:
        return 0
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_blocks() -> None:
    """Let glibc's allocator keep freed blocks of up to 32 MB for reuse; do nothing with other allocators.

    By default it often gives large freed blocks back to the kernel, which fills the pages of the next block with zeros.
    That takes as long as copying into them.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such function, or no library of that kind
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
