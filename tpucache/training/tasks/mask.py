"""Segmentation: one class for each pixel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.store.fields import MASK
from tpucache.training.metrics import mask_metrics
from tpucache.training.tasks.losses import OF_SAMPLES, cross_entropy, dice, dice_cross_entropy, focal
from tpucache.training.tasks.task import (
    Form,
    Task,
    Value,
    Watched,
    check_numbers,
    check_shape,
    one_hot,
    smooth,
    unfit,
)

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


#: The value of pixels that belong to no class and are ignored (as in PASCAL VOC).
VOID: Final = 255

_MOST_IGNORED: Final = 0.99


@dataclass(frozen=True)
class Mask(Task):
    """One class for each pixel: labels (batch, height, width), 255 for a pixel without a class."""

    name: str = "mask"
    form: ClassVar[Form] = "maps"
    least_outputs: ClassVar = 2
    watched: ClassVar = Watched("iou", True)
    metric_names: ClassVar = ("accuracy", "iou")
    named_losses: ClassVar = {
        "cross-entropy": cross_entropy,
        "focal": focal,
        "dice": dice,
        "dice-cross-entropy": dice_cross_entropy,
    }

    @classmethod
    def count_outputs(cls, dataset: CachedDataset, mask_classes: int | None) -> int:
        if MASK not in dataset.names:
            raise UsageError(
                "the cache has no masks: warm it up from a .csv with --mask-col, and give their number of classes, "
                "--mask-classes"
            )
        if mask_classes is None:
            raise UsageError("a cache does not say how many classes its masks have: give --mask-classes")
        if mask_classes > VOID:
            raise UsageError(
                f"masks have at most {VOID} classes, 0 to {VOID - 1}, as {VOID} is no class, not --mask-classes "
                f"{mask_classes}: give the number of classes in the masks"
            )
        return mask_classes

    def inputs(self, fields: Mapping[str, Value]) -> dict[str, Value]:
        return {name: value for name, value in fields.items() if name != MASK}

    def class_names(self, _classes: Sequence[str]) -> tuple[str, ...]:
        return ()  # a cache has no names for the classes of pixels

    def label_batches(self, dataset: CachedDataset) -> Iterator[Array]:
        # If the dataset changes the variant in each epoch, the masks are those of the current variant.
        return map(_without_channel, dataset.field_batches(MASK))

    def labels(self, fields: Mapping[str, torch.Tensor], _labels: torch.Tensor) -> torch.Tensor:
        return fields[MASK][..., 0]

    def check(self, labels: Array) -> None:
        if labels.ndim != 3 or labels.dtype.kind not in "iu":
            raise unfit(self.name, "a class number for each pixel", labels)
        check_numbers(labels[labels != VOID], self.outputs)

    def check_dataset(self, dataset: CachedDataset, *, is_learned: bool) -> None:
        counts, pixels = np.zeros(self.outputs, np.int64), 0
        for labels in self.label_batches(dataset):
            self.check(labels)
            counts += np.bincount(labels[labels != VOID], minlength=self.outputs)
            pixels += labels.size
        ignored = 1 - float(counts.sum()) / max(pixels, 1)
        if is_learned and (ignored >= _MOST_IGNORED or (ignored > 0 and not counts[1:].any())):
            raise UsageError(
                f"{ignored:.1%} of the masks' pixels are {VOID}, which belongs to no class and is ignored, and the "
                f"others have {np.count_nonzero(counts)} of {self.outputs} classes: there is nothing to learn. If the "
                "masks are black and white, warm them up again with --mask-values scale"
            )

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        classes = one_hot(labels, self.outputs)
        return smooth(classes, smoothing, classes.sum(1, keepdim=True) / self.outputs)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        check_shape(outputs, targets.shape)
        each = self._loss(outputs, targets)
        return each.mean() if self.loss_name in OF_SAMPLES else each.sum() / targets.sum().clamp(min=1)

    def share(self, targets: torch.Tensor) -> torch.Tensor | None:
        return None if self.loss_name in OF_SAMPLES else targets.sum() / (targets.numel() // targets.shape[1])

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = self.targets(labels)
        check_shape(outputs, targets.shape)
        each = self._loss(outputs, targets)
        return each if self.loss_name in OF_SAMPLES else each.sum((1, 2)) / targets.sum((1, 2, 3)).clamp(min=1)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.float().softmax(1)

    def scores(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.confusion(outputs, labels)

    def confusion(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's confusion matrix, in pixels by true and predicted class.

        The result is float32 (batch, outputs, outputs). The counts are exact for images of up to 2^24 pixels; add
        samples up in float64. The matrix is NaN for a sample if a pixel's largest output is not finite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            truth = self.targets(labels).flatten(2)
            check_shape(outputs, (*truth.shape[:2], *labels.shape[1:]))
            predicted = one_hot(outputs.argmax(1), self.outputs).flatten(2)
            counts = truth @ predicted.transpose(1, 2)
            return torch.where(self.is_finite(outputs).view(-1, 1, 1), counts, torch.nan)

    def is_finite(self, predictions: torch.Tensor) -> torch.Tensor:
        # Not by max: XLA's ignores NaN, and begins at the lowest finite number. Not by isneginf and isposinf either:
        # PyTorch/XLA lacks them, and would read the outputs back and compile a graph in each batch.
        has_none = (predictions == -torch.inf).all(1) | (predictions.isnan() | (predictions == torch.inf)).any(1)
        return ~has_none.flatten(1).any(1)

    def collect(self, scores: Array) -> Array:
        total: Array = scores.astype(np.float64).sum(0, keepdims=True)
        return total

    def metrics(self, scores: Array, _labels: Array) -> dict[str, float]:
        return mask_metrics(scores.astype(np.float64).sum(0))

    def errors(self, scores: Array, _labels: Array) -> Array:
        counts = scores.astype(np.float64)
        right = counts.diagonal(axis1=1, axis2=2)
        union = counts.sum(1) + counts.sum(2) - right
        present = union > 0
        shares = np.divide(right, union, out=np.zeros_like(right), where=present).sum(1)
        return np.where(present.any(1), 1 - shares / np.maximum(present.sum(1), 1), 0)

    def record(self, scores: Array, _labels: Array) -> dict[str, Array]:
        return {"confusion": scores.sum(0)}

    def describe(self, values: Array, _names: Sequence[str]) -> str:
        raise UsageError(f"a map of classes, {values.shape}, cannot be described by text: show it as an image")


def _without_channel(masks: Array) -> Array:
    if masks.ndim != 4 or masks.shape[3] != 1:
        raise UsageError(
            f"masks are (height, width, 1) in a record, not {masks.shape[1:]}: build the cache again with such masks"
        )
    return masks[..., 0]
