"""Predictions are those of plain torch sample by sample, in order, whatever the count and the backend."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil

import numpy as np
import pytest
import tiny_models
import torch
from running import TRUST, best_of, command, plain_outputs, predictor_of, rows_of, train_on
from thorough import thorough

from tpucache import CachedDataset, Recipe, TrainingError, UsageError, build_cache
from tpucache.insight import read_predictions
from tpucache.training import TrainSettings, predict
from tpucache.training.device import CpuDevice
from tpucache.training.forward import IMAGENET

COUNTS = (0, 1, 7, 8, 9, 1000)
CLASSES = ["ant", "bee", "cat", "dog"]


@pytest.fixture(scope="module")
def folds(cache, tmp_path_factory):
    """Two runs of one epoch, which differ in their weights and in the statistics they normalise by."""
    folder = tmp_path_factory.mktemp("folds")
    for seed, mean in enumerate((None, IMAGENET[0])):
        settings = TrainSettings(
            model="tiny_models:tiny", epochs=1, batch_size=8, lr=0.02, ema=0.5, seed=seed, mean=mean
        )
        train_on(folder / str(seed), settings, CachedDataset(cache))
    return folder / "0", folder / "1"


def plain(run, dataset, mirrored=False):
    """Probabilities by nothing but torch and what best.pt holds, of images as they are or mirrored left to right."""
    best = best_of(run)
    model = tiny_models.tiny(best["outputs"])
    model.load_state_dict(best["model"])
    if not len(dataset):
        return np.zeros((0, best["outputs"]), np.float32)
    images = [(image.flip(2) if mirrored else image, label) for image, label in dataset]
    return plain_outputs(model.eval(), images, best["mean"], best["std"]).softmax(1).numpy()


def many(cache, count, variant=0):
    return CachedDataset(cache, variant, np.arange(count) * 7 % 150)


def values_of(rows):
    return np.float32([[row[name] for name in CLASSES] for row in rows]).reshape(-1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_values_are_those_of_plain_torch(cache, folds, tmp_path, count):
    dataset, output = many(cache, count), tmp_path / "out.csv"
    report = predict(predictor_of(folds[0]), [dataset], output, 8)
    assert (report.samples, bool(report.metrics)) == (count, count > 0)
    assert output.read_text().startswith("sample,path,label,prediction,ant,bee,cat,dog\n")
    rows, expected = rows_of(output), plain(folds[0], dataset)
    np.testing.assert_allclose(values_of(rows), expected, atol=1e-6)
    names = ([CLASSES[number] for number in numbers] for numbers in (dataset.labels, expected.argmax(1)))
    columns = [[*map(str, dataset.numbers)], [*dataset.paths], *names]
    assert [[row[name] for row in rows] for name in ("sample", "path", "label", "prediction")] == columns


ON_XLA = """
import sys
from pathlib import Path
import numpy as np
from tpucache import CachedDataset
from tpucache.training import PredictOptions, Predictor, open_device, predict

cache, run, cores, output = sys.argv[1:]
device = open_device("xla", int(cores))
predictor = Predictor([Path(run)], device, trust=["tiny_models:tiny"])
for count in {counts}:
    predict(predictor, [CachedDataset(cache, 0, np.arange(count) * 7 % 150)], f"{{output}}/{{count}}.csv", 8)
    print(device.counters().compiles)
