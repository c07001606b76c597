"""Metrics over all samples at once, exact for any number of samples; they need only NumPy.

If a prediction is not finite, the metrics are NaN.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from tpucache.native import Array
from tpucache.text import named

#: The tasks' metrics, and whether more is better.
MORE_IS_BETTER: Final = {"loss": False, "accuracy": True, "f1": True, "auc": True, "rmse": False, "iou": True}


_log = logging.getLogger("tpucache")


def class_metrics(probabilities: Array, labels: Array) -> dict[str, float]:
    """Classes that all samples have, or none, are left out of AUC; samples with the label -1 do not count."""
    labelled = labels >= 0
    if not labelled.all():
        probabilities, labels = probabilities[labelled], labels[labelled]
    if not _is_measurable(probabilities):
        return _unknown("accuracy", "f1", "auc")
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(1)
    right = predicted == labels
    true, found, hit = (np.bincount(numbers, minlength=classes) for numbers in (labels, predicted, labels[right]))
    present = true + found > 0
    return {
        "accuracy": _share(right),
        "f1": float(np.mean(2 * hit[present] / (true + found)[present])),
        **_mean_auc(probabilities, lambda number: labels == number),
    }


def multilabel_metrics(probabilities: Array, labels: Array) -> dict[str, float]:
    """Return the accuracy at threshold 0.5, macro F1 and AUC of probabilities (n, classes) against labels of 0 and 1.

    F1 is 0 for a class that is neither among the labels nor predicted. AUC is over the classes that some samples have
    and others do not, and is left out if there is no such class.
    """
    if not _is_measurable(probabilities):
        return _unknown("accuracy", "f1", "auc")
    predicted, truth = probabilities > 0.5, labels > 0.5
    answers = predicted.sum(0) + truth.sum(0)
    f1 = 2 * (predicted & truth).sum(0) / np.maximum(answers, 1)
    auc = _mean_auc(probabilities, lambda number: truth[:, number])
    return {"accuracy": _share(predicted == truth), "f1": float(f1.mean()), **auc}


def regression_metrics(values: Array, labels: Array) -> dict[str, float]:
    """Return the root of the mean squared error over all numbers (n, m), summed in float64."""
    if not _is_measurable(values):
        return _unknown("rmse")
    return {"rmse": float(np.sqrt(np.mean(np.square(values.astype(np.float64) - labels))))}


def mask_metrics(confusion: Array) -> dict[str, float]:
    """Return pixel accuracy and mean IoU from counts (classes, classes), with a row for each true class.

    Without a pixel both are NaN.
    """
    counts = confusion.astype(np.float64)
    total = counts.sum()
    if not (np.isfinite(total) and total):
        return _unknown("accuracy", "iou")
    right = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - right
    present = union > 0
    return {"accuracy": float(right.sum() / total), "iou": float(np.mean(right[present] / union[present]))}


def _mean_auc(scores: Array, members: Callable[[int], Array]) -> dict[str, float]:
    aucs = {}
    for number, column in enumerate(scores.T):
        inside = column[members(number)]
        if 0 < len(inside) < len(column):
            aucs[number] = _auc(column, inside)
    missing = sorted(set(range(scores.shape[1])) - set(aucs))
    if missing:
        warn_once(f"AUC leaves out classes that all samples have, or no sample has: {named(missing, 10)}")
    return {"auc": float(np.mean(list(aucs.values())))} if aucs else {}


def _auc(scores: Array, inside: Array) -> float:
    """The Mann-Whitney statistic: how often a score inside is above another one; equal scores count half."""
    ordered, inside = np.sort(scores), np.sort(inside)
    # Twice the number of pairs in which a score inside is above any score; a tie counts half. Of the pairs of two
    # scores inside, half count.
    wins = np.searchsorted(ordered, inside, "left").sum() + np.searchsorted(ordered, inside, "right").sum()
    return float(wins - len(inside) ** 2) / (2 * len(inside) * (len(scores) - len(inside)))


def _is_measurable(predictions: Array) -> bool:
    return bool(len(predictions) and np.isfinite(predictions).all())


def _unknown(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, float("nan"))


def _share(right: Array) -> float:
    return float(np.count_nonzero(right) / right.size)


@functools.cache
def warn_once(message: str) -> None:
    _log.warning(message)
