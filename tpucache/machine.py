"""What this machine has to give."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
# One (limit, in use, statistics, name of the page cache's line) a version of cgroups; a container sees its own here.
_CGROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat", "file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
)


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
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


def _lines(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file, by its first word."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
