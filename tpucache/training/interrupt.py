"""Ctrl-C and SIGTERM as a request: the step under way is finished and saved before the run ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second one interrupts at once.

    Only the main thread may set handlers: elsewhere the request is never made, and signals do what they did.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(_number: int, _frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
