"""The page about a competition works as shown, and its numbers are plain torch's."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import run_blocks

from tpucache import CachedDataset
from tpucache.training.model import build_model

CLASSES = ("ant", "bee", "cat", "dog")


@pytest.fixture
def competition(photos, tmp_path, monkeypatch):
    """A competition's files: 64 images to train on, 11 to predict, and a sample in another order than their names."""
    paths = sorted(photos.rglob("*.png"))[::2]
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    for path in paths[:75]:
        shutil.copy(path, tmp_path / ("test" if path in paths[::7] else "train"))
    given = {path.name: path.parent.name for path in paths}
    with (tmp_path / "train.csv").open("w", newline="") as file:
        rows = [(path.stem, given[path.name]) for path in sorted((tmp_path / "train").iterdir())]
        csv.writer(file).writerows([("id", "label"), *rows])
    with (tmp_path / "sample_submission.csv").open("w", newline="") as file:
        tests = sorted((tmp_path / "test").iterdir(), key=lambda path: path.stem[::-1])
        csv.writer(file).writerows([("id", *CLASSES[::-1]), *((path.stem, *[0.25] * 4) for path in tests)])
    monkeypatch.chdir(tmp_path)


def plain(run, images):
    """Probabilities by nothing but torch and what best.pt holds."""
    best = torch.load(run / "best.pt", weights_only=True)
    model = build_model("cnn", best["outputs"], 3)
    model.load_state_dict(best["model"])
    mean, std = (torch.tensor(best[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        return model.eval()((images.float() - mean) / std).softmax(1).numpy()


def read(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def images_of(dataset):
    return torch.stack([dataset[index][0] for index in range(len(dataset))])


def values_of(rows):
    return np.float32([[row[name] for name in CLASSES] for row in rows])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_competition_works_word_by_word(competition):
    run_blocks("competition.md")
    run, cache = Path("runs/cnn"), CachedDataset("cache/train")
    folds = np.asarray(cache.table["fold"])
    images, expected = images_of(cache), np.empty((len(cache), 4))
    for fold in range(5):
        expected[folds == fold] = plain(run / f"fold-{fold}", images[folds == fold])
    rows = read(run / "out_of_fold.csv")
    np.testing.assert_allclose(values_of(rows), expected, atol=1e-6)
    assert [int(row["sample"]) for row in rows] == cache.numbers.tolist() == list(range(64))
    assert [row["path"] for row in rows] == cache.paths
    report = json.loads((run / "report.json").read_text())
    labels = cache.labels.numpy()
    assert report["out_of_fold"]["accuracy"] == pytest.approx(np.mean(expected.argmax(1) == labels))
    scores = [np.mean(expected.argmax(1) == labels, where=folds == fold) for fold in range(5)]
    assert [fold["metrics"]["accuracy"] for fold in report["folds"]] == pytest.approx(scores)
    assert report["mean"]["accuracy"] == pytest.approx(np.mean(scores))

    test = CachedDataset("cache/test")
    both = [images_of(test), images_of(test).flip(3)]
    expected = np.mean([plain(run / f"fold-{fold}", each) for fold in range(5) for each in both], 0)
    np.testing.assert_allclose(values_of(read("predictions.csv")), expected, atol=1e-6)
    submission, sample = read("submission.csv"), read("sample_submission.csv")
    assert list(submission[0]) == list(sample[0]) == ["id", *CLASSES[::-1]]
    assert [row["id"] for row in submission] == [row["id"] for row in sample]
    by_id = dict(zip([Path(path).stem for path in test.paths], expected, strict=True))
    np.testing.assert_allclose(values_of(submission), [by_id[row["id"]] for row in submission], atol=1e-6)
    assert read("final.csv")
