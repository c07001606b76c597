"""Stops a small run at every single step, resumes it, and compares what it leaves with an uninterrupted run.

    python -m scripts.checks.stops --backend eager xla

Every stop is a process of its own: by a time limit (the clock jumps at the step), by SIGTERM, and by SIGKILL; each
after every batch that the device runs, of training and of evaluation. SIGKILL also comes before every file is synced.
Every resume is another process. `history.csv` has to be the same bytes, `best.pt` and `last.pt` the same values to the
bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from tpucache import Recipe, build_cache

CORES = {"eager": 1, "xla": 8}
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
STOPPED = """
import os, signal, sys, time
from tpucache.cli import main
from tpucache.training import device, loop

loop.ceiling = lambda execute, device, images: 1.0  # it measures a rate by hundreds of executions

kind, chosen, count_file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
counts, open_device, fsync, monotonic = {"batch": 0, "write": 0}, device.open_device, os.fsync, time.monotonic
clock = [0.0]
time.monotonic = lambda: monotonic() + clock[0]

def count(what):
    counts[what] += 1
    if counts[what] != chosen or (what == "write") != (kind == "SIGKILL at a write"):
        return
    if kind == "time limit":
        clock[0] = 1e6
    else:
        os.kill(os.getpid(), signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)

def open_counting(*arguments):
    opened = open_device(*arguments)
    step_end = opened.step_end
    opened.step_end = lambda: (step_end(), count("batch"))
    return opened

device.open_device = open_counting
os.fsync = lambda descriptor: (count("write"), fsync(descriptor))
status = main(sys.argv[4:])
open(count_file, "w").write(f"{counts['batch']} {counts['write']}")
sys.exit(status)
"""


class Outcome(NamedTuple):
    """What became of one stop: the first process's exit status, its report, and what differs in the end."""

    moment: int
    status: int
    is_reported: bool
    differing: list[str]


class Trial:
    """One backend's runs, all in a folder."""

    def __init__(self, folder: Path, cache: Path, backend: str) -> None:
        self.folder, self._cache, self._backend = folder, cache, backend
        whole = folder / "whole"
        self.train(whole, "", -1)
        self.batches, self.writes = map(int, (folder / "whole.count").read_text().split())
        self._expected = results(whole)

    def train(self, run: Path, kind: str, moment: int, status: int = 0) -> int:
        cores = CORES[self._backend]
        words = ["train", self._cache, "--run", run, "--backend", self._backend, "--cores", cores, *OPTIONS.split()]
        command = [sys.executable, "-c", STOPPED, kind, moment, f"{run}.count", *words, "--time-limit", "1h"]
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(cores)}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        done = subprocess.run(map(str, command), env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, status):
            sys.exit(f"{kind} {moment}: status {done.returncode}: {done.stderr[-2000:]}")
        return done.returncode

    def stop(self, kind: str, moment: int) -> Outcome:
        run = self.folder / f"{kind} {moment}"
        status = self.train(run, kind, moment, STATUS[kind])
        is_reported = not status or (STATUS[kind] == 3 and not finished(run)) or STATUS[kind] < 0
        if status:
            self.train(run, "", -1)
        is_reported = is_reported and finished(run)
        return Outcome(moment, status, is_reported, differences(self._expected, results(run)))


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


def write_cache(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(60):
        path = folder / "images" / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    build_cache(folder / "images", folder / "cache", Recipe(size=16), jobs=1)
    return folder / "cache"


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
        cache = write_cache(Path(work))
        for backend in options.backend:
            folder = Path(work, backend)
            folder.mkdir()
            (folder / "small_model.py").write_text(MODEL)
            trial = Trial(folder, cache, backend)
            for kind in options.kind:
                total, what = (trial.writes, "syncs") if kind.endswith("write") else (trial.batches, "batches")
                with ThreadPoolExecutor(options.jobs) as threads:
                    outcomes = list(threads.map(lambda moment: trial.stop(kind, moment), range(1, total + 1)))  # noqa: B023  # all are run before it changes
                stops = [outcome for outcome in outcomes if outcome.status]
                bad = [outcome for outcome in outcomes if outcome.differing or not outcome.is_reported]
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
