"""Tries targets with generated inputs, each target in processes of its own, and prints what became of them.

    python -m scripts.checks.fuzz [--inputs 10000] [--only NAME] [--first NUMBER] [--jobs N] [--list]

An input may be read, or be refused by an error of tpucache's with a message of one line. Anything else is a fault: any
other exception, a warning, a crash, 20 s, or 200 MB of memory. The exit status is 1 where there is one. The number
of a fault makes the same input again: `--only NAME --first NUMBER --inputs 1`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.checks import fuzz
from scripts.checks.fuzz.target import Target, Tries, peak_bytes
from scripts.commands import make_parser

_BATCH_SECONDS = 900


def main() -> int:
    """Run the command."""
    parser = make_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs over all targets")
    parser.add_argument("--only", metavar="NAME", default="", help="targets whose name begins so")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the number of the first input of each")
    parser.add_argument("--jobs", type=int, default=2, help="targets at once")
    parser.add_argument("--list", action="store_true", help="print the names, try nothing")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = {name: target for name, target in load_targets().items() if name.startswith(options.only)}
    if options.list or not targets:
        print("\n".join(targets) or f"no target begins with {options.only!r}")
        return int(not targets)
    if options.worker:
        (target,) = targets.values()
        work(target, range(options.first, options.first + options.inputs), Path(options.worker))
        return 0
    began, shares = time.monotonic(), sum(target.share for target in targets.values())
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, ThreadPoolExecutor(options.jobs) as threads:
        counts = [max(1, round(options.inputs * target.share / shares)) for target in targets.values()]
        run = functools.partial(run_target, Path(folder), options.first)
        results = list(threads.map(run, targets.values(), counts))
    print("| target | inputs | refused | read | faults | s | MB |\n|---|---|---|---|---|---|---|")
    for result in results:
        print("| " + " | ".join(str(result[key]) for key in ("name", *KEYS)) + " |")
    inputs, faults = (sum(result[key] for result in results) for key in ("inputs", "faults"))
    print(f"\n{inputs:,} inputs in {time.monotonic() - began:.0f} s: {faults} faults")
    for result in results:
        for number, text in result["texts"]:
            print(f"{result['name']} {number}: {text}")
    return int(faults > 0)


KEYS = ("inputs", "refused", "read", "faults", "seconds", "megabytes")


def load_targets() -> dict[str, Target]:
    """Return the targets of all modules of this folder, by name."""
    modules = (
        importlib.import_module(f"{fuzz.__name__}.{module.name}") for module in pkgutil.iter_modules(fuzz.__path__)
    )
    return {target.name: target for module in modules for target in getattr(module, "TARGETS", ())}


def work(target: Target, numbers: range, folder: Path) -> None:
    """Try inputs, and print a line of JSON before and after each."""
    tries = Tries(target, folder)
    for number in numbers:
        print(json.dumps({"tried": number}), flush=True)
        print(json.dumps({"found": tries.run(number), "peak": peak_bytes()}), flush=True)


def run_target(folder: Path, first: int, target: Target, inputs: int) -> dict[str, Any]:
    """Try inputs in processes, a new one after each that ends, and return what became of them."""
    began = time.monotonic()
    found: dict[str, Any] = {"name": target.name, **dict.fromkeys(KEYS, 0), "texts": []}
    place, stop = folder / target.name.replace(" ", "-"), first + inputs
    while first < stop:
        name = place / str(first)
        words = [sys.executable, "-m", "scripts.checks.fuzz", "--worker", str(name), "--only", target.name]
        words += ["--first", str(first), "--inputs", str(stop - first)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        done = subprocess.run(
            words, capture_output=True, text=True, env=environment, check=False, timeout=_BATCH_SECONDS
        )  # our own words
        tried: int | None = None
        for line in map(json.loads, done.stdout.splitlines()):
            if "tried" in line:
                tried = line["tried"]
                continue
            key = {None: "read", "": "refused"}.get(line["found"], "faults")
            found[key] += 1
            found["texts"] += [(tried, line["found"])] if key == "faults" else []
            found["megabytes"] = max(found["megabytes"], line["peak"] >> 20)
            first, tried = first + 1, None
        if tried is not None or done.returncode:
            reason = " ".join(done.stderr.split())[-600:]
            found["texts"].append((first, f"the process ended with status {done.returncode}: {reason}"))
            found["faults"] += 1
            if tried is None:
                break
            first = tried + 1
    found["inputs"], found["seconds"] = (
        found["refused"] + found["read"] + found["faults"],
        round(time.monotonic() - began),
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
