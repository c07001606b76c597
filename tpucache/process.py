"""The process of a command: its standard files, memory that is short, and its end.

It uses no other library, so that it works before the first one is imported, and where none can be.
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

#: The files, in the folder that LAUNCHED names, in which processes say how they have ended.
END_PATTERN: Final = "*.end.json"

_PR_SET_PDEATHSIG: Final = 1
_FILES: Final = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
#: Bytes of addresses that the command line and numpy need; torch needs far more.
_LEAST_BYTES: Final = 96 << 20
#: What the C library, the loader of shared libraries and torch say when they get no memory.
_NO_MEMORY: Final = re.compile(
    r"can ?not allocate memory(?! in static TLS)|can't allocate memory|not enough memory|bad_alloc"
    r"|failed to map segment|can't start new thread",
    re.IGNORECASE,
)


def open_standard_files() -> None:
    """Open the null device in place of standard input, output and error where they are closed.

    Otherwise the next files that are opened would get their numbers, and what libraries print would go into these.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  # open as long as the process
            setattr(sys, name, null)


def tell(text: str) -> None:
    """Print a text on standard error, escaped; where nobody can read it, nothing is said."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a terminal that is gone; or it is closed
            sys.stderr.write(printable_lines(text) + "\n")
            sys.stderr.flush()


def complain(message: str, status: int) -> int:
    """Print what is wrong as one line on standard error, and return the exit status.

    Where a command has started several processes, the command prints it, once: all of them may say the same.
    """
    message = " ".join(message.split())
    if (shared := launched()) is None:
        tell(f"{PROG}: {message}")
    else:
        end = json.dumps({"status": status, "message": message, "time": time.time()})
        _write_whole(Path(shared["folder"], END_PATTERN.replace("*", os.environ.get("RANK", "0"))), end)
    return status


def launched() -> dict[str, Any] | None:
    """Return what LAUNCHED says, or None where no command has started this process together with others."""
    shared = json.loads(os.environ.get(LAUNCHED, "{}"))
    return shared if shared.get("parent") == os.getppid() else None


def end_with_parent() -> None:
    """Have Linux send this process a SIGTERM when the command that has started it with others ends, or is killed."""
    if launched() is not None:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; where it cannot be written, do nothing."""
    with contextlib.suppress(OSError):
        aside = path.with_suffix(".new")
        aside.write_text(text)
        aside.replace(path)


def forget_output(name: str = "stdout") -> None:
    """Drop what a standard file could not take: Python would try again at its end, and fail with status 120."""
    file = getattr(sys, name)
    if type(file) is io.TextIOWrapper:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, file.fileno())
            os.close(null)


def end_soon() -> None:
    """Let Python end without its last search for reference cycles, which takes seconds once torch is imported.

    Before, what is still in open files is written, as that search would have it written. To be called last.
    """
    flush_files()
    try:
        sys.stderr.flush()
    except (OSError, ValueError):  # a full disk, or it is closed: nobody can be told, and the command is not at fault
        forget_output("stderr")
    gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Python's own end cannot be interrupted in good order


def prepare_memory() -> None:
    """Raise MemoryError where this process may not have as many addresses as the command line takes.

    Where they are limited, numpy's OpenBLAS starts one thread: it ends the process when it gets no memory for more.
    """
    if _limit() is None:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        mmap.mmap(-1, _LEAST_BYTES).close()
    except OSError as error:
        raise MemoryError from error


def shortage(error: BaseException) -> str | None:
    """Return a sentence that says what to do about an error for want of memory; None for any other error."""
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
    limited = "" if limit is None else f"this process may use {limit / 1e6:,.0f} MB of addresses: "
    raised = "end what else runs here" if limit is None else "raise the limit (`ulimit -v unlimited`)"
    reason = " ".join(str(seen).split()) or "no more can be had"
    return (
        f"memory is short ({reason:.200}): {limited}{raised}, or ask for less, such as --jobs 1, a smaller "
        "--batch-size, --in-memory no; torch alone takes several GB of addresses"
    )


def _limit() -> int | None:
    """Return how many bytes of addresses this process may use, None where they are not limited."""
    if resource is None:
        return None
    limit: int = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def flush_files() -> None:
    """Write what is in open files."""
    with contextlib.suppress(MemoryError):  # the list of all objects is long
        for each in gc.get_objects():
            if type(each) in _FILES:
                with contextlib.suppress(OSError, ValueError):  # read-only, or closed
                    each.flush()
