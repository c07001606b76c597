"""Data, models, losses and steps of one's own, and every task, train to something sane."""

from __future__ import annotations

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tpucache import CachedDataset, Recipe, build_cache
from tpucache.cli import main
from tpucache.loading.columns import stratified_split
from tpucache.training.device import CpuDevice
from tpucache.training.evaluation import evaluate
from tpucache.training.learner import Learner
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.prediction import Predictor, predict
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.find import make_task

pytestmark = pytest.mark.slow

QUICK = RunOptions(replay=False)
LINEAR = TrainSettings(model="tiny_tasks:linear", epochs=1, batch_size=50, lr=0.01)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A cache of each generated dataset, by its name."""
    folder = tmp_path_factory.mktemp("generated")
    for name in ("texts", "colours", "greys", "squares"):
        build_cache(f"tiny_tasks:{name}", folder / name, Recipe(size=16), jobs=1)
    return folder


def train_here(cache, run, **settings):
    """Train on three quarters of a cache, validate on the rest."""
    dataset = CachedDataset(cache)
    return train(
        run,
        TrainSettings(**settings),
        dataset.select(range(150)),
        dataset.select(range(150, 200)),
        CpuDevice(),
        QUICK,
    )


@pytest.mark.thorough
@pytest.mark.xla
def test_a_text_classifier_trains_from_cached_ids_and_masks(caches, python, tmp_path):
    shared = {"model": "tiny_tasks:Bag", "epochs": 8, "batch_size": 20, "lr": 0.1, "optimizer": "adamw"}
    data = CachedDataset(caches / "texts")
    split = stratified_split(data.labels.numpy(), 0.25, 0)
    parts = data.select(split.train), data.select(split.valid)
    eager = train(tmp_path / "eager", TrainSettings(**shared), *parts, CpuDevice(), QUICK)
    assert eager.epochs[-1]["valid_accuracy"] > 0.85
    options = [text for name, value in shared.items() for text in (f"--{name.replace('_', '-')}", value)]
    options += ["--run", tmp_path / "xla", "--valid", 0.25]
    done = python("-m", "tpucache", "train", caches / "texts", "--backend", "xla", *options)
    assert done.returncode == 0, done.stderr
    xla = json.loads((tmp_path / "xla" / "report.json").read_text())
    assert xla["losses"] == pytest.approx(eager.losses, abs=1e-4)
    assert xla["pace"]["compiles"] == 0
    output = tmp_path / "out.csv"
    arguments = ["predict", tmp_path / "xla", caches / "texts", "-o", output, "--backend", "eager"]
    arguments += ["--trust", "tiny_tasks:Bag"]
    assert main([str(argument) for argument in arguments]) == 0
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert np.mean([row["label"] == row["prediction"] for row in rows]) > 0.85


def test_many_labels_are_learned_and_predicted_by_name(caches, tmp_path):
    report = train_here(caches / "colours", tmp_path / "run", model="cnn", epochs=3, batch_size=10, lr=0.02)
    assert report.epochs[-1]["valid_accuracy"] > 0.95
    found = predict(
        Predictor([tmp_path / "run"], CpuDevice()), [CachedDataset(caches / "colours")], tmp_path / "out.csv", 16
    )
    assert found.metrics["accuracy"] > 0.95
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert np.mean([row["label"] == row["prediction"] for row in rows]) > 0.9
    for row in rows:
        assert row["prediction"].split(";") == [n for n in ("red", "green", "blue") if float(row[n]) > 0.5] or [""]


def test_masks_are_learned_and_predicted_as_pictures(caches, tmp_path):
    arguments = ["train", caches / "squares", "--run", tmp_path / "run", "--backend", "eager", "--task", "mask"]
    arguments += ["--mask-classes", 2, "--model", "unet", "--epochs", 3, "--batch-size", 10, "--lr", 0.05]
    arguments += ["--valid", 0.25, "--flip", "--augment", "shift=2", "--json"]
    assert main([str(argument) for argument in arguments]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["epochs"][-1]["valid_iou"] > 0.85
    output = tmp_path / "out.csv"
    arguments = ["predict", tmp_path / "run", caches / "squares", "-o", output, "--backend", "eager"]
    assert main([str(argument) for argument in arguments]) == 0
    rows = list(csv.DictReader(output.read_text().splitlines()))
    dataset = CachedDataset(caches / "squares")
    assert len(rows) == 200
    shares = []
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
        losses.append(train(tmp_path / str(len(given)), settings, dataset, None, CpuDevice(), QUICK).losses)
    assert losses[1][0] == pytest.approx(2 * losses[0][0], rel=1e-5)
    assert losses[1][1] != pytest.approx(2 * losses[0][1], rel=1e-5)


def test_an_evaluation_of_ones_own_is_what_is_evaluated_and_predicted(cache, tmp_path):
    dataset = CachedDataset(cache)
    settings = dataclasses.replace(LINEAR, eval_step="tiny_tasks:reversed_eval")
    report = train(tmp_path, settings, dataset, dataset, CpuDevice(), QUICK)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    learner = Learner(LINEAR, dataset, make_task("classes", 4), CpuDevice())
    learner.model.load_state_dict(best["model"])
    straight = evaluate(learner, dataset)
    assert report.epochs[-1]["valid_loss"] != pytest.approx(straight["loss"], rel=1e-3)
    found = predict(
        Predictor([tmp_path], CpuDevice(), trust=[LINEAR.model, "tiny_tasks:reversed_eval"]),
        [dataset],
        tmp_path / "out.csv",
        50,
    )
    assert found.metrics["accuracy"] == pytest.approx(report.epochs[-1]["valid_accuracy"])
