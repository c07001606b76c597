"""Classification: one class for each sample, or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch.nn import functional

from tpucache.errors import UsageError
from tpucache.redact import join_names
from tpucache.training.learn.losses import binary_cross_entropy, binary_focal, cross_entropy, focal
from tpucache.training.learn.metrics import (
    balanced_accuracy,
    class_metrics,
    log_loss,
    mcc,
    mean_average_precision,
    multilabel_metrics,
    quadratic_kappa,
    top5,
)
from tpucache.training.learn.tasks.task import (
    SampleTask,
    Watched,
    check_matrix,
    check_numbers,
    check_shape,
    check_without_masks,
    class_weights,
    one_hot,
    smooth,
    unfit,
)
from tpucache.types import Array

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


@dataclass(frozen=True)
class Classes(SampleTask):
    """One class for each sample: labels (batch,). The default loss is cross-entropy."""

    name: str = "classes"
    loss_name: str = ""
    least_outputs: ClassVar = 2
    watched: ClassVar = Watched("accuracy", True)
    metric_names: ClassVar = ("accuracy", "f1", "auc")
    named_losses: ClassVar = {"cross-entropy": cross_entropy, "focal": focal, "bce": binary_cross_entropy}
    named_metrics: ClassVar = {
        "quadratic_kappa": quadratic_kappa,
        "balanced_accuracy": balanced_accuracy,
        "mcc": mcc,
        "top5": top5,
        "log_loss": log_loss,
        "mean_average_precision": mean_average_precision,
    }

    @classmethod
    def count_outputs(cls, dataset: CachedDataset, mask_classes: int | None) -> int:
        """Return the number of classes. Raises UsageError for fewer than two."""
        check_without_masks(cls.name, mask_classes)
        if len(dataset.classes) < 2:
            has = f"only one class, {dataset.classes[0]!r}" if dataset.classes else "no classes"
            raise UsageError(
                f"the cache has {has}, and this task needs at least 2: "
                "warm it up from a folder with one subfolder a class"
            )
        return len(dataset.classes)

    @property
    def has_thresholds(self) -> bool:
        """Whether predictions depend on a threshold.

        This is so for two classes: the probability of the second class is compared with the threshold.
        """
        return self.outputs == 2

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are class numbers below `outputs`."""
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise unfit(self.name, "one class number for each sample", labels)
        without = np.flatnonzero(labels == -1)
        first = f", the first at position {without[0]}" if len(without) else ""
        hint = f". {len(without):,} samples have no label, -1{first}: leave them out" if first else ""
        check_numbers(labels, self.outputs, hint)

    def count(self, labels: Array) -> Array:
        """Return the number of samples of each class: int64 (outputs,)."""
        return np.bincount(labels, minlength=self.outputs)

    def weights(self, wanted: str | Sequence[float] | None, counts: Array) -> torch.Tensor | None:
        """Return a weight for each class, float32 (outputs,); None if `wanted` is None.

        With "balanced" it is samples / (classes * samples of the class) (King and Zeng, 2001). A list is used as it is.
        """
        return class_weights(wanted, self.outputs, counts, counts.sum() / self.outputs)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return 1 for the class and 0 for the others, or only 0 for a label of -1, smoothed towards 1 / outputs.

        Labels (batch, outputs) are soft labels: probabilities, times the sample's weight. They are returned, smoothed
        towards weight / outputs. They add up to the weight, so the cross-entropy is multiplied by it.
        """
        if labels.dim() == 2:
            return smooth(labels.float(), smoothing, labels.float().sum(1, keepdim=True) / self.outputs)
        return smooth(one_hot(labels, self.outputs), smoothing, 1 / self.outputs)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean loss, with each class multiplied by its weight.

        The mean is over samples, not over weights, so that the mean of small batches equals that of one large batch.
        """
        check_shape(outputs, targets.shape)
        return self._loss(outputs, targets, weights).mean()

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's loss; 0 for a label of -1."""
        targets = self.targets(labels)
        check_shape(outputs, targets.shape)
        return self._loss(outputs, targets, None) * (labels >= 0)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities that add up to 1: float32 (batch, outputs).

        With binary cross-entropy, the probabilities are the outputs' sigmoids divided by their sum.
        """
        # Computed as the softmax of the sigmoids' logarithms: a small sum cannot become 0 / 0.
        logarithms = -functional.softplus(-outputs.float()) if self.loss_name == "bce" else outputs.float()
        return logarithms.softmax(1)

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return accuracy, F1 and AUC."""
        return class_metrics(scores, labels)

    def errors(self, scores: Array, labels: Array) -> Array:
        """Return 1 minus the probability of the right class; 0 for a label of -1."""
        right = np.take_along_axis(scores, np.maximum(labels, 0)[:, None], 1)[:, 0]
        return np.where(labels >= 0, 1 - right, 0)

    def record(self, scores: Array, labels: Array) -> dict[str, Array]:
        """Return `labels` and `predictions`, int64 (n,), and the predictions' `probabilities`, float32 (n,)."""
        return {"labels": labels, "predictions": scores.argmax(1), "probabilities": scores.max(1)}

    def describe(self, values: Array, names: Sequence[str]) -> str:
        """Return the name of the most probable class."""
        return names[int(values.argmax())]


