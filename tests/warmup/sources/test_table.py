"""The table source: what labels its columns make, which columns are kept, and what a row loads."""

from __future__ import annotations

import dataclasses
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import write_rows
from work import package_lines

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.warmup.sources import TableOptions, TableSource, label_source, open_source
from tpucache.warmup.sources.columns import in_order, to_number
from tpucache.warmup.sources.source import Item, Listing, column_names, unique


def _write(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def _list(folder: Path, text: str, **options: Any) -> Listing:
    return label_source(TableSource(_write(folder, text), TableOptions(**options)), "auto").list()


def _labels(listing: Listing) -> list[Any]:
    return [sample.label for sample in listing.samples]


def _column(listing: Listing, name: str) -> list[Any]:
    column = listing.columns[name]
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def test_names_in_one_cell_are_classes_at_once_and_an_empty_cell_is_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "2.jpg").write_bytes(b"image")
    options = TableOptions(label_cols=("y",), label_sep=" ")
    source = label_source(TableSource(_write(tmp_path, "path,y\n1.jpg,dog  cat\n2.jpg,\n3.jpg,emu\n"), options), "auto")
    listing = source.list()
    assert source.load(listing.samples[1]) == Item({"image": b"image"})
    assert listing.classes == ("cat", "dog", "emu")
    assert _labels(listing) == [(1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 1.0)]


def test_text_among_several_columns_of_numbers_is_a_fault_of_its_sample_with_its_line(tmp_path: Path) -> None:
    listing = _list(tmp_path, 'path,a,b\n"1\n1.jpg",1,2\n2.jpg,0,x\n', label_cols=("a", "b"))
    assert [sample.label for sample in listing.samples] == [(1.0, 2.0), None]
    assert "line 4, column 'b': 'x' is not a number" in listing.samples[1].fault


@pytest.mark.parametrize(
    ("header", "options", "expected"),
    [
        ("image_id,path,x", {}, "b"),
        ("x,Image_ID,y", {}, "b"),
        ("x,y,z", {}, "a"),
        (",y,z", {}, "b"),
        ("Unnamed: 0,y,z", {}, "b"),
        ("id,image_name,z", {}, "b"),
        ("id,image,x", {"label_cols": ("image",)}, "a"),
        ("path,z,y", {"path_col": "y"}, "c"),
        ("id,z,y", {"fold_col": "id"}, None),
    ],
    ids=str,
)
def test_the_column_of_paths_is_the_one_called_so_or_the_first(
    tmp_path: Path, header: str, options: Any, expected: str | None
) -> None:
    cells = "a,b,c" if expected else "0,b,c"
    assert _list(tmp_path, f"{header}\n{cells}\n", **options).samples[0].path == (expected or "b")


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("", {}, "no rows"),
        ("path,y\n", {}, "no rows"),
        ("path,y,y\n1,2,3\n", {}, "more than one column 'y'"),
        ("path,y\n1.jpg,2\n\n3.jpg\n", {}, "line 4: the line has 1 cells, the first line 2"),
        ("path,y\n1.jpg,2,3\n", {}, "line 2: the line has 3 cells, the first line 2"),
        ('path,y\n"1.jpg,2\n3.jpg,4\n', {}, "line 2: unexpected end of data"),
        ("name;y\n1.jpg;2\n", {}, "no column 'y': there are 'name;y'"),
        ("path,z\n1.jpg,2\n", {}, "no column 'y': there are 'path', 'z'"),
        ("path,y,b\n1.jpg,1,NA\n2.jpg,2,nan\n", {"label_cols": ("y", "b")}, "no number in any row of column 'b'"),
        ("path,y,b\n1.jpg,1,NA\n2.jpg,,2\n", {"label_cols": ("y", "b")}, "no row with a number in each of .* y, b"),
        (
            "path,y\n1.jpg,\"['a', 'b']\"\n2.jpg,['b']\n",
            {"label_sep": ","},
            "is a list of Python: write the names alone",
        ),
        *(
            (f"path,y,f\n1,a,0\n2,b,{cell}\n", {"fold_col": "f"}, "column 'f': .* a fold must be a whole number from 0")
            for cell in ("", "-2", "0.5", "a", "nan", "99999999999999999999")
        ),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, options: Any, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        _list(tmp_path, text, **{"label_cols": ("y",), **options})


