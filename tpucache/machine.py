"""What this machine has: cores, memory, disk space, TPU chips."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from tpucache.system import usable_cores

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
_NO_LIMIT: Final = 1 << 60  # the first version of cgroups says so by a limit that no machine reaches

#: PCI numbers of TPU chips, as jax/_src/hardware_utils.py lists them; v2 and v3 share one.
_GOOGLE: Final = "0x1ae0"
_TPUS: Final = {
    "0x0027": "v2 or v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}

#: File systems whose files come over a network; what FUSE mounts does so, too, but for a few.
_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "afs", "beegfs", "gpfs")
_LOCAL_FUSE: Final = ("fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.bindfs", "fuse.ntfs-3g")


class _Version(NamedTuple):
    """Where a version of cgroups says how much memory a group may use and uses; its statistics' names of lines."""

    controller: str  # its name in /proc/self/cgroup, and its folder
    limits: tuple[str, ...]
    usage: str
    cached: str  # the page cache, which includes files in /dev/shm and shared memory
    shared: str  # of these, so many bytes
    hierarchical: str  # the smallest limit of a group and all above it, also of those that are not visible here


_CGROUPS: Final = (
    _Version("", ("memory.max", "memory.high"), "memory.current", "file", "shmem", ""),
    _Version(
        "memory",
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_cache",
        "total_shmem",
        "hierarchical_memory_limit",
    ),
)


@dataclass(frozen=True)
class Cores:
    """Logical cores: the machine's, those this process may run on, and how many its container pays for (None: all)."""

    machine: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """How many processes can work at once."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.ceil(self.quota)))


@dataclass(frozen=True)
class Memory:
    """Bytes of memory: the machine's, the container's limit (None: there is none), and what is available."""

    machine: int
    limit: int | None
    available: int


@dataclass(frozen=True)
class Space:
    """Bytes of a file system, and those that are free."""

    path: str
    total: int
    free: int


@dataclass(frozen=True)
class Tpu:
    """TPU chips on the PCI bus: their generation and how many; and the device files they are opened by."""

    generation: str
    chips: int
    devices: tuple[str, ...]


def count_cores(cgroup: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> Cores:
    """Count the cores, by the affinity and by the container's quota of processor time."""
    return Cores(os.cpu_count() or 1, usable_cores(), _core_quota(cgroup, own))


def measure_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> Memory:
    """Measure the memory. Numbers that cannot be read are 0."""
    try:
        machine = _lines(meminfo)["MemTotal:"] << 10
    except (OSError, KeyError, ValueError):
        machine = 0
    limit = min(_memory_limit(group, version) for version, group in _memory_groups(cgroup, own))
    return Memory(machine, limit if limit < _NO_LIMIT else None, available_memory(meminfo, cgroup, own))


def measure_space(path: str | Path) -> Space | None:
    """Measure the file system that a path is on; None where there is no such path."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(str(path), usage.total, usage.free)


def network_file_system(path: str | Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of the file system that a path is on, such as nfs4 or fuse.gcsfuse, if it is across a network.

    Return None for a disk of this machine, and where the system does not say. Format: `man 5 fstab`.
    """
    place = os.path.realpath(path)
    found = ("", "")
    for line in _read(mounts).splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda escaped: chr(int(escaped[1], 8)), words[1])
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, words[2])
    kind = found[1]
    is_remote = kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
    return kind if is_remote else None


def process_began(stat: Path = Path("/proc/self/stat")) -> float:
    """Return when this process began, by `time.monotonic`; now where the kernel does not say."""
    now = time.monotonic()
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return now
    return now - max(0.0, age)


def gpu_problem(capability: Sequence[int], architectures: Sequence[str]) -> str:
    """Return why a torch that is built for these architectures cannot run on a GPU, "" where it can.

    Code of `sm_XY` runs on GPUs of capability X.Z where Z is Y or more, and `compute_XY` on all of X.Y or more; with a
    letter at the end, on X.Y alone (NVIDIA's CUDA C++ Programming Guide, "Compute Capability").
    """
    major, minor = capability
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)
        if found is None:
            continue
        kind, of, suffix = found[1], (int(found[2]), int(found[3])), found[4]
        if of == (major, minor) or (not suffix and of <= (major, minor) and (kind == "compute" or of[0] == major)):
            return ""
    if not architectures:
        return ""  # torch does not say
    return f"its architecture is sm_{major}{minor}, and this torch is built for {', '.join(architectures)}"


