"""The process of a command: how it is stopped, its standard files, lack of memory, and its end.

It imports only Python's standard library and two files of tpucache, so it works where numpy cannot be imported.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from tpucache.text import printable_lines

Result = TypeVar("Result")
#: Called for a first signal in place of raising KeyboardInterrupt: returns the error to raise, or None.
Request = Callable[[], BaseException | None]

BEGAN: Final = time.monotonic()  # about when this process began, as this is imported first
#: The program's name in messages: the way it was started.
PROG: Final = (
    "python -m tpucache" if "".join(sys.argv[:1]).endswith(os.path.join("tpucache", "__main__.py")) else "tpucache"
)
INTERRUPTED: Final = "interrupted: run the same command again to continue"
#: The exit status of a command that was stopped before it was done.
STOPPED: Final = 3
#: An environment variable of processes that a command has started to share its work. It is JSON: the `folder` in which
#: each process writes how it ended, the time when the command `began` by `time.monotonic`, and the number of the
#: command's process, their `parent`.
LAUNCHED: Final = "TPUCACHE_LAUNCHED"
#: Files in the folder that LAUNCHED names: each process writes its exit status and message there.
END_PATTERN: Final = "*.end.json"

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_DEFAULT: Final = (signal.default_int_handler, signal.SIG_DFL)
_MOST_SECONDS: Final = 2.5  # that threads may take to end after an interrupted command
#: Bytes of address space that the command line and numpy need; torch needs far more.
_LEAST_BYTES: Final = 96 << 20
#: Messages of the C library, the loader of shared libraries and torch about a lack of memory.
_NO_MEMORY: Final = re.compile(
    r"can ?not allocate memory(?! in static TLS)|can't allocate memory|not enough memory|bad_alloc"
    r"|failed to map segment|can't start new thread",
    re.IGNORECASE,
)

_state: Final = SimpleNamespace(request=None, is_interrupted=False, is_leaving=False, is_waiting=False)


def handle_signals() -> dict[int, Any]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, and return the earlier handlers of those changed.

    A program's own handlers stay, and what it ignores. Outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    taken: dict[int, Any] = {number: old for number in _SIGNALS if (old := signal.getsignal(number)) in _DEFAULT}
    for number in taken:
        signal.signal(number, _on_signal)
    return taken


@contextlib.contextmanager
def stoppable(request: Request | None = None) -> Iterator[None]:
    """Handle signals as `handle_signals` does, but let the first one call `request`."""
    taken = handle_signals()
    before, _state.request = _state.request, request
    try:
        yield
    finally:
        _state.request = before
        for number, handler in taken.items():
            if signal.getsignal(number) == _on_signal:
                signal.signal(number, handler)
        if taken:
            _state.is_interrupted = _state.is_leaving = False


def _on_signal(_number: int, _frame: object) -> None:
    request, _state.request = _state.request, None  # a second signal interrupts
    error = KeyboardInterrupt() if request is None else request()
    if error is not None:
        _state.is_interrupted = _state.is_leaving = True
        raise error


def is_interrupted() -> bool:
    """Return whether a signal has raised an error, even if a library has made another error of it."""
    return bool(_state.is_interrupted)


def is_leaving() -> bool:
    """Return whether a signal ends the command, or this thread's work is given up: then no code waits for a network."""
    return bool(_state.is_leaving) or _thread.is_given_up()


class _Thread(threading.local):
    is_given_up: Callable[[], bool] = staticmethod(bool)


_thread: Final = _Thread()


def give_up_when(is_given_up: Callable[[], bool]) -> None:
    """Let code of this thread that waits for a network ask whether anybody still waits for the thread's work."""
    _thread.is_given_up = is_given_up


def is_given_up() -> Callable[[], bool]:
    """Return what `give_up_when` was given in this thread; it returns False by default."""
    return _thread.is_given_up


def leave() -> None:
    _state.is_leaving = True


def wait_for(function: Callable[[], Result]) -> Result:
    """Call a function that only waits, so that it can be interrupted at any moment."""
    _state.is_waiting = True
    try:
        return function()
    finally:
        _state.is_waiting = False


def is_waiting() -> bool:
    return bool(_state.is_waiting)


def start_processes(function: Callable[[], Result]) -> Result:
    """Call a function that starts workers, so that Ctrl-C does not reach them: each would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return function()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def end(status: int) -> int:
    """Prepare the end of the process, and return its exit status.

    After an interrupt, threads that wait for a network get some seconds.
    """
    ignore_signals()
    if is_leaving():
        ending = threading.Timer(_MOST_SECONDS, os._exit, [status])
        ending.daemon = True
        ending.start()
    try:
        sys.stderr.flush()
    except (OSError, ValueError):  # the disk is full, or the file closed: that is not an error of the command
        forget_output(sys.stderr)
    return status


def open_standard_files() -> None:
    """Open the null device in place of closed standard files: other files would get their descriptors."""
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
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # the disk is full, the terminal is gone, or the file is closed
            sys.stderr.write(printable_lines(text) + "\n")
            sys.stderr.flush()


def complain(error: object, status: int) -> int:
    """Print an error as one line; one of several processes of a command writes it to a file instead."""
    message = " ".join(str(error).split())
    if (shared := launched()) is None:
        tell(f"{PROG}: {message}")
        return status
    path = Path(shared["folder"], END_PATTERN.replace("*", os.environ.get("RANK", "0")))
    with contextlib.suppress(OSError):
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps({"status": status, "message": message, "time": time.time()}))
        aside.replace(path)
    return status


def launched() -> dict[str, Any] | None:
    shared = json.loads(os.environ.get(LAUNCHED, "{}"))
    return shared if shared.get("parent") == os.getppid() else None


def forget_output(file: Any) -> None:
    """Discard the text in the buffer of a standard file: writing it at the end would change the exit status to 120."""
    if type(file) is io.TextIOWrapper:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, file.fileno())
            os.close(null)


def prepare_memory() -> None:
    """Raise MemoryError if too little address space is allowed. OpenBLAS would end the process for want of memory."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
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
        text, may_be_short = str(seen), isinstance(seen, (RuntimeError, ImportError, OSError))
        if isinstance(seen, MemoryError) or (may_be_short and _NO_MEMORY.search(text)):
            return (
                f"memory is short ({text or 'none is left':.200}): end other programs, raise a limit of this process "
                "(`ulimit -v unlimited`), or ask for less, such as --jobs 1 or a smaller --batch-size; torch alone "
                "takes several GB of address space"
            )
        seen = seen.__cause__ or seen.__context__
    return None