def test_a_table_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("path\ncafé.jpg\n".encode("latin-1"))
    with pytest.raises(SourceError, match="not UTF-8"):
        TableSource(path).list()


def test_a_byte_order_mark_line_ends_of_windows_and_empty_lines_count_for_nothing(tmp_path: Path) -> None:
    listing = _list(tmp_path, "\ufeffy,path\r\n\r\n1,a.jpg\r\n\r\n0,b.jpg\r\n", label_cols=("y",))
    assert [sample.path for sample in listing.samples] == ["a.jpg", "b.jpg"]
    assert _labels(listing) == [1, 0]


def test_a_row_lists_its_files_sizes_and_loads_them(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.jpg").write_bytes(b"image")
    (tmp_path / "images" / "1.png").write_bytes(b"mask!!")
    options = TableOptions(suffix=".jpg", root=tmp_path / "images", mask_col="mask")
    source = TableSource(_write(tmp_path, "id,mask\n1,1.png\n2,2.png\n"), options)
    first, second = source.list().samples
    assert [(each.path, each.bytes) for each in (first, second)] == [("1.jpg", 11), ("2.jpg", 0)]
    assert source.load(first) == Item({"image": b"image", "mask": b"mask!!"})
    with pytest.raises(SampleError, match=r"'2\.jpg': cannot be read: No such file") as caught:
        source.load(second)
    place = tmp_path / "images" / "2.jpg"
    assert str(caught.value).endswith(f"(looked for {place})")
    assert str(place) not in caught.value.reason  # which caches keep
    (tmp_path / "images" / "2.PNG").write_bytes(b"other")
    with pytest.raises(SampleError, match=r"2\.PNG is there: did you mean that\? Then correct the paths"):
        source.load(second)


def test_a_mask_that_is_missing_is_reported_from_its_image(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"image")
    source = TableSource(_write(tmp_path, "path,mask\n1.jpg,m.png\n"), TableOptions(mask_col="mask"))
    with pytest.raises(SampleError, match=r"'1\.jpg': its mask 'm\.png' cannot be read"):
        source.load(source.list().samples[0])


def test_paths_may_be_absolute_or_lead_out_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "1.jpg").write_bytes(b"one")
    source = TableSource(_write(tmp_path / "tables", f"path\n{tmp_path / '1.jpg'}\n../1.jpg\n"))
    assert [source.load(sample).fields["image"] for sample in source.list().samples] == [b"one", b"one"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (",1,m.png", "has no path in column 'path'"),
        ("1.jpg,,m.png", "has no label in column 'y'"),
        ("1.jpg,1, ", "has no mask in column 'mask'"),
    ],
)
def test_a_row_that_lacks_something_is_listed_and_does_not_load(tmp_path: Path, row: str, reason: str) -> None:
    for name in ("1.jpg", "m.png"):
        (tmp_path / name).write_bytes(b"there")
    options = TableOptions(label_cols=("y",), mask_col="mask", path_col="path")
    source = TableSource(_write(tmp_path, f"path,y,mask\n1.jpg,0,m.png\n{row}\n"), options)
    good, bad = source.list().samples
    assert source.load(good).fields == {"image": b"there", "mask": b"there"}
    with pytest.raises(SampleError) as caught:
        source.load(bad)
    assert caught.value.reason == reason
    assert caught.value.path == bad.path != ""


def test_rows_of_one_path_are_several_samples_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "a#2").write_bytes(b"a#2")
    source = TableSource(_write(tmp_path, "path\na\na#2\na\na#2\n"))
    samples = source.list().samples
    assert len({sample.path for sample in samples}) == 4
    assert [source.load(sample).fields["image"] for sample in samples] == [b"a", b"a#2", b"a", b"a#2"]


def test_a_source_pickles_small_and_a_worker_needs_no_table(tmp_path: Path) -> None:
    (tmp_path / "17").write_bytes(b"image")
    rows = "".join(f"{number},17\n" for number in range(5000))
    source = TableSource(_write(tmp_path, "path,mask\n" + rows), TableOptions(mask_col="mask"))
    samples = source.list().samples
    data = pickle.dumps(source)
    assert len(data) < 2000
    (tmp_path / "table.csv").unlink()
    found = pickle.loads(data).load(dataclasses.replace(samples[17], number=0))
    assert found.fields == {"image": b"image", "mask": b"image"}


