"""A lock of threads is free in a process that was forked while one of them held it."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tpucache.store.cache import Cache
from tpucache.store.files.lock import ThreadLock
from tpucache.store.manifest import Manifest
from tpucache.store.reader import ShardReader


def run_forked(child: Callable[[], None]) -> None:
    """Run a function in a forked process, which must end it within ten seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        process = os.fork()
    if not process:
        signal.alarm(10)
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_a_process_forked_while_a_thread_opens_a_shard_reads_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest.load(cache)
    reader, rows = ShardReader(cache, manifest.shards), Cache(cache, manifest).index.read_all()
    real, opening, forked = os.open, threading.Event(), threading.Event()

    def slowly(path: Path, flags: int) -> int:
        opening.set()
        forked.wait(20)
        return real(path, flags)

    monkeypatch.setattr(os, "open", slowly)
    thread = threading.Thread(target=reader.read, args=(rows[0],))
    thread.start()
    opening.wait(20)

    def child() -> None:
        os.open = real
        assert len(reader.read(rows[0])) == rows[0]["length"]

    try:
        run_forked(child)
    finally:
        forked.set()
        thread.join()


def test_the_lock_keeps_other_threads_out() -> None:
    lock, inside, most = ThreadLock(), 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0.0001)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_an_error_inside_unlocks() -> None:
    lock = ThreadLock()
    with pytest.raises(RuntimeError), lock:
        raise RuntimeError
    with lock:
        pass
