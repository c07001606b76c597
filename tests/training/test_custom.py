"""Data, models, losses and steps of one's own, and every task, train to something sane."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image
from running import best_of, command, learner_on, predictor_of, report_of, rows_of, train_on

from tpucache import CachedDataset, Recipe, build_cache
from tpucache.training import TrainSettings, evaluate, predict

pytestmark = pytest.mark.slow

LINEAR = TrainSettings(model="tiny_tasks:linear", epochs=1, batch_size=50, lr=0.01)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A cache of each generated dataset, by its name."""
    folder = tmp_path_factory.mktemp("generated")
    for name in ("texts", "colours", "squares"):
        build_cache(f"tiny_tasks:{name}", folder / name, Recipe(size=16), jobs=1)
    return folder


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("colours", {"model": "cnn", "epochs": 3, "batch_size": 10, "lr": 0.02}),
        ("texts", {"model": "tiny_tasks:Bag", "epochs": 4, "batch_size": 20, "lr": 0.1, "optimizer": "adamw"}),
    ],
)
def test_several_labels_and_texts_are_learned_and_predicted_by_name(caches, tmp_path, name, settings):
    dataset = CachedDataset(caches / name)
    report = train_on(tmp_path, TrainSettings(**settings), dataset.select(range(150)), dataset.select(range(150, 200)))
    least = {"colours": 0.95, "texts": 0.85}[name]
    assert report.epochs[-1]["valid_accuracy"] > least
    found = predict(predictor_of(tmp_path), [dataset], tmp_path / "out.csv", 16)
    assert found.metrics["accuracy"] > least
    rows = rows_of(tmp_path / "out.csv")
    assert np.mean([row["label"] == row["prediction"] for row in rows]) > least - 0.05
    for row in rows if name == "colours" else ():
        assert row["prediction"].split(";") == [n for n in ("red", "green", "blue") if float(row[n]) > 0.5] or [""]


def test_masks_are_learned_and_predicted_as_pictures(caches, tmp_path):
    words = (
        "--backend eager --task mask --mask-classes 2 --model unet --epochs 3 --batch-size 10 --lr 0.05 --valid 0.25"
    )
    run, cache, output = tmp_path / "run", caches / "squares", tmp_path / "out.csv"
    assert command("train", cache, "--run", run, *words.split(), "--flip", "--augment", "shift=2") == 0
    assert report_of(run)["epochs"][-1]["valid_iou"] > 0.85
    assert command("predict", run, cache, "-o", output, "--backend", "eager") == 0
    rows, dataset, shares = rows_of(output), CachedDataset(cache), []
    assert len(rows) == 200
    for number in (0, 77, 199):
        with Image.open(tmp_path / rows[number]["prediction"]) as image:
            shares.append(np.mean(np.asarray(image) == dataset[number]["mask"].numpy().squeeze()))
    assert min(shares) > 0.85


@pytest.mark.parametrize("option", [{"loss": "tiny_tasks:doubled_loss"}, {"train_step": "tiny_tasks:doubled_step"}])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_and_a_step_of_ones_own_are_what_is_learned_from(cache, tmp_path, option, smoothing):
    dataset, losses = CachedDataset(cache), []
    for given in ({}, option):
        settings = dataclasses.replace(LINEAR, smoothing=smoothing, **given)
        losses.append(train_on(tmp_path / str(len(given)), settings, dataset).losses)
    assert losses[1][0] == pytest.approx(2 * losses[0][0], rel=1e-5)
    assert losses[1][1] != pytest.approx(2 * losses[0][1], rel=1e-5)


def test_an_evaluation_of_ones_own_is_what_is_evaluated_and_predicted(cache, tmp_path):
    dataset = CachedDataset(cache)
    report = train_on(tmp_path, dataclasses.replace(LINEAR, eval_step="tiny_tasks:reversed_eval"), dataset, dataset)
    learner = learner_on(LINEAR, dataset)
    learner.model.load_state_dict(best_of(tmp_path)["model"])
    assert report.epochs[-1]["valid_loss"] != pytest.approx(evaluate(learner, dataset)["loss"], rel=1e-3)
    found = predict(predictor_of(tmp_path), [dataset], tmp_path / "out.csv", 50)
    assert found.metrics["accuracy"] == pytest.approx(report.epochs[-1]["valid_accuracy"])
