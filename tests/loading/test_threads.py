"""Threads share the rows of a batch, each row once, and an error reaches the caller after all have stopped."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE, wait_for

from tpucache import CachedDataset, CachedLoader, verify_cache
from tpucache.loading.ahead import Ahead, ReadingThreads
from tpucache.store.ahead import map_ahead, say_no_thread


@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (2, 3), (4, 3), (16, 3), (16, 1), (3, 1)])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 16, 17, 256])
def test_every_row_is_worked_at_once(threads: int, ahead: int, rows: int) -> None:
    done = np.zeros((6, rows), np.int64)
    with ReadingThreads(threads, ahead) as pool:

        def fill(batch: int) -> None:
            def work(start: int, stop: int) -> None:
                done[batch, start:stop] += 1

            pool.divide(work, rows)

        for future in [pool.submit(lambda batch=batch: fill(batch)) for batch in range(6)]:
            future.result()
    assert (done == 1).all()


def test_more_threads_than_batches_work_at_one_together() -> None:
    meeting = threading.Barrier(4, timeout=PATIENCE)
    with ReadingThreads(4, 1) as pool:
        pool.submit(lambda: pool.divide(lambda start, stop: start < 32 and meeting.wait(), 64)).result()
    assert not meeting.broken


@pytest.mark.parametrize("failing", [0, 40])
def test_an_error_is_raised_when_no_thread_works_at_the_batch_any_more(failing: int) -> None:
    running, after = [0], []
    lock = threading.Lock()

    def work(start: int, stop: int) -> None:
        with lock:
            running[0] += 1
        try:
            if start <= failing < stop:
                raise ValueError("broken")
        finally:
            with lock:
                running[0] -= 1

    def batch(pool: ReadingThreads) -> None:
        try:
            pool.divide(work, 64)
        finally:
            after.append(running[0])

    with ReadingThreads(4, 1) as pool:
        future = pool.submit(lambda: batch(pool))
        with pytest.raises(ValueError, match="broken"):
            future.result()
    assert after == [0]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [0, "epoch"])
def test_any_number_of_threads_gives_the_same_batches(cache, variant) -> None:
    def batches(threads: int, prefetch: int) -> list[torch.Tensor]:
        loader = CachedLoader(CachedDataset(cache, variant), 64, shuffle=True, threads=threads, prefetch=prefetch)
        return [images.clone() for _ in range(2) for images, _ in loader]

    expected = batches(1, 2)
    for threads, prefetch in ((2, 2), (7, 0), (16, 1)):
        found = batches(threads, prefetch)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_loaders_of_a_dataset_that_follow_one_another_use_the_same_buffers(cache) -> None:
    dataset = CachedDataset(cache)
    places = set()
    for _ in range(5):
        places |= {images.data_ptr() for images, _ in CachedLoader(dataset[:], 40)}
    assert len(places) <= 5
    with ThreadPoolExecutor(2) as threads:  # two at once never share a batch
        lists = list(threads.map(lambda _: [images.clone() for images, _ in CachedLoader(dataset, 40)], range(2)))
    assert all(torch.equal(one, other) for one, other in zip(*lists, strict=True))


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("options", [{"in_memory": False}, {"in_memory": True}, {"variant": "epoch"}], ids=str)
def test_where_no_thread_can_start_all_is_read_and_that_is_said_once(
    cache, options, most, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose limit of processes is reached."""
    with CachedDataset(cache, **options) as dataset:
        expected = [images.clone() for images, _ in CachedLoader(dataset, 40, shuffle=True, threads=4)]
    start, started = threading.Thread.start, []

    def start_some(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    say_no_thread.cache_clear()
    with CachedDataset(cache, **options) as dataset:
        loader = CachedLoader(dataset, 40, shuffle=True, threads=4)
        assert all(torch.equal(one, images) for one, (images, _) in zip(expected, loader, strict=True))
        names = {thread.name for thread in threading.enumerate()}
        assert "lease" not in dataset.maps or "tpucache-leases" in names  # somebody watches it
    assert verify_cache(cache) == []
    assert [message for message in caplog.messages if "no more threads can be started" in message] == caplog.messages
    assert len(caplog.messages) == 1


FORKED = """
import os, signal, sys, time, warnings
from tpucache import CachedDataset, CachedLoader, MixedLoader
from tpucache.errors import UsageError
from tpucache.loading.ahead import Ahead

warnings.simplefilter("ignore")  # Python's, of forks of a process with threads
dataset = CachedDataset(sys.argv[2])
loader = CachedLoader(dataset, 16, shuffle=True)
if sys.argv[1] == "mixed":
    loader = MixedLoader([loader], [1])
if sys.argv[1] == "ahead":
    context = Ahead(loader, lambda batch, number: batch)
    iterator = iter(context.__enter__())
else:
    iterator = iter(loader)
next(iterator)
time.sleep(0.2)  # the threads have read ahead, and wait
child = os.fork()
signal.alarm(240)
if child:
    status = os.waitpid(child, 0)[1]
    print(len(list(iterator)), status)
else:
    try:
        next(iterator)
    except UsageError as error:
        print(error)
    if sys.argv[1] == "ahead":
        context.__exit__(None, None, None)
    print(len(list(loader)), len(list(CachedLoader(dataset, 30))), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loader", "mixed", "ahead"])
def test_an_epoch_is_not_continued_in_a_forked_process_which_begins_its_own(kind, cache, run_with_torch) -> None:
    done = run_with_torch(FORKED, kind, cache)
    said, own, others = done.stdout.splitlines()
    assert "begin a new iteration here" in said
    assert (own, others) == ("10 5", "9 0")


@pytest.mark.parametrize("kind", ["read", "ask", "feed"])
def test_a_thread_that_collects_its_own_iteration_as_garbage_does_not_wait_for_itself(kind: str) -> None:
    abandoned, left, ends = threading.Event(), threading.Event(), list[BaseException]()

    def collect(*_: object) -> None:
        abandoned.wait(PATIENCE)
        wait_for(lambda: gc.collect() < 0 or ends)  # no two threads collect at once

    def ask(number: int) -> None:
        time.sleep(0.01)  # late, so that threads ask for the next ones
        if number > 1:
            collect()

    def iteration() -> Iterator[None]:
        try:
            if kind == "ask":
                yield from map_ahead(ask, range(9))
            elif kind == "read":
                with ReadingThreads(2, 1) as threads:
                    threads.submit(collect)
                    yield
            else:
                with Ahead([1], collect, at_end=left.set):
                    yield
        except BaseException as error:
            ends.append(error)
            raise

    cycle: list[Any] = [iteration()]
    cycle.append(cycle)
    for _ in range(1 + (kind == "ask")):
        next(cycle[0])
    del cycle
    abandoned.set()
    wait_for(lambda: ends)
    assert isinstance(ends[0], GeneratorExit)
    assert kind != "feed" or left.wait(PATIENCE)


@pytest.mark.slow
def test_garbage_that_the_exiting_interpreter_collects_is_no_error() -> None:
    program = """if True:
        import gc, sys
        import tpucache.store.ahead

        class Last:
            def __del__(self):
                made = []
                for _ in range(200):
                    made.append([made])

        gc.set_threshold(5)
        sys.kept = tpucache.store.ahead
        sys.kept.last = Last()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE, check=True)
    assert not done.stderr
