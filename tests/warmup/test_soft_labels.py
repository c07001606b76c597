"""Soft labels are a table's probabilities and weights, for the samples that have a row; others keep what they had."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from made import build_here

from tpucache import CachedDataset, CachedLoader, MixedLoader, SourceError, UsageError
from tpucache.cli import main
from tpucache.training.data import soft_labelled
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.find import make_task
from tpucache.warmup import SoftOptions, TableOptions, relabel_cache

NAMES = ("a", "b")
SOFT = SoftOptions(soft_labels=True)


@pytest.fixture
def cache(tmp_path):
    rng = np.random.default_rng(0)
    items = [(rng.integers(0, 256, (8, 8, 3)).astype(np.uint8), number % 2) for number in range(4)]
    build_here(items, tmp_path / "cache", classes=NAMES)
    return tmp_path / "cache"


def predictions(path, rows, columns=("path", "label", "prediction", *NAMES, "sure")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def soft(cache):
    table = CachedDataset(cache).table
    return np.asarray(table["soft_label"]).tolist(), np.asarray(table["soft_weight"]).tolist()


def rows_of(cache, numbers, values):
    paths = CachedDataset(cache).paths
    return [(paths[number], "", "a", *value) for number, value in zip(numbers, values, strict=True)]


def test_samples_with_a_row_get_it_and_others_keep_what_they_had(cache, tmp_path):
    table = predictions(tmp_path / "one.csv", rows_of(cache, [1], [(0.75, 0.25, 0.5)]))
    assert main(["relabel", str(cache), str(table), "--soft-labels", "--weight-col", "sure"]) == 0
    assert soft(cache) == ([[1, 0], [0.75, 0.25], [1, 0], [0, 1]], [1, 0.5, 1, 1])
    half = SoftOptions(soft_labels=True, soft_share=0.5)
    relabel_cache(cache, predictions(tmp_path / "two.csv", rows_of(cache, [3], [(0.5, 0.5, "")])), soft=half)
    assert soft(cache) == ([[1, 0], [0.75, 0.25], [1, 0], [0.25, 0.75]], [1, 0.5, 1, 1])
    assert CachedDataset(cache).labels.tolist() == [0, 1, 0, 1]
    again = predictions(tmp_path / "hard.csv", [(path, "b") for path in CachedDataset(cache).paths], ("path", "label"))
    relabel_cache(cache, again, TableOptions(label_cols=("label",)), classes=NAMES)
    assert "soft_label" not in CachedDataset(cache).table


def test_batches_have_them_times_their_weight_and_a_run_another_digest(cache, tmp_path):
    plain = CachedDataset(cache)
    assert plain.with_soft_labels() is plain
    table = predictions(tmp_path / "one.csv", rows_of(cache, [0, 2], [(0.75, 0.25, 0.5), (0.5, 0.5, 0)]))
    relabel_cache(cache, table, soft=SoftOptions(soft_labels=True, weight_col="sure"))
    dataset = CachedDataset(cache)
    shown = dataset.with_soft_labels()
    expected = [[0.375, 0.125], [0, 1], [0, 0], [0, 1]]
    (batch,) = CachedLoader(shown, 4)
    assert batch[1].tolist() == expected
    assert (shown.digest != dataset.digest, shown.labels.tolist()) == (True, [0, 1, 0, 1])
    mixed = MixedLoader([CachedLoader(each, 2, shuffle=True, drop_last=True) for each in (shown, shown)], shares=[1, 1])
    assert next(iter(mixed))[1].dtype == torch.float32


def test_the_loss_is_the_cross_entropy_of_probabilities_times_the_weight():
    task, outputs = make_task("classes", 2), torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    probabilities, weights = torch.tensor([[0.75, 0.25], [0.1, 0.9]]), torch.tensor([0.5, 2.0])
    targets = task.targets(probabilities * weights[:, None])
    each = torch.nn.functional.cross_entropy(outputs, probabilities, reduction="none")
    torch.testing.assert_close(task.loss(outputs, targets), (each * weights).mean())
    smoothed = task.targets(probabilities * weights[:, None], 0.1)
    torch.testing.assert_close(smoothed.sum(1), weights)


def test_what_cross_entropy_over_classes_cannot_learn_is_refused(cache, tmp_path):
    relabel_cache(cache, predictions(tmp_path / "one.csv", rows_of(cache, [0], [(1, 0, 1)])), soft=SOFT)
    dataset = CachedDataset(cache)
    for settings, task in ((TrainSettings(loss="focal"), "classes"), (TrainSettings(), "multilabel")):
        with pytest.raises(UsageError, match="cross-entropy"):
            soft_labelled(settings, make_task(task, 2), dataset)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((0.75, 0.75, 1), "add up to 1.5"), ((1.5, -0.5, 1), "a number from 0 to 1"), (("nan", 1, 1), "number"),
        ((1, 0, -1), "column 'sure'"), ((1, 0, "inf"), "column 'sure'"), ((1, 0, "=1+1"), "column 'sure'"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_named_with_their_line(cache, tmp_path, value, message):
    before = (cache / "manifest.json").read_bytes()
    table = predictions(tmp_path / "bad.csv", rows_of(cache, [0, 1], [(1, 0, 1), value]))
    with pytest.raises(SourceError, match=f"line 3.*{message}"):
        relabel_cache(cache, table, soft=SoftOptions(soft_labels=True, weight_col="sure"))
    assert (cache / "manifest.json").read_bytes() == before


def test_options_and_tables_that_do_not_fit_are_refused(cache, tmp_path, capsys):
    table = predictions(tmp_path / "one.csv", rows_of(cache, [0], [(1, 0, 1)]))
    assert main(["relabel", str(cache), str(table), "--soft-share", "0.5"]) == 2
    assert "--soft-labels" in capsys.readouterr().err
    assert main(["relabel", str(cache), str(table), "--soft-labels", "--label-col", "a"]) == 2
    assert main(["relabel", str(cache), str(table), "--soft-labels", "--soft-share", "0"]) == 2
    other = predictions(tmp_path / "other.csv", rows_of(cache, [0], [(1,)]), ("path", "label", "prediction", "a"))
    with pytest.raises(SourceError, match="no column 'b'"):
        relabel_cache(cache, other, soft=SOFT)
    strange = predictions(tmp_path / "strange.csv", [("none.png", "", "a", 1, 0, 1)])
    with pytest.raises(SourceError, match="no row"):
        relabel_cache(cache, strange, soft=SOFT)


def test_soft_labels_are_not_mixed_with_class_numbers(cache, tmp_path):
    plain = CachedDataset(cache)
    relabel_cache(cache, predictions(tmp_path / "one.csv", rows_of(cache, [0], [(0.75, 0.25, 1)])), soft=SOFT)
    shown = CachedDataset(cache).with_soft_labels()
    for datasets in ((shown, plain), (plain, shown)):
        with pytest.raises(UsageError, match="soft labels"):
            MixedLoader([CachedLoader(each, 4, drop_last=True) for each in datasets], shares=[1, 1])


def test_labels_are_not_mixed_with_standardised_ones(tmp_path):
    items = [(np.full((8, 8, 3), number, np.uint8), number + 0.5) for number in range(4)]
    build_here(items, tmp_path / "cache")
    plain = CachedDataset(tmp_path / "cache")
    for other in (plain, plain.with_standardised_labels([1.0], [3.0])):
        loaders = [CachedLoader(each, 4) for each in (plain.with_standardised_labels([1.0], [2.0]), other)]
        with pytest.raises(UsageError, match="standardised"):
            MixedLoader(loaders, shares=[1, 1])
