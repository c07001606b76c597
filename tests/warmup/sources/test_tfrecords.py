"""TFRecords: their framing, and what becomes of an Example's features in the schemas that people have."""

from __future__ import annotations

import gzip
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import build_here, example, framed, png, write_records
from patience import PATIENCE
from thorough import examples

from tpucache import CachedDataset, Recipe
from tpucache.cli import main
from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.warmup.sources import Sample, TableOptions, TFRecordSource, open_source
from tpucache.warmup.sources.source import Item
from tpucache.warmup.sources.tfrecords import read_example

JPEG = b"\xff\xd8\xff\xe0 and so on"
PNG = b"\x89PNG\r\n\x1a\n and so on"


def _read(features: dict[str, Any]) -> Item:
    return read_example(example(features), "a.tfrec#0")


def test_records_are_listed_file_by_file_and_loaded(tmp_path: Path) -> None:
    for name, labels in (("b.tfrec", (2, 3)), ("a.tfrec", (0, 1)), ("empty.tfrec", ()), ("c.tfrec", (4,))):
        write_records(tmp_path / name, *({"image": JPEG + bytes([label]), "label": label} for label in labels))
    source = open_source(tmp_path / "*.tfrec")
    listing = source.list()
    names = ["a.tfrec#0", "a.tfrec#1", "b.tfrec#0", "b.tfrec#1", "c.tfrec#0"]
    assert [sample.path for sample in listing.samples] == names
    assert [sample.number for sample in listing.samples] == [0, 1, 2, 3, 4]
    size = len(example({"image": [JPEG + b"0"], "label": 3}))
    assert {(sample.label, sample.bytes) for sample in listing.samples if sample.path != names[0]} == {(None, size)}
    source = pickle.loads(pickle.dumps(source))
    for number in (4, 0, 3, 2, 1):
        item = source.load(listing.samples[number])
        assert item == Item({"image": JPEG + bytes([number])}, number)


def test_a_pattern_over_folders_tells_files_of_one_name_apart(tmp_path: Path) -> None:
    for folder in "ba":
        write_records(tmp_path / folder / "x.tfrec", {"id": folder.encode(), "ids": [1, 2]})
    source = TFRecordSource(tmp_path / "*" / "x.tfrec")
    samples = source.list().samples
    assert [sample.path for sample in samples] == ["a/x.tfrec#0", "b/x.tfrec#0"]
    assert [source.load(sample).columns for sample in samples] == [{"id": "a"}, {"id": "b"}]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("*.tfrecords", "matches no file"), ("*.csv", r"b\.csv is not called"), ("*.tfrec", "holds no records")],
)
def test_a_pattern_without_records_is_refused(tmp_path: Path, pattern: str, reason: str) -> None:
    write_records(tmp_path / "a.tfrec")
    (tmp_path / "b.csv").write_text("path\n")
    with pytest.raises(SourceError, match=reason):
        open_source(tmp_path / pattern).list()


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrec", {"image": JPEG})
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(SourceError, match=r"a\.tfrec, offset 0: .* decompress a compressed one"):
        TFRecordSource(path).list()
    with pytest.raises(SourceError, match="decompress"):
        open_source(path.rename(tmp_path / "a.tfrec.gz")).list()


