"""Interrupts commands at random moments, and says how each of them ended.

    python -m scripts.checks interrupts --times 2000

`bench`, `verify`, `warmup` and `push` to a folder get a SIGINT or a SIGTERM at a moment from their start to their end,
some of them at once; `warmup` gets the SIGINT as from a terminal, which sends it to its workers, too. Each has to end
with status 3 and one line, or with its own result where the work was done, and in time. A signal that came before the
command handled signals, while Python itself started, is counted apart. Ends in status 1 for any other outcome.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from scripts.bench.photos import write_pictures
from tpucache import Recipe, build_cache, process

LINE = f"python -m tpucache: {process.INTERRUPTED}"
#: What commands say of their work on standard error.
WORKING = ("bench: ", "verify: ", "warmup: ", "push: ", "to do: ")
PHOTOGRAPHS, SIDE = 300, 96
LONGEST = 120.0


class Outcome(NamedTuple):
    """How a command ended: its status, its lines on standard error but those of progress, and the seconds it took."""

    command: str
    status: int
    lines: tuple[str, ...]
    seconds: float
    was_early: bool

    def is_right(self, most: float) -> bool:
        """Whether it is what the page says of it, in time."""
        return self.was_early or ((self.status, self.lines) in ((3, (LINE,)), (0, ())) and self.seconds <= most)


class Trial:
    """The commands, and the files that they read; each run writes into a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        photos = write_pictures(folder / "photos", PHOTOGRAPHS, SIDE)
        build_cache(photos, folder / "cache", Recipe(size=64, variants=1), jobs=1)
        self.seconds = {command: self._run(command, -1, None, 0).seconds for command in self.words(Path())}

    def words(self, target: Path) -> dict[str, list[str | Path]]:
        """Return each command, which writes to `target` if it writes anything."""
        photos, cache = self._folder / "photos", self._folder / "cache"
        augmented = ["--size", "64", "--variants", "4", "--augment", "standard", "--jobs", "2"]
        return {
            "bench": ["bench", cache, "--batch-size", "16"],
            "verify": ["verify", cache],
            "warmup": ["warmup", photos, target, *augmented],
            "push": ["push", cache, target],
        }

    def interrupt(self, command: str, number: int, kind: signal.Signals, after: float) -> Outcome:
        """Run a command that gets the signal after this many seconds."""
        return self._run(command, number, kind, after)

    def _run(self, command: str, number: int, kind: signal.Signals | None, after: float) -> Outcome:
        target = self._folder / f"{command}-{number}"
        words = [str(word) for word in self.words(target)[command]]
        program = [sys.executable, "-m", "tpucache", *words]
        began = time.monotonic()
        with subprocess.Popen(
            program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            was_early = False
            try:
                if kind is not None:
                    time.sleep(after)
                    was_early = not handles_signals(process.pid)
                    began = time.monotonic()
                    if process.poll() is None:
                        is_terminal = command == "warmup" and kind is signal.SIGINT
                        (os.killpg if is_terminal else os.kill)(process.pid, kind)
                said = process.communicate(timeout=LONGEST)[1]
            except subprocess.TimeoutExpired:
                said = "it did not end"
            finally:
                process.kill()
        seconds = time.monotonic() - began
        shutil.rmtree(target, ignore_errors=True)
        lines = tuple(line for line in said.splitlines() if not line.startswith(WORKING))
        return Outcome(command, process.returncode, lines, seconds, was_early)


def handles_signals(process: int) -> bool:
    """Return whether a process handles SIGTERM: its command has begun."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:  # it has ended
        return True
    caught = status.partition("SigCgt:")[2].split()
    return not caught or bool(int(caught[0], 16) >> (signal.SIGTERM - 1) & 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2000, help="interrupts, of all commands together")
    parser.add_argument("--jobs", type=int, default=4, help="commands at once")
    parser.add_argument("--seed", type=int, help="of the moments; it is printed")
    parser.add_argument("--most-seconds", type=float, default=3.0, help="until the end of a command, at most")
    parser.add_argument("--only", nargs="+", metavar="COMMAND", help="of: bench, verify, warmup, push")
    options = parser.parse_args()
    # A shell has what it starts in the background ignore SIGINT, and so would the commands.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(options.jobs) as threads:
        trial = Trial(Path(work))
        commands = [command for command in trial.seconds if command in (options.only or trial.seconds)]
        jobs = []
        for number in range(options.times):
            command = commands[number % len(commands)]
            kind = chance.choice((signal.SIGINT, signal.SIGTERM))
            jobs.append((command, number, kind, chance.uniform(0, trial.seconds[command])))
        outcomes = list(threads.map(lambda job: trial.interrupt(*job), jobs))
    wrong = [outcome for outcome in outcomes if not outcome.is_right(options.most_seconds)]
    print(
        "| command | signals | before its first line | status: times | longest, s | wrong |\n|---|---|---|---|---|---|"
    )
    for command in commands:
        own = [outcome for outcome in outcomes if outcome.command == command]
        late = [outcome for outcome in own if not outcome.was_early]
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(Counter(o.status for o in late).items()))
        longest = max((each.seconds for each in late), default=0.0)
        cells = (
            command,
            len(own),
            len(own) - len(late),
            statuses,
            f"{longest:.2f}",
            sum(each in wrong for each in own),
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    for outcome in wrong[:10]:
        print(f"wrong: {outcome}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
