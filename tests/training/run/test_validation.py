"""A run keeps what it predicted in its best epoch, and its page shows it, as long as the cache is the same one."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from running import predictor_of, report_of, rows_of, train_on

from tpucache import CachedDataset, Recipe, TrainingError, UsageError, build_cache, report_run
from tpucache.cli import main
from tpucache.training import TrainSettings, predict
from tpucache.training.device import CpuDevice

SETTINGS = TrainSettings(model="tiny_models:tiny", epochs=2, batch_size=16, lr=0.01)
DEVICE = CpuDevice()


def run_on(dataset, folder, **changed):
    settings = dataclasses.replace(SETTINGS, **changed)
    parts = dataset.select(range(32)), dataset.select(range(32, 55))
    train_on(folder, settings, *parts, device=DEVICE)
    with np.load(folder / "validation.npz") as arrays:
        return parts[1], dict(arrays)


def predicted(folder, dataset):
    predict(predictor_of(folder), [dataset], folder / "predicted.csv", 16, 1)
    return np.float32([[*row.values()][4:] for row in rows_of(folder / "predicted.csv")])


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory):
    """A run on its own copy of the cache, both of which may be written to by copying them first."""
    folder = tmp_path_factory.mktemp("kept")
    shutil.copytree(cache, folder / "cache")
    valid_set, arrays = run_on(CachedDataset(folder / "cache"), folder / "run")
    return folder, valid_set, arrays


def test_what_is_kept_is_what_the_best_weights_predict(run):
    folder, valid_set, arrays = run
    values, labels = predicted(folder / "run", valid_set), valid_set.labels.numpy()
    np.testing.assert_array_equal(arrays["positions"], valid_set.positions)
    np.testing.assert_array_equal(arrays["labels"], labels)
    np.testing.assert_array_equal(arrays["predictions"], values.argmax(1))
    np.testing.assert_allclose(arrays["probabilities"], values.max(1), atol=1e-6)
    np.testing.assert_allclose(arrays["errors"], 1 - values[np.arange(23), labels], atol=1e-6)


def test_the_page_shows_the_most_wrong_samples_and_all_that_the_run_wrote(run):
    folder, valid_set, arrays = run
    page = report_run(folder / "run", samples=3).html
    wrong = [row for row in np.argsort(-arrays["errors"]) if arrays["labels"][row] != arrays["predictions"][row]][:3]
    places = [page.index(valid_set.paths[row]) for row in wrong]
    assert len(wrong) == page.count("<img") == 3
    assert places == sorted(places)
    report = report_of(folder / "run")
    for shown in (
        f"Epoch {report['best_epoch']} was best",
        "polyline",
        "tiny_models:tiny",
        "Confusion",
    ):
        assert shown in page


def test_a_cache_that_is_gone_or_another_is_said_and_leaves_the_rest(run, cache, tmp_path):
    folder, _, _ = run
    shutil.copytree(folder / "run", tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    info["validation"]["cache"] = str(tmp_path / "gone")
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    page = report_run(tmp_path / "run").html
    assert "gone does not exist" in page
    assert "Confusion" in page
    assert "<img" not in page
    assert "<img" in report_run(tmp_path / "run", cache=cache).html  # a copy is the same
    info["validation"]["digest"] = "0" * 64
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    assert "other records or labels" in report_run(tmp_path / "run", cache=cache).html
    (tmp_path / "run" / "validation.npz").write_bytes(b"cut short")
    with pytest.raises(TrainingError, match=r"validation.npz cannot be read"):
        report_run(tmp_path / "run")
    for name in ("validation.npz", "run.json", "report.json"):  # as an earlier version, or a killed run, leaves it
        (tmp_path / "run" / name).unlink()
    assert "polyline" in report_run(tmp_path / "run").html


@pytest.mark.slow
def test_the_command_writes_a_page_but_never_over_a_file_of_the_run_or_its_cache(run, tmp_path, capsys):
    folder, _, _ = run
    assert main(["report", str(folder / "run"), "-o", str(tmp_path / "page.html"), "--samples", "1"]) == 0
    assert (tmp_path / "page.html").read_text().count("<img") == 1
    for name in ("run/best.pt", "run/report.json", "cache/manifest.json"):
        before = (folder / name).read_bytes()
        assert main(["report", str(folder / "run"), "-o", str(folder / name)]) == 2
        assert (folder / name).read_bytes() == before
    assert main(["report", str(folder / "cache"), "--valid", str(folder / "cache")]) == 2
    assert "for a page about a run" in capsys.readouterr().err
    with pytest.raises(UsageError, match="holds no run"):
        report_run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["colours", "greys"])
def test_values_are_kept_for_other_tasks(name, tmp_path):
    build_cache(f"tiny_tasks:{name}", tmp_path / "cache", Recipe(size=16), jobs=1)
    valid_set, arrays = run_on(CachedDataset(tmp_path / "cache"), tmp_path / "run", model="tiny_tasks:linear")
    values = predicted(tmp_path / "run", valid_set)
    np.testing.assert_allclose(arrays["values"], values, atol=1e-5)
    np.testing.assert_allclose(arrays["errors"], np.abs(values - valid_set.labels.numpy()).max(1), atol=1e-5)
    page = report_run(tmp_path / "run", samples=2).html
    assert valid_set.paths[int(arrays["errors"].argmax())] in page
    assert ("Predictions are those above one half" in page) == (name == "colours")


@pytest.mark.slow
def test_masks_are_kept_of_the_samples_with_the_least_iou(tmp_path):
    build_cache("tiny_tasks:squares", tmp_path / "cache", Recipe(size=16), jobs=1)
    dataset = CachedDataset(tmp_path / "cache")
    valid_set, arrays = run_on(dataset, tmp_path / "run", model="unet", task="mask", mask_classes=2)
    order = np.argsort(-arrays["errors"], kind="stable")[:12]
    assert arrays["errors"][arrays["shown"]].tolist() == arrays["errors"][order].tolist()
    row = int(arrays["shown"][0])
    found, truth = arrays["maps"][0], valid_set[row]["mask"].numpy()[..., 0]
    shares = [np.sum((found == c) & (truth == c)) / np.sum((found == c) | (truth == c)) for c in (0, 1)]
    assert arrays["errors"][row] == pytest.approx(1 - np.mean(shares), abs=1e-5)
    assert arrays["confusion"].sum() == 23 * 256
    page = report_run(tmp_path / "run", samples=2).html
    assert page.count("<img") == 4
    for head, mask in (("true", truth), ("predicted", found)):
        text = f"class 1 {(mask == 1).mean():.1%}" if mask.any() else "nothing"
        assert f">{head}: {text}</b>" in page
