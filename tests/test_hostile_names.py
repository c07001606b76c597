"""Tables that we write are read back by us, whatever classes, columns and files are called."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hostile_texts import HOSTILE
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tpucache import Recipe, build_cache
from tpucache.insight import read_predictions
from tpucache.insight.labels import suspects_table
from tpucache.store.cache import Cache
from tpucache.store.samples import IMAGE_COLUMNS
from tpucache.text import (
    PREDICTION_COLUMNS,
    SEPARATOR,
    from_heading,
    join_names,
    part_names,
    to_cell,
    to_csv,
    to_heading,
)
from tpucache.training.prediction import PredictedSamples, write_table
from tpucache.training.tasks.classes import Multilabel
from tpucache.warmup.build_options import SoftOptions
from tpucache.warmup.relabel import relabel_cache
from tpucache.warmup.sources.columns import TableOptions, column_labels
from tpucache.warmup.sources.table import read_table

names = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)).filter(
    lambda name: "\0" not in name
)


def write(folder: Path, classes: list[str], rows: list[tuple[str, str, str]]) -> Path:
    values = np.random.RandomState(0).dirichlet(np.ones(len(classes)), len(rows)).astype(np.float32)
    dataset: Any = SimpleNamespace(numbers=np.arange(len(rows), dtype=np.uint64), paths=[row[0] for row in rows])
    found = PredictedSamples([row[2] for row in rows], classes, values, values)
    write_table(folder / "predictions.csv", dataset, [row[1] for row in rows], found)
    return folder / "predictions.csv"


@given(st.lists(names, min_size=1, max_size=8, unique=True), st.data())
def test_predictions_come_back_whatever_classes_and_files_are_called(
    tmp_path_factory: pytest.TempPathFactory, classes: list[str], data: st.DataObject
) -> None:
    labels = st.sampled_from([*classes, ""])
    rows = data.draw(st.lists(st.tuples(names, labels, st.sampled_from(classes)), min_size=1, max_size=4))
    table = write(tmp_path_factory.getbasetemp(), classes, rows)
    table.read_text("utf-8")
    read = read_predictions(table)
    assert read.classes == tuple(classes)
    assert [*zip(read.paths, read.labels, read.predictions, strict=True)] == rows
    again = read_table(table)
    assert again.is_own
    assert [*zip(*map(again.column, PREDICTION_COLUMNS[1:]), strict=True)] == rows
    for at, name in enumerate(classes):
        assert [float(cell) for cell in again.column(to_heading(name))] == read.probabilities[:, at].tolist()


@given(st.lists(names, min_size=2, max_size=8, unique=True), st.data())
def test_several_classes_of_a_sample_come_back_whatever_they_are_called(
    tmp_path_factory: pytest.TempPathFactory, classes: list[str], data: st.DataObject
) -> None:
    marks = data.draw(st.lists(st.lists(st.booleans(), min_size=len(classes), max_size=len(classes)), min_size=1))
    texts = [Multilabel(len(classes)).describe(np.array(row, np.float64), classes) for row in marks]
    values = np.full((len(marks), len(classes)), 0.75, np.float32)  # they do not add up to 1
    dataset: Any = SimpleNamespace(numbers=np.arange(len(marks), dtype=np.uint64), paths=[*map(str, range(len(marks)))])
    table = tmp_path_factory.getbasetemp() / "several.csv"
    write_table(table, dataset, texts, PredictedSamples(texts, classes, values, values))
    assert read_predictions(table).label_numbers().tolist() == marks
    read = read_table(table)
    assert [part_names(cell) for cell in read.column("label")] == [
        [name for name, mark in zip(classes, row, strict=True) if mark] for row in marks
    ]
    if any(map(any, marks)):
        columns = {"prediction": read.column("prediction")}
        found, _ = column_labels(columns, "here", separator=SEPARATOR, is_own=read.is_own)
        assert [[name in row for name in classes] for row in found] == marks


@given(st.lists(st.tuples(names, names, names), min_size=1, max_size=4))
def test_a_list_of_suspects_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]]) -> None:
    table = tmp_path_factory.getbasetemp() / "suspects.csv"
    columns = ("path", "label", "predicted")
    table.write_bytes(suspects_table((1, *row, 0.5) for row in rows))
    read = read_table(table)
    assert [*zip(*map(read.column, columns), strict=True)] == rows


@given(st.lists(names, max_size=20, unique=True))
def test_classes_have_headings_of_their_own(classes: list[str]) -> None:
    headings = [*PREDICTION_COLUMNS, *map(to_heading, classes)]
    assert len(set(headings)) == len(headings)
    assert [*map(from_heading, headings[4:])] == classes


def test_ordinary_names_are_written_as_they_are(tmp_path: Path) -> None:
    table = write(tmp_path, ["ant", "bee", "1"], [("a/1.jpg", "ant", "bee")])
    assert table.read_bytes().startswith(b"sample,path,label,prediction,ant,bee,1\n0,a/1.jpg,ant,bee,")
    assert b"\r" not in table.read_bytes()


@pytest.mark.slow
def test_relabel_takes_predictions_of_classes_that_are_called_as_its_columns(tmp_path: Path) -> None:
    classes = ["class:path", "label", "path", "prediction", "sample"]
    for name in classes:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (number * 90, 9, 9)).save(tmp_path / "photos" / name / f"={number}\r,\n.png")
    cache = tmp_path / "cache"
    build_cache(tmp_path / "photos", cache, Recipe(size=8), jobs=1)
    opened = Cache.open(cache)
    assert opened.manifest.classes == tuple(classes)
    paths, own = list(opened.samples.paths), np.eye(len(classes))[np.asarray(opened.samples.labels)]
    table = write(tmp_path, classes, [(path, "path", "label") for path in paths])
    expected = read_predictions(table).probabilities
    relabel_cache(cache, table, soft=SoftOptions(soft_labels=True))
    shares = SoftOptions().soft_share
    found = np.asarray(Cache.open(cache).samples["soft_label"])
    np.testing.assert_allclose(found, shares * expected + (1 - shares) * own, rtol=1e-5)
    relabel_cache(cache, table, TableOptions(label_cols=("prediction",)), corrections=True)
    assert set(np.asarray(Cache.open(cache).samples.labels).tolist()) == {classes.index("label")}


def test_columns_called_as_those_that_warmup_computes_are_kept_under_names_of_their_own(tmp_path: Path) -> None:
    taken = [*IMAGE_COLUMNS, "soft_label", "soft_weight", "number", "source_bytes", "fold", "Image_Width", "a b", "a_b"]
    text = io.StringIO(newline="")
    rows = [[f"{number}.png", *(f"{name} {number}" for name in taken)] for number in range(3)]
    csv.writer(text).writerows([["path", *taken], *rows])
    (tmp_path / "table.csv").write_text(text.getvalue(), newline="")
    for number in range(3):
        Image.new("RGB", (8 + number, 9)).save(tmp_path / f"{number}.png")
    build_cache(tmp_path / "table.csv", tmp_path / "cache", Recipe(size=8), jobs=1)
    table = Cache.open(tmp_path / "cache").samples
    assert np.asarray(table["image_width"]).tolist() == [8, 9, 10]
    kept = {name: list(table[name]) for name in table if not isinstance(table[name], np.ndarray) and name != "path"}
    for name in taken:
        own = next(each for each, cells in kept.items() if cells == [f"{name} {number}" for number in range(3)])
        assert own.rstrip("_") in (name, "a_b")


SEVERAL = ["a;b", "a", "b", " a", "name:a", "=1", "caf\udce9", "\u2028x"]


class Several:
    """A sample of each class of `SEVERAL`."""

    classes = SEVERAL

    def __len__(self) -> int:
        return len(SEVERAL)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": np.zeros((2, 2, 3), np.uint8), "label": np.eye(len(SEVERAL), dtype=np.float32)[number]}


@pytest.mark.slow
def test_relabel_corrects_several_classes_of_a_sample_whatever_they_are_called(tmp_path: Path) -> None:
    classes = SEVERAL
    cache = tmp_path / "cache"
    build_cache(Several(), cache, Recipe(size=2), jobs=1, labels="multilabel")
    wanted = np.roll(np.eye(len(classes)), 1, axis=0) + np.roll(np.eye(len(classes)), 3, axis=0)
    paths = list(Cache.open(cache).samples.paths)
    rows = [
        [to_cell(path), to_cell(join_names(name for name, mark in zip(classes, row, strict=True) if mark))]
        for path, row in zip(paths, wanted, strict=True)
    ]
    (tmp_path / "labels.csv").write_bytes(to_csv([["path", "label"], *rows]))
    relabel_cache(cache, tmp_path / "labels.csv")
    assert np.asarray(Cache.open(cache).samples.labels).tolist() == wanted.tolist()
    assert Cache.open(cache).manifest.classes == tuple(classes)
