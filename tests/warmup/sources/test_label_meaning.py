"""What labels mean: one table of raw values, kinds and options, whatever source has them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import build_here, png, tar_of
from PIL import Image

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.warmup import relabel_cache
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources import TableOptions, TableSource, label_source, open_source, select_source
from tpucache.warmup.sources.labels import read_labels
from tpucache.warmup.sources.source import Item, Listing, Sample

NAN = float("nan")


class Stated:
    """A source whose listing states these labels; with `in_samples`, only the samples do."""

    def __init__(self, values: list[Any], in_samples: bool = False, **facts: Any) -> None:
        self.values, self.in_samples, self.facts = values, in_samples, facts

    def list(self) -> Listing:
        labels = [None if self.in_samples else value for value in self.values]
        return Listing([Sample(at, str(at), label) for at, label in enumerate(labels)], **self.facts)

    def load(self, sample: Sample) -> Item:
        return Item({"tokens": np.arange(3)}, self.values[sample.number] if self.in_samples else None)


def meaning(source: Stated, kind: LabelKind = "auto", **options: Any) -> tuple[tuple[str, ...], list[Any]]:
    labelled = label_source(source, kind, **options)
    listing = labelled.list()
    found: list[Any] = []
    for sample in listing.samples:
        try:
            label = labelled.load(sample).label if source.in_samples else sample.label
        except SampleError:
            label = None
        found.append([*label] if isinstance(label, tuple) else label)
    return listing.classes, found


#: Raw labels and options, and the classes and labels that they are.
MEANINGS: dict[str, tuple[list[Any], dict[str, Any], tuple[str, ...], list[Any]]] = {
    "text of numbers": (["10", "9", "+9"], {}, ("9", "10"), [1, 0, 0]),
    "names of digits": (["007", "7", "10"], {}, ("007", "10", "7"), [0, 2, 1]),
    "a name among numbers": (["1", "2", "dog"], {}, ("1", "2", "dog"), [0, 1, 2]),
    "text of values": (["0.5", "1.5", "2"], {}, (), [[0.5], [1.5], [2.0]]),
    "text of values from -1": (["-1", "0", "0.5"], {}, (), [[-1.0], [0.0], [0.5]]),
    "values that are not finite": (["0.5", "inf", "1e999"], {}, (), [[0.5], None, None]),
    "a text that is no number of values": (["0.5", "nan"], {"kind": "numbers"}, (), [[0.5], None]),
    "classes that are not finite": (["3", "inf", "2"], {}, ("2", "3"), [1, None, 0]),
    "digits of another script": (["\u0663", "1", "2"], {}, ("1", "2", "\u0663"), [2, 0, 1]),
    "a word among whole numbers": (["1", "NA", "2"], {}, ("1", "2"), [0, None, 1]),
    "a word among names": (["NA", "dog"], {}, ("NA", "dog"), [0, 1]),
    "-1 beside 0": (["0", "-1", "1"], {}, ("0", "1"), [0, None, 1]),
    "-1 without 0": (["-1", "1", "-1"], {}, ("-1", "1"), [0, 1, 0]),
    "a scale": (["-2", "-1", "0"], {}, ("-2", "-1", "0"), [0, 1, 2]),
    "-1 where another value is stated": (["0", "-1", "1"], {"missing": ["9"]}, ("-1", "0", "1"), [1, 0, 2]),
    "-1 as a given class": (["-1", "0"], {"classes": ["-1", "0"]}, ("-1", "0"), [0, 1]),
    "a stated value in another spelling": (["0", "1", "-1"], {"missing": ["-1.0"]}, ("0", "1"), [0, 1, None]),
    "a stated name": (["10", "unknown", "9"], {"missing": ["unknown"]}, ("9", "10"), [1, None, 0]),
    "whole numbers as numbers": ([1, 0, 2], {"kind": "numbers"}, (), [[1.0], [0.0], [2.0]]),
    "whole numbers with -1": ([0, -1, 1], {}, (), [0, None, 1]),
    "a stated number": ([0, 255, 1], {"missing": [255]}, (), [0, None, 1]),
    "truth values": ([True, False], {}, ("False", "True"), [1, 0]),
    "whole floats": ([0.0, 1.0, 3.0], {}, ("0", "1", "3"), [0, 1, 2]),
    "floats": ([0.5, NAN, 2.0], {}, (), [[0.5], None, [2.0]]),
    "large values": ([1.7e9 + 0.5, 1.7e9 + 1.5], {}, (), [[1.7e9 + 0.5], [1.7e9 + 1.5]]),
    "numbers of stated classes": ([1, 0, 5, "b"], {"of": {"classes": ("a", "b")}}, ("a", "b"), [1, 0, None, 1]),
    "a stated class of none": (
        [0, 1, 2],
        {"missing": ["x"], "of": {"classes": ("b", "x", "a")}},
        ("b", "a"),
        [0, None, 1],
    ),
    "a stated class -1": ([1, 0], {"of": {"classes": ("-1", "0")}}, ("0",), [0, None]),
    "stated names as values": (
        [0, 1, 0],
        {"kind": "numbers", "of": {"classes": ("10", "9")}},
        (),
        [[10.0], [9.0], [10.0]],
    ),
    "the order that is given": (["a", "b", "c"], {"classes": ["c", "a"]}, ("c", "a"), [1, None, 0]),
    "a number beyond given classes": ([5, 1], {"classes": ["a", "b"]}, ("a", "b"), [None, 1]),
    "lists of names": ([["b", "a"], ["a", " "], []], {}, ("a", "b"), [[1, 1], [1, 0], [0, 0]]),
    "lists of names that are numbers": ([["1", "10"], ["2"]], {}, ("1", "2", "10"), [[1, 0, 1], [0, 1, 0]]),
    "a stated name in lists": ([["a"], ["none"], ["b"]], {"missing": ["none"]}, ("a", "b"), [[1, 0], None, [0, 1]]),
    "lists of one name as classes": ([["a"], ["b"], ["a", "b"]], {"kind": "classes"}, ("a", "b"), [0, 1, None]),
    "lists of stated classes": (
        [[0, -1, 2], [], [1]],
        {"of": {"classes": ("a", "b", "c"), "has_class_lists": True}},
        ("a", "b", "c"),
        [[1, 0, 1], [0, 0, 0], [0, 1, 0]],
    ),
    "lists of class numbers": (
        [[0, 2], [1], []],
        {"kind": "multilabel"},
        ("0", "1", "2"),
        [[1, 0, 1], [0, 1, 0], [0, 0, 0]],
    ),
    "a name as one of several": (["a", "b"], {"kind": "multilabel"}, ("a", "b"), [[1, 0], [0, 1]]),
    "numbers as one of several": ([0, -1, 2], {"kind": "multilabel"}, ("0", "1", "2"), [[1, 0, 0], None, [0, 0, 1]]),
    "a list of one beside longer ones": (["a", ["a", "b"]], {"kind": "multilabel"}, ("a", "b"), [[1, 0], [1, 1]]),
    "marks of columns": ([[0, 1], [1, 1]], {"of": {"value_names": ("x", "y")}}, ("x", "y"), [[0, 1], [1, 1]]),
    "flags of columns": ([[-1, 1], [1, 1]], {"of": {"value_names": ("x", "y")}}, ("x", "y"), [[0, 1], [1, 1]]),
    "flags of -1 and 1": ([[-1, 1], [1, 1]], {"kind": "multilabel"}, ("0", "1"), [[0, 1], [1, 1]]),
    "vectors of -1 and 1": ([[-1.0, 1.0], [1.0, 1.0]], {}, (), [[-1, 1], [1, 1]]),
    "values of columns": ([[0, 1], [1, 9]], {"of": {"value_names": ("x", "y")}}, (), [[0, 1], [1, 9]]),
    "marks of columns with a fault": (
        [[0, 1], [1, 9]],
        {"kind": "multilabel", "of": {"value_names": ("x", "y")}},
        ("x", "y"),
        [[0, 1], None],
    ),
    "a stated value of columns": (
        [[0, 1], [1, 9]],
        {"missing": ["9"], "of": {"value_names": ("x", "y")}},
        ("x", "y"),
        [[0, 1], None],
    ),
    "one-hot marks as classes": ([[1, 0, 0], [0, 0, 1]], {"kind": "classes"}, (), [0, 2]),
    "vectors": ([[0.5, 2.0], [1.5, NAN]], {"kind": "numbers"}, (), [[0.5, 2.0], [1.5, NAN]]),
    "a vector of another length": ([[0.5], [0.5, 1.5], [1.0, 1.5]], {}, (), [None, [0.5, 1.5], [1.0, 1.5]]),
    "a text among numbers": ([1, 0, 1, "dog"], {}, (), [1, 0, 1, None]),
    "a number among names": (["a", "b", 3, "b"], {}, ("a", "b"), [0, 1, None, 1]),
    "all as names": ([1, 0, "dog"], {"kind": "classes"}, ("0", "1", "dog"), [1, 0, 2]),
    "no label and no text": ([None, {"a": 1}, "x", "", [10**400]], {}, ("x",), [None, None, 0, None, None]),
}
#: What labels in samples mean otherwise, because only some of them are looked at, or an item's label is a number.
IN_SAMPLES: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "truth values": ((), [1, 0]),
    "whole floats": ((), [[0.0], [1.0], [3.0]]),
    "a stated class -1": (("-1", "0"), [1, 0]),
}


@pytest.mark.parametrize("in_samples", [False, True], ids=["listed", "in samples"])
@pytest.mark.parametrize("name", MEANINGS)
def test_labels_mean_the_same_in_a_listing_and_in_samples(name: str, in_samples: bool) -> None:
    values, given, *expected = MEANINGS[name]
    options = {**given}
    source = Stated(values, in_samples, **options.pop("of", {}))
    if in_samples:
        expected = [*IN_SAMPLES.get(name, expected)]
    np.testing.assert_equal([*meaning(source, **options)], expected)


@pytest.mark.parametrize("in_samples", [False, True], ids=["listed", "in samples"])
@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ([[], []], "auto", "empty lists: give the labels"),
        ([[], []], "multilabel", "empty lists: give the labels"),
        ([[0, 2], [1], [0, 1, 2]], "auto", "--labels multilabel"),
        (["a", ["a", "b"], "b"], "auto", "--labels multilabel"),
        ([("a", "b"), 3], "auto", "such as 3: give a list of texts for each sample"),
        ([["a", "b"], ["b", "a"]], "classes", "a class is one name: give --labels multilabel"),
        ([["1", "2"], ["1"]], "numbers", "lists of texts, which are classes: leave out --labels numbers"),
    ],
    ids=str,
)
def test_labels_that_may_be_meant_otherwise_are_refused_with_the_option(
    values: list[Any], kind: LabelKind, text: str, in_samples: bool
) -> None:
    with pytest.raises(SourceError, match=text):
        meaning(Stated(values, in_samples), kind)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda source: label_source(source, "auto", missing="NA"), r"such as \['NA'\]"),
        (lambda source: label_source(source, "other"), "labels must be one of"),
        (lambda source: label_source(source, "numbers", ["a"]), "have no classes"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(call: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        call(Stated(["a"]))
    with pytest.raises(SourceError, match="labels are numbers, none of the classes 'a'"):
        meaning(Stated([[0.5, 1.5]]), classes=["a"])


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        (["cat", "NA"], "auto", "'NA' is a class: if it means that there is no label, give --missing-label"),
        (["1", "NA"], "auto", "'NA' among numbers means no label"),
        ([["Cat"], ["cat", "NA"]], "auto", "'Cat' and 'cat' are different classes"),
        (["cat", "cat "], "auto", "are different classes: write them alike"),
        (["caf\u00e9", "cafe\u0301"], "auto", "are different classes: write them alike"),
        (["1", "2", "x"], "auto", "'x' is not a number, so all labels are names of classes"),
        (["a|b", "b", "a"], "auto", "'a|b' is a class of its own, besides those of its parts: --label-sep '|'"),
        (["7 1", "1", "7"], "auto", "'7 1' is a class of its own"),
        (["['a', 'b']", "[]"], "auto", "is one class: write names with a separator"),
        (["0,5", "1,25", "3"], "auto", "'0,5' is the name of a class: write a point where it is a number"),
        (["ant", "bee"], "multilabel", "each sample has one name, such as 'ant'"),
        ([[1, 0, 0], [0, 0, 1]], "auto", "give --labels classes where one class is meant"),
        ([0, 1, -1], "auto", "1 samples have the label -1 or NaN, which means no label"),
        (["1", "1.0", "red apple", "pear", "apple"], "auto", None),
        (["0.5", "1.25", "3"], "auto", None),
        ([[1, 0, 0], [0, 0, 1]], "classes", None),
    ],
    ids=str,
)
def test_what_may_be_meant_otherwise_is_told_of(
    values: list[Any], kind: LabelKind, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tpucache"):
        meaning(Stated(values), kind)
    assert text in caplog.text if text else not caplog.records


def test_a_limit_decides_with_all_labels_and_patterns_leave_their_classes_out() -> None:
    source = Stated(["10", "9", "x", "9"])
    limited = label_source(select_source(source, limit=1), "auto").list()
    assert (len(limited.samples), limited.classes) == (1, ("10", "9", "x"))
    chosen = label_source(select_source(source, exclude=["2"]), "auto").list()
    assert (chosen.classes, [sample.label for sample in chosen.samples]) == (("9", "10"), [1, 0, 0])


def test_a_label_beyond_those_looked_at_is_refused_and_never_left_out(tmp_path: Path) -> None:
    labels: list[Any] = [None] * 200
    labels[1] = 3  # between two that are looked at
    with pytest.raises(SourceError, match="say with --labels"):
        build_here(Stated(labels, in_samples=True), tmp_path / "cache", Recipe(), on_error="skip")
    numbers = [0, 1, 2] * 50
    numbers[76] = 7
    assert meaning(Stated(numbers, in_samples=True), "multilabel")[0] == tuple("01234567")


def test_a_class_that_is_called_otherwise_is_another_class_and_a_new_one_may_be_added(tmp_path: Path) -> None:
    def table(*cells: str) -> TableSource:
        for number in range(len(cells)):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
        rows = "".join(f"{number}.png,{cell}\n" for number, cell in enumerate(cells))
        (tmp_path / "table.csv").write_text(f"path,label\n{rows}")
        return TableSource(tmp_path / "table.csv", TableOptions(label_cols=("label",), label_sep="|"))

    build_here(table("a|b", "b"), tmp_path / "cache")
    with pytest.raises(SourceError, match="2 samples have another label"):
        build_here(table("a|c", "c"), tmp_path / "cache")
    assert build_here(table("a|b", "b", "0|b"), tmp_path / "cache").classes == ("0", "a", "b")
    assert Cache.open(tmp_path / "cache").samples.labels.tolist() == [[0, 1, 1], [0, 0, 1], [1, 0, 1]]
    options = TableOptions(label_cols=("label",), label_sep="|")
    with pytest.raises(SourceError, match="leave out --labels numbers"):
        build_here(select_source(table("a"), limit=2), tmp_path / "numbers", labels="numbers")
    build_here(Stated([(0, 1), (0, 0)]), tmp_path / "marks")
    with pytest.raises(SourceError, match="another label"):
        build_here(Stated([(0, 1), None]), tmp_path / "marks")
    values = Stated([(0.5, NAN)] * 2)
    assert build_here(values, tmp_path / "values") == build_here(values, tmp_path / "values")
    table("a|b", "c|a", "b")
    relabel_cache(tmp_path / "cache", tmp_path / "table.csv", options)
    assert Cache.open(tmp_path / "cache").manifest.classes == ("a", "b", "c")
    build_here(Stated([["a", "b"]] * 2, in_samples=True), tmp_path / "items", Recipe())
    with pytest.raises(SourceError, match="the source now has"):
        build_here(Stated([["a", "c"]] * 2, in_samples=True), tmp_path / "items", Recipe())


def test_a_column_of_classes_is_the_label_of_an_object_as_of_parquet(tmp_path: Path) -> None:
    hub = pytest.importorskip("datasets")
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(3)]
    kind = hub.ClassLabel(names=["ant", "bee"])
    rows = hub.Dataset.from_dict(
        {"img": images, "fine": [1, 0, 1]}, features=hub.Features({"img": hub.Image(), "fine": kind})
    )
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    rows.save_to_disk(str(tmp_path / "saved"))
    for name, source in (("object", rows), ("parquet", tmp_path / "rows.parquet"), ("folder", tmp_path / "saved")):
        manifest = build_here(source, tmp_path / name)
        assert (manifest.classes, manifest.statistics.class_counts) == (("ant", "bee"), (1, 2))
    several = rows.add_column("coarse", [0, 0, 1]).cast_column("coarse", kind)
    with pytest.raises(SourceError, match="several columns of classes, fine, coarse"):
        build_here(several, tmp_path / "several")


def write_tar(path: Path, rows: list[dict[str, Any]]) -> None:
    labels = {f"{number}.json": json.dumps(row).encode() for number, row in enumerate(rows)}
    path.write_bytes(tar_of({f"{number}.png": png() for number in range(len(rows))} | labels))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parquet.write_table(pyarrow.table({"image": [png()] * len(rows), **columns}), path)


def test_another_column_that_may_be_the_label_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"label": number, "class": kind} for number, kind in enumerate(["dog", "cat"])]
    write_tar(tmp_path / "rows.tar", rows)
    write_parquet(tmp_path / "rows.parquet", rows)
    for name in ("rows.parquet", "rows.tar"):
        caplog.clear()
        assert [sample.label for sample in open_source(tmp_path / name).list().samples] == [0, 1]
        assert "using the labels in 'label', not in 'class': --label-col names what to use" in caplog.text
        caplog.clear()
        chosen = open_source(tmp_path / name, TableOptions(label_cols=("class",))).list()
        assert [sample.label for sample in chosen.samples] == ["dog", "cat"]
        assert "using the labels" not in caplog.text


def test_a_column_that_may_be_the_label_is_named_as_the_source_spells_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "rows.parquet", [{" label": "cat"}, {" label": "dog"}])
    build_here(tmp_path / "rows.parquet", tmp_path / "cache")
    assert "the samples have no labels, and ' label' may be labels" in caplog.text


def test_a_named_column_without_any_label_is_refused_in_all_sources(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", [{"kind": None}, {"kind": ""}])
    write_tar(tmp_path / "rows.tar", [{"kind": None}])
    (tmp_path / "rows.csv").write_text("path,kind\n0.png,\n")
    for name in ("rows.parquet", "rows.tar", "rows.csv"):
        with pytest.raises(SourceError, match=r"has no label in any row of .*'kind'"):
            open_source(tmp_path / name, TableOptions(label_cols=("kind",))).list()


def test_each_label_is_a_fault_with_its_reason() -> None:
    listing = read_labels(Stated([0, 1, 1, "cat", [1.0, 2.0], 7]).list(), classes=(), where="here")
    assert [bool(sample.fault) for sample in listing.samples] == [False, False, False, True, True, False]
    assert "'cat', and most labels are numbers: give --labels classes" in listing.samples[3].fault
    assert "a class is one whole number or name" in listing.samples[4].fault
