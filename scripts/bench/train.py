"""What the harness costs: its step rate beside a bare loop on one batch, and whether its idle figures can be believed.

    python -m scripts.bench train CACHE --backend xla --cores 1 --model cnn --batch-size 64

Rounds take turns. The bare loop is nothing but the model, its loss and its optimizer, over and over on one batch that
is on the device. Then a model that only sleeps, so that its steps take a known time, is fed by data that is slowed down
to make it wait a known share of that, and the three idle figures are put beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from torch import nn
from torch.nn import functional

from scripts.bench.rounds import race, ratio, spread, spread_cell
from scripts.bench.table import add_race_options, as_markdown, as_text, parse_options, write_files
from scripts.commands import say
from tpucache import CachedDataset
from tpucache.loading.reading.reader import WaysRead
from tpucache.ondevice.modules import Normalise
from tpucache.training.device import Device, open_device
from tpucache.training.feed.idle import Pace
from tpucache.training.learn.model import build_model
from tpucache.training.loop import train
from tpucache.training.run_options import RunOptions
from tpucache.training.settings import TrainSettings

STEP_SECONDS = 0.05  # beside which the rest of a step is short
_SLOWED_BATCH = 16  # many steps an epoch: those batches that lie ready when it begins are waited for by nobody


class Sleeper(nn.Module):
    """Takes a known time, whatever the machine does beside."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_SECONDS)
        outputs: torch.Tensor = self.head(images.mean((2, 3)))
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


def harness(dataset: CachedDataset, settings: TrainSettings, device: Device, replay: bool = False) -> Pace:
    with tempfile.TemporaryDirectory() as run:
        return train(Path(run), settings, dataset, None, device, RunOptions(replay=replay)).pace


def bare_rate(dataset: CachedDataset, settings: TrainSettings, device: Device, steps: int) -> float:
    """Return images a second of plain steps on one batch."""
    torch.manual_seed(0)
    model = build_model(settings.model, len(dataset.classes)).to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, nesterov=True, weight_decay=settings.weight_decay or 0.0)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    samples = [dataset[index] for index in range(settings.batch_size)]
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
    return steps * settings.batch_size / (time.perf_counter() - began)


def compare_rates(
    dataset: CachedDataset, settings: TrainSettings, device: Device, rounds: int
) -> tuple[dict[str, Any], list[list[str]]]:
    """Return the figures of the harness beside those of a bare loop, and their table."""
    steps = max(2, harness(dataset, settings, device).steps)  # reads everything once
    paces: list[Pace] = []

    def ours() -> float:
        paces.append(harness(dataset, settings, device))
        return paces[-1].images_per_second

    rates = race({"harness": ours, "bare loop": lambda: bare_rate(dataset, settings, device, steps)}, rounds)
    rows = [["", "images/s", "min - max", "of the bare loop"]]
    for name, values in rates.items():
        share = ratio(values, rates["bare loop"])
        rows.append([name, f"{statistics.median(values):,.0f}", spread_cell(spread(values)), f"{share:.3f}"])
    return {
        **{name: statistics.median(values) for name, values in rates.items()},
        "ratio": ratio(rates["harness"], rates["bare loop"]),
        "pairs": [ours / bare for ours, bare in zip(rates["harness"], rates["bare loop"], strict=True)],
        "step_ms": statistics.median(pace.step_seconds for pace in paces) * 1e3,
        "waited": statistics.median(pace.waited for pace in paces),
        "device_idle": statistics.median(pace.device_idle for pace in paces),
        "compiles": max(pace.compiles for pace in paces),
    }, rows


def slow_down(cache: Path, settings: TrainSettings, shares: Sequence[float]) -> list[dict[str, float]]:
    """Return the idle figures of runs whose device has to wait a known share of its time."""
    plain = open_device("torch", device="cpu")
    settings = replace(settings, model="scripts.bench.train:Sleeper", batch_size=_SLOWED_BATCH, epochs=1)
    free = harness(SlowedDataset(cache, in_memory=True), settings, plain)
    found = []
    for share in shares:
        say(f"slowed to {share:.0%}")
        SlowedDataset.interval = free.step_seconds / (1 - share) if share else 0.0
        pace = harness(SlowedDataset(cache, in_memory=True), settings, plain, replay=True)
        against = math.nan if pace.ceiling_idle is None else pace.ceiling_idle  # none where it would take too long
        figures = {"waited": pace.waited, "device_idle": pace.device_idle, "ceiling_idle": against}
        found.append({"share": share, **figures})
    return found


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    device = open_device(options.backend, options.cores)
    settings = TrainSettings(
        model=options.model, batch_size=options.batch_size, epochs=options.epochs, lr=0.01, weight_decay=5e-4
    )
    found, rate_rows = compare_rates(CachedDataset(options.cache, in_memory=True), settings, device, options.rounds)
    pairs = ", ".join(f"{pair:.3f}" for pair in found["pairs"])
    notes = [
        f"{found['step_ms']:.1f} ms a step; ratio {found['ratio']:.3f} (median of {options.rounds} pairs: {pairs})",
        f"waited {found['waited']:.1%}; idle by the device's account {found['device_idle']:.1%}",
    ]
    print(as_text(rate_rows), *notes, sep="\n", flush=True)
    found["slowed"] = slow_down(options.cache, settings, options.shares)
    idle_rows = [["the device has to wait", "loop blocked on data", "by the device's account", "against a replay"]]
    idle_rows += [[f"{value:.1%}" for value in row.values()] for row in found["slowed"]]
    print(f"\n{as_text(idle_rows)}", end="")
    listed = [f"- {note}" for note in notes]
    write_files(options, found, "\n".join([as_markdown(rate_rows), *listed, "", as_markdown(idle_rows, ())]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="a cache that warmup built")
    parser.add_argument("--backend", choices=["torch", "xla"], default="xla", help="(%(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="of the backend (%(default)s)")
    parser.add_argument("--model", default="cnn", help="as `train` takes it (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images a batch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="of one round (%(default)s)")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.9], help="of its time that the slowed device waits"
    )
    add_race_options(parser)
    return parse_options(parser)
