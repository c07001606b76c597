"""Metrics over all samples at once, exact for any number of samples; they need only NumPy.

If a prediction is not finite, the metrics are NaN.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tpucache.types import Array

#: The tasks' metrics, and whether more is better.
MORE_IS_BETTER: Final = {"loss": False, "accuracy": True, "f1": True, "auc": True, "rmse": False, "iou": True}

#: Thresholds that F-beta chooses from: hundredths, and for rare classes thousandths.
THRESHOLDS: Final = np.concatenate([np.arange(1, 10) / 1000, np.arange(1, 100) / 100])
#: Metrics of `--metric` for which less is better.
_LESS_IS_BETTER: Final = ("log_loss", "mae", "rmsle")
_TOP: Final = 5

_F_BETA: Final = re.compile(r"f(\d+(?:\.\d+)?)(?:_(macro|micro|samples))?")
_LEAST_PROBABILITY: Final = 2.0**-23
_NAMED_CLASSES: Final = 10  # in a warning, at most

_log = logging.getLogger("tpucache")

#: A function of the predictions and labels of all samples, as a task's own metrics get them.
Metric = Callable[[Array, Array], float]


def class_metrics(probabilities: Array, labels: Array) -> dict[str, float]:
    """Return accuracy, macro F1 and one-vs-rest macro AUC of probabilities (n, classes) against class numbers (n,).

    F1 is over the classes among the labels or the predictions. AUC is over the classes that some samples have and
    others do not, and is left out if there is no such class. Samples with the label -1 have no class and do not count.
    """
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

    The mean is over the classes among the labels or the predictions. Without a pixel both are NaN.
    """
    counts = confusion.astype(np.float64)
    total = counts.sum()
    if not (np.isfinite(total) and total):
        return _unknown("accuracy", "iou")
    right = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - right
    present = union > 0
    return {"accuracy": float(right.sum() / total), "iou": float(np.mean(right[present] / union[present]))}


class NamedMetric(NamedTuple):
    """A metric that `--metric` names: a function of predictions and labels, and whether a higher value is better."""

    compute: Callable[[Array, Array], Mapping[str, float]]
    more_is_better: bool = True


def find_metric(name: str, known: Mapping[str, Metric], has_thresholds: bool) -> NamedMetric | None:
    """Return the metric called `name`: one in `known`, or F-beta if `has_thresholds`; None for other names."""
    if name in known:
        metric = known[name]
        return NamedMetric(lambda predictions, labels: {name: metric(predictions, labels)}, name not in _LESS_IS_BETTER)
    match = _F_BETA.fullmatch(name) if has_thresholds else None
    if match is None or not 0 < float(match[1]) < math.inf:
        return None
    beta, average = float(match[1]), match[2] or "macro"
    return NamedMetric(lambda predictions, labels: _best_f_beta(name, predictions, labels, beta, average))


def quadratic_kappa(predictions: Array, labels: Array) -> float:
    """Return Cohen's kappa with quadratic weights.

    For probabilities (n, classes), the most probable class counts. Values (n, m) are rounded, and the result is the
    mean over columns. It is NaN if all predictions and labels are one class. Samples with the label -1 do not count.
    """
    if not _is_measurable(predictions):
        return math.nan
    if labels.ndim == 2:
        return float(np.mean([_kappa(*columns) for columns in zip(np.rint(predictions).T, labels.T, strict=True)]))
    return _kappa(predictions.argmax(1)[labels >= 0], labels[labels >= 0])


def log_loss(probabilities: Array, labels: Array) -> float:
    """Return the mean cross-entropy of probabilities (n, classes) against class numbers (n,), or 0 and 1 (n, classes).

    Probabilities are clipped to at least 2^-23, as scikit-learn does for float32. Samples with the label -1 do not
    count.
    """
    if not _is_measurable(probabilities):
        return math.nan
    probabilities = probabilities.astype(np.float64)
    if labels.ndim == 1:
        labelled = np.flatnonzero(labels >= 0)
        rows = probabilities[labelled] / probabilities[labelled].sum(1, keepdims=True)
        right = rows[np.arange(len(rows)), labels[labelled]]
    else:
        right = np.where(labels > 0.5, probabilities, 1 - probabilities)
    return float(-np.log(np.clip(right, _LEAST_PROBABILITY, 1)).mean()) if right.size else math.nan


