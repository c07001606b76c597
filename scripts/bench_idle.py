"""How long an accelerator waits for its data, fed in five ways by the processors of this machine.

The accelerator is simulated: it takes so many images a second from a queue of two batches and counts how long it finds
the queue empty. It is fed batches of 256 images of 224x224 pixels, shuffled,

- on the fly: photographs decoded, resized and augmented each time they are asked for, in worker processes;
- from presized files: JPEGs of quality 95 at the wanted size, decoded in worker processes;
- from one `torch.save` a sample: uint8 tensors, loaded in worker processes;
- from tpucache: a CachedLoader with two threads, out of the page cache;
- from tpucache in memory: the same, each record kept as an array once it was read.

The last four hold the same images, augmented once by the preset that the first one applies each time. All files are in
the page cache when the clock starts, no epoch ends while it runs, and the workers are alive and busy before it starts.
Rounds take every way at every rate in turn, so that another load on the machine hits all of them.

    python scripts/bench_idle.py photographs/train --markdown idle.md --picture idle.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tpucache import CachedDataset, CachedLoader, Recipe, TpucacheError, UsageError, build_cache
from tpucache.progress import Progress
from tpucache.report.bench import simulate_device
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.manifest import Manifest
from tpucache.warmup.augment import augment, resolve
from tpucache.warmup.presize import presize

BATCH: Final = 256
RECIPE: Final = Recipe(size=224, variants=1, augment="standard")
THREADS: Final = 2
COUNTED_BATCHES: Final = 3  # at least, however slow a way is
EPOCH: Final = 1 << 20  # samples of the cache's epoch, about ImageNet's: the photographs are repeated to reach it
GENERATED: Final = 2048
KNOWN: Final = {7500: "ResNet-50 on a TPU v3-8", 28000: "the most for ResNet-50 on a TPU v5e-8"}
WORKING, WAITING = "#1a7f5a", "#d9d9d9"

Sample = tuple[torch.Tensor, int]
Batches = Iterator[Any]


# The four ways


@dataclass
class Way:
    """A way of feeding: `stream(n)` yields n batches, `burst` of which come at about the same time."""

    name: str
    stream: Callable[[int], Batches]
    burst: int
    rates: list[float] = field(default_factory=list)  # images a second when nothing holds it up, one a round
    idle: dict[int, list[float]] = field(default_factory=dict)  # by the accelerator's rate, one a round


class OnTheFly(Dataset[Sample]):
    """Original photographs, decoded, resized and augmented anew each time they are asked for."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self.files, self.labels = files, labels
        self.augmentation = resolve(RECIPE.augment, RECIPE.height, RECIPE.width)

    def __getitem__(self, index: int) -> Sample:
        image = presize(self.files[index].read_bytes(), RECIPE, str(self.files[index]))
        variant = int(torch.randint(1 << 31, ()))
        image = augment(image, self.augmentation, RECIPE.seed, index, variant)
        return torch.from_numpy(image), self.labels[index]


class PresizedFiles(Dataset[Sample]):
    """Image files of the wanted size."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self.files, self.labels = files, labels

    def __getitem__(self, index: int) -> Sample:
        with Image.open(self.files[index]) as image:
            return torch.from_numpy(np.array(image)), self.labels[index]


class SavedTensors(Dataset[Sample]):
    """One file a sample, written by `torch.save`."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self.files, self.labels = files, labels

    def __getitem__(self, index: int) -> Sample:
        # Files of our own, so pickle may have its way: that is twice as fast as weights_only=True.
        return torch.load(self.files[index], weights_only=False), self.labels[index]


class Draws:
    """A batch sampler: `batches` batches of shuffled sample numbers, across as many epochs as that takes."""

    def __init__(self, samples: int) -> None:
        self.samples, self.batches = samples, 0

    def __iter__(self) -> Iterator[list[int]]:
        numbers = self._numbers()
        for _ in range(self.batches):
            yield list(itertools.islice(numbers, BATCH))

    def _numbers(self) -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield from rng.permutation(self.samples).tolist()


def loader_way(name: str, dataset: Dataset[Sample], samples: int, workers: int) -> Way:
    """Feed by torch's DataLoader; its workers live on between iterations, and rest as soon as one is over."""
    draws = Draws(samples)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=draws, num_workers=workers, persistent_workers=True)

    def stream(batches: int) -> Batches:
        draws.batches = batches
        yield from loader

    return Way(name, stream, workers)


