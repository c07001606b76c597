"""Kills runs on a source at random, and compares what they end in with an undisturbed run on a cache of warmup.

    python -m scripts.checks growing --kills 20 --seed 0
    python -m scripts.checks growing --kills 3 --backend xla --cores 8

`train SOURCE` builds the cache and trains. At random moments one of these gets a SIGKILL: the process that trains, the
one that builds, one of its workers, or all of them at once. The same command continues, until it is done, and then
begins in a new folder, until that number of kills is reached. Then every byte of the cache has to be that of `warmup`,
and every loss that of a run on that.

Last, two folds begin together on one cache that is not there: the files that were opened are counted, and both runs
have to end in the losses that they have alone. Prints a table; ends in status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

from scripts.commands import ROOT, say
from tpucache import Recipe, build_cache

SIDE: Final = 64
CLASSES: Final = 4
_KINDS: Final = ("training", "builder", "worker", "all")
_LONGEST: Final = 300.0
_EPOCHS: Final = 3
#: A run on a source normalises so by default, also if its cache is finished already.
_AS_A_SOURCE: Final = ("--normalise", "imagenet")
_PLANNED: Final = 20  # photographs that two builders may open besides, to plan and to compare

#: What each Python process does first: note the photographs that it opens.
_COUNTING: Final = """
import os, sys
below, log = os.environ["COUNTED_BELOW"], os.environ["COUNTED_LOG"]
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)) and os.fspath(arguments[0]).startswith(below):
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(number, os.fspath(arguments[0]).encode() + b"\\n")
        os.close(number)
sys.addaudithook(note)
"""


class Kill(NamedTuple):
    """What was killed, seconds after its start, which share of the cache was built then, and how the command ended."""

    what: str
    seconds: float
    built: float
    status: int


def make_source(folder: Path, count: int) -> Path:
    """Write photographs, and a table that gives each a class and a fold; return the table."""
    random_numbers = np.random.default_rng(0)
    lines = ["path,label,fold"]
    for number in range(count):
        path = folder / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = random_numbers.integers(0, 256, (12, 12, 3), np.uint8)
        Image.fromarray(small).resize((4 * SIDE, 4 * SIDE)).save(path, quality=90)
        lines.append(f"{path.name},{'abcd'[number % CLASSES]},{number // CLASSES % 2}")
    table = folder / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    return table


def command(options: argparse.Namespace, source: Path, run: Path, *more: str) -> list[str]:
    """Return the command that trains on a source or a cache."""
    quick = ["--model", "cnn", "--epochs", str(_EPOCHS), "--batch-size", "16"]
    quick += ["--backend", options.backend, "--cores", str(options.cores)]
    words = ["train", str(source), "--run", str(run), "--resume", "--json", *quick]
    return [sys.executable, "-m", "tpucache", *words, *more]


def _children(process: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = int(status.parent.name), status.read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if int(rest[1]) == process:
            found += [number, *_children(number)]
    return found


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(process: int, what: str, chosen: random.Random) -> bool:
    """Kill what is named among a command's processes; return whether it was there."""
    below = _children(process)
    named = [each for each in below if "tpucache.warmup.growing" in _name(each)]
    workers = [worker for each in named for worker in _children(each)]  # forked from the builder, with its name
    builders = [each for each in named if each not in workers]
    targets = {"training": [process], "builder": builders, "worker": workers, "all": [process, *below]}[what]
    if not targets:
        return False
    for each in targets if what == "all" else [chosen.choice(targets)]:
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            return what == "all"
    return True


def _built(cache: Path, count: int) -> float:
    if (cache / "manifest.json").exists():
        return 1.0
    try:
        return (cache / ".warmup" / "arrived.bin").stat().st_size / 32 / count
    except OSError:
        return 0.0


def _losses(run: Path) -> Any:
    return json.loads((run / "report.json").read_text())["losses"]


