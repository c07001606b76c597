"""Regression: one or several numbers for each sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.text import SEPARATOR
from tpucache.training.metrics import regression_metrics
from tpucache.training.tasks.losses import error
from tpucache.training.tasks.task import Task, Watched, check_matrix

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


#: How far labels may be rounded in float32, as a share of their standard deviation.
_MOST_LOST: Final = 0.01
_SHOWN: Final = 80  # characters of a value in a message, at most


@dataclass(frozen=True)
class Regression(Task):
    """One or several numbers for each sample: labels (batch, outputs). The default loss is the mean squared error.

    With `mean` and `std`, one number for each column, the model learns standardised labels: minus the mean, divided by
    the deviation. Losses are then in the standardised unit; predictions and metrics are in the unit of the labels.
    """

    name: str = "regression"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    watched: ClassVar = Watched("rmse", False)
    metric_names: ClassVar = ("rmse",)
    named_losses: ClassVar = {
        "mse": error(functional.mse_loss),
        "l1": error(functional.l1_loss),
        "huber": error(functional.huber_loss),
    }

    def check(self, labels: Array) -> None:
        check_matrix(self.name, labels, self.outputs)

    def check_dataset(self, dataset: CachedDataset, *, is_learned: bool) -> None:
        super().check_dataset(dataset, is_learned=is_learned)
        if is_learned and dataset.table.labels is not None:
            check_precision(dataset.table.labels[dataset.positions])

    def learned_from(self, labels: Array) -> Regression:
        numbers = labels.astype(np.float64)
        spread = np.where(numbers.min(0) == numbers.max(0), 1.0, numbers.std(0))
        return replace(self, mean=tuple(numbers.mean(0).tolist()), std=tuple(spread.tolist()))

    def as_learned(self, dataset: CachedDataset) -> CachedDataset:
        """Return the samples with labels standardised in float64: float32 may not hold all digits of a label."""
        return dataset.with_standardised_labels(self.mean, self.std) if self.mean else dataset

    def as_stored(self, labels: torch.Tensor) -> torch.Tensor:
        return self.predictions(labels)

    def constants(self) -> dict[str, list[float]]:
        return {"mean": [*self.mean], "std": [*self.std]} if self.mean else {}

    def with_constants(self, constants: Mapping[str, Sequence[float]]) -> Regression:
        if constants == {}:
            return replace(self, mean=(), std=())
        if not isinstance(constants, dict):
            raise UsageError(f"the labels' scale must be a dict, not a {type(constants).__name__}")
        mean, std = (finite_numbers(constants.get(name), self.outputs) for name in ("mean", "std"))
        if mean is None or std is None or min(std) <= 0 or {*constants} != {"mean", "std"}:
            raise UsageError(
                f"the labels were standardised by {self.outputs} finite means and as many deviations above 0, not by "
                f"{str(dict(constants))[:_SHOWN]}"
            )
        return replace(self, mean=mean, std=std)

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        if smoothing:
            raise UsageError("regression has no classes to smooth labels over: leave label smoothing out")
        return labels.float()

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        if not self.mean:
            return outputs.float()
        return outputs.float() * _tensor_on(self.std, outputs.device) + _tensor_on(self.mean, outputs.device)

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        return regression_metrics(scores, labels)

    def describe(self, values: Array, _names: Sequence[str]) -> str:
        return SEPARATOR.join(map(str, values))


def check_precision(values: Array) -> None:
    """Raise UsageError if labels (n, outputs) vary too little for float32, the dtype in which models learn them."""
    numbers = values.astype(np.float64)
    lost = np.abs(numbers - numbers.astype(np.float32)).max(0)
    spread = numbers.std(0)
    worst = int(np.argmax(lost - _MOST_LOST * spread))
    if lost[worst] > _MOST_LOST * spread[worst] > 0:
        column = numbers[:, worst]
        raise UsageError(
            f"float32, in which models learn, cannot tell the labels of column {worst} apart: they reach from "
            f"{column.min():.10g} to {column.max():.10g} with a deviation of {spread[worst]:.3g}, and are rounded by "
            f"up to {lost[worst]:.3g}. Subtract {column.min():.10g} from them in a .csv, and relabel the cache with "
            "that file"
        )


class InLabelUnits(nn.Module):
    def __init__(self, model: nn.Module, task: Regression) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(task.mean))
        self.register_buffer("std", torch.tensor(task.std))

    def forward(self, *inputs: torch.Tensor, **fields: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.model(*inputs, **fields).float() * self.std + self.mean
        return outputs


def describe_labels(labels: Array) -> str:
    numbers = labels.astype(np.float64)
    return f"the labels reach from {numbers.min():g} to {numbers.max():g}, with a deviation of {numbers.std(0).max():g}"


@functools.lru_cache(maxsize=16)
def _tensor_on(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)


def finite_numbers(values: object, count: int) -> tuple[float, ...] | None:
    if not isinstance(values, (list, tuple)) or len(values) != count:
        return None
    is_good = all(isinstance(value, float) and math.isfinite(value) for value in values)
    return tuple(values) if is_good else None