def test_other_columns_are_kept_as_numbers_where_nothing_is_lost(tmp_path: Path) -> None:
    listing = _list(
        tmp_path,
        "path,whole,real,text,big,code,gap,wide\n"
        "1,1,0.5,x,9007199254740993,007,1,18446744073709551617\n"
        "2,-3,2,,2,008,,2\n",
    )
    dtypes = {name: column.dtype for name, column in listing.columns.items() if isinstance(column, np.ndarray)}
    assert dtypes == {"whole": np.int64, "real": np.float64, "big": np.int64, "gap": np.float64}
    assert _column(listing, "whole") == [1, -3]
    assert _column(listing, "big") == [9007199254740993, 2]
    assert _column(listing, "text") == ["x", ""]
    assert _column(listing, "code") == ["007", "008"]
    np.testing.assert_equal(_column(listing, "gap"), [1, np.nan])  # as in parquet
    assert _column(listing, "wide") == ["18446744073709551617", "2"]


def test_columns_with_a_meaning_are_not_kept_again_and_the_fold_is(tmp_path: Path) -> None:
    text = "path,y,mask,kfold,fold,number,x y,x/y\n1,a,m,3,z,5,p,q\n2,b,m,0,z,6,p,q\n"
    listing = _list(tmp_path, text, label_cols=("y",), mask_col="mask", fold_col="kfold")
    assert list(listing.columns) == ["fold", "fold_", "number_", "x_y", "x_y_"]
    assert _column(listing, "fold") == [3, 0]
    assert isinstance(listing.columns["fold"], np.ndarray)
    assert listing.columns["fold"].dtype == np.int64


@pytest.mark.parametrize(
    "options",
    [
        {"label_cols": "label"},
        {"label_cols": ("a", "a")},
        {"label_sep": ","},
        {"label_cols": ("a", "b"), "label_sep": ","},
        {"label_cols": ("a",), "label_sep": ""},
        {"rle_class_col": "c"},
        {"rle_relative": True},
        {"rle_order": "rows"},
        {"rle_cols": ("a", "b"), "rle_class_col": "c"},
        {"rle_cols": ("a",), "mask_col": "m"},
    ],
    ids=str,
)
def test_options_that_cannot_be_meant_are_refused(options: Any) -> None:
    with pytest.raises(UsageError):
        TableOptions(**options)


def test_a_path_to_a_csv_file_is_accepted_wherever_a_table_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "path,y\n1.jpg,a\n", "Train.CSV")
    (tmp_path / "1.jpg").write_bytes(b"image")
    monkeypatch.chdir(tmp_path)
    source = open_source("Train.CSV", TableOptions(label_cols=("y",)))
    monkeypatch.chdir("/")
    (sample,) = source.list().samples
    assert sample.label == "a"
    assert source.load(sample) == Item({"image": b"image"})


def test_the_work_of_listing_grows_with_the_columns_and_not_with_their_square(tmp_path: Path) -> None:
    counts = []
    for columns in (1, 200, 400):  # the first counts what is loaded when it is first used, too
        names = [f"c{number}" for number in range(columns)]
        with package_lines() as lines:
            _list(tmp_path, f"path,{','.join(names)}\n" + "".join(f"{row}.jpg{',1' * columns}\n" for row in range(9)))
        counts.append(len(lines))
    assert counts[2] <= 2 * counts[1]


@pytest.mark.slow
@given(names=st.lists(st.sampled_from(["a", "b", "a#2", "a#2#2", "a#3", "b#2"]), max_size=12))
def test_names_become_unique_and_the_first_of_each_stays_unless_it_is_taken(names: list[str]) -> None:
    result = unique(names)
    assert len(set(result)) == len(result) == len(names)
    assert all(own == name or own.startswith(f"{name}#") for own, name in zip(result, names, strict=True))
    assert result[:1] == names[:1]


