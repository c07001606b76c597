"""Each task's loss is torch's, by hand where torch has none; what does not fit is refused with a reason."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from tpucache import CachedDataset, Recipe, UsageError, build_cache
from tpucache.training.settings import TASKS
from tpucache.training.tasks.find import count_outputs, infer_task, make_task

BATCH, OUTPUTS = 6, 4


def example(name, batch=BATCH):
    """Outputs, labels and (outputs of) shape for a task."""
    generator = torch.Generator().manual_seed(9)
    if name == "mask":
        scores = torch.randn(batch, OUTPUTS, 5, 7, generator=generator)
        return scores, torch.randint(0, OUTPUTS, (batch, 5, 7), generator=generator)
    scores = torch.randn(batch, OUTPUTS, generator=generator)
    if name == "classes":
        return scores, torch.randint(0, OUTPUTS, (batch,), generator=generator)
    if name == "multilabel":
        return scores, torch.randint(0, 2, (batch, OUTPUTS), generator=generator).float()
    return scores, torch.randn(batch, OUTPUTS, generator=generator)


@pytest.mark.parametrize("name", ["classes", "mask"])
def test_smoothed_targets_are_torchs(name):
    task = make_task(name, OUTPUTS)
    scores, labels = example(name)
    expected = functional.cross_entropy(scores, labels, label_smoothing=0.1)
    torch.testing.assert_close(task.loss(scores, task.targets(labels, 0.1)), expected)


def test_many_labels_are_smoothed_towards_one_half():
    task = make_task("multilabel", 2)
    assert torch.equal(task.targets(torch.tensor([[1.0, 0.0]]), 0.25), torch.tensor([[0.875, 0.125]]))


def test_predictions_are_what_outputs_mean():
    for name, expected in (("classes", lambda x: x.softmax(1)), ("mask", lambda x: x.softmax(1)),
                           ("multilabel", torch.sigmoid), ("regression", lambda x: x)):  # fmt: skip
        scores, _ = example(name)
        torch.testing.assert_close(make_task(name, OUTPUTS).predictions(scores), expected(scores))


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_metrics_are_of_predictions_and_labels(name, sklearn_metrics):
    task = make_task(name, OUTPUTS)
    scores, labels = example(name, 200)
    found = task.metrics(task.scores(scores, labels).numpy(), labels.numpy())
    if name == "regression":
        assert found == {"rmse": pytest.approx(functional.mse_loss(scores, labels).sqrt().item())}
        return
    predicted = scores > 0 if name == "multilabel" else scores.argmax(1)
    assert found["accuracy"] == pytest.approx((predicted == labels).float().mean().item())
    if name == "mask":
        expected = sklearn_metrics.jaccard_score(labels.ravel(), predicted.ravel(), average="macro")
        assert found["iou"] == pytest.approx(expected)
        assert found.keys() == {"accuracy", "iou"}
    else:
        assert found.keys() == {"accuracy", "f1", "auc"}


@pytest.mark.slow
def test_pixels_of_no_class_count_nowhere(sklearn_metrics):
    task = make_task("mask", 3)
    scores = torch.randn(2, 3, 4, 4)
    labels = torch.randint(0, 3, (2, 4, 4))
    void = labels.clone()
    void[0, :2] = 255
    kept = void != 255
    each = functional.cross_entropy(scores, labels, reduction="none")
    torch.testing.assert_close(task.loss(scores, task.targets(void)), each[kept].mean())
    torch.testing.assert_close(task.loss(scores, task.targets(void, 0.1)), functional.cross_entropy(
        scores.movedim(1, -1)[kept], labels[kept], label_smoothing=0.1))  # fmt: skip
    torch.testing.assert_close(task.losses(scores, void)[0], each[0][kept[0]].mean())
    counts = task.confusion(scores, void)
    for row in range(2):
        expected = sklearn_metrics.confusion_matrix(
            void[row][kept[row]], scores.argmax(1)[row][kept[row]], labels=range(3)
        )
        assert np.array_equal(counts[row].numpy(), expected)
    nothing = torch.full((1, 4, 4), 255)
    assert task.loss(scores[:1], task.targets(nothing)) == 0


def test_padding_is_of_no_class():
    task = make_task("classes", 3)
    assert task.targets(torch.tensor([-1, 2])).tolist() == [[0, 0, 0], [0, 0, 1]]
    assert task.losses(torch.randn(2, 3), torch.tensor([-1, 2]))[0] == 0


@pytest.mark.parametrize("name", TASKS)
def test_labels_that_fit_are_taken_and_outputs_that_do_not_are_refused(name):
    task = make_task(name, OUTPUTS)
    scores, labels = example(name)
    task.check(labels.numpy())
    for call in (lambda: task.loss(scores[:, :2], task.targets(labels)), lambda: task.losses(scores[:, :2], labels)):
        with pytest.raises(UsageError, match="the model's outputs are"):
            call()


def test_the_labels_decide_the_task(cache, photos, tmp_path):
    dataset = CachedDataset(cache)
    assert infer_task(dataset) == "classes"
    assert count_outputs("classes", dataset) == 4
    with pytest.raises(UsageError, match="give their number"):
        count_outputs("mask", dataset)
    floats, classes = torch.rand(150, 5), tuple("abcde")
    for labels, names, task in (
        (floats, classes, "multilabel"),
        (floats + 1, classes, "regression"),
        (floats, (), "regression"),
    ):
        labelled = SimpleNamespace(labels=labels, classes=names, names=["image"])
        assert infer_task(labelled) == task
        assert count_outputs(task, labelled) == 5
    build_cache(photos / "ant", tmp_path / "flat", Recipe(size=16), jobs=1)
    with pytest.raises(UsageError, match="no labels"):
        infer_task(CachedDataset(tmp_path / "flat"))
