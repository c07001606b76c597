"""A race: one network from random weights, the same photographs, the same time, and each library's defaults.

Every contender trains a ResNet-18 with what its documentation shows first, for as many epochs as fit into the time,
and says the accuracy of its last epoch on the validation photographs. What it prepares before, such as a cache, has a
column of its own. The seeds take turns, so that another load on the machine hits all alike.

    python -m scripts.bench race clothing --size 96 --seconds 120
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any, Final

from scripts.bench.rounds import Contender, LeftOut, Track
from scripts.bench.table import add_race_options, as_markdown, as_notes, as_text, machine, machine_line, write_files
from scripts.commands import ROOT, CommandError, reason, say
from scripts.environments import Environment

_VISION: Final = "torchvision==0.24.0"  # of torch 2.9, which is linked


def _environment(name: str, *packages: str) -> Environment:
    return Environment(f"race-{name}", ((*packages, _VISION),), constraints=("torch==2.9.0",), links=("torch",))


CONTENDERS: Final = (
    Contender("tpucache", "race.tpucache"),
    Contender("plain loop", "race.plain", environment=_environment("plain", "pillow")),
    Contender("fastai", "race.fastai", environment=_environment("fastai", "fastai")),
    Contender("timm's script", "race.timm", environment=_environment("timm", "timm")),
    Contender("Lightning", "race.lightning", environment=_environment("lightning", "lightning")),
    Contender("Composer", "race.composer", environment=_environment("composer", "mosaicml")),
)


def train(contender: Contender, python: Path, task: dict[str, Any], log: Path, patience: float) -> dict[str, Any]:
    """Let a contender train once, and return what it answers. Raises CommandError."""
    words = [str(python), "-m", f"scripts.bench.peers.{contender.module}", json.dumps(task)]
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
                check=False, timeout=patience,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"took more than {patience:.0f} s") from error
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        raise CommandError(reason(log))
    return dict(json.loads(answers[-1]))


def to_rows(runs: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Return the rows of the table, its heading first, the most accurate first."""
    rows = [["", "accuracy", "by seed", "images/s", "epochs", "seconds", "prepared in, s"]]

    def mean(each: list[dict[str, Any]], name: str) -> float:
        return float(statistics.mean(run[name] for run in each))

    for name, each in sorted(runs.items(), key=lambda item: -mean(item[1], "accuracy")):
        rows.append(
            [
                name,
                f"{mean(each, 'accuracy'):.3f}",
                ", ".join(f"{run['accuracy']:.3f}" for run in each),
                f"{statistics.mean(run['images'] / run['seconds'] for run in each):,.0f}",
                f"{mean(each, 'epochs'):.0f}",
                f"{mean(each, 'seconds'):.0f}",
                f"{mean(each, 'prepare_seconds'):.0f}",
            ]
        )
    return rows


def main() -> None:
    """Let them race as the command line asks."""
    options = _parse()
    work, folder = options.work.resolve(), options.photographs.resolve()
    track = Track(work)
    left_out: LeftOut = []
    chosen = [each for each in CONTENDERS if not options.only or each.name in options.only]
    runs: dict[str, list[dict[str, Any]]] = {}
    ready = track.admit(chosen, left_out)
    for seed in range(options.rounds):
        for contender in ready:
            if any(row["name"] == contender.name for row in left_out):
                continue
            say(f"seed {seed}: {contender.name}")
            task = {"train": folder / "train", "valid": folder / "validation", "work": work / "race" / contender.peer}
            given = {**{name: str(path) for name, path in task.items()}, "size": options.size, "seed": seed}
            log = work / "log" / f"race-{contender.peer}.log"
            try:
                found = train(
                    contender, track.python(contender), {**given, "seconds": options.seconds}, log, 20 * options.seconds
                )
            except CommandError as error:
                left_out.append({"name": contender.name, "reason": str(error)})
                continue
            runs.setdefault(contender.name, []).append(found)
    rows = to_rows(runs)
    print(as_text(rows), end="")
    report = {"versions": track.versions, "left_out": left_out, "runs": runs, "machine": machine()}
    lines = [as_markdown(rows), machine_line(machine()), "", *as_notes(report)]
    for row in left_out:
        say(f"left out: {row['name']}: {row['reason']}")
    write_files(options, report, "\n".join(lines) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, help="a folder with train/ and validation/, each a folder a class")
    parser.add_argument("--size", type=int, default=96, help="of the images, in pixels (%(default)s)")
    add_race_options(parser, "build/bench", seconds=120.0)
    names = [each.name for each in CONTENDERS]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"of: {', '.join(names)}")
    parser.set_defaults(rounds=3)
    options = parser.parse_args()
    if not (options.photographs / "train").is_dir() or not (options.photographs / "validation").is_dir():
        parser.error(f"{options.photographs} has no folders train and validation")
    if options.rounds < 1 or options.size < 32 or options.seconds < 1:
        parser.error("--rounds is at least 1, --size 32, --seconds 1")
    return options


if __name__ == "__main__":
    main()
