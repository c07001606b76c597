"""The base of all tasks, and functions that tasks share: checks of labels, and targets made from them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.training.tasks.losses import Loss

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


Form = Literal["values", "maps"]
Value = TypeVar("Value")
Own = TypeVar("Own", bound="Task")


def one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
    places = torch.arange(classes, device=numbers.device).view(1, -1, *[1] * (numbers.dim() - 1))
    return (numbers[:, None] == places).float()


def smooth(targets: torch.Tensor, smoothing: float, towards: float | torch.Tensor) -> torch.Tensor:
    return targets * (1 - smoothing) + smoothing * towards if smoothing else targets


def check_shape(outputs: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise UsageError unless a model's outputs have the targets' shape."""
    if tuple(outputs.shape) != tuple(shape):
        raise UsageError(
            f"the model's outputs are {tuple(outputs.shape)}, the labels ask for {tuple(shape)}: use a model with such "
            "outputs"
        )


def check_numbers(numbers: Array, classes: int, hint: str = "") -> None:
    """Raise UsageError unless all numbers are class numbers, from 0 to `classes` - 1; `hint` ends the message."""
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < classes):
        raise UsageError(
            f"labels reach from {numbers.min()} to {numbers.max()}, and there are {classes} classes, numbered from 0"
            + hint
        )


def check_matrix(name: str, labels: Array, outputs: int) -> None:
    if labels.ndim != 2 or labels.shape[1] != outputs:
        raise unfit(name, f"{outputs} numbers for each sample", labels)
    bad = np.flatnonzero(~np.isfinite(labels).all(1))
    if len(bad):
        raise UsageError(
            f"the labels of {len(bad)} samples are not finite, the first at position {bad[0]}: leave these samples out"
        )


def unfit(name: str, wanted: str, labels: Array) -> UsageError:
    return UsageError(
        f"the task {name!r} needs {wanted}, and labels are {labels.dtype} {labels.shape}: use another task"
    )


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


