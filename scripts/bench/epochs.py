"""Wall time of a few epochs of random crops and flips of photographs, start-up and the building of a cache included.

    python -m scripts.bench epochs PHOTOGRAPHS
    python -m scripts.bench epochs PHOTOGRAPHS --epochs 3 --rounds 3 --only tpucache efficio

Each contender is a program of its own, as its documentation shows it: it takes all batches of shuffled photographs,
random crops (RandomResizedCrop) of `--size` pixels that are flipped by chance, as normalised float32 tensors on the
CPU. The time counts from the start of the process, imports included, to the last batch. The first run builds the
cache, if there is one; "again" is a run of the same program that finds it. Nothing learns.

torchvision decodes each photograph in each epoch and crops it whole. The others crop pictures that are stored smaller.
All of these get `--side`: efficio and tpucache store squares of that side (tpucache cuts the middle out, efficio
stretches), FFCV a picture whose longer side is 4/3 of it. Photographs are in the page cache, and each library
has worked on a few of them before, so that the bytecode of its modules is written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.race import TORCH, VISION
from scripts.bench.read_contenders import FFCV
from scripts.bench.rounds import Contender, LeftOut, Track, race, ratio, read_whole
from scripts.bench.table import (
    add_race_options,
    as_markdown,
    as_notes,
    as_text,
    machine,
    machine_line,
    parse_options,
    write_files,
)
from scripts.bench.worker import PATIENCE
from scripts.commands import ROOT, CommandError, reason, say
from scripts.environments import Environment

_FEW: Final = 64  # photographs, before the first round
_REFERENCE: Final = "torchvision"
_OURS: Final = "tpucache"

_TORCHVISION: Final = Environment(
    "epochs-torchvision", ((VISION, "numpy", "pillow"),), constraints=TORCH, links=("torch",)
)
_EFFICIO: Final = Environment(
    "epochs-efficio", (("efficio==0.1.1", "numpy", "pillow"),), constraints=TORCH, links=("torch",)
)


def _contender(name: str, module: str, environment: Environment | None, way: str = "") -> Contender:
    return Contender(name, f"epochs.{module}", ({"way": way},), environment)


CONTENDERS: Final = (
    _contender(_REFERENCE, "torchvision", _TORCHVISION),
    _contender("tpucache, ImageFolder", "tpucache", None),
    _contender("tpucache, warmup before", "tpucache", None, "warmup"),
    _contender("FFCV raw", "ffcv", FFCV, "raw"),
    _contender("FFCV JPEG", "ffcv", FFCV, "jpg"),
    _contender("efficio", "efficio", _EFFICIO),
)

Figures = dict[str, Any]


def take_epochs(contender: Contender, python: Path, log: Path, **task: Any) -> Figures:
    """Let a contender take its epochs in a process of its own, and return the times that it prints.

    Raises CommandError.
    """
    # Where the environment forbids bytecode, each process would compile all modules anew.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    task |= {**contender.settings[0], "began": time.monotonic()}
    words = [str(python), "-m", f"scripts.bench.peers.{contender.module}", json.dumps(task)]
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
                check=False, timeout=PATIENCE, env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"took more than {PATIENCE:.0f} s") from error
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        raise CommandError(reason(log))
    return dict(json.loads(answers[-1]))


class Field:
    """The contenders, which take turns with the same photographs, each turn with a new folder for the cache."""

    def __init__(self, track: Track, options: argparse.Namespace) -> None:
        self._track, self._options = track, options

    def turn(
        self, contender: Contender, photographs: Path, epochs: int, names: Sequence[str] = ("first", "again")
    ) -> dict[str, Figures]:
        """Return the times of the first run, which builds the cache, and of the same again. Raises CommandError."""
        options, log = self._options, self._options.work / "log" / f"epochs-{contender.peer}.log"
        count = sum(1 for path in photographs.glob("*/*") if path.is_file())
        os.sync()  # what another one has written is on the disk
        read_whole([photographs])
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            task = {name: getattr(options, name) for name in ("side", "size", "batch")}
            task |= {"photographs": str(photographs), "folder": f"{folder}/cache", "epochs": epochs}
            task |= {"workers": len(os.sched_getaffinity(0))}
            runs = {}
            for name in names:
                runs[name] = take_epochs(contender, self._track.python(contender), log, **task)
                if runs[name]["images"] != epochs * count:
                    raise CommandError(f"gave {runs[name]['images']:,} images in {epochs} epochs of {count:,}")
                if not Path(folder, "cache").exists():
                    break
        shown = (f"{name} {[round(end, 2) for end in run['epoch_ends']]}" for name, run in runs.items())
        say(f"{contender.name}: epochs ended after, in s: {', '.join(shown)}")
        return runs


def copy_few(photographs: Path, folder: Path) -> Path:
    """Copy a few photographs of each class into a folder, and return it."""
    classes = [path for path in sorted(photographs.iterdir()) if path.is_dir()]
    for each in classes:
        (folder / each.name).mkdir(parents=True)
        for path in itertools.islice(sorted(each.iterdir()), max(1, _FEW // len(classes))):
            shutil.copy(path, folder / each.name)
    return folder


def summarise(name: str, runs: list[dict[str, Figures]], references: list[dict[str, Figures]] | None) -> Figures:
    """Return a contender's row: seconds, medians of the rounds."""
    first = [run["first"] for run in runs]
    whole = [run["epoch_ends"][-1] for run in first]
    later = [end - start for run in first for start, end in itertools.pairwise(run["epoch_ends"])]
    again = [run["again"]["epoch_ends"][-1] for run in runs if "again" in run]
    return {
        "name": name,
        "seconds": statistics.median(whole),
        "min": min(whole),
        "max": max(whole),
        "first_batch": statistics.median(run["first_batch"] for run in first),
        "first_epoch": statistics.median(run["epoch_ends"][0] for run in first),
        "later_epoch": statistics.median(later) if later else None,
        "again": statistics.median(again) if again else None,
        "times_faster": ratio([run["first"]["epoch_ends"][-1] for run in references], whole) if references else None,
        "runs": runs,
    }


