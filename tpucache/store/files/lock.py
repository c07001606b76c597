"""A lock that a forked process does not inherit locked."""

from __future__ import annotations

import os
import threading


class ThreadLock:
    """A lock among the threads of one process: `with lock: ...`.

    A process that is forked while a thread holds an ordinary lock gets it locked, without the thread that would unlock
    it, and waits for ever. Here each process has a lock of its own. It guards what stays consistent at any moment.
    """

    def __init__(self) -> None:
        self._by_process: dict[int, threading.Lock] = {}

    def __enter__(self) -> None:
        self._by_process.setdefault(os.getpid(), threading.Lock()).acquire()

    def __exit__(self, *_: object) -> None:
        self._by_process[os.getpid()].release()
