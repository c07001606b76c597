"""Counters of work: lines of Python, calls of the system, modules. Unlike times, they are alike on all machines."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from patience import PATIENCE

import tpucache

#: What Linux counts of this thread's reads and writes; some sandboxes do not have it.
THREAD_READS = Path("/proc/thread-self/io")

PACKAGE = str(Path(tpucache.__file__).parent)

_LOADED = """import sys
{before}
known = {{*sys.modules}}
try:
    {statement}
except SystemExit:
    pass
print(*sorted({{*sys.modules}} - known))
"""


def loaded_modules(statement: str, before: str = "") -> Counter[str]:
    """Return how many modules of each package a statement loads in a new Python that has run another one before.

    "stdlib" is Python's own library.
    """
    code = _LOADED.format(before=before or "pass", statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    packages = [name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()]
    return Counter("stdlib" if name in sys.stdlib_module_names else name for name in packages)


@contextmanager
def package_lines() -> Iterator[list[str]]:
    """Yield a list to which Python's every line of the package adds the name of its file when it is executed.

    Those count that this thread executes, and threads that begin meanwhile. A line counts as often as a loop or a
    comprehension comes to it. Lines of libraries do not count, as they differ from release to release.
    """
    lines: list[str] = []

    def trace_line(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "line":
            lines.append(frame.f_code.co_filename)  # one operation, so that threads lose none
        return trace_line

    def trace(frame: FrameType, _event: str, _: object) -> Callable[..., Any] | None:
        return trace_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace(), threading.gettrace()  # coverage's, where that is measured
    gc.collect()
    gc.disable()  # it comes at any time, and finalizers have lines
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])  # type: ignore[arg-type]  # None is allowed
        gc.enable()


_counted: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what Python tells of files: of every way to open one, and of all threads. An audit hook stays for good."""
    if _counted is not None and event in ("open", "os.rename", "os.remove"):
        _counted.append(event.removeprefix("os."))


sys.addaudithook(_note)


@contextmanager
def file_calls() -> Iterator[list[str]]:
    """Yield a list to which every open, rename and remove of Python's is added, and this thread's every stat."""
    global _counted  # noqa: PLW0603  # there is one audit hook
    calls = _counted = []

    def profile(_: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in ("stat", "lstat", "fstat"):
            calls.append("stat")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        _counted = None


def reads_so_far() -> int:
    """Return how many system calls of this thread have read, those of compiled code and of this function among them."""
    fields = dict(line.split(": ") for line in THREAD_READS.read_text().splitlines())
    return int(fields["syscr"])