def find_tpu(sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> Tpu | None:
    """Look for TPU chips without opening any; None where there are none."""
    kinds = []
    for vendor in sorted(sys.glob("bus/pci/devices/*/vendor")):
        kind = _TPUS.get(_read(vendor.with_name("device")))
        if kind is not None and _read(vendor) == _GOOGLE:
            kinds.append(kind)
    accelerators = sorted(str(path) for path in dev.glob("accel[0-9]*"))
    groups = sorted(str(path) for path in dev.glob("vfio/[0-9]*"))
    if not kinds:
        return Tpu("unknown", len(accelerators), tuple(accelerators)) if accelerators else None
    return Tpu(kinds[0], len(kinds), tuple(accelerators or groups))


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> int:
    """Return the bytes a process may still take without pushing others out: the machine's, or its container's.

    Of a container in a container, the fewest of all. The page cache counts as free, because the kernel gives it up;
    files in /dev/shm do not. Where the system does not say what is free, as on macOS, it is half of the memory. Returns
    0 where nothing can be learnt.
    """
    try:
        free = _lines(meminfo)["MemAvailable:"] << 10
    except (OSError, KeyError, ValueError):
        return 0 if sys.platform == "linux" else _physical_memory() // 2
    for version, group in _memory_groups(cgroup, own):
        used = _read(group / version.usage)
        if used.isdecimal():
            statistics = _statistics(group)
            cached = statistics.get(version.cached, 0) - statistics.get(version.shared, 0)
            free = min(free, _memory_limit(group, version) - int(used) + cached)
    return max(0, free)


def _physical_memory() -> int:
    """Return the bytes of memory that POSIX knows of; 0 on systems that do not say, such as Windows."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _memory_groups(cgroup: Path, own: Path) -> list[tuple[_Version, Path]]:
    return [(version, group) for version in _CGROUPS for group in _groups(version.controller, cgroup, own)]


def _groups(controller: str, cgroup: Path, own: Path, folder: str | None = None) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it, as far as they are visible.

    The first version of cgroups has a folder for each controller, the second ("") one for all.
    """
    paths = []
    for line in _read(own).splitlines():
        _, controllers, text = (*line.split(":", 2), "", "")[:3]  # "4:memory:/a/b", or "0::/a/b" in version 2
        if controller in controllers.split(","):
            paths.append(PurePosixPath(text.strip("/")))
    for path in (*paths, PurePosixPath()):
        for above in (path, *path.parents):
            if ".." not in above.parts:  # a process outside of what is mounted here
                yield cgroup / (controller if folder is None else folder) / above


def _memory_limit(group: Path, version: _Version) -> int:
    """Return the bytes that a cgroup may use; _NO_LIMIT where that is not limited."""
    texts = [_read(group / name) for name in version.limits]
    limits = [int(text) for text in texts if text.isdecimal()]  # "max" where there is none
    return min((*limits, _statistics(group).get(version.hierarchical, _NO_LIMIT)))


def _statistics(group: Path) -> dict[str, int]:
    """Return the lines of a cgroup's memory.stat, none where it cannot be read."""
    try:
        return _lines(group / "memory.stat")
    except (OSError, ValueError):
        return {}


def _core_quota(cgroup: Path, own: Path) -> float | None:
    """Return how many cores' time a container may take, by either version of cgroups; None where it is not limited."""
    quotas = [_quota(_read(group / "cpu.max").split()) for group in _groups("", cgroup, own)]
    for folder in ("cpu", "cpu,cpuacct"):
        for group in _groups("cpu", cgroup, own, folder):
            quotas.append(_quota([_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(words: Sequence[str]) -> float | None:
    """Read a quota of processor time, as microseconds in a period of so many; None where there is none."""
    try:
        quota, period = map(int, words)  # "max 100000" where there is none
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str:
    """Return a small file's text, nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _lines(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file, by its first word."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
