"""How fast warmup turns photographs into records, beside other ways of doing so: in the same run, taking turns.

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

    python scripts/bench_warmup.py photographs --work build/bench --markdown warmup.md
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench_idle import as_markdown, as_text
from bench_peers import PEERS, SCRIPTS, Bench, LeftOutError, Peer, Worker, say
from bench_report import machine
from PIL import Image

from tpucache import CachedDataset, Recipe, TpucacheError, build_cache
from tpucache.warmup.sources import FolderSource

_PYVIPS: Final = Peer("pyvips", "pyvips", (("pyvips==3.2.0", "pyvips-binary==8.18.7"),), own_format=False)
_FFCV: Final = dataclasses.replace(PEERS["ffcv"], own_format=False)
_OURS: Final = PEERS["tpucache"]

_CAMERA_PIXELS: Final = 1e6  # an image of more is one as cameras make them
_FIRST_TURN: Final = 32  # photographs, to see how many a longer one takes
_CLOSE: Final = 0.5  # a turn of this share of the wanted time tells how many photographs fill it


@dataclass(frozen=True)
class Contender:
    """One way of doing it. `fresh` is a new process each turn, which does its work twice; `strict` may refuse files."""

    name: str
    script: str
    peer: Peer = _OURS
    jobs: int = 1
    variants: int = 0
    fresh: bool = False
    strict: bool = False


@dataclass(frozen=True)
class Turn:
    """Images a second: of all that a turn takes, and of its work once the processes are alive."""

    whole: float
    steady: float


@dataclass(frozen=True)
class Ratio:
    """A comparison, and what it should come to; `camera`: with photographs as cameras make them."""

    name: str
    above: Contender
    below: Contender
    goal: float | None = None
    camera: bool = False
    by_records: bool = False

    def of(self, turns: dict[str, list[Turn]], figure: str) -> float | None:
        """Return the median over the rounds, or None where one of the two is left out."""
        above, below = turns.get(self.above.name), turns.get(self.below.name)
        if not above or not below:
            return None
        records = (1 + self.above.variants) / (1 + self.below.variants) if self.by_records else 1.0
        pairs = zip(above, below, strict=True)
        return records * statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in pairs)


def contest(jobs: int) -> tuple[list[Contender], list[Ratio]]:
    """Return who takes part, and what is compared."""

    def ours(name: str, jobs: int, variants: int = 0) -> Contender:
        return Contender(f"tpucache, {name}", "tpucache", jobs=jobs, variants=variants, fresh=True)

    seed = Contender("seed", "seed")
    ffcv = Contender("FFCV's writer", "ffcv", _FFCV, jobs)
    pyvips = Contender("pyvips alone", "pyvips", _PYVIPS, jobs, strict=True)
    pillow = Contender("Pillow alone", "pillow", jobs=jobs)
    alone = Contender("presize alone", "presize", jobs=jobs)
    single, full = ours("1 job", 1), ours(f"{jobs} jobs", jobs)
    one, eight = ours(f"{jobs} jobs, 1 variant", jobs, 1), ours(f"{jobs} jobs, 8 variants", jobs, 8)
    return [seed, ffcv, pyvips, pillow, alone, single, full, one, eight], [
        Ratio(f"{jobs} jobs / seed", full, seed, 8.0, camera=True),
        Ratio(f"{jobs} jobs / FFCV's writer", full, ffcv, 3.0, camera=True),
        Ratio(f"{jobs} jobs / pyvips alone", full, pyvips, 1.0),
        Ratio(f"{jobs} jobs / Pillow alone", full, pillow, 0.85),
        Ratio(f"{jobs} jobs / presize alone", full, alone, 0.85),
        Ratio(f"{jobs} jobs / 1 job", full, single, 1.85 if jobs == 2 else None),
        Ratio("8 variants / 1, images", eight, one),
        Ratio("8 variants / 1, records", eight, one, by_records=True),
    ]


class Field:
    """The contenders over the photographs of one source, each with the number of them that fills a turn."""

    def __init__(self, work: Path, files: Sequence[Path], options: argparse.Namespace) -> None:
        self._work, self._files, self._options = work, files, options
        self._waiting: dict[str, Worker] = {}
        self._counts: dict[str, int] = {}
        self._lists = work / "lists"
        self._logs = work / "log"
        for folder in (self._lists, self._logs):
            folder.mkdir(parents=True, exist_ok=True)

    def check(self, contender: Contender) -> list[str]:
        """Take the photographs away that a contender refuses, and return their names. Raises LeftOutError."""
        with contextlib.closing(self._start(contender)) as worker:
            refused = worker.ask(f"check {self._list(len(self._files))}")["refused"]
        kept = [file for file in self._files if str(file) not in refused]
        if not kept:
            raise LeftOutError("refuses every photograph")
        self._files = kept
        return [Path(file).name for file in refused]

    def enter(self, contender: Contender, stack: contextlib.ExitStack) -> None:
        """Start and warm a contender, and find out how many photographs fill a turn. Raises LeftOutError."""
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

    def count(self, contender: Contender) -> int:
        """Return how many photographs a turn of the contender takes."""
        return self._counts[contender.name]

    def turn(self, contender: Contender) -> Turn:
        """Let a contender work for a turn. Raises LeftOutError."""
        return self._take(contender, self.count(contender))

    def _take(self, contender: Contender, count: int) -> Turn:
        go = f"go {self._list(count)}"
        if not contender.fresh:
            rate = _rate(self._waiting[contender.name].ask(go))
            return Turn(rate, rate)
        with contextlib.closing(self._start(contender)) as worker:
            return Turn(_rate(worker.ask(go)), _rate(worker.ask(go)))

    def _start(self, contender: Contender) -> Worker:
        name = contender.name.replace(" ", "-").replace(",", "").replace("'", "")
        setting = {"folder": str(self._work / "written" / name), "size": self._options.size}
        setting |= {"jobs": contender.jobs, "variants": contender.variants}
        script = SCRIPTS / f"warmup_{contender.script}.py"
        python = python_of(self._options.work, contender.peer)
        return Worker([str(python), str(script), json.dumps(setting)], self._logs / f"warmup-{name}.log")

    def _list(self, count: int) -> Path:
        """Write down so many photographs: some, evenly spread, or all of them again and again."""
        path, total = self._lists / f"{count}.json", len(self._files)
        places = (number * total // count if count < total else number % total for number in range(count))
        path.write_text(json.dumps([str(self._files[place]) for place in places]))
        return path


def race(field: Field, contenders: Sequence[Contender], rounds: int, left_out: list[Any]) -> dict[str, list[Turn]]:
    """Let everyone have a turn each round, in an order that changes, and return the turns by contender."""
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        here = [contender for contender in contenders if contender.name in turns]
        for contender in random.Random(number).sample(here, len(here)):
            try:
                turns[contender.name].append(field.turn(contender))
            except LeftOutError as error:
                del turns[contender.name]
                leave_out(left_out, contender, error)
    return turns


def measure(source: Path, contenders: Sequence[Contender], ratios: Sequence[Ratio], options: Any) -> dict[str, Any]:
    """Return all figures of one source as JSON values."""
    files = [source / sample.path for sample in FolderSource(source).list().samples]
    pixels = statistics.fmean(_pixels(file) for file in files)  # reads every header: all files are there, and images
    for file in files:
        file.read_bytes()  # into the page cache
    say(f"{source}: {len(files):,} images of {pixels / 1e6:.1f} megapixels on average")
    left_out: list[Any] = []
    work = options.work / "warmup"
    with contextlib.ExitStack() as stack:
        field, ready, refused = Field(work, files, options), [], []
        for contender in sorted(contenders, key=lambda contender: not contender.strict):
            try:
                refused += field.check(contender) if contender.strict else []
                field.enter(contender, stack)
                ready.append(contender)
            except LeftOutError as error:
                leave_out(left_out, contender, error)
        turns = race(field, ready, options.rounds, left_out)
    quality, versions = fidelity(source, work, options)
    return {
        "source": source.name,
        "images": len(files),
        "megapixels": pixels / 1e6,
        "refused": refused,
        "left_out": left_out,
        "contenders": [
            summary(contender, field.count(contender), turns[contender.name])
            for contender in contenders
            if contender.name in turns
        ],
        "ratios": [compared(ratio, turns, pixels) for ratio in ratios],
        "psnr": quality,
        "created_by": versions,
    }


def summary(contender: Contender, count: int, turns: Sequence[Turn]) -> dict[str, Any]:
    whole = [turn.whole for turn in turns]
    return {
        "name": contender.name,
        "images_per_turn": count,
        "images_per_second": statistics.median(whole),
        "min": min(whole),
        "max": max(whole),
        "steady": statistics.median(turn.steady for turn in turns),
        "records_per_second": statistics.median(whole) * (1 + contender.variants),
        "turns": [dataclasses.asdict(turn) for turn in turns],
    }


def compared(ratio: Ratio, turns: dict[str, list[Turn]], pixels: float) -> dict[str, Any]:
    goal = ratio.goal if pixels >= _CAMERA_PIXELS or not ratio.camera else None
    return {"name": ratio.name, "whole": ratio.of(turns, "whole"), "steady": ratio.of(turns, "steady"), "goal": goal}


def fidelity(source: Path, work: Path, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return how far the records are from those of whole decodes, in dB, and the versions that made them."""
    say("comparing the records with those of whole decodes")
    caches = []
    for exact in (False, True):
        cache = work / f"cache-{'exact' if exact else 'default'}"
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


