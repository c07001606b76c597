"""Stops a small run at every single step, resumes it, and compares what it leaves with an uninterrupted run.

    python -m scripts.checks.stops --backend torch xla

Every stop is a process of its own: by a time limit (the clock jumps at the step), by SIGTERM, and by SIGKILL; each
after every batch that the device runs, of training and of evaluation. SIGKILL also comes before every file is synced.
Every resume is another process. `history.csv` has to be the same bytes, `best.pt` and `last.pt` the same values to the
bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.bench.photos import write_pictures
from tpucache import Recipe, build_cache
from tpucache.cli import main as main_of_cli
from tpucache.training import device, interrupt, loop
from tpucache.training.device import Device, open_device

CORES = {"torch": 1, "xla": 8}
STATUS = {"time limit": 3, "SIGTERM": 3, "SIGKILL": -signal.SIGKILL, "SIGKILL at a write": -signal.SIGKILL}
OPTIONS = (
    "--model small_model:small --epochs 2 --batch-size 16 --valid 0.4 --lr 0.05 --ema 0.9 --flip --mixup 0.3 --resume"
)
MODEL = """
from torch import nn

def small(classes):
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, classes))
"""
_LOCK = threading.Lock()
PRELOADED = ["tpucache.cli", "tpucache.training.loop", "tpucache.loading.columns"]


class Outcome(NamedTuple):
    """What became of one stop: the first process's exit status, its report, and what differs in the end."""

    moment: int
    status: int
    is_reported: bool
    differing: list[str]


class Trial:
    """One backend's runs, all in a folder."""

    def __init__(self, folder: Path, cache: Path, backend: str, processes: ForkServerContext) -> None:
        self.folder, self._cache, self._backend, self._processes = folder, cache, backend, processes
        whole = folder / "whole"
        self.train(whole, "", -1)
        self.batches, self.writes = map(int, (folder / "whole.count").read_text().split())
        self._expected = results(whole)

    def train(self, run: Path, kind: str, moment: int, status: int = 0) -> int:
        """Run the command in a process of its own, stopped at this moment; return its exit status."""
        words = ["train", self._cache, "--run", run, "--backend", self._backend, "--cores", CORES[self._backend]]
        words += [*OPTIONS.split(), "--time-limit", "1h"]
        process = self._processes.Process(target=run_command, args=(kind, moment, run, [str(word) for word in words]))
        with _LOCK:
            process.start()
        found = None
        while found is None:
            time.sleep(0.05)
            with _LOCK:  # multiprocessing asks after the exit of all processes whenever one is started
                found = process.exitcode
        if found not in (0, status):
            sys.exit(f"{kind} {moment}: status {found}: {Path(f'{run}.log').read_text()[-2000:]}")
        return found

    def stop(self, kind: str, moment: int) -> Outcome:
        run = self.folder / f"{kind} {moment}"
        status = self.train(run, kind, moment, STATUS[kind])
        is_reported = status < 0 or finished(run) == (status == 0)
        self.train(run, "", -1)
        return Outcome(moment, status, is_reported and finished(run), differences(self._expected, results(run)))


def run_command(kind: str, moment: int, run: Path, words: list[str]) -> None:
    """Run a command that is stopped after a number of batches, or when it begins a certain write."""
    log = os.open(f"{run}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    counts, hours_later = {"batches": 0, "writes": 0}, False
    fsync, monotonic = os.fsync, time.monotonic

    def count(what: str) -> None:
        nonlocal hours_later
        counts[what] += 1
        if counts[what] != moment or (what == "writes") != (kind == "SIGKILL at a write"):
            return
        if kind == "time limit":
            hours_later = True
        else:
            os.kill(os.getpid(), signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)

    def open_counting(*choice: Any, **more: Any) -> Device:
        opened = open_device(*choice, **more)
        step_end = opened.step_end
        opened.step_end = lambda: (step_end(), count("batches"))
        return opened

    os.fsync = lambda descriptor: (count("writes"), fsync(descriptor))
    device.open_device = open_counting
    interrupt.StopRequest.__init__.__defaults__ = (None, lambda: monotonic() + 1e6 * hours_later)
    loop.ceiling = lambda execute, device, images, seconds=0: 1.0  # it measures a rate by hundreds of executions
    status = main_of_cli(words)
    Path(f"{run}.count").write_text(f"{counts['batches']} {counts['writes']}")
    sys.exit(status)


def finished(run: Path) -> bool:
    return json.loads((run / "report.json").read_text())["finished"] is True


def results(run: Path) -> dict[str, Any]:
    state = {name: torch.load(run / name, weights_only=True) for name in ("best.pt", "last.pt")}
    return {**state, "history.csv": (run / "history.csv").read_bytes()}


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [path]
        return [found for key in left for found in differences(left[key], right[key], f"{path}/{key}")]
    same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    return [] if same else [path]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=list(CORES), default=list(CORES))
    parser.add_argument("--kind", nargs="+", choices=list(STATUS), default=list(STATUS))
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    options = parser.parse_args()
    failures = 0
    print("| backend | cores | stopped by | after | stops | exit status | report | history.csv, best.pt, last.pt |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        cache = Path(work, "cache")
        build_cache(write_pictures(Path(work, "images"), 60, 16), cache, Recipe(size=16), jobs=1)
        Path(work, "small_model.py").write_text(MODEL)
        sys.path.insert(0, work)  # which processes take over
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
        processes = multiprocessing.get_context("forkserver")  # of one that has imported, and done nothing else
        processes.set_forkserver_preload([*PRELOADED, *(["torch_xla"] if "xla" in options.backend else [])])
        for backend in options.backend:
            folder = Path(work, backend)
            folder.mkdir()
            trial = Trial(folder, cache, backend, processes)
            for kind in options.kind:
                total, what = (trial.writes, "syncs") if kind.endswith("write") else (trial.batches, "batches")
                with ThreadPoolExecutor(options.jobs) as threads:
                    outcomes = list(threads.map(lambda moment: trial.stop(kind, moment), range(1, total + 1)))  # noqa: B023  # all are run before it changes
                stops = [outcome for outcome in outcomes if outcome.status == STATUS[kind]]
                bad = [outcome for outcome in outcomes if outcome.differing or not outcome.is_reported]
                bad += [outcome for outcome in outcomes if outcome.status != STATUS[kind]]
                failures += len(bad)
                verdict = f"{len(bad)} differ: {bad[:3]}" if bad else "all the same"
                report = "all right" if all(outcome.is_reported for outcome in outcomes) else "wrong"
                print(
                    f"| {backend} | {CORES[backend]} | {kind} | each of {total} {what} | {len(stops)} | "
                    f"{STATUS[kind]} | {report} | {verdict} |",
                    flush=True,
                )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
