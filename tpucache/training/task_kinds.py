"""The four tasks: how labels become targets, and outputs a loss and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tpucache.errors import UsageError
from tpucache.training.metrics import class_metrics, mask_metrics, multilabel_metrics, regression_metrics

Array = npt.NDArray[Any]
TaskName = Literal["classes", "multilabel", "regression", "mask"]

#: A mask's pixels of this number belong to no class, and count nowhere (as in PASCAL VOC).
VOID: Final = 255


@dataclass(frozen=True)
class Classes:
    """One class a sample: labels (batch,), cross-entropy."""

    outputs: int
    name: TaskName = "classes"

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are class numbers below `outputs`."""
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise _unfit(self.name, "one class number a sample", labels)
        _check_numbers(labels, self.outputs)

    def weights(self, wanted: str | Sequence[float] | None, labels: Array) -> torch.Tensor | None:
        """Return n / (classes * samples of the class) when "balanced" (King and Zeng, 2001), or the list."""
        if not isinstance(wanted, str):
            return _listed(wanted, self.outputs)
        counts = np.bincount(labels, minlength=self.outputs)
        return _balanced(wanted, counts, counts.sum() / self.outputs)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return 1 at the class, smoothed towards 1 / outputs everywhere; a label of -1 is of no class."""
        return _smooth(_one_hot(labels, self.outputs), smoothing, 1 / self.outputs)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean cross-entropy, each class times its weight.

        The mean is over samples, not over their weights, so that the mean of small batches is that of a large one.
        """
        _fit(outputs, targets.shape)
        return functional.cross_entropy(outputs.float(), targets, weights)

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's cross-entropy; 0 for a label of -1."""
        targets = self.targets(labels)
        _fit(outputs, targets.shape)
        return functional.cross_entropy(outputs.float(), targets, reduction="none")

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities that add up to 1: float32 (batch, outputs)."""
        return outputs.float().softmax(1)

    def metrics(self, predictions: Array, labels: Array) -> dict[str, float]:
        """Return accuracy, F1 and AUC."""
        return class_metrics(predictions, labels)


@dataclass(frozen=True)
class Multilabel:
    """Any number of classes a sample: labels (batch, outputs) of 0 and 1, binary cross-entropy."""

    outputs: int
    name: TaskName = "multilabel"

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are (n, outputs) between 0 and 1."""
        _check_matrix(self.name, labels, self.outputs)
        if len(labels) and not (labels.min() >= 0 and labels.max() <= 1):
            raise UsageError(f"labels of many classes are 0 or 1, not {labels.min():g} to {labels.max():g}")

    def weights(self, wanted: str | Sequence[float] | None, labels: Array) -> torch.Tensor | None:
        """Return the weight of a class's ones: its zeros over its ones when "balanced", or the list."""
        if not isinstance(wanted, str):
            return _listed(wanted, self.outputs)
        ones = labels.sum(0, dtype=np.float64)
        return _balanced(wanted, ones, len(labels) - ones)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the labels, smoothed towards one half."""
        return _smooth(labels.float(), smoothing, 0.5)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean binary cross-entropy over samples and classes, ones times their class's weight."""
        _fit(outputs, targets.shape)
        return functional.binary_cross_entropy_with_logits(outputs.float(), targets, pos_weight=weights)

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's binary cross-entropy, the mean over its classes."""
        _fit(outputs, labels.shape)
        return functional.binary_cross_entropy_with_logits(outputs.float(), labels.float(), reduction="none").mean(1)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return a probability a class: float32 (batch, outputs)."""
        return outputs.float().sigmoid()

    def metrics(self, predictions: Array, labels: Array) -> dict[str, float]:
        """Return the share of right answers, F1 and AUC."""
        return multilabel_metrics(predictions, labels)


@dataclass(frozen=True)
class Regression:
    """Numbers: labels (batch, outputs), mean squared error."""

    outputs: int
    name: TaskName = "regression"

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are finite (n, outputs)."""
        _check_matrix(self.name, labels, self.outputs)

    def weights(self, wanted: str | Sequence[float] | None, labels: Array) -> torch.Tensor | None:
        """Return the list: a weight a column. Raises UsageError for "balanced", as there are no classes."""
        if isinstance(wanted, str):
            raise UsageError(f"regression has no classes whose weights could be {wanted}: leave class weights out")
        return _listed(wanted, self.outputs)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the labels. Raises UsageError for smoothing, which is of classes."""
        if smoothing:
            raise UsageError("regression has no classes to smooth labels over: leave label smoothing out")
        return labels.float()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean squared error over samples and columns, each column times its weight."""
        _fit(outputs, targets.shape)
        squares = (outputs.float() - targets).square()
        return (squares if weights is None else squares * weights).mean()

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's squared error, the mean over its columns."""
        _fit(outputs, labels.shape)
        return (outputs.float() - labels.float()).square().mean(1)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs: float32 (batch, outputs)."""
        return outputs.float()

    def metrics(self, predictions: Array, labels: Array) -> dict[str, float]:
        """Return the root of the mean squared error."""
        return regression_metrics(predictions, labels)


@dataclass(frozen=True)
class Mask:
    """One class a pixel: labels (batch, height, width) of class numbers, 255 where there is none; cross-entropy."""

    outputs: int
    name: TaskName = "mask"

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are (n, height, width) of numbers below `outputs`, or 255."""
        if labels.ndim != 3 or labels.dtype.kind not in "iu":
            raise _unfit(self.name, "a class number a pixel", labels)
        _check_numbers(labels[labels != VOID], self.outputs)

    def weights(self, wanted: str | Sequence[float] | None, labels: Array) -> torch.Tensor | None:
        """Return pixels / (classes * pixels of the class) when "balanced", or the list."""
        if not isinstance(wanted, str):
            return _listed(wanted, self.outputs)
        counts = np.bincount(labels[labels != VOID].reshape(-1), minlength=self.outputs)
        return _balanced(wanted, counts, counts.sum() / self.outputs)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return 1 at each pixel's class, smoothed; 0 everywhere at a pixel of no class."""
        one_hot = _one_hot(labels, self.outputs)
        return _smooth(one_hot, smoothing, one_hot.sum(1, keepdim=True) / self.outputs)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean cross-entropy over the pixels that have a class, each class times its weight."""
        _fit(outputs, targets.shape)
        pixels = functional.cross_entropy(outputs.float(), targets, weights, reduction="none")
        return pixels.sum() / targets.sum().clamp(min=1)

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's cross-entropy, the mean over its pixels that have a class."""
        targets = self.targets(labels)
        _fit(outputs, targets.shape)
        pixels = functional.cross_entropy(outputs.float(), targets, reduction="none")
        return pixels.sum((1, 2)) / targets.sum((1, 2, 3)).clamp(min=1)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities that add up to 1 in each pixel: float32 (batch, outputs, height, width)."""
        return outputs.float().softmax(1)

    def confusion(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's count of pixels by class and predicted class: float32 (batch, outputs, outputs).

        Takes the model's outputs, or predictions. Exact for images of up to 2^24 pixels; add samples up in float64.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            truth = self.targets(labels).flatten(2)
            _fit(outputs, (*truth.shape[:2], *labels.shape[1:]))
            predicted = _one_hot(outputs.argmax(1), self.outputs).flatten(2)
            return truth @ predicted.transpose(1, 2)

    def metrics(self, predictions: Array, labels: Array) -> dict[str, float]:
        """Return pixel accuracy and IoU; for many samples, add up `confusion` and use `mask_metrics`."""
        shape = torch.from_numpy(predictions), torch.from_numpy(labels)
        return mask_metrics(self.confusion(*shape).double().sum(0).numpy())


def _one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
    """Return float32 (batch, classes, …): 1 at the number, nothing for a number that is no class."""
    places = torch.arange(classes, device=numbers.device).view(1, -1, *[1] * (numbers.dim() - 1))
    return (numbers[:, None] == places).float()


def _smooth(targets: torch.Tensor, smoothing: float, towards: float | torch.Tensor) -> torch.Tensor:
    if not 0 <= smoothing < 1:
        raise UsageError(f"label smoothing is at least 0 and below 1, not {smoothing}")
    return targets * (1 - smoothing) + smoothing * towards if smoothing else targets


def _fit(outputs: torch.Tensor, shape: Sequence[int]) -> None:
    if tuple(outputs.shape) != tuple(shape):
        raise UsageError(
            f"the model gives {tuple(outputs.shape)}, the labels ask for {tuple(shape)}: use another model"
        )


def _check_numbers(numbers: Array, classes: int) -> None:
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < classes):
        raise UsageError(
            f"labels reach from {numbers.min()} to {numbers.max()}, and there are {classes} classes, numbered from 0"
        )


def _check_matrix(name: TaskName, labels: Array, outputs: int) -> None:
    if labels.ndim != 2 or labels.shape[1] != outputs:
        raise _unfit(name, f"{outputs} numbers a sample", labels)
    bad = np.flatnonzero(~np.isfinite(labels).all(1))
    if len(bad):
        raise UsageError(
            f"the labels of {len(bad)} samples are not finite, the first at position {bad[0]}: leave them out"
        )


def _unfit(name: TaskName, wanted: str, labels: Array) -> UsageError:
    return UsageError(
        f"the task {name!r} needs {wanted}, and labels are {labels.dtype} {labels.shape}: use another task"
    )


def _listed(wanted: Sequence[float] | None, outputs: int) -> torch.Tensor | None:
    if wanted is None:
        return None
    weights = torch.tensor(list(wanted), dtype=torch.float32)
    if len(weights) != outputs or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UsageError(f"class weights are {outputs} numbers of at least 0, not {list(wanted)}")
    return weights


def _balanced(wanted: str, counts: Array, over: Any) -> torch.Tensor:
    if wanted != "balanced":
        raise UsageError(f"class weights are balanced or a list of numbers, not {wanted!r}")
    # A class without a sample has no weight to find: it keeps 1.
    return torch.from_numpy(np.where(counts > 0, over / np.maximum(counts, 1), 1.0).astype(np.float32))
