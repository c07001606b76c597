"""Rounds in which all contenders take turns, and the medians and ratios of what they did.

Each round has everyone once, in another order, while the others are still, so that another load on the machine hits all
alike. Ratios are taken within a round, then their median.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from scripts.bench.worker import Setting, Worker, log_name
from scripts.commands import CommandError, say
from scripts.environments import Environment, Environments

Turn = TypeVar("Turn")
Entry = TypeVar("Entry", bound="Contender")
_BLOCK: Final = 8 << 20
LeftOut = list[dict[str, str]]  # the name of each that cannot take part, and the reason

#: Packages whose versions say what was measured in the environment that this process runs in.
OWN_PACKAGES: Final = ("tpucache", "torch", "numpy", "simplejpeg", "cykooz-resizer", "llvmlite")


@dataclass(frozen=True)
class Contender:
    """A row of a table: a module of `scripts.bench.peers`, its role, and its setting.

    Without an environment it runs in the one that this process runs in.
    """

    name: str
    peer: str
    role: str
    setting: Setting = field(default_factory=dict)
    environment: Environment | None = None

    @property
    def is_ours(self) -> bool:
        return self.peer == "tpucache"


@contextlib.contextmanager
def leaving_out(name: str, left_out: LeftOut) -> Iterator[None]:
    """Note a contender that cannot take part, with the reason, where the body raises CommandError."""
    try:
        yield
    except CommandError as error:
        say(f"{name}: left out: {error}")
        left_out.append({"name": name, "reason": str(error)})


class Track:
    """A work folder: environments, which are found again by the next run, and the logs of all processes."""

    def __init__(self, work: Path) -> None:
        self._logs = work / "log"
        self._environments = Environments(work / "env", self._logs)
        self.versions: dict[str, dict[str, str]] = {}

    def admit(self, contenders: Sequence[Entry], left_out: LeftOut) -> list[Entry]:
        """Make the environments that are missing, and return the contenders whose environment is there."""
        problems: dict[Environment | None, CommandError] = {}
        for environment in dict.fromkeys(contender.environment for contender in contenders):
            try:
                self._environments.prepare(environment)
                name, packages = (environment.name, environment.packages) if environment else ("tpucache", OWN_PACKAGES)
                self.versions[name] = self._environments.versions(environment, packages)
            except CommandError as error:
                problems[environment] = error
        admitted = []
        for contender in contenders:
            with leaving_out(contender.name, left_out):
                if contender.environment in problems:
                    raise problems[contender.environment]
                admitted.append(contender)
        return admitted

    def start(self, contender: Contender, setting: Setting, *log: str) -> Worker:
        """Start the process of a contender; `log` are the words of its log's name, by default the contender's name."""
        path = self._logs / f"{log_name(log or [contender.name])}.log"
        python = self._environments.python(contender.environment)
        return Worker(python, (contender.peer, contender.role), setting, path)

    def ask_once(self, contender: Contender, setting: Setting, patience: float) -> dict[str, Any]:
        """Return the answer of a new process of a contender to `go`. Raises CommandError."""
        with contextlib.closing(self.start(contender, setting)) as worker:
            return worker.ask("go", patience=patience)


def choose(contenders: Sequence[Entry], only: Sequence[str] | None) -> list[Entry]:
    """Return the contenders of some names or peers, or all."""
    return [each for each in contenders if not only or each.name in only or each.peer in only]


def add_choice(parser: argparse.ArgumentParser, contenders: Sequence[Contender]) -> None:
    """Add the option of the contenders that take part."""
    known = sorted({name for each in contenders for name in (each.name, each.peer)})
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"of: {', '.join(known)}")


def race(
    turns: Mapping[str, Callable[[], Turn]], rounds: int, left_out: LeftOut | None = None
) -> dict[str, list[Turn]]:
    """Let everyone have a turn each round, and return what each one's turns gave; who fails is left out."""
    results: dict[str, list[Turn]] = {name: [] for name in turns}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name in random.Random(number).sample(sorted(results), len(results)):
            failed: LeftOut = []
            with leaving_out(name, failed):
                results[name].append(turns[name]())
            if failed:
                del results[name]
                if left_out is not None:
                    left_out += failed
    return results


def read_whole(paths: Iterable[Path]) -> None:
    """Have these files in the page cache, those in folders, too: what is measured next is not to wait for the disk."""
    for path in paths:
        if path.is_dir():
            read_whole(sorted(path.iterdir()))
        elif path.is_file():
            with path.open("rb", 0) as file:
                while file.read(_BLOCK):
                    pass


def spread(figures: Sequence[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    return {"median": statistics.median(figures), "min": min(figures), "max": max(figures)}


def ratio(above: Sequence[float] | None, below: Sequence[float] | None) -> float | None:
    """Return the median of the ratios within each round, or None where one of the two is left out."""
    if not above or not below:
        return None
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def spread_cell(figures: Mapping[str, Any], digits: str = ",.0f") -> str:
    """Return `min - max` as a table shows it."""
    return f"{figures['min']:{digits}} - {figures['max']:{digits}}"
