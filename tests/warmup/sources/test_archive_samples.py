"""Files grouped by key, written by WebDataset itself."""

from __future__ import annotations

import numpy as np
import pytest
from made import build_here, tar_of, write

from tpucache.errors import SampleError, SourceError
from tpucache.warmup.sources import TableOptions, label_source, open_source

pytestmark = pytest.mark.usefixtures("short_runs")

webdataset = pytest.importorskip("webdataset")


def _write(path, samples):
    with webdataset.TarWriter(str(path)) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:04d}", **sample})
    return path


def _tar(folder, *names):
    return open_source(write(folder / "a.tar", tar_of(dict.fromkeys(names, b"1"))))


def _pixels(number):
    return np.full((9, 12, 3), number * 10, np.uint8)


def test_images_with_class_numbers_columns_and_masks(tmp_path):
    samples = [
        {
            "png": _pixels(n),
            "cls": n % 3 + 1,
            "json": {"id": f"a{n}", "age": n / 2, "tags": ["x"]},
            "mask.png": _pixels(n)[..., 0],
        }
        for n in range(6)
    ]
    source = open_source(_write(tmp_path / "a.tar", samples))
    listing = source.list()
    assert [(sample.path, sample.label) for sample in listing.samples] == [
        (f"{n:04d}.png", n % 3 + 1) for n in range(6)
    ]
    assert listing.classes == ()
    assert listing.columns["id"] == [f"a{n}" for n in range(6)]
    assert listing.columns["age"].tolist() == [n / 2 for n in range(6)]
    assert "tags" not in listing.columns  # of which a warning tells
    assert set(source.load(listing.samples[2]).fields) == {"image", "mask"}


@pytest.mark.parametrize("label", ["cls", "json"])
def test_a_cls_file_wins_over_a_key_of_json_in_any_order(tmp_path, label):
    other = "json" if label == "cls" else "cls"
    content = {"cls": b"2", "json": b'{"cls": 7}'}
    source = open_source(
        _write(tmp_path / "a.tar", [{"png": _pixels(1), label: content[label], other: content[other]}])
    )
    assert source.list().samples[0].label == 2


def test_a_byte_order_mark_is_no_part_of_a_label(tmp_path):
    samples = [{"png": _pixels(n), "cls": f"\ufeff{n}\r\n".encode()} for n in (2, 10)]
    source = open_source(_write(tmp_path / "a.tar", samples))
    assert [sample.label for sample in source.list().samples] == [2, 10]


def test_labels_in_json_and_captions(tmp_path):
    names = ["cat", "dog", "cat"]
    path = _write(
        tmp_path / "a.tar",
        [{"png": _pixels(n), "json": {"kind": k, "n": n}, "txt": f"a {k}"} for n, k in enumerate(names)],
    )
    listing = label_source(open_source(path, TableOptions(label_cols=("kind",))), "auto").list()
    assert listing.classes == ("cat", "dog")
    assert [sample.label for sample in listing.samples] == [0, 1, 0]
    assert listing.columns["txt"] == ["a cat", "a dog", "a cat"]
    path = _write(tmp_path / "b.tar", [{"png": _pixels(n), "json": {"x": n % 2, "y": 1}} for n in range(3)])
    several = label_source(open_source(path, TableOptions(label_cols=("x", "y"))), "auto").list()
    assert [sample.label for sample in several.samples] == [(0, 1), (1, 1), (0, 1)]
    assert several.classes == several.value_names == ("x", "y")
    with pytest.raises(SourceError, match="no column 'none': there are 'x', 'y'"):
        open_source(path, TableOptions(label_cols=("none",))).list()


def test_boxes_of_yolo_are_told_of_and_a_text_alone_is_no_sample(tmp_path, caplog):
    files = {
        "1.png": b"1",
        "1.txt": b"0 0.5 0.5 1 1\n2 .1 .2 .3 .4\n",
        "2.png": b"2",
        "2.txt": b"",
        "classes.txt": b"x",
    }
    listing = open_source(write(tmp_path / "a.tar", tar_of(files))).list()
    assert ([sample.path for sample in listing.samples], listing.left_out) == (["1.png", "2.png"], {".txt": 1})
    assert "boxes in .txt files, as of YOLO, are kept as text" in caplog.text