def cache_way(name: str, cache: Path, samples: int, in_memory: bool) -> Way:
    """Feed by tpucache's own loader."""
    positions = np.resize(np.arange(samples), max(EPOCH, BATCH))
    dataset = CachedDataset(cache, variant=1, indices=positions, in_memory=in_memory)
    for first in range(0, samples, BATCH):
        dataset.__getitems__(range(first, min(first + BATCH, samples)))  # every record was read before the clock starts
    loader = CachedLoader(dataset, BATCH, shuffle=True, drop_last=True, threads=THREADS)

    def stream(batches: int) -> Batches:
        return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), batches)

    return Way(name, stream, THREADS)


# What they read, made once


def open_ways(source: Path | None, work: Path, workers: int) -> list[Way]:
    """Make what is missing of the files that the ways read, bring all into the page cache, and return the ways."""
    source = source or generated_photographs(work / "photographs")
    print(f"preparing {work}: made once, then used again", file=sys.stderr)
    cache = work / "cache"
    if not (cache / MANIFEST_NAME).exists():
        build_cache(source, cache, RECIPE)
    images = CachedDataset(cache, variant=1)
    mark = images.manifest.shards[0].records_sha256[:12]  # files made from another cache are not these
    jpegs = derived_files(work / f"jpeg-{mark}", ".jpg", images, save_jpeg)
    tensors = derived_files(work / f"tensors-{mark}", ".pt", images, save_tensor)
    photographs = [source / path for path in images.paths]
    if not all(file.is_file() for file in photographs):
        raise UsageError(f"{cache} was made of other photographs than {source} has: give another folder with --work")
    for file in [*photographs, *jpegs, *tensors, *cache.glob("*.lmdb")]:
        file.read_bytes()
    labels, samples = images.labels.tolist(), len(images)
    return [
        loader_way("on the fly", OnTheFly(photographs, labels), samples, workers),
        loader_way("presized files", PresizedFiles(jpegs, labels), samples, workers),
        loader_way("one torch.save a sample", SavedTensors(tensors, labels), samples, workers),
        cache_way("tpucache", cache, samples, in_memory=False),
        cache_way("tpucache in memory", cache, samples, in_memory=True),
    ]


def derived_files(folder: Path, suffix: str, images: CachedDataset, save: Callable[[Any, Path], None]) -> list[Path]:
    """Return one file an image of the cache, saved by `save`; a folder that stands is complete."""
    names = [f"{number:07d}{suffix}" for number in range(len(images))]
    if not folder.exists():
        unfinished = empty_folder(folder.with_name(f"{folder.name}.unfinished"))
        for number, name in enumerate(names):
            save(images[number][0], unfinished / name)
        unfinished.rename(folder)
    return [folder / name for name in names]


def save_jpeg(image: torch.Tensor, path: Path) -> None:
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, quality=95)


def save_tensor(image: torch.Tensor, path: Path) -> None:
    torch.save(image.clone(memory_format=torch.contiguous_format), path)


def generated_photographs(folder: Path) -> Path:
    """Write made-up photographs, about as hard to decode as real ones of their size, in four classes."""
    if not folder.exists():
        unfinished = empty_folder(folder.with_name(f"{folder.name}.unfinished"))
        rng = np.random.default_rng(0)
        for number in range(GENERATED):
            path = unfinished / f"class-{number % 4}" / f"{number:04d}.jpg"
            path.parent.mkdir(exist_ok=True)
            generated_photograph(rng).save(path, quality=90)
        unfinished.rename(folder)
    return folder


def generated_photograph(rng: np.random.Generator) -> Image.Image:
    """Return noise of several scales, each finer one fainter, as in real photographs."""
    width, height = 400, 533
    total = np.full((height, width, 3), 128, np.float32)
    for cells, strength in ((3, 0.5), (12, 0.3), (50, 0.15), (200, 0.07)):
        noise = Image.fromarray(rng.integers(256, size=(cells, cells, 3), dtype=np.uint8))
        total += strength * (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32) - 128)
    return Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))


def empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# Measuring


def measure(ways: Sequence[Way], rates: Sequence[int], rounds: int, seconds: float) -> None:
    """Fill in the ways' figures."""
    paces = [images_per_second(way, way.burst * COUNTED_BATCHES) for way in ways]  # starts the workers, too
    with Progress(rounds * len(ways) * (1 + len(rates)), "measuring", "runs") as progress:
        for _ in range(rounds):
            for at, way in enumerate(ways):
                paces[at] = images_per_second(way, counted_batches(way, paces[at], seconds))
                way.rates.append(paces[at])
                progress.advance(1, way.name)
                for rate in rates:
                    batches = counted_batches(way, min(paces[at], rate), seconds)
                    way.idle.setdefault(rate, []).append(idle_share(way, batches, rate))
                    progress.advance(1, way.name)


