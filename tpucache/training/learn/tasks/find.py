"""What a model is trained for: its targets, its loss, and what its outputs are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import numpy.typing as npt
import torch

from tpucache.errors import UsageError
from tpucache.training.learn.tasks.kinds import Classes, Multilabel, Regression, Watched
from tpucache.training.learn.tasks.mask import VOID, Mask
from tpucache.training.settings import TaskName

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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

    @property
    def dense(self) -> bool:
        """Whether outputs and labels are maps that move with their images, not numbers of a whole sample."""
        ...

    @property
    def watched(self) -> Watched:
        """The metric that says which epoch is the best one."""
        ...

    @property
    def scores_add_up(self) -> bool:
        """Whether `metrics` takes sums of scores over samples as it takes the scores."""
        ...

    def label_batches(self, dataset: CachedDataset) -> Iterator[Array]:
        """Yield the labels of all samples of a dataset, on the host, in as many batches as memory wants."""
        ...

    def labels(self, fields: Mapping[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return this task's labels of a batch, given its records' fields and what the samples table has."""
        ...

    def check(self, labels: Array) -> None:
        """Raise UsageError when these labels, on the host, are not of this task or do not fit its outputs."""
        ...

    def check_outputs(self, outputs: object, samples: int, source: str) -> None:
        """Raise UsageError, naming their source, unless outputs are what the labels of so many samples ask for."""
        ...

    def count(self, labels: Array) -> Array:
        """Return what balancing classes takes of some labels, on the host; it adds up over batches of them."""
        ...

    def weights(self, wanted: str | Sequence[float] | None, counts: Array) -> torch.Tensor | None:
        """Return a weight a class for `loss`, float32 (outputs,) on the host: "balanced" by these counts, or a list.

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

    def scores(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return what the metrics are made of, a row a sample: predictions, or counts."""
        ...

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return the metrics over all samples, both on the host. They are NaN for scores that are not finite."""
        ...

    def describe(self, values: Array, names: Sequence[str]) -> str:
        """Return one sample's predictions, (outputs,), as text: by the names of classes, or as values."""
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


def find_task(name: TaskName | Literal["auto"], dataset: CachedDataset, mask_classes: int | None = None) -> Task:
    """Return the task of this name, or the one that the cache's labels are of. Raises UsageError."""
    found = infer_task(dataset) if name == "auto" else name
    return make_task(found, count_outputs(found, dataset, mask_classes))


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


def count_outputs(name: TaskName, dataset: CachedDataset, mask_classes: int | None = None) -> int:
    """Return how many outputs a model for this cache has; for masks their classes, which a cache does not say.

    Raises UsageError where labels are not of the task, or the number of classes is missing or given in vain.
    """
    if mask_classes is not None and not _KINDS[name].dense:
        raise UsageError(f"the task {name!r} has no masks to give a number of classes for: leave --mask-classes out")
    return _KINDS[name].count_outputs(dataset, mask_classes)
