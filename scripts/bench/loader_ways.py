"""How fast CachedLoader is by the way it reads, compared with rows copied in memory, and what its threads cost."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from tpucache import CachedDataset, CachedLoader
from tpucache.loading.reading.reader import InMemory
from tpucache.native import gather

COPIES: Final = 2048  # rows of the array that the limit copies from
WAIT_SECONDS: Final = 500e-6  # a simulated copy of a record, long beside the time that it takes to wake a thread
WAITING_BATCHES: Final = 16
WAYS: Final[dict[str, InMemory]] = {"keep": "auto", "stream": False}


def limit_rates(record_bytes: int, batch: int, threads: int) -> Iterator[float]:
    """Yield the rate of a copy of random rows of an array, an epoch of a few batches each time, in rows a second."""
    source = np.full((COPIES, record_bytes), 1, np.uint8)
    targets = [np.zeros((batch, record_bytes), np.uint8) for _ in range(threads + 1)]
    order = itertools.cycle(np.random.default_rng(0).permutation(COPIES)[: COPIES // batch * batch].reshape(-1, batch))
    with ThreadPoolExecutor(threads) as pool:
        while True:
            start, batches = time.perf_counter(), 12
            pending = [
                pool.submit(gather, source, next(order), targets[turn % len(targets)]) for turn in range(batches)
            ]
            for future in pending:
                future.result()
            yield batches * batch / (time.perf_counter() - start)


def epoch_rate(loader: CachedLoader) -> float:
    """Return the samples a second of one epoch."""
    start = time.perf_counter()
    samples = sum(len(batch[0]) for batch in loader)
    return samples / (time.perf_counter() - start)


def way_ratios(cache: Path, batch: int, threads: int, rounds: int) -> dict[str, list[float]]:
    """Return the rates of the first and the second epoch over that of the limit, by the way of reading: medians.

    A dataset and a loader are new in each round. The limit is measured before and after each epoch.
    """
    with contextlib.ExitStack() as stack:
        places = {name: (cache, memory) for name, memory in WAYS.items()}
        mount = stack.enter_context(read_only(cache))
        if mount is not None:
            places["map"] = (mount, "auto")
        found: dict[str, list[list[float]]] = {name: [] for name in places}
        record = CachedDataset(cache).manifest.layout.nbytes
        limits = limit_rates(record, batch, threads)
        next(limits)
        for _ in range(rounds):
            for name, (place, memory) in places.items():
                with CachedDataset(place, in_memory=memory) as dataset:
                    loader = CachedLoader(dataset, batch, shuffle=True, threads=threads)
                    before, first = next(limits), epoch_rate(loader)
                    between, second = next(limits), epoch_rate(loader)
                    after = next(limits)
                    found[name].append([2 * first / (before + between), 2 * second / (between + after)])
        return {
            name: [statistics.median(epoch) for epoch in zip(*ratios, strict=True)] for name, ratios in found.items()
        }


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path | None]:
    """Give a read-only mount of a folder; None where this user may not mount."""
    place = tempfile.mkdtemp()  # not a TemporaryDirectory, which would remove what is mounted there
    bind = ["mount", "--bind", str(folder.resolve()), place]
    is_mounted = subprocess.run(bind, check=False, capture_output=True).returncode == 0
    try:
        remount = ["mount", "-o", "remount,bind,ro", place]
        is_read_only = is_mounted and subprocess.run(remount, check=False, capture_output=True).returncode == 0
        yield Path(place) if is_read_only else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", place], check=True)
        Path(place).rmdir()


def lock_microseconds(cache: Path, batch: int, rounds: int) -> float:
    """Return how long a record in memory holds the interpreter's lock at most: all that is left without its copy."""
    loader = CachedLoader(CachedDataset(cache, in_memory=True), batch, shuffle=True, threads=1)
    epoch_rate(loader)
    with replaced_copy(lambda *_, **__: None):
        times = []
        for _ in range(rounds):
            start = time.process_time()
            samples = sum(len(one[0]) for one in loader)
            times.append((time.process_time() - start) / samples * 1e6)
    return min(times)


def thread_scaling(cache: Path, batch: int, threads: int = 16) -> float:
    """Return the rate of many threads over that of one, where copying a record only waits."""
    dataset = CachedDataset(cache, in_memory=True)
    dataset = dataset.select(np.arange(WAITING_BATCHES * batch) % len(dataset))
    loaders = [CachedLoader(dataset, batch, threads=count) for count in (1, threads)]
    epoch_rate(loaders[0])
    with replaced_copy(lambda targets, *_, **__: time.sleep(len(targets) * WAIT_SECONDS)):
        one, many = (max(epoch_rate(loader) for _ in range(2)) for loader in loaders)
    return many / one


@contextlib.contextmanager
def replaced_copy(copy: Any) -> Iterator[None]:
    """Have readers call something else in place of the copy of records."""
    with mock.patch("tpucache.loading.reading.reader.copy_rows", copy):
        yield
