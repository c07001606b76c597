"""What this process has open, mapped and leased, as the system lists it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Return the names of a folder's files that are open, as often as they are."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very loop, or one that a thread has closed
            found.append(link.readlink())
    return sorted(path.name for path in found if path.parent == folder.resolve())


def maps_of(folder: Path) -> int:
    return sum(f"{folder.resolve()}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def leases_held() -> int:
    lines = Path("/proc/locks").read_text().splitlines()
    return sum(line.split()[1] == "LEASE" and line.split()[4] == str(os.getpid()) for line in lines)
