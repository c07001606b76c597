"""The samples table keeps every column, makes equal bytes of equal columns, and trusts no file."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from written import npy

from tpucache.errors import DamageError, FormatError, StoreError
from tpucache.store.samples import Column, SampleTable, Strings, check_labels, encode_columns

QUICK = settings(max_examples=40)
#: What os.fsdecode gives: text, and bytes that are not UTF-8 as lone surrogates DC80-DCFF.
NAMES = st.one_of(
    st.binary(max_size=12).map(lambda data: data.decode("utf-8", "surrogateescape")),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["", "\n", "a\nb", "\0", "…/é.png", "\udcff", "名前", "\U0001f40d", "a,b\t\"c'"]),
)
DTYPES = st.sampled_from(["|b1", "|i1", "|u1", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8"])

Save = Callable[..., SampleTable]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples") / "samples.npz"


@pytest.fixture
def saved(path: Path) -> Save:
    """The function `saved(data, samples)`: the table that a file of these bytes opens as."""

    def save(data: bytes, samples: int) -> SampleTable:
        path.write_bytes(data)
        return SampleTable(path, samples)

    return save


def archive(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return target.getvalue()


def table() -> dict[str, Column]:
    return {
        "number": np.array([0, 3, 2**63], np.uint64),
        "path": Strings.pack(["a.png", "b\udcff.png", ""]),
        "label": np.array([[0, 1.5], [2, -1], [3, 4]], np.float32),
    }


@QUICK
@given(st.lists(NAMES, max_size=12))
def test_strings_come_back_as_they_went(items: list[str]) -> None:
    packed = Strings.pack(items)
    assert len(packed) == len(items)
    assert list(packed) == items
    assert [packed[at] for at in range(-len(items), 0)] == items


@pytest.mark.parametrize("index", [3, -4, 100])
def test_strings_have_ends(index: int) -> None:
    with pytest.raises(IndexError):
        Strings.pack(["a", "b", "c"])[index]


@pytest.mark.slow
@QUICK
@given(st.data())
def test_a_table_comes_back_as_it_went(path: Path, data: st.DataObject) -> None:
    samples = data.draw(st.integers(0, 6))
    shapes = st.sampled_from([(samples,), (samples, 1), (samples, 3)])
    arrays = st.tuples(DTYPES, shapes).flatmap(lambda pair: hnp.arrays(np.dtype(pair[0]), pair[1]))
    columns: dict[str, Column] = {
        "number": np.arange(samples, dtype=np.uint64) * 3,
        "path": Strings.pack(data.draw(st.lists(NAMES, min_size=samples, max_size=samples))),
        **data.draw(st.dictionaries(st.sampled_from(["score", "fold", "_x", "Größe", "a b"]), arrays)),
    }
    path.write_bytes(encode_columns(columns))
    found = SampleTable(path, samples)
    assert list(found) == list(columns)
    assert len(found) == len(columns)
    assert list(found.paths) == list(columns["path"])
    for name, column in columns.items():
        if not isinstance(column, Strings):
            assert found[name].dtype == column.dtype
            assert found[name].shape == column.shape
            assert found[name].tobytes() == column.tobytes()


def test_equal_columns_make_equal_bytes() -> None:
    assert encode_columns(table()) == encode_columns(table())


def test_numpy_alone_reads_the_table() -> None:
    with np.load(io.BytesIO(encode_columns(table())), allow_pickle=False) as plain:
        assert plain["number"].tolist() == [0, 3, 2**63]
        assert plain["path.bytes"].tobytes() == b"a.pngb\xff.png"
        assert plain["path.ends"].tolist() == [5, 11, 11]


def test_a_column_that_is_not_there_is_a_key_error(saved: Save) -> None:
    found = saved(encode_columns(table()), 3)
    assert "fold" not in found
    with pytest.raises(KeyError):
        found["fold"]


def test_a_pickled_table_reads_the_file_again(saved: Save) -> None:
    columns: dict[str, Column] = {"number": np.arange(100_000, dtype=np.uint64)}
    found = saved(encode_columns(columns), 100_000)
    assert len(found.numbers) == 100_000
    pickled = pickle.dumps(found)
    assert len(pickled) < 2000
    assert len(pickle.loads(pickled).numbers) == 100_000


def test_columns_are_read_when_they_are_asked_for(saved: Save) -> None:
    columns = table()
    found = saved(archive({"number.npy": npy(columns["number"]), "label.npy": b"damaged"}), 3)
    assert found.numbers.tolist() == [0, 3, 2**63]
    with pytest.raises(StoreError):
        found["label"]


def test_a_compressed_table_is_refused(saved: Save) -> None:
    with pytest.raises(FormatError, match="compressed"):
        saved(archive({"number.npy": npy(np.zeros(3))}, zipfile.ZIP_DEFLATED), 3)


class Bomb:
    """Unpickling one fails the test."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return pytest.fail, ("a pickle was loaded",)


