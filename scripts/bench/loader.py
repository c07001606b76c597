"""CachedLoader from its first epoch on, its first batch, and what ten million records cost.

    python -m scripts.bench loader CACHE

Each way of reading has a process of its own, whose private memory is then that of this way.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from scripts.bench.huge import write_huge
from scripts.bench.rounds import race
from scripts.bench.table import Rows, add_race_options, parse_options, show
from scripts.commands import make_parser
from tpucache import CachedDataset, CachedLoader
from tpucache.store.fields import Field

_MILLIONS: Final = 10
_SHOWN: Final = (1, 2, 3, 6)  # epochs

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
    ways = {"default": "auto", "in_memory=False": False}
    turns = race({name: functools.partial(_epochs, way, options) for name, way in ways.items()}, options.rounds)
    epochs = {name: {figure: _median(found, figure) for figure in found[0]} for name, found in turns.items()}
    first = epochs["default"]["first_batch_seconds"]
    seconds, megabytes = open_huge(_MILLIONS * 1_000_000, options.work)
    notes = [
        f"first batch: {first:.3f} s",
        f"{_MILLIONS} million records: opened in {seconds:.2f} s, {megabytes:.0f} MB more resident",
    ]
    show(options, {"epochs": epochs, "huge": [seconds, megabytes]}, [("", epoch_rows(epochs))], notes)


def _epochs(in_memory: Any, options: argparse.Namespace) -> dict[str, Any]:
    asked = {"in_memory": in_memory, "batch": options.batch_size, "threads": options.threads, "epochs": max(_SHOWN)}
    command = [sys.executable, "-c", _EPOCHS, str(options.cache), json.dumps({**asked, "finish": options.finish})]
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


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("cache", type=Path, help="a cache that warmup built")
    parser.add_argument("--batch-size", type=int, default=256, help="images a batch (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="that read (%(default)s)")
    parser.add_argument(
        "--finish", choices=("host", "device"), default="host", help="where epochs are decoded (%(default)s)"
    )
    add_race_options(parser, "build")
    return parse_options(parser)
