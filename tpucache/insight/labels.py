"""Finds suspects: samples whose labels are improbable to models that have not seen them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.runs import OUT_OF_FOLD_NAME
from tpucache.store.files import read_file
from tpucache.text import PREDICTION_COLUMNS, from_cell, from_heading, part_names, to_cell, to_csv

Integers = npt.NDArray[np.int64]

SUSPECTS_COLUMNS: Final = ("sample", "path", "label", "predicted", "score")

_ONE: Final = 1e-3  # rounded probabilities may miss a sum of 1 by this much


@dataclass(frozen=True)
class Suspects:
    """Samples ranked by how improbable their labels are, the most improbable first. A person should check them.

    `positions` are rows of the predictions, int64 (m,), without samples that have no label. `scores`, float64 (m,), are
    1 minus the probability of the label, and `classes`, int64 (m,), the most probable classes. If a sample can have
    several classes, its label is a 0 or 1 for each, and both are those of the least probable 0 or 1.
    """

    positions: Integers
    scores: npt.NDArray[np.float64]
    classes: Integers

    def __len__(self) -> int:
        return len(self.positions)


def suspects(predictions: Array, labels: Array) -> Suspects:
    """Rank samples by how improbable their labels are to models that were trained without these samples.

    `predictions` are probabilities (n, classes). `labels` are class numbers (n,), -1 for none, or 0 and 1 for each
    class (n, classes). Do not use a model's predictions of its own training samples: it has learned their labels.

    The score is 1 - p(label), "self-confidence" in Kuan and Mueller, "Model-agnostic label quality scoring to detect
    real-world label errors" (2022). Raises UsageError for shapes that do not fit, and for values that are no
    probabilities.
    """
    probabilities, labels = np.asarray(predictions, np.float64), np.asarray(labels)
    if probabilities.ndim != 2 or not probabilities.shape[1] or len(labels) != len(probabilities):
        raise UsageError(
            f"predictions have shape {probabilities.shape} and labels {labels.shape}: give a probability for each "
            "sample and class (n, classes), and a label for each sample"
        )
    _check_probabilities(probabilities)
    count, outputs = probabilities.shape
    if labels.ndim == 1:
        if labels.dtype.kind not in "iu" or (len(labels) and not -1 <= labels.min() <= labels.max() < outputs):
            raise UsageError(f"labels are class numbers, -1 (none) to {outputs - 1}, or 0 and 1 for each class")
        known = np.flatnonzero(labels >= 0)
        scores = 1 - probabilities[known, labels[known]]
        classes = probabilities[known].argmax(1)
    else:
        if labels.shape != probabilities.shape or not np.isin(labels, (0, 1)).all():
            raise UsageError(f"labels of several classes are 0 or 1 for each of {outputs} classes, (n, classes)")
        known = np.arange(count)
        doubt = np.where(labels > 0, 1 - probabilities, probabilities)
        classes = doubt.argmax(1)
        scores = doubt[known, classes]
    order = np.lexsort((known, -scores))
    return Suspects(known[order], scores[order], classes[order].astype(np.int64))


@dataclass(frozen=True)
class Predictions:
    """A table of predictions, as `predict` and `train --folds` write it, with n rows, one for each sample.

    `path` is the table's file. `numbers` and `paths` are the samples'. `labels` and `predictions` are the texts in the
    table. `probabilities`, float64 (n, classes), has a column for each of `classes`.
    """

    path: Path
    numbers: npt.NDArray[np.uint64]
    paths: Sequence[str]
    labels: Sequence[str]
    predictions: Sequence[str]
    classes: tuple[str, ...]
    probabilities: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.numbers)

    def label_numbers(self) -> Array:
        """Return the labels in the form that `suspects` takes: int64 (n,) or bool (n, classes).

        They are class numbers if each sample's probabilities add up to 1. Raises UsageError for labels that are no
        classes, and for predictions that are no probabilities.
        """
        _check_probabilities(self.probabilities)
        numbers = {name: number for number, name in enumerate(self.classes)}
        has_one = np.abs(self.probabilities.sum(1) - 1).max(initial=0.0) < _ONE
        marks = np.zeros(self.probabilities.shape, np.bool_)
        for row, label in enumerate(self.labels):
            is_one = has_one or (label in numbers and not numbers.keys() >= {*part_names(label)})  # it has a semicolon
            for name in ([label] if label else []) if is_one else part_names(label):
                if name not in numbers:
                    raise UsageError(
                        f"the table {self.path} has the label {name!r:.100}, which is none of its {len(self.classes)} "
                        "classes: give a table whose labels are among the classes that it has probabilities for"
                    )
                marks[row, numbers[name]] = True
        return np.where(marks.any(1), marks.argmax(1), -1) if has_one and marks.size else marks


def _check_probabilities(values: Array) -> None:
    if not np.all((values >= 0) & (values <= 1)):  # also refuses NaN
        raise UsageError(
            "predictions are not probabilities from 0 to 1: give the predictions of a task with classes, because "
            "suspects are found only among labels that are classes"
        )


def read_predictions(table: str | Path) -> Predictions:
    """Return the predictions in a CSV file, or in the out-of-fold table of a folder that `train --folds` has filled.

    Raises UsageError.
    """
    path = Path(table)
    path = path / OUT_OF_FOLD_NAME if path.is_dir() else path
    try:
        text = io.StringIO(read_file(path).decode("utf-8-sig"), newline="")
        heading, *rows = list(csv.reader(text, strict=True)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"{path} cannot be read as a table of predictions: {error!s:.300}. Give such a table, or the folder of a "
            "run that `train --folds` has finished"
        ) from error
    own = len(PREDICTION_COLUMNS)
    if tuple(heading[:own]) != PREDICTION_COLUMNS:
        raise UsageError(
            f"{path} is no table of predictions: the first columns of such a table are {', '.join(PREDICTION_COLUMNS)}"
        )
    for line, row in enumerate(rows, 2):
        if len(row) != len(heading):
            raise UsageError(f"{path}: row {line} needs {len(heading)} cells, as many as the heading has")
    try:
        numbers = np.array([int(row[0]) for row in rows], np.uint64)
        probabilities = np.array([row[own:] for row in rows], np.float64).reshape(len(rows), len(heading) - own)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{path} has something other than numbers in a column of numbers: {error!s:.200}") from error
    classes = tuple(map(from_heading, heading[own:]))
    if len({*numbers.tolist()}) < len(rows) or len({*classes}) < len(classes):
        raise UsageError(f"{path} has a sample twice, or a class: give a table with one row for each sample")
    paths, labels, predictions = ([from_cell(row[at]) for row in rows] for at in range(1, own))
    return Predictions(path, numbers, paths, labels, predictions, classes, probabilities)


def suspects_table(rows: Iterable[Iterable[object]]) -> bytes:
    """Return a CSV that `relabel` takes for corrections: number, path, label, proposed label, score."""
    return to_csv([SUSPECTS_COLUMNS, *([to_cell(str(value)) for value in row] for row in rows)])
