"""The machine: cores, memory, disk space, TPU chips, and system calls that only some systems have."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

#: Leases and seals of files need it; locks are in `store/lock.py`.
fcntl: Final[Any] = importlib.import_module("fcntl")
#: Flags that open a file for reading, without waiting if it is a pipe; programs do not inherit the file.
READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
#: Flags that open a folder.
FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

#: Read at a position of an open file; several threads may call them.
pread, preadv = os.pread, os.preadv

#: Parameters of glibc's `mallopt` (malloc.h). The first is the free memory that the process keeps, the second the size
#: from which on each block gets a memory map of its own. glibc allows at most 32 MB for the second.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 1 << 28
_LARGEST_KEPT: Final = 1 << 25
#: A flag of Linux's `sync_file_range` (fs.h): begin writing the pages of the range that are not being written yet.
_WRITE_RANGE: Final = 2


# Linux reads no more than a device's read-ahead window for one hint and drops the rest; 128 KiB is its default.
_HINT_BYTES: Final = 128 << 10


def read_ahead(number: int, offset: int, length: int) -> None:
    """Ask the kernel to read bytes of an open file ahead. Raises OSError, OverflowError."""
    if hasattr(os, "posix_fadvise"):
        for start in range(offset, offset + length, _HINT_BYTES):
            os.posix_fadvise(number, start, min(_HINT_BYTES, offset + length - start), os.POSIX_FADV_WILLNEED)


def begin_writing(number: int) -> None:
    """Ask Linux to begin writing an open file to the disk, so that a later `fsync` waits less."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # the C library has no such function
        call = ctypes.CDLL(None).sync_file_range
        call(number, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE_RANGE)


def waits() -> int:
    """Return how often this thread has waited so far, for storage or for another thread; 0 if that is unknown."""
    who = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if who is None else int(resource.getrusage(who).ru_nvcsw)


def is_in_page_cache(number: int, offset: int) -> bool:
    """Return whether a byte of an open file is in the page cache; False if unknown. Raises OverflowError."""
    try:
        return os.preadv(number, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # BlockingIOError: it is not in the cache
        return False


def is_read_only(number: int) -> bool:
    return bool(os.statvfs(number).f_flag & os.ST_RDONLY)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_blocks() -> None:
    """Let glibc keep freed blocks of up to 32 MB: otherwise the kernel fills new ones with zeros, as slow as a copy."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such function, or no library of that kind
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
_NO_LIMIT: Final = 1 << 60  # in version 1 of cgroups, a limit that no machine reaches means none

#: PCI device numbers of TPU chips, from jax/_src/hardware_utils.py; v2 and v3 have the same number.
_GOOGLE: Final = "0x1ae0"
_TPUS: Final = {
    "0x0027": "v2 or v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}

#: Types of network file systems. All types that begin with `fuse.` count, too, except a few local ones.
_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "afs", "beegfs", "gpfs")
_LOCAL_FUSE: Final = ("fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.bindfs", "fuse.ntfs-3g")


#: For versions 2 and 1 of cgroups: the memory controller, which is a folder in version 1; the files with a group's
#: limits and usage; the rows of `memory.stat` with its page cache, and with the part of it that is shared memory.
_MEMORY_FILES: Final = (
    ("", ("memory.max", "memory.high"), "memory.current", "file", "shmem"),
    ("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_cache", "total_shmem"),
)


@dataclass(frozen=True)
class Cores:
    """Logical cores: of the whole `machine`, those that this process may run on, and the container's limit, if any."""

    machine: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.ceil(self.quota)))


@dataclass(frozen=True)
class Memory:
    """Bytes of memory: of the whole `machine`, the container's `limit` (None without one), and those `available`."""

    machine: int
    limit: int | None
    available: int


@dataclass(frozen=True)
class Space:
    path: str
    total: int
    free: int


@dataclass(frozen=True)
class Tpu:
    """TPU chips: their `generation` such as v5e, the number of `chips`, and the files in /dev that open them."""

    generation: str
    chips: int
    devices: tuple[str, ...]


