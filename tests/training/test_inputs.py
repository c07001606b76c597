"""Columns of the samples table are inputs of a model, like the image, in training, resuming and predicting."""

from __future__ import annotations

import csv
import functools

import numpy as np
import pytest
import torch
from running import best_of, plain_outputs, predictor_of, rows_of, train_on
from torch import nn

from tpucache import CachedDataset, Recipe, UsageError, build_cache
from tpucache.loading.columns import fit_columns
from tpucache.training import TrainSettings
from tpucache.training.data import prepare_data
from tpucache.training.device import CpuDevice
from tpucache.training.prediction import predict
from tpucache.warmup.sources.columns import TableOptions
from tpucache.warmup.sources.table import TableSource

SETTINGS = TrainSettings(
    model="test_inputs:age_and_image", inputs=["age,sex"], epochs=8, batch_size=16, lr=0.3, task="classes"
)


class AgeAndImage(nn.Module):
    """A layer on the mean colour and the columns."""

    def __init__(self, outputs: int, columns: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 + columns, outputs)

    def forward(self, images: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.cat([images.mean((2, 3)), columns], 1))
        return scores


def age_and_image(outputs: int, columns: int) -> nn.Module:
    return AgeAndImage(outputs, columns)


def make_cache(photos, folder, change=lambda row: row):
    """Photographs in two classes that only their columns tell."""
    folder.mkdir(exist_ok=True)
    paths = sorted(photos.rglob("*.png"))[:64]
    rng = np.random.default_rng(0)
    rows = []
    for number, path in enumerate(paths):
        label = int(rng.integers(2))
        age = 20 + 40 * label + int(rng.integers(9))
        row = {"path": path, "label": f"c{label}", "age": age, "sex": "fm"[number % 2]}
        rows.append(change(row))
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    source = TableSource(folder / "table.csv", TableOptions(label_cols=("label",)))
    build_cache(source, folder / "cache", Recipe(size=8), jobs=1)
    return CachedDataset(folder / "cache")


@pytest.fixture(scope="module")
def dataset(photos, tmp_path_factory):
    return make_cache(photos, tmp_path_factory.mktemp("columns") / "with")


def split(dataset):
    return dataset.select(range(40)), dataset.select(range(40, 64))


def run_on(run, settings, dataset, **options):
    return train_on(run, settings, *split(dataset), **options)


@pytest.mark.slow
def test_a_model_learns_from_columns_and_predicts_with_the_statistics_of_its_training(dataset, tmp_path):
    _, valid_set = split(dataset)
    report = run_on(tmp_path / "run", SETTINGS, dataset)
    assert report.epochs[-1]["valid_accuracy"] > 0.9
    best = best_of(tmp_path / "run")
    ages = dataset.table["age"][:40].astype(np.float64)
    assert best["columns"][0]["mean"] == pytest.approx(ages.mean())
    predict(predictor_of(*[tmp_path / "run"] * 2), [valid_set], tmp_path / "out.csv", 16)
    model = AgeAndImage(2, 3)
    model.load_state_dict(best["model"])
    columns = np.zeros((24, 3), np.float32)
    columns[:, 0] = (dataset.table["age"][40:] - ages.mean()) / ages.std()
    columns[np.arange(24), [1 + "fm".index(sex) for sex in dataset.table["sex"][40:]]] = 1
    with_columns = functools.partial(model.eval(), columns=torch.from_numpy(columns))
    expected = plain_outputs(with_columns, valid_set, best["mean"], best["std"]).softmax(1).numpy()
    found = np.float32([[*row.values()][4:] for row in rows_of(tmp_path / "out.csv")])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_columns_alone(dataset, photos, tmp_path):
    def older(row):
        return {**row, "age": int(row["age"]) + (str(row["path"]).endswith("0.png"))}

    short = TrainSettings(model=SETTINGS.model, inputs=SETTINGS.inputs, epochs=1, batch_size=16)
    run_on(tmp_path / "run", short, dataset)
    assert run_on(tmp_path / "run", short, dataset, resume=True).finished
    with pytest.raises(UsageError, match="begun with other options or data"):
        run_on(tmp_path / "run", short, make_cache(photos, tmp_path / "o", older), resume=True)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(dataset, photos, tmp_path):
    for model, inputs, message in (
        ("cnn", "age", "takes images alone"),
        (SETTINGS.model, "height", "no column 'height'"),
        (SETTINGS.model, "label", "no column 'label'"),
    ):
        settings = TrainSettings(model=model, inputs=(inputs,), epochs=1, batch_size=16)
        with pytest.raises(UsageError, match=message):
            run_on(tmp_path / "none", settings, dataset)
    gaps = make_cache(photos, tmp_path / "gaps", lambda row: {**row, "sex": row["sex"].replace("m", "")})
    with pytest.raises(UsageError, match=r"'sex' is missing for 20 samples, the first '.*png' \(row 1\)"):
        run_on(tmp_path / "none", SETTINGS, gaps)


def test_validation_samples_have_the_columns_by_the_statistics_of_the_training_samples(dataset):
    train_set, valid_set = parts = split(dataset)
    data = prepare_data(SETTINGS, train_set, valid_set, CpuDevice())
    assert data.columns == fit_columns(SETTINGS.inputs, dataset.table, np.arange(40))
    for whole, seen in zip(parts, (data.train_set, data.valid_set), strict=True):
        expected = data.columns.encode(dataset.table, whole.positions)
        np.testing.assert_array_equal(seen.values_of(np.arange(len(whole)))["columns"].numpy(), expected)
    assert (data.task.name, data.task.outputs, data.channels) == ("classes", 2, 3)
