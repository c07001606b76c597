"""CachedLoader by its ways of reading, and its costs: threads, start, memory, ten million records, a cold page cache.

`python -m scripts.bench loader CACHE`. The cold part drops the kernel's page cache and so needs root; where that is not
allowed it is left out, and says so.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scripts.bench.loader_ways import (
    epoch_rows,
    epoch_table,
    lock_microseconds,
    look_milliseconds,
    thread_scaling,
    way_ratios,
)
from scripts.bench.rounds import race, ratio, spread, spread_cell
from scripts.bench.shared_files import write_huge
from scripts.bench.table import add_race_options, as_markdown, as_text, parse_options, write_files
from tpucache import CachedDataset, CachedLoader
from tpucache.store.fields import Field

MILLION = 1_000_000
READ_BYTES = 1 << 20
FRONT_TO_BACK = "front to back"

FIRST_BATCH = """
import sys, time, torch
from tpucache import CachedDataset, CachedLoader
start = time.perf_counter()
next(iter(CachedLoader(CachedDataset(sys.argv[1]), int(sys.argv[2]), shuffle=True)))
print(time.perf_counter() - start)
"""


def resident_mb() -> float:
    """Return this process's resident memory, mapped files included, in MB."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


def first_batch_seconds(cache: Path, batch: int, rounds: int) -> float:
    """Return the median time from making a dataset and a loader, in a new process, to the first batch."""
    command = [sys.executable, "-c", FIRST_BATCH, str(cache), str(batch)]
    times = [float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(rounds)]
    return statistics.median(times)


def memory_drift_mb(cache: Path, batch: int, epochs: int) -> float:
    """Return how much resident memory changes between the fifth epoch and the last."""
    loader = CachedLoader(CachedDataset(cache), batch, shuffle=True)
    before = 0.0
    for epoch in range(epochs):
        for _ in loader:
            pass
        if epoch == 4:
            gc.collect()
            before = resident_mb()
    gc.collect()
    return resident_mb() - before


def open_huge(records: int, work: Path) -> tuple[float, float]:
    """Return the seconds and the resident MB that opening a cache of `records` records takes."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        write_huge(Path(folder), records, Field("image", "raw", "|u1", (224, 224, 3)))
        gc.collect()
        before, start = resident_mb(), time.perf_counter()
        opened = CachedLoader(CachedDataset(folder), 256, shuffle=True)
        seconds = time.perf_counter() - start
        grown = resident_mb() - before
        del opened
        return seconds, grown


def cold_rates(cache: Path, batch: int, rounds: int) -> dict[str, list[float]] | None:
    """Return MB/s from the disk: front to back in 1 MB reads, and each kind of shuffle; None if not allowed."""
    drop = Path("/proc/sys/vm/drop_caches")
    if not os.access(drop, os.W_OK):
        return None
    dataset = CachedDataset(cache)
    ways: dict[str, Callable[[], int]] = {
        FRONT_TO_BACK: lambda: read_files(dataset),
        'shuffle="block"': lambda: read_batches(dataset, batch, "block"),
        'shuffle="full"': lambda: read_batches(dataset, batch, "full"),
    }

    def rate(read: Callable[[], int]) -> float:
        os.sync()
        drop.write_text("3")
        start = time.perf_counter()
        return read() / (time.perf_counter() - start) / 1e6

    return race({name: functools.partial(rate, read) for name, read in ways.items()}, rounds)


def cold_rows(rates: dict[str, list[float]]) -> list[list[str]]:
    """Return the rows of the table of what `cold_rates` found, its heading first."""
    rows = [["cold", "MB/s", "min - max", "of front to back"]]
    for name, values in rates.items():
        share = ratio(values, rates[FRONT_TO_BACK])
        rows.append([name, f"{statistics.median(values):,.0f}", spread_cell(spread(values)), f"{share:.2f}"])
    return rows


def read_files(dataset: CachedDataset) -> int:
    """Read the clean shards with plain 1 MB reads; return the bytes."""
    buffer, total = bytearray(READ_BYTES), 0
    for entry in dataset.manifest.shards:
        if entry.variant == 0:
            with (dataset.directory / entry.name).open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
    return total


def read_batches(dataset: CachedDataset, batch: int, shuffle: str) -> int:
    """Read an epoch of the clean variant; return the bytes."""
    loader = CachedLoader(CachedDataset(dataset.directory), batch, shuffle=shuffle, window=1024)  # type: ignore[arg-type]
    return sum(len(batch) for batch, _ in loader) * dataset.manifest.layout.nbytes


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    options.work.mkdir(parents=True, exist_ok=True)
    epochs = epoch_rows(options.cache, options.batch_size, options.threads, options.finish, options.rounds)
    look = look_milliseconds(options.work)
    table = epoch_table(epochs)
    if options.first_epochs:
        print(as_text(table), f"a look at 1,000 leases: {look:.2f} ms", sep="\n")
        write_files(options, {"epochs": epochs, "look_milliseconds": look}, as_markdown(table))
        return
    ways = way_ratios(options.cache, options.batch_size, options.threads, options.rounds)
    lock = lock_microseconds(options.cache, options.batch_size, options.rounds)
    scaling = thread_scaling(options.cache, options.batch_size)
    first = first_batch_seconds(options.cache, options.batch_size, options.rounds)
    drift = memory_drift_mb(options.cache, options.batch_size, options.epochs)
    seconds, megabytes = open_huge(10 * MILLION, options.work)
    rates = cold_rates(options.cache, options.batch_size, options.rounds)
    figures = {
        "epochs": epochs,
        "look_milliseconds": look,
        "of_the_limit": ways,
        "lock_microseconds": lock,
        "scaling_of_16_threads": scaling,
        "first_batch_seconds": first,
        "memory_drift_mb": drift,
        "huge": {"records": 10 * MILLION, "seconds": seconds, "resident_mb": megabytes},
        "cold_mb_per_second": rates,
    }
    lines = [
        f"of a copy in memory by {options.threads} threads, first and second epoch: "
        + "; ".join(f"{name} {one:.2f}, {two:.2f}" for name, (one, two) in ways.items())
        + ("" if "map" in ways else "; map: left out, mounting needs root"),
        f"a record holds the interpreter's lock for {lock:.2f} us at most",
        f"16 threads whose copies only wait: {scaling:.1f} times one",
        f"a look at 1,000 leases, five times a second: {look:.2f} ms",
        f"first batch: {first:.3f} s",
        f"resident memory over {options.epochs} epochs: {drift:+.1f} MB",
        f"ten million records: opened in {seconds:.2f} s, {megabytes:.0f} MB more resident",
    ]
    left_out = "cold: left out, dropping the page cache needs root\n"
    print(as_text(table), "", *lines, "", as_text(cold_rows(rates)) if rates else left_out, sep="\n", end="")
    cold = as_markdown(cold_rows(rates)) if rates else f"- {left_out}"
    write_files(options, figures, as_markdown(table) + "\n" + "".join(f"- {line}\n" for line in lines) + "\n" + cold)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="a cache that warmup built")
    parser.add_argument("--batch-size", type=int, default=256, help="images a batch (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="that read (%(default)s)")
    parser.add_argument(
        "--finish", choices=("host", "device"), default="host", help="where epochs are decoded (%(default)s)"
    )
    parser.add_argument("--first-epochs", action="store_true", help="only epochs by the way of reading, and leases")
    parser.add_argument(
        "--epochs", type=int, default=200, help="epochs over which memory is watched, at least 6 (%(default)s)"
    )
    add_race_options(parser, "build")
    return parse_options(parser, {"epochs": 6})
