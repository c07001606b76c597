"""What 13 million samples and 256 hosts of 8 accelerators each ask of opening and planning, and of the slowest host.

The samplers, the index and CachedLoader are the package's own, over a cache of that many rows; times are those of this
machine's processor. A host that is slower than the others is simulated: 256 queues of batches, of which each step
takes one.

    python -m scripts.bench scale --markdown scale.md
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.bench.huge import write_huge
from scripts.bench.loader import resident_mb
from scripts.bench.table import Rows, add_race_options, parse_options, show
from tpucache import CachedDataset, CachedLoader
from tpucache.loading.order import EpochOrder, make_order
from tpucache.loading.sampler import global_batches, rank_slice
from tpucache.store.fields import Field

HOSTS, RANKS, BATCH = 256, 8, 256  # samples of a rank's batch
HOST_BATCH: Final = RANKS * BATCH
IMAGE: Final = Field("image", "raw", "|u1", (100, 73, 3))  # 21.9 kB, as dct-lz4 has at quality 90 of 224x224
CHUNK: Final = 341  # samples of that size, in a chunk of 7.5 MB
WINDOWS: Final = {"2,048: a host's batch": HOST_BATCH, "4,096: the default": 4096, 'shuffle="full"': 0}
_BATCHES: Final = 400


def main() -> None:
    """Measure as the command line asks."""
    options = _parse()
    with tempfile.TemporaryDirectory() as folder:
        write_huge(Path(folder), options.samples, IMAGE)
        opened = opening(Path(folder))
    planned = [["", "CPU seconds", "MB kept", "MB at most"], ["opening the cache", *opened, ""]]
    for name, window in WINDOWS.items():
        order = make_order("block" if window else "full", window, CHUNK, changes_variants=False)
        planned.append([f"planning an epoch, {name}", *planning(order, options.samples)])
    sliced = [["drop_last", "global batches", "samples seen once", "more than once", "a rank's samples"]]
    sliced += [slices(options.samples, drop_last) for drop_last in (True, False)]
    tables: list[tuple[str, Rows]] = [
        (f"{options.samples:,} samples, one rank:", planned),
        (f"{HOSTS} hosts of {RANKS} ranks, {BATCH} samples each:", sliced),
        (f"One slow host of {HOSTS}:", slow_hosts()),
    ]
    show(options, {}, tables)


def opening(cache: Path) -> list[str]:
    """Return the seconds and the resident MB that dataset and loader of one rank take."""
    before, start = resident_mb(), time.process_time()
    loader = CachedLoader(CachedDataset(cache, in_memory=False), BATCH, shuffle="block", world_size=HOSTS * RANKS)
    seconds, grown = time.process_time() - start, resident_mb() - before
    del loader
    return [f"{seconds:.2f}", f"{grown:.0f}"]


def planning(order: EpochOrder, samples: int) -> list[str]:
    """Return the seconds that planning an epoch takes, the MB that it keeps, and those that it takes meanwhile."""
    start = time.process_time()
    kept = order.positions(samples, 0, 0).nbytes
    seconds = time.process_time() - start
    tracemalloc.start()
    order.positions(samples, 0, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return [f"{seconds:.2f}", f"{kept / 1e6:.0f}", f"{peak / 1e6:.0f}"]


def slices(samples: int, drop_last: bool) -> list[str]:
    """Return how often the ranks together see each sample in an epoch, and how many samples each rank has."""
    order = make_order("block", HOST_BATCH, CHUNK, changes_variants=False).positions(samples, 0, 0)
    seen, counts = np.zeros(samples, np.uint8), np.zeros(HOSTS * RANKS, np.int64)
    batches = list(global_batches(0, samples, BATCH * HOSTS * RANKS, HOSTS * RANKS, drop_last))
    for (first, stop), rank in itertools.product(batches, range(HOSTS * RANKS)):
        own = order[rank_slice(first, stop, rank, HOSTS * RANKS)]
        seen[own] += 1
        counts[rank] += len(own)
    once, more = (seen == 1).sum(), (seen > 1).sum()
    return [str(drop_last), f"{len(batches)}", f"{once:,}", f"{more:,}", f"{counts.min():,} to {counts.max():,}"]


def slow_hosts() -> Rows:
    """Return what a step of all hosts takes, in steps of their accelerators, where some read slower than others."""
    random, others = np.random.default_rng(0), np.full((HOSTS, _BATCHES), 0.5)  # twice as fast as the accelerators
    quarter, stop = others.copy(), others.copy()
    quarter[0] *= 4
    stop[0, 50::100] += 10
    chance = others + 5 * (random.random(others.shape) < 0.01)
    cases = {
        "all hosts read twice as fast as their accelerators": others,
        "one host reads a quarter as fast as the others": quarter,
        "one host stops for ten steps, once in 100 batches": stop,
        "each host stops for five steps, once in 100 batches": chance,
    }
    rows = [["synchronous hosts", "prefetch=2", "prefetch=16"]]
    return rows + [[name, *(f"{steps(times, prefetch):.2f}" for prefetch in (2, 16))] for name, times in cases.items()]


def steps(times: Any, prefetch: int) -> float:
    """Return the mean step of synchronous hosts whose batches take `times` (hosts, batches) steps to read, one by one.

    A host reads a batch when fewer than `prefetch` + 1 wait or are being read; a step begins when all hosts have one.
    """
    hosts, batches = times.shape
    ready, began = np.zeros(hosts), [0.0] * batches
    free = 0.0
    for number in range(batches):
        room = began[number - prefetch - 1] if number > prefetch else 0.0
        ready = np.maximum(ready, room) + times[:, number]
        began[number] = max(free, float(ready.max()))
        free = began[number] + 1
    return float((free - began[0]) / batches)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=13_000_000, help="of the cache (%(default)s)")
    add_race_options(parser)
    return parse_options(parser)
