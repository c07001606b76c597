"""What predictions are worth, over all samples at once: exact for any number of them.

Accuracy, the root of the mean squared error and IoU are a few lines of NumPy. F1 and AUC are scikit-learn's; without it
they are left out, which is said once.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_log = logging.getLogger("tpucache")


def class_metrics(probabilities: Array, labels: Array) -> dict[str, float]:
    """Return accuracy, macro F1 and one-vs-rest macro AUC of (n, classes) against class numbers (n,)."""
    predicted = probabilities.argmax(1)
    metrics = {"accuracy": _share(predicted == labels)}
    sklearn = _sklearn()
    if sklearn is not None:
        metrics["f1"] = float(sklearn.f1_score(labels, predicted, average="macro", zero_division=0.0))
        metrics.update(_auc(sklearn, probabilities, labels[:, None] == np.arange(probabilities.shape[1])))
    return metrics


def multilabel_metrics(probabilities: Array, labels: Array) -> dict[str, float]:
    """Return the share of right answers at 0.5, macro F1 and AUC of (n, classes) against 0 and 1 of that shape."""
    predicted, truth = probabilities > 0.5, labels > 0.5
    metrics = {"accuracy": _share(predicted == truth)}
    sklearn = _sklearn()
    if sklearn is not None:
        metrics["f1"] = float(
            np.mean([_binary_f1(sklearn, truth[:, c], predicted[:, c]) for c in range(truth.shape[1])])
        )
        metrics.update(_auc(sklearn, probabilities, truth))
    return metrics


def regression_metrics(values: Array, labels: Array) -> dict[str, float]:
    """Return the root of the mean squared error over all (n, m), summed in float64."""
    return {"rmse": float(np.sqrt(np.mean(np.square(values.astype(np.float64) - labels))))}


def mask_metrics(confusion: Array) -> dict[str, float]:
    """Return pixel accuracy and mean IoU from counts (classes, classes), a row a true class.

    The mean is over the classes that are in the truth or in the predictions.
    """
    counts = confusion.astype(np.float64)
    right = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - right
    present = union > 0
    iou = float(np.mean(right[present] / union[present])) if present.any() else float("nan")
    total = counts.sum()
    return {"accuracy": float(right.sum() / total) if total else float("nan"), "iou": iou}


def _auc(sklearn: ModuleType, probabilities: Array, truth: Array) -> dict[str, float]:
    """Return the mean AUC over the classes that have both samples in them and samples not; nothing where none has."""
    members = truth.sum(0)
    known = np.flatnonzero((members > 0) & (members < len(truth)))
    if len(known) < truth.shape[1]:
        missing = sorted(set(range(truth.shape[1])) - set(known.tolist()))
        _say_once(f"AUC leaves out class {', '.join(map(str, missing))}: the samples are all, or none, of it")
    if not len(known):
        return {}
    return {"auc": float(np.mean([sklearn.roc_auc_score(truth[:, c], probabilities[:, c]) for c in known]))}


def _binary_f1(sklearn: ModuleType, truth: Array, predicted: Array) -> float:
    return float(sklearn.f1_score(truth, predicted, zero_division=0.0))


def _share(right: Array) -> float:
    return float(np.count_nonzero(right) / right.size) if right.size else float("nan")


def _sklearn() -> ModuleType | None:
    try:
        import sklearn.metrics
    except ImportError:
        _say_once("F1 and AUC are left out without scikit-learn: `pip install 'tpucache[metrics]'`")
        return None
    return sklearn.metrics  # type: ignore[no-any-return]  # scikit-learn has no types


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)
