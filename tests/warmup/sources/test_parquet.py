"""Parquet files, written by pyarrow as Hugging Face and pandas do."""

from __future__ import annotations

import contextlib
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import build_here, png, write

from tpucache.errors import SampleError, SourceError
from tpucache.warmup.sources import TableOptions, label_source, open_source

pytestmark = pytest.mark.usefixtures("short_runs")

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NAMES = ["ant", "bee", "cat"]


def _features(**features):
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def _write(path, columns, features=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if features:
        table = table.replace_schema_metadata(_features(**features))
    pq.write_table(table, path, **options)
    return path


def _images(numbers):
    return [{"bytes": png(number), "path": f"{number}.png"} for number in numbers]


CLASS = {"_type": "ClassLabel", "names": NAMES}


@pytest.mark.parametrize("label", [-7, 2**62, 2**40])
@pytest.mark.parametrize("features", [None, {"label": CLASS}])
def test_a_number_that_is_no_class_is_refused_before_anything_is_built_or_skipped(label, features, tmp_path):
    path = _write(tmp_path / "a.parquet", {"image": _images(range(3)), "label": [0, label, 1]}, features)
    with pytest.raises(SourceError, match=rf"a\.parquet#1': has the label {label}: .*class"):
        build_here(path, tmp_path / "cache")
    assert not [*tmp_path.glob("cache/*.lmdb")]
    manifest = build_here(path, tmp_path / "skipped", on_error="skip")
    assert manifest.samples == 2
    assert [skip.path for skip in manifest.skipped] == ["a.parquet#1"]


@pytest.mark.slow
@settings(max_examples=25)
@given(order=st.lists(st.integers(0, 49), min_size=1, max_size=30), group=st.integers(1, 60))
def test_rows_are_read_in_any_order(tmp_path_factory, order, group):
    path = tmp_path_factory.getbasetemp() / f"rows-{group}.parquet"
    if not path.exists():
        _write(path, {"image": [b"%d" % n for n in range(50)]}, row_group_size=group)
    source = pickle.loads(pickle.dumps(open_source(path)))
    samples = source.list().samples
    assert [source.load(samples[n]).fields["image"] for n in order] == [b"%d" % n for n in order]


def test_paths_labels_folds_masks_and_columns(tmp_path):
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(png(n))
    columns = {
        "file": [str(n) for n in range(4)],
        "kind": ["b", "a", "b", "a"],
        "part": [0, 1, 0, 1],
        "note": ["x", None, "y", "z"],
        "mask": _images(range(4)),
        "extra": [{"a": 1}] * 4,
    }
    path = _write(tmp_path / "a.parquet", columns)
    options = TableOptions(path_col="file", label_cols=("kind",), fold_col="part", suffix=".png")
    source = open_source(path, options)
    listing = label_source(source, "auto").list()
    assert listing.classes == ("a", "b")
    assert [sample.label for sample in listing.samples] == [1, 0, 1, 0]
    assert listing.columns["fold"].tolist() == [0, 1, 0, 1]
    assert listing.columns["note"] == ["x", "", "y", "z"]
    assert source.load(listing.samples[2]).fields == {"image": png(2), "mask": png(2)}


@pytest.mark.parametrize("as_struct", [True, False])
@pytest.mark.parametrize("name", ["{0}/1.png", "../1.png"])
def test_a_parquet_file_names_no_picture_outside_of_its_folder_unless_root_has_it(tmp_path, name, as_struct):
    (tmp_path / "1.png").write_bytes(png(1))
    name = name.format(tmp_path)
    cell = {"bytes": None, "path": name} if as_struct else name
    path = _write(tmp_path / "others" / "a.parquet", {"image": [cell]}, {"image": {"_type": "Image"}})
    source = open_source(path, TableOptions(path_col="image"))
    with pytest.raises(SampleError, match=r"is outside of .*others: give --root"):
        source.load(source.list().samples[0])
    if not name.startswith("."):
        source = open_source(path, TableOptions(path_col="image", root="/"))
        assert source.load(source.list().samples[0]).fields == {"image": png(1)}


def test_several_label_columns_lists_of_classes_and_numbers(tmp_path):
    columns = {
        "image": _images(range(3)),
        "a": [0, 1, 1],
        "b": [1, 1, 0],
        "tags": [[0, 2], [], [1]],
        "age": [1.5, 2.0, 3.0],
    }
    path = _write(tmp_path / "a.parquet", columns, {"tags": {"_type": "Sequence", "feature": CLASS}})
    for names, classes, labels in (
        (("a", "b"), ("a", "b"), [(0, 1), (1, 1), (1, 0)]),
        (("tags",), tuple(NAMES), [(1, 0, 1), (0, 0, 0), (0, 1, 0)]),
        (("age",), (), [(1.5,), (2.0,), (3.0,)]),
        ((), tuple(NAMES), [(1, 0, 1), (0, 0, 0), (0, 1, 0)]),
    ):
        listing = label_source(open_source(path, TableOptions(label_cols=names)), "auto").list()
        assert (listing.classes, [sample.label for sample in listing.samples]) == (classes, labels)
    assert open_source(path, TableOptions(label_cols=("age", "a"))).list().value_names == ("age", "a")


def test_folders_that_state_columns_are_columns(tmp_path):
    for n, name in enumerate(("label=cat/year=1/0", "label=dog/year=2/0", "label=dog/year=2/1")):
        _write(tmp_path / f"{name}.parquet", {"image": _images([n, n])})
    with pytest.raises(SourceError, match="give those with samples as a pattern, such as ") as caught:
        open_source(tmp_path).list()
    listing = label_source(open_source(str(caught.value).split("'")[-2]), "auto").list()
    assert (listing.classes, [sample.label for sample in listing.samples]) == (("cat", "dog"), [0, 0, 1, 1, 1, 1])
    assert listing.columns["year"].tolist() == [1, 1, 2, 2, 2, 2]
    _write(tmp_path / "2.parquet", {"image": _images([3])})
    with pytest.raises(SourceError, match=r"label=cat/year=1/0.parquet has other columns than 2.parquet"):
        open_source(tmp_path / "**" / "*.parquet").list()


def test_lists_of_numbers_are_arrays(tmp_path):
    columns = {
        "input_ids": [[1, 2, 3], [4, 5, 6]],
        "grid": [[[0.5, 1.0]], [[2.0, 3.0]]],
        "label": [0, 1],
        "text": ["a", "b"],
    }
    source = open_source(_write(tmp_path / "a.parquet", columns))
    listing = source.list()
    fields = source.load(listing.samples[1]).fields
    assert fields["input_ids"].tolist() == [4, 5, 6]
    assert (fields["grid"].dtype, fields["grid"].tolist()) == (np.float64, [[2.0, 3.0]])
    assert [sample.label for sample in listing.samples] == [0, 1]
    assert listing.columns["text"] == ["a", "b"]


def test_what_is_ambiguous_is_refused(tmp_path):
    columns = {"image": _images([1]), "fine": [1], "coarse": [1]}
    path = _write(tmp_path / "b.parquet", columns, {"fine": CLASS, "coarse": CLASS})
    with pytest.raises(SourceError, match="several columns of classes, fine, coarse: name one with --label-col"):
        open_source(path).list()
    path = _write(tmp_path / "c.parquet", {"left": _images([1]), "right": _images([1])})
    with pytest.raises(SourceError, match="several columns of images, left, right: name one with --path-col"):
        open_source(path).list()
    with pytest.raises(SourceError, match=r"no column 'x': there are 'left', 'right'"):
        open_source(path, TableOptions(label_cols=("x",))).list()
    _write(tmp_path / "e" / "a.parquet", {"image": _images([1])})
    _write(tmp_path / "e" / "b.parquet", {"image": _images([1]), "label": [1]})
    with pytest.raises(SourceError, match=r"b\.parquet has other columns than a\.parquet"):
        open_source(tmp_path / "e").list()


def test_rows_that_cannot_be_used_are_samples_that_do_not_load(tmp_path):
    columns = {"image": [*_images([1]), None, {"bytes": None, "path": None}, {"bytes": None, "path": "gone.png"}]}
    source = open_source(_write(tmp_path / "a.parquet", columns))
    samples = source.list().samples
    for sample, reason in zip(samples[1:], ("no image", "no image", "'gone.png' cannot be read"), strict=True):
        with pytest.raises(SampleError, match=reason):
            source.load(sample)
    _write(tmp_path / "a.parquet", {"image": _images([1])})
    with pytest.raises(SampleError, match="fewer rows"):
        source.load(samples[1])


@pytest.mark.slow
@settings(max_examples=60)
@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_a_flipped_or_missing_byte_is_an_error_or_changes_nothing(tmp_path_factory, at, flip):
    folder, images = tmp_path_factory.getbasetemp(), [png(n) for n in range(6)]
    whole = folder / "whole.parquet"
    if not whole.exists():
        _write(whole, {"image": images}, row_group_size=2, write_page_checksum=True)
    data = whole.read_bytes()
    place = int(at * len(data))
    flipped = folder / "flipped.parquet"
    flipped.write_bytes(data[:place] + (bytes([data[place] ^ flip]) + data[place + 1 :] if flip else b""))
    try:
        source = open_source(flipped)
        samples = source.list().samples
    except SourceError:
        return
    for sample in samples:
        with contextlib.suppress(SampleError):  # the file's end has no checksum, and may name other rows
            assert source.load(sample).fields["image"] in images


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(40) + b"PAR1", b"<html>"], ids=len)
def test_what_is_no_parquet_file_is_refused(tmp_path, data):
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.parquet is not a complete parquet file"):
        open_source(tmp_path / "a.parquet").list()


