"""Metrics over a whole dataset, exact whatever the last batch's size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tpucache.training.device import Device
from tpucache.training.feeder import DeviceBatch, Feeder


class Metrics(NamedTuple):
    """Means over `samples` samples."""

    loss: float
    accuracy: float
    samples: int


def evaluate(
    predict: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[Any], device: Device, batch_size: int
) -> Metrics:
    """Return loss and accuracy of `predict` (device images -> class scores) over host batches.

    The last batch is padded to `batch_size`, so that there is one graph, and its padding is masked out. Sums leave
    the device once, at the end, and are added up in float64.
    """
    sums = []
    with torch.no_grad(), Feeder(pad_last(batches, batch_size), device) as feeder:
        for batch in feeder:
            sums.append(_sums(predict, batch))
            device.step_end()
    totals = torch.zeros(3, dtype=torch.float64)
    for part in sums:
        totals += part.cpu().double()
    loss, correct, samples = totals.tolist()
    return Metrics(loss / samples, correct / samples, int(samples))


def pad_last(batches: Iterable[Any], batch_size: int) -> Iterator[Any]:
    """Yield batches, a short one padded with zeros, its labels with -1, which is never a class."""
    for images, labels in batches:
        missing = batch_size - len(images)
        if not missing:
            yield images, labels
            continue
        padded = images.new_zeros((batch_size, *images.permute(0, 2, 3, 1).shape[1:])).permute(0, 3, 1, 2)
        padded[: len(images)] = images
        yield padded, torch.cat([labels, labels.new_full((missing, *labels.shape[1:]), -1)])


def _sums(predict: Callable[[torch.Tensor], torch.Tensor], batch: DeviceBatch) -> torch.Tensor:
    """Return the sums of loss, hits and samples over the rows that are not padding: float32 (3,)."""
    scores = predict(batch.images).float()
    real = batch.labels >= 0
    losses = functional.cross_entropy(scores, batch.labels.clamp(min=0), reduction="none")
    hits = scores.argmax(1) == batch.labels
    return torch.stack([(losses * real).sum(), (hits & real).sum().float(), real.sum().float()])
