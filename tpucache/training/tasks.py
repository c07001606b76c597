"""What a model is trained for: its targets, its loss, and what its outputs are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, get_args

import numpy.typing as npt
import torch

from tpucache.errors import UsageError
from tpucache.training.task_kinds import VOID, Classes, Mask, Multilabel, Regression, TaskName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpucache.loading.dataset import CachedDataset

__all__ = ["TASKS", "VOID", "Mask", "Task", "TaskName", "count_outputs", "infer_task", "make_task"]

Array = npt.NDArray[Any]
TASKS: Final = get_args(TaskName)


class Task(Protocol):
    """What training, evaluation and prediction ask of a task."""

    @property
    def name(self) -> TaskName:
        """The task's name."""
        ...

    @property
    def outputs(self) -> int:
        """How many numbers, a sample or a pixel, the model gives."""
        ...

    def check(self, labels: Array) -> None:
        """Raise UsageError when these labels, on the host, are not of this task or do not fit its outputs."""
        ...

    def weights(self, wanted: str | Sequence[float] | None, labels: Array) -> torch.Tensor | None:
        """Return a weight a class for `loss`, float32 (outputs,) on the host: "balanced" over these labels, or a list.

        Raises UsageError for a list that does not fit, and where a task has no classes.
        """
        ...

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return float32 targets (batch, outputs) or (batch, outputs, height, width), which mixing may mix."""
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean over the batch: (). Raises UsageError when the model's outputs have another shape."""
        ...

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's loss, without weights and smoothing: float32 (batch,)."""
        ...

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return what outputs mean, float32: probabilities, or values."""
        ...

    def metrics(self, predictions: Array, labels: Array) -> dict[str, float]:
        """Return the metrics over all samples, both on the host."""
        ...


_KINDS: Final[dict[TaskName, type[Classes] | type[Multilabel] | type[Regression] | type[Mask]]] = {
    "classes": Classes,
    "multilabel": Multilabel,
    "regression": Regression,
    "mask": Mask,
}


def make_task(name: TaskName, outputs: int) -> Task:
    """Return a task by its name, of this many classes, or columns of a regression. Raises UsageError."""
    if name not in _KINDS:
        raise UsageError(f"there is no task {name!r}: use {', '.join(TASKS)}")
    low = 2 if name in ("classes", "mask") else 1
    if outputs < low:
        raise UsageError(f"the task {name!r} has at least {low} outputs, not {outputs}")
    return _KINDS[name](outputs)


def infer_task(dataset: CachedDataset) -> TaskName:
    """Return the task that a cache's labels are of; masks are a task only when asked for.

    Class numbers are "classes". A matrix of values is "multilabel" when its columns have class names and its values
    are between 0 and 1, and "regression" otherwise. Raises UsageError without labels.
    """
    labels = dataset.labels
    if not labels.is_floating_point():
        if not dataset.classes:
            raise UsageError("the cache has no labels to train on: warm it up from a folder with one subfolder a class")
        return "classes"
    inside = bool(((labels >= 0) & (labels <= 1)).all())
    return "multilabel" if dataset.classes and inside else "regression"


def count_outputs(name: TaskName, dataset: CachedDataset) -> int:
    """Return how many outputs a model for this cache has. Raises UsageError for masks, whose classes it cannot know."""
    if name == "mask":
        raise UsageError("a cache does not say how many classes its masks have: give their number")
    return dataset.labels.shape[1] if dataset.labels.dim() == 2 else len(dataset.classes)