@dataclass(frozen=True)
class Multilabel(SampleTask):
    """Any number of classes for each sample: labels (batch, outputs) of 0 and 1.

    The default loss is binary cross-entropy.
    """

    name: str = "multilabel"
    loss_name: str = ""
    least_outputs: ClassVar = 1
    watched: ClassVar = Watched("loss", False)
    metric_names: ClassVar = ("accuracy", "f1", "auc")
    named_losses: ClassVar = {"bce": binary_cross_entropy, "focal": binary_focal}
    named_metrics: ClassVar = {"log_loss": log_loss, "mean_average_precision": mean_average_precision}

    @property
    def has_thresholds(self) -> bool:
        """Whether predictions depend on a threshold.

        This is always so: the probability of each class is compared with the threshold.
        """
        return True

    def check(self, labels: Array) -> None:
        """Raise UsageError unless labels are (n, outputs) between 0 and 1."""
        check_matrix(self.name, labels, self.outputs)
        if len(labels) and not (labels.min() >= 0 and labels.max() <= 1):
            raise UsageError(
                f"the task {self.name!r} needs a number from 0 to 1 for each class, and labels are {labels.min():g} to "
                f"{labels.max():g}: use another task"
            )

    def count(self, labels: Array) -> Array:
        """Return the number of ones and of zeros of each class: float64 (2, outputs)."""
        ones = labels.sum(0, dtype=np.float64)
        return np.stack([ones, len(labels) - ones])

    def weights(self, wanted: str | Sequence[float] | None, counts: Array) -> torch.Tensor | None:
        """Return a weight for the positive samples of each class, float32 (outputs,); None if `wanted` is None.

        With "balanced" it is negatives / positives. A list is used as it is.
        """
        return class_weights(wanted, self.outputs, counts[0], counts[1])

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the labels, smoothed towards one half."""
        return smooth(labels.float(), smoothing, 0.5)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean loss over samples and classes.

        The loss of a positive target is multiplied by the weight of its class.
        """
        check_shape(outputs, targets.shape)
        return self._loss(outputs, targets, weights).mean()

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's loss, the mean over its classes."""
        check_shape(outputs, labels.shape)
        return self._loss(outputs, labels.float(), None)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return a probability for each class: float32 (batch, outputs)."""
        return outputs.float().sigmoid()

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return accuracy, F1 and AUC."""
        return multilabel_metrics(scores, labels)

    def describe(self, values: Array, names: Sequence[str]) -> str:
        """Return the names of the classes with a probability above one half."""
        return join_names(name for name, value in zip(names, values, strict=True) if value > 0.5)
