"""What 13 million samples and 256 hosts of 8 accelerators each ask of planning, of reading and of the slowest host.

The samplers, the index and CachedLoader are the package's own, over a cache of that many rows. Simulated are

- the accelerators: a host's eight take a number of images a second together, step by step on all hosts at once;
- a file system that all hosts share: a request takes a latency and its bytes a share of the host's bandwidth, and so
  many may be under way at once. The calls that read files, and the loader's threads, are replaced by ones that count
  time instead of waiting, so that the processors of this machine do not matter;
- an object store from which all hosts read their shares of each epoch, with a disk that keeps some of it;
- a host that is slower than the others: 256 queues of batches, of which each step takes one.

Times of planning are processor times, which other programs do not change.

    python -m scripts.bench scale --markdown scale.md --picture docs/images/scale.png
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from scripts.bench.loader import resident_mb
from scripts.bench.picture import draw_scale
from scripts.bench.shared_files import SharedFiles, Sharing, SimulatedThreads, link_shards, write_huge
from scripts.bench.stream_hosts import EPOCHS, ObjectStore, stream_hosts, to_table
from scripts.bench.table import as_markdown, as_text, machine, machine_line, write_files
from scripts.commands import say
from tpucache import CachedDataset, CachedLoader
from tpucache.loading.loader import _CHUNK_BYTES
from tpucache.loading.order import EpochOrder, Shuffle, make_order
from tpucache.loading.sampler import global_batches, rank_slice
from tpucache.store.fields import Field

SAMPLES: Final = 13_000_000
HOSTS, RANKS, BATCH = 256, 8, 256  # samples of a rank's batch
HOST_BATCH: Final = RANKS * BATCH
IMAGE: Final = Field("image", "raw", "|u1", (100, 73, 3))  # 21.9 kB, as dct-lz4 has at quality 90 of 224x224
RAW_BYTES: Final = 224 * 224 * 3
WINDOWS: Final = {"2,048: a host's batch": HOST_BATCH, "4,096: the default": 4096, "65,536": 65_536, "full": 0}
THREADS: Final = (2, 16, 128)
#: 5,500 requests a second are what S3 states for a partitioned prefix; the other figures are assumptions.
STORE: Final = ObjectStore(latency=0.02, host_rate=1.25e9, rate=25e9, requests=5500)
BATCHES: Final = 8
QUEUE: Final = 2  # batches before the accelerators

Figures = dict[str, Any]


def main() -> None:
    """Run the simulation as the command line asks."""
    options = _parse()
    sharing = Sharing(options.latency / 1000, options.bandwidth * 1e9, options.requests)
    report: Figures = {"machine": machine(), "samples": SAMPLES, "hosts": HOSTS, "ranks": RANKS, "batch": BATCH}
    report |= {"device_rate": options.device_rate, "sharing": asdict(sharing)}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        say("writing the tables of a cache")
        write_huge(cache, SAMPLES, IMAGE)
        report["opening"] = opening(cache)
        say("planning")
        chunk = max(1, _CHUNK_BYTES // CachedDataset(cache).usual_record_bytes)
        report["planning"] = [planning(name, window, chunk) for name, window in WINDOWS.items()]
        report["slices"] = [slices(chunk, drop_last) for drop_last in (True, False)]
        say("reading from a shared file system")
        link_shards(cache, CachedDataset(cache).manifest.shards)
        report["reading"] = reading(cache, sharing, options.device_rate)
        say("reading from an object store")
        report["store"], report["streaming"] = asdict(STORE), streaming(cache, options.device_rate)
    report["slow_host"] = slow_hosts(HOST_BATCH / options.device_rate)
    tables = to_tables(report)
    print(machine_line(report["machine"]), *(f"{title}\n{as_text(rows)}" for title, rows in tables), sep="\n\n", end="")
    write_files(options, report, "".join(f"{title}\n\n{as_markdown(rows)}\n" for title, rows in tables))
    if options.picture:
        draw_scale(report, options.picture)


def opening(cache: Path) -> Figures:
    """Return the seconds and the resident MB that dataset and loader of one rank take."""
    before, start = resident_mb(), time.process_time()
    loader = CachedLoader(CachedDataset(cache, in_memory=False), BATCH, shuffle="block", world_size=HOSTS * RANKS)
    seconds = time.process_time() - start
    return {"seconds": seconds, "resident_mb": resident_mb() - before, "shards": len(loader.dataset.manifest.shards)}


def planning(name: str, window: int, chunk: int) -> Figures:
    """Return the seconds that planning an epoch takes, the MB that it keeps, and those that it takes meanwhile."""
    order = order_of(window, chunk)
    start = time.process_time()
    kept = order.positions(SAMPLES, 0, 0).nbytes
    seconds = time.process_time() - start
    tracemalloc.start()
    order.positions(SAMPLES, 0, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"name": name, "seconds": seconds, "kept_mb": kept / 1e6, "peak_mb": peak / 1e6}


def order_of(window: int, chunk: int) -> EpochOrder:
    """Return the order of a window; 0: all samples mixed."""
    return make_order("block" if window else "full", window, chunk, changes_variants=False)


def slices(chunk: int, drop_last: bool) -> Figures:
    """Return how often the ranks together see each sample in an epoch, and how many samples each rank has."""
    order = order_of(HOST_BATCH, chunk).positions(SAMPLES, 0, 0)
    seen, counts = np.zeros(SAMPLES, np.uint8), np.zeros(HOSTS * RANKS, np.int64)
    start = time.process_time()
    batches = list(global_batches(0, SAMPLES, BATCH * HOSTS * RANKS, HOSTS * RANKS, drop_last))
    for (first, stop), rank in itertools.product(batches, range(HOSTS * RANKS)):
        own = order[rank_slice(first, stop, rank, HOSTS * RANKS)]
        seen[own] += 1
        counts[rank] += len(own)
    return {
        "drop_last": drop_last,
        "batches": len(batches),
        "seen_once": int((seen == 1).sum()),
        "seen_more": int((seen > 1).sum()),
        "least": int(counts.min()),
        "most": int(counts.max()),
        "microseconds": (time.process_time() - start) / len(batches) / len(counts) * 1e6,
    }


def reading(cache: Path, sharing: Sharing, device_rate: int) -> list[Figures]:
    """Return how many images a second a host gets, by window, threads and whether hints are heeded."""
    dataset = CachedDataset(cache, in_memory=False)
    dataset.labels_of(np.arange(1))  # read and checked once
    with mock.patch.object(EpochOrder, "positions", functools.lru_cache(1)(EpochOrder.positions)):
        return [
            _read(dataset, replace(sharing, read_ahead=read_ahead), HOST_BATCH / device_rate, name, window, threads)
            for name, window in WINDOWS.items()
            for read_ahead in (True, False)
            for threads in THREADS
        ]


def streaming(cache: Path, device_rate: int) -> list[Figures]:
    """Return what 256 hosts, and 16 of a tenth of the samples, read from an object store in an epoch, and how fast."""
    dataset = CachedDataset(cache, in_memory=False)
    few = dataset.select(np.arange(SAMPLES // 10))
    with mock.patch.object(EpochOrder, "positions", functools.lru_cache(EPOCHS)(EpochOrder.positions)):
        return [
            row
            for samples, hosts in ((dataset, HOSTS), (few, 16))
            for row in stream_hosts(samples, STORE, hosts, HOST_BATCH, device_rate, (0.0, 0.06, 0.25))
        ]


def _read(dataset: CachedDataset, sharing: Sharing, step: float, name: str, window: int, threads: int) -> Figures:
    """Read the batches of one host from the middle of an epoch on, with nothing in memory; a step takes `step`."""
    cold = pickle.loads(pickle.dumps(dataset))
    cold.table = dataset.table  # no host reads its labels again
    shuffle: Shuffle = "block" if window else "full"
    options: Any = {"shuffle": shuffle, "window": window or 1, "threads": threads}
    files = SharedFiles(sharing)
    began: list[float] = []  # steps
    with SimulatedThreads.in_place(files):
        batches = iter(CachedLoader(cold, HOST_BATCH, rank=HOSTS // 2, world_size=HOSTS, **options))
        for number in range(BATCHES):
            next(batches)
            arrived = max(files.now, SimulatedThreads.ready[number])
            began.append(max(arrived, began[-1] + step) if began else arrived)
            files.now = max(arrived, began[-1 - QUEUE]) if number >= QUEUE else arrived
        batches.close()  # type: ignore[attr-defined]  # a generator
    asked = len(SimulatedThreads.ready) * HOST_BATCH * IMAGE.nbytes
    return {
        "window": name,
        "threads": threads,
        "read_ahead": sharing.read_ahead,
        "first_batch_seconds": began[0],
        "images_per_second": HOST_BATCH * (BATCHES - 1) / (began[-1] - began[0]),
        "request_kb": files.bytes / files.requests / 1e3,
        "bytes_of_samples": files.bytes / asked,
    }


def slow_hosts(step: float) -> list[Figures]:
    """Return what a step of all hosts takes where some of them are slower than the others."""
    others = np.full((HOSTS, 400), step / 2)  # twice as fast as the accelerators
    random = np.random.default_rng(0)
    cases: list[tuple[str, Callable[[Any], Any], int]] = [
        ("all hosts read twice as fast as their accelerators", lambda times: times, 2),
        ("one host reads half as fast as the others", lambda times: _one(times, 2), 2),
        ("one host reads a quarter as fast as the others", lambda times: _one(times, 4), 2),
        ("one host stops for ten steps, once in 100 batches", lambda times: _stop(times, 10 * step), 2),
        ("the same, prefetch=16", lambda times: _stop(times, 10 * step), 16),
        ("each host stops for five steps, once in 100 batches", lambda times: _chance(times, 5 * step, random), 2),
        ("the same, prefetch=16", lambda times: _chance(times, 5 * step, random), 16),
    ]
    rows = []
    for name, change, prefetch in cases:
        seconds = step_seconds(change(others.copy()), step, prefetch)
        rows.append({"case": name, "prefetch": prefetch, "step_ms": seconds * 1e3, "of_a_step": seconds / step})
    return rows


def _one(times: Any, slower: float) -> Any:
    times[0] *= slower
    return times


def _stop(times: Any, seconds: float) -> Any:
    times[0, 50::100] += seconds
    return times


def _chance(times: Any, seconds: float, random: np.random.Generator) -> Any:
    return times + seconds * (random.random(times.shape) < 0.01)


def step_seconds(times: Any, step: float, prefetch: int) -> float:
    """Return the mean step of synchronous hosts whose batches take `times` (hosts, batches) to read, one by one.

    A host reads a batch when fewer than `prefetch` + 1 wait or are being read; a step begins when all hosts have one.
    """
    hosts, batches = times.shape
    ready, began = np.zeros(hosts), [0.0] * batches
    free = 0.0
    for number in range(batches):
        room = began[number - prefetch - 1] if number > prefetch else 0.0
        ready = np.maximum(ready, room) + times[:, number]
        began[number] = max(free, float(ready.max()))
        free = began[number] + step
    seconds: float = (free - began[0]) / batches
    return seconds


def to_tables(report: Figures) -> list[tuple[str, list[list[str]]]]:
    """Return the tables with their titles."""
    opened, sharing = report["opening"], report["sharing"]
    planned = [["planning an epoch", "CPU seconds", "MB kept", "MB at most"]]
    planned.append(["opening the cache", f"{opened['seconds']:.2f}", f"{opened['resident_mb']:.0f}", ""])
    planned += [
        [
            f"window {row['name']}" if row["name"] != "full" else 'shuffle="full"',
            *(f"{row['seconds']:.2f}", f"{row['kept_mb']:.0f}", f"{row['peak_mb']:.0f}"),
        ]
        for row in report["planning"]
    ]
    sliced = [["drop_last", "global batches", "samples seen once", "more than once", "a rank's samples", "us a slice"]]
    sliced += [
        [
            *(str(row["drop_last"]), str(row["batches"]), f"{row['seen_once']:,}", f"{row['seen_more']:,}"),
            *(f"{row['least']:,} to {row['most']:,}", f"{row['microseconds']:.1f}"),
        ]
        for row in report["slices"]
    ]
    tables = [
        (f"{SAMPLES:,} samples in {opened['shards']:,} shards, one rank:", planned),
        (f"{HOSTS} hosts of {RANKS} ranks, {BATCH} samples each:", sliced),
    ]
    for read_ahead in (True, False):
        rows = [row for row in report["reading"] if row["read_ahead"] == read_ahead]
        table = [["window", *(f"{count} threads" for count in THREADS), "kB a request", "bytes read"]]
        for name in WINDOWS:
            cells = [row for row in rows if row["window"] == name]
            last = cells[-1]
            table.append([name, *(f"{row['images_per_second']:,.0f}" for row in cells)])
            table[-1] += [f"{last['request_kb']:.0f}", f"{last['bytes_of_samples']:.1f}x"]
        line = (
            f"images/s of a host's {report['device_rate']:,}: {sharing['latency'] * 1e3:g} ms a request, "
            f"{sharing['bandwidth'] / 1e9:g} GB/s, {sharing['requests']} requests at once, "
            f"{'hints heeded' if read_ahead else 'hints ignored'}:"
        )
        tables.append((line, table))
    store = report["store"]
    line = (
        f"images/s of a host's {report['device_rate']:,} from a store: {store['latency'] * 1e3:g} ms an answer, "
        f"{store['host_rate'] / 1e9:g} GB/s a host, {store['rate'] / 1e9:g} GB/s and {store['requests']:,.0f} requests "
        "a second in all:"
    )
    tables.append((line, to_table(report["streaming"])))
    slow = [["synchronous hosts", "prefetch", "ms a step", "of the accelerators' step"]]
    slow += [
        [row["case"], str(row["prefetch"]), f"{row['step_ms']:.1f}", f"{row['of_a_step']:.2f}"]
        for row in report["slow_host"]
    ]
    return [*tables, (f"One slow host of {HOSTS}:", slow)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device-rate", type=int, default=28_000, help="images a second that a host's accelerators take (%(default)s)"
    )
    parser.add_argument("--latency", type=float, default=5, help="milliseconds a request (%(default)s)")
    parser.add_argument("--bandwidth", type=float, default=1.25, help="GB a second of a host (%(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="of a host under way at once (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the rates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    options = parser.parse_args()
    if min(options.device_rate, options.latency, options.bandwidth, options.requests) <= 0:
        parser.error("all numbers are above 0")
    return options
