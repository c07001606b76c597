"""A command that is sent a signal in a chosen place: `python interrupting.py PLACE SIGNAL WORDS…`.

The places: `lines:N`, at the Nth line that Python runs once signals are handled; `KIND:NAME`, in a place of a kind of
`PLACES`, such as a callback out of C, when the main thread first calls a function of that name; `end`, among the
functions that are called when the interpreter ends. Nothing here depends on time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import runpy
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


class _Finalized:
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()


def in_finalizer(act: Callable[[], None]) -> None:
    _Finalized(act)


def in_weakref_callback(act: Callable[[], None]) -> None:
    target = threading.Event()
    reference = weakref.ref(target, lambda _: act())
    del target
    assert reference() is None


def in_callback_out_of_c(act: Callable[[], None]) -> None:
    ctypes.CFUNCTYPE(None)(act)()


def in_collector_callback(act: Callable[[], None]) -> None:
    def call(phase: str, _: Any) -> None:
        if phase == "start":
            gc.callbacks.remove(call)
            act()

    gc.callbacks.append(call)
    gc.collect(0)


def in_sort_key(act: Callable[[], None]) -> None:
    def key(_: int) -> int:
        act()
        return 0

    sorted([1], key=key)


def in_wide_except(act: Callable[[], None]) -> None:
    with contextlib.suppress(BaseException):
        act()


def in_converted(act: Callable[[], None]) -> None:
    try:
        act()
    except BaseException as error:
        raise ValueError("a library made this of it") from error


def plainly(act: Callable[[], None]) -> None:
    act()


PLACES = {
    "finalizer": in_finalizer,
    "weakref": in_weakref_callback,
    "ctypes": in_callback_out_of_c,
    "collector": in_collector_callback,
    "sort": in_sort_key,
    "except": in_wide_except,
    "converted": in_converted,
    "plain": plainly,
}


def _at_line(number: int, act: Callable[[], None]) -> None:
    """Act at a line, counted from when SIGTERM is handled."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        if event == "line" and (count or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL):
            count += 1
            if count == number:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)


def _at_call(kind: str, name: str, act: Callable[[], None]) -> None:
    """Act in a place of a kind, when a function of this name is first called."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == name and threading.current_thread() is threading.main_thread():
            sys.setprofile(None)
            PLACES[kind](act)

    sys.setprofile(profile)


def main() -> None:
    """Run the command that is given, and send this process the signal in that place."""
    place, number = sys.argv[1], getattr(signal, sys.argv[2])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = sys.argv[3:]

    def act() -> None:
        print("sent", flush=True)
        os.kill(os.getpid(), number)

    kind, _, where = place.partition(":")
    if kind == "lines":
        _at_line(int(where), act)
    elif kind == "end":
        atexit.register(act)
    else:
        _at_call(kind, where, act)
    runpy.run_module("tpucache", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
