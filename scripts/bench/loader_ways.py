"""How fast CachedLoader is by the way it reads, compared with rows copied in memory, and what its threads cost."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from tpucache import CachedDataset, CachedLoader
from tpucache.loading.reading import leases
from tpucache.loading.reading.record_reader import InMemory
from tpucache.native import gather

COPIES: Final = 2048  # rows of the array that the limit copies from
WAIT_SECONDS: Final = 500e-6  # a simulated copy of a record, long compared with the time to wake a thread
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


#: Reads epochs in a process of its own, whose private memory is then that of one way of reading.
EPOCHS: Final = """
import json, sys, time
from pathlib import Path
import numpy.random  # numpy would import it in the first epoch, which takes 13 ms
from tpucache import CachedDataset, CachedLoader
from tpucache.loading.reading import leases, memory

place, asked = sys.argv[1], json.loads(sys.argv[2])
if not asked["leases"]:
    leases._has_leases = lambda: False
dataset = CachedDataset(place, in_memory=asked["in_memory"])
if asked["budget"]:
    size = int(asked["budget"] * len(dataset) * sum(field.nbytes for field in dataset.record_fields))
    memory.available_memory = lambda: 2 * size - sum(each.used for each in memory.BUDGET._claims.values())
    memory._RESERVE = 1 << 60
loader = CachedLoader(dataset, asked["batch"], shuffle=True, threads=asked["threads"], finish=asked["finish"])
rates = []
for _ in range(asked["epochs"]):
    start = time.perf_counter()
    samples = sum(len(batch[0]) for batch in loader)
    rates.append(samples / (time.perf_counter() - start))
lines = Path("/proc/self/status").read_text().splitlines()
(private,) = (int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon"))
print(json.dumps({"rates": rates, "private_mb": private, "maps": dataset.maps, "way": loader.dataset.reading.text}))
"""
SHOWN: Final = (1, 2, 3, 6)  # epochs
THIRD: Final = 1 / 3  # of the records are what the budget has room for
#: The rows of the table of epochs: whether leases are taken, in_memory, and the share of records in the budget.
EPOCH_WAYS: Final[dict[str, tuple[bool, InMemory, float]]] = {
    "default": (True, "auto", 0),
    "in_memory=False": (True, False, 0),
    "default, a third fits into the budget": (True, "auto", THIRD),
    "without leases, default": (False, "auto", 0),
    "without leases, in_memory=False": (False, False, 0),
    "without leases, a third fits into the budget": (False, "auto", THIRD),
}


def epoch_rows(cache: Path, batch: int, threads: int, finish: str, rounds: int) -> list[dict[str, Any]]:
    """Return for each way of reading the medians of the rates of the epochs and of the private memory at the end."""
    with read_only(cache) as mount:
        ways = {name: (cache, *way) for name, way in EPOCH_WAYS.items()}
        if mount is not None:
            ways["mounted read-only, default"] = (mount, True, "auto", 0)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (place, has_leases, in_memory, budget) in ways.items():
                asked: dict[str, Any] = {"leases": has_leases, "in_memory": in_memory, "budget": budget, "batch": batch}
                asked |= {"threads": threads, "finish": finish, "epochs": max(SHOWN)}
                command = [sys.executable, "-c", EPOCHS, str(place), json.dumps(asked)]
                found[name].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    return [
        {
            "name": name,
            "way": turns[0]["way"],
            "maps": turns[0]["maps"],
            "rates": [statistics.median(epoch) for epoch in zip(*(turn["rates"] for turn in turns), strict=True)],
            "private_mb": statistics.median(turn["private_mb"] for turn in turns),
        }
        for name, turns in found.items()
    ]


def epoch_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of epochs, its heading first."""
    table = [["images/s by epoch", *map(str, SHOWN), "first of the sixth", "MB private"]]
    for row in rows:
        rates = [row["rates"][epoch - 1] for epoch in SHOWN]
        cells = [f"{rate:,.0f}" for rate in rates]
        table.append([row["name"], *cells, f"{rates[0] / rates[-1]:.2f}", f"{row['private_mb']:,.0f}"])
    return table


def look_milliseconds(folder: Path, files: int = 1000) -> float:
    """Return how long it takes to check the leases of this many files, which happens five times a second."""

    class Owner:
        def stop_reading(self, shard: int) -> tuple[()]:
            return ()

        def forget_maps(self) -> None:
            pass

    owner, held = Owner(), []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for number in range(files):
            path = Path(place, str(number))
            path.write_bytes(bytes(4096))
            with path.open("rb") as file:
                held.append(leases.LeasedMap(path, file.fileno(), owner, number))
        times = []
        for _ in range(20):
            start = time.perf_counter()
            leases._WATCH.look()
            times.append(time.perf_counter() - start)
        for leased in held:
            leased.end()
    return statistics.median(times) * 1e3


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
    with mock.patch("tpucache.loading.reading.record_reader.copy_rows", copy):
        yield
