"""How long an accelerator waits for its data, fed in eight ways by the processors of this machine.

The accelerator is simulated: it takes N images a second from a queue of two batches and counts how long it finds
the queue empty. It is fed batches of 256 images of 224x224 pixels, shuffled,

- on the fly: photographs decoded, resized and augmented each time they are asked for, in worker processes;
- from presized files: JPEGs of quality 95 at the wanted size, decoded in worker processes;
- from one `torch.save` a sample: uint8 tensors, loaded in worker processes;
- from tpucache: a CachedLoader with two threads, out of the page cache;
- from tpucache yuv420, dct-zstd and dct-lz4: the same, of images that the accelerator finishes, quality 90;
- from tpucache in memory: the same, each record kept as an array once it was read.

All but the first hold the same images, augmented once by the preset that the first one applies each time. All files are
in the page cache when the clock starts, no epoch ends while it runs, and the workers are alive and busy before it
starts.
Rounds take every way at every rate in turn, so that another load on the machine hits all of them.

    python -m scripts.bench idle photographs/train --markdown idle.md --picture idle.png
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.idle_ways import BATCH, RECIPE, THREADS, Batches, Way, open_ways
from scripts.bench.picture import draw_idle
from scripts.bench.rounds import race, spread
from scripts.bench.table import add_race_options, as_markdown, as_text, parse_options, write_files
from tpucache import Manifest, TpucacheError
from tpucache.report.bench import simulate_device

COUNTED_BATCHES: Final = 3  # at least, however slow a way is


class Gauge:
    """Measures one way: its rate when nothing holds it up, and how idle accelerators of some rates are."""

    def __init__(self, way: Way, rates: Sequence[int], seconds: float) -> None:
        self._way, self._rates, self._seconds = way, rates, seconds
        self._pace = images_per_second(way, way.burst * COUNTED_BATCHES)  # starts the workers, too

    def turn(self) -> dict[str, float]:
        """Return the images a second, and the idle share by the accelerator's rate."""
        self._pace = images_per_second(self._way, self._batches(self._pace))
        idle = {str(rate): idle_share(self._way, self._batches(min(self._pace, rate)), rate) for rate in self._rates}
        return {"images_per_second": self._pace, **idle}

    def _batches(self, pace: float) -> int:
        """Return how many batches to count for a run of about `seconds`: whole bursts, as half a one misleads."""
        bursts = round(pace * self._seconds / BATCH / self._way.burst)
        return self._way.burst * max(bursts, math.ceil(COUNTED_BATCHES / self._way.burst))


def images_per_second(way: Way, batches: int) -> float:
    """Return how many images a second a way delivers when nothing holds it up."""
    stream = steady_stream(way, batches)
    next(stream)
    start = time.perf_counter()
    for _ in stream:
        pass
    return batches * BATCH / (time.perf_counter() - start)


def idle_share(way: Way, batches: int, rate: int) -> float:
    """Return the share of time an accelerator waits that could take `rate` images a second."""
    return simulate_device(steady_stream(way, batches), BATCH / rate, math.inf)


def steady_stream(way: Way, batches: int) -> Batches:
    """Return a stream from the last batch of the first burst on, which no clock counts, and `batches` more."""
    return itertools.islice(way.stream(way.burst + batches), way.burst - 1, None)


def to_report(
    names: Sequence[str], turns: dict[str, list[dict[str, float]]], images: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Return all figures as JSON values."""
    return {
        "batch_size": BATCH,
        "size": [RECIPE.height, RECIPE.width],
        "cores": len(os.sched_getaffinity(0)),
        "workers": options.workers,
        "threads": THREADS,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "samples": images,
        "device_rates": options.rates,
        "ways": [
            {
                "name": name,
                "images_per_second": spread([turn["images_per_second"] for turn in turns[name]]),
                "idle": {str(rate): spread([turn[str(rate)] for turn in turns[name]]) for rate in options.rates},
            }
            for name in names
        ],
    }


def to_rows(figures: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    rates = figures["device_rates"]
    rows = [["fed by", "images/s", *(f"idle at {rate:,} images/s" for rate in rates)]]
    for way in figures["ways"]:
        idle = [
            f"{share['median']:.1%} ({share['min']:.1%} to {share['max']:.1%})"
            for share in (way["idle"][str(rate)] for rate in rates)
        ]
        rows.append([way["name"], f"{way['images_per_second']['median']:,.0f}", *idle])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    try:
        ways = open_ways(options.source, options.work, options.workers)
    except TpucacheError as error:
        sys.exit(f"bench idle: {error}")
    gauges = {way.name: Gauge(way, options.rates, options.seconds) for way in ways}
    turns = race({name: gauge.turn for name, gauge in gauges.items()}, options.rounds)
    figures = to_report(list(gauges), turns, Manifest.load(options.work / "cache").samples, options)
    rows = to_rows(figures)
    print(as_text(rows), end="")
    write_files(options, figures, as_markdown(rows))
    if options.picture:
        draw_idle(figures, options.picture)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", nargs="?", type=Path, help="a folder of class folders of photographs (default: made up)"
    )
    add_race_options(parser, "build/idle", seconds=4.0)
    parser.add_argument("--rates", type=int, nargs="+", default=[7500, 28000], help="of the accelerator, in images/s")
    parser.add_argument("--workers", type=int, default=2, help="processes of each DataLoader (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    options = parse_options(parser, {"workers": 1, "seconds": 0.1})
    if min(options.rates) < 1:
        parser.error(f"--rates are at least 1, not {min(options.rates)}")
    return options