def test_a_file_cut_off_anywhere_is_refused_with_the_offset_of_the_record(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrec", b"one", b"two..")
    whole = path.read_bytes()
    second = len(framed(b"one"))
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length == second:
            continue
        with pytest.raises(SourceError, match=rf"a\.tfrec, offset {second if length > second else 0}: .* cut off"):
            TFRecordSource(path).list()


def test_a_flipped_bit_is_found_in_the_lengths_by_listing_and_in_the_data_by_loading(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrec", {"ids": [1, 2]}, {"ids": [3, 4]})
    whole = path.read_bytes()
    second = len(whole) // 2
    for at in range(second, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        os.utime(path, ns=(at, at))  # the clock of the file system may be too coarse to show it
        source = TFRecordSource(path)
        if at < second + 12:
            with pytest.raises(SourceError, match=rf"offset {second}: no record begins here"):
                source.list()
            with pytest.raises(SampleError, match=f"offset {second}"):
                source.load(Sample(1, "a.tfrec#1"))
        else:
            first, last = source.list().samples
            assert source.load(first).fields["ids"].tolist() == [1, 2]  # type: ignore[union-attr]
            with pytest.raises(SampleError, match="does not match its checksum") as caught:
                source.load(last)
            assert caught.value.path == "a.tfrec#1"


def test_a_record_that_went_away_is_a_sample_error(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrec", b"", b"")
    source = TFRecordSource(path)
    last = source.list().samples[1]
    write_records(path, b"")
    with pytest.raises(SampleError, match="fewer records"):
        source.load(last)
    path.unlink()
    with pytest.raises(SampleError, match="cannot be read any more"):
        source.load(last)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    ints=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=5),
    floats=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=5),
)
def test_numbers_come_back(ints: list[int], floats: list[float]) -> None:
    item = read_example(example({"ints": ints, "floats": floats}), "a#0")
    arrays: Any = item.fields
    assert list(arrays) == ["floats", "ints"]
    assert arrays["ints"].tolist() == ints
    assert arrays["ints"].dtype == np.int64
    assert arrays["floats"].tolist() == floats
    assert arrays["floats"].dtype == np.float32


@pytest.mark.parametrize("name", ["image", "image_raw", "image/encoded"])
def test_the_image_is_the_feature_called_so(name: str) -> None:
    assert _read({"aaa": b"text", name: b"whatever", "zzz": b"more"}).fields == {"image": b"whatever"}


@pytest.mark.parametrize(
    "start", [JPEG, PNG, b"GIF89a", b"BM\1\2\3\4\0\0\0\0", b"II*\0", b"MM\0*", b"RIFF\1\2\3\4WEBP"], ids=ascii
)
def test_the_only_feature_that_begins_as_an_image_is_the_image(start: bytes) -> None:
    item = _read({"a": b"BMX is text", "photo": start + b"...", "mask": PNG})
    assert item.fields == {"image": start + b"...", "mask": PNG}
    assert item.columns == {"a": "BMX is text"}


@pytest.mark.parametrize(
    ("features", "label"),
    [
        ({"label": 3}, 3),
        ({"class": 4, "label": 3}, 4),
        ({"class": b"cat", "target": 5}, 5),
        ({"image/class/label": -1}, -1),
        ({"label": 0.5}, (0.5,)),
        ({"label": [0.5, 1.5]}, (0.5, 1.5)),
        ({"label": [0, 1, 1]}, (0.0, 1.0, 1.0)),
        ({}, None),
    ],
    ids=str,
)
def test_the_label_is_the_first_numeric_feature_called_so(features: dict[str, Any], label: Any) -> None:
    found = _read({"image": JPEG, **features}).label
    assert found == label
    assert type(found) is type(label)


def test_single_values_are_columns_with_plain_names_and_empty_features_nothing() -> None:
    item = _read({"image": JPEG, "image/class/text": "é".encode(), "width": 7, "score": 0.5, "none": [], "path": b"p"})
    assert item.columns == {"image_class_text": "é", "path_": "p", "score": 0.5, "width": 7}
    assert item.fields == {"image": JPEG}


def test_arrays_have_names_that_a_record_can_have() -> None:
    item = _read(
        {"image": JPEG, "image/object/ids": [5, 6], "Boxes": [1, 2], "2d": [3, 4], "a_b": [1, 2], "a/b": [7, 8]}
    )
    assert {name: np.asarray(values).tolist() for name, values in item.fields.items() if name != "image"} == {
        "a_b": [1, 2],
        "f_2d": [3, 4],
        "boxes_": [1, 2],
        "a_b_": [7, 8],
        "image_object_ids": [5, 6],
    }


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ({"a": JPEG, "b": PNG}, "several images, a, b"),
        ({"id": b"x", "width": 1}, "no image and no array among its features id, width"),
        ({"image": JPEG, "sound": b"\xff\x00"}, "'sound' is not UTF-8"),
        ({"image": JPEG, "tags": [b"a", b"b"]}, "'tags' has 2 values"),
        ({"image": [JPEG, JPEG]}, "'image' has 2 values"),
        ({"image": [1, 2], "photo": JPEG}, "an image in feature 'photo', and numbers"),
    ],
    ids=str,
)
def test_features_that_cannot_be_kept_are_a_sample_error(features: dict[str, Any], reason: str) -> None:
    with pytest.raises(SampleError, match=reason) as caught:
        _read(features)
    assert caught.value.path == "a.tfrec#0"


