"""suspects: ranked by the probability of their labels, from tables that are not trusted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tpucache.errors import UsageError
from tpucache.insight import read_predictions, suspects
from tpucache.text import from_cell, to_cell


def test_the_least_probable_labels_come_first_and_unlabelled_samples_not_at_all() -> None:
    probabilities = np.array([[0.9, 0.1], [0.3, 0.7], [0.2, 0.8], [0.5, 0.5], [0.3, 0.7]])
    found = suspects(probabilities, np.array([0, 0, -1, 1, 0]))
    assert found.positions.tolist() == [1, 4, 3, 0]
    assert found.scores.tolist() == pytest.approx([0.7, 0.7, 0.5, 0.1])
    assert found.classes.tolist() == [1, 1, 0, 0]


def test_of_several_classes_the_least_probable_mark_counts() -> None:
    probabilities = np.array([[0.9, 0.2, 0.6], [0.1, 0.95, 0.5]])
    found = suspects(probabilities, np.array([[1, 0, 0], [0, 0, 1]]))
    assert found.positions.tolist() == [1, 0]
    assert found.scores.tolist() == pytest.approx([0.95, 0.6])
    assert found.classes.tolist() == [1, 2]


def test_no_samples_have_no_suspects() -> None:
    assert len(suspects(np.empty((0, 3)), np.empty(0, np.int64))) == 0
    assert len(suspects(np.full((2, 2), 0.5), np.array([-1, -1]))) == 0


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (np.zeros(3), np.zeros(3, int), "give a probability for each sample and class"),
        (np.zeros((3, 2)), np.zeros(2, int), "a label for each sample"),
        (np.full((1, 2), np.nan), np.zeros(1, int), "are not probabilities"),
        (np.full((1, 2), 1.5), np.zeros(1, int), "are not probabilities"),
        (np.zeros((1, 2)), np.array([2]), "class numbers, -1"),
        (np.zeros((1, 2)), np.array([0.5]), "class numbers, -1"),
        (np.zeros((1, 2)), np.array([[1, 0, 0]]), "0 or 1 for each of 2 classes"),
    ],
)
def test_what_does_not_fit_is_refused(predictions: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        suspects(predictions, labels)


TABLE = """sample,path,label,prediction,ant,'=bee
0,a/1.png,ant,'=bee,0.25,0.75
3,'@b,'=bee,'=bee,0.1,0.9
7,c,,ant,0.6,0.4
"""


def test_a_table_is_read_with_its_cells_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "out_of_fold.csv").write_text(TABLE)
    for place in (tmp_path, tmp_path / "out_of_fold.csv"):
        found = read_predictions(place)
        assert found.numbers.tolist() == [0, 3, 7]
        assert list(found.paths) == ["a/1.png", "@b", "c"]
        assert found.classes == ("ant", "=bee")
        assert found.label_numbers().tolist() == [0, 1, -1]
        assert found.probabilities.tolist() == [[0.25, 0.75], [0.1, 0.9], [0.6, 0.4]]


def test_labels_of_several_classes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("sample,path,label,prediction,a,b,c;d\n0,x,a;b,a,0.9,0.8,0\n1,y,,,0,0,0\n2,z,c;d,,0,0,0.5\n")
    assert read_predictions(path).label_numbers().tolist() == [[True, True, False], [False] * 3, [False, False, True]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no table of predictions"),
        ("id,label\n1,2\n", "the first columns of such a table are sample, path, label, prediction"),
        ("sample,path,label,prediction,a\n0,x,a\n", "row 2 needs 5 cells, as many as the heading has"),
        ("sample,path,label,prediction,a\n0,x,a,a,much\n", "something other than numbers"),
        ("sample,path,label,prediction,a\n-1,x,a,a,1\n", "something other than numbers"),
        ("sample,path,label,prediction,a\n99999999999999999999,x,a,a,1\n", "something other than numbers"),
        ("sample,path,label,prediction,a,a\n0,x,a,a,1,0\n", "a sample twice, or a class"),
        ("sample,path,label,prediction,a\n0,x,a,a,1\n0,x,a,a,1\n", "a sample twice, or a class"),
        ('sample,path,label,prediction,a\n0,"x,a,a,1\n', "cannot be read as a table"),
        ("sample,path,label,prediction,a\n0,\xff,a,a,1\n", "cannot be read as a table"),
    ],
)
def test_what_is_no_table_of_predictions_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message):
        read_predictions(path)


def test_a_run_without_a_table_and_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a run that `train --folds` has finished"):
        read_predictions(tmp_path)
    for value, message in (
        (3, "only among labels that are classes"),
        (1, "the label '3.5', which is none of its 1"),
    ):
        (tmp_path / "table.csv").write_text(f"sample,path,label,prediction,value\n0,x,3.5,3,{value}\n")
        with pytest.raises(UsageError, match=message):
            read_predictions(tmp_path / "table.csv").label_numbers()


@pytest.mark.parametrize(
    ("mark", "texts"),
    [
        ("'", ["=1+1", "+a", "-a", "@SUM(1)", "\ta", "\r-1", "'=a"]),
        ("", ["-1.5e3", "+7", "-inf", "a=1", "'quoted'", ""]),
    ],
)
def test_a_cell_is_no_formula_and_gives_its_text_again(mark: str, texts: list[str]) -> None:
    for text in texts:
        assert to_cell(text) == mark + text
        assert from_cell(mark + text) == text
