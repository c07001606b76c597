"""The three tasks of whole samples: how labels become targets, and outputs a loss and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tpucache.errors import UsageError
from tpucache.training.learn.metrics import class_metrics, multilabel_metrics, regression_metrics
from tpucache.training.learn.tasks.checks import (
    check_matrix,
    check_numbers,
    check_outputs,
    check_shape,
    class_weights,
    unfit,
)
from tpucache.training.settings import TaskName

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

Array = npt.NDArray[Any]

SEPARATOR: Final = ";"  # between the classes, or the values, of one sample in a CSV


class Watched(NamedTuple):
    """The metric that says which epoch is the best one, and whether more of it is better."""

    metric: str
    more_is_better: bool


@dataclass(frozen=True)
class SampleTask:
    """What tasks share whose labels are in the samples table, and whose outputs are (batch, outputs)."""

    outputs: int

    dense: ClassVar = False
    scores_add_up: ClassVar = False

    def label_batches(self, dataset: CachedDataset) -> Iterator[Array]:
        """Yield all labels at once: they are in memory."""
        yield dataset.labels.numpy()

    def labels(self, _fields: Mapping[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return the labels that come with a batch."""
        return labels

    def check_outputs(self, outputs: object, samples: int, source: str) -> None:
        """Raise UsageError unless outputs are floating-point (samples, outputs)."""
        check_outputs(outputs, (samples, self.outputs), self.dense, source)


@dataclass(frozen=True)
class Classes(SampleTask):
    """One class a sample: labels (batch,), cross-entropy."""

    name: TaskName = "classes"
    watched: ClassVar = Watched("accuracy", True)

    @staticmethod
    def count_outputs(dataset: CachedDataset, _mask_classes: int | None) -> int:
        """Return the number of classes. Raises UsageError for fewer than two."""
        if len(dataset.classes) < 2:
            has = f"one class alone, {dataset.classes[0]!r}" if dataset.classes else "no classes"
            raise UsageError(
                f"the cache has {has}, and there are at least 2 to tell apart: "
                "warm it up from a folder with one subfolder a class"
            )
        return len(dataset.classes)

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are class numbers below `outputs`."""
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise unfit(self.name, "one class number a sample", labels)
        without = np.flatnonzero(labels == -1)
        first = f", the first at position {without[0]}" if len(without) else ""
        hint = f". {len(without):,} samples have no label, -1{first}: leave them out" if first else ""
        check_numbers(labels, self.outputs, hint)

    def count(self, labels: Array) -> Array:
        """Return how many samples each class has: int64 (outputs,)."""
        return np.bincount(labels, minlength=self.outputs)

    def weights(self, wanted: str | Sequence[float] | None, counts: Array) -> torch.Tensor | None:
        """Return n / (classes * samples of the class) when "balanced" (King and Zeng, 2001), or the list."""
        return class_weights(wanted, self.outputs, counts, counts.sum() / self.outputs)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return 1 at the class, smoothed towards 1 / outputs everywhere; a label of -1 is of no class."""
        return smooth(one_hot(labels, self.outputs), smoothing, 1 / self.outputs)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean cross-entropy, each class times its weight.

        The mean is over samples, not over their weights, so that the mean of small batches is that of a large one.
        """
        check_shape(outputs, targets.shape)
        return functional.cross_entropy(outputs.float(), targets, weights)

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's cross-entropy; 0 for a label of -1."""
        targets = self.targets(labels)
        check_shape(outputs, targets.shape)
        return functional.cross_entropy(outputs.float(), targets, reduction="none")

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities that add up to 1: float32 (batch, outputs)."""
        return outputs.float().softmax(1)

    def scores(self, outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        """Return the predictions."""
        return self.predictions(outputs)

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return accuracy, F1 and AUC."""
        return class_metrics(scores, labels)

    def describe(self, values: Array, names: Sequence[str]) -> str:
        """Return the name of the most probable class."""
        return names[int(values.argmax())]


