"""Compares the account of a training run, stopped twice, with a clock outside of its processes.

    python -m scripts.checks account --backend torch xla

The run takes three processes, two of which a time limit ends. `outside` is the time from the start to the end of all of
them, `accounted` what the parts in `report.json` add up to: at least 98 % of it. A step of its model takes 20 ms, and
`share` is what steps and evaluation take of the time of its epochs, with evaluation, metrics and checkpoints: at least
95 %. Both need a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from scripts.bench.table import as_text
from tpucache import Recipe, build_cache

#: What is spent once a run or a process, and not in each epoch.
ONCE: Final = ("start_up", "staging", "range_test", "compiling", "replay", "report")
MODEL: Final = """
import time
from torch import nn

class Sleeper(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(3, classes)

    def forward(self, images):
        time.sleep(0.02)
        return self.head(images.mean((2, 3)))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=["torch", "xla"], default=["torch", "xla"])
    parser.add_argument("--seconds", type=int, default=25, help="of each process, about")
    options = parser.parse_args()
    rows = [["backend", "processes", "outside", "accounted", "of it", "share", "parts"]]
    failed = False
    with tempfile.TemporaryDirectory() as work:
        cache = write_cache(Path(work))
        Path(work, "sleeping.py").write_text(MODEL)
        for backend in options.backend:
            outside, report = measure(backend, cache, Path(work, backend), options.seconds)
            parts: dict[str, float] = report["seconds"]
            accounted = sum(parts.values())
            epochs = {name: spent for name, spent in parts.items() if name not in ONCE}
            share = (epochs["steps"] + epochs["evaluation"]) / sum(epochs.values())
            failed |= not 0.98 * outside <= accounted <= outside or share < 0.95
            listed = ", ".join(f"{name} {spent:.1f}" for name, spent in parts.items() if spent >= 0.05)
            figures = [f"{outside:.1f} s", f"{accounted:.1f} s", f"{accounted / outside:.1%}", f"{share:.1%}"]
            rows.append([backend, "3", *figures, listed])
    print(as_text(rows, left=(0, 6)), end="")
    return int(failed)


def write_cache(work: Path) -> Path:
    """Write a cache of 2,500 tiny images in two classes."""
    rng = np.random.default_rng(0)
    for number in range(2500):
        path = work / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    build_cache(work / "images", work / "cache", Recipe(size=8), jobs=1)
    return work / "cache"


def measure(backend: str, cache: Path, run: Path, seconds: int) -> tuple[float, dict[str, dict[str, float]]]:
    """Train in three processes, and return the seconds that they took and the report that they leave."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    words = ["train", cache, "--run", run, "--backend", backend, "--model", "sleeping:Sleeper", "--valid", "0.2"]
    words += ["--epochs", str(max(1, seconds * 3 // 12)), "--batch-size", "4", "--resume"]
    command = [sys.executable, "-m", "tpucache", *map(str, words)]
    outside = 0.0
    for limit, status in ((seconds, 3), (seconds, 3), (3600, 0)):
        began = time.monotonic()
        limited = [*command, "--time-limit", str(limit)]
        done = subprocess.run(limited, env=environment, cwd=run.parent, capture_output=True, text=True, check=False)
        outside += time.monotonic() - began
        if done.returncode != status:
            sys.exit(f"status {done.returncode}, not {status}: {done.stderr[-2000:]}")
    report: dict[str, dict[str, float]] = json.loads((run / "report.json").read_text())
    return outside, report


if __name__ == "__main__":
    sys.exit(main())
