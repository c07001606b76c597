"""What this machine has to give."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
# One (limit, in use, statistics, name of the page cache's line) a version of cgroups; a container sees its own here.
_CGROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat", "file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
)
_CGROUP: Final = Path("/sys/fs/cgroup")
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
    """Bytes of memory: the machine's, the container's limit (None: there is none), and what is still to be had."""

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


def count_cores(cgroup: Path = _CGROUP) -> Cores:
    """Count the cores, by the affinity and by the container's quota of processor time."""
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), _core_quota(cgroup))


def measure_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> Memory:
    """Measure the memory. Numbers that cannot be learnt are 0."""
    try:
        machine = _lines(meminfo)["MemTotal:"] << 10
    except (OSError, KeyError, ValueError):
        machine = 0
    limits = [int(text) for text in (_read(cgroup / names[0]) for names in _CGROUPS) if text.isdecimal()]
    limit = min(limits, default=_NO_LIMIT)
    return Memory(machine, limit if limit < _NO_LIMIT else None, available_memory(meminfo, cgroup))


def measure_space(path: Path) -> Space | None:
    """Measure the file system that a path is on; None where there is no such path."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(str(path), usage.total, usage.free)


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


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes a process may still take without pushing others out: the machine's, or its container's.

    The page cache counts as free, because the kernel gives it up. Returns 0 where nothing can be learnt.
    """
    try:
        free = _lines(meminfo)["MemAvailable:"] << 10
    except (OSError, KeyError, ValueError):
        return 0
    for limit, usage, statistics, cached in _CGROUPS:
        try:
            most = int((cgroup / limit).read_text())  # "max" where there is none
            used = int((cgroup / usage).read_text()) - _lines(cgroup / statistics)[cached]
        except (OSError, KeyError, ValueError):
            continue
        free = min(free, most - used)
    return max(0, free)


def _core_quota(cgroup: Path) -> float | None:
    """Return how many cores' time a container may take, by either version of cgroups; None where it is not limited."""
    words = _read(cgroup / "cpu.max").split()  # "max 100000", or microseconds in a period of so many
    if not words:
        for folder in ("cpu", "cpu,cpuacct"):
            words = words or [_read(cgroup / folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
            words = words if all(words) else []
    try:
        quota, period = map(int, words)
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
