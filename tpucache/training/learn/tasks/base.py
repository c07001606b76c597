"""What a task is: what training, evaluation and prediction ask of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.training.learn.tasks.checks import check_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from tpucache.loading.dataset import CachedDataset

Array = npt.NDArray[Any]
Form = Literal["values", "maps"]
Value = TypeVar("Value")
Own = TypeVar("Own", bound="TaskBase")

SEPARATOR: Final = ";"  # between the classes, or the values, of one sample in a CSV


class Watched(NamedTuple):
    """The metric that says which epoch is the best one, and whether more of it is better."""

    metric: str
    more_is_better: bool

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return a number that is higher for a better epoch: None without metrics, NaN without this one."""
        if not metrics:
            return None
        value = metrics.get(self.metric, math.nan)
        return value if self.more_is_better else -value


class Task(Protocol):
    """What training, evaluation and prediction ask of a task."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...

    @property
    def outputs(self) -> int:
        """How many numbers the model gives for each sample or pixel."""
        ...

    @property
    def form(self) -> Form:
        """What a prediction is: a row of values for each sample, or a map of classes."""
        ...

    @property
    def watched(self) -> Watched:
        """The metric that says which epoch is the best one."""
        ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics that `metrics` returns, where the labels allow them."""
        ...

    def inputs(self, fields: Mapping[str, Value]) -> dict[str, Value]:
        """Return those of a record's fields, by name, that a model may be given: all but the labels."""
        ...

    def class_names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return those of a cache's class names that this task's labels are numbers of, in their order."""
        ...

    def label_batches(self, dataset: CachedDataset) -> Iterator[Array]:
        """Yield the labels of all samples of a dataset, on the host, in batches that fit in memory."""
        ...

    def labels(self, fields: Mapping[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return this task's labels of a batch, given its records' fields and what the samples table has."""
        ...

    def check(self, labels: Array) -> None:
        """Raise UsageError when these labels, on the host, are not of this task or do not fit its outputs."""
        ...

    def check_outputs(self, outputs: object, samples: int, source: str) -> None:
        """Raise UsageError, naming their source, unless outputs fit the labels of this number of samples."""
        ...

    def learned_from(self, labels: Array) -> Task:
        """Return the task with what it takes from the training labels on the host: of a regression their scale."""
        ...

    def constants(self) -> dict[str, list[float]]:
        """Return what it took from the training labels, which a run's files keep; nothing for most tasks."""
        ...

    def with_constants(self, constants: Mapping[str, Sequence[float]]) -> Task:
        """Return the task with the `constants` that a run's files kept. Raises UsageError where they do not fit."""
        ...

    def count(self, labels: Array) -> Array:
        """Return counts of labels, on the host, for balancing classes; counts of batches add up."""
        ...

    def check_counts(self, counts: Array, labels: int) -> None:
        """Raise UsageError unless there is something to learn in so many labels with these counts in all."""
        ...

    def weights(self, wanted: str | Sequence[float] | None, counts: Array) -> torch.Tensor | None:
        """Return the classes' weights for `loss`, float32 (outputs,) on the host: "balanced" by counts, or a list.

        Raises UsageError for a list that does not fit, and where a task has no classes.
        """
        ...

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return float32 targets (batch, outputs) or (batch, outputs, height, width), which mixing may mix."""
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean over the batch: (). Raises UsageError when the model's outputs have another shape."""
        ...

    def share(self, targets: torch.Tensor) -> torch.Tensor | None:
        """Return the share of the targets that `loss` is the mean over, float32 (); None where that is all of them."""
        ...

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's loss, without weights and smoothing: float32 (batch,)."""
        ...

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return predictions from outputs, float32: probabilities, or values."""
        ...

    def scores(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the input of the metrics, one row for each sample: predictions, or counts."""
        ...

    def is_finite(self, predictions: torch.Tensor) -> torch.Tensor:
        """Return for each sample whether its prediction follows from finite numbers: bool (batch,)."""
        ...

    def collect(self, scores: Array) -> Array:
        """Return what to keep of a batch's scores, on the host, for `metrics`: the scores, or their sum."""
        ...

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return the metrics over all samples, given what `collect` kept. NaN for scores that are not finite."""
        ...

    def errors(self, scores: Array, labels: Array) -> Array:
        """Return how wrong each sample's prediction is, more where it is worse: float (batch,), given host arrays."""
        ...

    def record(self, scores: Array, labels: Array) -> dict[str, Array]:
        """Return what a run keeps of the predictions for all samples, given what `collect` kept: arrays by name."""
        ...

    def describe(self, values: Array, names: Sequence[str]) -> str:
        """Return one sample's predictions, (outputs,), as text: by the names of classes, or as values."""
        ...


class TaskBase:
    """The base of all tasks: one that takes nothing from the training labels, and whose losses are of all of them."""

    name: str

    def learned_from(self: Own, _labels: Array) -> Own:
        """Return the task itself."""
        return self

    def check_counts(self, _counts: Array, _labels: int) -> None:
        """Take any counts."""

    def share(self, _targets: torch.Tensor) -> torch.Tensor | None:
        """Return None: the loss is the mean over all targets."""
        return None

    def constants(self) -> dict[str, list[float]]:
        """Return nothing."""
        return {}

    def with_constants(self: Own, constants: Mapping[str, Sequence[float]]) -> Own:
        """Return the task itself. Raises UsageError unless there are no constants."""
        if constants != {}:
            raise UsageError(f"the task {self.name!r} takes nothing from its labels, not {str(constants)[:80]}")
        return self


@dataclass(frozen=True)
class SampleTask(TaskBase):
    """The base of tasks whose labels are in the samples table and whose outputs are (batch, outputs)."""

    outputs: int

    form: ClassVar[Form] = "values"

    def inputs(self, fields: Mapping[str, Value]) -> dict[str, Value]:
        """Return all fields: the labels are not among them."""
        return dict(fields)

    def class_names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the cache's classes."""
        return tuple(classes)

    def label_batches(self, dataset: CachedDataset) -> Iterator[Array]:
        """Yield all labels at once: they are in memory."""
        yield dataset.labels.numpy()

    def labels(self, _fields: Mapping[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return the labels that come with a batch."""
        return labels

    def check_outputs(self, outputs: object, samples: int, source: str) -> None:
        """Raise UsageError unless outputs are floating-point (samples, outputs)."""
        check_outputs(outputs, (samples, self.outputs), source)

    def is_finite(self, predictions: torch.Tensor) -> torch.Tensor:
        """Return whether all values of a sample are finite."""
        return predictions.isfinite().all(1)

    def collect(self, scores: Array) -> Array:
        """Return the scores."""
        return scores

    def errors(self, scores: Array, labels: Array) -> Array:
        """Return the largest difference between a sample's values and labels."""
        differences: Array = np.abs(scores - labels).max(1)
        return differences

    def record(self, scores: Array, labels: Array) -> dict[str, Array]:
        """Return `labels` and `values`, float32 (n, outputs)."""
        return {"labels": labels.astype(np.float32), "values": scores.astype(np.float32)}


def columns_of(dataset: CachedDataset) -> int:
    """Return the number of columns of a cache's labels; for class numbers that of the classes."""
    return dataset.labels.shape[1] if dataset.labels.dim() == 2 else len(dataset.classes)
