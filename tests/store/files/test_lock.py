"""A lock of threads is free in a process that was forked while one of them held it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpucache.store.files import ThreadLock

# What a fork inherits is what it would while another thread holds the lock.
FORKED_WHILE_LOCKED = """
import os, signal, sys
from pathlib import Path
from tpucache.store.cache import Cache
from tpucache.store.manifest import Manifest
from tpucache.store.reader import ShardReader

directory = Path(sys.argv[1])
manifest = Manifest.load(directory)
reader, rows = ShardReader(directory, manifest.shards), Cache(directory, manifest).index.read_all()
with reader._lock:
    process = os.fork()
    if not process:
        signal.alarm(240)
        os._exit(int(len(reader.read(rows[0])) != rows[0]["length"]))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


@pytest.mark.slow
def test_a_process_forked_while_a_reader_is_locked_reads_with_it(cache: Path, run_forking: Callable[..., str]) -> None:
    assert run_forking(FORKED_WHILE_LOCKED, cache) == "0\n"


def test_the_lock_keeps_other_threads_out() -> None:
    lock, inside, most = ThreadLock(), 0, 0

    def enter(_: int) -> None:
        nonlocal inside, most
        for _ in range(20):
            with lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0.0001)
                inside -= 1

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(enter, range(4))]
    assert most == 1