@dataclass(frozen=True)
class Multilabel(SampleTask):
    """Any number of classes a sample: labels (batch, outputs) of 0 and 1, binary cross-entropy."""

    name: TaskName = "multilabel"
    watched: ClassVar = Watched("loss", False)

    @staticmethod
    def count_outputs(dataset: CachedDataset, _mask_classes: int | None) -> int:
        """Return the number of columns of the labels."""
        return columns_of(dataset)

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are (n, outputs) between 0 and 1."""
        check_matrix(self.name, labels, self.outputs)
        if len(labels) and not (labels.min() >= 0 and labels.max() <= 1):
            raise UsageError(f"labels of many classes are 0 or 1, not {labels.min():g} to {labels.max():g}")

    def count(self, labels: Array) -> Array:
        """Return how many ones and how many zeros each class has: float64 (2, outputs)."""
        ones = labels.sum(0, dtype=np.float64)
        return np.stack([ones, len(labels) - ones])

    def weights(self, wanted: str | Sequence[float] | None, counts: Array) -> torch.Tensor | None:
        """Return the weight of a class's ones: its zeros over its ones when "balanced", or the list."""
        return class_weights(wanted, self.outputs, counts[0], counts[1])

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the labels, smoothed towards one half."""
        return smooth(labels.float(), smoothing, 0.5)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean binary cross-entropy over samples and classes, ones times their class's weight."""
        check_shape(outputs, targets.shape)
        return functional.binary_cross_entropy_with_logits(outputs.float(), targets, pos_weight=weights)

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's binary cross-entropy, the mean over its classes."""
        check_shape(outputs, labels.shape)
        return functional.binary_cross_entropy_with_logits(outputs.float(), labels.float(), reduction="none").mean(1)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return a probability a class: float32 (batch, outputs)."""
        return outputs.float().sigmoid()

    def scores(self, outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        """Return the predictions."""
        return self.predictions(outputs)

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return the share of right answers, F1 and AUC."""
        return multilabel_metrics(scores, labels)

    def describe(self, values: Array, names: Sequence[str]) -> str:
        """Return the names of the classes above one half."""
        return SEPARATOR.join(name for name, value in zip(names, values, strict=True) if value > 0.5)


@dataclass(frozen=True)
class Regression(SampleTask):
    """Numbers: labels (batch, outputs), mean squared error."""

    name: TaskName = "regression"
    watched: ClassVar = Watched("rmse", False)

    @staticmethod
    def count_outputs(dataset: CachedDataset, _mask_classes: int | None) -> int:
        """Return the number of columns of the labels."""
        return columns_of(dataset)

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are finite (n, outputs)."""
        check_matrix(self.name, labels, self.outputs)

    def count(self, labels: Array) -> Array:
        """Return nothing to balance by: (0,)."""
        return np.empty(0, labels.dtype)

    def weights(self, wanted: str | Sequence[float] | None, counts: Array) -> torch.Tensor | None:
        """Return the list: a weight a column. Raises UsageError for "balanced", as there are no classes."""
        if isinstance(wanted, str):
            raise UsageError(f"regression has no classes whose weights could be {wanted}: leave class weights out")
        return class_weights(wanted, self.outputs, counts, None)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the labels. Raises UsageError for smoothing, which is of classes."""
        if smoothing:
            raise UsageError("regression has no classes to smooth labels over: leave label smoothing out")
        return labels.float()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean squared error over samples and columns, each column times its weight."""
        check_shape(outputs, targets.shape)
        squares = (outputs.float() - targets).square()
        return (squares if weights is None else squares * weights).mean()

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's squared error, the mean over its columns."""
        check_shape(outputs, labels.shape)
        return (outputs.float() - labels.float()).square().mean(1)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs: float32 (batch, outputs)."""
        return outputs.float()

    def scores(self, outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        """Return the predictions."""
        return self.predictions(outputs)

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return the root of the mean squared error."""
        return regression_metrics(scores, labels)

    def describe(self, values: Array, _names: Sequence[str]) -> str:
        """Return the values."""
        return SEPARATOR.join(map(str, values))


def columns_of(dataset: CachedDataset) -> int:
    """Return the number of columns of a cache's labels; for class numbers that of the classes."""
    return dataset.labels.shape[1] if dataset.labels.dim() == 2 else len(dataset.classes)


def one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
    """Return float32 (batch, classes, …): 1 at the number, nothing for a number that is no class."""
    places = torch.arange(classes, device=numbers.device).view(1, -1, *[1] * (numbers.dim() - 1))
    return (numbers[:, None] == places).float()


def smooth(targets: torch.Tensor, smoothing: float, towards: float | torch.Tensor) -> torch.Tensor:
    """Return targets moved by the share `smoothing` to `towards`. Raises UsageError unless it is within [0, 1)."""
    if not 0 <= smoothing < 1:
        raise UsageError(f"label smoothing is at least 0 and below 1, not {smoothing}")
    return targets * (1 - smoothing) + smoothing * towards if smoothing else targets
