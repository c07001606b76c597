"""Handles SIGINT and SIGTERM, so that a command stops wherever in the program they arrive.

While the command runs (`run`), a signal raises KeyboardInterrupt in the main thread. Before, a signal ends the process
at once, because nothing has begun. Afterwards, a signal does not change the command's result.

Python drops exceptions that are raised in finalizers, in callbacks of weak references and in many callbacks from C, and
some libraries catch too much. So the first signal starts a thread, which sends the signal again until the exception is
raised where it is not dropped. If the command has not ended some seconds later, the thread ends the process.

The process of another program that calls a command is never ended.

The handler looks at the stack to see whether the command runs: a variable would be set a moment too early or too late.
Until a signal comes, the handler costs nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, NoReturn, TypeVar

Result = TypeVar("Result")
#: A function that is called when a signal arrives, before anything is raised. Its arguments say whether it was called
#: for the same signal before, and whether the main thread is in `wait_for`. It returns the error to raise, or None.
Request = Callable[[bool, bool], "BaseException | None"]

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

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_IMPORTING: Final = "<frozen importlib._bootstrap>"
_AGAIN_SECONDS: Final = 0.25
_MOST_TIMES: Final = 40
#: How many seconds an interrupted command may take, for example to end its workers; and then to write its open files.
_MOST_SECONDS: Final = 2.5
_FLUSH_SECONDS: Final = 0.25

#: The command that this process runs, or that its parent ran when it forked this process. The list has one item or
#: none.
_commands: list[_Command] = []


class _Command:
    def __init__(self, *, is_own: bool) -> None:
        self.process = os.getpid()
        #: Whether the process was started for the command, and may be ended.
        self.is_own = is_own
        self.handlers: dict[int, Any] = {}  # the earlier handlers
        self.hook = sys.unraisablehook
        self.request: Request | None = None
        self.has_begun = self.is_ignoring = False
        #: The last signal, the last error that a signal has raised, and whether a signal that came outside of the
        #: command has yet to raise one.
        self.number = 0
        self.raised: type[BaseException] | None = None
        self.is_late = False
        #: Whether the command is about to end, and whether its process is ended if that takes too long. A command that
        #: was stopped by a request may have to save something first.
        self.is_leaving = self.must_end = False
        #: The number of times that the thread has sent the signal again, and how many of these have arrived.
        self.sent = self.seen = 0
        self.is_watched = self.is_over = self.is_slow = False
        self.sending = _thread.allocate_lock()
        self.over = _thread.allocate_lock()  # released to end the thread
        self.over.acquire()
        self.last_word = _thread.allocate_lock()  # its holder prints how the command ended
        #: The exit status of the process, once it is known.
        self.status: int | None = None
        self.flush: Callable[[], None] = lambda: None


def begin(*, is_own: bool = False) -> bool:
    """Handle SIGINT and SIGTERM from now on. Return whether this call began to handle them; `end` needs this result.

    `is_own` says that the process was started for the command. In the process of another program, signals that the
    program handles are not touched. Outside of the main thread nothing changes. Ignored signals stay ignored.
    """
    if is_own:
        taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    else:
        defaults = {signal.SIGINT: (signal.default_int_handler,), signal.SIGTERM: (signal.SIG_DFL,)}
        taken = [number for number in _SIGNALS if signal.getsignal(number) in defaults[number]]
    return _take(taken, is_own=is_own)


def end(has_begun: bool) -> None:
    """Undo `begin`, because the program that called the command continues; `has_begun` is the result of `begin`.

    Raises KeyboardInterrupt for a signal that came after the command had ended: the signal was meant for the program.
    """
    command = _current()
    if not has_begun or command is None:
        return
    command.is_over = True
    command.over.release()
    with command.sending:  # all signals of the thread have arrived, and it sends no more
        pass
    for number, handler in command.handlers.items():
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, handler)
    if sys.unraisablehook is _on_unraisable:
        sys.unraisablehook = command.hook
    _commands.clear()
    if command.is_late:
        raise KeyboardInterrupt


def run(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a command's function and return its result. A signal raises KeyboardInterrupt only during this call."""
    command = _own()
    if command is not None:
        command.has_begun = True
        if command.is_late:  # a signal came after `begin`
            command.is_late = False
            _interrupt(command)
    return function(*arguments)


