"""Metrics are scikit-learn's, for any number of samples, and say what they leave out."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import sklearn.metrics

from tpucache.training import metrics
from tpucache.training.metrics import class_metrics, mask_metrics, multilabel_metrics, regression_metrics


@pytest.fixture(autouse=True)
def said_anew():
    metrics._say_once.cache_clear()


def softmax(scores):
    powers = np.exp(scores)
    return (powers / powers.sum(1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("samples", [7, 8, 9, 1000])
def test_class_metrics_are_scikit_learns(samples):
    rng = np.random.default_rng(samples)
    labels = np.concatenate([np.arange(3), rng.integers(0, 3, samples - 3)])
    probabilities = softmax(rng.normal(0, 1, (samples, 3)) + np.eye(3)[labels])
    found = class_metrics(probabilities, labels)
    predicted = probabilities.argmax(1)
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, predicted))
    assert found["f1"] == pytest.approx(sklearn.metrics.f1_score(labels, predicted, average="macro"))
    expected = sklearn.metrics.roc_auc_score(labels, probabilities.astype(np.float64), multi_class="ovr")
    assert found["auc"] == pytest.approx(expected, abs=1e-6)


def test_auc_leaves_out_classes_that_no_sample_or_every_sample_has_and_says_so(caplog):
    labels = np.array([0, 0, 1, 1, 1])
    probabilities = softmax(np.random.default_rng(0).normal(0, 1, (5, 4)))
    with caplog.at_level(logging.WARNING, "tpucache"):
        for _ in range(2):
            found = class_metrics(probabilities, labels)
    aucs = [sklearn.metrics.roc_auc_score(labels == c, probabilities[:, c]) for c in (0, 1)]
    assert found["auc"] == pytest.approx(np.mean(aucs))
    assert [record.getMessage() for record in caplog.records] == [
        "AUC leaves out class 2, 3: the samples are all, or none, of it"
    ]
    assert class_metrics(probabilities[:1], labels[:1]).keys() == {"accuracy", "f1"}


def test_multilabel_metrics_are_scikit_learns():
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, (50, 4)).astype(np.float32)
    probabilities = np.clip(labels * 0.3 + rng.random((50, 4)) * 0.7, 0, 1).astype(np.float32)
    found = multilabel_metrics(probabilities, labels)
    predicted = probabilities > 0.5
    assert found["accuracy"] == pytest.approx((predicted == labels).mean())
    assert found["f1"] == pytest.approx(sklearn.metrics.f1_score(labels, predicted, average="macro"))
    assert found["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(labels, probabilities, average="macro"))


@pytest.mark.parametrize("samples", [1, 7, 1000])
def test_rmse_is_the_root_of_the_mean_square(samples):
    rng = np.random.default_rng(3)
    labels, values = (rng.normal(0, 9, (samples, 2)).astype(np.float32) for _ in range(2))
    expected = sklearn.metrics.root_mean_squared_error(labels.ravel(), values.ravel())
    assert regression_metrics(values, labels)["rmse"] == pytest.approx(expected, rel=1e-6)


def test_iou_is_scikit_learns_over_the_classes_there_are():
    rng = np.random.default_rng(4)
    truth, predicted = (rng.choice([0, 1, 3], 500) for _ in range(2))
    counts = sklearn.metrics.confusion_matrix(truth, predicted, labels=range(5))
    found = mask_metrics(counts)
    assert found["iou"] == pytest.approx(sklearn.metrics.jaccard_score(truth, predicted, average="macro"))
    assert found["accuracy"] == pytest.approx((truth == predicted).mean())
    assert np.isnan(mask_metrics(np.zeros((3, 3)))["iou"])


def test_without_scikit_learn_accuracy_stays_and_the_rest_is_said_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    probabilities, labels = softmax(np.random.default_rng(0).normal(0, 1, (9, 3))), np.arange(9) % 3
    with caplog.at_level(logging.WARNING, "tpucache"):
        assert class_metrics(probabilities, labels).keys() == {"accuracy"}
        assert multilabel_metrics(probabilities, np.eye(3)[labels]).keys() == {"accuracy"}
    assert len(caplog.records) == 1
    assert "tpucache[metrics]" in caplog.text
