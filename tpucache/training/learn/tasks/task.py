"""The interface of a task, and functions that tasks share: checks of labels, and targets made from them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from tpucache.errors import UsageError
from tpucache.training.learn.losses import Loss
from tpucache.training.learn.metrics import Metric, NamedMetric, find_metric
from tpucache.types import Array

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from tpucache.loading.dataset import CachedDataset


Form = Literal["values", "maps"]
Value = TypeVar("Value")
Own = TypeVar("Own", bound="TaskBase")


def one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
    """Return float32 (batch, classes, …): 1 for the number's class and 0 for other classes.

    For a number that is no class, all are 0.
    """
    places = torch.arange(classes, device=numbers.device).view(1, -1, *[1] * (numbers.dim() - 1))
    return (numbers[:, None] == places).float()


def smooth(targets: torch.Tensor, smoothing: float, towards: float | torch.Tensor) -> torch.Tensor:
    """Return targets * (1 - smoothing) + towards * smoothing. Raises UsageError for a smoothing outside [0, 1)."""
    if not 0 <= smoothing < 1:
        raise UsageError(f"label smoothing is at least 0 and below 1, not {smoothing}")
    return targets * (1 - smoothing) + smoothing * towards if smoothing else targets


def check_shape(outputs: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise UsageError unless a model's outputs have the targets' shape."""
    if tuple(outputs.shape) != tuple(shape):
        raise UsageError(
            f"the model's outputs are {tuple(outputs.shape)}, the labels ask for {tuple(shape)}: use a model with such "
            "outputs"
        )


def check_outputs(outputs: object, shape: Sequence[int], source: str, *, of_pixels: bool = False) -> None:
    """Raise UsageError unless `outputs` is a floating-point tensor of `shape`, (samples, outputs).

    Outputs of pixels also have a height and a width. The message names the `source` of the outputs.
    """
    samples, numbers = shape
    wanted = f"{numbers} numbers for each {'pixel' if of_pixels else 'sample'}"
    if not isinstance(outputs, torch.Tensor):
        given = f"a {type(outputs).__name__}"
    elif not outputs.is_floating_point():
        given = f"{outputs.dtype} {tuple(outputs.shape)}"
    elif tuple(outputs.shape[:2]) != (samples, numbers) or outputs.dim() != (4 if of_pixels else 2):
        given = f"{tuple(outputs.shape)}"
    else:
        return
    raise UsageError(
        f"{source} gives {given} for {samples} samples, the labels ask for {wanted}, as a floating-point tensor: "
        "use a model with as many outputs"
    )


def check_numbers(numbers: Array, classes: int, hint: str = "") -> None:
    """Raise UsageError unless all numbers are class numbers, from 0 to `classes` - 1; `hint` ends the message."""
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < classes):
        raise UsageError(
            f"labels reach from {numbers.min()} to {numbers.max()}, and there are {classes} classes, numbered from 0"
            + hint
        )


def check_matrix(name: str, labels: Array, outputs: int) -> None:
    """Raise UsageError unless labels are finite (n, outputs)."""
    if labels.ndim != 2 or labels.shape[1] != outputs:
        raise unfit(name, f"{outputs} numbers for each sample", labels)
    bad = np.flatnonzero(~np.isfinite(labels).all(1))
    if len(bad):
        raise UsageError(
            f"the labels of {len(bad)} samples are not finite, the first at position {bad[0]}: leave these samples out"
        )


def check_without_masks(name: str, mask_classes: int | None) -> None:
    """Raise UsageError if `mask_classes` is given: the task `name` has no masks."""
    if mask_classes is not None:
        raise UsageError(f"the task {name!r} has no masks to give a number of classes for: leave --mask-classes out")


def unfit(name: str, wanted: str, labels: Array) -> UsageError:
    """Return the error for labels that a task cannot learn."""
    return UsageError(
        f"the task {name!r} needs {wanted}, and labels are {labels.dtype} {labels.shape}: use another task"
    )


def class_weights(wanted: str | Sequence[float] | None, outputs: int, counts: Array, over: Any) -> torch.Tensor | None:
    """Return class weights, float32 (outputs,), or None if `wanted` is None.

    "balanced" divides `over`, a number or one number for each class, by `counts`, the samples of each class; a class
    without samples gets 1. A list is used as it is. Raises UsageError for any other value.
    """
    if wanted is None:
        return None
    if isinstance(wanted, str):
        if wanted != "balanced":
            raise UsageError(f'class weights are "balanced" or a list of numbers, not {wanted!r}')
        # A class without samples keeps the weight 1.
        return torch.from_numpy(np.where(counts > 0, over / np.maximum(counts, 1), 1.0).astype(np.float32))
    weights = torch.tensor(list(wanted), dtype=torch.float32)
    if len(weights) != outputs or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UsageError(f"class weights are {outputs} numbers of at least 0, not {list(wanted)}")
    return weights