def prepare(contenders: Sequence[Contender], work: Path, report: dict[str, Any]) -> list[Contender]:
    """Install what is missing, and return the contenders that can take part."""
    bench = Bench(work, work / "warmup")
    absent: dict[str, LeftOutError] = {}
    for peer in dict.fromkeys(contender.peer for contender in contenders):
        try:
            report["versions"][peer.name] = bench.prepare(peer)
        except LeftOutError as error:
            absent[peer.name] = error
    for contender in contenders:
        if contender.peer.name in absent:
            leave_out(report["left_out"], contender, absent[contender.peer.name])
    return [contender for contender in contenders if contender.peer.name not in absent]


def leave_out(left_out: list[Any], contender: Contender, error: LeftOutError) -> None:
    say(f"{contender.name}: left out: {error}")
    left_out.append({"name": contender.name, "reason": str(error)})


def python_of(work: Path, peer: Peer) -> Path:
    """Return the interpreter of a peer's environment, which bench_peers makes in the work folder."""
    return work / "env" / peer.environment / "bin" / "python" if peer.installs else Path(sys.executable)


# Reporting


def contender_rows(figures: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table of rates, its heading first."""
    rows = [["images/s", "median", "min - max", "steady", "records/s", "images a turn"]]
    for row in figures["contenders"]:
        spread = f"{_short(row['min'])} - {_short(row['max'])}"
        rates = [_short(row["images_per_second"]), spread, _short(row["steady"]), _short(row["records_per_second"])]
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


def as_report(report: dict[str, Any], table: Any) -> str:
    """Return all tables, each made by `table`, with a line on what they are of."""
    parts = []
    for figures in report["sources"]:
        psnr = figures["psnr"]
        parts += [
            f"{figures['source']}: {figures['images']:,} images of {figures['megapixels']:.1f} megapixels on average, "
            f"to {report['size']}x{report['size']}; median of {report['rounds']} rounds.\n",
            table(contender_rows(figures)).rstrip("\n") + "\n",
            table(ratio_rows(figures)).rstrip("\n") + "\n",
            f"PSNR against whole decodes: median {psnr['median']:.1f} dB, min {psnr['min']:.1f} dB\n",
            *(f"given to nobody, as one refuses it: {name}\n" for name in figures["refused"]),
            *(f"left out: {row['name']}: {row['reason']}\n" for row in figures["left_out"]),
        ]
    here = report["machine"]
    parts.append(f"{here['cpus']} CPUs ({here['cpu']}), {here['system']}, Python {here['python']}\n")
    parts += [f"left out: {row['name']}: {row['reason']}\n" for row in report["left_out"]]
    versions = {**report["versions"], "tpucache": report["sources"][-1]["created_by"]}
    parts += [f"{name}: {', '.join(' '.join(pair) for pair in each.items())}\n" for name, each in versions.items()]
    return "\n".join(parts)


def _rate(answer: dict[str, Any]) -> float:
    return answer["images"] / answer["seconds"]


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _pixels(file: Path) -> int:
    with Image.open(file) as image:
        return image.width * image.height


def _psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return 10 * float(np.log10(255**2 / error)) if error else float("inf")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", metavar="SOURCE", nargs="+", type=Path, help="a folder of readable images")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="where files are made (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes of everyone but the seed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over these (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="of the records, in pixels (%(default)s)")
    parser.add_argument("--seconds", type=float, default=8, help="of each turn, about (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    options = parser.parse_args()
    for name, least in (("jobs", 2), ("rounds", 1), ("size", 1), ("seconds", 0.1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is at least {least}, not {getattr(options, name)}")
    options.sources = [source.resolve() for source in options.sources]
    options.work = options.work.resolve()
    return options


def main() -> None:
    options = parse_options()
    contenders, ratios = contest(options.jobs)
    report: dict[str, Any] = {"machine": machine(), "versions": {}, "left_out": [], "sources": []}
    report |= {name: getattr(options, name) for name in ("jobs", "rounds", "size", "seconds")}
    ready = prepare(contenders, options.work, report)
    try:
        for source in options.sources:
            report["sources"].append(measure(source, ready, ratios, options))
    except (TpucacheError, OSError) as error:
        sys.exit(f"bench_warmup: {error}")
    print(as_report(report, as_text), end="")
    texts = ((options.json, json.dumps(report, indent=2) + "\n"), (options.markdown, as_report(report, as_markdown)))
    for path, text in texts:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
