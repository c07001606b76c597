"""Metrics are scikit-learn's, for any number of samples, and say what they leave out."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.training import metrics
from tpucache.training.metrics import class_metrics, mask_metrics, multilabel_metrics, regression_metrics


@pytest.fixture(autouse=True)
def said_anew():
    metrics.warn_once.cache_clear()


def softmax(scores):
    powers = np.exp(scores)
    return (powers / powers.sum(1, keepdims=True)).astype(np.float32)


@pytest.mark.slow
def test_auc_leaves_out_classes_that_no_sample_or_every_sample_has_and_says_so(caplog, sklearn_metrics):
    labels = np.array([0, 0, 1, 1, 1])
    probabilities = softmax(np.random.default_rng(0).normal(0, 1, (5, 4)))
    with caplog.at_level(logging.WARNING, "tpucache"):
        for _ in range(2):
            found = class_metrics(probabilities, labels)
    aucs = [sklearn_metrics.roc_auc_score(labels == c, probabilities[:, c]) for c in (0, 1)]
    assert found["auc"] == pytest.approx(np.mean(aucs))
    assert [record.getMessage() for record in caplog.records] == [
        "AUC leaves out classes that all samples have, or no sample has: 2, 3"
    ]
    assert class_metrics(probabilities[:1], labels[:1]).keys() == {"accuracy", "f1"}


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 7, 1000])
def test_rmse_is_the_root_of_the_mean_square(samples, sklearn_metrics):
    rng = np.random.default_rng(3)
    labels, values = (rng.normal(0, 9, (samples, 2)).astype(np.float32) for _ in range(2))
    expected = sklearn_metrics.root_mean_squared_error(labels.ravel(), values.ravel())
    assert regression_metrics(values, labels)["rmse"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_iou_is_scikit_learns_over_the_classes_there_are(sklearn_metrics):
    rng = np.random.default_rng(4)
    truth, predicted = (rng.choice([0, 1, 3], 500) for _ in range(2))
    counts = sklearn_metrics.confusion_matrix(truth, predicted, labels=range(5))
    found = mask_metrics(counts)
    assert found["iou"] == pytest.approx(sklearn_metrics.jaccard_score(truth, predicted, average="macro"))
    assert found["accuracy"] == pytest.approx((truth == predicted).mean())
    assert np.isnan(mask_metrics(np.zeros((3, 3)))["iou"])


def mean_auc(sklearn_metrics, probabilities, truth):
    """scikit-learn's AUC of each class that has members and others, and their mean."""
    known = [c for c in range(truth.shape[1]) if 0 < truth[:, c].sum() < len(truth)]
    return np.mean([sklearn_metrics.roc_auc_score(truth[:, c], probabilities[:, c]) for c in known]) if known else None


# Few distinct scores, so that most are tied, and more classes than some sets of labels have.
SHAPES = st.tuples(st.integers(1, 40), st.integers(2, 6), st.integers(1, 5), st.integers(0, 10**6))


@pytest.mark.slow
@given(SHAPES)
def test_class_metrics_are_scikit_learns_with_ties_and_classes_that_are_absent(sklearn_metrics, shape):
    samples, classes, levels, seed = shape
    rng = np.random.default_rng(seed)
    probabilities = (rng.integers(0, levels, (samples, classes)) / levels).astype(np.float32)
    labels = rng.choice(rng.integers(0, classes, 3), samples)
    found, predicted = class_metrics(probabilities, labels), probabilities.argmax(1)
    assert found["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted), abs=1e-9)
    expected = sklearn_metrics.f1_score(labels, predicted, average="macro", zero_division=0.0)
    assert found["f1"] == pytest.approx(expected, abs=1e-9)
    expected = mean_auc(sklearn_metrics, probabilities, labels[:, None] == np.arange(classes))
    assert found.get("auc") == (None if expected is None else pytest.approx(expected, abs=1e-9))


@pytest.mark.slow
@given(SHAPES)
def test_multilabel_metrics_are_scikit_learns_with_ties_and_columns_of_one_value(sklearn_metrics, shape):
    samples, classes, levels, seed = shape
    rng = np.random.default_rng(seed)
    probabilities = (rng.integers(0, levels + 1, (samples, classes)) / levels).astype(np.float32)
    labels = (rng.random((samples, classes)) < rng.choice([0, 0.2, 0.5, 1], classes)).astype(np.float32)
    found, predicted = multilabel_metrics(probabilities, labels), probabilities > 0.5
    each = [sklearn_metrics.f1_score(labels[:, c], predicted[:, c], zero_division=0.0) for c in range(classes)]
    assert found["f1"] == pytest.approx(np.mean(each), abs=1e-9)
    assert found["accuracy"] == pytest.approx((predicted == labels).mean(), abs=1e-9)
    expected = mean_auc(sklearn_metrics, probabilities, labels)
    assert found.get("auc") == (None if expected is None else pytest.approx(expected, abs=1e-9))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_metrics_of_predictions_that_are_not_finite_are_nan(bad):
    probabilities, labels = softmax(np.random.default_rng(0).normal(0, 1, (9, 3))), np.arange(9) % 3
    probabilities[4, 1] = bad
    found = [class_metrics(probabilities, labels), multilabel_metrics(probabilities, np.eye(3)[labels])]
    found += [regression_metrics(probabilities, np.eye(3)[labels]), mask_metrics(np.full((2, 2), bad))]
    assert [sorted(metrics) for metrics in found] == [["accuracy", "auc", "f1"]] * 2 + [["rmse"], ["accuracy", "iou"]]
    assert np.isnan([value for metrics in found for value in metrics.values()]).all()


def test_metrics_of_no_samples_are_nan():
    none = np.empty((0, 3), np.float32)
    for found in (class_metrics(none, np.empty(0, np.int64)), multilabel_metrics(none, none)):
        assert np.isnan(list(found.values())).all()
    assert np.isnan(regression_metrics(none, none)["rmse"])


def test_samples_without_a_label_count_nowhere():
    probabilities, labels = softmax(np.random.default_rng(0).normal(0, 1, (9, 3))), np.arange(9) % 3
    partly = np.concatenate([[-1, -1], labels])
    assert class_metrics(np.concatenate([probabilities[:2], probabilities]), partly) == class_metrics(
        probabilities, labels
    )