@pytest.mark.parametrize("name", ["{}.parquet", "{}-0-of-1.parquet", "{}/0.tfrec", "{}.tar", "{}-3.zip"])
def test_files_of_the_parts_of_a_data_set_are_refused_together(name, tmp_path):
    for part in ("test", "train"):
        write(tmp_path / name.format(part), b"")
    for parts, is_refused in (("*", True), ("{test,train}", False)):
        with pytest.raises(SourceError) as caught:
            open_source(tmp_path / name.format(parts)).list()
        assert ("holds files of parts of a data set, test" in str(caught.value)) is is_refused


def test_a_file_that_only_describes_images_is_refused(tmp_path):
    _write(tmp_path / "a.parquet", {"url": ["u"], "label": [1]})
    with pytest.raises(SourceError, match="has neither images nor lists of numbers, only url, label"):
        open_source(tmp_path).list()


@pytest.mark.parametrize("labels", [[3, 4], [["a"], ["b"]]])
def test_a_separator_for_labels_that_are_no_text_is_refused(labels, tmp_path):
    _write(tmp_path / "a.parquet", {"image": [png(1)] * 2, "label": labels})
    with pytest.raises(SourceError, match=r"column 'label' holds .*, not text: leave --label-sep out"):
        open_source(tmp_path / "a.parquet", TableOptions(label_cols=("label",), label_sep="|")).list()