def counted_batches(way: Way, pace: float, seconds: float) -> int:
    """Return how many batches to count for a run of about `seconds`: whole bursts, as half a one misleads."""
    bursts = round(pace * seconds / BATCH / way.burst)
    return way.burst * max(bursts, math.ceil(COUNTED_BATCHES / way.burst))


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


# Reporting


def report(ways: Sequence[Way], images: int, options: argparse.Namespace) -> dict[str, Any]:
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
                "name": way.name,
                "images_per_second": summary(way.rates),
                "idle": {str(rate): summary(idle) for rate, idle in way.idle.items()},
            }
            for way in ways
        ],
    }


def summary(figures: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(figures), "min": min(figures), "max": max(figures)}


def table(figures: dict[str, Any]) -> list[list[str]]:
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


def as_text(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    )
    return "\n".join(lines)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [rows[0], rule, *rows[1:]])


# The picture


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the shares of its time that an accelerator works and waits, a group of bars for each rate."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    rates, ways = figures["device_rates"], figures["ways"]
    height = 1.2 + (0.45 + 0.34 * len(ways)) * len(rates)
    figure = Figure(figsize=(8, height), dpi=200, layout=ConstrainedLayoutEngine(h_pad=0.08, hspace=0.04))
    figure.suptitle("How an accelerator spends its time, by what feeds it", size=14, weight="bold")
    groups = figure.subplots(len(rates), squeeze=False)[:, 0]
    for axes, rate in zip(groups, rates, strict=True):
        draw_group(axes, rate, ways)
    legend = [Patch(color=WORKING, label="working"), Patch(color=WAITING, label="waiting for data")]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, frameon=False, fontsize=10, handlelength=1.2)
    pixels = "x".join(map(str, reversed(figures["size"])))
    cores = counted(figures["cores"], "processor core")
    rounds = counted(figures["rounds"], "round")
    note = f"Simulated accelerator, images of {pixels}, fed by {cores}; medians of {rounds}"
    groups[-1].set_xlabel(note, size=9, color="#555555", labelpad=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")


def draw_group(axes: Any, rate: int, ways: Sequence[dict[str, Any]]) -> None:
    """Draw the bars for an accelerator of one rate."""
    known = f" ({KNOWN[rate]})" if rate in KNOWN else ""
    axes.set_title(f"It can take {rate:,} images a second{known}", loc="left", size=10.5)
    idle = [way["idle"][str(rate)]["median"] for way in ways]
    places = range(len(ways))
    axes.barh(places, 1, height=0.74, color=WAITING)
    axes.barh(places, [1 - share for share in idle], height=0.74, color=WORKING)
    for at, share in zip(places, idle, strict=True):
        axes.text(1.15, at, f"{share:.1%} idle", ha="right", va="center", size=10.5)
    axes.set_yticks(places, [way["name"] for way in ways], size=10.5)
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", nargs="?", type=Path, help="a folder of class folders of photographs (default: made up)"
    )
    parser.add_argument("--work", type=Path, default=Path("build/idle"), help="where files are made (%(default)s)")
    parser.add_argument("--rates", type=int, nargs="+", default=[7500, 28000], help="of the accelerator, in images/s")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over these (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4, help="of each run; slow ways take longer (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes of each DataLoader (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    options = parser.parse_args()
    for name in ("rounds", "workers", "seconds"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name} is more than 0, not {getattr(options, name)}")
    if min(options.rates) < 1:
        parser.error(f"--rates are at least 1, not {min(options.rates)}")
    return options


def main() -> None:
    options = parse_options()
    try:
        ways = open_ways(options.source, options.work, options.workers)
    except TpucacheError as error:
        sys.exit(f"bench_idle: {error}")
    measure(ways, options.rates, options.rounds, options.seconds)
    figures = report(ways, Manifest.load(options.work / "cache").samples, options)
    rows = table(figures)
    print(as_text(rows))
    for path, text in ((options.json, json.dumps(figures, indent=2) + "\n"), (options.markdown, as_markdown(rows))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if options.picture:
        draw(figures, options.picture)


if __name__ == "__main__":
    main()
