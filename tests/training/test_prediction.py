"""Predictions are those of plain torch sample by sample, in order, whatever the count and the backend."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
import shutil

import numpy as np
import pytest
import tiny_models
import torch
from thorough import thorough

from tpucache import CachedDataset, Recipe, TrainingError, UsageError, build_cache
from tpucache.cli import main
from tpucache.insight import read_predictions
from tpucache.training.device import CpuDevice
from tpucache.training.forward import IMAGENET
from tpucache.training.loop import train
from tpucache.training.options import PredictOptions, RunOptions
from tpucache.training.prediction import Predictor, _labels, predict
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.find import make_task
from tpucache.training.weights import load_checkpoint
from tpucache.warmup import TableOptions
from tpucache.warmup.sources.table import TableSource

COUNTS = (0, 1, 7, 8, 9, 1000)

TRUST = ["tiny_models:tiny"]


@pytest.fixture(scope="module")
def folds(cache, tmp_path_factory):
    """Two runs of one epoch, which differ in their weights and in the statistics they normalise by."""
    folder = tmp_path_factory.mktemp("folds")
    for seed, mean in enumerate((None, IMAGENET[0])):
        settings = TrainSettings(
            model="tiny_models:tiny", epochs=1, batch_size=8, lr=0.02, ema=0.5, seed=seed, mean=mean
        )
        train(folder / str(seed), settings, CachedDataset(cache), None, CpuDevice(), RunOptions(replay=False))
    return folder / "0", folder / "1"


def plain(run, dataset, mirrored=False):
    """Probabilities by nothing but torch and what best.pt holds, of images as they are or mirrored left to right."""
    best = torch.load(run / "best.pt", weights_only=True)
    model = tiny_models.tiny(best["outputs"])
    model.load_state_dict(best["model"])
    mean, std = (torch.tensor(best[name]).view(3, 1, 1) for name in ("mean", "std"))
    if not len(dataset):
        return np.zeros((0, best["outputs"]), np.float32)
    images = torch.stack([dataset[index][0] for index in range(len(dataset))]).float()
    images = images.flip(3) if mirrored else images
    with torch.no_grad():
        return model.eval()((images - mean) / std).softmax(1).numpy()


def many(cache, count, variant=0):
    return CachedDataset(cache, variant, np.arange(count) * 7 % 150)


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_values_are_those_of_plain_torch(cache, folds, tmp_path, count):
    dataset = many(cache, count)
    report = predict(Predictor(folds[:1], CpuDevice(), trust=TRUST), [dataset], tmp_path / "out.csv", 8)
    assert (report.samples, bool(report.metrics)) == (count, count > 0)
    heading, *rows = read(tmp_path / "out.csv")
    assert heading == ["sample", "path", "label", "prediction", "ant", "bee", "cat", "dog"]
    names = heading[4:]
    expected = plain(folds[0], dataset)
    np.testing.assert_allclose(np.float32([row[4:] for row in rows]).reshape(count, 4), expected, atol=1e-6)
    assert [row[:2] for row in rows] == [
        [str(number), path] for number, path in zip(dataset.numbers, dataset.paths, strict=True)
    ]
    assert [row[2] for row in rows] == [names[label] for label in dataset.labels]
    assert [row[3] for row in rows] == [names[place] for place in expected.argmax(1)]


ON_XLA = """
import sys
from pathlib import Path
import numpy as np
from tpucache import CachedDataset
from tpucache.progress import Progress
from tpucache.training.device import open_device
from tpucache.training.prediction import predict_values
from tpucache.training.options import PredictOptions
from tpucache.training.prediction import Predictor

cache, run, cores, output = sys.argv[1:]
device = open_device("xla", int(cores))
predictor = Predictor([Path(run)], device, trust=["tiny_models:tiny"])
found, compiles = {{}}, []
for count in {counts}:
    dataset = CachedDataset(cache, 0, np.arange(count) * 7 % 150)
    found[str(count)] = predict_values(predictor, [dataset], 8, 2, Progress(count, "predict", "images"))
    compiles.append(device.counters().compiles)