both = Predictor([Path(run)], device, ["tiny_models:tiny"], PredictOptions(flip_tta=True))
predict(both, [CachedDataset(cache)], f"{{output}}/flipped.csv", 8)
"""


@pytest.mark.xla
@pytest.mark.parametrize("cores", [*thorough(1), 8])
def test_values_on_xla_are_those_of_plain_torch_and_one_graph_makes_them(cache, folds, on_xla, tmp_path, cores):
    compiles = on_xla(ON_XLA.format(counts=COUNTS[1:]), cache, folds[0], cores, tmp_path, devices=cores).split()
    assert compiles == len(COUNTS[1:]) * compiles[:1]
    for count in COUNTS[1:]:
        found = values_of(rows_of(tmp_path / f"{count}.csv"))
        np.testing.assert_allclose(found, plain(folds[0], many(cache, count)), atol=1e-5)
    both = [plain(folds[0], CachedDataset(cache), mirrored) for mirrored in (False, True)]
    assert np.abs(both[0] - both[1]).max() > 1e-4
    np.testing.assert_allclose(values_of(rows_of(tmp_path / "flipped.csv")), np.mean(both, 0), atol=1e-5)


@pytest.mark.slow
def test_variants_runs_and_mirrored_images_are_averaged_and_the_command_says_so(cache, folds, tmp_path, capsys):
    output = tmp_path / "out" / "predictions.csv"
    words = ("--variants", "all", "--flip-tta", "--backend", "eager", "--json", "--trust", TRUST[0])
    assert command("predict", *folds, cache, "-o", output, *words) == 0
    report = json.loads(capsys.readouterr().out)
    found = [report[name] for name in ("samples", "runs", "variants", "output")]
    assert found == [150, 2, [0, 1, 2, 3], str(output)]
    ways = itertools.product(folds, range(4), (False, True))
    expected = np.mean([plain(run, CachedDataset(cache, variant), mirrored) for run, variant, mirrored in ways], 0)
    np.testing.assert_allclose(values_of(rows_of(output)), expected, atol=1e-6)
    assert report["metrics"]["accuracy"] == np.mean(expected.argmax(1) == CachedDataset(cache).labels.numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--variants", "9"], 2, "variants"),
        (["--variants", "none"], 2, "--variants"),
        (["--cores", "8"], 2, "1 core"),
        (["--batch-size", "7"], 0, "out.csv"),
    ],
)
def test_options_that_do_not_fit_end_in_one_line(cache, folds, tmp_path, capsys, options, status, message):
    words = ["predict", folds[0], cache, "-o", tmp_path / "out.csv", "--backend", "eager", "--trust", TRUST[0]]
    try:
        found = command(*words, *options)
    except SystemExit as ended:
        found = ended.code
    out, err = capsys.readouterr()
    assert found == status
    assert message in (err if status else out)
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_cache_without_labels_is_predicted_without_them(folds, photos, tmp_path):
    build_cache(photos / "ant", tmp_path / "flat", Recipe(size=16), jobs=1)
    report = predict(predictor_of(folds[0]), [CachedDataset(tmp_path / "flat")], tmp_path / "out.csv", 8)
    assert report.metrics == {}
    assert {row["label"] for row in rows_of(tmp_path / "out.csv")} == {""}


def test_values_from_0_to_1_are_written_as_values_for_a_run_of_several_classes(tmp_path):
    items = [(np.zeros((16, 16, 3), np.uint8), row) for row in np.float32([[0.75, 0.25, 0.5], [0.5, 1, 0]])]
    for name, source in (("marks", "tiny_tasks:colours"), ("values", items)):
        build_cache(source, tmp_path / name, Recipe(size=16), jobs=1)
    settings = TrainSettings(model="tiny_tasks:linear", epochs=1, batch_size=100, lr=0.01)
    train_on(tmp_path / "run", settings, CachedDataset(tmp_path / "marks"))
    predict(predictor_of(tmp_path / "run"), [CachedDataset(tmp_path / "values")], tmp_path / "out.csv", 4)
    assert [row["label"] for row in rows_of(tmp_path / "out.csv")] == ["0.75;0.25;0.5", "0.5;1.0;0.0"]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_words(cache, photos, folds, tmp_path):
    build_cache(photos, tmp_path / "larger", Recipe(size=20), jobs=1)
    settings = TrainSettings(model="tiny_models:tiny", epochs=1, batch_size=50)
    dataset, larger, nine = CachedDataset(cache), CachedDataset(tmp_path / "larger"), many(cache, 9)
    train_on(tmp_path / "run", settings, larger)
    best = best_of(folds[0])
    best["model"]["5.bias"][1] = float("nan")
    for name in ("infinite", "begun", "empty"):
        (tmp_path / name).mkdir()
    torch.save(best, tmp_path / "infinite" / "best.pt")
    (tmp_path / "begun" / "last.pt").write_bytes(b"")
    spread, first = CpuDevice(), [folds[0]]
    spread.cores = 8
    for runs, sets, error, words in (
        (first, [larger], UsageError, "20, 20, 3"),
        (first, [nine, many(cache, 9, 1)[::-1]], UsageError, "other samples, or the same in another order"),
        (first, [nine, many(cache, 8, 1)], UsageError, "other samples, or the same in another order"),
        ([folds[0], tmp_path / "run"], [], UsageError, "the two runs differ in fields"),
        ([tmp_path / "empty"], [], TrainingError, "holds no run"),
        ([tmp_path / "begun"], [], TrainingError, "no epoch of the run has ended"),
        (
            [tmp_path / "infinite"],
            [dataset],
            TrainingError,
            f"150 samples are not finite, the first that of '{dataset.paths[0]}'",
        ),
    ):
        with pytest.raises(error, match=words):
            predict(predictor_of(*runs), sets, tmp_path / "out.csv", 12)
    with pytest.raises(UsageError, match="divide over 8 cores"):
        predict(predictor_of(*first, device=spread), [dataset], tmp_path / "out.csv", 12)
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
    predictor, dataset = predictor_of(folds[0]), CachedDataset(tmp_path / "cache")
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
    dataset = CachedDataset(cache)
    predict(predictor_of(*folds, flip_tta=flip), [dataset], tmp_path / "plain.csv", 8)
    predictor = predictor_of(*folds, flip_tta=flip, logits=True, features=True)
    report = predict(predictor, [dataset], tmp_path / "out.csv", 8)
    assert (report.logits, report.features) == (str(tmp_path / "out_logits.npy"), str(tmp_path / "out_features.npy"))
    logits, features = np.load(report.logits), np.load(report.features)
    assert logits.shape == (len(dataset), len(folds), 4)
    found, expected = read_predictions(tmp_path / "out.csv"), read_predictions(tmp_path / "plain.csv")
    np.testing.assert_allclose(found.probabilities, expected.probabilities, rtol=1e-5)
    for number, run in enumerate(folds):
        model = best_of(run)["model"]
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
    predict(predictor_of(*folds), variants, tmp_path / "out.csv", 8)
    assert caplog.text.count("stretched") == 1
    assert f"were made with --fit stretch, and {folds[0]} has learned from images that were made with --fit" in (
        caplog.text
    )
    caplog.clear()
    predict(predictor_of(*folds), [CachedDataset(cache)], tmp_path / "out.csv", 8)
    assert caplog.text == ""
    content = best_of(folds[0])
    (tmp_path / "earlier").mkdir()
    torch.save({name: value for name, value in content.items() if name != "images"}, tmp_path / "earlier" / "best.pt")
    predict(predictor_of(tmp_path / "earlier"), variants, tmp_path / "out.csv", 8)
    assert caplog.text == ""


def test_validation_and_weights_of_images_made_with_another_fit_are_said(cache, stretched, folds, tmp_path, caplog):
    settings = TrainSettings(model="tiny_models:tiny", epochs=1, batch_size=50)
    sets = CachedDataset(cache), CachedDataset(stretched)
    train_on(tmp_path / "valid", settings, *sets)
    assert "validation images were made with --fit stretch, the training images with --fit crop" in caplog.text
    assert f"--like {cache}" in caplog.text
    caplog.clear()
    settings = dataclasses.replace(settings, weights=str(folds[0]))
    train_on(tmp_path / "weights", settings, sets[1], sets[1])
    assert "made with --fit crop, and the images are now made with --fit stretch" in caplog.text
    caplog.clear()
    train_on(tmp_path / "same", settings, sets[0], sets[0])
    assert "--fit" not in caplog.text


def test_a_run_that_is_given_twice_is_said(folds, tmp_path, caplog):
    assert predictor_of(*folds).runs == len(folds)
    assert "times" not in caplog.text
    (tmp_path / "link").symlink_to(folds[0])
    assert predictor_of(*folds, tmp_path / "link").runs == len(folds) + 1
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
    content = best_of(run)
    content["settings"][setting] = code
    torch.save(content, run / "best.pt")
    words = ["predict", run, cache, "-o", tmp_path / "out.csv", "--backend", "eager", "--trust", TRUST[0]]
    assert command(*words) == 2
    assert re.search(f"names code, '{code}', .*add --trust {code}", capsys.readouterr().err)
    assert not (tmp_path / "imported").exists()
    with pytest.raises(UsageError, match="names code"):
        predictor_of(run, trust=f"{TRUST[0]} {code}")
    assert command(*words, "--trust", code) == 0
    assert (tmp_path / "imported").exists()
