"""The list of rows, and how one is run: in this process, or in one of its own so that nothing it does is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

from scripts.checks.misuse.lab import Lab, Shared
from scripts.checks.misuse.outcome import Outcome, Wrong

SECONDS: Final = 90.0  # a row that takes longer hangs

Try = Callable[[Lab], Outcome]


class Row(NamedTuple):
    """One thing that is tried: its area, its name in plain English, and the function that tries it."""

    area: str
    name: str
    attempt: Try

    def matches(self, pattern: str) -> bool:
        """Return whether the area or the name holds a regular expression, in any case."""
        return re.search(pattern, f"{self.area}: {self.name}", re.IGNORECASE) is not None


ROWS: Final[list[Row]] = []


def row(attempt: Try) -> Try:
    """Add a function to the rows; its name is the row's, the first line of its module's docstring the area."""
    area = (sys.modules[attempt.__module__].__doc__ or "").strip().splitlines()[0].rstrip(".")
    ROWS.append(Row(area, attempt.__name__.replace("_", " "), attempt))
    return attempt


def run_row(one: Row, lab: Lab) -> Outcome:
    """Try one row here. Whatever it raises is a wrong outcome."""
    try:
        return one.attempt(lab)
    except Wrong as wrong:
        return Outcome("WRONG", str(wrong))
    except Exception as error:  # noqa: BLE001  # a row may raise anything: that is what it is for
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("WRONG", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def run_rows(rows: Sequence[Row], folder: Path, shared: Shared, jobs: int) -> Iterator[tuple[Row, Outcome, float]]:
    """Run each row in a process of its own, `jobs` at once, and yield what became of it and the seconds it took."""
    waiting, running = list(enumerate(rows)), dict[int, tuple[BaseProcess, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            number, one = waiting.pop(0)
            process: BaseProcess = multiprocessing.get_context("fork").Process(
                target=_run_apart, args=(one, folder, number, shared)
            )
            process.start()
            running[number] = process, time.monotonic()
        wait([process.sentinel for process, _ in running.values()], timeout=1)
        for number, (process, began) in list(running.items()):
            seconds = time.monotonic() - began
            if process.is_alive() and seconds < SECONDS:
                continue
            if process.is_alive():
                process.kill()
            process.join()
            del running[number]
            yield rows[number], _outcome(folder, number, process, seconds), seconds


def _run_apart(one: Row, folder: Path, number: int, shared: Shared) -> None:
    """Run a row in its own folder, and leave what became of it in a file."""
    own = folder / f"row{number:03d}"
    own.mkdir()
    os.chdir(own)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    outcome = run_row(one, Lab(own, shared))
    (folder / f"{number}.json").write_text(json.dumps(outcome))
    os._exit(0)  # no exit handlers of libraries that the parent has imported


def _outcome(folder: Path, number: int, process: BaseProcess, seconds: float) -> Outcome:
    left = folder / f"{number}.json"
    shutil.rmtree(folder / f"row{number:03d}", ignore_errors=True)
    if left.exists():
        return Outcome(*json.loads(left.read_text()))
    if seconds >= SECONDS:
        return Outcome("WRONG", f"hangs: it was ended after {seconds:.0f} s")
    return Outcome("WRONG", f"its process died, exit status {process.exitcode}")