dataset = CachedDataset(cache)
both = Predictor([Path(run)], device, ["tiny_models:tiny"], PredictOptions(flip_tta=True))
found["flipped"] = predict_values(both, [dataset], 8, 2, Progress(len(dataset), "predict", "images"))
np.savez(output, compiles=compiles, **found)
"""


@pytest.mark.xla
@pytest.mark.parametrize("cores", [*thorough(1), 8])
def test_values_on_xla_are_those_of_plain_torch_and_one_graph_makes_them(cache, folds, python, tmp_path, cores):
    (tmp_path / "script.py").write_text(ON_XLA.format(counts=COUNTS[1:]))
    done = python(tmp_path / "script.py", cache, folds[0], cores, tmp_path / "found.npz", devices=cores)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    assert set(found["compiles"]) == {found["compiles"][0]}
    for count in COUNTS[1:]:
        np.testing.assert_allclose(found[str(count)], plain(folds[0], many(cache, count)), atol=1e-5)
    both = [plain(folds[0], CachedDataset(cache), mirrored) for mirrored in (False, True)]
    assert np.abs(both[0] - both[1]).max() > 1e-4
    np.testing.assert_allclose(found["flipped"], np.mean(both, 0), atol=1e-5)


@pytest.mark.slow
def test_variants_runs_and_mirrored_images_are_averaged(cache, folds, tmp_path):
    output = tmp_path / "out" / "predictions.csv"
    arguments = ["predict", *folds, cache, "-o", output, "--variants", "all", "--flip-tta", "--backend", "eager"]
    arguments += ["--trust", "tiny_models:tiny"]
    assert main([str(argument) for argument in arguments]) == 0
    ways = itertools.product(folds, range(4), (False, True))
    expected = np.mean([plain(run, CachedDataset(cache, variant), mirrored) for run, variant, mirrored in ways], 0)
    np.testing.assert_allclose(np.float32([row[4:] for row in read(output)[1:]]), expected, atol=1e-6)


@pytest.mark.slow
def test_a_cache_without_labels_is_predicted_without_them(folds, photos, tmp_path):
    build_cache(photos / "ant", tmp_path / "flat", Recipe(size=16), jobs=1)
    dataset = CachedDataset(tmp_path / "flat")
    report = predict(Predictor(folds[:1], CpuDevice(), trust=TRUST), [dataset], tmp_path / "out.csv", 8)
    assert report.metrics == {}
    assert {row[2] for row in read(tmp_path / "out.csv")[1:]} == {""}


def test_values_from_0_to_1_are_written_as_values_for_a_run_of_several_classes(photos, tmp_path):
    first, second, *_ = sorted(path.name for path in (photos / "ant").iterdir())
    (tmp_path / "table.csv").write_text(f"path,a,b\n{first},0.75,0.25\n{second},0.5,1\n")
    source = TableSource(tmp_path / "table.csv", TableOptions(label_cols=("a", "b"), root=photos / "ant"))
    build_cache(source, tmp_path / "cache", Recipe(size=16), jobs=1)
    assert _labels(CachedDataset(tmp_path / "cache"), make_task("multilabel", 2)) == ["0.75;0.25", "0.5;1.0"]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_words(cache, photos, folds, tmp_path):
    build_cache(photos, tmp_path / "larger", Recipe(size=20), jobs=1)
    settings = TrainSettings(model="tiny_models:tiny", epochs=1, batch_size=50)
    dataset, larger, nine = CachedDataset(cache), CachedDataset(tmp_path / "larger"), many(cache, 9)
    train(tmp_path / "run", settings, larger, None, CpuDevice(), RunOptions(replay=False))
    best = torch.load(folds[0] / "best.pt", weights_only=True)
    best["model"]["5.bias"][1] = float("nan")
    for name in ("infinite", "begun", "empty"):
        (tmp_path / name).mkdir()
    torch.save(best, tmp_path / "infinite" / "best.pt")
    (tmp_path / "begun" / "last.pt").write_bytes(b"")
    spread = CpuDevice()
    spread.cores = 8
    for runs, device, sets, error, words in (
        (folds[:1], CpuDevice(), [larger], UsageError, "20, 20, 3"),
        (folds[:1], spread, [dataset], UsageError, "divide over 8 cores"),
        (folds[:1], CpuDevice(), [nine, many(cache, 9, 1)[::-1]], UsageError, "other samples, or the same in another"),
        (folds[:1], CpuDevice(), [nine, many(cache, 8, 1)], UsageError, "other samples, or the same in another order"),
        ([folds[0], tmp_path / "run"], CpuDevice(), [], UsageError, "the two runs differ in fields"),
        ([tmp_path / "empty"], CpuDevice(), [], TrainingError, "holds no run"),
        ([tmp_path / "begun"], CpuDevice(), [], TrainingError, "no epoch of the run has ended"),
        (
            [tmp_path / "infinite"],
            CpuDevice(),
            [dataset],
            TrainingError,
            f"150 samples are not finite, the first that of '{dataset.paths[0]}'",
        ),
    ):
        with pytest.raises(error, match=words):
            predict(Predictor(runs, device, trust=TRUST), sets, tmp_path / "out.csv", 12)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("ant", "bee", "cat", "doe"), "the cache lacks 'dog' and adds 'doe'"),
        (("ant", "bee"), "the cache lacks 'cat', 'dog'"),
        (("bee", "ant", "cat", "dog"), None),
    ],
)
def test_a_cache_of_other_classes_is_predicted_without_metrics(photos, folds, tmp_path, caplog, names, words):
    for name in names:
        (tmp_path / "photos" / name).mkdir(parents=True)
        shutil.copy(next((photos / "ant").iterdir()), tmp_path / "photos" / name)
    build_cache(tmp_path / "photos", tmp_path / "cache", Recipe(size=16), jobs=1)
    predictor, dataset = (
        Predictor(folds[:1], CpuDevice(), trust=TRUST),
        CachedDataset(tmp_path / "cache"),
    )
    if words is None:  # folders are sorted: these are the classes of the run
        predictor.classes = predictor.classes[::-1]
        words = "in another order"
    report = predict(predictor, [dataset], tmp_path / "out.csv", 8)
    assert report.metrics == {}
    assert words in caplog.text
    read = read_predictions(tmp_path / "out.csv")
    assert read.classes == predictor.classes  # those that the run has learned
    assert set(read.labels) == set(names)  # those of the cache


@pytest.mark.slow
@pytest.mark.parametrize("flip", [False, True])
def test_logits_and_features_are_those_of_each_run(cache, folds, tmp_path, flip):
    dataset, plain = CachedDataset(cache), Predictor(folds, CpuDevice(), TRUST, PredictOptions(flip_tta=flip))
    predict(plain, [dataset], tmp_path / "plain.csv", 8)
    options = PredictOptions(flip_tta=flip, logits=True, features=True)
    predictor = Predictor(folds, CpuDevice(), trust=TRUST, options=options)
    report = predict(predictor, [dataset], tmp_path / "out.csv", 8)
    assert (report.logits, report.features) == (str(tmp_path / "out_logits.npy"), str(tmp_path / "out_features.npy"))
    logits, features = np.load(report.logits), np.load(report.features)
    assert logits.shape == (len(dataset), len(folds), 4)
    found, expected = read_predictions(tmp_path / "out.csv"), read_predictions(tmp_path / "plain.csv")
    np.testing.assert_allclose(found.probabilities, expected.probabilities, rtol=1e-5)
    for number, run in enumerate(folds):
        model = torch.load(run / "best.pt", weights_only=True)["model"]
        own = features[:, number] @ model["5.weight"].numpy().T + model["5.bias"].numpy()
        np.testing.assert_allclose(own, logits[:, number], rtol=1e-4, atol=1e-4)
    if not flip:  # with it, probabilities are averaged and so are logits
        np.testing.assert_allclose(
            torch.from_numpy(logits).softmax(2).mean(1), found.probabilities, rtol=1e-4, atol=1e-6
        )


@pytest.fixture(scope="module")
def stretched(tmp_path_factory, photos):
    """The cache, but with images that were stretched to their size."""
    folder = tmp_path_factory.mktemp("stretched") / "cache"
    build_cache(photos, folder, Recipe(size=16, fit="stretch"), jobs=1)
    return folder


def test_images_made_with_another_fit_than_the_run_learned_from_are_said_once(
    cache, stretched, folds, tmp_path, caplog
):
    variants = [CachedDataset(stretched), CachedDataset(stretched)]
    predict(Predictor(folds, CpuDevice(), trust=TRUST), variants, tmp_path / "out.csv", 8)
    assert caplog.text.count("stretched") == 1
    assert f"were made with --fit stretch, and {folds[0]} has learned from images that were made with --fit" in (
        caplog.text
    )
    caplog.clear()
    predict(Predictor(folds, CpuDevice(), trust=TRUST), [CachedDataset(cache)], tmp_path / "out.csv", 8)
    assert caplog.text == ""
    content = load_checkpoint(folds[0] / "best.pt")
    (tmp_path / "earlier").mkdir()
    torch.save({name: value for name, value in content.items() if name != "images"}, tmp_path / "earlier" / "best.pt")
    predict(Predictor([tmp_path / "earlier"], CpuDevice(), trust=TRUST), variants, tmp_path / "out.csv", 8)
    assert caplog.text == ""


def test_validation_and_weights_of_images_made_with_another_fit_are_said(cache, stretched, folds, tmp_path, caplog):
    settings = TrainSettings(model="tiny_models:tiny", epochs=1, batch_size=50)
    sets = CachedDataset(cache), CachedDataset(stretched)
    train(tmp_path / "valid", settings, *sets, CpuDevice(), RunOptions(replay=False))
    assert "validation images were made with --fit stretch, the training images with --fit crop" in caplog.text
    assert f"--like {cache}" in caplog.text
    caplog.clear()
    settings = dataclasses.replace(settings, weights=str(folds[0]))
    train(tmp_path / "weights", settings, sets[1], sets[1], CpuDevice(), RunOptions(replay=False))
    assert "made with --fit crop, and the images are now made with --fit stretch" in caplog.text
    caplog.clear()
    train(tmp_path / "same", settings, sets[0], sets[0], CpuDevice(), RunOptions(replay=False))
    assert "--fit" not in caplog.text


def test_a_run_that_is_given_twice_is_said(folds, tmp_path, caplog):
    assert Predictor(folds, CpuDevice(), trust=TRUST).runs == len(folds)
    assert "times" not in caplog.text
    (tmp_path / "link").symlink_to(folds[0])
    assert Predictor([*folds, tmp_path / "link"], CpuDevice(), trust=TRUST).runs == len(folds) + 1
    assert f"{folds[0].resolve()} is given 2 times" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["model", "eval_step"])
def test_code_that_a_run_names_is_called_only_if_it_is_named_too(cache, folds, tmp_path, monkeypatch, capsys, setting):
    module = f"trap_of_a_{setting}"
    (tmp_path / f"{module}.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\nfrom tiny_models import tiny\n"
        "def step(model, batch): return model(batch['image'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code = f"{module}:{'tiny' if setting == 'model' else 'step'}"
    run = tmp_path / "run"
    shutil.copytree(folds[0], run)
    content = torch.load(run / "best.pt", weights_only=True)
    content["settings"][setting] = code
    torch.save(content, run / "best.pt")
    words = ["predict", str(run), str(cache), "-o", str(tmp_path / "out.csv"), "--backend", "eager"]
    words += ["--trust", "tiny_models:tiny"]
    assert main(words) == 2
    assert re.search(f"names code, '{code}', .*add --trust {code}", capsys.readouterr().err)
    assert not (tmp_path / "imported").exists()
    with pytest.raises(UsageError, match="names code"):
        Predictor([run], CpuDevice(), trust=f"tiny_models:tiny {code}")
    assert main([*words, "--trust", code]) == 0
    assert (tmp_path / "imported").exists()
