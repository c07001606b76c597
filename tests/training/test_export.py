"""What is exported gives the same predictions in its own runtime, by what its card says."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from running import TRUST, command, rows_of, train_on
from thorough import thorough

from tpucache import CachedDataset, Recipe, UsageError, build_cache
from tpucache.training.export import export_runs
from tpucache.training.model import build_model
from tpucache.training.settings import TrainSettings

pytestmark = pytest.mark.slow

EAGER = ("--backend", "torch")


@pytest.fixture(scope="module")
def prices(tmp_path_factory):
    """Images with a value far from 0."""
    folder, rng = tmp_path_factory.mktemp("prices"), np.random.default_rng(0)
    items = [(rng.integers(0, 256, (16, 16, 3)).astype(np.uint8), np.float32([500 + 30 * n])) for n in range(24)]
    build_cache(items, folder / "cache", Recipe(size=16), jobs=1)
    return folder / "cache"


def exported(cache, folder, kind, seeds=(0,), model="cnn"):
    """Train, predict and export; return the images, what was predicted and the folder of models."""
    runs = []
    for seed in seeds:
        settings = TrainSettings(model=model, epochs=1, batch_size=8, lr=0.01, seed=seed)
        train_on(folder / str(seed), settings, CachedDataset(cache))
        runs.append(folder / str(seed))
    out, dataset = folder / "out.csv", CachedDataset(cache)
    assert command("predict", *runs, cache, "-o", out, *EAGER, "--export", kind, "--trust", TRUST[0]) == 0
    images = torch.stack([dataset[row][0] for row in range(len(dataset))]).float()
    return images, np.float32([[*row.values()][4:] for row in rows_of(out)]), folder / "out_models"


@pytest.mark.parametrize("kind", [*thorough("classes"), "regression"])
def test_onnx_gives_the_predictions_of_pixels_in_its_own_runtime(cache, prices, tmp_path, kind):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    data, seeds = {"classes": (cache, (0, 1)), "regression": (prices, (0,))}[kind]
    images, expected, models = exported(data, tmp_path, "onnx", seeds, TRUST[0])
    card = json.loads((models / "card.json").read_text())
    assert (card["task"], card["normalised_inside"], len(card["models"])) == (kind, True, len(seeds))
    found = 0
    for each in card["models"]:
        session = runtime.InferenceSession(models / each["file"], providers=["CPUExecutionProvider"])
        found = found + each["weight"] * session.run(None, {"pixels": images.numpy()})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_safetensors_and_the_card_give_the_predictions(cache, prices, tmp_path, kind):
    from safetensors.torch import load_file

    images, expected, models = exported(cache if kind == "classes" else prices, tmp_path, "safetensors")
    card = json.loads((models / "card.json").read_text())
    (entry,) = card["models"]
    model = build_model("cnn", card["outputs"])
    model.load_state_dict(load_file(models / entry["file"]))
    mean, std = (torch.tensor(entry[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        outputs = model.eval()((images - mean) / std)
    if kind == "classes":
        found = outputs.softmax(1).numpy()
    else:
        found = outputs.numpy() * entry["labels"]["std"] + entry["labels"]["mean"]
        assert expected.mean() > 100
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert card["input"]["colours"] == "RGB"
    assert card["input"]["filter"] == "lanczos"


def test_train_exports_the_best_weights_when_it_ends(cache, tmp_path, capsys):
    run = ["train", cache, "--run", tmp_path / "run", "--model", "cnn", "--epochs", 1, "--batch-size", 32]
    assert command(*run, *EAGER, "--export", "safetensors") == 0
    assert f"exported {tmp_path / 'run' / 'export' / 'model-0.safetensors'}" in capsys.readouterr().err
    out = tmp_path / "out.csv"
    assert command("predict", tmp_path / "run", cache, "-o", out, *EAGER, "--export", "safetensors") == 0
    for name in ("model-0.safetensors", "card.json"):
        assert (tmp_path / "run" / "export" / name).read_bytes() == (tmp_path / "out_models" / name).read_bytes()


def test_a_folder_of_other_files_is_refused_before_anything_is_trained_or_predicted(cache, prices, tmp_path, capsys):
    exported(prices, tmp_path / "first", "safetensors")
    for folder in (tmp_path / "run" / "export", tmp_path / "out_models"):
        folder.mkdir(parents=True)
        (folder / "mine").touch()
    run = ["train", cache, "--run", tmp_path / "run", "--model", "cnn", "--epochs", "1", "--export", "safetensors"]
    predict = ["predict", tmp_path / "first" / "0", prices, "-o", tmp_path / "out.csv", "--export", "safetensors"]
    for words, folder in ((run, tmp_path / "run" / "export"), (predict, tmp_path / "out_models")):
        assert command(*words, *EAGER) == 2
        assert f"{folder} has files that are no export of tpucache" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["export"]
    assert not (tmp_path / "out.csv").exists()


def test_a_folder_of_other_files_is_refused_and_an_export_is_replaced(prices, tmp_path):
    _, _, models = exported(prices, tmp_path, "safetensors")
    manifest = CachedDataset(prices).manifest
    (models / "model-7.onnx").touch()  # of an export of more folds
    export_runs([tmp_path / "0"], manifest, models, "safetensors")
    assert sorted(path.name for path in models.iterdir()) == ["card.json", "model-0.safetensors"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    with pytest.raises(UsageError, match="no export"):
        export_runs([tmp_path / "0"], manifest, tmp_path / "other", "safetensors")
    with pytest.raises(UsageError, match="onnx or safetensors"):
        export_runs([tmp_path / "0"], manifest, tmp_path / "new", "pickle")
    assert not (tmp_path / "new").exists()


def test_the_card_states_how_the_images_of_the_run_were_made_not_those_of_another_cache(prices, tmp_path):
    _, _, models = exported(prices, tmp_path, "safetensors")
    manifest = CachedDataset(prices).manifest
    other = dataclasses.replace(manifest, recipe={**manifest.recipe, "fit": "stretch"})
    export_runs([tmp_path / "0"], other, models, "safetensors")
    assert json.loads((models / "card.json").read_text())["input"]["fit"] == "crop"
