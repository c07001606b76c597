"""How long an accelerator waits whose records are in its memory, while another program takes all of the host's cores.

    python -m scripts.bench resident --rounds 5 --markdown resident.md

The accelerator is a clock: a step of a batch takes its images / `--rate` seconds whatever the host does, steps run
one after another, and the loop sends at most two ahead, as that of `train` does. It is idle from the end of a step to
the moment in which the loop sends the next one. Images of 224 pixels, yuv420, are fed by the same loader and the same
thread,

- streamed: each batch is copied, as an upload does;
- resident: the numbers of its rows are, those of many batches at once, and what is gathered by them is the
  accelerator's work;
- resident, with the random numbers of crops and flips that `train` sends along.

Each is fed with the host quiet, and with one program for each core that does nothing but compute. Shown are how idle
the accelerator was, the processor time of the feeding thread, as a share of the time, and the bytes sent for an image.

    python -m scripts.bench resident --images 64 --seconds 0.5 --rounds 1     # to try it
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from scripts.bench.photos import make_once
from scripts.bench.rounds import race, spread
from scripts.bench.table import (
    add_race_options,
    as_markdown,
    as_text,
    machine,
    machine_line,
    parse_options,
    write_files,
)
from tpucache import CachedDataset, CachedLoader, Recipe, build_cache
from tpucache.ondevice import AugmentSettings, Resident, draw
from tpucache.ondevice.draws import pack
from tpucache.ondevice.slots import RecordSlots
from tpucache.system import usable_cores
from tpucache.training.device import CpuDevice
from tpucache.training.device.base import MOST_AHEAD
from tpucache.training.feed.feeder import Feeder
from tpucache.training.feed.residence import DeviceMemory

SIZE: Final = 224
EPOCH: Final = 1 << 20  # samples of an epoch, about ImageNet's: the images are repeated to reach it
_UNCOUNTED: Final = 64  # batches, in which each record is uploaded
_LEAST: Final = 16
#: What takes a core: a program that computes, and never waits.
_BUSY: Final = "number = 1\nwhile True:\n    number = (number * 48271) % 2147483647"
STREAMED, RESIDENT, CROPS = "streamed", "resident", "resident, crops and flips"
HOSTS: Final = ("quiet", "busy")


class ClockDevice(CpuDevice):
    """An accelerator that takes the time of a step, and nothing of the host's but the bytes that it is sent."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self._step_seconds, self._ends = step_seconds, deque[float]()
        self.began = self.until = self.idle_seconds = 0.0

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Copy a batch, as an upload does."""
        return super().put(batch.clone())

    def put_all(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy batches as one."""
        return [*self.put(torch.stack([*batches])).unbind()]

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> ClockTable:  # type: ignore[override]  # no memory
        """Return memory that is the accelerator's."""
        return ClockTable()

    def restart(self) -> None:
        """Count from the end of the last step that was sent."""
        self.began, self.idle_seconds = self.until, 0.0

    def step(self) -> None:
        """Send a step; wait until no more than two are left to run."""
        sent = time.perf_counter()
        if self.until:
            self.idle_seconds += max(0.0, sent - self.until)
        self.until = max(self.until, sent) + self._step_seconds
        self._ends.append(self.until)
        if len(self._ends) > MOST_AHEAD:
            time.sleep(max(0.0, self._ends.popleft() - time.perf_counter()))

    @property
    def idle(self) -> float:
        """The share of the time since `restart` in which no step ran."""
        return self.idle_seconds / (self.until - self.began)


class ClockTable:
    """A table whose rows are written and gathered by the accelerator: nothing is done here."""

    def write(self, number: Any, chunk: Any) -> None:
        """Do nothing."""

    def take(self, slots: Any) -> None:
        """Do nothing."""


