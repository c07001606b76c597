"""How fast tpucache reads beside its peers: the same images, in the same run, taking turns.

Every peer gets an environment of its own, the same photographs in its own format, and a process that reads shuffled
batches when asked to. In each round everyone reads once, in another order each round, while the others are still;
the gather, rows of an array in memory copied into reused batches, is what the machine allows at most.

On a machine of many CPUs compare two of them: `taskset -c 0,1 python scripts/bench_read.py`. The first run installs
some gigabytes of peers and writes each image about ten times; later ones find all that in the work folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_peers import CONTENDERS, PEERS, Bench, Contender, LeftOutError, Setting, Worker, say
from bench_photos import SIZE, prepare_data
from bench_report import LIMIT, REFERENCE, as_markdown, as_table, draw, machine, summarise

BATCH = 256


def main() -> None:
    arguments = _parse()
    data, images = prepare_data(arguments.work, arguments.source)
    os.environ["BENCH_PASSES"] = str(arguments.passes)  # for the processes that read
    bench = Bench(arguments.work, data)
    wanted = [row for row in CONTENDERS if _is_wanted(row, arguments.only)]
    report: dict[str, Any] = {"machine": machine(), "images": images, "size": SIZE, "batch": BATCH}
    report |= {"rounds": arguments.rounds, "seconds": arguments.seconds, "passes": arguments.passes}
    report |= {"versions": {}, "left_out": [], "readers": []}
    with contextlib.ExitStack() as stack:
        field = Field(bench, stack, arguments.seconds, report)
        for contender in field.admit(wanted):
            field.enter(contender)
        report["readers"] = field.race(arguments.rounds)
    print(as_table(report))
    for row in report["left_out"]:
        say(f"left out: {row['name']}: {row['reason']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(as_markdown(report))
    if arguments.picture:
        draw(report, arguments.picture)


class Field:
    """Those who take part, each with a process that waits for its turn."""

    def __init__(self, bench: Bench, stack: contextlib.ExitStack, seconds: float, report: dict[str, Any]) -> None:
        self._bench, self._stack, self._seconds, self._report = bench, stack, seconds, report
        self._workers: dict[str, Worker] = {}
        self._trials: dict[str, list[dict[str, Any]]] = {}

    def admit(self, contenders: list[Contender]) -> Iterator[Contender]:
        """Prepare each peer, then yield the contenders whose peer is ready."""
        absent: dict[str, str] = {}
        for name in dict.fromkeys(contender.peer for contender in contenders):
            try:
                self._report["versions"][name] = self._bench.prepare(PEERS[name])
            except LeftOutError as error:
                absent[name] = str(error)
        for contender in contenders:
            if contender.peer in absent:
                self._leave_out(contender.name, absent[contender.peer])
            else:
                yield contender

    def enter(self, contender: Contender) -> None:
        """Start the process of a contender, with the fastest of its settings, and let it warm up."""
        say(f"{contender.name}: warming up")
        trials = [self._try(contender, setting) for setting in contender.settings]
        best = max(trials, key=lambda trial: trial.get("images_per_second", -1))
        if "reason" in best:
            self._leave_out(contender.name, best["reason"])
            return
        self._trials[contender.name] = [best, *(trial for trial in trials if trial is not best)]
        try:
            worker = self._stack.enter_context(contextlib.closing(self._bench.start(contender, best["setting"])))
            worker.read(self._seconds / 2)
        except LeftOutError as error:
            self._leave_out(contender.name, str(error))
        else:
            self._workers[contender.name] = worker

    def race(self, rounds: int) -> list[dict[str, Any]]:
        """Let everyone read once a round, in an order that changes, and return their rows."""
        rates: dict[str, list[float]] = {name: [] for name in self._workers}
        for turn in range(rounds):
            say(f"round {turn + 1} of {rounds}")
            for name in random.Random(turn).sample(sorted(rates), len(rates)):
                try:
                    rates[name].append(self._workers[name].read(self._seconds))
                except LeftOutError as error:
                    del rates[name]
                    self._leave_out(name, str(error))
        rows = [
            summarise(name, self._trials[name][0]["setting"], each, rates) | {"trials": self._trials[name]}
            for name, each in rates.items()
        ]
        return sorted(rows, key=lambda row: -row["images_per_second"])

    def _try(self, contender: Contender, setting: Setting) -> dict[str, Any]:
        """Return the rate of a setting, or the reason why it has none; one that is alone needs no trial."""
        if len(contender.settings) == 1:
            return {"setting": setting}
        try:
            with contextlib.closing(self._bench.start(contender, setting)) as worker:
                worker.read(self._seconds / 2)
                return {"setting": setting, "images_per_second": worker.read(self._seconds)}
        except LeftOutError as error:
            return {"setting": setting, "reason": str(error)}

    def _leave_out(self, name: str, reason: str) -> None:
        say(f"{name}: left out: {reason}")
        self._report["left_out"].append({"name": name, "reason": reason})


def _is_wanted(contender: Contender, only: list[str] | None) -> bool:
    """Return whether a contender takes part; the limit and the reference always do, as ratios need them."""
    names = (contender.name, contender.peer)
    return not only or contender.name == REFERENCE or contender.peer == LIMIT or any(name in only for name in names)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a folder of photographs, a folder a class; else some are made up")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn; default: %(default)s")
    parser.add_argument(
        "--passes",
        type=int,
        default=16,
        help="how often an epoch shows each image; default: %(default)s, as if there"
        " were so many times more: beginning an epoch costs time, of which a large data set sees little",
    )
    known = sorted({*PEERS, *(contender.name for contender in CONTENDERS)})
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"of: {', '.join(known)}")
    for name in ("json", "markdown", "picture"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    arguments.work = arguments.work.resolve()
    return arguments


if __name__ == "__main__":
    main()
