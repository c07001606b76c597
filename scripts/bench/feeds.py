"""Whether the idle figure of a run is true: `train` is fed at known rates; its figure is compared with the real one.

    python -m scripts.bench feeds                       # plain torch, XLA with 1 core, and XLA with 8
    python -m scripts.bench feeds --backend torch       # on a GPU, where there is one

A network that computes on the device, for about `--milliseconds` a step, is trained on data that comes every 0.25 to 3
times as long as a step takes. Without a pause, data that takes no time is trained on before and after: that is how long
the device needs for a step. What a step takes longer than that, with data that is late, the device was idle. The table
has this next to the figure of the run's report, and the hint: how long the loop was blocked on data. Plain torch on a
CPU is a synchronous device: the host waits until each step has ended. XLA is an asynchronous one, on the CPU, too.

    python -m scripts.bench feeds --backend torch --steps 6 --feeds 0.5 2 --milliseconds 5 --rounds 1     # to try it
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("PJRT_DEVICE", "CPU")
if os.environ["PJRT_DEVICE"] == "CPU":
    # XLA's CPU client blocks the host where an execution updates weights in place that an earlier one still computes.
    # Other devices do not: the weights are copied here, so that the host runs ahead of this device, too.
    os.environ.setdefault("XLA_ENABLE_PARAM_ALIASING", "0")

import numpy as np
import torch
from PIL import Image
from torch import nn

from scripts.bench.photos import make_once
from scripts.bench.table import Rows, add_race_options, parse_options, show
from scripts.commands import ROOT, say
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.loading.reading.record_reader import WaysRead
from tpucache.training.device import Device, open_device
from tpucache.training.device.torch_device import CudaDevice
from tpucache.training.feed.idle import WARMUP_EXECUTIONS, Pace
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.settings import TrainSettings

_BACKENDS: Final[Sequence[tuple[str, int]]] = (("torch", 1), ("xla", 1), ("xla", 8))
_FEEDS: Final = (0.25, 0.5, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0)
_IMAGES: Final = 64  # repeated to make an epoch
_SIDE: Final = 32
_DEPTH: Final = 4  # few layers, so that the host's work for a step is short compared with the device's
_WIDTHS: Final = range(128, 16384 + 1, 128)
_TRIAL_STEPS: Final = 10


class Chain(nn.Module):
    """One wide matrix applied over and over: much computing on the device, and little work for the host."""

    width = 512

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.grow = nn.Linear(3, self.width)
        self.matrix = nn.Linear(self.width, self.width)
        self.head = nn.Linear(self.width, outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = self.grow(images.mean((2, 3)))
        for _ in range(_DEPTH):
            values = torch.tanh(self.matrix(values))
        outputs: torch.Tensor = self.head(values)
        return outputs


class SlowedDataset(CachedDataset):
    """Gives a batch at most every `interval` seconds, whatever the number of threads that ask."""

    interval = 0.0
    _turn = threading.Lock()
    _next = 0.0

    def read_into(self, *arguments: Any) -> WaysRead:
        found = super().read_into(*arguments)
        with self._turn:
            time.sleep(max(0.0, self._next - time.perf_counter()))
            SlowedDataset._next = time.perf_counter() + self.interval
        return found


class Feeding:
    """Runs of one network on one device, fed at different rates."""

    def __init__(self, cache: Path, device: Device, options: argparse.Namespace) -> None:
        """Choose the network's width so that a step takes about as long as the options say."""
        self._cache, self._device, self._steps = cache, device, options.steps
        Chain.width, self._batch = 1024, 64
        if isinstance(device, CudaDevice):
            Chain.width, self._batch = 4096, 4096
            device.tf32 = False  # longer steps of fewer weights
        trial = self._pace(0.0, _TRIAL_STEPS).step_seconds
        wanted = Chain.width * math.sqrt(options.milliseconds / 1e3 / trial)
        Chain.width = min(_WIDTHS, key=lambda width: abs(width - wanted))
        self._alone = self._step_alone()

    def turn(self, feed: float) -> dict[str, float]:
        """Return the figures of a run whose data comes every `feed` steps."""
        before = self._alone
        pace = self._pace(feed * before, self._steps)
        self._alone = self._step_alone()
        step = (before + self._alone) / 2
        return {
            "true_idle": max(0.0, 1 - step / pace.step_seconds),
            "device_idle": pace.device_idle,
            "waited": pace.waited,
            "step_ms": step * 1e3,
        }

    def _step_alone(self) -> float:
        """Return how long a step takes where data is never late."""
        return self._pace(0.0, self._steps).step_seconds

    def _pace(self, interval: float, steps: int) -> Pace:
        SlowedDataset.interval = interval
        samples = np.resize(np.arange(_IMAGES), self._batch * (steps + WARMUP_EXECUTIONS))
        dataset = SlowedDataset(self._cache, indices=samples, in_memory=True)
        settings = TrainSettings(
            model="scripts.bench.feeds:Chain", batch_size=self._batch, epochs=1, optimizer="sgd", lr=1e-6,
            precision="float32", threads=1,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as run:
            return train(Path(run), settings, dataset, None, self._device, RunOptions(replay=False, curves=False)).pace


def make_cache(work: Path) -> Path:
    """Return a small cache of noise, made unless it exists."""

    def make(unfinished: Path) -> None:
        rng = np.random.default_rng(0)
        for number in range(_IMAGES):
            path = unfinished / f"class-{number % 2}" / f"{number:02d}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)).save(path)

    cache = work / "noise-cache"
    build_cache(make_once(work / "noise", make), cache, Recipe(size=_SIDE))
    return cache


def measure_here(backend: str, cores: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one backend, measured in this process."""
    device = open_device(backend, cores)
    feeding = Feeding(make_cache(options.work), device, options)
    turns: dict[float, list[dict[str, float]]] = {feed: [] for feed in options.feeds}
    for _ in range(options.rounds):
        for feed in options.feeds:
            say(f"{backend}, {cores} cores: data every {feed:g} steps")
            turns[feed].append(feeding.turn(feed))
    rows = [
        {"feed": feed, **{name: statistics.median(turn[name] for turn in found) for name in found[0]}}
        for feed, found in turns.items()
    ]
    name = f"{backend} on {device.torch_device.type}" if backend == "torch" else f"{backend}, {cores} cores"
    return {"name": name, "backend": backend, "cores": cores, "rows": rows}


def measure_apart(backend: str, cores: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one backend, measured in a process of its own: XLA's number of cores is a process's."""
    found = options.work / f"feeds-{backend}-{cores}.json"
    words = ["--backend", backend, "--cores", str(cores), "--work", str(options.work), "--json", str(found)]
    words += ["--steps", str(options.steps), "--milliseconds", str(options.milliseconds)]
    words += ["--rounds", str(options.rounds), "--feeds", *map(str, options.feeds)]
    environment = {**os.environ, "CPU_NUM_DEVICES": str(cores)}
    command = [sys.executable, "-m", "scripts.bench", "feeds", *words]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=sys.stderr)
    report: dict[str, Any] = json.loads(found.read_text())["devices"][0]
    return report


def to_rows(devices: Sequence[dict[str, Any]]) -> Rows:
    """Return the rows of the table, its heading first."""
    rows = [["device", "a batch every", "truly idle", "reported", "difference", "loop blocked on data", "step"]]
    for device in devices:
        for row in device["rows"]:
            points = 100 * (row["device_idle"] - row["true_idle"])
            cells = [device["name"], f"{row['feed']:g} steps", f"{row['true_idle']:.1%}", f"{row['device_idle']:.1%}"]
            rows.append([*cells, f"{points:+.1f}", f"{row['waited']:.1%}", f"{row['step_ms']:.1f} ms"])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    wanted = [each for each in _BACKENDS if options.backend in ("all", each[0])]
    if options.cores is not None:
        wanted = [(options.backend, options.cores)]
    measure = measure_here if len(wanted) == 1 else measure_apart
    devices = [measure(*each, options) for each in wanted]
    worst = max(abs(row["device_idle"] - row["true_idle"]) for device in devices for row in device["rows"])
    note = (
        f"The largest difference is {100 * worst:.1f} points. Runs of {options.steps} steps, median of "
        f"{options.rounds} rounds; torch {torch.__version__}."
    )
    show(options, {"devices": devices}, [("", to_rows(devices))], [note])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["all", "torch", "xla"], default="all", help="(%(default)s)")
    parser.add_argument("--cores", type=int, help="of the backend xla (default: 1, and 8)")
    parser.add_argument("--feeds", type=float, nargs="+", default=[*_FEEDS], help="steps from one batch to the next")
    parser.add_argument("--steps", type=int, default=60, help="of each run (%(default)s)")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of a step, about (%(default)g)")
    add_race_options(parser, "build/feeds")
    parser.set_defaults(rounds=3)
    options = parse_options(parser, {"steps": 1, "milliseconds": 1})
    if options.cores is not None and options.backend == "all":
        parser.error("--cores are those of one backend: give --backend, too")
    return options
