"""What finishing packed images costs the device: milliseconds an image, and the share of a training step.

    python -m scripts.bench finish CACHE --backend xla --steps --batch-size 8

Of each cache one packed batch is on the device and is finished over and over. With `--steps`, training steps of a
ResNet-50 on a batch of pixels take turns with the same steps that first make these pixels of a packed batch; the share
is what the second takes more than the first, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from scripts.bench.rounds import race, spread, spread_cell
from scripts.bench.table import add_race_options, as_markdown, as_text, parse_options, write_files
from scripts.commands import ROOT, CommandError, say
from tpucache import CachedDataset, CachedLoader
from tpucache.ondevice import Normalise, decoder
from tpucache.training.device import Device, open_device

_CLASSES: Final = 1000


def milliseconds_an_image(backend: str, caches: Mapping[str, Path]) -> dict[str, float]:
    """Return what finishing an image of each cache takes, in a process of its own. Raises CommandError."""
    command = [sys.executable, "-m", "scripts.bench", "finish", *map(str, caches.values()), "--backend", backend]
    done = subprocess.run([*command, "--as-json"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(done.stderr.strip().rpartition("\n")[2])
    found = json.loads(done.stdout)
    return {kind: found[str(path)]["milliseconds"]["median"] for kind, path in caches.items() if str(path) in found}


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


class Packed:
    """One packed batch of a cache, on a device, and the module that finishes it."""

    def __init__(self, dataset: CachedDataset, batch_size: int, device: Device) -> None:
        self.device = device
        batch = next(iter(CachedLoader(dataset, batch_size, finish="device")))[0]
        self.packed = device.put(batch.contiguous())
        self.decode = decoder(dataset).to(device.torch_device)
        device.wait()
        self.pixels: torch.Tensor = self.finish()
        device.step_end()
        device.wait()

    def finish(self) -> torch.Tensor:
        """Return the pixels, uint8 (batch, channels, height, width)."""
        images: torch.Tensor = self.decode(self.packed)
        return images

    def seconds(self, times: int) -> float:
        """Return how long finishing the batch takes, the mean of so many times."""
        self.device.wait()
        began = time.perf_counter()
        for _ in range(times):
            _kept = self.finish()  # what nothing refers to is not computed
            self.device.step_end()
        self.device.wait()
        return (time.perf_counter() - began) / times


def make_step(
    device: Device, batch_size: int, normalise: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Callable[[], torch.Tensor]], float]:
    """Return what trains a ResNet-50 for a step on the pixels that are made, and returns the seconds it took.

    `normalise` makes float32 (batch, 3, height, width) of them.
    """
    torch.manual_seed(0)
    model = resnet50().to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    labels = device.put(torch.arange(batch_size) % _CLASSES)
    device.wait()

    def step(pixels: Callable[[], torch.Tensor]) -> float:
        began = time.perf_counter()
        loss: Any = functional.cross_entropy(model(normalise(pixels())), labels)  # backward has no types
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        device.step_end()
        device.wait()
        return time.perf_counter() - began

    return step


def measure(cache: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the figures of a cache, or None where a device has nothing to finish."""
    dataset = CachedDataset(cache)
    if dataset.packed() is dataset:
        return None
    device = open_device(options.backend)
    packed = Packed(dataset, options.batch_size, device)
    packed.seconds(2)
    each = race({"decode": lambda: packed.seconds(options.times)}, options.rounds)["decode"]
    found = {"milliseconds": spread([1e3 * seconds / options.batch_size for seconds in each])}
    if options.steps:
        known = dataset.manifest.statistics
        normalise = Normalise(known.mean, known.std, device.torch_device)
        step = make_step(device, len(packed.packed), lambda pixels: normalise(pixels.permute(0, 2, 3, 1)))
        ways: dict[str, Callable[[], float]] = {
            "pixels": lambda: step(lambda: packed.pixels),
            "packed": lambda: step(packed.finish),
        }
        for _ in range(2):  # compiles
            for way in ways.values():
                way()
        seconds = race(ways, options.rounds)
        shares = [b / a - 1 for a, b in zip(seconds["pixels"], seconds["packed"], strict=True)]
        found |= {"step_seconds": spread(seconds["pixels"]), "share_of_step": spread(shares)}
        # The same from the time of decoding alone, which a busy machine disturbs less.
        found["decode_over_step"] = {"median": statistics.median(each) / statistics.median(seconds["pixels"])}
    return found


def to_rows(figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    rows = [["cache", "ms an image", "min - max", "step, s", "share of it, paired", "decoding over step"]]
    for cache, row in figures.items():
        each = row["milliseconds"]
        cells = ["", "", ""]
        if "step_seconds" in row:
            cells = [f"{row['step_seconds']['median']:.2f}"]
            cells += [f"{row[name]['median']:.1%}" for name in ("share_of_step", "decode_over_step")]
        rows.append([Path(cache).name, f"{each['median']:.2f}", spread_cell(each, ".2f"), *cells])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    figures = {}
    for cache in options.caches:
        found = measure(cache, options)
        if found is None:
            say(f"{cache}: its codec has no packed form")
        else:
            figures[str(cache)] = found
    print(json.dumps(figures) if options.as_json else as_text(to_rows(figures)), end="")
    write_files(options, figures, as_markdown(to_rows(figures)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="+", type=Path, metavar="CACHE", help="a cache that warmup built")
    parser.add_argument("--backend", choices=["torch", "xla"], default="xla", help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="images a batch (%(default)s)")
    parser.add_argument("--times", type=int, default=10, help="that a round finishes the batch (%(default)s)")
    parser.add_argument("--steps", action="store_true", help="compare with training steps of a ResNet-50")
    parser.add_argument("--as-json", action="store_true", help="print JSON, for other benchmarks")
    add_race_options(parser)
    return parse_options(parser)