@pytest.mark.slow
@given(names=st.lists(st.text(max_size=6), unique=True, max_size=8))
def test_columns_get_plain_names_all_different(names: list[str]) -> None:
    safe = column_names(names)
    assert list(safe) == names
    assert len(set(safe.values())) == len(names)
    for name in safe.values():
        assert name
        assert name.isascii()
        assert name.replace("_", "").replace("-", "").isalnum() or not name.strip("_-")
        assert name not in ("number", "path", "label", "source_bytes", "fold")


@pytest.mark.parametrize(
    ("header", "options", "labels"),
    [
        ("path,Label,age", {}, [0, 1]),
        ("path,species", {}, [0, 1]),
        ("path,age,label", {"keep": ("label",)}, None),
        ("path,age,label", {"drop": ("lab*",)}, None),
        ("path,class,label", {}, [0, 1]),  # as in parquet, the first in the order of their names
        ("path,labelled", {}, None),
        ("label", {}, None),  # the paths themselves
    ],
)
def test_a_column_that_is_called_so_is_the_label_and_that_is_said(
    header: str, options: dict[str, Any], labels: list[int] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = header.split(",")
    rows = [",".join([f"{letter}.png", *[letter] * (len(names) - 1)]) for letter in "ab"]
    write_rows(tmp_path / "t.csv", header, *rows)
    listing = label_source(TableSource(tmp_path / "t.csv", TableOptions(**options)), "auto").list()
    assert [sample.label for sample in listing.samples] == [*(labels or (None, None))]
    assert ("using the labels in column" in caplog.text) is (labels is not None)


def test_a_column_of_labels_without_any_is_none(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,label\na.png,\nb.png,\n")
    assert [sample.label for sample in TableSource(tmp_path / "t.csv").list().samples] == [None, None]


def test_rows_that_name_an_image_again_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listing = _list(tmp_path, "path,y\n1.jpg,a\n2.jpg,b\n1.jpg,b\n", label_cols=("y",))
    assert "1 rows name an image again, such as '1.jpg' in the lines 2 and 4" in caplog.text
    assert [sample.path for sample in listing.samples] == ["1.jpg", "2.jpg", "1.jpg#2"]


@pytest.mark.parametrize("flag", ["keep", "drop"])
def test_a_pattern_of_columns_that_matches_none_is_told_of(
    flag: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _list(tmp_path, "path,age\n1.jpg,3\n", **{flag: ("agee", "a*")})
    assert f"--{flag} agee matches no column: there are 'path', 'age'" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("header", ["1.png,cat", "1,cat", "gone.png,cat"])
@pytest.mark.parametrize("is_zip", [False, True])
def test_a_table_whose_first_line_is_a_sample_is_refused(tmp_path: Path, header: str, is_zip: bool) -> None:
    (tmp_path / "1.png").write_bytes(b"")
    path = _write(tmp_path, f"{header}\n2.png,dog\n")
    if is_zip:
        with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
            for name in ("1.png", "table.csv"):
                archive.write(tmp_path / name, name)
        path = tmp_path / "t.zip" / "table.csv"
    suffix = "" if "." in header else ".png"
    with pytest.raises(SourceError, match=r"the first line must name the columns, but has '(1|gone).png'"):
        TableSource(path, TableOptions(suffix=suffix)).list()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9007199254740993.0", 9007199254740993),
        (" 9007199254740993. ", 9007199254740993),
        ("3.719633943371581e+16", int(3.719633943371581e16)),
        ("-9007199254740993.00", -9007199254740993),
        ("9007199254740993", 9007199254740993),
        ("1e22", 10**22),
        ("2.0", 2),
    ],
)
def test_a_whole_number_is_exact_however_it_is_written(text: str, number: int) -> None:
    assert (to_number(text), type(to_number(text))) == (number, int)


def test_a_number_between_whole_ones_that_float64_does_not_hold_is_no_whole_number() -> None:
    assert type(to_number("9007199254740993.5")) is float


def test_names_are_in_the_order_of_their_numbers_if_all_are_numbers() -> None:
    assert in_order(["10", "9", "1.5", "-1"]) == ("-1", "1.5", "9", "10")
    assert in_order(["10", "9", "a"]) == ("10", "9", "a")
    assert in_order(["10", "9", "007"]) == ("007", "10", "9")
    assert in_order(["10", "9", "nan"]) == ("10", "9", "nan")
    assert in_order([]) == ()
