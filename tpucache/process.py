"""The process of a command: its standard files, lack of memory, and its end.

This module imports only Python's standard library and a few files of tpucache. So it works before numpy is imported,
and also if numpy cannot be imported.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import mmap
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from tpucache.redact import printable_lines
from tpucache.signals import LAUNCHED, PROG
from tpucache.system import resource

#: Files in the folder that LAUNCHED names: each process writes its exit status and message there.
END_PATTERN: Final = "*.end.json"

_PR_SET_PDEATHSIG: Final = 1
_FILES: Final = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
#: Bytes of address space that the command line and numpy need; torch needs far more.
_LEAST_BYTES: Final = 96 << 20
#: Messages of the C library, the loader of shared libraries and torch about a lack of memory.
_NO_MEMORY: Final = re.compile(
    r"can ?not allocate memory(?! in static TLS)|can't allocate memory|not enough memory|bad_alloc"
    r"|failed to map segment|can't start new thread",
    re.IGNORECASE,
)


def open_standard_files() -> None:
    """Open the null device in place of standard input, output and error if they are closed.

    Otherwise the next opened files would get the file descriptors 0 to 2, and libraries would print into these files.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  # open as long as the process
            setattr(sys, name, null)


def tell(text: str) -> None:
    """Print a text on standard error, escaped; do nothing if standard error is closed or cannot be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # the disk is full, the terminal is gone, or the file is closed
            sys.stderr.write(printable_lines(text) + "\n")
            sys.stderr.flush()


def complain(message: str, status: int) -> int:
    """Print an error as one line on standard error, and return the exit status.

    If this process is one of several that a command has started, it writes the error to a file instead, so that the
    command can print the error once.
    """
    message = " ".join(message.split())
    if (shared := launched()) is None:
        tell(f"{PROG}: {message}")
    else:
        end = json.dumps({"status": status, "message": message, "time": time.time()})
        _write_whole(Path(shared["folder"], END_PATTERN.replace("*", os.environ.get("RANK", "0"))), end)
    return status


def launched() -> dict[str, Any] | None:
    """Return the environment variable LAUNCHED, a JSON object, as a dictionary; `signals.LAUNCHED` explains its keys.

    Returns None unless the parent of this process is a command that started several processes to share its work.
    """
    shared = json.loads(os.environ.get(LAUNCHED, "{}"))
    return shared if shared.get("parent") == os.getppid() else None


def end_with_parent() -> None:
    """If a command has started this process (see `launched`), let Linux send it a SIGTERM when the command ends."""
    if launched() is not None:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _write_whole(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        aside = path.with_suffix(".new")
        aside.write_text(text)
        aside.replace(path)


def forget_output(name: str = "stdout") -> None:
    """Discard the text that is still in the buffer of `sys.stdout`, or of `sys.stderr` if `name` is "stderr".

    Otherwise Python would try to write the text again when the process ends, and the exit status would be 120.
    """
    file = getattr(sys, name)
    if type(file) is io.TextIOWrapper:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, file.fileno())
            os.close(null)


def end_soon() -> None:
    """Let Python end without its last search for reference cycles, which takes up to a second once torch is imported.

    First write the buffers of open files, as that search would do. Nothing else may be done after this call. If torch
    has imported Triton, the search is made: otherwise Triton prints all objects that the search would have freed.
    """
    flush_files()
    try:
        sys.stderr.flush()
    except (OSError, ValueError):  # the disk is full, or the file closed: that is not an error of the command
        forget_output("stderr")
    if "triton" not in sys.modules:
        gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a signal while Python itself ends would cause a traceback


def prepare_memory() -> None:
    """Raise MemoryError if this process's limit of address space (`ulimit -v`) is too low for a command.

    If address space is limited, let numpy's OpenBLAS start only one thread: OpenBLAS ends the process if there is no
    memory for more threads.
    """
    if _limit() is None:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        mmap.mmap(-1, _LEAST_BYTES).close()
    except OSError as error:
        raise MemoryError from error


def shortage(error: BaseException) -> str | None:
    """Return a message that says what to do, if an error is due to a lack of memory; None for any other error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or getattr(seen, "errno", None) == errno.ENOMEM:
            break
        if isinstance(seen, (RuntimeError, ImportError, OSError)) and _NO_MEMORY.search(str(seen)):
            break
        seen = seen.__cause__ or seen.__context__
    else:
        return None
    limit = _limit()
    limited = "" if limit is None else f"this process may use {limit / 1e6:,.0f} MB of address space: "
    raised = "end other programs" if limit is None else "raise the limit (`ulimit -v unlimited`)"
    reason = " ".join(str(seen).split()) or "none is left"
    return (
        f"memory is short ({reason:.200}): {limited}{raised}, or ask for less, such as --jobs 1, a smaller "
        "--batch-size, --in-memory no; torch alone takes several GB of address space"
    )


def _limit() -> int | None:
    if resource is None:
        return None
    limit: int = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def flush_files() -> None:
    """Write the buffers of open files."""
    with contextlib.suppress(MemoryError):  # the list of all objects is long
        for each in gc.get_objects():
            if type(each) in _FILES:
                with contextlib.suppress(OSError, ValueError):  # read-only, or closed
                    each.flush()
