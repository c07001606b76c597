"""The page of findings has what was found, and a table that corrects labels."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
from PIL import Image

from tpucache import CachedDataset, Recipe, UsageError, build_cache, report_findings
from tpucache.cli import main
from tpucache.text import from_cell
from tpucache.training.prediction import PredictedSamples, write_table


def rows_of(page):
    return [[from_cell(cell) for cell in row] for row in csv.reader(page.table.decode().splitlines())][1:]


def write_predictions(path, dataset, values):
    names = [dataset.classes[number] for number in dataset.labels.tolist()]
    write_table(path, dataset, names, PredictedSamples([""] * len(values), dataset.classes, values, values))
    return path


@pytest.fixture(scope="module")
def copies(tmp_path_factory, copies_cache):
    return copies_cache(tmp_path_factory.mktemp("copies") / "copies", classes=("ant", "bee"))


def test_copies_are_told_apart_by_their_labels_and_the_table_proposes_the_other_one(copies, parse):
    page = report_findings(copies)
    found = parse(page.html)
    found.check_harmless()
    conflict, equal = (found.sections[f"look alike, {name} label"] for name in ("different", "same"))
    path = "folder/{:04d}.png".format
    assert conflict.endswith(f"differ, copies by their details {path(0)} {path(8)}")
    assert equal.endswith(f"differ, mirrored, copies by their details {path(1)} {path(9)}")
    assert re.search(r"ant bee \d+% alike: \d+ of 256 bits differ", conflict)
    assert "leaks" not in found.sections
    assert [row[:4] for row in rows_of(page)[:2]] == [["0", path(0), "ant", "bee"], ["8", path(8), "bee", "ant"]]
    assert {row[4].split(":")[0] for row in rows_of(page)} == {"look alike, different label", "look alike, same label"}


def test_leaks_are_the_pictures_of_both_caches(copies, copies_cache, tmp_path, parse):
    other = copies_cache(tmp_path / "other", samples=4, classes=("ant", "bee"))
    page = report_findings(copies, against=other)
    leaks = parse(page.html).sections["leaks"]
    assert {row[0] for row in rows_of(page)} == {"0", "1", "8", "9"}  # of this cache alone
    assert "folder/0000.png folder/0000.png" in leaks
    assert "folder/0009.png folder/0001.png" in leaks  # its mirror image


def test_suspects_come_with_the_class_that_was_predicted(copies, tmp_path, parse):
    dataset, probabilities = CachedDataset(copies), np.full((10, 2), 0.5)
    true, other = dataset.labels.tolist(), [dataset.classes[1 - label] for label in dataset.labels.tolist()]
    probabilities[3] = np.eye(2)[1 - true[3]]
    probabilities[5] = np.abs(0.3 - np.eye(2)[1 - true[5]])
    page = report_findings(copies, predictions=write_predictions(tmp_path / "p.csv", dataset, probabilities))
    text = parse(page.html).sections["suspects"]
    shown = f"p.label. 0.000, {other[3]} 1.000 {dataset.paths[3]}.*p.label. 0.300, .* {dataset.paths[5]}"
    assert re.search(shown, text)
    (row,) = [row for row in rows_of(page) if row[0] == "3"]
    assert row[1:4] == [dataset.paths[3], dataset.classes[true[3]], other[3]]


def test_findings_of_other_samples_and_of_no_images_are_refused(copies, copies_cache, tokens, tmp_path):
    for name, more in (
        ("paths", {"paths": [f"other/{number}.png" for number in range(10)]}),
        ("more", {"samples": 12}),
    ):
        dataset = CachedDataset(copies_cache(tmp_path / name, classes=("ant", "bee"), **more))
        table = write_predictions(tmp_path / f"{name}.csv", dataset, np.full((len(dataset), 2), 0.5))
        with pytest.raises(UsageError, match="give predictions for the samples of this cache"):
            report_findings(copies, predictions=table)
    with pytest.raises(UsageError, match="no images to hash, only the fields tokens"):
        report_findings(tokens)


def test_extremes_are_the_unusual_images_of_a_cache_or_a_selection(copies, tmp_path, tmp_path_factory, parse):
    assert parse(report_findings(copies).html).sections["extremes"].startswith("extremes None were found.")
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels * (number < 2)).save(tmp_path / f"{number}.png", "JPEG" if number == 1 else "PNG")
    cache = tmp_path_factory.mktemp("types") / "cache"
    build_cache(tmp_path, cache, Recipe(size=32), jobs=1)
    blank, wrong = "with next to no contrast 2.png", "of another file type than the suffix says 1.png"
    extremes = parse(report_findings(cache).html).sections["extremes"]
    assert all(text in extremes for text in (blank, wrong, "darkest 2.png"))
    selected = parse(report_findings(CachedDataset(cache).select([1, 0])).html).sections["extremes"]
    assert wrong in selected
    assert blank not in selected


@pytest.mark.parametrize(
    ("labels", "classes", "text"),
    [
        (np.linspace(0, 1, 10, dtype=np.float32)[:, None], (), "0.11111111"),
        (np.tile(np.float32([1, 0, 1]), (10, 1)), ("a", "b", "c"), "a;c"),
        (np.array([0, -1] * 5), ("a", "b"), ""),
        (np.zeros(10, np.int64), ("=1;2", "x"), "=1;2"),
    ],
    ids=["numbers", "several", "unknown", "semicolon"],
)
def test_labels_are_written_as_relabel_reads_them(labels, classes, text, copies_cache, tmp_path, hostile):
    paths = [f"{hostile}{number}" for number in range(8)] + ["@SUM(A1)/8.png", "-2+3/9.png"]
    cache = copies_cache(tmp_path / "a cache", labels=labels, classes=classes, paths=paths)
    page = report_findings(cache)
    assert {row[2] for row in rows_of(page) if row[0] == "1"} == ({text} if text else set())
    assert not re.search(r"(^|,)\"?[=+@-]", page.table.decode(), re.M)  # no spreadsheet runs anything
    page.save(tmp_path / "findings.html")
    assert main(["relabel", str(cache), str(tmp_path / "findings.csv")]) == 0
    assert np.array_equal(CachedDataset(cache).labels, np.asarray(labels))


def test_a_cache_without_labels_has_no_table_and_a_selection_its_own_findings_only(
    copies, copies_cache, tmp_path, parse
):
    assert report_findings(copies_cache(tmp_path / "cache", labels=None, classes=())).table is None
    found = parse(report_findings(CachedDataset(copies).select([0, 2, 8])).html).sections
    assert found["look alike, different label"].endswith("folder/0000.png folder/0008.png")
    assert "None were found" in found["look alike, same label"]


def test_the_command_writes_the_page_and_its_table(copies, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(copies), "--findings", "--against", str(copies), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(out), "bytes": out.stat().st_size}
    assert (tmp_path / "page.csv").exists()
    assert main(["report", str(copies), "--against", str(copies), "-o", str(out)]) == 2
    assert "give --findings, too" in capsys.readouterr().err
    assert main(["report", str(copies), "--findings", "--valid", str(copies), "-o", str(out)]) == 2
