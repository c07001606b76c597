"""How fast tpucache reads, compared with its peers: the same images, in the same run, taking turns.

Every peer gets an environment of its own, the same photographs in its own format, and a process that reads shuffled
batches when asked to. In each round everyone reads once, in another order each round, while the others are still;
the gather, rows of an array in memory copied into reused batches, is what the machine allows at most.

On a machine of many CPUs compare two of them: `taskset -c 0,1 python -m scripts.bench read`. The first run installs
some gigabytes of peers and writes each image about ten times; later ones find all that in the work folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import math
import os
import shutil
from pathlib import Path
from typing import Any, Final

from scripts.bench.photos import SIZE, prepare_data
from scripts.bench.picture import draw_rates
from scripts.bench.read_contenders import CONTENDERS, KINDS_READ, LIMIT, OURS, REFERENCE, choose, files_of, threads_of
from scripts.bench.rounds import Contender, LeftOut, Track, leaving_out, race, ratio, read_whole, spread, spread_cell
from scripts.bench.table import (
    add_race_options,
    as_markdown,
    as_text,
    machine,
    parse_options,
    to_markdown,
    write_files,
)
from scripts.bench.worker import Setting, Worker
from scripts.commands import ROOT, CommandError, say

BATCH: Final = 256
_LEFT: Final = (0, 5)  # columns of text


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    data, images = prepare_data(options.work, options.source, SIZE, KINDS_READ)
    os.environ["BENCH_PASSES"] = str(options.passes)  # for the processes that read
    report: dict[str, Any] = {"machine": machine(), "images": images, "size": SIZE, "batch": BATCH}
    report |= {"rounds": options.rounds, "seconds": options.seconds, "passes": options.passes}
    left_out: LeftOut = []
    track = Track(options.work)
    with contextlib.ExitStack() as stack:
        field = Field(track, data, options.seconds, left_out)
        for contender in track.admit(choose(CONTENDERS, options.only), left_out):
            field.enter(contender, stack)
        readers = field.race(options.rounds)
    report |= {"versions": track.versions, "left_out": left_out, "readers": readers}
    print(as_text(to_rows(report), _LEFT), end="")
    for row in left_out:
        say(f"left out: {row['name']}: {row['reason']}")
    table = as_markdown(to_rows(report), _LEFT, lambda name: name.startswith(OURS))
    write_files(options, report, to_markdown(report, table))
    if options.picture:
        draw_rates(report, options.picture)


class Field:
    """Those who take part, each with a process that waits for its turn."""

    def __init__(self, track: Track, data: Path, seconds: float, left_out: LeftOut) -> None:
        self._track, self._data, self._seconds, self._left_out = track, data, seconds, left_out
        self._workers: dict[str, Worker] = {}
        self._trials: dict[str, list[dict[str, Any]]] = {}
        self._files: dict[str, list[Path]] = {}
        #: What each one lost of the images that went in, in dB; None: nothing.
        self.psnr: dict[str, float | None] = {}

    def enter(self, contender: Contender, stack: contextlib.ExitStack) -> None:
        """Start the process of a contender, with the fastest of its settings, and let it warm up."""
        say(f"{contender.name}: warming up")
        with leaving_out(contender.name, self._left_out):
            self._write(contender)
            trials = [self._try(contender, setting) for setting in contender.settings]
            trials.sort(key=lambda trial: -trial.get("images_per_second", -1))
            if "reason" in trials[0]:
                raise CommandError(trials[0]["reason"])
            worker = stack.enter_context(contextlib.closing(self._start(contender, trials[0]["setting"])))
            worker.rate(self._seconds / 2)
            self._workers[contender.name], self._trials[contender.name] = worker, trials
            self._files[contender.name] = files_of(contender, self._data)

    def race(self, rounds: int) -> list[dict[str, Any]]:
        """Let everyone read once a round, and return their rows, the fastest first."""
        turns = {name: functools.partial(self._turn, name) for name in self._workers}
        rates = race(turns, rounds, self._left_out)
        rows = [summarise(name, self._trials[name], rates) for name in rates]
        return sorted(rows, key=lambda row: -row["images_per_second"])

    def _turn(self, name: str) -> float:
        """Return the rate of one of them, with its files in the page cache, as other turns may push large ones out."""
        read_whole(self._files[name])
        return self._workers[name].rate(self._seconds)

    def _try(self, contender: Contender, setting: Setting) -> dict[str, Any]:
        """Return the rate of a setting, or the reason why it has none; one that is alone needs no trial."""
        if len(contender.settings) == 1:
            return {"setting": setting}
        try:
            with contextlib.closing(self._start(contender, setting)) as worker:
                worker.rate(self._seconds / 2)
                return {"setting": setting, "images_per_second": worker.rate(self._seconds)}
        except CommandError as error:
            return {"setting": setting, "reason": str(error)}

    def _start(self, contender: Contender, setting: Setting) -> Worker:
        """Start the process that reads with a setting. Raises CommandError when its first batch is not right."""
        folder = self._data / "peer" / contender.peer
        read_whole([folder])
        worker = self._track.start(contender, {**setting, "data": str(self._data), "folder": str(folder)})
        try:
            self.psnr[contender.name] = worker.ask("check")["psnr"]
        except BaseException:
            worker.close()
            raise
        return worker

    def _write(self, contender: Contender) -> None:
        """Have a peer write its format, unless it is there. Raises CommandError."""
        folder = self._data / "peer" / contender.peer
        module = ROOT / "scripts" / "bench" / "peers" / f"{contender.module.replace('.', '/')}.py"
        installs = contender.environment.fingerprint if contender.environment else ""
        mark, wanted = folder.with_suffix(".written"), hashlib.sha256(module.read_bytes() + installs.encode())
        if mark.exists() and mark.read_text() == wanted.hexdigest():
            return
        say(f"{contender.peer}: writing its format, if it has one")
        mark.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        setting = {"data": str(self._data), "folder": str(folder)}
        with contextlib.closing(self._track.start(contender, setting, "write", contender.peer)) as worker:
            worker.ask("write", patience=math.inf)
        mark.write_text(wanted.hexdigest())


def summarise(name: str, trials: list[dict[str, Any]], rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return a contender's row."""
    threads = threads_of(trials[0]["setting"])
    figures = spread(rates[name])
    return {
        "name": name,
        "setting": trials[0]["setting"],
        "threads": threads,
        "images_per_second": figures["median"],
        "min": figures["min"],
        "max": figures["max"],
        "rates": rates[name],
        "of_gather": ratio(rates[name], rates.get(f"{LIMIT} {threads}")),
        "times_slower": ratio(rates.get(REFERENCE), rates[name]),
        "trials": trials,
    }


def to_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    rows = [["reader", "images/s", "min - max", "of the gather", "times slower", "setting"]]
    for row in report["readers"]:
        of_gather, slower = row["of_gather"], row["times_slower"]
        shown = {name: value for name, value in row["setting"].items() if name not in ("kind", "memory")}
        ratios = [f"{of_gather:.2f}" if of_gather else "", f"{slower:.1f}" if slower else ""]
        setting = ", ".join(f"{name} {value}" for name, value in shown.items())
        rows.append([row["name"], f"{row['images_per_second']:,.0f}", spread_cell(row), *ratios, setting])
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a folder of photographs, a folder a class; else some are made up")
    add_race_options(parser, "build/bench", seconds=2.0)
    parser.add_argument(
        "--passes",
        type=int,
        default=16,
        help="how often an epoch shows each image; default: %(default)s, as if there"
        " were so many times more: beginning an epoch costs time, of which a large data set sees little",
    )
    known = sorted({name for contender in CONTENDERS for name in (contender.name, contender.peer)})
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"of: {', '.join(known)}")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    return parse_options(parser, {"passes": 1})
