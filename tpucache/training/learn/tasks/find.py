"""Tasks by name, and the choice of the one that fits a cache's labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tpucache.errors import UsageError
from tpucache.store.fields import BOXES, KEYPOINTS, MASK
from tpucache.training.learn.metrics import MORE_IS_BETTER
from tpucache.training.learn.tasks.task import Task, Watched
from tpucache.training.learn.user_code import short_name
from tpucache.training.settings import TASKS, TrainSettings

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


class _TaskKind(Protocol):
    """The class of a task: called with a number of outputs, it returns the task."""

    least_outputs: int

    def count_outputs(self, dataset: CachedDataset, mask_classes: int | None) -> int: ...

    def __call__(self, outputs: int) -> Task: ...


def make_task(name: str, outputs: int) -> Task:
    """Return a task by its name, of this many classes, or columns of a regression. Raises UsageError."""
    kind = _kind(name)
    if outputs < kind.least_outputs:
        raise UsageError(f"the task {name!r} has at least {kind.least_outputs} outputs, not {outputs}")
    return kind(outputs)


def find_task(name: str, dataset: CachedDataset, mask_classes: int | None = None) -> Task:
    """Return the task of this name, or by "auto" the one that fits the cache's labels. Raises UsageError."""
    found = infer_task(dataset, mask_classes) if name == "auto" else name
    return make_task(found, count_outputs(found, dataset, mask_classes))


def find_watched(task: Task, settings: TrainSettings) -> Watched:
    """Return the metric that says which epoch is the best: by `watch`, NAME or NAME:min or NAME:max, or the task's own.

    More of a metric of the user's own is better unless `:min` says otherwise. Raises UsageError for an unknown one.
    """
    if settings.watch is None:
        return task.watched
    name, _, direction = settings.watch.partition(":")
    known = ("loss", *task.metric_names, *map(short_name, settings.metric))
    if name not in known or direction not in ("", "min", "max"):
        raise UsageError(
            f"--watch is one of {', '.join(known)}, with :min or :max for the direction of your own, not "
            f"{settings.watch!r}"
        )
    if name in settings.metric and not direction:
        return Watched(name, task.named_metric(name).more_is_better)
    return Watched(name, direction == "max" if direction else MORE_IS_BETTER.get(name, True))


def infer_task(dataset: CachedDataset, mask_classes: int | None = None) -> str:
    """Return the name of the task that fits a cache's labels.

    Masks are "mask" where no sample has another label, or their number of classes is given. Class numbers are
    "classes". A matrix of values is "multilabel" when its columns have class names and its values are between 0 and 1,
    and "regression" otherwise. Raises UsageError without labels, and for those that no task learns.
    """
    labels = dataset.labels
    is_labelled = labels.is_floating_point() or bool((labels >= 0).any())
    if MASK in dataset.names and (mask_classes is not None or not is_labelled):
        return "mask"
    points = [name for name in (BOXES, KEYPOINTS) if name in dataset.names]
    if points and not is_labelled:
        raise UsageError(
            f"the cache has {' and '.join(points)} and no other labels, and train has no task for {points[0]}: read it "
            "with CachedLoader in a loop of your own"
        )
    if not labels.is_floating_point():
        if not dataset.classes:
            raise UsageError("the cache has no labels to train on: warm it up from a folder with one subfolder a class")
        return "classes"
    inside = bool(((labels >= 0) & (labels <= 1)).all())
    return "multilabel" if dataset.classes and inside else "regression"


def count_outputs(name: str, dataset: CachedDataset, mask_classes: int | None = None) -> int:
    """Return how many outputs a model for this cache has; a cache does not know it for masks.

    Raises UsageError where labels are not of the task, or the number of classes is missing or given without need.
    """
    return _kind(name).count_outputs(dataset, mask_classes)


def _kind(name: str) -> _TaskKind:
    """Return the class of a task. Raises UsageError."""
    if name not in TASKS:
        raise UsageError(f"there is no task {name!r}: use {', '.join(TASKS)}")
    kind: _TaskKind = TASKS[name]
    return kind
