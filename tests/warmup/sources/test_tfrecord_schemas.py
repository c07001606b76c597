"""TFRecords in the schemas that people have, written by the library tfrecord."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from made import build_here, png

from tpucache import CachedDataset, Recipe
from tpucache.cli import main
from tpucache.errors import SampleError, UsageError
from tpucache.warmup.sources import TableOptions, open_source

pytestmark = pytest.mark.usefixtures("short_runs")

tfrecord = pytest.importorskip("tfrecord")


def _write(path: Path, examples: list[dict[str, Any]]) -> Path:
    writer = tfrecord.TFRecordWriter(str(path))
    kinds = {bytes: "byte", int: "int", float: "float"}
    for example in examples:
        lists = {name: value if isinstance(value, list) else [value] for name, value in example.items()}
        writer.write({name: (values, kinds[type(values[0])] if values else "float") for name, values in lists.items()})
    writer.close()
    return path


def _ranzcr(number: int) -> dict[str, Any]:
    marks = {"ETT - Abnormal": number % 2, "NGT - Normal": 1, "CVC - Borderline": number // 3}
    return {
        "image": png(number, (12, 8)),
        "StudyInstanceUID": b"1.2.%d" % number,
        "PatientID": b"p%d" % number,
        **marks,
    }


RANZCR_LABELS = ("ETT - Abnormal", "NGT - Normal", "CVC - Borderline")


@pytest.mark.slow
def test_one_whole_number_a_label_becomes_several_labels_and_trains(tmp_path):
    path = _write(tmp_path / "train.tfrec", [_ranzcr(number) for number in range(6)])
    words = ["warmup", str(path), str(tmp_path / "cache"), "--size", "8", "--jobs", "1", "--drop", "Patient*"]
    assert main([*words, *(word for name in RANZCR_LABELS for word in ("--label-col", name))]) == 0
    data = CachedDataset(tmp_path / "cache")
    assert data.classes == RANZCR_LABELS
    assert data.labels.tolist() == [[number % 2, 1, number // 3] for number in range(6)]
    assert list(data.table["StudyInstanceUID"]) == [f"1.2.{number}" for number in range(6)]
    assert "PatientID" not in data.table
    run = "--backend eager --model cnn --epochs 1 --batch-size 3 --lr 0.01"
    assert main(["train", str(tmp_path / "cache"), "--run", str(tmp_path / "run"), *run.split()]) == 0


def test_records_without_a_known_label_are_reported(tmp_path, caplog):
    path = _write(tmp_path / "train.tfrec", [_ranzcr(number) for number in range(3)])
    with caplog.at_level(logging.WARNING, "tpucache"):
        build_here(path, tmp_path / "cache")
    assert "have no labels, and 'CVC - Borderline', 'ETT - Abnormal', 'NGT - Normal' may be" in caplog.text


def test_another_feature_that_may_be_the_label_is_told_of(tmp_path, caplog):
    path = _write(tmp_path / "a.tfrec", [{"image": png(n), "class": b"cd"[n : n + 1], "label": n} for n in range(2)])
    build_here(path, tmp_path / "cache")
    assert "using the labels in 'label', not in 'class': --label-col names what to use" in caplog.text
    caplog.clear()
    source = open_source(path, TableOptions(label_cols=("class",)))
    assert build_here(source, tmp_path / "named").classes == ("c", "d")
    assert "using the labels" not in caplog.text
    mixed = [{"image": png(0), "class": b"c"}, {"image": png(1), "label": 1}, {"image": png(2), "label": 0}]
    path = _write(tmp_path / "b.tfrec", mixed)
    assert len(build_here(path, tmp_path / "mixed", on_error="skip").skipped) == 1
    assert "the label of some records is feature 'class', of others 'label'" in caplog.text


def test_the_schema_of_imagenet(tmp_path):
    example = {
        "image/encoded": png(1), "image/format": b"JPEG", "image/filename": b"n01.JPEG", "image/height": 8,
        "image/width": 12, "image/colorspace": b"RGB", "image/class/label": 7, "image/class/synset": b"n01440764",
        "image/class/text": b"tench",
    }  # fmt: skip
    source = open_source(_write(tmp_path / "train-00000-of-01024.tfrecord", [example]))
    item = source.load(source.list().samples[0])
    assert (list(item.fields), item.label) == (["image"], 7)
    assert item.columns["image_class_text"] == "tench"
    kept = open_source(tmp_path / "*.tfrecord", TableOptions(keep=("image/class/*",), drop=("*/synset",)))
    assert kept.load(kept.list().samples[0]).columns == {"image_class_text": "tench"}


def _objects(number: int) -> dict[str, Any]:
    return {
        "image/encoded": png(number, (12, 8)), "image/height": 8, "image/width": 12,
        "image/object/bbox/xmin": [0.0, 0.5][:number], "image/object/bbox/xmax": [0.5, 1.0][:number],
        "image/object/bbox/ymin": [0.25, 0.0][:number], "image/object/bbox/ymax": [0.75, 1.0][:number],
        "image/object/class/text": [b"cat", b"dog"][:number], "image/object/class/label": [1, 2][:number],
    }  # fmt: skip


def test_boxes_of_the_object_detection_api(tmp_path):
    path = _write(tmp_path / "a.tfrecord", [_objects(number) for number in (2, 0, 1)])
    build_here(path, tmp_path / "cache", Recipe(size=(8, 12), max_boxes=3, fit="stretch"))
    boxes = [CachedDataset(tmp_path / "cache")[number]["boxes"].tolist() for number in range(3)]
    none = [-1.0] * 5
    assert boxes == [
        [[0, 2, 6, 6, 1], [6, 0, 12, 8, 2], none],
        [none] * 3,
        [[0, 2, 6, 6, 1], none, none],
    ]
    source = open_source(path, TableOptions(drop=("image/object/*",)))
    assert list(source.load(source.list().samples[0]).fields) == ["image"]


@pytest.mark.parametrize(
    ("changes", "label_cols", "reason"),
    [
        ({}, ("none",), "no feature 'none': there are"),
        ({"empty": []}, ("empty",), "is empty"),
        ({"text": b"x"}, ("image/width", "text"), "feature 'text' is text"),
        ({"image/object/bbox/ymax": [0.5]}, (), "has boxes"),
        ({"image/width": [1, 2]}, (), "values of 'image/width'"),
        ({"image/height": None}, (), "has boxes"),
        ({"image/object/class/label": None}, (), "has the classes of boxes only as texts: write their numbers as"),
        ({"image/object/bbox/xmax": [6.0, 1.0]}, (), "has a box corner of 6: corners must be fractions"),
    ],
)
def test_labels_and_boxes_that_cannot_be_used_are_errors(tmp_path, changes, label_cols, reason):
    example = {name: value for name, value in {**_objects(2), **changes}.items() if value is not None}
    path = _write(tmp_path / "a.tfrecord", [example])
    source = open_source(path, TableOptions(label_cols=label_cols))
    with pytest.raises(SampleError, match=reason):
        source.load(source.list().samples[0])
    if "texts" in reason:
        source = open_source(path, TableOptions(drop=("image/object/class/text",)))
        assert source.load(source.list().samples[0]).fields["boxes"].shape == (2, 4)


def test_boxes_of_crowds_are_left_out_as_in_coco_and_told_of(tmp_path, caplog):
    examples = [{**_objects(2), "image/object/is_crowd": values} for values in ([0, 1], [1])]
    source = open_source(_write(tmp_path / "a.tfrecord", examples))
    first, second = source.list().samples
    assert "boxes of crowds, those whose 'image/object/is_crowd' is not 0, are left out" in caplog.text
    assert source.load(first).fields["boxes"].tolist() == [[0, 2, 6, 6, 1]]
    with pytest.raises(SampleError, match="has boxes without a corner, a class or a 'image/object/is_crowd'"):
        source.load(second)


def test_features_of_objects_that_are_not_read_are_named(tmp_path, caplog):
    path = _write(tmp_path / "a.tfrecord", [{**_objects(2), "image/object/mask": [b"png", b"png"]}])
    open_source(path).list()
    assert "only boxes and their classes are read, not 'image/object/mask': they are left out" in caplog.text
    caplog.clear()
    open_source(path, TableOptions(drop=("image/object/mask",))).list()
    assert caplog.text == ""


def test_options_that_records_do_not_have_are_refused(tmp_path):
    path = _write(tmp_path / "a.tfrec", [_ranzcr(1)])
    with pytest.raises(UsageError, match=r"TFRecord files .* no --suffix"):
        open_source(path, TableOptions(suffix=".jpg"))