def test_a_missing_table_says_so(tmp_path: Path) -> None:
    with pytest.raises(DamageError, match=r"samples\.npz is missing"):
        SampleTable(tmp_path / "samples.npz", 3)


def test_a_table_cut_short_anywhere_is_damage(saved: Save) -> None:
    data = encode_columns(table())
    for length in range(0, len(data), 7):
        with pytest.raises(DamageError, match=r"samples\.npz"):
            saved(data[:length], 3)


def test_a_flipped_bit_of_a_columns_values_is_damage(saved: Save) -> None:
    column = np.full(50, 7, np.uint64)
    data = encode_columns({"number": column})
    at = data.index(column.tobytes())
    for byte in range(at, at + column.nbytes, 9):
        flipped = data[:byte] + bytes([data[byte] ^ 1]) + data[byte + 1 :]
        with pytest.raises(DamageError, match="'number' cannot be read"):
            saved(flipped, 50)["number"]


STRINGS = np.zeros(3, np.uint8)


@pytest.mark.parametrize(
    ("reason", "name", "columns"),
    [
        ("'number' has . rows, not 3", "number", [np.arange(2), np.arange(4), Strings.pack(["a"]), np.zeros((2, 3))]),
        ("does not hold plain numbers", "number", [np.zeros(3, dtype) for dtype in ("<U1", "S1", "M8[s]", "c8")]),
        (
            "the offsets where they end",
            "path",
            [
                Strings(STRINGS, np.array(ends, np.int64))
                for ends in ([2, 1, 3], [-1, 2, 3], [1, 2, 4], [1, 2, 2], [1, 2**62, 3])
            ],
        ),
        (
            ".",
            "path",
            [
                Strings(STRINGS, np.array([2, 1, 3], np.uint64)),
                Strings(STRINGS, np.array([1.0, 2.0, 3.0])),
                Strings(STRINGS, np.array([[1, 1], [2, 2], [3, 3]])),
                Strings(np.zeros(3), np.array([1, 2, 3])),
            ],
        ),
    ],
)
def test_a_column_that_no_writer_writes_is_refused(saved: Save, reason: str, name: str, columns: list[Column]) -> None:
    for column in columns:
        with pytest.raises(FormatError, match=reason):
            saved(encode_columns({name: column}), 3)[name]


def test_numbers_that_are_strings_and_paths_that_are_numbers_are_refused(saved: Save) -> None:
    found = saved(encode_columns({"number": Strings.pack(["a"]), "path": np.zeros(1)}), 1)
    with pytest.raises(FormatError, match="should be numbers"):
        _ = found.numbers
    with pytest.raises(FormatError, match="paths are not strings"):
        _ = found.paths


