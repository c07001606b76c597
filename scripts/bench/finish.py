"""What finishing packed images costs the device: milliseconds an image, and the share of a training step.

    python -m scripts.bench finish CACHE --backend xla --to 112

One packed batch of each cache is on the device and is finished over and over: whole, and in another size `--to`.
Training steps of a ResNet-50 on a batch of pixels take turns with that.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from scripts.bench.rounds import race, ratio, spread, spread_cell
from scripts.bench.table import Rows, add_race_options, parse_options, show
from tpucache import CachedDataset, CachedLoader
from tpucache.ondevice import Normalise, decoder
from tpucache.training.device import Device, open_device

_CLASSES: Final = 1000
_STEP: Final = "a training step"


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a skip connection (He et al., arXiv:1512.03385)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, width, 1, 1),
            nn.ReLU(inplace=True),
            _conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            _conv(width, 4 * width, 1, 1),
        )
        is_same = stride == 1 and inputs == 4 * width
        self.skip = nn.Identity() if is_same else _conv(inputs, 4 * width, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(images) + self.skip(images))


def resnet50() -> nn.Module:
    """Return the ResNet-50 of arXiv:1512.03385."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, _CLASSES))


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


def finishing(dataset: CachedDataset, size: int | None, device: Device, batch_size: int) -> Callable[[], Any]:
    """Return what finishes one packed batch, which is on the device."""
    images, _ = next(iter(CachedLoader(dataset, batch_size, finish="device")))
    packed, decode = device.put(images.contiguous()), decoder(dataset, size).to(device.torch_device)
    return lambda: decode(packed)


def training(dataset: CachedDataset, device: Device, batch_size: int) -> Callable[[], Any]:
    """Return what trains a ResNet-50 for a step on pixels that are on the device."""
    torch.manual_seed(0)
    model = resnet50().to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    known, (height, width, _) = dataset.manifest.statistics, dataset.manifest.fields[0].shape
    normalise = Normalise(known.mean, known.std, device.torch_device)
    pixels = device.put(torch.zeros(batch_size, height, width, 3, dtype=torch.uint8))
    labels = device.put(torch.arange(batch_size) % _CLASSES)

    def step() -> None:
        loss: Any = functional.cross_entropy(model(normalise(pixels)), labels)  # backward has no types
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def milliseconds(work: Callable[[], Any], times: int, device: Device, batch_size: int) -> float:
    """Return what some work takes for an image of the batch, the mean of so many times."""
    device.wait()
    began = time.perf_counter()
    for _ in range(times):
        _kept = work()  # what nothing refers to is not computed
        device.step_end()
    device.wait()
    return 1e3 * (time.perf_counter() - began) / times / batch_size


def to_rows(found: dict[str, list[float]]) -> Rows:
    """Return the rows of the table, its heading first."""
    rows = [["", "ms an image", "min - max", "of a step"]]
    for name, each in found.items():
        share = ratio(each, found[_STEP])
        rows.append([name, f"{statistics.median(each):.2f}", spread_cell(spread(each), ".2f"), f"{share:.2%}"])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    device, size = open_device(options.backend), options.batch_size
    works = {
        f"{cache.name} to {to or 'its size'}": finishing(CachedDataset(cache), to, device, size)
        for cache in options.caches
        for to in (None, options.to)
    }
    works[_STEP] = training(CachedDataset(options.caches[0]), device, size)
    turns = {
        name: functools.partial(milliseconds, work, 1 if name == _STEP else options.times, device, size)
        for name, work in works.items()
    }
    race(turns, 2)  # compiles
    found = race(turns, options.rounds)
    note = f"backend {options.backend}, batches of {size}; medians of {options.rounds} rounds."
    show(options, {"milliseconds": found}, [("", to_rows(found))], [note])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="+", type=Path, metavar="CACHE", help="a cache of a codec with a packed form")
    parser.add_argument("--backend", choices=["torch", "xla"], default="xla", help="(%(default)s)")
    parser.add_argument("--to", type=int, default=112, help="the other size, in pixels (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="images a batch (%(default)s)")
    parser.add_argument("--times", type=int, default=10, help="that a round finishes the batch (%(default)s)")
    add_race_options(parser)
    return parse_options(parser)