def to_report(runs: dict[str, list[dict[str, Figures]]], options: argparse.Namespace) -> Figures:
    """Return all figures, the fastest contender first; `runs` are the turns of each one, by its name."""
    rows = [summarise(name, each, runs.get(_REFERENCE)) for name, each in runs.items()]
    images = sum(1 for path in options.photographs.glob("*/*") if path.is_file())
    given = {name: getattr(options, name) for name in ("side", "size", "batch", "epochs", "rounds")}
    return {"images": images, **given, "rows": sorted(rows, key=lambda row: row["seconds"])}


def to_markdown(report: Figures) -> str:
    """Return the table in Markdown, what was measured, and the versions."""
    measured = (
        f"{report['images']:,} photographs in shuffled batches of {report['batch']}, crops of {report['size']} pixels "
        f"out of stored sides of {report['side']}; medians of {report['rounds']} rounds. "
        f"{machine_line(report['machine'])}."
    )
    table = as_markdown(to_rows(report), is_bold=lambda name: name.startswith(_OURS))
    return "\n".join([table, measured, "", *as_notes(report)]) + "\n"


def to_rows(report: Figures) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    rows, epochs = report["rows"], report["epochs"]
    heading = ["", f"{epochs} epochs, s", "min - max", "first batch", "first epoch", "each later one", "again", ""]
    table = [[*heading[:-1], f"times faster than {_REFERENCE}"]]
    for row in rows:
        later, again, faster = (
            "" if row[name] is None else f"{row[name]:.1f}" for name in ("later_epoch", "again", "times_faster")
        )
        cells = [f"{row[name]:.1f}" for name in ("first_batch", "first_epoch")]
        table.append(
            [row["name"], f"{row['seconds']:.1f}", f"{row['min']:.1f} - {row['max']:.1f}", *cells, later, again, faster]
        )
    return table


def main() -> None:
    """Measure as the command line asks, and print the table."""
    options = _parse()
    track, left_out = Track(options.work), LeftOut()
    field = Field(track, options)
    chosen = [each for each in CONTENDERS if not options.only or {each.name, each.peer} & set(options.only)]
    ready = track.admit(chosen, left_out)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        few = copy_few(options.photographs, Path(folder, "few"))
        for contender in {each.peer: each for each in ready}.values():
            with contextlib.suppress(CommandError):  # its turn in the first round says why
                say(f"{contender.peer}: a few photographs, not counted")
                field.turn(contender, few, 1, names=("first",))
    turns = {each.name: functools.partial(field.turn, each, options.photographs, options.epochs) for each in ready}
    runs = race(turns, options.rounds, left_out)
    report = to_report(runs, options) | {"machine": machine(), "versions": track.versions, "left_out": left_out}
    print(as_text(to_rows(report)), end="")
    for row in left_out:
        say(f"left out: {row['name']}: {row['reason']}")
    write_files(options, report, to_markdown(report))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, help="a folder with one folder for each class")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--side", type=int, default=288, help="of the stored pictures, in pixels (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="of the crops, in pixels (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="photographs in a batch (%(default)s)")
    add_race_options(parser, "build/bench")
    known = sorted({name for each in CONTENDERS for name in (each.name, each.peer)})
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"of: {', '.join(known)}")
    parser.set_defaults(rounds=3)
    options = parse_options(parser, {"epochs": 1, "side": 1, "size": 1, "batch": 1})
    options.photographs = options.photographs.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    return options
