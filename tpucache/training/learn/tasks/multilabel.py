"""Any number of classes for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tpucache.errors import UsageError
from tpucache.training.learn.metrics import multilabel_metrics
from tpucache.training.learn.tasks.base import SEPARATOR, SampleTask, Watched, columns_of
from tpucache.training.learn.tasks.checks import check_matrix, check_shape, check_without_masks, class_weights
from tpucache.training.learn.tasks.targets import smooth

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Multilabel(SampleTask):
    """Any number of classes for each sample: labels (batch, outputs) of 0 and 1, binary cross-entropy."""

    name: str = "multilabel"
    least_outputs: ClassVar = 1
    watched: ClassVar = Watched("loss", False)
    metric_names: ClassVar = ("accuracy", "f1", "auc")

    @classmethod
    def count_outputs(cls, dataset: CachedDataset, mask_classes: int | None) -> int:
        """Return the number of columns of the labels."""
        check_without_masks(cls.name, mask_classes)
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
