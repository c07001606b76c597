"""What augmenting on the device costs: milliseconds an image, operations, and the share of a training step.

    python -m scripts.bench augment --backend xla --steps

Each augmentation works on the same batch of random bytes. With `--steps`, its time is a share of a training step of a
ResNet-50 on that batch. Operations are counted once, by torch: two for each multiplication and addition of a product or
a convolution, and one for each number that any other operator makes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from scripts.bench.finish import make_step, resnet50
from scripts.bench.rounds import race, spread, spread_cell
from scripts.bench.table import add_race_options, as_markdown, as_text, parse_options, write_files
from tpucache.ondevice import Augment, AugmentSettings, draw
from tpucache.training.device import Device, open_device

SETTINGS: Final = {
    "flip": AugmentSettings(flip=True),
    "crop, flip": AugmentSettings(crop=True, flip=True),
    "tilt 30": AugmentSettings(tilt=30),
    "RandAugment 1": AugmentSettings(rand_augment=1),
    "RandAugment 2": AugmentSettings(rand_augment=2),
    "TrivialAugment": AugmentSettings(trivial_augment=True),
}
_SIDE: Final = 224
#: Operators that make no numbers, only another view of some.
_VIEWS: Final = ("view", "reshape", "slice", "select", "permute", "transpose", "expand", "unsqueeze", "detach", "alias")
_Counted = dict[str, int]


class OtherOperations(TorchDispatchMode):
    """Counts the numbers that operators make which are no products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(made, torch.Tensor) and not name.startswith((*_VIEWS, "bmm", "mm", "addmm", "convolution")):
            # A sum or a mean reads more numbers than it makes.
            self.count += max(made.numel(), *(arg.numel() for arg in args if isinstance(arg, torch.Tensor)), 0)
        return made


def count_operations(work: Callable[[], Any]) -> _Counted:
    """Return the operations of some work of torch on the CPU: in products, and in all else."""
    products, others = FlopCounterMode(display=False), OtherOperations()
    with products, others:
        work()
    return {"products": products.get_total_flops(), "others": others.count}


def augmenter(settings: AugmentSettings, batch_size: int, device: Device) -> Callable[[], torch.Tensor]:
    """Return what augments a batch of random bytes, which is on the device already."""
    rng = np.random.default_rng(0)
    images = device.put(torch.from_numpy(rng.integers(0, 256, (batch_size, _SIDE, _SIDE, 3), np.uint8)))
    draws = device.put(torch.from_numpy(draw(settings, 0, 0, batch_size, (_SIDE, _SIDE))))
    augment = Augment(settings, [127.5] * 3, [64.0] * 3, _SIDE, _SIDE, device.torch_device)
    return lambda: augment.images(images, draws)


def step_operations(batch_size: int) -> _Counted:
    """Return the operations of a training step of a ResNet-50."""
    model, images = resnet50(), torch.zeros(batch_size, 3, _SIDE, _SIDE)

    def step() -> None:
        loss: Any = functional.cross_entropy(model(images), torch.zeros(batch_size, dtype=torch.int64))
        loss.backward()

    return count_operations(step)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each augmentation."""
    device, size = open_device(options.backend), options.batch_size
    works = {name: augmenter(settings, size, device) for name, settings in SETTINGS.items()}
    cpu = open_device("torch", device="cpu")

    def seconds(work: Callable[[], torch.Tensor]) -> float:
        device.wait()
        began = time.perf_counter()
        _kept = work()  # what nothing refers to is not computed
        device.step_end()
        device.wait()
        return time.perf_counter() - began

    for work in works.values():  # compiles
        seconds(work)
    ways = {name: functools.partial(seconds, work) for name, work in works.items()}
    if options.steps:
        step = make_step(device, size, lambda pixels: pixels)
        pixels = works["flip"]()
        device.step_end()
        ways["step"] = functools.partial(step, lambda: pixels)
        for _ in range(2):
            ways["step"]()
    found = race(ways, options.rounds)
    whole, step_seconds = step_operations(2), found.pop("step", None)
    figures: dict[str, Any] = {}
    for name, each in found.items():
        counted = count_operations(augmenter(SETTINGS[name], 8, cpu))
        figures[name] = {
            "milliseconds": spread([1e3 * one / size for one in each]),
            "operations_an_image": {kind: count / 8 for kind, count in counted.items()},
            "share_of_operations": sum(counted.values()) / 8 / (sum(whole.values()) / 2),
        }
        if step_seconds:
            figures[name]["share_of_step"] = statistics.median(each) / statistics.median(step_seconds)
    return {"augmentations": figures, "step_seconds": spread(step_seconds) if step_seconds else None}


def to_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    rows = [["augmentation", "ms an image", "min - max", "MFLOP an image", "of the step's", "of the step's time"]]
    for name, row in figures["augmentations"].items():
        each, operations = row["milliseconds"], sum(row["operations_an_image"].values())
        share = f"{row['share_of_step']:.1%}" if "share_of_step" in row else ""
        cells = [f"{operations / 1e6:,.0f}", f"{row['share_of_operations']:.2%}", share]
        rows.append([name, f"{each['median']:.2f}", spread_cell(each, ".2f"), *cells])
    return rows


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    figures = measure(options)
    print(json.dumps(figures) if options.as_json else as_text(to_rows(figures)), end="")
    write_files(options, figures, as_markdown(to_rows(figures)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["torch", "xla"], default="xla", help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="images a batch (%(default)s)")
    parser.add_argument("--steps", action="store_true", help="compare with training steps of a ResNet-50")
    parser.add_argument("--as-json", action="store_true", help="print JSON, for other benchmarks")
    add_race_options(parser)
    return parse_options(parser)
