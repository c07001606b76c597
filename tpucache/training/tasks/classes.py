"""Classification: one class for each sample, or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch.nn import functional

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.text import join_names
from tpucache.training.metrics import class_metrics, multilabel_metrics
from tpucache.training.tasks.losses import binary_cross_entropy, binary_focal, cross_entropy, focal
from tpucache.training.tasks.task import Task, Watched, check_matrix, check_numbers, one_hot, smooth, unfit

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


@dataclass(frozen=True)
class Classes(Task):
    """One class for each sample: labels (batch,), -1 for a sample without a label."""

    name: str = "classes"
    least_outputs: ClassVar = 2
    watched: ClassVar = Watched("accuracy", True)
    metric_names: ClassVar = ("accuracy", "f1", "auc")
    named_losses: ClassVar = {"cross-entropy": cross_entropy, "focal": focal, "bce": binary_cross_entropy}

    @classmethod
    def count_outputs(cls, dataset: CachedDataset, mask_classes: int | None) -> int:
        super().count_outputs(dataset, mask_classes)
        if len(dataset.classes) < 2:
            has = f"only one class, {dataset.classes[0]!r}" if dataset.classes else "no classes"
            raise UsageError(
                f"the cache has {has}, and this task needs at least 2: "
                "warm it up from a folder with one subfolder a class"
            )
        return len(dataset.classes)

    def check(self, labels: Array) -> None:
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise unfit(self.name, "one class number for each sample", labels)
        without = np.flatnonzero(labels == -1)
        first = f", the first at position {without[0]}" if len(without) else ""
        hint = f". {len(without):,} samples have no label, -1{first}: leave them out" if first else ""
        check_numbers(labels, self.outputs, hint)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        if labels.dim() == 2:
            return smooth(labels.float(), smoothing, labels.float().sum(1, keepdim=True) / self.outputs)
        return smooth(one_hot(labels, self.outputs), smoothing, 1 / self.outputs)

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().losses(outputs, labels) * (labels >= 0)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        # Computed as the softmax of the sigmoids' logarithms: a small sum cannot become 0 / 0.
        logarithms = -functional.softplus(-outputs.float()) if self.loss_name == "bce" else outputs.float()
        return logarithms.softmax(1)

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        return class_metrics(scores, labels)

    def errors(self, scores: Array, labels: Array) -> Array:
        right = np.take_along_axis(scores, np.maximum(labels, 0)[:, None], 1)[:, 0]
        return np.where(labels >= 0, 1 - right, 0)

    def record(self, scores: Array, labels: Array) -> dict[str, Array]:
        return {"labels": labels, "predictions": scores.argmax(1), "probabilities": scores.max(1)}

    def describe(self, values: Array, names: Sequence[str]) -> str:
        return names[int(values.argmax())]


@dataclass(frozen=True)
class Multilabel(Task):
    """Any number of classes for each sample: labels (batch, outputs) of 0 and 1."""

    name: str = "multilabel"
    metric_names: ClassVar = ("accuracy", "f1", "auc")
    named_losses: ClassVar = {"bce": binary_cross_entropy, "focal": binary_focal}

    def check(self, labels: Array) -> None:
        check_matrix(self.name, labels, self.outputs)
        if len(labels) and not (labels.min() >= 0 and labels.max() <= 1):
            raise UsageError(
                f"the task {self.name!r} needs a number from 0 to 1 for each class, and labels are {labels.min():g} to "
                f"{labels.max():g}: use another task"
            )

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        return smooth(labels.float(), smoothing, 0.5)

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.float().sigmoid()

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        return multilabel_metrics(scores, labels)

    def describe(self, values: Array, names: Sequence[str]) -> str:
        return join_names(name for name, value in zip(names, values, strict=True) if value > 0.5)
