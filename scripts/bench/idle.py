"""How long an accelerator waits for its data, fed in several ways by the processors of this machine.

The accelerator is simulated: it takes N images a second from a queue of two batches and counts how long it finds
the queue empty. It is fed batches of 256 images of 224x224 pixels, shuffled,

- on the fly: photographs decoded, resized and augmented each time they are asked for, in worker processes;
- from tpucache: a CachedLoader with two threads, out of the page cache;
- from tpucache yuv420, dct-zstd and dct-lz4: the same, of images that the accelerator finishes, quality 90;
- from tpucache in memory: the same, each record kept as an array once it was read.

All but the first hold the images augmented once, by the preset that the first one applies each time. All files are
in the page cache when the clock starts, no epoch ends while it runs, and the workers are alive and busy before it
starts. Rounds take every way at every rate in turn, so that another load on the machine hits all of them.

    python -m scripts.bench idle photographs/train --markdown idle.md --picture idle.png
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from scripts.bench.photos import make_up_photographs
from scripts.bench.picture import draw_bars
from scripts.bench.rounds import race, read_whole, spread
from scripts.bench.table import Rows, add_race_options, parse_options, show
from scripts.commands import make_parser
from tpucache import CachedDataset, CachedLoader, Recipe, build_cache
from tpucache.report.bench import simulate_device
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.augment import augment
from tpucache.warmup.records.presize import presize

BATCH: Final = 256
RECIPE: Final = Recipe(size=224, variants=1, augment="standard")
PACKED: Final = ("yuv420", "dct-zstd", "dct-lz4")
THREADS: Final = 2
COUNTED_BATCHES: Final = 3  # at least, however slow a way is
EPOCH: Final = 1 << 20  # samples of the cache's epoch, about ImageNet's: the photographs are repeated to reach it

Sample = tuple[torch.Tensor, int]
Batches = Iterator[Any]


class OnTheFly(Dataset[Sample]):
    """Original photographs, decoded, resized and augmented anew each time; without variants, not augmented."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], recipe: Recipe = RECIPE) -> None:
        self.files, self.labels, self.recipe = files, labels, recipe
        self.augmentation = resolve(recipe.augment, recipe.height, recipe.width) if recipe.variants else None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        image = presize(self.files[index].read_bytes(), self.recipe, str(self.files[index]))
        if self.augmentation is not None:
            variant = int(torch.randint(1 << 31, ()))
            image = augment(image, self.augmentation, self.recipe.seed, index, variant)
        return torch.from_numpy(image), self.labels[index]


class Draws:
    """A batch sampler: `batches` batches of shuffled sample numbers, across as many epochs as that takes."""

    def __init__(self, samples: int) -> None:
        self.samples, self.batches = samples, 0

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng(0)
        numbers = itertools.chain.from_iterable(rng.permutation(self.samples).tolist() for _ in itertools.count())
        for _ in range(self.batches):
            yield list(itertools.islice(numbers, BATCH))


@dataclass(frozen=True)
class Way:
    """A way of feeding: `stream(n)` yields n batches, `burst` of which come at about the same time."""

    name: str
    stream: Callable[[int], Batches]
    burst: int

    def rate(self, batches: int) -> float:
        """Return how many images a second it delivers when nothing holds it up."""
        stream = self.steady(batches)
        next(stream)
        start = time.perf_counter()
        for _ in stream:
            pass
        return batches * BATCH / (time.perf_counter() - start)

    def steady(self, batches: int) -> Batches:
        """Return a stream from the last batch of the first burst on, which no clock counts, and `batches` more."""
        return itertools.islice(self.stream(self.burst + batches), self.burst - 1, None)


class Gauge:
    """Measures one way: its rate when nothing holds it up, and how idle accelerators of some rates are."""

    def __init__(self, way: Way, rates: Sequence[int], seconds: float) -> None:
        self._way, self._rates, self._seconds = way, rates, seconds
        self._pace = way.rate(way.burst * COUNTED_BATCHES)  # starts the workers, too

    def turn(self) -> dict[str, float]:
        """Return the images a second, and the idle share by the accelerator's rate."""
        self._pace = self._way.rate(self._batches(self._pace))
        return {"images_per_second": self._pace, **{f"{rate}": self._idle(rate) for rate in self._rates}}

    def _idle(self, rate: int) -> float:
        return simulate_device(self._way.steady(self._batches(min(self._pace, rate))), BATCH / rate, math.inf)

    def _batches(self, pace: float) -> int:
        """Return how many batches to count for a run of about `seconds`: whole bursts, as half a one misleads."""
        bursts = round(pace * self._seconds / BATCH / self._way.burst)
        return self._way.burst * max(bursts, math.ceil(COUNTED_BATCHES / self._way.burst))


