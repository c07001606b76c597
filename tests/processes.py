"""Two rules for the processes of tests: none is forked from one that has threads, and none outlives its test."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

FORKING = (
    "a test forks the tests' own process, which has threads (pytest-xdist's, torch's, XLA's): the fork can wait for "
    "ever for a lock that one of them held. Start a new Python (subprocess, multiprocessing's spawn) and, where "
    "forking is tested, fork there: the fixture `run_forking` does so"
)
#: Parts of the command lines of processes that libraries keep for the next who needs them.
KEPT = ("joblib.externals.loky", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
#: The thread that ends for each fork and begins again afterwards.
PAUSING = "tpucache-leases"
FEEDING = "QueueFeederThread"  # of a queue of multiprocessing: it ends with the queue's last item
ENDING = 5.0  # seconds in which a thread that Python has joined is gone for the kernel, too
GRACE = 30.0  # seconds in which a process that was told to end, or has lost its parent, does so on a busy machine


def refuse_forks() -> None:
    """Make every fork of this process fail the test that asks for it, whether there are threads just now or not."""

    def refuse(event: str, _: object) -> None:
        if event in ("os.fork", "os.forkpty"):
            pytest.fail(FORKING)

    sys.addaudithook(refuse)


def fork_alone() -> None:
    """Make every fork of this process fail while it has more than one thread, those of C libraries among them."""
    fork = os.fork

    def checked() -> int:
        until = time.monotonic() + ENDING
        while len(threads := _threads()) > 1 + _pausing():
            others = [thread.name for thread in threading.enumerate() if thread.name not in (PAUSING, FEEDING)]
            if len(others) > 1 or time.monotonic() > until:
                raise RuntimeError(f"this process forks while it has {len(threads)} threads: {', '.join(threads)}")
            time.sleep(0.001)
        return fork()

    os.fork = checked


def _pausing() -> int:
    return [thread.name for thread in threading.enumerate()].count(PAUSING)


def _threads() -> list[str]:
    """Return the names of this process's threads, as the kernel has them."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found.append((thread / "comm").read_text().strip())
    return found


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that `children` finds them."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def children() -> dict[int, str]:
    """Return the command line of each process that this one has started and that runs; not of those that are kept."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return {}
    found = {}
    for number in _numbers():
        folder = Path("/proc", number)
        with contextlib.suppress(OSError):  # it has ended
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not any(part in command for part in KEPT):
                    found[int(number)] = command
    return found


def _numbers() -> list[str]:
    """Return the numbers of this process's children, those of all processes where the kernel has no such list."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            found += (thread / "children").read_text().split()
        except FileNotFoundError:
            if thread.exists():
                return [folder.name for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return found


def end_all_but(known: dict[int, str]) -> None:
    """Fail the test, and kill what it has left behind, unless all children but these end soon."""
    until = time.monotonic() + GRACE
    while left := {pid: command for pid, command in children().items() if pid not in known}:
        if time.monotonic() > until:
            kill(left)
        time.sleep(0.01)


def kill(processes: dict[int, str]) -> NoReturn:
    """Kill these children, and fail."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    listed = "; ".join(f"{pid}: {command[:200]}" for pid, command in processes.items())
    pytest.fail(
        "a test left processes behind, which were killed now. End them in the test's `finally`, a `with` or a fixture, "
        f"and give subprocess.run a timeout. {listed}"
    )