def wait_for(function: Callable[[], Result]) -> Result:
    """Call a function that only waits, and return its result.

    A `Request` knows whether the main thread is in this call, because a wait can be interrupted at any moment.
    """
    return function()


@contextlib.contextmanager
def requests(request: Request) -> Iterator[None]:
    """Let the function `request` decide what a signal raises during the `with` block.

    Signals that no command handles yet are handled during the block, too. Outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_begun = _take([number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], is_own=False)
    command = _commands[0]
    before, command.request = command.request, request
    try:
        yield
    finally:
        command.request = before
        end(has_begun)


def start_processes(function: Callable[[], Result]) -> Result:
    """Call a function that starts worker processes, and return its result.

    A terminal sends SIGINT to all processes of a command. The workers, and the processes that they start, do not
    receive it: each would print a traceback, and this process ends them anyway. In this process, a signal that arrives
    during the call is raised after the call, because workers that have only begun to start could not be ended.
    """
    if sys.platform == "win32":
        return function()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        return function()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_stopped() -> bool:
    """Return whether a signal has interrupted the command, even if a library has replaced the signal's exception."""
    command = _current()
    return command is not None and command.raised is not None


def is_leaving() -> bool:
    """Return whether the command is about to end because of a signal; then no code should wait for a network."""
    command = _current()
    return command is not None and command.is_leaving


def leave() -> None:
    """Make `is_leaving` return True: a `Request` has stopped the command, which is about to end."""
    if (command := _current()) is not None:
        command.is_leaving = True


def ignore() -> None:
    """Ignore signals from now on: the command has noticed one, and is about to end."""
    if (command := _own()) is not None:
        command.is_ignoring = True


def has_last_word() -> bool:
    """Return whether the caller may print how the command has ended; False if another call has returned True before."""
    command = _own()
    return command is None or command.last_word.acquire(blocking=False)


def finish(status: int, flush: Callable[[], None]) -> None:
    """Store the exit status, because the command has nothing left to do.

    From now on, the first signal starts a countdown of some seconds, and then the process is ended. A second signal
    ends the process at once. If a signal came before, the countdown starts now. Before the process is ended, `flush` is
    called, which writes the buffers of open files.
    """
    if (command := _own()) is not None:
        command.flush = flush
        command.is_ignoring = False
        command.status = status
        if command.number:
            _watch(command)


