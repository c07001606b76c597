"""A race: one network from random weights, the same photographs, the same time, and each library's defaults.

Every contender trains the network with what its documentation shows first, for as many epochs as fit into the time,
and says the accuracy of its last epoch on the validation photographs. How many fit is seen before the first seed. What
it prepares before, such as a cache, has a column of its own. The seeds take turns, so that another load on the machine
hits all alike.

    python -m scripts.bench race clothing --size 64 --seconds 60 --models resnet18 timm:convnext_atto
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.rounds import Contender, LeftOut, Track
from scripts.bench.table import add_race_options, as_markdown, as_notes, as_text, machine, machine_line, write_files
from scripts.commands import ROOT, CommandError, reason, say
from scripts.environments import Environment

_LEAST_PATIENCE: Final = 300.0  # seconds, for what is imported and seen first
TORCH: Final = ("torch==2.9.0",)  # the one of this environment, which is linked
VISION: Final = "torchvision==0.24.0"  # of this torch


# Composer requires an older torch, but works with this one.
_COMPOSER: Final = (
    *("torchmetrics<1.7.5", "torch_optimizer<0.4", "mosaicml-cli<0.8", "pyyaml", "tqdm", "requests", "psutil"),
    *("coolname", "tabulate==0.9.0", "py-cpuinfo", "packaging", "importlib-metadata", "pillow"),
)


def _environment(name: str, *packages: str, alone: tuple[str, ...] = ()) -> Environment:
    """Return an environment with some packages, and those that are installed `alone`, without what they require."""
    installs = ((*packages, "timm", VISION), *((("--no-deps", *alone),) if alone else ()))
    return Environment(f"race-{name}", installs, constraints=TORCH, links=("torch",))


_TPUCACHE: Final = Environment("race-tpucache", (("timm", VISION),), constraints=TORCH, inherits=True)

CONTENDERS: Final = (
    Contender("tpucache", "race.tpucache", environment=_TPUCACHE),
    Contender("plain loop", "race.plain", environment=_environment("plain", "pillow")),
    Contender("fastai", "race.fastai", environment=_environment("fastai", "fastai")),
    Contender("timm's script", "race.timm", environment=_environment("timm")),
    Contender("Lightning", "race.lightning", environment=_environment("lightning", "lightning")),
    Contender(
        "Composer", "race.composer", environment=_environment("composer", *_COMPOSER, alone=("mosaicml==0.32.1",))
    ),
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


def compare(
    model: str, contenders: Sequence[Contender], track: Track, options: argparse.Namespace, left_out: LeftOut
) -> dict[str, list[dict[str, Any]]]:
    """Return what each contender answered for each seed, with one network; who fails is left out of its rest."""
    runs: dict[str, list[dict[str, Any]]] = {}
    failed = set[str]()
    work, folder = options.work.resolve(), options.photographs.resolve()
    for seed in range(options.rounds):
        for contender in contenders:
            name = contender.name
            if name in failed:
                continue
            say(f"{model}, seed {seed}: {name}")
            paths = {"train": folder / "train", "valid": folder / "validation", "work": work / "race" / contender.peer}
            task = {"model": model, **{key: str(path) for key, path in paths.items()}, "size": options.size}
            task |= {"seed": seed, "seconds": options.seconds, "epochs": runs[name][0]["epochs"] if seed else None}
            log = work / "log" / f"race-{contender.peer}.log"
            try:
                found = train(contender, track.python(contender), task, log, _LEAST_PATIENCE + 20 * options.seconds)
            except CommandError as error:
                failed.add(name)
                left_out.append({"name": f"{name}, {model}", "reason": str(error)})
                continue
            runs.setdefault(name, []).append(found)
    return runs


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
    track = Track(options.work.resolve())
    left_out: LeftOut = []
    chosen = [each for each in CONTENDERS if not options.only or each.name in options.only]
    ready = track.admit(chosen, left_out)
    runs = {model: compare(model, ready, track, options, left_out) for model in options.models}
    report = {"versions": track.versions, "left_out": left_out, "runs": runs, "machine": machine()}
    lines = []
    for model, found in runs.items():
        rows = to_rows(found)
        print(f"{model}\n{as_text(rows)}")
        lines += [f"`{model}`:", "", as_markdown(rows)]
    for row in left_out:
        say(f"left out: {row['name']}: {row['reason']}")
    write_files(options, report, "\n".join([*lines, machine_line(machine()), "", *as_notes(report)]) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, help="a folder with train/ and validation/, each a folder a class")
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=["resnet18"], help="as train's --model (resnet18 alone)"
    )
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