def test_feature_lists_of_a_sequence_example_are_not_lost_without_a_word() -> None:
    data = example({"image/data": JPEG, "image/image_id": 7}, {"image/caption_ids": [[1, 2], [3, 4]]})
    with pytest.raises(SampleError, match=r"feature lists .* 'image/caption_ids': .* --drop 'image/caption_ids'"):
        read_example(data, "a.tfrec#0")
    for options in (TableOptions(drop=("image/caption*",)), TableOptions(keep=("image/image_id",))):
        assert read_example(data, "a.tfrec#0", options) == Item({"image": JPEG}, None, {"image_image_id": 7})


def test_several_label_features_name_the_values_of_a_label(tmp_path: Path) -> None:
    records = [{"image": png(), "a": number + 0.5, "b": number} for number in range(4)]
    path, names = write_records(tmp_path / "a.tfrec", *records[:3]), ("b", "a")
    options = TableOptions(label_cols=names)
    assert build_here(open_source(path, options), tmp_path / "cache").value_names == names
    other = open_source(write_records(path, *records), TableOptions(label_cols=names[::-1]))
    with pytest.raises(SourceError, match="are the columns b, a, not a, b: give --label-col b --label-col a"):
        build_here(other, tmp_path / "cache")


def test_an_empty_label_is_a_sample_error() -> None:
    with pytest.raises(SampleError, match="'label' is empty"):
        _read({"image": JPEG, "label": []})


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(data=st.binary(max_size=60))
def test_data_that_is_no_example_is_a_sample_error(data: bytes) -> None:
    with pytest.raises(SampleError):
        read_example(data, "a#0")


_LACKING = """
import sys
import google.protobuf
from unittest import mock
from tpucache.errors import DependencyError
from tpucache.warmup.sources import open_source
for change in (
    mock.patch.dict(sys.modules, {"google_crc32c": None}),
    mock.patch.dict(sys.modules, {"google.protobuf": None}),
    mock.patch.object(google.protobuf, "__version__", "4.24.4"),
):
    with change:
        try:
            open_source(sys.argv[1]).list()
        except DependencyError as error:
            print(error)
"""


