"""Measures how fast a cache is read on this machine, compared with the machine's own limit.

It also measures how long an accelerator would wait for batches.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader, Finish
from tpucache.native import gather
from tpucache.progress import note
from tpucache.store.reader import NetworkUse

_COPIED_BYTES: Final = 512 << 20


class BenchResult(NamedTuple):
    """Rates of reading in images a second, each the median of several rounds.

    `limit_images_per_second` is the rate at which this machine copies as many bytes in memory, and `ratio` the rate of
    reading divided by it. `idle` is the share of the time in which a simulated accelerator waits. `bytes_per_image` is
    the mean size of a record on disk, `batch_bytes_per_image` its size in a batch for the device. `reading` says how
    records are read.
    """

    images_per_second: float
    limit_images_per_second: float
    ratio: float
    idle: float | None
    threads: int
    batch_size: int
    finish: Finish
    bytes_per_image: int
    batch_bytes_per_image: int
    reading: str


def run_bench(
    dataset: CachedDataset,
    *,
    batch_size: int,
    threads: int,
    device_rate: float | None,
    finish: Finish,
    rounds: int = 5,
    seconds: float = 1.0,
) -> BenchResult:
    """Measure how fast a dataset is read, and how fast this machine copies the same number of bytes in memory.

    In each round, shuffled batches are read for `seconds`, then bytes are copied, by the same number of threads. A
    simulated accelerator takes `device_rate` images a second; it is idle for the share of time in which its queue is
    empty. The cache must have at least a batch.
    """
    # Each round has a turn for reading, copying, and the simulated device, if there is one. One more turn warms up.
    note(f"bench: measuring for about {(3 * rounds + 1) * seconds:.0f} s at most")
    loader = _warm_loader(dataset, batch_size, threads, seconds, finish)
    batch_bytes = sum(field.nbytes for field in loader.dataset.record_fields)
    # np.zeros would map one page of zeros many times, so that reads would come from the CPU's cache
    source = np.full((max(2 * batch_size, _COPIED_BYTES // batch_bytes), batch_bytes), 1, np.uint8)
    read, limit, idle = [], [], []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            read.append(count_rate(_batches(loader), batch_size, seconds))
            copies = [_copies(source, batch_size) for _ in range(threads)]
            limit.append(sum(pool.map(lambda each: count_rate(each, batch_size, seconds), copies)))
            if device_rate is not None:
                idle.append(simulate_device(_batches(loader), batch_size / device_rate, seconds))
    return BenchResult(
        images_per_second=statistics.median(read),
        limit_images_per_second=statistics.median(limit),
        ratio=statistics.median(map(operator.truediv, read, limit)),
        idle=statistics.median(idle) if idle else None,
        threads=threads,
        batch_size=batch_size,
        finish=finish,
        bytes_per_image=loader.dataset.mean_record_bytes,
        batch_bytes_per_image=batch_bytes,
        reading=loader.dataset.reading.text,
    )


def measure_reading(dataset: CachedDataset, seconds: float) -> float:
    """Return the rate of reading for a device, as `run_bench` measures it."""
    loader = _warm_loader(dataset, 256, 2, seconds, "device")
    return statistics.median(count_rate(_batches(loader), loader.batch_size, seconds) for _ in range(3))


def _warm_loader(dataset: CachedDataset, batch_size: int, threads: int, seconds: float, finish: Finish) -> CachedLoader:
    loader = CachedLoader(dataset, batch_size, shuffle=True, drop_last=True, threads=threads, finish=finish)
    if loader.dataset.reading.planned_bytes:
        for _ in CachedLoader(loader.dataset, batch_size, threads=threads):
            pass  # reads every record into memory
    count_rate(_batches(loader), batch_size, seconds)
    return loader


class NetworkBench(NamedTuple):
    """How fast a cache was read from its URL, and how it used the network.

    `first_seconds` passed before the first batch. `idle` is that of an accelerator after the first batch.
    """

    images_per_second: float
    seconds: float
    first_seconds: float
    idle: float | None
    network: NetworkUse


def bench_network(
    dataset: CachedDataset,
    *,
    batch_size: int,
    threads: int,
    device_rate: float | None,
    finish: Finish,
    seconds: float = 20.0,
) -> NetworkBench:
    """Measure how fast a cache at a URL is read with shuffle="block", for `seconds` or to the end of the epoch.

    The other arguments are those of `run_bench`.
    """
    note(f"bench: reading for {seconds:.0f} s at most")
    began = time.perf_counter()
    loader = CachedLoader(dataset, batch_size, shuffle="block", drop_last=True, threads=threads, finish=finish)
    times: list[float] = []

    def arrived(batch: Any) -> Any:
        times.append(time.perf_counter() - began)
        return batch

    idle = simulate_device(map(arrived, loader), batch_size / (device_rate or math.inf), seconds)
    rate, (use,) = len(times) * batch_size / times[-1], loader.dataset.networks
    return NetworkBench(rate, times[-1], times[0], None if device_rate is None else idle, use)


def simulate_device(batches: Iterable[Any], step_seconds: float, seconds: float) -> float:
    """Return the share of the time in which a simulated accelerator waits for `batches`, measured for `seconds`.

    The accelerator needs `step_seconds` for each batch, and two more batches wait for it at most. The wait for the
    first batch does not count.
    """
    # Batches are kept until their steps begin: a loader cannot fill their buffers again before.
    queued: deque[tuple[float, Any]] = deque(maxlen=3)  # that of the step, and two that wait
    first = due = waited = 0.0
    for batch in batches:
        # A step begins when the step before is over and its own batch has arrived. Both times are computed, so that the
        # accelerator does not seem slower if this thread wakes up late.
        arrived = time.perf_counter()
        first, due = first or arrived, due or arrived
        began = max(due, arrived)
        waited += began - due
        due = began + step_seconds
        queued.append((began, batch))
        if arrived > first + seconds:
            break
        if len(queued) == queued.maxlen:
            time.sleep(max(0.0, queued[0][0] - time.perf_counter()))
    return waited / (began - first) if began > first else 1.0


def _copies(source: npt.NDArray[np.uint8], batch_size: int) -> Iterator[None]:
    """Copy random rows into a batch, again and again: the machine's limit. As in a loader, memory is reused."""
    rng, target = np.random.default_rng(0), np.empty((batch_size, source.shape[1]), np.uint8)
    while True:
        gather(source, rng.integers(len(source), size=batch_size), target)
        yield


def _batches(loader: CachedLoader) -> Iterator[Any]:
    while True:
        yield from loader


def count_rate(batches: Iterable[Any], batch_size: int, seconds: float) -> float:
    iterator = iter(batches)
    next(iterator)
    start = time.perf_counter()
    count = 0
    while (now := time.perf_counter()) < start + seconds:
        next(iterator)
        count += batch_size
    return count / (now - start)