class Images:
    """Images that are smooth as photographs are, and a class for each."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[np.ndarray[Any, Any], int]:
        small = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        return np.kron(small, np.ones((SIZE // 8, SIZE // 8, 1), np.uint8)), number % 10


def make_dataset(work: Path, images: int) -> CachedDataset:
    """Return a cache of made-up images, repeated to an epoch of many batches."""

    def make(folder: Path) -> None:
        build_cache(Images(images), folder / "cache", Recipe(size=SIZE, codec="yuv420"))

    folder = make_once(work / f"resident-{images}", make)
    return CachedDataset(folder / "cache").select(np.arange(EPOCH) % images)


def turn(dataset: CachedDataset, way: str, host: str, size: int, options: argparse.Namespace) -> dict[str, float]:
    """Return how idle the accelerator was, and what feeding it batches of a size took."""
    device = ClockDevice(size / options.rate)
    loader = CachedLoader(dataset, size, shuffle=True, drop_last=True, finish="device")
    resident = None if way == STREAMED else Resident(dataset, DeviceMemory(device))
    settings = AugmentSettings(crop=True, flip=True)

    def drawn(number: int) -> np.ndarray[Any, Any]:
        return pack(settings, draw(settings, 0, number, size, (SIZE, SIZE)), (SIZE, SIZE))

    batches = max(_LEAST, round(options.seconds * options.rate / size))
    with busy_host(host), Feeder(loader, device, draw=drawn if way == CROPS else None, resident=resident) as feeder:
        counted: tuple[float, int] = 0.0, 0
        for number, _ in enumerate(feeder, 1):
            device.step()
            if number == _UNCOUNTED:
                device.restart()
                counted = feeder.cpu_seconds, feeder.sent_bytes
            elif number == _UNCOUNTED + batches:
                break
        seconds, images = device.until - device.began, batches * size
        return {
            "idle": device.idle,
            "cpu": (feeder.cpu_seconds - counted[0]) / seconds,
            "bytes_per_image": (feeder.sent_bytes - counted[1]) / images,
        }


@contextlib.contextmanager
def busy_host(host: str) -> Iterator[None]:
    """Have all cores of the host taken by other programs, where it is to be busy."""
    programs = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(usable_cores() * (host == "busy"))]
    try:
        if programs:
            time.sleep(0.2)  # they have begun
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def to_rows(turns: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    rows = [["fed by", "host", "batch", "idle", "min - max", "feeding thread", "bytes an image"]]
    for name, figures in turns.items():
        way, host, size = name.split(" | ")
        idle = spread([each["idle"] for each in figures])
        cpu, sent = (statistics.median(each[key] for each in figures) for key in ("cpu", "bytes_per_image"))
        cells = [f"{idle['median']:.2%}", f"{idle['min']:.2%} - {idle['max']:.2%}", f"{cpu:.2%}", f"{sent:,.0f}"]
        rows.append([way, host, size, *cells])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    dataset = make_dataset(options.work, options.images)
    turns: dict[str, Callable[[], dict[str, float]]] = {
        f"{way} | {host} | {size:,}": functools.partial(turn, dataset, way, host, size, options)
        for size in options.batch_size
        for way in (STREAMED, RESIDENT, CROPS)
        for host in HOSTS
    }
    figures = race(turns, options.rounds)
    rows = to_rows(figures)
    notes = (
        f"{machine_line(machine())}. A simulated device of {options.rate:,} images/s; medians over rounds: "
        f"{options.rounds}."
    )
    print(as_text(rows, (0, 1)), notes, sep="\n")
    write_files(options, {"machine": machine(), "turns": figures}, f"{as_markdown(rows, (0, 1))}\n{notes}\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=28_000, help="of the simulated device, in images/s (%(default)s)")
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[256, 1024], metavar="N", help="images a batch (256 and 1024)"
    )
    parser.add_argument("--images", type=int, default=2048, help="different ones (%(default)s)")
    add_race_options(parser, "build/bench", seconds=10.0)
    return parse_options(parser, {"rate": 1, "images": 1, "seconds": 0.1})


if __name__ == "__main__":
    main()
