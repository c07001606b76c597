"""Metrics are scikit-learn's, for any number of samples, and say what they leave out."""

from __future__ import annotations

import logging
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thorough import thorough

from tpucache import UsageError
from tpucache.training.learn import metrics
from tpucache.training.learn.metrics import class_metrics, mask_metrics, multilabel_metrics, regression_metrics
from tpucache.training.learn.tasks.find import make_task


@pytest.fixture(autouse=True)
def said_anew():
    metrics._warn_once.cache_clear()


def softmax(scores):
    powers = np.exp(scores)
    return (powers / powers.sum(1, keepdims=True)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [7, 8, 9, 1000])
def test_class_metrics_are_scikit_learns(samples, sklearn_metrics):
    rng = np.random.default_rng(samples)
    labels = np.concatenate([np.arange(3), rng.integers(0, 3, samples - 3)])
    probabilities = softmax(rng.normal(0, 1, (samples, 3)) + np.eye(3)[labels])
    found = class_metrics(probabilities, labels)
    predicted = probabilities.argmax(1)
    assert found["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted))
    assert found["f1"] == pytest.approx(sklearn_metrics.f1_score(labels, predicted, average="macro"))
    expected = sklearn_metrics.roc_auc_score(labels, probabilities.astype(np.float64), multi_class="ovr")
    assert found["auc"] == pytest.approx(expected, abs=1e-6)


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
def test_multilabel_metrics_are_scikit_learns(sklearn_metrics):
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, (50, 4)).astype(np.float32)
    probabilities = np.clip(labels * 0.3 + rng.random((50, 4)) * 0.7, 0, 1).astype(np.float32)
    found = multilabel_metrics(probabilities, labels)
    predicted = probabilities > 0.5
    assert found["accuracy"] == pytest.approx((predicted == labels).mean())
    assert found["f1"] == pytest.approx(sklearn_metrics.f1_score(labels, predicted, average="macro"))
    assert found["auc"] == pytest.approx(sklearn_metrics.roc_auc_score(labels, probabilities, average="macro"))


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


def test_metrics_need_no_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    probabilities, labels = softmax(np.random.default_rng(0).normal(0, 1, (9, 3))), np.arange(9) % 3
    assert class_metrics(probabilities, labels).keys() == {"accuracy", "f1", "auc"}
    assert multilabel_metrics(probabilities, np.eye(3)[labels]).keys() == {"accuracy", "f1", "auc"}


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
@pytest.mark.parametrize(("samples", "classes"), [(1, 3), (9, 3), (200, 7), (300, 2), (50, 40)])
def test_metrics_of_classes_that_are_named_are_scikit_learns(sklearn_metrics, samples, classes):
    rng = np.random.default_rng(samples)
    probabilities, labels = softmax(rng.normal(size=(samples, classes))), rng.integers(0, classes, samples)
    predicted = probabilities.argmax(1)
    known, _ = np.unique(labels, return_counts=True)
    recall = sklearn_metrics.recall_score(labels, predicted, labels=known, average="macro", zero_division=0.0)
    assert metrics.balanced_accuracy(probabilities, labels) == pytest.approx(recall)
    assert metrics.mcc(probabilities, labels) == pytest.approx(sklearn_metrics.matthews_corrcoef(labels, predicted))
    expected = 1.0
    if classes > 5:
        expected = sklearn_metrics.top_k_accuracy_score(labels, probabilities, k=5, labels=np.arange(classes))
    assert metrics.top5(probabilities, labels) == pytest.approx(expected)
    beside = np.concatenate([probabilities, probabilities[:1]]), np.append(labels, -1)
    for metric in (metrics.balanced_accuracy, metrics.mcc, metrics.top5):
        assert metric(*beside) == metric(probabilities, labels)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 3])
def test_metrics_of_numbers_that_are_named_are_scikit_learns(sklearn_metrics, columns):
    rng = np.random.default_rng(columns)
    labels = rng.uniform(0, 50, (40, columns)).astype(np.float32)
    values = np.abs(labels + rng.normal(0, 5, labels.shape)).astype(np.float32)
    assert metrics.mae(values, labels) == pytest.approx(sklearn_metrics.mean_absolute_error(labels, values))
    assert metrics.r2(values, labels) == pytest.approx(sklearn_metrics.r2_score(labels, values))
    squared = sklearn_metrics.mean_squared_log_error(labels, values)
    assert metrics.rmsle(values, labels) == pytest.approx(np.sqrt(squared), rel=1e-5)
    assert metrics.rmsle(np.full((1, 1), -3.0), np.zeros((1, 1))) == 0
    assert np.isnan(metrics.rmsle(np.zeros((1, 1)), np.full((1, 1), -1.0)))
    assert np.isnan(metrics.r2(values, np.ones_like(labels)))