@dataclass(frozen=True)
class Task(ABC):
    """What a model learns: how labels become targets, outputs become predictions, and both become metrics.

    `outputs` is the number of values that the model returns for each sample or pixel. As defined here, labels are in
    the samples table and outputs are (batch, outputs); a task has no constants from training labels, and its loss is
    the mean over all targets.
    """

    outputs: int
    name: str = ""
    #: The name of its loss; "" is the default.
    loss_name: str = ""
    #: The form of a prediction: a row of values for each sample, or a map of classes.
    form: ClassVar[Form] = "values"
    least_outputs: ClassVar[int] = 1
    #: The metric that chooses the best epoch.
    watched: ClassVar[Watched] = Watched("loss", False)
    #: The names of the metrics that `metrics` returns, if the labels allow them.
    metric_names: ClassVar[tuple[str, ...]] = ()
    #: Its losses by name; the first one is the default. Subclasses do not inherit them: their losses may differ.
    named_losses: ClassVar[Mapping[str, Loss]] = {}

    @classmethod
    def count_outputs(cls, dataset: CachedDataset, mask_classes: int | None) -> int:
        """Return the number of outputs of a model for a cache. Raises UsageError if its labels do not fit the task."""
        if mask_classes is not None:
            raise UsageError(
                f"the task {cls.name!r} has no masks to give a number of classes for: leave --mask-classes out"
            )
        return dataset.labels.shape[1] if dataset.labels.dim() == 2 else len(dataset.classes)

    def with_loss(self: Own, name: str | None) -> Own:
        """Return the task with the loss of this name; None changes nothing. Raises UsageError for an unknown loss."""
        if name is None:
            return self
        known = vars(type(self)).get("named_losses", {})
        if name not in known:
            has = f"has the losses {', '.join(known)}" if known else "has only its default loss"
            raise UsageError(f"the task {self.name!r} {has}, not {name!r}: use a loss of the task, or module:name")
        return replace(self, loss_name=name)

    def inputs(self, fields: Mapping[str, Value]) -> dict[str, Value]:
        """Return the fields of a record, by name, that a model may get: all but the labels."""
        return dict(fields)

    def class_names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of this task's classes by number, given the names of a cache's classes."""
        return tuple(classes)

    def label_batches(self, dataset: CachedDataset) -> Iterator[Array]:
        """Yield the labels of all samples of a dataset, on the host, in batches that fit in memory."""
        yield dataset.labels.numpy()

    def labels(self, _fields: Mapping[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return a batch's labels for this task: from its fields, or from `labels`, those in the samples table."""
        return labels

    @abstractmethod
    def check(self, labels: Array) -> None:
        """Raise UsageError when these labels, on the host, do not belong to this task or do not fit its outputs."""

    def check_dataset(self, dataset: CachedDataset, *, is_learned: bool) -> None:
        """Raise UsageError when a label does not fit, or if the samples are learned and leave nothing to learn."""
        del is_learned
        for labels in self.label_batches(dataset):
            self.check(labels)

    def check_outputs(self, outputs: object, samples: int, source: str) -> None:
        """Raise UsageError unless outputs for `samples` samples fit the task; the message names their `source`."""
        is_map = self.form == "maps"
        if not isinstance(outputs, torch.Tensor):
            given = f"a {type(outputs).__name__}"
        elif not outputs.is_floating_point():
            given = f"{outputs.dtype} {tuple(outputs.shape)}"
        elif tuple(outputs.shape[:2]) != (samples, self.outputs) or outputs.dim() != (4 if is_map else 2):
            given = f"{tuple(outputs.shape)}"
        else:
            return
        raise UsageError(
            f"{source} gives {given} for {samples} samples, the labels ask for {self.outputs} numbers for each "
            f"{'pixel' if is_map else 'sample'}, as a floating-point tensor: use a model with as many outputs"
        )

    def learned_from(self: Own, _labels: Array) -> Own:
        """Return the task with constants taken from training labels on the host, such as a regression's scale."""
        return self

    def constants(self) -> dict[str, list[float]]:
        """Return the task's constants from the training labels, for the run's files."""
        return {}

    def with_constants(self: Own, constants: Mapping[str, Sequence[float]]) -> Own:
        """Return the task with the constants from a run's files. Raises UsageError if they do not fit."""
        if constants != {}:
            raise UsageError(
                f"the task {self.name!r} has no constants from its labels, and the file has {str(constants)[:80]}"
            )
        return self

    def as_learned(self, dataset: CachedDataset) -> CachedDataset:
        """Return the dataset with labels as `targets` and `losses` take them; a regression's are standardised."""
        return dataset

    def as_stored(self, labels: torch.Tensor) -> torch.Tensor:
        """Return labels from `as_learned` in the unit of the samples table."""
        return labels

    @abstractmethod
    def targets(self, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return float32 targets (batch, outputs) or (batch, outputs, height, width), which mixup or CutMix may mix."""

    @property
    def _loss(self) -> Loss:
        return self.named_losses[self.loss_name or next(iter(self.named_losses))]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the batch's mean loss, a scalar. Raises UsageError when the model's outputs have another shape."""
        check_shape(outputs, targets.shape)
        return self._loss(outputs, targets).mean()

    def share(self, _targets: torch.Tensor) -> torch.Tensor | None:
        """Return the share of the targets that count in the mean of `loss`, a float32 scalar; None if all count."""
        return None

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each sample's loss, without smoothing: float32 (batch,)."""
        targets = self.targets(labels)
        check_shape(outputs, targets.shape)
        return self._loss(outputs, targets)

    @abstractmethod
    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return predictions from outputs: float32 probabilities or values."""

    def scores(self, outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        """Return what the metrics are computed from, one row for each sample: predictions, or counts."""
        return self.predictions(outputs)

    def is_finite(self, predictions: torch.Tensor) -> torch.Tensor:
        """Return, for each sample, whether its prediction comes from finite outputs: bool (batch,)."""
        return predictions.isfinite().all(1)

    def collect(self, scores: Array) -> Array:
        """Return the part of a batch's scores that `metrics` needs, on the host: the scores, or their sum."""
        return scores

    @abstractmethod
    def metrics(self, scores: Array, labels: Array) -> dict[str, float]:
        """Return the metrics over all samples, from the results of `collect`. NaN for scores that are not finite."""

    def errors(self, scores: Array, labels: Array) -> Array:
        """Return how wrong each sample's prediction is, from host arrays: float (batch,), larger if it is worse."""
        differences: Array = np.abs(scores - labels).max(1)
        return differences

    def record(self, scores: Array, labels: Array) -> dict[str, Array]:
        """Return the arrays, by name, that a run stores as its predictions of all samples.

        `scores` are the results of `collect`, joined. `labels` are on the host.
        """
        return {"labels": labels.astype(np.float32), "values": scores.astype(np.float32)}

    @abstractmethod
    def describe(self, values: Array, names: Sequence[str]) -> str:
        """Return one sample's predictions, (outputs,), as text: names of classes, or values."""