def count_cores(cgroup: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> Cores:
    return Cores(os.cpu_count() or 1, usable_cores(), _core_quota(cgroup, own))


def measure_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> Memory:
    limit = min(limit for limit, _ in _limits(cgroup, own))
    machine = _numbers(meminfo).get("MemTotal:", 0) << 10
    return Memory(machine, limit if limit < _NO_LIMIT else None, available_memory(meminfo, cgroup, own))


def measure_space(path: str | Path) -> Space | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(str(path), usage.total, usage.free)


def network_file_system(path: str | Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of a path's file system, such as nfs4 or fuse.gcsfuse, if it is across a network."""
    place, longest, kind = os.path.realpath(path), "", ""
    for line in _read(mounts).splitlines():
        _, escaped, of, *_ = (*line.split(), "", "", "")
        point = re.sub(r"\\([0-7]{3})", lambda escaped: chr(int(escaped[1], 8)), escaped)
        is_inside = place == point or place.startswith(point.rstrip("/") + "/")
        if is_inside and len(point) >= len(longest):
            longest, kind = point, of
    is_remote = kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
    return kind if is_remote else None


def gpu_problem(capability: Sequence[int], architectures: Sequence[str]) -> str:
    """Return why the installed torch cannot run on a GPU; "" if it can, or if `architectures` is empty.

    `capability` is the GPU's (major, minor), and `architectures` are those that torch was built for. Code for `sm_XY`
    runs on GPUs of capability X.Z with Z at least Y. Code for `compute_XY` runs on all GPUs from X.Y on. With the
    letter `a` at the end, as `sm_90a`, code runs only on X.Y, and with `f`, as `compute_100f`, on X.Z with Z at least Y
    (NVIDIA's CUDA C++ Programming Guide, "Compute Capability").
    """
    major, minor = capability
    names = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name) for name in architectures]
    for found in filter(None, names):
        kind, of, suffix = found[1], (int(found[2]), int(found[3])), found[4]
        is_later = of <= (major, minor) and (of[0] == major or (kind == "compute" and not suffix))
        if of == (major, minor) or (is_later and suffix in ("", "f")):
            return ""
    if not architectures:
        return ""  # unknown
    return f"its architecture is sm_{major}{minor}, and this torch is built for {', '.join(architectures)}"


def find_tpu(sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> Tpu | None:
    """Return the machine's TPU chips, without opening any."""
    vendors = [vendor for vendor in sorted(sys.glob("bus/pci/devices/*/vendor")) if _read(vendor) == _GOOGLE]
    kinds = [kind for vendor in vendors if (kind := _TPUS.get(_read(vendor.with_name("device"))))]
    accelerators = sorted(str(path) for path in dev.glob("accel[0-9]*"))
    groups = sorted(str(path) for path in dev.glob("vfio/[0-9]*"))
    if not kinds:
        return Tpu("unknown", len(accelerators), tuple(accelerators)) if accelerators else None
    return Tpu(kinds[0], len(kinds), tuple(accelerators or groups))


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> int:
    """Return the bytes that a process may still allocate, in its container with the least; 0 if unknown.

    The page cache counts as free; files in /dev/shm do not. Elsewhere than on Linux: half of the machine's memory.
    """
    free = _numbers(meminfo).get("MemAvailable:")
    if free is None:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            return 0 if sys.platform == "linux" else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return 0
    return max(0, min(free << 10, *(limit - used for limit, used in _limits(cgroup, own))))


def _limits(cgroup: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each cgroup of this process, with the bytes it uses beside the page cache."""
    for controller, limits, usage, cached, shared in _MEMORY_FILES:
        for group in _groups(controller, cgroup, own):
            texts = [_read(group / name) for name in limits]
            used, rows = _read(group / usage), _numbers(group / "memory.stat")
            cache = rows.get(cached, 0) - rows.get(shared, 0)
            yield (
                min((int(text) for text in texts if text.isdecimal()), default=_NO_LIMIT),  # "max" means no limit
                int(used) - cache if used.isdecimal() else 0,
            )


def _groups(controller: str, cgroup: Path, own: Path) -> Iterator[Path]:
    """Yield this process's cgroup and those above it."""
    paths = []
    for line in _read(own).splitlines():
        _, controllers, text = (*line.split(":", 2), "", "")[:3]  # "4:memory:/a/b", or "0::/a/b" in version 2
        if controller in controllers.split(","):
            paths.append(PurePosixPath(text.strip("/")))
    for path in (*paths, PurePosixPath()):
        for above in (path, *path.parents):
            if ".." not in above.parts:  # a group outside of the mounted ones
                yield cgroup / controller / above  # version 1 has a folder for each controller, version 2 ("") one


def _core_quota(cgroup: Path, own: Path) -> float | None:
    """Return the least number of cores: microseconds in each period, divided by its length."""
    texts = [_read(group / "cpu.max") for group in _groups("", cgroup, own)]
    for group in _groups("cpu", cgroup, own):
        texts.append(f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}")
    pairs = [re.fullmatch(r"(\d+) (\d+)", text) for text in texts]  # "max" and -1 mean no limit
    return min((int(pair[1]) / int(pair[2]) for pair in pairs if pair), default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _numbers(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