def is_handling(kinds: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """Return whether the calling code handles an exception of these kinds, or one that was raised during such handling.

    In a signal's handler, the calling code is the code that the signal has interrupted.
    """
    error, most = sys.exc_info()[1], 100
    while error is not None and most:
        if isinstance(error, kinds):
            return True
        error, most = error.__context__, most - 1
    return False


def _current() -> _Command | None:
    return _commands[0] if _commands else None


def _own() -> _Command | None:
    """Return the command if this is the main thread; None in other threads, and without a command."""
    return _current() if threading.current_thread() is threading.main_thread() else None


def _take(numbers: Any, *, is_own: bool) -> bool:
    """Handle the signals `numbers` from now on, and return True.

    Outside of the main thread, or if a command of this process handles signals already, do nothing and return False.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = _current()
    if not is_main or (before is not None and before.process == os.getpid()):
        return False
    command = _Command(is_own=is_own)
    _commands[:] = [command]
    sys.unraisablehook = _on_unraisable
    for number in numbers:
        command.handlers[number] = signal.getsignal(number)
        signal.signal(number, _on_signal)
    return True


def _on_signal(number: int, frame: FrameType | None) -> None:
    command = _current()
    if command is None or command.process != os.getpid():  # a fork of it
        raise KeyboardInterrupt
    is_again, command.seen = command.seen < command.sent, command.sent
    if command.is_ignoring:
        return
    if command.status is not None:
        _on_signal_at_the_end(command, number, is_again=is_again)
        return
    is_first, command.number = not command.number, number
    if command.request is not None and not command.must_end:
        error = command.request(is_again, _is_within(frame, wait_for.__code__))
        if isinstance(error, KeyboardInterrupt):
            _interrupt(command)
        elif error is not None:
            command.raised, command.is_leaving = type(error), True
            _watch(command)
            raise error
    elif command.request is not None or _is_within(frame, run.__code__):
        if _is_within(frame, start_processes.__code__) or _is_within(frame, _on_unraisable.__code__):
            command.raised = KeyboardInterrupt
            command.must_end = True
            _watch(command)  # sends the signal again
            return
        if command.is_own and threading.active_count() == 1 and _is_importing(frame):
            _end_at_once(command)  # an interrupted import may raise another error, or end the process
        if not (is_again and is_handling(KeyboardInterrupt)):  # otherwise it is being raised
            _interrupt(command)
    elif command.is_own and not command.has_begun:
        _end_at_once(command)
    elif is_first:
        command.is_late = True


def _interrupt(command: _Command) -> NoReturn:
    command.raised = KeyboardInterrupt
    command.is_leaving = command.must_end = True
    _watch(command)
    raise KeyboardInterrupt


def _on_signal_at_the_end(command: _Command, number: int, *, is_again: bool) -> None:
    if is_again:
        return
    if command.number:
        command.flush()
        os._exit(command.status or 0)
    command.number = number
    _watch(command)


def _on_unraisable(unraisable: Any) -> None:
    """Replace `sys.unraisablehook`: print nothing about an interrupt that Python drops, because it is raised again."""
    command, error = _current(), unraisable.exc_value
    if command is None:
        sys.__unraisablehook__(unraisable)
    elif command.raised is not None and isinstance(error, (command.raised, KeyboardInterrupt)):
        _watch(command)
    elif (number := getattr(error, "sigval", None)) is not None:  # of torch's launcher, which has handlers of its own
        command.number = int(number)
        _watch(command)
    else:
        command.hook(unraisable)


def _watch(command: _Command) -> None:
    """Start two threads, unless they run already: one sends the signal again, the other writes the buffers of files.

    This function does not use `threading`, whose locks the interrupted code may hold.
    """
    if command.is_watched:
        return
    command.is_watched = True
    watching = _thread.allocate_lock()
    watching.acquire()
    try:
        _thread.start_new_thread(_flush_if_slow, (command, watching))
        _thread.start_new_thread(_interrupt_again, (command, threading.main_thread().ident, watching))
    except RuntimeError:  # Python is ending: some releases of 3.12 cannot start threads then
        if command.is_own and command.status is not None:
            command.flush()
            os._exit(command.status)


def _interrupt_again(command: _Command, thread: Any, watching: Any) -> None:
    """Send the signal again until the command has ended; if that takes too long, end its process."""
    seconds, sent = 0.0, 0
    while not command.over.acquire(timeout=_AGAIN_SECONDS):
        if command.must_end or command.status is not None:
            seconds += _AGAIN_SECONDS
        if seconds >= _MOST_SECONDS and command.is_own:
            _end_slow(command, watching)
        if command.status is not None:
            continue
        is_ours = signal.getsignal(command.number) is _on_signal
        with command.sending:
            if not command.is_over:
                command.sent += is_ours
                _send(thread, command.number)
        sent += 1
        if sent == _MOST_TIMES or not is_ours:  # a library's handler is not called twice
            break
    command.is_watched = False
    watching.release()


def _flush_if_slow(command: _Command, watching: Any) -> None:
    """Write the buffers of open files if the command takes too long to end."""
    with watching:
        pass
    if command.is_slow:
        command.flush()


def _end_slow(command: _Command, watching: Any) -> None:
    if command.status is None:
        _end_at_once(command)
    command.is_slow = True
    watching.release()  # another thread flushes, because the end may be blocked by a file that cannot be written
    with contextlib.suppress(Exception):
        command.over.acquire(timeout=_FLUSH_SECONDS)
    os._exit(command.status or 0)


def _send(thread: Any, number: int) -> None:
    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        signal.pthread_kill(thread, number)  # also interrupts a thread that waits


def _end_at_once(command: _Command) -> None:
    """End this process with the status `STOPPED`, and print one line before.

    Print nothing if the end of the command was reported before, or if a command has started this process with others.
    """
    if command.last_word.acquire(blocking=False) and LAUNCHED not in os.environ:
        with contextlib.suppress(OSError):
            os.write(2, f"{PROG}: {INTERRUPTED}\n".encode())
    os._exit(STOPPED)


def _is_within(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
