"""How long a GPU or a TPU waits for its data: a network that is fed by caches and by a folder of photographs.

    python -m scripts.bench device PHOTOGRAPHS --bf16 --markdown device.md

The network is trained, on whatever device this machine has, with batches

- of tpucache raw and dct-lz4 (quality 90, finished on the device), by CachedLoader with `--threads`;
- of the same that stay in the device's memory, uploaded before the clock starts;
- on the fly: photographs decoded, resized and augmented each time they are asked for, by DataLoader in `--workers`
  processes.

All are uploaded ahead by the same thread, and shuffled. Rounds take every way in turn. Of each turn the table has the
rate and, as medians over the rounds, how idle the device was, by the three measures of `train`: the loop was blocked on
data, the device's own execution time, and the same steps repeated on a batch that is on the device.

    python -m scripts.bench device --model resnet18 --size 32 --batch-size 512     # as on CIFAR-10
    python -m scripts.bench device --device cpu --size 32 --batch-size 8 --seconds 1 --rounds 1     # to try it
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from scripts.bench.idle import RECIPE, OnTheFly
from scripts.bench.photos import SIZE, make_up_photographs, prepare_caches
from scripts.bench.rounds import race, spread, spread_cell
from scripts.bench.table import Rows, add_race_options, parse_options, show
from scripts.commands import make_parser, say
from tpucache import CachedDataset, CachedLoader, UsageError
from tpucache.ondevice import Normalise, Resident
from tpucache.training.device import BACKENDS, DEVICES, Device, open_device
from tpucache.training.device.base import DeviceBatch
from tpucache.training.feed import DeviceMemory, Feeder
from tpucache.training.forward import FinishBatch, make_finish
from tpucache.training.model import build_model
from tpucache.training.pace import WARMUP_EXECUTIONS, Pace, PaceMeter, ceiling

KINDS: Final = ("raw", "dct-lz4")
_LEAST: Final = 3  # steps that are counted in a turn, however slow they are
_IDLE: Final = {"waited": "waited for data", "device_idle": "idle, by the device", "ceiling_idle": "idle, by a replay"}


@dataclass(frozen=True)
class Way:
    """A way of feeding: batches without end, rows where records are `resident`, and what finishes them there."""

    batches: Callable[[], Iterator[Any]]
    finish: FinishBatch
    resident: Resident | None = None


class Trainer:
    """A network on a device, and what it does with a batch."""

    def __init__(self, device: Device, dataset: CachedDataset, options: argparse.Namespace) -> None:
        self.device, self._options = device, options
        torch.manual_seed(0)
        self._model = device.place(build_model(options.model, 1000))
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01, 0.9)
        for parameter in self._model.parameters():
            self._optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        statistics_ = dataset.manifest.statistics
        self._normalise = Normalise(statistics_.mean, statistics_.std, device.torch_device)
        device.wait()

    def step(self, way: Way, batch: DeviceBatch) -> None:
        """Take one step."""
        self.device.step_begin(0)
        batch = batch.gathered()
        images = self.device.to_layout(self._normalise(way.finish(batch).images))
        with self.device.autocast(self._options.bf16):
            outputs = self._model(images).float()
        loss: Any = functional.cross_entropy(outputs, batch.labels)  # backward has no types
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.device.step_end()

    def turn(self, way: Way) -> Pace:
        """Return the pace of about `seconds` of steps, after those that may compile."""
        images, seconds = self._options.batch_size, self._options.seconds
        with self.device.fast_products(), Feeder(way.batches(), self.device, resident=way.resident) as feeder:
            meter, began = PaceMeter(self.device, feeder), 0.0
            for number, batch in enumerate(feeder, 1):
                self.step(way, batch)
                meter.step(1, images)
                if number == WARMUP_EXECUTIONS:
                    began = time.perf_counter()
                elif number >= WARMUP_EXECUTIONS + _LEAST and time.perf_counter() - began >= seconds:
                    break
            meter.pause()
            return meter.pace().with_ceiling(ceiling(lambda: self.step(way, batch), self.device, images, seconds))


def open_ways(photographs: Path, data: Path, device: Device, options: argparse.Namespace) -> dict[str, Way]:
    """Return all ways by their names. Raises UsageError for fewer images than a batch has."""
    batch_size = options.batch_size
    datasets = {kind: CachedDataset(data / f"cache-{kind}") for kind in KINDS}
    images = datasets["raw"]
    if len(images) < batch_size:
        raise UsageError(f"a batch of {batch_size} is more than the {len(images)} images: use a smaller --batch-size")

    def cached(dataset: CachedDataset) -> Way:
        keywords: dict[str, Any] = {"shuffle": True, "drop_last": True, "threads": options.threads}
        loader = CachedLoader(dataset, batch_size, finish="device", pin_memory=device.pin_memory, **keywords)
        return Way(lambda: endless(loader), make_finish(dataset, device))

    files = [photographs / path for path in images.paths]
    variants = int(importlib.util.find_spec("albumentations") is not None)
    if not variants:
        say("albumentations is not installed: photographs are decoded on the fly, but not augmented")
    on_the_fly: DataLoader[Any] = DataLoader(
        OnTheFly(files, images.labels.tolist(), replace(RECIPE, size=options.size, variants=variants)),
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        multiprocessing_context="spawn" if options.workers else None,  # a fork of a process with a TPU may hang
        persistent_workers=options.workers > 0,
        pin_memory=device.pin_memory,
    )

    def channels_first() -> Iterator[Any]:
        return ((images.permute(0, 3, 1, 2), labels) for images, labels in endless(on_the_fly))

    ways = {f"tpucache {kind}": cached(dataset) for kind, dataset in datasets.items()}
    ways |= {f"tpucache {kind}, resident": stay(dataset, device, batch_size) for kind, dataset in datasets.items()}
    return {**ways, "on the fly": Way(channels_first, lambda batch: batch)}


def stay(dataset: CachedDataset, device: Device, batch_size: int) -> Way:
    """Return the way of records in the device's memory, which are uploaded now."""
    loader = CachedLoader(dataset, batch_size, shuffle=True, drop_last=True, finish="device")
    resident = Resident(dataset, DeviceMemory(device))
    while not resident.is_full:
        with Feeder(loader, device, resident=resident) as feeder:
            for _ in feeder:
                pass
    device.wait()

    def batches() -> Iterator[Any]:
        while True:
            for pair, _ in resident.pairs(loader):
                yield pair

    return Way(batches, make_finish(dataset, device), resident)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def device_name(device: Device) -> str:
    """Return what people call a device."""
    kind = device.torch_device.type
    return str(torch.cuda.get_device_name(device.torch_device)) if kind == "cuda" else f"{device.cores} cores, {kind}"


