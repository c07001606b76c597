"""A race: one network from random weights, the same photographs, the same time, and each library's defaults.

Every contender trains the network with what its documentation shows first, for as many epochs as fit into the time,
and says the accuracy of its last epoch on the validation photographs. How many fit is seen before the first seed. What
it prepares before, such as a cache, has a column of its own. The seeds take turns, so that another load on the machine
hits all alike.

    python -m scripts.bench race clothing --size 64 --seconds 60 --models resnet18 timm:convnext_atto
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.rounds import Contender, LeftOut, Track, add_choice, choose, race
from scripts.bench.table import Rows, add_race_options, parse_options, peer_notes, show
from scripts.commands import make_parser
from scripts.environments import Environment

_LEAST_PATIENCE: Final = 300.0  # seconds, for what is imported and seen first
TORCH: Final = ("torch==2.9.0",)  # the one of this environment, which is linked
VISION: Final = "torchvision==0.24.0"  # of this torch

Figures = dict[str, Any]


def _contender(name: str, peer: str, *packages: str) -> Contender:
    environment = Environment(f"race-{peer}", ((*packages, "timm", VISION),), constraints=TORCH, links=("torch",))
    return Contender(name, peer, "race", environment=environment)


_TPUCACHE: Final = Environment("race-tpucache", (("timm", VISION),), constraints=TORCH, inherits=True)
CONTENDERS: Final = (
    Contender("tpucache", "tpucache", "race", environment=_TPUCACHE),
    _contender("fastai", "fastai", "fastai"),
    _contender("Lightning", "lightning", "lightning"),
)


def compare(
    model: str, contenders: Sequence[Contender], track: Track, options: argparse.Namespace, left_out: LeftOut
) -> dict[str, list[Figures]]:
    """Return what each contender answered for each seed, with one network; who fails is left out of its rest."""
    runs: dict[str, list[Figures]] = {each.name: [] for each in contenders}
    folder = options.photographs.resolve()

    def turn(contender: Contender) -> None:
        done = runs[contender.name]
        task = {"model": model, "train": str(folder / "train"), "valid": str(folder / "validation")}
        task |= {"work": str(options.work / "race" / contender.peer), "size": options.size, "seconds": options.seconds}
        setting = {**task, "seed": len(done), "epochs": done[0]["epochs"] if done else None}
        done.append(track.ask_once(contender, setting, _LEAST_PATIENCE + 20 * options.seconds))

    race({each.name: functools.partial(turn, each) for each in contenders}, options.rounds, left_out)
    return {name: each for name, each in runs.items() if each}


def to_rows(runs: dict[str, list[Figures]]) -> Rows:
    """Return the rows of the table, its heading first, the most accurate first."""
    rows = [["", "accuracy", "by seed", "images/s", "epochs", "seconds", "prepared in, s"]]

    def mean(each: list[Figures], name: str) -> float:
        return float(statistics.mean(run[name] for run in each))

    for name, each in sorted(runs.items(), key=lambda item: -mean(item[1], "accuracy")):
        rate = statistics.mean(run["images"] / run["seconds"] for run in each)
        seeds = ", ".join(f"{run['accuracy']:.3f}" for run in each)
        rest = (f"{mean(each, figure):.0f}" for figure in ("epochs", "seconds", "prepare_seconds"))
        rows.append([name, f"{mean(each, 'accuracy'):.3f}", seeds, f"{rate:,.0f}", *rest])
    return rows


def main() -> None:
    """Let them race as the command line asks."""
    options = _parse()
    track, left_out = Track(options.work), LeftOut()
    ready = track.admit(choose(CONTENDERS, options.only), left_out)
    runs = {model: compare(model, ready, track, options, left_out) for model in options.models}
    tables = [(f"{model}:", to_rows(found)) for model, found in runs.items()]
    show(options, {"versions": track.versions, "runs": runs}, tables, peer_notes(track.versions, left_out))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("photographs", type=Path, help="a folder with train/ and validation/, each a folder a class")
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=["resnet18"], help="as train's --model (resnet18 alone)"
    )
    parser.add_argument("--size", type=int, default=96, help="of the images, in pixels (%(default)s)")
    add_race_options(parser, "build/bench", seconds=120.0)
    add_choice(parser, CONTENDERS)
    parser.set_defaults(rounds=3)
    return parse_options(parser, {"size": 32, "seconds": 1})
