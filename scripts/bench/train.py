"""What the harness costs: its step rate, compared with a bare loop on one batch.

    python -m scripts.bench train CACHE --backend xla --cores 1 --model cnn --batch-size 64

Rounds take turns. The bare loop is nothing but the model, its loss and its optimizer, over and over on one batch that
is on the device. Whether its idle figure is true is shown by `python -m scripts.bench feeds`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from torch.nn import functional

from scripts.bench.rounds import race, ratio, spread, spread_cell
from scripts.bench.table import add_race_options, as_markdown, as_text, parse_options, write_files
from tpucache import CachedDataset
from tpucache.ondevice.modules import Normalise
from tpucache.training.device import Device, open_device
from tpucache.training.feed.idle import Pace
from tpucache.training.learn.model import build_model
from tpucache.training.loop import train
from tpucache.training.run_options import RunOptions
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


def compare_rates(
    dataset: CachedDataset, settings: TrainSettings, device: Device, rounds: int
) -> tuple[dict[str, Any], list[list[str]]]:
    """Return the figures of the harness and of a bare loop, and their table."""
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
        f"the device was idle for {found['device_idle']:.1%} of the time",
    ]
    print(as_text(rate_rows), *notes, sep="\n", flush=True)
    listed = [f"- {note}" for note in notes]
    write_files(options, found, "\n".join([as_markdown(rate_rows), *listed]) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="a cache that warmup built")
    parser.add_argument("--backend", choices=["torch", "xla"], default="xla", help="(%(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="of the backend (%(default)s)")
    parser.add_argument("--model", default="cnn", help="as `train` takes it (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images a batch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="of one round (%(default)s)")
    add_race_options(parser)
    return parse_options(parser)
