"""The TFRecord source: its framing, and what becomes of the features of an Example."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import build_here
from patience import PATIENCE
from PIL import Image
from thorough import examples

from tpucache.errors import SampleError, SourceError
from tpucache.warmup.sources import Sample, TableOptions, TFRecordSource, open_source
from tpucache.warmup.sources.source import Item
from tpucache.warmup.sources.tfrecords import read_example

JPEG = b"\xff\xd8\xff\xe0 and so on"
PNG = b"\x89PNG\r\n\x1a\n and so on"


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _block(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _feature(values: Any, packed: bool = True) -> bytes:
    """Encode one feature by hand, by the wire format: the kind goes by the type of the first value."""
    if not values:
        return b""
    if isinstance(values[0], bytes):
        return _block(1, b"".join(_block(1, value) for value in values))
    if isinstance(values[0], float):
        floats = [struct.pack("<f", value) for value in values]
        return _block(2, _block(1, b"".join(floats)) if packed else b"".join(b"\x0d" + value for value in floats))
    ints = [_varint(value) for value in values]
    return _block(3, _block(1, b"".join(ints)) if packed else b"".join(b"\x08" + value for value in ints))


def _example(features: dict[str, Any], packed: bool = True) -> bytes:
    entries = (_block(1, name.encode()) + _block(2, _feature(values, packed)) for name, values in features.items())
    return _block(1, b"".join(_block(1, entry) for entry in entries))


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def _frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _write(path: Path, *records: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(_frame, records)))
    return path


def _load_first(source: TFRecordSource) -> Item:
    return source.load(source.list().samples[0])


def _read(features: dict[str, Any]) -> Item:
    return read_example(_example(features), "a.tfrec#0")


def test_the_checksum_is_the_one_of_the_format() -> None:
    # A record of TensorFlow's own making: b"" and its framing.
    assert _frame(b"") == bytes.fromhex("000000000000000029039807d8ea82a2")


def test_records_are_listed_file_by_file_and_loaded(tmp_path: Path) -> None:
    for name, labels in (("b.tfrec", (2, 3)), ("a.tfrec", (0, 1)), ("empty.tfrec", ()), ("c.tfrec", (4,))):
        _write(tmp_path / name, *(_example({"image": [JPEG + bytes([label])], "label": [label]}) for label in labels))
    source = open_source(tmp_path / "*.tfrec")
    listing = source.list()
    names = ["a.tfrec#0", "a.tfrec#1", "b.tfrec#0", "b.tfrec#1", "c.tfrec#0"]
    assert [sample.path for sample in listing.samples] == names
    assert [sample.number for sample in listing.samples] == [0, 1, 2, 3, 4]
    size = len(_example({"image": [JPEG + b"0"], "label": [3]}))
    assert {(sample.label, sample.bytes) for sample in listing.samples if sample.path != names[0]} == {(None, size)}
    source = pickle.loads(pickle.dumps(source))
    for number in (4, 0, 3, 2, 1):
        item = source.load(listing.samples[number])
        assert item == Item({"image": JPEG + bytes([number])}, number)


def test_a_pattern_over_folders_tells_files_of_one_name_apart(tmp_path: Path) -> None:
    for folder in "ba":
        _write(tmp_path / folder / "x.tfrec", _example({"id": [folder.encode()], "ids": [1, 2]}))
    source = TFRecordSource(tmp_path / "*" / "x.tfrec")
    samples = source.list().samples
    assert [sample.path for sample in samples] == ["a/x.tfrec#0", "b/x.tfrec#0"]
    assert [source.load(sample).columns for sample in samples] == [{"id": "a"}, {"id": "b"}]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("*.tfrecords", "matches no file"), ("*.csv", r"b\.csv is not called"), ("*.tfrec", "holds no records")],
)
def test_a_pattern_without_records_is_refused(tmp_path: Path, pattern: str, reason: str) -> None:
    _write(tmp_path / "a.tfrec")
    (tmp_path / "b.csv").write_text("path\n")
    with pytest.raises(SourceError, match=reason):
        open_source(tmp_path / pattern).list()


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.tfrec", _example({"image": [JPEG]}))
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(SourceError, match=r"a\.tfrec, offset 0: .* decompress a compressed one"):
        TFRecordSource(path).list()
    with pytest.raises(SourceError, match="decompress"):
        open_source(path.rename(tmp_path / "a.tfrec.gz")).list()


def test_a_file_cut_off_anywhere_is_refused_with_the_offset_of_the_record(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.tfrec", b"one", b"two..")
    whole = path.read_bytes()
    second = len(_frame(b"one"))
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length == second:
            continue
        with pytest.raises(SourceError, match=rf"a\.tfrec, offset {second if length > second else 0}: .* cut off"):
            TFRecordSource(path).list()


def test_a_flipped_bit_is_found_in_the_lengths_by_listing_and_in_the_data_by_loading(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.tfrec", _example({"ids": [1, 2]}), _example({"ids": [3, 4]}))
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
    path = _write(tmp_path / "a.tfrec", b"", b"")
    source = TFRecordSource(path)
    last = source.list().samples[1]
    _write(path, b"")
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
    packed=st.booleans(),
)
def test_numbers_come_back_however_they_are_packed(ints: list[int], floats: list[float], packed: bool) -> None:
    item = read_example(_example({"ints": ints, "floats": floats}, packed), "a#0")
    arrays: Any = item.fields
    assert list(arrays) == ["floats", "ints"]
    assert arrays["ints"].tolist() == ints
    assert arrays["ints"].dtype == np.int64
    assert arrays["floats"].tolist() == floats
    assert arrays["floats"].dtype == np.float32


@pytest.mark.parametrize("name", ["image", "image_raw", "image/encoded"])
def test_the_image_is_the_feature_called_so(name: str) -> None:
    assert _read({"aaa": [b"text"], name: [b"whatever"], "zzz": [b"more"]}).fields == {"image": b"whatever"}


@pytest.mark.parametrize(
    "start", [JPEG, PNG, b"GIF89a", b"BM\1\2\3\4\0\0\0\0", b"II*\0", b"MM\0*", b"RIFF\1\2\3\4WEBP"], ids=ascii
)
def test_the_only_feature_that_begins_as_an_image_is_the_image(start: bytes) -> None:
    item = _read({"a": [b"BMX is text"], "photo": [start + b"..."], "mask": [PNG]})
    assert item.fields == {"image": start + b"...", "mask": PNG}
    assert item.columns == {"a": "BMX is text"}


@pytest.mark.parametrize(
    ("features", "label"),
    [
        ({"label": [3]}, 3),
        ({"class": [4], "label": [3]}, 4),
        ({"class": [b"cat"], "target": [5]}, 5),
        ({"image/class/label": [-1]}, -1),
        ({"label": [0.5]}, (0.5,)),
        ({"label": [0.5, 1.5]}, (0.5, 1.5)),
        ({"label": [0, 1, 1]}, (0.0, 1.0, 1.0)),
        ({}, None),
    ],
    ids=str,
)
def test_the_label_is_the_first_numeric_feature_called_so(features: dict[str, Any], label: Any) -> None:
    found = _read({"image": [JPEG], **features}).label
    assert found == label
    assert type(found) is type(label)


def test_single_values_are_columns_with_plain_names_and_empty_features_nothing() -> None:
    item = _read(
        {"image": [JPEG], "image/class/text": ["é".encode()], "width": [7], "score": [0.5], "none": [], "path": [b"p"]}
    )
    assert item.columns == {"image_class_text": "é", "path_": "p", "score": 0.5, "width": 7}
    assert item.fields == {"image": JPEG}


def test_arrays_have_names_that_a_record_can_have() -> None:
    item = _read(
        {"image": [JPEG], "image/object/ids": [5, 6], "Boxes": [1, 2], "2d": [3, 4], "a_b": [1, 2], "a/b": [7, 8]}
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
        ({"a": [JPEG], "b": [PNG]}, "several images, a, b"),
        ({"id": [b"x"], "width": [1]}, "no image and no array among its features id, width"),
        ({"image": [JPEG], "sound": [b"\xff\x00"]}, "'sound' is not UTF-8"),
        ({"image": [JPEG], "tags": [b"a", b"b"]}, "'tags' has 2 values"),
        ({"image": [JPEG, JPEG]}, "'image' has 2 values"),
        ({"image": [1, 2], "photo": [JPEG]}, "an image in feature 'photo', and numbers"),
    ],
    ids=str,
)
def test_features_that_cannot_be_kept_are_a_sample_error(features: dict[str, Any], reason: str) -> None:
    with pytest.raises(SampleError, match=reason) as caught:
        _read(features)
    assert caught.value.path == "a.tfrec#0"


def test_feature_lists_of_a_sequence_example_are_not_lost_without_a_word() -> None:
    features = _block(1, _feature([1, 2])) + _block(1, _feature([3, 4]))
    lists = _block(1, _block(1, b"image/caption_ids") + _block(2, features))
    data = _example({"image/data": [JPEG], "image/image_id": [7]}) + _block(2, lists)
    with pytest.raises(SampleError, match=r"feature lists .* 'image/caption_ids': .* --drop 'image/caption_ids'"):
        read_example(data, "a.tfrec#0")
    for options in (TableOptions(drop=("image/caption*",)), TableOptions(keep=("image/image_id",))):
        assert read_example(data, "a.tfrec#0", options) == Item({"image": JPEG}, None, {"image_image_id": 7})


def test_several_label_features_name_the_values_of_a_label(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    records = [_example({"image": [file.getvalue()], "a": [number + 0.5], "b": [number]}) for number in range(4)]
    path, names = _write(tmp_path / "a.tfrec", *records[:3]), ("b", "a")
    options = TableOptions(label_cols=names)
    assert build_here(open_source(path, options), tmp_path / "cache").value_names == names
    other = open_source(_write(path, *records), TableOptions(label_cols=names[::-1]))
    with pytest.raises(SourceError, match="are the columns b, a, not a, b: give --label-col b --label-col a"):
        build_here(other, tmp_path / "cache")


def test_an_empty_label_is_a_sample_error() -> None:
    empty = _block(1, _block(1, _block(1, b"label") + _block(2, _block(3, b""))))
    with pytest.raises(SampleError, match="'label' is empty"):
        read_example(_example({"image": [JPEG]}) + empty, "a#0")


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(data=st.binary(max_size=60))
def test_data_that_is_no_example_is_a_sample_error(data: bytes) -> None:
    with pytest.raises(SampleError):
        read_example(data, "a#0")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("sys.modules['google_crc32c'] = None", "`pip install google-crc32c`"),
        ("sys.modules['google.protobuf'] = None", "`pip install --upgrade protobuf`"),
        ("import google.protobuf as p; p.__version__ = '4.24.4'", "protobuf 4.24.4 is too old"),
    ],
)
def test_a_library_that_is_missing_or_crashes_is_reported(tmp_path: Path, change: str, reason: str) -> None:
    path = _write(tmp_path / "a.tfrec", _example({"image": [JPEG]}))
    code = f"import sys; {change}; from tpucache.warmup.sources import open_source as o; o({str(path)!r}).list()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert "DependencyError" in found.stderr
    assert reason in found.stderr