def mean_average_precision(probabilities: Array, labels: Array) -> float:
    """Return the mean of scikit-learn's average precision, over the classes that some sample has."""
    if not _is_measurable(probabilities):
        return math.nan
    if labels.ndim == 1:
        probabilities, labels = probabilities[labels >= 0], labels[labels >= 0]
    truth = labels[:, None] == np.arange(probabilities.shape[1]) if labels.ndim == 1 else labels > 0.5
    present = truth.any(0)
    if not present.all():
        _warn_once(
            f"mean average precision leaves out classes without samples: {_listed(np.flatnonzero(~present).tolist())}"
        )
    found = [_average_precision(probabilities[:, number], truth[:, number]) for number in np.flatnonzero(present)]
    return float(np.mean(found)) if found else math.nan


def balanced_accuracy(probabilities: Array, labels: Array) -> float:
    """Return the mean of the recalls of the classes among the labels. Samples with the label -1 do not count."""
    probabilities, labels = probabilities[labels >= 0], labels[labels >= 0]
    if not _is_measurable(probabilities):
        return math.nan
    true = np.bincount(labels)
    hit = np.bincount(labels[probabilities.argmax(1) == labels], minlength=len(true))
    return float(np.mean(hit[true > 0] / true[true > 0]))


def mcc(probabilities: Array, labels: Array) -> float:
    """Return Matthews' correlation coefficient for any number of classes (Gorodkin, 2004).

    It is 0 if all labels, or all predictions, are one class. Samples with the label -1 do not count.
    """
    probabilities, labels = probabilities[labels >= 0], labels[labels >= 0]
    if not _is_measurable(probabilities):
        return math.nan
    predicted, classes, count = probabilities.argmax(1), probabilities.shape[1], len(labels)
    true, found = (np.bincount(each, minlength=classes).astype(np.float64) for each in (labels, predicted))
    below = math.sqrt((count**2 - float(found @ found)) * (count**2 - float(true @ true)))
    return float(np.count_nonzero(predicted == labels) * count - true @ found) / below if below else 0.0


def top5(probabilities: Array, labels: Array) -> float:
    """Return the share of samples whose class is among the five most probable. Samples with label -1 do not count."""
    probabilities, labels = probabilities[labels >= 0], labels[labels >= 0]
    if not _is_measurable(probabilities):
        return math.nan
    first = np.argsort(-probabilities, 1, kind="stable")[:, :_TOP]
    return _share((first == labels[:, None]).any(1))


def mae(values: Array, labels: Array) -> float:
    """Return the mean absolute error over all numbers (n, m)."""
    return float(np.abs(values.astype(np.float64) - labels).mean()) if _is_measurable(values) else math.nan


def r2(values: Array, labels: Array) -> float:
    """Return the coefficient of determination of values (n, m), the mean over columns.

    It is NaN if a column of labels is constant.
    """
    if not _is_measurable(values):
        return math.nan
    labels = labels.astype(np.float64)
    spread = np.square(labels - labels.mean(0)).sum(0)
    missed = np.square(values - labels).sum(0)
    return float(np.mean(1 - missed / spread)) if (spread > 0).all() else math.nan


def rmsle(values: Array, labels: Array) -> float:
    """Return the root of the mean squared difference of log(1 + x) over all numbers (n, m).

    Predictions below 0 count as 0. It is NaN if a label is below 0.
    """
    if not _is_measurable(values) or labels.min() < 0:
        return math.nan
    logs = np.log1p(np.maximum(values.astype(np.float64), 0)) - np.log1p(labels.astype(np.float64))
    return float(np.sqrt(np.mean(np.square(logs))))


def mask_dice(confusion: Array, _labels: Array) -> float:
    """Return the mean Dice over classes from counts (n, classes, classes), with a row for each true class.

    The pixels of all samples are counted together. The mean is over the classes among the labels or the predictions.
    """
    counts = confusion.astype(np.float64).sum(0)
    both = counts.sum(0) + counts.sum(1)
    present = both > 0
    if not (np.isfinite(counts).all() and present.any()):
        return math.nan
    return float(np.mean(2 * counts.diagonal()[present] / both[present]))


