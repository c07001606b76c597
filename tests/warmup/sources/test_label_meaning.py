"""One data set, one meaning: the same labels from a .csv, parquet, Hugging Face's objects and datasets in Python."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.warmup import build_cache, relabel_cache
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources import TableOptions, TableSource, label_source, open_source, select_source
from tpucache.warmup.sources.labels import find_reading

hub = pytest.importorskip("datasets")
SMALL = Recipe(size=8)


def test_a_label_that_is_no_list_of_texts_is_named() -> None:
    with pytest.raises(SourceError, match="such as 3: give a list of texts for each sample"):
        find_reading([("a", "b"), 3], "auto", where="here")


class Plain:
    """Images with labels, as a dataset in Python has them."""

    def __init__(self, labels: list[Any]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": np.full((8, 8, 3), number, np.uint8), "label": self.labels[number]}


def _read(source: Any, cache: Path, **options: Any) -> tuple[tuple[str, ...], Any, list[str]]:
    """Return the classes, the labels and the skipped samples of a cache."""
    manifest = build_cache(source, cache, SMALL, jobs=1, **options)
    labels = Cache.open(cache).samples.labels
    return manifest.classes, None if labels is None else labels.tolist(), [skip.path for skip in manifest.skipped]


def _table(folder: Path, cells: list[str]) -> TableSource:
    for number in range(len(cells)):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
    rows = "".join(f'{number}.png,"{cell}"\n' for number, cell in enumerate(cells))
    (folder / "table.csv").write_text(f"path,label\n{rows}")
    return TableSource(folder / "table.csv", TableOptions(label_cols=("label",)))


_NAMES = ["ant", "bee"]
_FORMS: dict[str, tuple[list[Any], Any, tuple[str, ...], Any]] = {
    "classes": ([0, 1, 1, 0], hub.ClassLabel(names=_NAMES), ("ant", "bee"), [0, 1, 1, 0]),
    "lists of classes": (
        [[0], [0, 1], [], [1]],
        hub.Sequence(hub.ClassLabel(names=_NAMES)),
        ("ant", "bee"),
        [[1, 0], [1, 1], [0, 0], [0, 1]],
    ),
    "texts": (["bee", "ant", "bee", "cat"], hub.Value("string"), ("ant", "bee", "cat"), [1, 0, 1, 2]),
    "lists of texts": (
        [["a"], ["b", "a"], [], ["b"]],
        hub.Sequence(hub.Value("string")),
        ("a", "b"),
        [[1, 0], [1, 1], [0, 0], [0, 1]],
    ),
    "texts of numbers": (["10", "9", "10", "9"], hub.Value("string"), ("9", "10"), [1, 0, 1, 0]),
    "whole floats": ([0.0, 1.0, 1.0, 0.0], hub.Value("float32"), ("0", "1"), [0, 1, 1, 0]),
    "floats": ([0.5, 1.0, 2.0, 3.0], hub.Value("float64"), (), [[0.5], [1.0], [2.0], [3.0]]),
    "truth values": ([True, False, True, True], hub.Value("bool"), ("False", "True"), [1, 0, 1, 1]),
    "whole numbers": ([0, 2, 1, 1], hub.Value("int64"), ("0", "1", "2"), [0, 2, 1, 1]),
    "marks": ([[0, 1], [1, 1], [0, 0], [1, 0]], hub.Sequence(hub.Value("int64")), ("0", "1"), None),
}


@pytest.mark.parametrize("form", _FORMS)
def test_a_data_set_of_hugging_face_means_the_same_as_an_object_and_as_parquet(form: str, tmp_path: Path) -> None:
    values, feature, classes, labels = _FORMS[form]
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(4)]
    features = hub.Features({"image": hub.Image(), "label": feature})
    rows = hub.Dataset.from_dict({"image": images, "label": values}, features=features)
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    expected = (classes, values if labels is None else labels, [])
    assert _read(rows, tmp_path / "object") == expected
    assert _read(tmp_path / "rows.parquet", tmp_path / "parquet") == expected
    rows.save_to_disk(str(tmp_path / "saved"))
    assert _read(tmp_path / "saved", tmp_path / "of-saved") == expected


@pytest.mark.parametrize(
    "form", ["texts", "texts of numbers", "whole floats", "floats", "truth values", "whole numbers"]
)
def test_a_table_and_a_dataset_in_python_mean_the_same(form: str, tmp_path: Path) -> None:
    values, _, classes, labels = _FORMS[form]
    assert _read(_table(tmp_path, [str(value) for value in values]), tmp_path / "table") == (classes, labels, [])
    if form != "truth values":  # of which an item's label is the number
        assert _read(Plain(values), tmp_path / "python") == (classes, labels, [])


@pytest.mark.parametrize("first", [None, -1, float("nan")])
def test_a_first_sample_without_a_label_does_not_decide_for_the_others(first: Any, tmp_path: Path) -> None:
    labels = [first, *[0, 1] * 6]
    with pytest.raises(SampleError, match="'0'"):
        build_cache(Plain(labels), tmp_path / "fail", SMALL, jobs=1)
    assert _read(Plain(labels), tmp_path / "skip", on_error="skip") == (("0", "1"), [0, 1] * 6, ["0"])


def test_a_first_list_of_another_length_does_not_decide_for_the_others(tmp_path: Path) -> None:
    labels = [[0.5], *[[0.5, 1.5]] * 5]
    assert _read(Plain(labels), tmp_path / "skip", on_error="skip") == ((), [[0.5, 1.5]] * 5, ["0"])


def test_a_label_beyond_those_looked_at_is_refused_and_never_left_out(tmp_path: Path) -> None:
    labels: list[Any] = [None] * 200
    labels[1] = 3  # between two that are looked at
    with pytest.raises(SourceError, match="say with --labels"):
        build_cache(Plain(labels), tmp_path / "cache", SMALL, jobs=1, on_error="skip")


def test_missing_labels_are_those_that_are_stated(tmp_path: Path) -> None:
    table = _table(tmp_path, ["10", "unknown", "9", "10"])
    stated = {"missing_label": ["unknown"], "on_error": "skip"}
    assert _read(table, tmp_path / "table", **stated) == (("9", "10"), [1, 0, 1], ["1.png"])
    assert _read(Plain([0, 255, 1]), tmp_path / "python", missing_label=["255"], on_error="skip")[1:] == ([0, 1], ["1"])
    assert _read(Plain([0, 255, 1]), tmp_path / "number", missing_label=[255], on_error="skip")[2] == ["1"]
    with pytest.raises(UsageError, match="such as \\['NA'\\]"):
        build_cache(table, tmp_path / "text", SMALL, missing_label="NA")


def test_a_word_that_may_mean_no_label_is_a_class_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tpucache"):
        assert label_source(_table(tmp_path, ["cat", "NA"]), "auto").list().classes == ("NA", "cat")
    assert "'NA' is a class: if it means that there is no label, give --missing-label" in caplog.text


@pytest.mark.parametrize("form", ["table", "parquet", "object", "classes", "python", "folder"])
def test_one_name_for_each_sample_is_the_only_one_of_several_classes_with_a_warning(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["ant", "bee", "bee", "ant"]
    kind = hub.ClassLabel(names=_NAMES) if form == "classes" else hub.Value("string")
    source: Any = Plain(names)
    if form == "table":
        source = _table(tmp_path, names)
    elif form == "folder":
        source = tmp_path / "photos"
        for number, name in enumerate(sorted(names)):
            (source / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(source / name / f"{number}.png")
    elif form != "python":
        images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(4)]
        features = hub.Features({"image": hub.Image(), "label": kind})
        source = hub.Dataset.from_dict({"image": images, "label": names}, features=features)
        if form == "parquet":
            source.to_parquet(str(tmp_path / "rows.parquet"))
            source = tmp_path / "rows.parquet"
    with caplog.at_level(logging.WARNING, "tpucache"):
        classes, found, skipped = _read(source, tmp_path / "cache", labels="multilabel")
    assert (classes, sorted(found), skipped) == (("ant", "bee"), [[0, 1], [0, 1], [1, 0], [1, 0]], [])
    assert "each sample has one name, such as 'ant'" in caplog.text


def test_one_class_number_for_each_sample_is_the_only_one_of_several_classes(tmp_path: Path) -> None:
    numbers = [0, 1, 2] * 50
    numbers[75] = 7  # between two that are looked at
    classes, found, _ = _read(Plain(numbers), tmp_path / "cache", labels="multilabel")
    assert (classes, [row.index(1) for row in found]) == (tuple("01234567"), numbers)
    lists = Plain([[number] for number in numbers])
    assert _read(lists, tmp_path / "lists", labels="multilabel")[:2] == (classes, found)
    texts = Plain(["+1", "10", "2", "NA", "1"])
    expected = (("1", "2", "10"), [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]], ["3"])
    assert _read(texts, tmp_path / "texts", labels="multilabel", on_error="skip") == expected


def test_a_blank_text_among_several_names_is_no_class(tmp_path: Path) -> None:
    lists = [["a", ""], ["b", " "], ["a", "b"]]
    expected = (("a", "b"), [[1, 0], [0, 1], [1, 1]])
    assert _read(Plain(lists), tmp_path / "python")[:2] == expected
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(3)]
    features = hub.Features({"image": hub.Image(), "label": hub.Sequence(hub.Value("string"))})
    assert (
        _read(hub.Dataset.from_dict({"image": images, "label": lists}, features=features), tmp_path / "object")[:2]
        == expected
    )


def test_lists_of_one_name_are_one_class_if_that_is_asked(tmp_path: Path) -> None:
    lists = [["a"], ["b"], ["b"], ["a"]]
    assert _read(Plain(lists), tmp_path / "one", labels="classes")[:2] == (("a", "b"), [0, 1, 1, 0])
    with pytest.raises(SampleError, match="Give --labels multilabel if a sample may have several"):
        build_cache(Plain([*lists, ["a", "b"]]), tmp_path / "cache", SMALL, jobs=1, labels="classes")
    with pytest.raises(SourceError, match="a class is one name: give --labels multilabel"):
        build_cache(Plain([["a", "b"], ["b", "a"]]), tmp_path / "cache", SMALL, jobs=1, labels="classes")


@pytest.mark.parametrize("options", [{}, {"labels": "multilabel"}, {"classes": ["b", "a"]}], ids=str)
def test_the_only_class_of_several_is_read_from_a_table(options: dict[str, Any], tmp_path: Path) -> None:
    _table(tmp_path, ["a", "", "a"])
    table = TableSource(tmp_path / "table.csv", TableOptions(label_cols=("label",), label_sep="|"))
    classes, found, _ = _read(table, tmp_path / "cache", **options)
    assert (classes, [sum(row) for row in found]) == (tuple(options.get("classes", "a")), [1, 0, 1])


_NUMBERS = [["1", "10"], ["2"], ["10", "2"], ["1"]]


@pytest.mark.parametrize("form", ["table", "object", "python"])
def test_several_names_that_are_numbers_are_in_their_order_also_when_samples_are_added(
    form: str, tmp_path: Path
) -> None:
    def source(lists: list[list[str]]) -> Any:
        if form == "python":
            return Plain(lists)
        if form == "table":
            _table(tmp_path, ["|".join(names) for names in lists])
            return TableSource(tmp_path / "table.csv", TableOptions(label_cols=("label",), label_sep="|"))
        images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(len(lists))]
        features = hub.Features({"image": hub.Image(), "label": hub.Sequence(hub.Value("string"))})
        return hub.Dataset.from_dict({"image": images, "label": lists}, features=features)

    expected = [[1, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0]]
    assert _read(source(_NUMBERS), tmp_path / "cache")[:2] == (("1", "2", "10"), expected)
    found = _read(source([*_NUMBERS, ["2", "1"]]), tmp_path / "cache")
    assert found[:2] == (("1", "2", "10"), [*expected, [1, 1, 0]])


def test_names_are_in_the_order_of_their_numbers_without_those_that_mean_no_label(tmp_path: Path) -> None:
    _table(tmp_path, ["1|10", "NA", "10|2"])
    table = TableSource(tmp_path / "table.csv", TableOptions(label_cols=("label",), label_sep="|"))
    expected = (("1", "2", "10"), [[1, 0, 1], [0, 1, 1]], ["1.png"])
    assert _read(table, tmp_path / "table", missing_label=["NA"], on_error="skip") == expected
    items = Plain([["1", "10"], ["NA"], ["10", "2"]])
    assert _read(items, tmp_path / "items", missing_label=["NA"], on_error="skip") == (*expected[:2], ["1"])
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(2)]
    kind = hub.Sequence(hub.ClassLabel(names=["bee", "none", "ant"]))
    features = hub.Features({"image": hub.Image(), "label": kind})
    rows = hub.Dataset.from_dict({"image": images, "label": [[0, 2], [0]]}, features=features)
    found = _read(rows, tmp_path / "object", missing_label=["none"])
    assert found[:2] == (("bee", "ant"), [[1, 1], [1, 0]])  # the order of the data set


def test_several_names_that_are_nearly_alike_or_words_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(2)]
    lists = [["Cat", "NA"], ["cat", "dog"]]
    features = hub.Features({"image": hub.Image(), "label": hub.Sequence(hub.Value("string"))})
    _table(tmp_path, ["|".join(names) for names in lists])
    table = TableSource(tmp_path / "table.csv", TableOptions(label_cols=("label",), label_sep="|"))
    rows = hub.Dataset.from_dict({"image": images, "label": lists}, features=features)
    for name, source in (("table", table), ("object", rows), ("python", Plain(lists))):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tpucache"):
            assert _read(source, tmp_path / name)[0] == ("Cat", "NA", "cat", "dog")
        assert "'Cat' and 'cat' are different classes" in caplog.text
        assert "'NA' is a class: if it means that there is no label, give --missing-label" in caplog.text


def test_a_class_that_is_called_otherwise_is_another_class_and_a_new_one_may_be_added(tmp_path: Path) -> None:
    options = TableOptions(label_cols=("label",), label_sep="|")

    def table(*cells: str) -> TableSource:
        _table(tmp_path, list(cells))
        return TableSource(tmp_path / "table.csv", options)

    build_cache(table("a|b", "b"), tmp_path / "cache", SMALL, jobs=1)
    with pytest.raises(SourceError, match="2 samples have another label"):
        build_cache(table("a|c", "c"), tmp_path / "cache", SMALL, jobs=1)
    added = _read(table("a|b", "b", "0|b"), tmp_path / "cache")
    assert added[:2] == (("0", "a", "b"), [[0, 1, 1], [0, 0, 1], [1, 0, 1]])
    build_cache(Plain([["a", "b"], ["a", "b"]]), tmp_path / "items", SMALL, jobs=1)
    with pytest.raises(SourceError, match="the source now has"):
        build_cache(Plain([["a", "c"], ["a", "c"]]), tmp_path / "items", SMALL, jobs=1)


def test_classes_of_label_columns_are_called_like_the_columns_whatever_a_row_holds(tmp_path: Path) -> None:
    for number in range(3):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "table.csv").write_text("path,cat,dog\n0.png,0,1\n1.png,1,9\n2.png,1,1\n")
    table = TableSource(tmp_path / "table.csv", TableOptions(label_cols=("cat", "dog")))
    expected = (("cat", "dog"), [[0, 1], [1, 1]], ["1.png"])
    assert _read(table, tmp_path / "missing", missing_label=["9"], on_error="skip") == expected
    assert _read(table, tmp_path / "faulty", labels="multilabel", on_error="skip") == expected
    assert _read(table, tmp_path / "values")[:2] == ((), [[0, 1], [1, 9], [1, 1]])
    relabel_cache(tmp_path / "missing", tmp_path / "table.csv", table._options, labels="numbers")
    assert Cache.open(tmp_path / "missing").manifest.classes == ()


def test_one_hot_vectors_are_told_of_and_read_as_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = Plain([[1, 0, 0], [0, 0, 1], [0, 1, 0]])
    assert _read(source, tmp_path / "one", labels="classes")[1] == [0, 2, 1]
    assert _read(source, tmp_path / "numbers", labels="numbers")[0] == ()
    assert "--labels classes" not in caplog.text
    with caplog.at_level(logging.WARNING, "tpucache"):
        found = _read(source, tmp_path / "several")
    assert "give --labels classes where one class is meant" in caplog.text
    assert found[:2] == (("0", "1", "2"), [[1, 0, 0], [0, 0, 1], [0, 1, 0]])


def test_lists_of_class_numbers_are_refused_with_the_option_that_reads_them(tmp_path: Path) -> None:
    source = Plain([[0, 2], [1], [0, 1, 2], []])
    with pytest.raises(SourceError, match="--labels multilabel"):
        build_cache(source, tmp_path / "cache", SMALL, jobs=1)
    expected = [[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert _read(source, tmp_path / "several", labels="multilabel")[:2] == (("0", "1", "2"), expected)


def test_values_keep_the_precision_of_float64(tmp_path: Path) -> None:
    values = [1.7e9 + number + 0.5 for number in range(4)]
    assert _read(Plain(values), tmp_path / "cache")[1] == [[value] for value in values]


def test_minus_one_beside_zero_is_no_label_in_a_table_and_with_one_alone_a_class(tmp_path: Path) -> None:
    assert _read(_table(tmp_path, ["0", "-1", "1"]), tmp_path / "a", on_error="skip") == (("0", "1"), [0, 1], ["1.png"])
    assert _read(_table(tmp_path, ["-1", "1", "-1"]), tmp_path / "b")[:2] == (("-1", "1"), [0, 1, 0])
    scale = ["-2", "-1", "0", "1", "2"]
    assert _read(_table(tmp_path, scale), tmp_path / "d")[:2] == (tuple(scale), [0, 1, 2, 3, 4])
    stated = {"missing_label": ["9"]}
    assert _read(_table(tmp_path, ["0", "-1", "1"]), tmp_path / "c", **stated)[:2] == (("-1", "0", "1"), [1, 0, 2])


@pytest.mark.parametrize("labels", [["a", ["a", "b"], "b"], [0, [0, 1], [1]], [[0], [0], [0, 1]]])
def test_lists_of_one_beside_longer_ones_are_refused_with_the_option_that_reads_them(
    labels: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match="--labels multilabel"):
        build_cache(Plain(labels), tmp_path / "cache", SMALL, jobs=1)
    lists = [label if isinstance(label, list) else [label] for label in labels]
    classes = sorted({part for label in lists for part in label})
    marks = [[float(name in label) for name in classes] for label in lists]
    assert _read(Plain(labels), tmp_path / "several", labels="multilabel")[1] == marks


_TEXTS = {
    "numbers": ["0.5", "1.5", "2"],
    "a word among whole numbers": ["1", "NA", "2"],
    "a word among numbers": ["0.5", "nan", "1"],
    "a word among names": ["NA", "dog", "cat"],
    "-1 beside 0": ["-1", "0", "1"],
    "-1 without 0": ["-1", "1", "1"],
    "a scale": ["-2", "-1", "0"],
    "whole floats": ["1.0", "0.0", "1"],
    "signs": ["+1", "2", "1"],
    "zeros before": ["007", "7", "8"],
    "a name among numbers": ["1", "2", "dog"],
    "infinity": ["3", "inf", "2"],
    "digits of another script": ["\u0663", "1", "2"],
}


@pytest.mark.parametrize("form", _TEXTS)
def test_texts_mean_the_same_in_tables_objects_and_python(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = _TEXTS[form]
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(len(labels))]
    rows = hub.Dataset.from_dict(
        {"image": images, "label": labels}, features=hub.Features({"image": hub.Image(), "label": hub.Value("string")})
    )
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    found, warnings = [], []
    for name, source in (
        ("table", _table(tmp_path, labels)),
        ("parquet", tmp_path / "rows.parquet"),
        ("object", rows),
        ("python", Plain(labels)),
    ):
        caplog.clear()
        classes, values, skipped = _read(source, tmp_path / name, on_error="skip")
        found.append((classes, values, len(skipped)))
        texts = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
        warnings.append(
            [text for text in texts if "among" in text or "is a class" in text or "names of classes" in text]
        )
    assert found == [found[0]] * 4
    assert warnings == [warnings[0]] * 4


@pytest.mark.parametrize(("labels", "odd"), [([1, 0, 1, "dog"], 3), ([3, "3", 1, 1], 1), (["a", "b", 3, "b"], 2)])
def test_a_label_of_another_kind_than_most_is_a_fault_of_its_sample(
    labels: list[Any], odd: int, tmp_path: Path
) -> None:
    with pytest.raises(SampleError, match=f"'{odd}'"):
        build_cache(Plain(labels), tmp_path / "fail", SMALL, jobs=1)
    _, found, skipped = _read(Plain(labels), tmp_path / "skip", on_error="skip")
    assert (len(found), skipped) == (3, [str(odd)])
    names = tuple(sorted(set(map(str, labels))))
    assert _read(Plain(labels), tmp_path / "names", labels="classes")[:2] == (
        names, [names.index(str(label)) for label in labels],
    )  # fmt: skip


def test_a_column_of_classes_is_the_label_of_an_object_as_of_parquet(tmp_path: Path) -> None:
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(3)]
    kind = hub.ClassLabel(names=_NAMES)
    rows = hub.Dataset.from_dict(
        {"img": images, "fine": [1, 0, 1]}, features=hub.Features({"img": hub.Image(), "fine": kind})
    )
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    rows.save_to_disk(str(tmp_path / "saved"))
    for name, source in (("object", rows), ("parquet", tmp_path / "rows.parquet"), ("folder", tmp_path / "saved")):
        assert _read(source, tmp_path / name)[:2] == (("ant", "bee"), [1, 0, 1])
    several = rows.add_column("coarse", [0, 0, 1]).cast_column("coarse", kind)
    with pytest.raises(SourceError, match="several columns of classes, fine, coarse"):
        build_cache(several, tmp_path / "several", SMALL, jobs=1)


def test_another_column_that_may_be_the_label_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(2)]
    kinds = ["dog", "cat"]
    rows = hub.Dataset.from_dict({"image": images, "label": [0, 1], "class": kinds})
    rows.cast_column("image", hub.Image()).to_parquet(str(tmp_path / "rows.parquet"))
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for number, image in enumerate(images):
            file = io.BytesIO()
            image.save(file, "PNG")
            label = json.dumps({"label": number, "class": kinds[number]}).encode()
            for name, data in ((f"{number}.png", file.getvalue()), (f"{number}.json", label)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    for name in ("rows.parquet", "rows.tar"):
        caplog.clear()
        assert _read(tmp_path / name, tmp_path / f"{name} cache")[1] == [0, 1]
        assert "using the labels in 'label', not in 'class': --label-col names what to use" in caplog.text
        caplog.clear()
        named = open_source(tmp_path / name, TableOptions(label_cols=("class",)))
        assert _read(named, tmp_path / f"{name} named")[:2] == (("cat", "dog"), [1, 0])
        assert "using the labels" not in caplog.text


def test_a_column_that_may_be_the_label_is_named_as_the_source_spells_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(2)]
    images[0].save(tmp_path / "0.png")
    (tmp_path / "table.csv").write_text("path, label\n0.png, cat\n0.png, dog\n")
    rows = hub.Dataset.from_dict({"image": images, " label": ["cat", "dog"]}).cast_column("image", hub.Image())
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("table.csv", "rows.parquet"):
        caplog.clear()
        assert _read(tmp_path / name, tmp_path / f"{name} cache")[1] is None
        assert "the samples have no labels, and ' label' may be labels" in caplog.text
        named = open_source(tmp_path / name, TableOptions(label_cols=(" label",)))
        assert _read(named, tmp_path / f"{name} named")[1] == [0, 1]


def test_a_named_column_without_any_label_is_refused_in_all_sources(tmp_path: Path) -> None:
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(2)]
    features = hub.Features({"image": hub.Image(), "kind": hub.Value("string")})
    hub.Dataset.from_dict({"image": images, "kind": [None, ""]}, features=features).to_parquet(
        str(tmp_path / "rows.parquet")
    )
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for name, data in (("0.png", b"x"), ("0.json", b'{"kind": null}')):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    (tmp_path / "rows.csv").write_text("path,kind\n0.png,\n")
    for name in ("rows.parquet", "rows.tar", "rows.csv"):
        with pytest.raises(SourceError, match=r"has no label in any row of .*'kind'"):
            open_source(tmp_path / name, TableOptions(label_cols=("kind",))).list()


def test_a_stated_value_means_no_label_in_any_spelling_and_among_several_names(tmp_path: Path) -> None:
    numbers, several, lists = (tmp_path / name for name in ("numbers", "several", "lists"))
    for folder in (numbers, several):
        folder.mkdir()
    missing: dict[str, Any] = {"missing_label": ["-1.0", "none"], "on_error": "skip"}
    assert _read(_table(numbers, ["0", "1", "-1"]), numbers / "cache", **missing) == (("0", "1"), [0, 1], ["2.png"])
    table = _table(several, ["a|b", "none", "b"])
    table = TableSource(several / "table.csv", TableOptions(label_cols=("label",), label_sep="|"))
    expected = (("a", "b"), [[1, 1], [0, 1]])
    assert _read(table, several / "cache", **missing) == (*expected, ["1.png"])
    items = Plain([["a", "b"], ["none"], ["b"]])
    assert _read(items, lists, **missing) == (*expected, ["1"])


def test_minus_one_is_a_class_if_the_classes_name_it(tmp_path: Path) -> None:
    classes = ["-1", "0", "1"]
    assert _read(_table(tmp_path, classes), tmp_path / "cache", classes=classes) == (tuple(classes), [0, 1, 2], [])


def test_names_of_classes_are_not_read_as_numbers(tmp_path: Path) -> None:
    options = TableOptions(label_cols=("label",), label_sep="|")
    _table(tmp_path, ["a|b", "a", "b"])
    table = select_source(TableSource(tmp_path / "table.csv", options), limit=2)
    with pytest.raises(UsageError, match="--label-sep is for several names of classes"):
        build_cache(table, tmp_path / "cache", SMALL, jobs=1, labels="numbers")
    with pytest.raises(SourceError, match="lists of texts, which are classes"):
        build_cache(Plain([["a", "b"], ["a"], ["b"]]), tmp_path / "cache", SMALL, jobs=1, labels="numbers")
    images = [Image.fromarray(np.full((8, 8, 3), number, np.uint8)) for number in range(3)]
    for name, kind, lists in (
        ("names", hub.Value("string"), [["a", "b"], ["a"], ["b"]]),
        ("numbers", hub.Value("string"), [["1", "2"], ["1"], ["2"]]),
        ("classes", hub.ClassLabel(names=_NAMES), [[0, 1], [0], [1]]),
    ):
        features = hub.Features({"image": hub.Image(), "label": hub.Sequence(kind)})
        rows = hub.Dataset.from_dict({"image": images, "label": lists}, features=features)
        rows.to_parquet(str(tmp_path / f"{name}.parquet"))
        for source in (rows, tmp_path / f"{name}.parquet"):
            with pytest.raises(SourceError, match=r"lists of texts, which are classes: leave out --labels numbers"):
                build_cache(source, tmp_path / "cache", SMALL, jobs=1, labels="numbers")


@pytest.mark.parametrize("kind", ["auto", "multilabel", "numbers"])
def test_labels_that_are_all_empty_lists_are_refused(kind: LabelKind, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="empty lists: give the labels"):
        build_cache(Plain([[], [], []]), tmp_path / "cache", SMALL, jobs=1, labels=kind)
