"""What the harness costs: its step rate, compared with a bare loop on one batch.

    python -m scripts.bench train CACHE --backend xla --cores 1 --model cnn --batch-size 64

Rounds take turns. The bare loop is nothing but the model, its loss and its optimizer, over and over on one batch that
is on the device.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from torch.nn import functional

from scripts.bench.rounds import race, ratio, spread, spread_cell
from scripts.bench.table import add_race_options, parse_options, show
from scripts.commands import make_parser
from tpucache import CachedDataset
from tpucache.ondevice.modules import Normalise
from tpucache.training.device import Device, open_device
from tpucache.training.loop import train
from tpucache.training.model import build_model
from tpucache.training.options import RunOptions
from tpucache.training.pace import Pace
from tpucache.training.settings import TrainSettings


def harness(dataset: CachedDataset, settings: TrainSettings, device: Device) -> Pace:
    with tempfile.TemporaryDirectory() as run:
        return train(Path(run), settings, dataset, None, device, RunOptions(replay=False)).pace


def bare_rate(dataset: CachedDataset, settings: TrainSettings, device: Device, steps: int) -> float:
    """Return images a second of plain steps on one batch."""
    torch.manual_seed(0)
    model = build_model(settings.model, len(dataset.classes)).to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, nesterov=True, weight_decay=settings.weight_decay or 0.0)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    samples = [dataset[index] for index in range(settings.batch)]
    images = device.put(torch.stack([image for image, _ in samples]).permute(0, 2, 3, 1).contiguous())
    labels = device.put(torch.stack([label for _, label in samples]))
    statistics_ = dataset.manifest.statistics
    normalise = Normalise(statistics_.mean, statistics_.std, device.torch_device)
    device.wait()

    def step() -> None:
        loss: Any = functional.cross_entropy(model(normalise(images)), labels)  # backward has no types
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        device.step_end()

    for _ in range(2):
        step()
    device.wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    device.wait()
    return steps * settings.batch / (time.perf_counter() - began)


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    device, dataset = open_device(options.backend), CachedDataset(options.cache, in_memory=True)
    settings = TrainSettings(
        model=options.model, batch_size=options.batch_size, epochs=options.epochs, lr=0.01, weight_decay=5e-4
    )
    steps = max(2, harness(dataset, settings, device).steps)  # reads everything once
    paces: list[Pace] = []

    def ours() -> float:
        paces.append(harness(dataset, settings, device))
        return paces[-1].images_per_second

    turns: dict[str, Callable[[], float]] = {
        "harness": ours,
        "bare loop": functools.partial(bare_rate, dataset, settings, device, steps),
    }
    rates = race(turns, options.rounds)
    share, idle = ratio(rates["harness"], rates["bare loop"]), statistics.median(pace.device_idle for pace in paces)
    rows = [["", "images/s", "min - max", "of the bare loop"]]
    for name, values in rates.items():
        part = f"{ratio(values, rates['bare loop']):.3f}"
        rows.append([name, f"{statistics.median(values):,.0f}", spread_cell(spread(values)), part])
    step = statistics.median(pace.step_seconds for pace in paces) * 1e3
    notes = [f"{step:.1f} ms a step; the device was idle for {idle:.1%} of the time; {options.rounds} rounds."]
    show(options, {"ratio": share, "device_idle": idle, "rates": rates}, [("", rows)], notes)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("cache", type=Path, help="a cache that warmup built")
    parser.add_argument("--backend", choices=["torch", "xla"], default="xla", help="(%(default)s)")
    parser.add_argument("--model", default="cnn", help="as `train` takes it (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images a batch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="of one round (%(default)s)")
    add_race_options(parser)
    return parse_options(parser)