def _kappa(predicted: Array, labels: Array) -> float:
    """Return quadratic kappa: 1 minus the mean squared difference over its expected value for independent draws."""
    if not len(labels):
        return math.nan
    predicted, labels = predicted.astype(np.float64), labels.astype(np.float64)
    by_chance = predicted.var() + labels.var() + (predicted.mean() - labels.mean()) ** 2
    return float(1 - np.mean(np.square(predicted - labels)) / by_chance) if by_chance else math.nan


def _average_precision(scores: Array, truth: Array) -> float:
    """Return the sum over thresholds of the gain in recall times the precision, as scikit-learn does."""
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(truth[order])
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # equal scores pass a threshold together
    return float(np.sum(np.diff(hits[last], prepend=0) * hits[last] / (last + 1)) / hits[-1])


def f_beta(probabilities: Array, labels: Array, beta: float, average: str, thresholds: Array) -> Array:
    """Return F-beta (Van Rijsbergen, 1979) for each threshold above which a class is predicted: float64 (thresholds,).

    `probabilities` and `labels`, which are 0 or 1, are (n, classes). `average` is "macro", over classes; "micro", over
    all pairs of sample and class; or "samples", over samples. A class or sample with nothing true and nothing predicted
    has 0, as in scikit-learn.
    """
    truth = labels > 0.5
    if average == "samples":
        found = []
        for threshold in thresholds:
            predicted = probabilities > threshold
            found.append(_f((predicted & truth).sum(1), predicted.sum(1), truth.sum(1), beta).mean())
        return np.array(found)
    counts = []
    for column, true in zip(probabilities.T, truth.T, strict=True):
        # For each threshold, how many of all scores, and of the scores of true samples, are above it.
        every, hits = (
            len(part) - np.searchsorted(np.sort(part), thresholds, "right") for part in (column, column[true])
        )
        counts.append((hits, every, np.full(len(thresholds), np.count_nonzero(true))))
    hit, predicted, true_count = np.array(counts).transpose(1, 2, 0)
    if average == "micro":
        return _f(hit.sum(1), predicted.sum(1), true_count.sum(1), beta)
    mean: Array = _f(hit, predicted, true_count, beta).mean(1)
    return mean


def _f(hit: Array, predicted: Array, true: Array, beta: float) -> Array:
    below = beta**2 * true + predicted
    return np.divide((1 + beta**2) * hit, below, out=np.zeros(np.shape(below)), where=below > 0)


def _best_f_beta(name: str, predictions: Array, labels: Array, beta: float, average: str) -> dict[str, float]:
    """Return the highest F-beta over `THRESHOLDS`, and its threshold.

    Labels that are class numbers have two classes: the F-beta is that of the second class.
    """
    if labels.ndim == 1:
        predictions, labels = predictions[labels >= 0, 1:], labels[labels >= 0, None]
    if not _is_measurable(predictions):
        return {name: math.nan, f"{name}_threshold": math.nan}
    found = f_beta(predictions, labels, beta, average, THRESHOLDS)
    best = int(found.argmax())
    return {name: float(found[best]), f"{name}_threshold": float(THRESHOLDS[best])}


def _mean_auc(scores: Array, members: Callable[[int], Array]) -> dict[str, float]:
    """Return the mean AUC over the classes that some samples have and others do not; {} if there is no such class.

    `scores` are (n, classes). `members` takes a class's number, and returns for each sample whether it has the class.
    """
    aucs = {}
    for number, column in enumerate(scores.T):
        inside = column[members(number)]
        if 0 < len(inside) < len(column):
            aucs[number] = _auc(column, inside)
    missing = sorted(set(range(scores.shape[1])) - set(aucs))
    if missing:
        _warn_once(f"AUC leaves out classes that all samples have, or no sample has: {_listed(missing)}")
    return {"auc": float(np.mean(list(aucs.values())))} if aucs else {}


def _auc(scores: Array, inside: Array) -> float:
    """Return how often a score in `inside` is above one of the other `scores`, as a share of all pairs.

    Equal scores count half. This is the Mann-Whitney statistic, and the area under the ROC curve.
    """
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


def _listed(classes: Sequence[int]) -> str:
    more = len(classes) - _NAMED_CLASSES
    return ", ".join(map(str, classes[:_NAMED_CLASSES])) + (f" and {more:,} more" if more > 0 else "")


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)
