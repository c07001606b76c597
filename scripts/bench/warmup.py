"""How fast warmup turns photographs into records, compared with other ways: in the same run, taking turns.

Each of these is given the same photographs in each round, in another order each round, while the others are still:

- seed: one process, whole decode by Pillow, Lanczos, a random flip, one torch.save a sample;
- FFCV: its DatasetWriter with raw pixels, of images that its dataset decodes and resizes with Pillow;
- Pillow: its scaled decode and Lanczos alone, nothing written;
- presize: tpucache's own decode and resize alone, nothing written;
- tpucache: build_cache, the clean images or variants too.

What a user pays for each time is counted, what he pays for once is not: imports are done before the clock starts, and
the processes of Pillow and presize live and have worked. tpucache's first figure is of the whole of build_cache in a
fresh process, the start of its workers included; "steady" is of the next one there, which finds them alive. Photographs
are in the page cache; what another has written is on the disk before a turn, what is written within it need not be.

A turn is as many photographs as take about `--seconds`, so a small set is repeated and of a large one a share is taken,
evenly. Ratios are taken within a round, then their median.

    python -m scripts.bench warmup photographs --work build/bench --markdown warmup.md
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image

from scripts.bench.photos import link_photographs
from scripts.bench.read import FFCV
from scripts.bench.rounds import Contender, LeftOut, Track, leaving_out, race, ratio, read_whole, spread
from scripts.bench.table import Rows, add_race_options, parse_options, peer_notes, show
from scripts.bench.worker import Worker
from scripts.commands import make_parser, say

_FIRST_TURN: Final = 32  # photographs, to see how many a longer one takes
_CLOSE: Final = 0.5  # a turn of this share of the wanted time is enough to estimate how many photographs fill it
_FORMATS: Final = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Turn:
    """Images a second: of all that a turn takes, and of its work once the processes are alive."""

    whole: float
    steady: float


def contest(jobs: int) -> list[Contender]:
    """Return who takes part."""

    def bare(name: str, role: str, processes: int = jobs) -> Contender:
        return Contender(name, "bare", role, {"jobs": processes, "variants": 0})

    def ours(name: str, processes: int, variants: int = 0) -> Contender:
        return Contender(f"tpucache, {name}", "tpucache", "warmup", {"jobs": processes, "variants": variants})

    return [
        bare("seed", "seed", 1),
        Contender("FFCV's writer", "ffcv", "warmup", {"jobs": jobs, "variants": 0}, FFCV),
        bare("Pillow alone", "pillow"),
        bare("presize alone", "presize"),
        ours("1 job", 1),
        ours(f"{jobs} jobs", jobs),
        ours(f"{jobs} jobs, 1 variant", jobs, 1),
        ours(f"{jobs} jobs, 8 variants", jobs, 8),
    ]


class Field:
    """The contenders over the photographs of one source, each with the number of them that fills a turn."""

    def __init__(self, track: Track, files: Sequence[Path], options: argparse.Namespace, work: Path) -> None:
        self._track, self._files, self._options, self._work = track, files, options, work
        self._waiting: dict[str, Worker] = {}
        self.counts: dict[str, int] = {}

    def enter(self, contender: Contender, stack: contextlib.ExitStack) -> None:
        """Start and warm a contender, and find out how many photographs fill a turn. Raises CommandError."""
        say(f"{contender.name}: warming up")
        if not contender.is_ours:
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
        self.counts[contender.name] = wanted if passes < 1 else round(passes) * len(self._files)

    def turn(self, contender: Contender) -> Turn:
        """Let a contender work for a turn. Raises CommandError."""
        return self._take(contender, self.counts[contender.name])

    def _take(self, contender: Contender, count: int) -> Turn:
        photographs = link_photographs(self._files, count, self._work / f"{count}-photographs")
        if not contender.is_ours:
            rate = self._waiting[contender.name].rate(photographs)
            return Turn(rate, rate)
        with contextlib.closing(self._start(contender)) as worker:
            return Turn(worker.rate(photographs), worker.rate(photographs))

    def _start(self, contender: Contender) -> Worker:
        folder = self._work / "written" / contender.name.translate({ord(mark): "-" for mark in " ,'"})
        setting = {**contender.setting, "folder": str(folder), "size": self._options.size}
        return self._track.start(contender, setting, "warmup", contender.name)


def measure(source: Path, contenders: Sequence[Contender], track: Track, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one source as JSON values."""
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in _FORMATS)
    megapixels = statistics.fmean(_pixels(file) for file in files) / 1e6
    read_whole(files)
    left_out: LeftOut = []
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.work)))
        field = Field(track, files, options, work)
        ready: list[Contender] = []
        for contender in contenders:
            with leaving_out(contender.name, left_out):
                field.enter(contender, stack)
                ready.append(contender)
        turns = race({each.name: functools.partial(field.turn, each) for each in ready}, options.rounds, left_out)
    return {
        "source": source.name,
        "images": len(files),
        "megapixels": megapixels,
        "left_out": left_out,
        "contenders": [
            summarise(each, turns[each.name], turns.get(f"tpucache, {options.jobs} jobs"))
            for each in ready
            if each.name in turns
        ],
    }


def summarise(contender: Contender, turns: Sequence[Turn], ours: Sequence[Turn] | None) -> dict[str, Any]:
    """Return a contender's figures, and how many times faster ours are, in the median over the rounds."""
    whole = spread([turn.whole for turn in turns])
    pairs = [([turn.whole for turn in each], [turn.steady for turn in each]) for each in (ours or (), turns)]
    return {
        "name": contender.name,
        "images_per_second": whole["median"],
        **whole,
        "steady": statistics.median(turn.steady for turn in turns),
        "records_per_second": whole["median"] * (1 + contender.setting["variants"]),
        "times_slower": ratio(pairs[0][0], pairs[1][0]),
        "steadily_slower": ratio(pairs[0][1], pairs[1][1]),
    }


def to_rows(figures: dict[str, Any], jobs: int) -> Rows:
    """Return the rows of the table, its heading first."""
    rows = [["images/s", "median", "min - max", "steady", "records/s", f"{jobs} jobs are faster", "steadily"]]
    for row in figures["contenders"]:
        extremes = f"{_short(row['min'])} - {_short(row['max'])}"
        rates = [_short(row["images_per_second"]), extremes, _short(row["steady"]), _short(row["records_per_second"])]
        times = (row["times_slower"], row["steadily_slower"])
        rows.append([row["name"], *rates, *(f"{each:.2f}" if each else "" for each in times)])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    track = Track(options.work)
    left_out: LeftOut = []
    ready = track.admit(contest(options.jobs), left_out)
    sources = [measure(source, ready, track, options) for source in options.sources]
    tables, notes = [], [f"to {options.size}x{options.size} pixels; median of {options.rounds} rounds."]
    for figures in sources:
        title = (
            f"{figures['source']}: {figures['images']:,} images of {figures['megapixels']:.1f} megapixels on average:"
        )
        tables.append((title, to_rows(figures, options.jobs)))
        left_out += figures["left_out"]
    notes += peer_notes(track.versions, left_out)
    show(options, {"sources": sources, "versions": track.versions}, tables, notes)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
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
