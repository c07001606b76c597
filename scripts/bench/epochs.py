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
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.race import TORCH, VISION
from scripts.bench.read import FFCV
from scripts.bench.rounds import Contender, LeftOut, Track, add_choice, choose, race, ratio, read_whole
from scripts.bench.table import Rows, add_race_options, parse_options, peer_notes, show
from scripts.bench.worker import PATIENCE
from scripts.commands import CommandError, make_parser, say
from scripts.environments import Environment

_FEW: Final = 64  # photographs, before the first round
_REFERENCE: Final = "torchvision"


def _environment(name: str, package: str) -> Environment:
    return Environment(f"epochs-{name}", ((package, "numpy", "pillow"),), constraints=TORCH, links=("torch",))


CONTENDERS: Final = (
    Contender(_REFERENCE, "torchvision", "epochs", environment=_environment("torchvision", VISION)),
    Contender("tpucache, ImageFolder", "tpucache", "epochs"),
    Contender("tpucache, warmup before", "tpucache", "epochs", {"way": "warmup"}),
    Contender("FFCV raw", "ffcv", "epochs", environment=FFCV),
    Contender("efficio", "efficio", "epochs", environment=_environment("efficio", "efficio==0.1.1")),
)

Figures = dict[str, Any]


class Field:
    """The contenders, which take turns with the same photographs, each turn with a new folder for the cache."""

    def __init__(self, track: Track, options: argparse.Namespace) -> None:
        self._track, self._options = track, options

    def turn(
        self, contender: Contender, photographs: Path, epochs: int, names: Sequence[str] = ("first", "again")
    ) -> dict[str, Figures]:
        """Return the times of the first run, which builds the cache, and of the same again. Raises CommandError."""
        options, count = self._options, len(files_of(photographs))
        os.sync()  # what another one has written is on the disk
        read_whole([photographs])
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            task = {name: getattr(options, name) for name in ("side", "size", "batch")}
            task |= {"photographs": str(photographs), "folder": f"{folder}/cache", "epochs": epochs}
            task |= {"workers": len(os.sched_getaffinity(0)), **contender.setting}
            runs = {}
            for name in names:
                runs[name] = self._track.ask_once(contender, {**task, "began": time.monotonic()}, PATIENCE)
                if runs[name]["images"] != epochs * count:
                    raise CommandError(f"gave {runs[name]['images']:,} images in {epochs} epochs of {count:,}")
                if not Path(folder, "cache").exists():
                    break
        shown = (f"{name} {[round(end, 2) for end in run['epoch_ends']]}" for name, run in runs.items())
        say(f"{contender.name}: epochs ended after, in s: {', '.join(shown)}")
        return runs


def files_of(photographs: Path) -> list[Path]:
    """Return the files of a folder of class folders."""
    return sorted(path for path in photographs.glob("*/*") if path.is_file())


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
        "times_faster": ratio([run["first"]["epoch_ends"][-1] for run in references or ()], whole),
    }


def to_rows(rows: list[Figures], epochs: int) -> Rows:
    """Return the rows of the table, its heading first."""
    heading = ["", f"{epochs} epochs, s", "min - max", "first batch", "first epoch", "each later one", "again"]
    table = [[*heading, f"times faster than {_REFERENCE}"]]
    for row in rows:
        names = ("first_batch", "first_epoch", "later_epoch", "again", "times_faster")
        cells = ("" if row[name] is None else f"{row[name]:.1f}" for name in names)
        table.append([row["name"], f"{row['seconds']:.1f}", f"{row['min']:.1f} - {row['max']:.1f}", *cells])
    return table


def main() -> None:
    """Measure as the command line asks, and print the table."""
    options = _parse()
    track, left_out = Track(options.work), LeftOut()
    field = Field(track, options)
    ready = track.admit(choose(CONTENDERS, options.only), left_out)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        few = copy_few(options.photographs, Path(folder, "few"))
        for contender in {each.peer: each for each in ready}.values():
            with contextlib.suppress(CommandError):  # its turn in the first round says why
                say(f"{contender.peer}: a few photographs, not counted")
                field.turn(contender, few, 1, names=("first",))
    turns = {each.name: functools.partial(field.turn, each, options.photographs, options.epochs) for each in ready}
    runs = race(turns, options.rounds, left_out)
    found = [summarise(name, each, runs.get(_REFERENCE)) for name, each in runs.items()]
    rows = sorted(found, key=lambda row: row["seconds"])
    note = (
        f"{len(files_of(options.photographs)):,} photographs in shuffled batches of {options.batch}, crops of "
        f"{options.size} pixels out of stored sides of {options.side}; medians of {options.rounds} rounds."
    )
    notes = [note, *peer_notes(track.versions, left_out)]
    show(options, {"rows": rows, "versions": track.versions}, [("", to_rows(rows, options.epochs))], notes)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("photographs", type=Path, help="a folder with one folder for each class")
    parser.add_argument("--epochs", type=int, default=3, help="that each contender takes (%(default)s)")
    parser.add_argument("--side", type=int, default=288, help="of the stored pictures, in pixels (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="of the crops, in pixels (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="photographs in a batch (%(default)s)")
    add_race_options(parser, "build/bench")
    add_choice(parser, CONTENDERS)
    parser.set_defaults(rounds=3)
    options = parse_options(parser, {"epochs": 1, "side": 1, "size": 1, "batch": 1})
    options.photographs = options.photographs.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    return options
