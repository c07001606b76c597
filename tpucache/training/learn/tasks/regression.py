"""Numbers for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from tpucache.errors import UsageError
from tpucache.training.learn.metrics import regression_metrics
from tpucache.training.learn.tasks.base import SEPARATOR, SampleTask, Watched, columns_of
from tpucache.training.learn.tasks.checks import check_matrix, check_shape, check_without_masks, class_weights

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Regression(SampleTask):
    """Numbers: labels (batch, outputs), mean squared error."""

    name: str = "regression"
    least_outputs: ClassVar = 1
    watched: ClassVar = Watched("rmse", False)
    metric_names: ClassVar = ("rmse",)

    @classmethod
    def count_outputs(cls, dataset: CachedDataset, mask_classes: int | None) -> int:
        """Return the number of columns of the labels."""
        check_without_masks(cls.name, mask_classes)
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
