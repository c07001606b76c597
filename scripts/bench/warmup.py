"""How fast warmup turns photographs into records, compared with other ways: in the same run, taking turns.

Each of these is given the same photographs in each round, in another order each round, while the others are still:

- seed: one process, whole decode by Pillow, Lanczos, a random flip, one torch.save a sample;
- FFCV: its DatasetWriter with raw pixels, of images that its dataset decodes and resizes with Pillow;
- pyvips: its thumbnail_buffer alone, one thread a process, nothing written;
- Pillow: its scaled decode and Lanczos alone, nothing written;
- presize: tpucache's own decode and resize alone, nothing written;
- tpucache: build_cache, the clean images or variants too.

What a user pays for each time is counted, what he pays for once is not: imports are done before the clock starts, and
the processes of pyvips, Pillow and presize live and have worked. tpucache's first figure is of the whole of
build_cache in a fresh process, the start of its workers included; "steady" is of the next one there, which finds them
alive. Photographs are in the page cache; what another has written is on the disk before a turn, what is written within
it need not be.

Photographs that one of them refuses, as libvips does damaged ones that Pillow reads, are given to nobody. A turn is as
many photographs as take about `--seconds`, so a small set is repeated and of a large one a share is taken,
evenly. Ratios are taken within a round, then their median.

    python -m scripts.bench warmup photographs --work build/bench --markdown warmup.md
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from scripts.bench.rounds import LeftOut, Track, leaving_out, race
from scripts.bench.table import (
    Rows,
    add_race_options,
    as_markdown,
    as_text,
    machine,
    machine_line,
    parse_options,
    write_files,
)
from scripts.bench.warmup_contenders import Builder, Ratio, Turn, compare, contest, summarise
from scripts.bench.worker import Worker
from scripts.commands import CommandError, say
from tpucache import CachedDataset, Recipe, TpucacheError, build_cache
from tpucache.warmup.sources import FolderSource

_FIRST_TURN: Final = 32  # photographs, to see how many a longer one takes
_CLOSE: Final = 0.5  # a turn of this share of the wanted time is enough to estimate how many photographs fill it


class Field:
    """The contenders over the photographs of one source, each with the number of them that fills a turn."""

    def __init__(self, track: Track, files: Sequence[Path], options: argparse.Namespace) -> None:
        self._track, self._files, self._options = track, files, options
        self._waiting: dict[str, Worker] = {}
        self._counts: dict[str, int] = {}
        self._work = options.work / "warmup"
        self._lists = self._work / "lists"
        self._lists.mkdir(parents=True, exist_ok=True)

    def check(self, contender: Builder) -> list[str]:
        """Take the photographs away that a contender refuses, and return their names. Raises CommandError."""
        with contextlib.closing(self._start(contender)) as worker:
            refused = worker.ask("check", self._list(len(self._files)))["refused"]
        kept = [file for file in self._files if str(file) not in refused]
        if not kept:
            raise CommandError("refuses every photograph")
        self._files = kept
        return [Path(file).name for file in refused]

    def enter(self, contender: Builder, stack: contextlib.ExitStack) -> None:
        """Start and warm a contender, and find out how many photographs fill a turn. Raises CommandError."""
        say(f"{contender.name}: warming up")
        if not contender.fresh:
            self._waiting[contender.name] = stack.enter_context(contextlib.closing(self._start(contender)))
        self._take(contender, _FIRST_TURN)  # the first call of anything is slow
        count = _FIRST_TURN
        while True:
            pace = self._take(contender, count).steady
            wanted = max(count, round(pace * self._options.seconds))
            if count >= _CLOSE * wanted:
                break
            count = min(wanted, count * 8)
        passes = wanted / len(self._files)
        self._counts[contender.name] = wanted if passes < 1 else round(passes) * len(self._files)

    def count(self, contender: Builder) -> int:
        """Return how many photographs a turn of the contender takes."""
        return self._counts[contender.name]

    def turn(self, contender: Builder) -> Turn:
        """Let a contender work for a turn. Raises CommandError."""
        return self._take(contender, self.count(contender))

    def _take(self, contender: Builder, count: int) -> Turn:
        listed = self._list(count)
        if not contender.fresh:
            rate = self._waiting[contender.name].rate(listed)
            return Turn(rate, rate)
        with contextlib.closing(self._start(contender)) as worker:
            return Turn(worker.rate(listed), worker.rate(listed))

    def _start(self, contender: Builder) -> Worker:
        folder = self._work / "written" / contender.name.translate({ord(mark): "-" for mark in " ,'"})
        setting = {**contender.settings[0], "folder": str(folder), "size": self._options.size}
        return self._track.start(contender, setting, "warmup", contender.name)

    def _list(self, count: int) -> Path:
        """List this many photographs: some, evenly spread, or all of them repeatedly."""
        path: Path = self._lists / f"{count}.json"
        total = len(self._files)
        places = (number * total // count if count < total else number % total for number in range(count))
        path.write_text(json.dumps([str(self._files[place]) for place in places]))
        return path


def measure(
    source: Path, contenders: Sequence[Builder], ratios: Sequence[Ratio], track: Track, options: argparse.Namespace
) -> dict[str, Any]:
    """Return all figures of one source as JSON values."""
    files = [source / sample.path for sample in FolderSource(source).list().samples]
    pixels = statistics.fmean(_pixels(file) for file in files)  # reads every header: all files are there, and images
    for file in files:
        file.read_bytes()  # into the page cache
    say(f"{source}: {len(files):,} images of {pixels / 1e6:.1f} megapixels on average")
    left_out: LeftOut = []
    ready: dict[str, Builder] = {}
    refused: list[str] = []
    with contextlib.ExitStack() as stack:
        field = Field(track, files, options)
        for contender in sorted(contenders, key=lambda contender: not contender.strict):
            with leaving_out(contender.name, left_out):
                refused += field.check(contender) if contender.strict else []
                field.enter(contender, stack)
                ready[contender.name] = contender
        ways = {name: functools.partial(field.turn, contender) for name, contender in ready.items()}
        turns = race(ways, options.rounds, left_out)
    quality, versions = fidelity(source, options)
    return {
        "source": source.name,
        "images": len(files),
        "megapixels": pixels / 1e6,
        "refused": refused,
        "left_out": left_out,
        "contenders": [
            summarise(contender, field.count(contender), turns[contender.name])
            for contender in contenders
            if contender.name in turns
        ],
        "ratios": [compare(ratio, turns, pixels) for ratio in ratios],
        "psnr": quality,
        "created_by": versions,
    }


def fidelity(source: Path, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return how far the records are from those of whole decodes, in dB, and the versions that made them."""
    say("comparing the records with those of whole decodes")
    caches = []
    for exact in (False, True):
        cache = options.work / "warmup" / f"cache-{'exact' if exact else 'default'}"
        shutil.rmtree(cache, ignore_errors=True)
        build_cache(source, cache, Recipe(size=options.size, exact=exact), jobs=options.jobs)
        caches.append(CachedDataset(cache))
    figures = [
        _psnr(default[0].numpy(), exact[0].numpy())
        for default, exact in ((caches[0][at], caches[1][at]) for at in range(len(caches[0])))
    ]
    versions = dict(caches[0].manifest.created_by)
    for dataset in caches:
        shutil.rmtree(dataset.directory)
    return {"min": min(figures), "median": statistics.median(figures)}, versions


