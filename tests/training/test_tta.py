"""ImageViews of images at test time are crops and sizes as Pillow makes them, and their predictions are averaged."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image
from torch import nn

from tpucache import CachedDataset, Recipe, UsageError, build_cache
from tpucache.cli import main
from tpucache.training.device import CpuDevice
from tpucache.training.device.tensors import DeviceBatch
from tpucache.training.loop import train
from tpucache.training.predict_options import PredictOptions
from tpucache.training.prediction import predict
from tpucache.training.predictor import Predictor
from tpucache.training.run.report import read_report
from tpucache.training.run_options import RunOptions
from tpucache.training.settings import TrainSettings
from tpucache.training.tta import ImageViews

CPU = torch.device("cpu")
TRUST = ["tiny_models:tiny"]


def views_of(images, options, learned):
    """Each view of images that are given, in order."""
    found = []

    def keep(view):
        found.append(view)
        return torch.zeros(len(view), 1)

    ImageViews(options, learned, tuple(images.shape[1:3]), CPU).mean(images, keep)
    return found


@pytest.fixture(scope="module")
def images():
    """Values that no resizing takes out of 0 to 255, where Pillow cuts them off after each side."""
    return torch.from_numpy(np.random.default_rng(0).integers(90, 166, (2, 16, 24, 3)).astype(np.uint8))


def test_five_crops_are_pillows_resized_boxes_of_the_corners_and_the_middle(images):
    found = views_of(images, PredictOptions(crops="five"), (16, 24))
    boxes = [(0, 0, 21, 14), (3, 0, 24, 14), (0, 2, 21, 16), (3, 2, 24, 16), (1, 1, 22, 15)]
    assert len(found) == 5
    for view, box in zip(found, boxes, strict=True):
        expected = Image.fromarray(images[1].numpy()).resize((24, 16), Image.Resampling.LANCZOS, box=box)
        np.testing.assert_allclose(view[1], np.asarray(expected), atol=1.5)  # Pillow rounds after each side


def test_a_crop_of_the_size_that_the_model_learned_keeps_its_pixels(images):
    found = views_of(images, PredictOptions(crops="five"), (14, 21))
    assert torch.equal(found[3], images[:, 2:16, 3:24])


def test_sizes_are_of_the_shorter_side_and_flips_mirror_each_view(images):
    found = views_of(images, PredictOptions(sizes=(8, 32), flip_tta=True), (16, 24))
    assert [tuple(view.shape[1:3]) for view in found] == [(8, 12), (8, 12), (32, 48), (32, 48)]
    torch.testing.assert_close(found[1], found[0].flip(2))
    expected = Image.fromarray(images[0].numpy()).resize((12, 8), Image.Resampling.LANCZOS)
    np.testing.assert_allclose(found[0][0], np.asarray(expected), atol=1.5)


def test_maps_are_put_back_where_their_views_are_of_the_image(images):
    """A model that says of each pixel what it shows gives the image again, whatever the views."""
    smooth = torch.linspace(0, 200, 24).repeat(2, 16, 1)[..., None].repeat(1, 1, 1, 3).to(torch.uint8)
    options = PredictOptions(crops="five", flip_tta=True)
    maps = ImageViews(options, (16, 24), (16, 24), CPU).mean(smooth, lambda view: view.permute(0, 3, 1, 2).float())
    np.testing.assert_allclose(maps[..., 1:-1], smooth.permute(0, 3, 1, 2)[..., 1:-1], atol=3)
    exact = ImageViews(options, (14, 21), (16, 24), CPU).mean(images, lambda view: view.permute(0, 3, 1, 2).float())
    torch.testing.assert_close(exact, images.permute(0, 3, 1, 2).float())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sizes": [7]}, "at least 8"), ({"sizes": [8.5]}, "whole numbers"), ({"sizes": [True]}, "whole"),
        ({"sizes": [16, 16]}, "different"), ({"sizes": range(8, 20)}, "at most 8"), ({"crops": "ten"}, "one of none"),
        ({"average": "mean"}, "one of probability"), ({"run_weights": "best"}, "one of equal"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        PredictOptions(**values)


@pytest.fixture(scope="module")
def runs(cache, tmp_path_factory):
    """Two runs that differ in their weights and scores."""
    folder, dataset = tmp_path_factory.mktemp("runs"), CachedDataset(cache)
    for seed in range(2):
        settings = TrainSettings(
            model=TRUST[0], epochs=1, batch_size=8, lr=0.05 * seed + 0.001, seed=seed, watch="loss"
        )
        parts = dataset.select(range(100)), dataset.select(range(100, 150))
        train(folder / str(seed), settings, *parts, CpuDevice(), RunOptions(replay=False))
    return folder / "0", folder / "1"


def table(path):
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


def probabilities(predictor, dataset, run):
    images = torch.stack([dataset[row][0] for row in range(len(dataset))]).permute(0, 2, 3, 1)
    with torch.no_grad():
        return predictor.predict_runs(DeviceBatch({"image": images}, torch.zeros(len(images))))[run].numpy()


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_of_runs_are_averaged_and_predictions_are_those_of_the_mean(cache, runs, tmp_path):
    from scipy.stats import rankdata

    dataset = CachedDataset(cache).select(range(40))
    predictor = Predictor(runs, CpuDevice(), trust=TRUST, options=PredictOptions(average="rank"))
    report = predict(predictor, [dataset], tmp_path / "out.csv", 8)
    found = [probabilities(predictor, dataset, run) for run in range(2)]
    expected = np.mean([(rankdata(each, axis=0) - 1) / (len(dataset) - 1) for each in found], 0)
    head, rows = table(tmp_path / "out.csv")
    np.testing.assert_allclose(np.float32([row[4:] for row in rows]), expected, atol=0.03)
    assert [row[3] for row in rows] == [head[4:][place] for place in np.mean(found, 0).argmax(1)]
    assert (report.average, report.views, list(report.weights)) == ("rank", 1, [0.5, 0.5])


@pytest.mark.slow
def test_runs_count_by_their_validation_scores(cache, runs, tmp_path):
    reports = [read_report(run) for run in runs]
    scores = np.array([report.epochs[report.best_epoch - 1]["valid_loss"] for report in reports])
    scores = 1 / scores  # less of it is better
    assert abs(scores[0] - scores[1]) > 0.01
    dataset = CachedDataset(cache).select(range(16))
    predictor = Predictor(runs, CpuDevice(), trust=TRUST, options=PredictOptions(run_weights="score"))
    predict(predictor, [dataset], tmp_path / "out.csv", 16)
    expected = np.average([probabilities(predictor, dataset, run) for run in range(2)], 0, scores)
    np.testing.assert_allclose(np.float32([row[4:] for row in table(tmp_path / "out.csv")[1]]), expected, atol=1e-6)
    assert predictor.weights == pytest.approx(scores / scores.sum())


@pytest.mark.slow
def test_predictions_of_views_are_their_mean(cache, runs, tmp_path, capsys):
    arguments = ["predict", runs[1], cache, "-o", tmp_path / "out.csv", "--backend", "torch", "--trust", *TRUST]
    assert main([*map(str, arguments), "--crops", "five", "--sizes", "16,24", "--flip-tta"]) == 0
    assert "averaged over five crops and 2 sizes and the mirrored images, too" in capsys.readouterr().out
    dataset = CachedDataset(cache).select(range(150))
    best = torch.load(runs[1] / "best.pt", weights_only=True)
    model = tiny_models.tiny(best["outputs"])
    model.load_state_dict(best["model"])
    mean, std = (torch.tensor(best[name]).view(3, 1, 1) for name in ("mean", "std"))
    images = torch.stack([dataset[row][0] for row in range(150)]).permute(0, 2, 3, 1)
    found = []
    with torch.no_grad():
        for view in views_of(images, PredictOptions(crops="five", sizes=(16, 24), flip_tta=True), (16, 16)):
            found.append(model.eval()((view.permute(0, 3, 1, 2).float() - mean) / std).softmax(1).numpy())
    assert len(found) == 20
    values = np.float32([row[4:] for row in table(tmp_path / "out.csv")[1]])
    np.testing.assert_allclose(values, np.mean(found, 0), atol=1e-5)


class OneSize(nn.Module):
    """As a vision transformer, it takes images of one size alone."""

    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(3 * 16 * 16, outputs)

    def forward(self, images):
        return self.layer(images.flatten(1))


def one_size(outputs):
    return OneSize(outputs)


@pytest.mark.slow
def test_a_model_of_one_size_is_named_where_it_gets_another_one(cache, tmp_path):
    settings = TrainSettings(model="test_tta:one_size", epochs=1, batch_size=50, lr=0.001)
    train(tmp_path / "run", settings, CachedDataset(cache), None, CpuDevice(), RunOptions(replay=False))
    options = PredictOptions(sizes=(24,))
    predictor = Predictor([tmp_path / "run"], CpuDevice(), trust=[settings.model], options=options)
    with pytest.raises(Exception, match="test_tta:one_size") as raised:
        predict(predictor, [CachedDataset(cache)], tmp_path / "out.csv", 50)
    assert type(raised.value).__module__ == "tpucache.errors"
    with pytest.raises(UsageError, match="no validation score"):
        Predictor([tmp_path / "run"], CpuDevice(), trust=[settings.model], options=PredictOptions(run_weights="score"))


@pytest.mark.slow
def test_ranks_are_refused_where_the_unit_of_a_prediction_counts(tmp_path):
    rng = np.random.default_rng(0)
    items = [(rng.integers(0, 256, (8, 8, 3)).astype(np.uint8), np.float32([number + 0.5])) for number in range(16)]
    build_cache(items, tmp_path / "cache", Recipe(size=8), jobs=1)
    dataset, settings = (
        CachedDataset(tmp_path / "cache"),
        TrainSettings(model=TRUST[0], epochs=1, batch_size=8, lr=0.01),
    )
    train(tmp_path / "run", settings, dataset, None, CpuDevice(), RunOptions(replay=False))
    predictor = Predictor([tmp_path / "run"], CpuDevice(), trust=TRUST, options=PredictOptions(average="rank"))
    with pytest.raises(UsageError, match="--average probability"):
        predict(predictor, [dataset], tmp_path / "out.csv", 8)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.slow
def test_images_of_any_size_are_read_as_large_as_the_largest_view(tmp_path):
    rng = np.random.default_rng(0)
    items = [(rng.integers(0, 256, (64, 64, 3)).astype(np.uint8), number % 2) for number in range(16)]
    build_cache(items, tmp_path / "cache", Recipe(size=64, codec="dct-lz4"), jobs=1)
    settings = TrainSettings(model=TRUST[0], epochs=1, batch_size=8, lr=0.01, size=32)
    train(tmp_path / "run", settings, CachedDataset(tmp_path / "cache"), None, CpuDevice(), RunOptions(replay=False))
    for options, expected in (
        (PredictOptions(), 32),
        (PredictOptions(crops="five"), 37),
        (PredictOptions(sizes=(96,)), 64),
    ):
        predictor = Predictor([tmp_path / "run"], CpuDevice(), trust=TRUST, options=options)
        assert predictor.resolution(CachedDataset(tmp_path / "cache").manifest) == expected
    arguments = ["predict", tmp_path / "run", tmp_path / "cache", "-o", tmp_path / "out.csv", "--backend", "torch"]
    assert main([*map(str, arguments), "--trust", *TRUST, "--crops", "five", "--sizes", "32,48"]) == 0
