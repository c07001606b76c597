"""A lock of threads is free in a process that was forked while it was held, and threads make a value once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpucache.store.ahead import map_ahead
from tpucache.store.threads import ThreadLock, ThreadPool, cached_for_threads

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


def in_threads(count: int, ask: Callable[[int], object]) -> list[object]:
    """Return what `ask` returns or raises for the numbers 0, 1, 2, …, asked by one thread each at the same time."""
    begin = threading.Barrier(count)

    def asked(number: int) -> object:
        begin.wait(60)
        try:
            return ask(number)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(asked, range(count)))


def test_threads_that_ask_at_once_get_one_value_that_was_made_once() -> None:
    calls: list[str] = []

    @cached_for_threads(2)
    def make(name: str) -> object:
        calls.append(name)
        time.sleep(0.05)
        return object()

    found = in_threads(16, lambda number: make("ab"[number % 2]))
    assert sorted(calls) == ["a", "b"]
    assert len(set(map(id, found))) == 2
    assert make("a") is found[0]


def test_a_value_that_takes_long_keeps_no_thread_from_another_value() -> None:
    is_made = threading.Event()

    @cached_for_threads(2)
    def make(number: int) -> bool:
        return is_made.wait(60) if number == 0 else is_made.set() is None

    assert in_threads(2, make) == [True, True]


def test_an_error_is_not_kept() -> None:
    calls: list[int] = []

    @cached_for_threads(None)
    def make() -> int:
        calls.append(len(calls))
        if len(calls) < 3:
            raise ValueError("not yet")
        return calls[-1]

    found = in_threads(8, lambda _: make())
    assert sum(isinstance(each, ValueError) for each in found) == 2
    assert {each for each in found if isinstance(each, int)} == {2}
    assert len(calls) == 3


def test_only_the_values_asked_for_last_are_kept_and_none_after_clearing() -> None:
    calls: list[int] = []

    @cached_for_threads(2)
    def make(number: int) -> None:
        calls.append(number)

    for number in (0, 1, 0, 2, 0, 1):
        make(number)
    assert calls == [0, 1, 2, 1]
    make.cache_clear()
    make(1)
    assert calls == [0, 1, 2, 1, 1]


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_pool_makes_do_with_the_threads_that_the_system_allows(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def ask(number: int) -> int:
        time.sleep(0.003)
        if number == 30:
            raise ValueError("broken")
        return -number

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with ThreadPool(8) as pool:
        answers = [pool.submit(ask, number) for number in range(40)]
        assert [answer.result() for answer in answers[:30]] == [-number for number in range(30)]
        with pytest.raises(ValueError, match="broken"):
            answers[30].result()
        assert len(started) == allowed
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(ask, 1)
    assert list(map_ahead(ask, range(20))) == [-number for number in range(20)]