def test_less_is_better_of_errors_that_are_named():
    known = {"mae": metrics.mae, "r2": metrics.r2, "rmsle": metrics.rmsle}
    better = {name: metrics.find_metric(name, known, has_thresholds=False).more_is_better for name in known}
    assert better == {"mae": False, "r2": True, "rmsle": False}


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


@pytest.mark.slow
def test_metrics_of_a_thousand_classes_take_less_than_two_seconds():
    rng = np.random.default_rng(5)
    probabilities, labels = rng.random((20_000, 1000), np.float32), rng.integers(0, 1000, 20_000)
    began = time.process_time()  # of this process, whatever else the machine does
    class_metrics(probabilities, labels)
    assert time.process_time() - began < 2


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


def test_of_many_classes_left_out_the_first_are_named(caplog):
    with caplog.at_level(logging.WARNING, "tpucache"):
        class_metrics(softmax(np.random.default_rng(0).normal(0, 1, (9, 30))), np.arange(9) % 3)
    assert "has: 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 and 17 more" in caplog.text


def confused(samples, classes, seed):
    """Probabilities with ties, and labels that they are often right about, float32 and int64."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    scores = np.round(rng.normal(0, 1, (samples, classes)) + 1.5 * np.eye(classes)[labels], 1)
    return softmax(scores), labels


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "classes"), [(5, 2), (60, 3), (400, 6)])
def test_metrics_of_classes_by_name_are_scikit_learns(samples, classes, sklearn_metrics):
    probabilities, labels = confused(samples, classes, samples)
    task = make_task("classes", classes)
    found = {name: task.named_metric(name).compute(probabilities, labels)[name] for name in task.named_metrics}
    numbers, exact = np.arange(classes), probabilities.astype(np.float64)
    kappa = sklearn_metrics.cohen_kappa_score(labels, probabilities.argmax(1), labels=numbers, weights="quadratic")
    assert found["quadratic_kappa"] == pytest.approx(kappa)
    exact /= exact.sum(1, keepdims=True)
    assert found["log_loss"] == pytest.approx(sklearn_metrics.log_loss(labels, exact, labels=numbers))
    each = [
        sklearn_metrics.average_precision_score(labels == number, probabilities[:, number])
        for number in numbers
        if (labels == number).any()
    ]
    assert found["mean_average_precision"] == pytest.approx(np.mean(each))


@pytest.mark.slow
@pytest.mark.parametrize("average", ["macro", "micro", "samples"])
@pytest.mark.parametrize("beta", [*thorough(0.5, 1), 2])
def test_f_beta_is_scikit_learns_at_the_threshold_where_it_is_highest(average, beta, sklearn_metrics):
    rng = np.random.default_rng(4)
    labels = (rng.random((80, 5)) < [0.5, 0.02, 0.3, 0.0, 0.9]).astype(np.float32)
    probabilities = np.clip(labels * 0.3 + rng.random((80, 5)) * 0.7, 0, 1).astype(np.float32)
    name = f"f{beta}" if average == "macro" else f"f{beta}_{average}"
    found = make_task("multilabel", 5).named_metric(name).compute(probabilities, labels)
    scores = [
        sklearn_metrics.fbeta_score(labels, probabilities > threshold, beta=beta, average=average, zero_division=0)
        for threshold in metrics.THRESHOLDS
    ]
    assert found == {name: pytest.approx(max(scores)), f"{name}_threshold": metrics.THRESHOLDS[int(np.argmax(scores))]}


@pytest.mark.slow
def test_f_beta_of_two_classes_is_that_of_the_second(sklearn_metrics):
    probabilities, labels = confused(200, 2, 1)
    found = make_task("classes", 2).named_metric("f2").compute(probabilities, labels)
    predicted = probabilities[:, 1] > found["f2_threshold"]
    assert found["f2"] == pytest.approx(sklearn_metrics.fbeta_score(labels, predicted, beta=2))
    assert found["f2"] >= sklearn_metrics.fbeta_score(labels, probabilities.argmax(1), beta=2)


@pytest.mark.slow
def test_log_loss_and_average_precision_of_many_labels_are_scikit_learns(sklearn_metrics):
    rng = np.random.default_rng(6)
    labels = (rng.random((70, 4)) < 0.4).astype(np.float32)
    labels[:, 3] = 0
    probabilities = np.round(np.clip(labels * 0.2 + rng.random((70, 4)), 0.01, 0.99), 2).astype(np.float32)
    task = make_task("multilabel", 4)
    losses = [
        sklearn_metrics.log_loss(labels[:, n], probabilities[:, n].astype(float), labels=[0, 1]) for n in range(4)
    ]
    assert task.named_metric("log_loss").compute(probabilities, labels)["log_loss"] == pytest.approx(np.mean(losses))
    found = task.named_metric("mean_average_precision").compute(probabilities, labels)
    expected = sklearn_metrics.average_precision_score(labels[:, :3], probabilities[:, :3])
    assert found == {"mean_average_precision": pytest.approx(expected)}


@pytest.mark.slow
def test_kappa_of_a_regression_is_that_of_its_rounded_values(sklearn_metrics):
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 5, (90, 1)).astype(np.float32)
    values = (labels + rng.normal(0, 0.7, labels.shape)).astype(np.float32)
    rounded = np.rint(values).astype(int)
    expected = sklearn_metrics.cohen_kappa_score(
        labels[:, 0].astype(int), rounded[:, 0], labels=np.arange(rounded.min(), rounded.max() + 1), weights="quadratic"
    )
    found = make_task("regression", 1).named_metric("quadratic_kappa").compute(values, labels)
    assert found == {"quadratic_kappa": pytest.approx(expected)}


@pytest.mark.slow
def test_dice_of_masks_is_torchmetrics_over_all_pixels():
    from torchmetrics.functional.segmentation import dice_score

    generator = torch.Generator().manual_seed(2)
    outputs = torch.randn(6, 4, 9, 7, generator=generator)
    labels = torch.randint(0, 3, (6, 9, 7), generator=generator)
    outputs[:, 3] = -9  # of neither a label nor a prediction
    task = make_task("mask", 4)
    found = task.named_metric("dice").compute(task.collect(task.scores(outputs, labels).numpy()), labels.numpy())
    one_hot = [
        torch.nn.functional.one_hot(each, 4).movedim(3, 1).movedim(1, 0)[None, :3]
        for each in (outputs.argmax(1), labels)
    ]
    found_masks, masks = (each.flatten(2) for each in one_hot)
    expected = dice_score(found_masks, masks, num_classes=3, average="macro")
    assert found == {"dice": pytest.approx(expected.item())}


def test_named_metrics_of_nothing_of_one_class_and_of_what_is_not_finite_are_nan():
    for name, shape in (("classes", (4, 2)), ("multilabel", (4, 2)), ("regression", (4, 1))):
        task = make_task(name, shape[1])
        labels = np.zeros(4, np.int64) if name == "classes" else np.zeros(shape, np.float32)
        for metric in [*task.named_metrics, *["f2", "f0.5_micro", "f1_samples"] * task.has_thresholds]:
            compute = task.named_metric(metric).compute
            assert all(np.isnan(value) for value in compute(np.full(shape, np.nan, np.float32), labels).values())
            assert all(np.isnan(value) for value in compute(np.empty((0, shape[1]), np.float32), labels[:0]).values())
    same = (
        make_task("classes", 2).named_metric("quadratic_kappa").compute(np.tile([0.9, 0.1], (4, 1)), np.zeros(4, int))
    )
    assert np.isnan(same["quadratic_kappa"])
    assert np.isnan(make_task("mask", 2).named_metric("dice").compute(np.zeros((1, 2, 2)), np.zeros(1))["dice"])


@pytest.mark.parametrize(
    ("task", "outputs", "name"),
    [("classes", 3, "f2"), ("classes", 3, "dice"), ("regression", 1, "log_loss"), ("mask", 2, "f1"),
     ("multilabel", 2, "f0"), ("multilabel", 2, "f2_weighted"), ("multilabel", 2, "quadratic_kappa")],
)  # fmt: skip
def test_a_metric_that_a_task_does_not_have_is_refused_with_those_that_it_has(task, outputs, name):
    with pytest.raises(UsageError, match="use a metric of the task, or module:name"):
        make_task(task, outputs).named_metric(name)


def test_a_sample_without_a_label_counts_in_no_named_metric():
    probabilities, labels = confused(50, 2, 3)
    more = np.concatenate([probabilities, probabilities[:9]]), np.concatenate([labels, np.full(9, -1)])
    task = make_task("classes", 2)
    for name in (*task.named_metrics, "f2"):
        compute = task.named_metric(name).compute
        assert compute(*more) == pytest.approx(compute(probabilities, labels))
