"""A regression learns standardised labels, and its predictions and metrics are in the unit of the labels."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import best_of, learner_on, predictor_of, train_on
from torch import nn

from tpucache import CachedDataset, CachedLoader, TrainingError, UsageError, build_cache
from tpucache.recipe import Recipe
from tpucache.training import fitting
from tpucache.training.evaluation import results, score
from tpucache.training.options import RunOptions
from tpucache.training.prediction import predict
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.find import make_task
from tpucache.training.tasks.regression import Regression, check_precision
from tpucache.warmup import TableOptions, TableSource

ORDERS = (("width", "height"), ("height", "width"))
LINEAR = TrainSettings(model="tiny_tasks:linear", epochs=10, batch_size=10, lr=0.02)
LABELS = np.array([[1e5, 0.01, 7], [5.5e5, 0.03, 7], [3e5, -0.02, 7]], np.float32)


@pytest.fixture(scope="module")
def prices(tmp_path_factory):
    """A cache whose labels have very different sizes."""
    folder = tmp_path_factory.mktemp("prices") / "cache"
    build_cache("tiny_tasks:prices", folder, Recipe(size=16), jobs=1)
    return CachedDataset(folder)


def learned() -> Regression:
    return Regression(3).learned_from(LABELS)


def standardised(labels: torch.Tensor) -> torch.Tensor:
    return (labels - torch.tensor(learned().mean)) / torch.tensor(learned().std)


def test_targets_are_standardised_each_column_by_itself_and_a_constant_one_has_the_deviation_1(prices):
    learner_task = learned_from(prices)
    targets = learner_task.targets(learner_task.as_learned(prices).values_of(np.arange(len(prices)))["label"])
    torch.testing.assert_close(targets.mean(0), torch.zeros(3))
    torch.testing.assert_close(targets.std(0, unbiased=False), torch.tensor([1.0, 1.0, 0.0]))
    assert learner_task.std[2] == learned().std[2] == 1


def test_predictions_and_metrics_are_in_the_unit_of_the_labels():
    task, labels = learned(), torch.from_numpy(LABELS)
    predictions = task.predictions(standardised(labels))
    torch.testing.assert_close(predictions, labels)
    torch.testing.assert_close(task.as_stored(standardised(labels)), labels)
    scores = task.scores(standardised(labels), labels).numpy()
    assert task.metrics(scores + 1, LABELS)["rmse"] == pytest.approx(1, 0.01)


def test_what_a_run_kept_of_the_labels_is_taken_over_or_refused():
    task = make_task("regression", 3)
    assert task.with_constants(learned().constants()) == learned()
    assert learned().with_constants({}) == task
    good = learned().constants()
    for bad in (
        [1.0],
        {"mean": good["mean"]},
        {**good, "other": [1.0]},
        {**good, "std": [1.0, 0.0, 1.0]},
        {**good, "std": [1.0]},
        {**good, "mean": [1.0, float("nan"), 1.0]},
        {**good, "mean": ["1", "2", "3"]},
    ):
        with pytest.raises(UsageError):
            task.with_constants(bad)
    with pytest.raises(UsageError, match="no constants"):
        make_task("classes", 3).with_constants(good)


@pytest.mark.slow
def test_runs_with_other_labels_are_averaged_in_the_unit_of_the_labels(prices, tmp_path):
    halves = prices.select(range(100)), prices.select(range(100, 200))
    runs = [tmp_path / name for name in ("first", "second")]
    for run, half in zip(runs, halves, strict=True):
        train_on(run, dataclasses.replace(LINEAR, epochs=3), half)
    columns = []
    for each in (runs[:1], runs[1:], runs):
        found = predict(predictor_of(*each), [prices], tmp_path / "out.csv", 16)
        rows = csv.DictReader(Path(found.output).read_text().splitlines())
        columns.append([[float(row[f"value_{at}"]) for at in range(3)] for row in rows])
    np.testing.assert_allclose(np.mean(columns[:2], 0), columns[2], rtol=1e-5)
    labels, spread = prices.labels.numpy(), [*learned_from(prices).std[:2], 0.5]
    assert (np.abs(np.mean(columns[2], 0) - labels.mean(0)) < spread).all()
    assert found.metrics["rmse"] == pytest.approx(np.sqrt(((np.array(columns[2]) - labels) ** 2).mean()), rel=1e-3)
    scales = [best_of(run)["labels"] for run in runs]
    assert scales == [learned_from(half).constants() for half in halves]


def learned_from(dataset: CachedDataset) -> Regression:
    return Regression(3).learned_from(dataset.table.labels[dataset.positions])


@pytest.mark.slow
def test_a_loss_of_ones_own_gets_labels_as_they_are_stored(prices, tmp_path):
    settings = dataclasses.replace(LINEAR, epochs=1, loss="tiny_tasks:relative_loss")
    learner = learner_on(settings, prices)
    assert learner.task.constants() == {}
    report = train_on(tmp_path, settings, prices)
    assert 0 < report.losses[0] < 1e4  # that of standardised labels would be divided by zeros, which a constant becomes


@pytest.mark.slow
def test_a_loss_that_diverges_is_explained_by_the_size_of_the_labels(prices, tmp_path):
    settings = dataclasses.replace(LINEAR, lr=1e30)
    with pytest.raises(TrainingError, match=r"--lr.*the labels reach from .* to 54\d+, with a deviation of 13\d+"):
        train_on(tmp_path, settings, prices)


@pytest.mark.slow
def test_the_model_that_python_gets_answers_in_the_unit_of_the_labels(prices):
    own = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    result = fitting.train(own, prices, None, LINEAR, options=RunOptions(replay=False))
    normalised = torch.zeros(1, 3, 16, 16)  # the mean of all images
    assert result.model(normalised)[0, 0].item() == pytest.approx(prices.labels[:, 0].mean().item(), rel=0.1)
    assert result.model.model is own


def test_labels_that_float32_cannot_tell_apart_are_refused_and_others_are_not() -> None:
    numbers = np.arange(50.0)[:, None]
    with pytest.raises(UsageError, match=r"cannot tell the labels of column 1 apart.*Subtract 1700000000 "):
        check_precision(np.concatenate([numbers, 1.7e9 + numbers], axis=1))
    for fine in (numbers, numbers / 3, 1e5 + numbers, np.full((5, 1), 1.7e9 + 1), LABELS, numbers.astype(np.float32)):
        check_precision(fine)


@pytest.mark.slow
def test_labels_are_standardised_before_they_are_rounded_to_float32(tmp_path: Path) -> None:
    """Float32 has only even numbers where these labels are: a model of zeros has the loss of their own deviation, 1."""
    labels = [2e7 + 300 * math.sin(number) + number / 7 for number in range(64)]
    rows = "".join(f"{number}.png,{label!r}\n" for number, label in enumerate(labels))
    (tmp_path / "table.csv").write_text(f"path,label\n{rows}")
    for number in range(64):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(tmp_path / f"{number}.png")
    options = TableOptions(label_cols=("label",))
    build_cache(TableSource(tmp_path / "table.csv", options), tmp_path / "cache", Recipe(size=2), jobs=1)
    dataset = CachedDataset(tmp_path / "cache")
    settings = dataclasses.replace(LINEAR, model="tiny_tasks:zeros")
    learner = learner_on(settings, dataset)
    stored = np.array(labels)[:, None]
    exact = (stored - stored.mean()) / stored.std()
    batches = CachedLoader(learner.task.as_learned(dataset), 64)
    with pytest.raises(UsageError, match="not float values in as many columns"):
        dataset.with_standardised_labels([0.0, 0.0], [1.0, 1.0])
    with pytest.raises(UsageError, match="mean has 1 numbers and std has 2"):
        dataset.with_standardised_labels([0.0], [1.0, 1.0])
    np.testing.assert_allclose(next(iter(batches))[1].numpy(), exact, atol=1e-6)
    scores = score(learner, dataset)
    np.testing.assert_allclose(scores.losses, exact[:, 0] ** 2, rtol=1e-5, atol=1e-9)
    np.testing.assert_array_equal(dataset.labels.numpy(), stored.astype(np.float32))


@pytest.mark.slow
def test_an_evaluation_step_of_ones_own_gets_labels_as_they_are_stored(prices: CachedDataset) -> None:
    settings = dataclasses.replace(LINEAR, eval_step="tiny_tasks:label_eval")
    learner = learner_on(settings, prices)
    found = [values for (values,) in results(learner, prices, lambda outputs, _labels: (outputs,))]
    np.testing.assert_allclose(np.concatenate(found), prices.labels.numpy(), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def two_orders(tmp_path_factory):
    """Two caches of one table: their labels are the same two columns of values, in both orders."""
    folder = tmp_path_factory.mktemp("orders")
    for number in range(8):
        Image.new("RGB", (16, 16), (number * 30, 0, 0)).save(folder / f"{number}.png")
    rows = [f"{number}.png,{number + 0.5},{100 - number}" for number in range(8)]
    (folder / "table.csv").write_text("\n".join(["path,width,height", *rows]))
    for names in ORDERS:
        source = TableSource(folder / "table.csv", TableOptions(label_cols=names))
        build_cache(source, folder / names[0], Recipe(size=16), jobs=1)
    return [CachedDataset(folder / names[0]) for names in ORDERS]


def test_values_of_the_same_columns_in_another_order_are_refused_or_said(two_orders, tmp_path, caplog):
    one, other = two_orders
    assert [each.manifest.value_names for each in two_orders] == [*ORDERS]
    settings = dataclasses.replace(LINEAR, epochs=1, batch_size=4)
    with pytest.raises(UsageError, match="height, width, those of the training cache width, height: both must"):
        train_on(tmp_path / "run", settings, one, other)
    runs = [tmp_path / name for name in ("one", "other")]
    for run, dataset in zip(runs, two_orders, strict=True):
        train_on(run, settings, dataset, dataset)
    predictor = predictor_of(runs[0])
    assert predict(predictor, [one], tmp_path / "out.csv", 4).metrics
    assert caplog.text == ""
    assert predict(predictor, [other], tmp_path / "out.csv", 4).metrics == {}
    assert "no metrics: the labels of" in caplog.text
    assert "are the columns height, width, and the run has learned width, height" in caplog.text
    with pytest.raises(UsageError, match="differ in columns of labels"):
        predictor_of(*runs)
    caplog.clear()
    train_on(tmp_path / "more", dataclasses.replace(settings, weights=str(runs[0])), other)
    assert "has learned the columns width, height, and the labels are now height, width" in caplog.text
