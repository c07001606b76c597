"""The page of a run says what its files say, and shows what they hold as text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tpucache import CachedDataset, TrainingError, report_run
from tpucache.text import printable
from tpucache.training.run.report import FoldScore, FoldsReport, write_report


@pytest.fixture(scope="module")
def dataset(plain):
    return CachedDataset(plain)


def test_hostile_texts_are_shown_as_text_and_never_as_markup(dataset, write_run, tmp_path, hostile, parse):
    page = report_run(write_run(tmp_path / "run", dataset, text=hostile), 3)
    found, shown = parse(page.html), printable(hostile)
    found.check_harmless()
    assert page.html.count("<img ") == 3
    for place in (
        f"was best by {shown};",
        f"predicted: {shown} 1",
        f"{shown}, 1 core",
        f"9.0 {shown}/s",
        f"true: {shown} 0",
    ):
        assert place in found.text
    page.html.encode()


def test_a_setting_of_0_is_shown_but_none_that_is_off_and_no_hundredths(dataset, write_run, tmp_path, parse):
    run = write_run(tmp_path / "run", dataset)
    info = json.loads((run / "run.json").read_text())
    info["settings"] |= {"weight_decay": 0.0, "seed": 0, "fix_res": False, "watch": None, "metric": []}
    (run / "run.json").write_text(json.dumps(info))
    text = parse(report_run(run).html).text
    assert [name for name in info["settings"] if name in text][-2:] == ["weight_decay", "seed"]
    assert "4.0 s in all" in text
    assert "2.5 s 62.5" in text


def test_hostile_names_of_folds_are_shown_as_text(dataset, write_run, tmp_path, hostile, parse):
    folds = [hostile, "1"]
    run = tmp_path / "run"
    for number, folder in enumerate(
        ("fold-%3Cscript%3Ealert%28%27x%27%29%3C%2Fscript%3E%22%27%26%0A%FF%E2%80%AE", "fold-1")
    ):
        write_run(run / folder, dataset, text=f"text {number}")
    (run / "folds.json").write_text(json.dumps({"version": 1, "folds": folds}))
    mean = {hostile: 0.5}
    scores = [FoldScore(fold, "", True, 1, 12, mean) for fold in folds]
    write_report(run, FoldsReport("cpu", 0, scores, mean, mean, mean, "", True, {hostile: 1.0}, 1.0))
    page = report_run(run, 2)
    found = parse(page.html)
    found.check_harmless()
    assert f"fold {printable(hostile)}" in found.text
    assert page.html.count("<img ") == 4


def test_a_matrix_of_too_many_classes_gives_way_to_what_is_mistaken_most_often(dataset, write_run, tmp_path, parse):
    few = parse(report_run(write_run(tmp_path / "few", dataset)).html)
    assert "A row for each true class" in few.text
    many = report_run(write_run(tmp_path / "many", dataset, predictions=np.full(12, 35) * (np.arange(12) > 0)))
    often = parse(many.html).sections["Confusion"]
    assert "The most frequent confusions." in often
    assert "plain 0 35 2" in often
    assert "plain 0 plain 0" not in often  # this one is right
    assert 'class="matrix"' not in many.html


@pytest.mark.parametrize(
    ("files", "arrays", "words"),
    [
        (
            {},
            {"errors": None, "labels": None, "predictions": None, "confusion": np.ones((2, 3))},
            "2 rows and 3 columns",
        ),
        ({"run.json": '{"validation": {}}'}, {}, "do not belong together"),
        ({"report.json": '{"losses": [3.0, -1e39]}'}, {}, "report.json.*losses.1.' is -1e\\+39, not a number"),
        ({"history.csv": "step,lr,valid_loss\n2,0.1,1e39\n"}, {}, "history.csv.* is too large"),
        ({}, {"errors": np.full(12, 1e39)}, "errors, of dtype float64, has values that are too large"),
    ],
)
def test_files_that_no_run_writes_are_refused(files, arrays, words, dataset, write_run, tmp_path):
    run = write_run(tmp_path / "run", dataset, **arrays)
    for name, text in files.items():
        (run / name).write_text(text)
    with pytest.raises(TrainingError, match=words):
        report_run(run)


def test_the_rate_of_each_step_is_drawn_and_that_of_epochs_where_no_other_is_known(dataset, write_run, tmp_path):
    run = write_run(tmp_path / "run", dataset)
    assert "<span>0.1</span>" in report_run(run).html  # one value, of an epoch
    summary = json.loads((run / "report.json").read_text())
    (run / "report.json").write_text(json.dumps({**summary, "learning_rates": [0.1, 0.3, 0.2]}))
    assert 'points="0.0000,0.0000 0.5000,1.0000 1.0000,0.5000 "' in report_run(run).html
