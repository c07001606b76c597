"""Images, their augmentation on the CPU, and a TPU's products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from tpucache.ondevice.draws import draw
from tpucache.ondevice.modules import Augment
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import Field

CPU = torch.device("cpu")
BATCH, HEIGHT, WIDTH = 24, 9, 12


def images_of(channels: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (BATCH, HEIGHT, WIDTH, channels), np.uint8))


def augment(
    settings: AugmentSettings, height: int = HEIGHT, width: int = WIDTH, channels: int = 3, dtype: str = "|u1"
) -> Augment:
    return Augment(settings, [0.0] * channels, [1.0] * channels, height, width, CPU, dtype)


def draws_of(settings: AugmentSettings, batch: int = BATCH, size: Any = (HEIGHT, WIDTH), step: int = 0) -> torch.Tensor:
    return torch.from_numpy(draw(settings, 0, step, batch, size))


def scene(height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    """Return a picture of shapes with soft edges, as photographs have them: uint8 (height, width, channels)."""
    random = np.random.default_rng(height * width)
    rows, columns = np.mgrid[:height, :width] / max(height, width)
    picture = np.zeros((height, width, channels))
    for _ in range(12):
        y, x, radius = random.random(3) * (1, 1, 0.4)
        distance = np.hypot(rows - y, columns - x) - radius
        share = 1 / (1 + np.exp(np.clip(distance * max(height, width) / 3, -30, 30)))[..., None]
        picture += share * (random.random(channels) * 255 - picture)
    return picture.round().astype(np.uint8)


def dataset_of(field: Field) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(fields=[field]))


@contextlib.contextmanager
def rounded_products() -> Iterator[list[int]]:
    """Let products of matrices round their operands to bfloat16, as a TPU's do. Yield a list with an item for each."""
    product, used = torch.matmul, list[int]()

    def rounded(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        used.append(1)
        return product(one.bfloat16().float(), other.bfloat16().float())

    with mock.patch.object(torch, "matmul", rounded), mock.patch.object(torch.Tensor, "__matmul__", rounded):
        yield used
