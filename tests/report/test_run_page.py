"""The page of a run says what its files say, and shows what they hold as text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tpucache import CachedDataset, TrainingError, report_run
from tpucache.redact import printable

#: What the page of a run has besides what a cache's page has.
MORE_TAGS = {"a", "article", "i", "polyline"}


def write_run(folder, dataset, *, text="plain", variant=0, **arrays):
    """Write the files of a finished run of classes in which a text is wherever a file can hold one."""
    folder.mkdir(parents=True)
    samples = len(dataset)
    info = {
        "settings": {"model": text, text: text, "augment": {"flip": True}},
        "task": "classes",
        "outputs": 4,
        "classes": [f"{text} {number}" for number in range(4)],
        "training": {"cache": text, "variant": text, "samples": 7},
        "validation": {
            "cache": str(dataset.directory), "variant": variant, "samples": samples, "digest": dataset.digest
        },
    }  # fmt: skip
    pace = {"steps": 2, "images_per_second": 9.0, "step_seconds": 0.1, "waited": 0.0, "device_idle": 0.5}
    summary = {
        "finished": True,
        "backend": text,
        "device": text,
        "unit": text,
        "best_epoch": 1,
        "watched": text,
        "advice": text,
        "losses": [3.0, 2.0, 1.0],
        "seconds": {text: 2.5, "steps": 1.0},
        "wall_seconds": 4.0,
        "pace": {**pace, "compiles": 0, "received_bytes": 0},
    }
    labels = np.arange(samples) % 4
    predictions = (labels + 1) % 4
    found = {
        "positions": np.asarray(dataset.positions),
        "labels": labels,
        "predictions": predictions,
        "errors": np.linspace(0.9, 0.5, samples),
        "probabilities": np.full(samples, 0.75),
        **arrays,
    }
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "report.json").write_text(json.dumps(summary))
    name = "valid_" + text.replace('"', "").replace("\n", "").replace("\udcff", "")
    rows = ([f'"{name}"', "step", "lr", "valid_loss", "valid_samples"], *(["0.5", "2", "0.1", "1.5", "12"],) * 2)
    (folder / "history.csv").write_text("\n".join(",".join(row) for row in rows))
    np.savez(folder / "validation.npz", **{key: each for key, each in found.items() if each is not None})
    return folder


@pytest.fixture(scope="module")
def dataset(plain):
    return CachedDataset(plain)


def test_hostile_texts_are_shown_as_text_and_never_as_markup(dataset, tmp_path, hostile, parse):
    page = report_run(write_run(tmp_path / "run", dataset, text=hostile), 3)
    found, shown = parse(page.html), printable(hostile)
    assert found.foreign_tags <= MORE_TAGS
    assert not found.scripts
    assert found.loaded == []
    assert page.html.count("<img ") == 3
    for place in (
        f"was best by {shown};",
        f"predicted {shown} 1",
        f"{shown}, cores: 1",
        f"9 {shown}/s",
        f"true {shown} 0",
    ):
        assert place in found.text
    page.html.encode()


def test_a_setting_of_0_is_shown_and_one_that_is_off_is_not(dataset, tmp_path, parse):
    run = write_run(tmp_path / "run", dataset)
    info = json.loads((run / "run.json").read_text())
    info["settings"] |= {"weight_decay": 0.0, "seed": 0, "fix_res": False, "watch": None, "metric": []}
    (run / "run.json").write_text(json.dumps(info))
    text = parse(report_run(run).html).text
    assert [name for name in info["settings"] if name in text][-2:] == ["weight_decay", "seed"]


def test_hostile_names_of_folds_are_shown_as_text_and_lead_to_places_on_the_page(dataset, tmp_path, hostile, parse):
    folds = [hostile, "1"]
    run = tmp_path / "run"
    for number, folder in enumerate(
        ("fold-%3Cscript%3Ealert%28%27x%27%29%3C%2Fscript%3E%22%27%26%0A%FF%E2%80%AE", "fold-1")
    ):
        write_run(run / folder, dataset, text=f"text {number}")
    (run / "folds.json").write_text(json.dumps({"version": 1, "folds": folds}))
    score = {"finished": True, "best_epoch": 1, "samples": 12, "metrics": {hostile: 0.5}}
    mean = {hostile: 0.5}
    summary = {"finished": True, "mean": mean, "deviation": mean, "out_of_fold": mean, "seconds": {hostile: 1.0}}
    (run / "report.json").write_text(json.dumps({"folds": [{**score, "fold": fold} for fold in folds], **summary}))
    page = report_run(run, 2)
    found = parse(page.html)
    assert found.foreign_tags <= MORE_TAGS
    assert not found.scripts
    assert found.loaded == ["#part-1", "#part-2"]
    assert [value for name, value in found.attributes if name == "id" and "scheme" not in value] == ["part-1", "part-2"]
    assert f"fold {printable(hostile)}" in found.text
    assert page.html.count("<img ") == 4


def test_a_matrix_of_too_many_classes_gives_way_to_what_is_mistaken_most_often(dataset, tmp_path, parse):
    few = parse(report_run(write_run(tmp_path / "few", dataset)).html)
    assert "A row for each true class" in few.text
    many = report_run(write_run(tmp_path / "many", dataset, predictions=np.full(12, 35)))
    assert "The most frequent confusions." in parse(many.html).text
    assert 'class="matrix"' not in many.html


def test_files_that_do_not_belong_together_are_refused(dataset, tmp_path):
    wrong = {"labels": None, "predictions": None, "confusion": np.ones((2, 3))}
    with pytest.raises(TrainingError, match=r"do not belong together: .*2 rows and 3 columns"):
        report_run(write_run(tmp_path / "run", dataset, **wrong, shown=np.zeros(1, int), maps=np.zeros((1, 4, 4), int)))
    run = write_run(tmp_path / "other", dataset)
    (run / "run.json").write_text('{"validation": {}}')
    with pytest.raises(TrainingError, match="do not belong together"):
        report_run(run)


@pytest.mark.parametrize(
    ("name", "text"),
    [("report.json", '{"losses": [3.0, -1e39]}'), ("history.csv", "step,lr,valid_loss\n2,0.1,1e39\n")],
)
def test_a_number_that_no_run_writes_is_refused_before_it_is_drawn(dataset, tmp_path, name, text):
    run = write_run(tmp_path / "run", dataset)
    (run / name).write_text(text)
    with pytest.raises(TrainingError, match=f"{name}.* is too large"):
        report_run(run)


def test_an_error_that_no_run_writes_is_refused_before_it_is_added_up(dataset, tmp_path):
    run = write_run(tmp_path / "run", dataset, errors=np.full(len(dataset), 1e39))
    with pytest.raises(TrainingError, match=r"errors, of dtype float64, has values that are too large"):
        report_run(run)


def test_the_rate_of_each_step_is_drawn_and_that_of_epochs_where_no_other_is_known(dataset, tmp_path):
    run = write_run(tmp_path / "run", dataset)
    assert ">0.1<" in report_run(run).html  # one value, of an epoch
    summary = json.loads((run / "report.json").read_text())
    (run / "report.json").write_text(json.dumps({**summary, "learning_rates": [0.1, 0.3, 0.2]}))
    assert 'points="0.0,147.0 320.0,3.0 640.0,75.0"' in report_run(run).html


def test_seconds_have_no_hundredths(dataset, tmp_path, parse):
    text = parse(report_run(write_run(tmp_path / "run", dataset)).html).text
    assert "4.0 s in all" in text
    assert "2.5 s 62.5" in text


def test_the_matrix_is_green_where_classes_are_right_and_red_where_they_are_not(dataset, tmp_path):
    labels = np.arange(12) % 4
    predictions = np.where(labels == 0, 1, labels)
    page = report_run(write_run(tmp_path / "run", dataset, predictions=predictions)).html
    assert page.count('class="n hit" style="--share:100"') == 3
    assert page.count('class="n miss" style="--share:100"') == 1
    assert page.count('miss" style="--share:0"') == 11
    assert page.count('hit" style="--share:0"') == 1