class Watched(NamedTuple):
    """The metric that chooses the best epoch, and whether a higher value is better."""

    metric: str
    more_is_better: bool

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return a number that is higher for a better epoch; None without metrics, NaN without this metric."""
        if not metrics:
            return None
        value = metrics.get(self.metric, math.nan)
        return value if self.more_is_better else -value


class Task(Protocol):
    """The methods of a task that training, evaluation and prediction call."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...

    @property
    def outputs(self) -> int:
        """The number of values that the model returns for each sample or pixel."""
        ...

    @property
    def form(self) -> Form:
        """The form of a prediction: a row of values for each sample, or a map of classes."""
        ...

    @property
    def watched(self) -> Watched:
        """The metric that chooses the best epoch."""
        ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics that `metrics` returns, if the labels allow them."""
        ...

    def named_metric(self, name: str) -> NamedMetric:
        """Return an additional metric of the task by its name. Raises UsageError for an unknown metric."""
        ...

    def inputs(self, fields: Mapping[str, Value]) -> dict[str, Value]:
        """Return the fields of a record, by name, that a model may get: all but the labels."""
        ...

    def class_names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of this task's classes by number, given the names of a cache's classes."""
        ...

    def label_batches(self, dataset: CachedDataset) -> Iterator[Array]:
        """Yield the labels of all samples of a dataset, on the host, in batches that fit in memory."""
        ...

    def labels(self, fields: Mapping[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return a batch's labels for this task: from its `fields`, or from `labels`, those in the samples table."""
        ...

    def check(self, labels: Array) -> None:
        """Raise UsageError when these labels, on the host, do not belong to this task or do not fit its outputs."""
        ...

    def check_outputs(self, outputs: object, samples: int, source: str) -> None:
        """Raise UsageError unless outputs for `samples` samples fit the task; the message names their `source`."""
        ...

    def with_loss(self, name: str | None) -> Task:
        """Return the task with the loss of this name; None changes nothing. Raises UsageError for an unknown loss."""
        ...

    def learned_from(self, labels: Array) -> Task:
        """Return the task with constants taken from training labels on the host, such as a regression's scale."""
        ...

    def constants(self) -> dict[str, list[float]]:
        """Return the task's constants from the training labels, for the run's files; most tasks have none."""
        ...

    def as_learned(self, dataset: CachedDataset) -> CachedDataset:
        """Return the dataset with labels as `targets` and `losses` take them; a regression's are standardised.

        Raises UsageError for labels of another kind.
        """
        ...

    def as_stored(self, labels: torch.Tensor) -> torch.Tensor:
        """Return labels from `as_learned` in the unit of the samples table."""
        ...

    def with_constants(self, constants: Mapping[str, Sequence[float]]) -> Task:
        """Return the task with the constants from a run's files. Raises UsageError if they do not fit."""
        ...

    def count(self, labels: Array) -> Array:
        """Return counts of labels, on the host, to balance classes by; the counts of batches can be added."""
        ...

    def check_counts(self, counts: Array, labels: int) -> None:
        """Raise UsageError if the `counts` of labels, by `count`, leave nothing to learn; `labels` is their number."""
        ...

    def weights(self, wanted: str | Sequence[float] | None, counts: Array) -> torch.Tensor | None:
        """Return weights for `loss`, float32 (outputs,) on the host; None if `wanted` is None.

        "balanced" computes them from `counts`; a list is used as it is. Raises UsageError for a list that does not
        fit, and for "balanced" if the task has no classes.
        """
        ...

    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return float32 targets (batch, outputs) or (batch, outputs, height, width), which mixup or CutMix may mix."""
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the batch's mean loss, a scalar. Raises UsageError when the model's outputs have another shape."""
        ...

    def share(self, targets: torch.Tensor) -> torch.Tensor | None:
        """Return the share of the targets that count in the mean of `loss`, a float32 scalar; None if all count."""
        ...

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's loss, without weights and smoothing: float32 (batch,)."""
        ...

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return predictions from outputs: float32 probabilities or values."""
        ...

    def scores(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return what the metrics are computed from, one row for each sample: predictions, or counts."""
        ...

    def is_finite(self, predictions: torch.Tensor) -> torch.Tensor:
        """Return, for each sample, whether its prediction comes from finite outputs: bool (batch,)."""
        ...

    def collect(self, scores: Array) -> Array:
        """Return the part of a batch's scores that `metrics` needs, on the host: the scores, or their sum."""
        ...

    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return the metrics over all samples, from the results of `collect`. NaN for scores that are not finite."""
        ...

    def errors(self, scores: Array, labels: Array) -> Array:
        """Return how wrong each sample's prediction is, from host arrays: float (batch,), larger if it is worse."""
        ...

    def record(self, scores: Array, labels: Array) -> dict[str, Array]:
        """Return the arrays, by name, that a run stores as its predictions of all samples.

        `scores` are the results of `collect`, joined. `labels` are on the host.
        """
        ...

    def describe(self, values: Array, names: Sequence[str]) -> str:
        """Return one sample's predictions, (outputs,), as text: names of classes, or values."""
        ...


class TaskBase:
    """The base of all tasks.

    A task has no constants from training labels, and its loss is the mean over all targets, unless the subclass says
    so.
    """

    name: str
    #: The name of its loss; "" is the default.
    loss_name: str = ""
    #: Its losses by name; the first one is the default. Subclasses do not inherit them: their losses may differ.
    named_losses: ClassVar[Mapping[str, Loss]] = {}
    #: Its metrics for `--metric`. Tasks with thresholds also have F-beta.
    named_metrics: ClassVar[Mapping[str, Metric]] = {}
    outputs: int

    def with_loss(self: Own, name: str | None) -> Own:
        """Return the task with the loss of this name; None changes nothing. Raises UsageError for an unknown loss."""
        if name is None:
            return self
        known = vars(type(self)).get("named_losses", {})
        if name not in known:
            has = f"has the losses {', '.join(known)}" if known else "has only its default loss"
            raise UsageError(f"the task {self.name!r} {has}, not {name!r}: use a loss of the task, or module:name")
        return replace(self, loss_name=name)  # type: ignore[type-var]  # all tasks that have losses are dataclasses

    @property
    def has_thresholds(self) -> bool:
        """Whether predictions depend on a threshold, with which probabilities are compared."""
        return False

    def named_metric(self, name: str) -> NamedMetric:
        """Return the metric with this name. Raises UsageError for an unknown metric."""
        metric = find_metric(name, self.named_metrics, self.has_thresholds)
        if metric is not None:
            return metric
        known = [*self.named_metrics, *["f2 (or another beta, and f2_micro, f2_samples)"] * self.has_thresholds]
        has = f"has the metrics {', '.join(known)}" if known else "has only its own metrics"
        raise UsageError(
            f"the task {self.name!r} with {self.outputs} outputs {has}, not {name!r}: use a metric of the task, or "
            "module:name"
        )

    @property
    def _loss(self) -> Loss:
        return self.named_losses[self.loss_name or next(iter(self.named_losses))]

    def learned_from(self: Own, _labels: Array) -> Own:
        """Return the task itself: it needs no constants from labels."""
        return self

    def check_counts(self, _counts: Array, _labels: int) -> None:
        """Do nothing: most tasks can learn from any labels (see `Task.check_counts`)."""

    def share(self, _targets: torch.Tensor) -> torch.Tensor | None:
        """Return None: all targets count in the mean of `loss` (see `Task.share`)."""
        return None

    def constants(self) -> dict[str, list[float]]:
        """Return an empty dict: the task needs no constants from labels."""
        return {}

    def as_learned(self, dataset: CachedDataset) -> CachedDataset:
        """Return the dataset itself: this task learns labels as they are stored."""
        return dataset

    def as_stored(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels themselves: `as_learned` has not changed them."""
        return labels

    def with_constants(self: Own, constants: Mapping[str, Sequence[float]]) -> Own:
        """Return the task itself. Raises UsageError if there are any constants, because the task has none."""
        if constants != {}:
            raise UsageError(
                f"the task {self.name!r} has no constants from its labels, and the file has {str(constants)[:80]}"
            )
        return self


@dataclass(frozen=True)
class SampleTask(TaskBase, ABC):
    """The base of tasks whose labels are in the samples table and whose outputs are (batch, outputs)."""

    outputs: int

    form: ClassVar[Form] = "values"

    @classmethod
    def count_outputs(cls, dataset: CachedDataset, mask_classes: int | None) -> int:
        """Return the number of columns of the labels; if they are class numbers, the number of classes."""
        check_without_masks(cls.name, mask_classes)
        return dataset.labels.shape[1] if dataset.labels.dim() == 2 else len(dataset.classes)

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

    @abstractmethod
    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return predictions from outputs: float32 (batch, outputs)."""

    def scores(self, outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        """Return the predictions: the metrics are computed from them."""
        return self.predictions(outputs)

    def is_finite(self, predictions: torch.Tensor) -> torch.Tensor:
        """Return whether all values of a sample are finite."""
        return predictions.isfinite().all(1)

    def collect(self, scores: Array) -> Array:
        """Return the scores of a batch unchanged: the metrics need all of them."""
        return scores

    def errors(self, scores: Array, labels: Array) -> Array:
        """Return the largest difference between a sample's values and labels."""
        differences: Array = np.abs(scores - labels).max(1)
        return differences

    def record(self, scores: Array, labels: Array) -> dict[str, Array]:
        """Return `labels` and `values`, float32 (n, outputs)."""
        return {"labels": labels.astype(np.float32), "values": scores.astype(np.float32)}