def _differing(cache: Path, expected: Path) -> list[str]:
    """Return the names of files that two folders have not both with the same bytes."""
    both = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} for folder in (cache, expected)
    )
    one, other = both
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def run_and_kill(options: argparse.Namespace, work: Path, table: Path, expected: Path, losses: Any) -> list[str]:
    """Kill as often as asked for, and print a row for each; return what was wrong."""
    chosen, done = random.Random(options.seed), 0
    kills: list[Kill] = []
    wrong: list[str] = []
    build = ["--build", f"--size {SIDE} --root {table.parent} --fold-col fold --jobs 2"]
    while len(kills) < options.kills:
        done += 1
        cache, run = work / f"cache-{done}", work / f"run-{done}"
        words = command(options, table, run, "--valid", "fold=0", "--cache", str(cache), *build)
        most = 1.0
        while True:
            began = time.monotonic()
            with (work / "log").open("ab") as log:
                process = subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT)
            what, is_killed = chosen.choice(_KINDS), False
            at = began + chosen.uniform(0, most)
            while process.poll() is None and time.monotonic() < began + _LONGEST:
                if not is_killed and len(kills) < options.kills and time.monotonic() >= at:
                    built = _built(cache, options.count)
                    is_killed = kill(process.pid, what, chosen)
                    if is_killed:
                        kills.append(Kill(what, time.monotonic() - began, built, 0))
                time.sleep(0.02)
            status = process.wait()
            if is_killed:
                kills[-1] = kills[-1]._replace(status=status)
                row = kills[-1]
                say(
                    f"{len(kills):>3}  {row.what:<9} {row.seconds:>6.2f} s  built {row.built:>4.0%}  "
                    f"status {row.status}"
                )
            elif status:
                wrong.append(f"{run.name} ended with {status} although nothing was killed: see its log")
                print((work / "log").read_text()[-2000:], file=sys.stderr)
                break
            if status == 0:
                break
            most = min(1.5 * most + 1, options.longest)
        if status == 0:
            if found := _differing(cache, expected):
                wrong.append(f"{cache.name}: other bytes in {', '.join(found)}")
            if _losses(run) != losses:
                wrong.append(f"{run.name}: other losses")
    counted = Counter(each.what for each in kills)
    print(f"{len(kills)} kills ({', '.join(f'{n} {what}' for what, n in counted.items())}) in {done} runs")
    return wrong


def run_two_folds(options: argparse.Namespace, work: Path, table: Path, expected: Path) -> list[str]:
    """Train two folds at once on a cache that is not there; return what was wrong."""
    (work / "site").mkdir()
    (work / "site" / "sitecustomize.py").write_text(_COUNTING)
    log, wrong = work / "opened", []
    environment = {**os.environ, "COUNTED_BELOW": str(table.parent), "COUNTED_LOG": str(log)}
    environment["PYTHONPATH"] = os.pathsep.join([str(work / "site"), str(ROOT)])
    build = ["--build", f"--size {SIDE} --root {table.parent} --fold-col fold --jobs 1", "--cache", str(work / "both")]
    processes = [
        subprocess.Popen(
            command(options, table, work / f"both-{fold}", "--valid", f"fold={fold}", *build),
            env=environment,
            stdout=subprocess.DEVNULL,
            cwd=work,
        )
        for fold in range(2)
    ]
    if any(process.wait(_LONGEST) for process in processes):
        return ["a fold of two at once failed"]
    opened = Counter(line for line in log.read_text().splitlines() if line.endswith(".jpg"))
    often = {path: times for path, times in opened.items() if times > 1}
    print(f"two folds at once: {len(opened)} photographs opened, {len(often)} of them more than once")
    if len(opened) != options.count or len(often) > _PLANNED:
        wrong.append("photographs were decoded twice")
    for fold in range(2):
        alone = command(options, expected, work / f"alone-{fold}", "--valid", f"fold={fold}", *_AS_A_SOURCE)
        subprocess.run(alone, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        if _losses(work / f"both-{fold}") != _losses(work / f"alone-{fold}"):
            wrong.append(f"fold {fold} has other losses alone")
    return wrong + [f"of two folds: other bytes in {name}" for name in _differing(work / "both", expected)]


def main() -> int:
    """Run the check as the command line asks; 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--count", type=int, default=800, help="photographs (%(default)s)")
    parser.add_argument("--longest", type=float, default=8.0, help="seconds to the latest kill (%(default)s)")
    parser.add_argument("--backend", default="eager", help="what trains (%(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="simulated, with XLA (%(default)s)")
    options = parser.parse_args()
    os.environ["CPU_NUM_DEVICES"] = str(options.cores)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        table = make_source(work / "photos", options.count)
        from tpucache.warmup.sources import TableOptions, open_source

        source = open_source(str(table), TableOptions(root=table.parent, fold_col="fold"))
        build_cache(source, work / "expected", Recipe(size=SIDE))
        alone = command(options, work / "expected", work / "alone", "--valid", "fold=0", *_AS_A_SOURCE)
        subprocess.run(alone, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        wrong = run_and_kill(options, work, table, work / "expected", _losses(work / "alone"))
        wrong += run_two_folds(options, work, table, work / "expected")
    print("\n".join(wrong) if wrong else "all bytes and losses are those of an undisturbed run")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