def to_rows(paces: dict[str, list[Pace]]) -> Rows:
    """Return the rows of the table, its heading first."""
    rows = [["fed by", "images/s", "min - max", *_IDLE.values(), "the replay, images/s"]]
    for name, turns in paces.items():
        rate = spread([pace.images_per_second for pace in turns])
        shares = (f"{statistics.median(getattr(pace, idle) for pace in turns):.1%}" for idle in _IDLE)
        replay = statistics.median(pace.ceiling_images_per_second or 0.0 for pace in turns)
        rows.append([name, f"{rate['median']:,.0f}", spread_cell(rate), *shares, f"{replay:,.0f}"])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    photographs = (options.source or make_up_photographs(options.work / "photos")).resolve()
    data = prepare_caches(options.work, photographs, options.size, KINDS)
    device = open_device(options.backend, options.cores, options.device, compile=options.compile)
    ways = open_ways(photographs, data, device, options)
    images = CachedDataset(data / "cache-raw")
    trainer = Trainer(device, images, options)
    paces = race({name: functools.partial(trainer.turn, way) for name, way in ways.items()}, options.rounds)
    precision = "bfloat16" if options.bf16 else "float32"
    notes = [
        f"{device_name(device)}, backend {device.name}, torch {torch.__version__}; {options.model} in {precision}"
        f"{', torch.compile' if options.compile else ''}, {len(images):,} images of {options.size}x{options.size}, "
        f"batches of {options.batch_size}, threads: {options.threads}, worker processes: {options.workers}; medians "
        f"of {options.rounds} rounds."
    ]
    figures = {name: [asdict(pace) for pace in turns] for name, turns in paces.items()}
    show(options, figures, [("", to_rows(paces))], notes)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "source", nargs="?", type=Path, help="a folder of class folders of photographs (default: made up)"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="torch", help="(%(default)s)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="of the backend torch (%(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="of the backend xla (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the network by torch.compile")
    parser.add_argument("--model", default="resnet18", help="as `train` takes it (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute matrix products in bfloat16")
    parser.add_argument("--batch-size", type=int, default=256, help="images a batch (%(default)s)")
    parser.add_argument("--size", type=int, default=SIZE, help="of the images, in pixels (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="that read a cache (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode photographs (%(default)s)")
    add_race_options(parser, "build/bench", seconds=10.0)
    return parse_options(parser, {"batch_size": 2, "size": 16, "threads": 1, "workers": 0, "seconds": 0.1})
