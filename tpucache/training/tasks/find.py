"""Finds tasks by name, and the task that fits a cache's labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpucache.errors import UsageError
from tpucache.store.fields import BOXES, KEYPOINTS, MASK
from tpucache.training.metrics import MORE_IS_BETTER
from tpucache.training.settings import TASKS, TrainSettings
from tpucache.training.tasks.task import Task, Watched
from tpucache.training.user_code import short_name

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


def make_task(name: str, outputs: int) -> Task:
    """Return the task `name` with this number of classes or columns. Raises UsageError for no such task, or too few."""
    kind = _kind(name)
    if outputs < kind.least_outputs:
        raise UsageError(f"the task {name!r} needs at least {kind.least_outputs} outputs, not {outputs}")
    return kind(outputs)


def find_task(name: str, dataset: CachedDataset, mask_classes: int | None = None) -> Task:
    """Return the task `name`; for "auto" the task that fits the labels. Raises UsageError if labels do not fit."""
    found = infer_task(dataset, mask_classes) if name == "auto" else name
    return make_task(found, count_outputs(found, dataset, mask_classes))


def find_watched(task: Task, settings: TrainSettings) -> Watched:
    """Return the metric that chooses the best epoch:

    `watch`, as NAME, NAME:min or NAME:max, or else the task's own.
    """
    if settings.watch is None:
        return task.watched
    name, _, direction = settings.watch.partition(":")
    known = ("loss", *task.metric_names, *map(short_name, settings.metric))
    if name not in known or direction not in ("", "min", "max"):
        raise UsageError(
            f"--watch is one of {', '.join(known)}, with :min or :max for a metric of your own, not {settings.watch!r}"
        )
    return Watched(name, direction == "max" if direction else MORE_IS_BETTER.get(name, True))


def infer_task(dataset: CachedDataset, mask_classes: int | None = None) -> str:
    """Return the name of the task that fits a cache's labels.

    For a matrix of values it is "multilabel" if the columns have class names and all values are from 0 to 1, and
    otherwise "regression".
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
    """Return the number of outputs of a model for this cache; for masks, `mask_classes` must be given."""
    return _kind(name).count_outputs(dataset, mask_classes)


def _kind(name: str) -> type[Task]:
    if name not in TASKS:
        raise UsageError(f"there is no task {name!r}: use {', '.join(TASKS)}")
    kind: type[Task] = TASKS[name]
    return kind