def test_a_library_that_is_missing_or_crashes_is_reported(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrec", {"image": JPEG})
    command = [sys.executable, "-c", _LACKING, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout.splitlines()
    assert "`pip install google-crc32c`" in found[0]
    assert "`pip install --upgrade protobuf`" in found[1]
    assert "protobuf 4.24.4 is too old" in found[2]


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
def test_one_whole_number_a_label_becomes_several_labels(tmp_path: Path) -> None:
    path = write_records(tmp_path / "train.tfrec", *map(_ranzcr, range(6)))
    words = ["warmup", str(path), str(tmp_path / "cache"), "--size", "8", "--jobs", "1", "--drop", "Patient*"]
    assert main([*words, *(word for name in RANZCR_LABELS for word in ("--label-col", name))]) == 0
    data = CachedDataset(tmp_path / "cache")
    assert data.classes == RANZCR_LABELS
    assert data.labels.tolist() == [[number % 2, 1, number // 3] for number in range(6)]
    assert list(data.table["StudyInstanceUID"]) == [f"1.2.{number}" for number in range(6)]
    assert "PatientID" not in data.table


def test_records_without_a_known_label_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_records(tmp_path / "train.tfrec", *map(_ranzcr, range(3)))
    with caplog.at_level(logging.WARNING, "tpucache"):
        build_here(path, tmp_path / "cache")
    assert "have no labels, and 'CVC - Borderline', 'ETT - Abnormal', 'NGT - Normal' may be" in caplog.text


def test_another_feature_that_may_be_the_label_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_records(
        tmp_path / "a.tfrec", *({"image": png(n), "class": b"cd"[n : n + 1], "label": n} for n in range(2))
    )
    build_here(path, tmp_path / "cache")
    assert "using the labels in 'label', not in 'class': --label-col names what to use" in caplog.text
    caplog.clear()
    source = open_source(path, TableOptions(label_cols=("class",)))
    assert build_here(source, tmp_path / "named").classes == ("c", "d")
    assert "using the labels" not in caplog.text
    mixed = [{"image": png(0), "class": b"c"}, {"image": png(1), "label": 1}, {"image": png(2), "label": 0}]
    path = write_records(tmp_path / "b.tfrec", *mixed)
    assert len(build_here(path, tmp_path / "mixed", on_error="skip").skipped) == 1
    assert "the label of some records is feature 'class', of others 'label'" in caplog.text


def test_the_schema_of_imagenet(tmp_path: Path) -> None:
    features = {
        "image/encoded": png(1), "image/format": b"JPEG", "image/filename": b"n01.JPEG", "image/height": 8,
        "image/width": 12, "image/colorspace": b"RGB", "image/class/label": 7, "image/class/synset": b"n01440764",
        "image/class/text": b"tench",
    }  # fmt: skip
    source = open_source(write_records(tmp_path / "train-00000-of-01024.tfrecord", features))
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


def test_boxes_of_the_object_detection_api(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrecord", *map(_objects, (2, 0, 1)))
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
def test_labels_and_boxes_that_cannot_be_used_are_errors(
    tmp_path: Path, changes: dict[str, Any], label_cols: tuple[str, ...], reason: str
) -> None:
    features = {name: value for name, value in {**_objects(2), **changes}.items() if value is not None}
    path = write_records(tmp_path / "a.tfrecord", features)
    source = open_source(path, TableOptions(label_cols=label_cols))
    with pytest.raises(SampleError, match=reason):
        source.load(source.list().samples[0])
    if "texts" in reason:
        source = open_source(path, TableOptions(drop=("image/object/class/text",)))
        assert source.load(source.list().samples[0]).fields["boxes"].shape == (2, 4)


def test_boxes_of_crowds_are_left_out_as_in_coco_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    examples = [{**_objects(2), "image/object/is_crowd": values} for values in ([0, 1], [1])]
    source = open_source(write_records(tmp_path / "a.tfrecord", *examples))
    first, second = source.list().samples
    assert "boxes of crowds, those whose 'image/object/is_crowd' is not 0, are left out" in caplog.text
    assert source.load(first).fields["boxes"].tolist() == [[0, 2, 6, 6, 1]]
    with pytest.raises(SampleError, match="has boxes without a corner, a class or a 'image/object/is_crowd'"):
        source.load(second)


def test_features_of_objects_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_records(tmp_path / "a.tfrecord", {**_objects(2), "image/object/mask": [b"png", b"png"]})
    open_source(path).list()
    assert "only boxes and their classes are read, not 'image/object/mask': they are left out" in caplog.text
    caplog.clear()
    open_source(path, TableOptions(drop=("image/object/mask",))).list()
    assert caplog.text == ""


def test_options_that_records_do_not_have_are_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrec", _ranzcr(1))
    with pytest.raises(UsageError, match=r"TFRecord files .* no --suffix"):
        open_source(path, TableOptions(suffix=".jpg"))
