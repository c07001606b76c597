"""CachedLoader from its first epoch on, by the way it reads, and its costs: start, ten million records, a cold disk.

    python -m scripts.bench loader CACHE

Each way of reading has a process of its own, whose private memory is then that of this way. A read-only mount and a
cold page cache need root; where that is not allowed they are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from scripts.bench.huge import write_huge
from scripts.bench.rounds import race, ratio
from scripts.bench.table import Rows, add_race_options, parse_options, show
from tpucache import CachedDataset, CachedLoader
from tpucache.store.fields import Field

_MILLIONS: Final = 10
_READ_BYTES: Final = 1 << 20
_FRONT_TO_BACK: Final = "front to back"
_SHOWN: Final = (1, 2, 3, 6)  # epochs
_MOUNTED: Final = "mounted read-only"

_EPOCHS: Final = """
import json, sys, time
from pathlib import Path
import numpy.random  # numpy would import it in the first epoch, which takes 13 ms
import torch
from tpucache import CachedDataset, CachedLoader

place, asked = sys.argv[1], json.loads(sys.argv[2])
began = time.perf_counter()
dataset = CachedDataset(place, in_memory=asked["in_memory"])
loader = CachedLoader(dataset, asked["batch"], shuffle=True, threads=asked["threads"], finish=asked["finish"])
rates, first = [], None
for _ in range(asked["epochs"]):
    start, samples = time.perf_counter(), 0
    for batch in loader:
        first = first or time.perf_counter() - began
        samples += len(batch[0])
    rates.append(samples / (time.perf_counter() - start))
lines = Path("/proc/self/status").read_text().splitlines()
(private,) = (int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon"))
print(json.dumps({"rates": rates, "first_batch_seconds": first, "private_mb": private}))
"""


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    options.work.mkdir(parents=True, exist_ok=True)
    epochs = epoch_figures(options)
    first = epochs["default"]["first_batch_seconds"]
    seconds, megabytes = open_huge(_MILLIONS * 1_000_000, options.work)
    rates = cold_rates(options)
    figures = {"epochs": epochs, "first_batch_seconds": first, "cold_mb_per_second": rates}
    figures["huge"] = {"seconds": seconds, "resident_mb": megabytes}
    notes = [
        *(cold_notes(rates) if rates else ()),
        f"first batch: {first:.3f} s",
        f"{_MILLIONS} million records: opened in {seconds:.2f} s, {megabytes:.0f} MB more resident",
    ]
    show(options, figures, [("", epoch_rows(epochs))], notes)


def epoch_figures(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return for each way of reading the medians of the rates of the epochs, and of the private memory at the end."""
    with read_only(options.cache) as mount:
        ways = {"default": (options.cache, "auto"), "in_memory=False": (options.cache, False)}
        if mount is not None:
            ways[_MOUNTED] = (mount, "auto")
        turns = race({name: functools.partial(_epochs, *way, options) for name, way in ways.items()}, options.rounds)
    return {name: {figure: _median(found, figure) for figure in found[0]} for name, found in turns.items()}


def _epochs(place: Path, in_memory: Any, options: argparse.Namespace) -> dict[str, Any]:
    asked = {"in_memory": in_memory, "batch": options.batch_size, "threads": options.threads, "epochs": max(_SHOWN)}
    command = [sys.executable, "-c", _EPOCHS, str(place), json.dumps({**asked, "finish": options.finish})]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def _median(turns: list[dict[str, Any]], figure: str) -> Any:
    found = [turn[figure] for turn in turns]
    if isinstance(found[0], list):
        return [statistics.median(each) for each in zip(*found, strict=True)]
    return statistics.median(found)


def epoch_rows(epochs: dict[str, dict[str, Any]]) -> Rows:
    """Return the rows of the table of epochs, its heading first."""
    table = [["images/s by epoch", *map(str, _SHOWN), f"first of {max(_SHOWN)}", "MB private"]]
    for name, row in epochs.items():
        rates = [row["rates"][epoch - 1] for epoch in _SHOWN]
        shown = [f"{rate:,.0f}" for rate in rates]
        table.append([name, *shown, f"{rates[0] / rates[-1]:.2f}", f"{row['private_mb']:,.0f}"])
    return table


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


def resident_mb() -> float:
    """Return this process's resident memory, mapped files included, in MB."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


def open_huge(records: int, work: Path) -> tuple[float, float]:
    """Return the seconds and the resident MB that opening a cache of so many records takes."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        write_huge(Path(folder), records, Field("image", "raw", "|u1", (224, 224, 3)))
        gc.collect()
        before, start = resident_mb(), time.perf_counter()
        opened = CachedLoader(CachedDataset(folder), 256, shuffle=True)
        seconds = time.perf_counter() - start
        grown = resident_mb() - before
        del opened
        return seconds, grown


def cold_rates(options: argparse.Namespace) -> dict[str, list[float]] | None:
    """Return MB/s from the disk: front to back in 1 MB reads, and each kind of shuffle; None if not allowed."""
    drop = Path("/proc/sys/vm/drop_caches")
    if not os.access(drop, os.W_OK):
        return None
    dataset, batch = CachedDataset(options.cache), options.batch_size
    ways: dict[str, Callable[[], int]] = {
        _FRONT_TO_BACK: lambda: read_files(dataset),
        'shuffle="block"': lambda: read_batches(dataset, batch, "block"),
        'shuffle="full"': lambda: read_batches(dataset, batch, "full"),
    }

    def rate(read: Callable[[], int]) -> float:
        os.sync()
        drop.write_text("3")
        start = time.perf_counter()
        return read() / (time.perf_counter() - start) / 1e6

    return race({name: functools.partial(rate, read) for name, read in ways.items()}, options.rounds)


def cold_notes(rates: dict[str, list[float]]) -> list[str]:
    """Return lines of what `cold_rates` found."""
    shares = {name: ratio(each, rates[_FRONT_TO_BACK]) for name, each in rates.items()}
    medians = {name: f"{statistics.median(each):,.0f} MB/s" for name, each in rates.items()}
    return [f"cold, {name}: {median}, {shares[name]:.2f} of {_FRONT_TO_BACK}" for name, median in medians.items()]


def read_files(dataset: CachedDataset) -> int:
    """Read the clean shards with plain reads; return the bytes."""
    buffer, total = bytearray(_READ_BYTES), 0
    for entry in dataset.manifest.shards:
        if entry.variant == 0:
            with (dataset.directory / entry.name).open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
    return total


def read_batches(dataset: CachedDataset, batch: int, shuffle: Any) -> int:
    """Read an epoch of the clean variant; return the bytes."""
    loader = CachedLoader(CachedDataset(dataset.directory), batch, shuffle=shuffle, window=1024)
    return sum(len(batch) for batch, _ in loader) * dataset.manifest.layout.nbytes


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="a cache that warmup built")
    parser.add_argument("--batch-size", type=int, default=256, help="images a batch (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="that read (%(default)s)")
    parser.add_argument(
        "--finish", choices=("host", "device"), default="host", help="where epochs are decoded (%(default)s)"
    )
    add_race_options(parser, "build")
    return parse_options(parser)