def test_arrays_are_fields_and_other_files_are_left_out(tmp_path):
    path = _write(tmp_path / "a.tar", [{"features.npy": np.arange(4) + n, "cls": n, "pyd": {"a": 1}} for n in range(2)])
    source = open_source(path, TableOptions(label_cols=("cls",)))
    listing = source.list()
    assert listing.left_out == {".pyd": 2}
    assert source.load(listing.samples[1]).fields["features"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"0.cls": b"1"}, "no image"),
        ({"0.png": b"x", "0.json": b"{"}, "its .json cannot be read"),
        ({"0.png": b"x", "0.json": b"[1]"}, "is a list"),
        ({"0.png": b"x", "0.json": b'{"label": 1, "label": 2}'}, "the key 'label' is there twice"),
        ({"0.png": b"x", "0.jpg": b"x"}, "more than one image"),
        ({"0.png": b"x", "0.cls": b"\xff"}, "its .cls cannot be read"),
        ({"0.a.npy": b"\x93NUMPY\x01\x00v\x00"}, "its .npy cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_group_that_cannot_be_used_is_a_sample_that_does_not_load(tmp_path, files, reason):
    source = open_source(write(tmp_path / "a.tar", tar_of({"1.png": b"image", "1.cls": b"0", **files})))
    good, bad = source.list().samples
    assert source.load(good).fields == {"image": b"image"}
    with pytest.raises(SampleError, match=reason):
        source.load(bad)


def test_a_sample_without_the_label_that_others_have_is_refused(tmp_path):
    path = _write(tmp_path / "a.tar", [{"png": _pixels(1), "cls": 1}, {"png": _pixels(2)}])
    with pytest.raises(SampleError, match=r"0001.*no label, as other samples have"):
        build_here(path, tmp_path / "cache")
    manifest = build_here(path, tmp_path / "cache", on_error="skip")
    assert (manifest.samples, len(manifest.skipped)) == (1, 1)


def test_json_beside_images_of_class_folders_is_no_group(tmp_path):
    listing = _tar(tmp_path, "cat/1.png", "cat/1.json", "dog/2.png").list()
    assert listing.classes == ("cat", "dog")
    assert listing.left_out == {".json": 1}


def test_a_label_whose_name_has_a_dot_before_the_suffix_is_refused_with_the_reason(tmp_path):
    names = ["a.1.png", "a.1.cls", "a.2.png", "a.2.cls"]
    keys = {webdataset.tariterators.base_plus_ext(name)[0] for name in names}
    assert keys == {"a"}  # WebDataset would not tell them apart, either
    with pytest.raises(
        SourceError, match=r"'a.1.cls' is not the label of 'a.1.png': .* ends at the first dot, here 'a'"
    ):
        _tar(tmp_path, *names).list()
    with pytest.raises(SourceError, match="Rename the files"):
        _tar(tmp_path, "cat/a.1.png", "cat/a.1.cls").list()


def test_images_whose_names_have_dots_are_samples_of_their_own_without_labels(tmp_path):
    source = _tar(tmp_path, "cat/a.1.png", "cat/a.2.png", "dog/b.png")
    assert [sample.path for sample in source.list().samples] == ["cat/a.1.png", "cat/a.2.png", "dog/b.png"]
    listing = _tar(tmp_path, "a.png", "a.fine.cls", "a.cls").list()
    assert ([sample.label for sample in listing.samples], listing.left_out) == ([1], {".fine.cls": 1})


def test_two_files_of_a_sample_whose_suffixes_differ_only_by_large_letters_are_refused(tmp_path):
    with pytest.raises(SourceError, match=r"'0.png' and '0.PNG' are the same file of a sample"):
        _tar(tmp_path, "0.png", "0.PNG", "0.cls").list()