def header(shape: tuple[int, ...]) -> bytes:
    target = io.BytesIO()
    np.lib.format.write_array_header_1_0(target, {"descr": "<u8", "fortran_order": False, "shape": shape})
    return target.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        archive({"number.npy": b"abc"}),
        archive({"number.npy": npy(np.array(3))}),
        archive({"number.npy": header((1 << 58,))}),
        archive({"number.npy": header((1 << 80,))}),
        archive({"other.npy": npy(np.zeros(3))}),
        npy(np.zeros(3)) + archive({"number.npy": npy(np.zeros(3))}),
        encode_columns({"number": np.array([-1.0, np.nan, 0.5])}),
        archive({"number.npy": npy(np.array([Bomb()] * 3, object))}),
        archive({"number.npy": pickle.dumps([Bomb()] * 3)}),
    ],
    ids=["no-npy", "no-rows", "exabytes", "more", "no-column", "two-files", "no-whole-numbers", "objects", "pickle"],
)
def test_hostile_numbers_are_refused(saved: Save, data: bytes) -> None:
    with pytest.raises(StoreError):
        _ = saved(data, 3).numbers


@pytest.mark.slow
def test_a_flipped_bit_anywhere_raises_nothing_but_store_errors(saved: Save) -> None:
    data = encode_columns({"number": np.arange(3, dtype=np.uint64)})
    for bit in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(StoreError):
            _ = saved(bytes(flipped), 3).numbers


def test_columns_are_read_from_the_file_that_the_manifest_lists_alone(tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    own, other = (encode_columns({"number": np.arange(3, dtype=np.uint64), "label": np.full(3, n)}) for n in (1, 2))
    assert len(own) == len(other)
    path.write_bytes(own)
    sha256 = hashlib.sha256(own).hexdigest()
    table = SampleTable(path, 3, sha256)
    assert table["label"].tolist() == [1, 1, 1]
    path.write_bytes(other)
    assert table["number"].tolist() == [0, 1, 2]  # a small file that is open keeps the bytes that it had
    for changed in (pickle.loads(pickle.dumps(table)), SampleTable(path, 3, sha256)):
        with pytest.raises(DamageError, match="not the file that the manifest lists: copy"):
            changed["number"]
    path.write_bytes(own)
    assert table["number"].tolist() == [0, 1, 2]


def npy_of(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("latin-1") + data


@pytest.mark.parametrize(
    ("descr", "shape"),
    [
        ("'<u8'", "(True, 12)"),
        ("'<u8'", "(12, True)"),
        ("'<u8'", "(-1, 12)"),
        ("'<u8'", "(12.0,)"),
        ("'<u8'", "(0, 1" + "0" * 17 + ", 1" + "0" * 17 + ")"),
        ("'<u8'", "(" + "1, " * 40 + ")"),
        ("'<u8'", "12"),
        ("'|S0'", "(12,)"),
        ("'<f16'", "(6,)"),
        ("'O'", "(12,)"),
        ("[('a', '<u8')]", "(12,)"),
        ("'<u8\\d'", "(12,)"),
        ("('<u8', (12,))", "(1,)"),
    ],
)
def test_a_header_that_numpy_does_not_write_is_refused_without_a_warning(saved: Save, descr: str, shape: str) -> None:
    content = npy_of(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", bytes(96))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FormatError, match="column 'label'"):
            saved(archive({"label.npy": content}), 12)["label"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_column_that_is_there_twice_or_has_another_size_is_refused(saved: Save) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        for value in (1, 2):
            file.writestr("label.npy", npy(np.full(3, value)))
    with pytest.raises(FormatError, match="twice"):
        saved(target.getvalue(), 3)
    data = bytearray(archive({"label.npy": npy(np.arange(3))}))
    at = data.index(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<I", 1 << 31)
    with pytest.raises(StoreError):
        saved(bytes(data), 3)


def test_a_table_much_larger_than_its_samples_is_not_opened(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 30)
    with pytest.raises(FormatError, match="more than a table of 3 samples has"):
        SampleTable(path, 3)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\u202eb"])
def test_a_column_whose_name_does_not_print_is_refused(saved: Save, name: str) -> None:
    with pytest.raises(FormatError, match="column called") as caught:
        saved(archive({f"{name}.npy": npy(np.arange(3))}), 3)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("dtype", ["?", "<f2"])
def test_labels_of_types_that_no_version_writes_are_refused(dtype: str) -> None:
    with pytest.raises(FormatError, match=r"labels are (bool|float16), not whole numbers"):
        check_labels(np.zeros(3, dtype), 2)