def rate_rows(figures: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table of rates, its heading first."""
    rows = [["images/s", "median", "min - max", "steady", "records/s", "images a turn"]]
    for row in figures["contenders"]:
        extremes = f"{_short(row['min'])} - {_short(row['max'])}"
        rates = [_short(row["images_per_second"]), extremes, _short(row["steady"]), _short(row["records_per_second"])]
        rows.append([row["name"], *rates, f"{row['images_per_turn']:,}"])
    return rows


def ratio_rows(figures: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table of ratios, its heading first."""
    rows = [["ratio", "whole", "steady", "goal", "met"]]
    for ratio in figures["ratios"]:
        whole, steady, goal = ratio["whole"], ratio["steady"], ratio["goal"]
        met = "" if goal is None or whole is None else "yes" if whole >= goal else "steady" if steady >= goal else "no"
        cells = ["" if number is None else f"{number:.2f}" for number in (whole, steady, goal)]
        rows.append([ratio["name"], *cells, met])
    return rows


def _psnr_line(psnr: dict[str, float]) -> str:
    if math.isinf(psnr["min"]):
        return "PSNR against whole decodes: these are decoded whole anyway.\n"
    return f"PSNR against whole decodes: median {psnr['median']:.1f} dB, min {psnr['min']:.1f} dB\n"


def to_text(report: dict[str, Any], table: Callable[[Rows], str]) -> str:
    """Return all tables, each made by `table`, with a line that describes the photographs."""
    parts = []
    for figures in report["sources"]:
        parts += [
            f"{figures['source']}: {figures['images']:,} images of {figures['megapixels']:.1f} megapixels on average, "
            f"to {report['size']}x{report['size']}; median of {report['rounds']} rounds.\n",
            table(rate_rows(figures)),
            table(ratio_rows(figures)),
            _psnr_line(figures["psnr"]),
            *(f"given to nobody, as one refuses it: {name}\n" for name in figures["refused"]),
            *(f"left out: {row['name']}: {row['reason']}\n" for row in figures["left_out"]),
        ]
    parts.append(f"{machine_line(report['machine'])}\n")
    parts += [f"left out: {row['name']}: {row['reason']}\n" for row in report["left_out"]]
    versions = {**report["versions"], "tpucache": report["sources"][-1]["created_by"]}
    parts += [f"{name}: {', '.join(' '.join(pair) for pair in each.items())}\n" for name, each in versions.items()]
    return "\n".join(parts)


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    contenders, ratios = contest(options.jobs)
    report: dict[str, Any] = {"machine": machine()}
    report |= {name: getattr(options, name) for name in ("jobs", "rounds", "size", "seconds")}
    track = Track(options.work)
    left_out: LeftOut = []
    ready = track.admit(contenders, left_out)
    try:
        sources = [measure(source, ready, ratios, track, options) for source in options.sources]
    except (TpucacheError, OSError) as error:
        sys.exit(f"bench warmup: {error}")
    report |= {"versions": track.versions, "left_out": left_out, "sources": sources}
    print(to_text(report, as_text), end="")
    write_files(options, report, to_text(report, as_markdown))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", metavar="SOURCE", nargs="+", type=Path, help="a folder of readable images")
    add_race_options(parser, "build/bench", seconds=8.0)
    parser.add_argument("--jobs", type=int, default=2, help="processes of everyone but the seed (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="of the records, in pixels (%(default)s)")
    options = parse_options(parser, {"jobs": 2, "size": 1, "seconds": 0.1})
    options.sources = [source.resolve() for source in options.sources]
    return options


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _pixels(file: Path) -> int:
    with Image.open(file) as image:
        return int(image.width * image.height)


def _psnr(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return 10 * float(np.log10(255**2 / error)) if error else float("inf")