def loader_way(name: str, dataset: Dataset[Sample], samples: int, workers: int) -> Way:
    """Feed by torch's DataLoader; its workers live on between iterations, and rest as soon as one is over."""
    draws = Draws(samples)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=draws, num_workers=workers, persistent_workers=True)

    def stream(batches: int) -> Batches:
        draws.batches = batches
        yield from loader

    return Way(name, stream, workers)


def cache_way(name: str, cache: Path, in_memory: bool = False, finish: Any = "host") -> Way:
    """Feed by tpucache's own loader; `finish` "device": with packed images."""
    samples = len(CachedDataset(cache, variant=1))
    positions = np.resize(np.arange(samples), max(EPOCH, BATCH))
    dataset = CachedDataset(cache, variant=1, indices=positions, in_memory=in_memory)
    for first in range(0, samples, BATCH):
        dataset.__getitems__(range(first, min(first + BATCH, samples)))  # every record was read before the clock starts
    loader = CachedLoader(dataset, BATCH, shuffle=True, drop_last=True, threads=THREADS, finish=finish)

    def stream(batches: int) -> Batches:
        return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), batches)

    return Way(name, stream, THREADS)


def open_ways(source: Path, work: Path, workers: int) -> list[Way]:
    """Make what is missing of the files that the ways read, bring all into the page cache, and return the ways."""
    caches = {codec: work / f"cache-{codec}" for codec in ("raw", *PACKED)}
    for codec, folder in caches.items():
        build_cache(source, folder, replace(RECIPE, codec=codec))
    images = CachedDataset(caches["raw"])
    photographs = [source / path for path in images.paths]
    read_whole([*photographs, *caches.values()])
    labels, samples = images.labels.tolist(), len(images)
    return [
        loader_way("on the fly", OnTheFly(photographs, labels), samples, workers),
        cache_way("tpucache", caches["raw"]),
        *(cache_way(f"tpucache {codec}", caches[codec], finish="device") for codec in PACKED),
        cache_way("tpucache in memory", caches["raw"], in_memory=True),
    ]


def to_rows(turns: dict[str, list[dict[str, float]]], rates: Sequence[int]) -> Rows:
    """Return the rows of the table, its heading first."""
    rows = [["fed by", "images/s", *(f"idle at {rate:,} images/s" for rate in rates)]]
    for name, found in turns.items():
        shares = [spread([turn[f"{rate}"] for turn in found]) for rate in rates]
        idle = (f"{share['median']:.1%} ({share['min']:.1%} to {share['max']:.1%})" for share in shares)
        rows.append([name, f"{statistics.median(turn['images_per_second'] for turn in found):,.0f}", *idle])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    source = options.source or make_up_photographs(options.work / "photographs")
    ways = open_ways(source, options.work, options.workers)
    gauges = {way.name: Gauge(way, options.rates, options.seconds) for way in ways}
    turns = race({name: gauge.turn for name, gauge in gauges.items()}, options.rounds)
    show(options, {"ways": turns}, [("", to_rows(turns, options.rates))], [f"medians of {options.rounds} rounds."])
    if options.picture:
        panels = [
            (
                f"It can take {rate:,} images a second",
                [(name, 100 * statistics.median(turn[f"{rate}"] for turn in found)) for name, found in turns.items()],
            )
            for rate in options.rates
        ]
        draw_bars("How long a simulated accelerator waits for data", panels, options.picture, "{:.1f}%")


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "source", nargs="?", type=Path, help="a folder of class folders of photographs (default: made up)"
    )
    add_race_options(parser, "build/idle", seconds=4.0)
    parser.add_argument("--rates", type=int, nargs="+", default=[7500, 28000], help="of the accelerator, in images/s")
    parser.add_argument("--workers", type=int, default=2, help="processes of each DataLoader (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    return parse_options(parser, {"workers": 1, "seconds": 0.1})
