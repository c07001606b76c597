"""Packed records are unpacked in place by libraries, packages and a loop over files: the same bytes, or damage."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache import CachedDataset, CachedLoader, DamageError, DependencyError, Recipe, build_cache
from tpucache.native import FileRecords, LoopWork, Native, compile_loops
from tpucache.store.codecs import dct, encode, unpack_files, unpack_rows
from tpucache.store.fields import Field

pytest.importorskip("lz4.block")

CODECS = ["dct-zstd", "dct-lz4"]
UNTOUCHED = 77
LENGTH = struct.Struct("<I")


def field_of(codec: str) -> Field:
    return Field("image", codec, "|u1", (24, 40, 3), 90, "420")


def records_of(field: Field, count: int = 5) -> list[bytes]:
    """Return images from smooth to noisy, encoded."""
    rng = np.random.default_rng(3)
    images = [rng.normal(128, 12 * turn, field.shape).clip(0, 255).astype(np.uint8) for turn in range(count)]
    return [encode(field, image) for image in images]


LIBRARIES = (dct.unpack_zstd, dct.unpack_lz4)
needs_loop = pytest.mark.skipif(
    importlib.util.find_spec("llvmlite") is None or None in [find() for find in LIBRARIES],
    reason="the loop needs llvmlite, libzstd.so.1 and liblz4.so.1",
)


def unpack(field: Field, records: list[bytes]) -> np.ndarray[Any, Any]:
    """Return packed records (n, m), one empty row before and after them: whatever happens, these are not written to."""
    ends = np.cumsum([len(record) for record in records])
    spans = np.stack([ends - [len(record) for record in records], ends], 1)
    out = np.full((len(records) + 2, field.packed.nbytes), 77, np.uint8)
    try:
        block = np.frombuffer(b"".join(records), np.uint8)
        unpack_rows(field, block, spans, out, np.arange(1, len(records) + 1))
    finally:
        assert (out[[0, -1]] == 77).all()
    return out[1:-1]


@pytest.fixture(params=["library", "package"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways of unpacking."""
    for find in LIBRARIES:
        find.cache_clear()
    if request.param == "package":
        monkeypatch.setattr(dct.ctypes, "CDLL", missing)
    elif None in [find() for find in LIBRARIES]:
        pytest.skip("this system has no libzstd.so.1 or no liblz4.so.1")
    yield
    for find in LIBRARIES:
        find.cache_clear()


def missing(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("codec", CODECS)
def test_both_ways_give_the_same_bytes(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = field_of(codec)
    records = records_of(field)
    found = unpack(field, records)
    for name in ("unpack_zstd", "unpack_lz4"):
        monkeypatch.setattr(f"tpucache.store.codecs.dct.{name}", lambda: None)
    assert (unpack(field, records) == found).all()


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("codec", CODECS)
def test_damaged_records_unpack_or_are_damage_and_stay_in_their_rows(codec: str) -> None:
    field = field_of(codec)
    records = records_of(field, 3)

    @settings(max_examples=30)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        damaged = bytearray(records[2])
        for at, value in data.draw(
            st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), min_size=1, max_size=4)
        ):
            damaged[at] = value
        length = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
        try:
            found = unpack(field, [*records[:2], bytes(damaged[:length])])
        except DamageError:
            return
        assert (found[:2] == unpack(field, records[:2])).all()

    check()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("codec", CODECS)
def test_threads_unpack_at_once(codec: str) -> None:
    field = field_of(codec)
    records = records_of(field)
    expected = unpack(field, records)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: unpack(field, records), range(32)))
    assert all((each == expected).all() for each in found)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("span", "row"), [((-1, 5), 0), ((0, 11), 0), ((6, 5), 0), ((0, 5), -1), ((0, 5), 2), ((9, 9), 1 << 60)]
)
def test_places_outside_of_the_memory_are_refused(codec: str, span: tuple[int, int], row: int) -> None:
    out = np.zeros((2, field_of(codec).packed.nbytes), np.uint8)
    with pytest.raises((IndexError, DamageError)):
        unpack_rows(field_of(codec), np.zeros(10, np.uint8), np.array([span]), out, np.array([row]))


@pytest.mark.parametrize("codec", CODECS)
def test_memory_that_is_not_contiguous_is_refused(codec: str) -> None:
    size = field_of(codec).packed.nbytes
    with pytest.raises(IndexError, match="contiguous"):
        unpack_rows(
            field_of(codec),
            np.zeros(9, np.uint8),
            np.array([[0, 9]]),
            np.zeros((1, 2 * size), np.uint8)[:, ::2],
            np.zeros(1, np.int64),
        )


@pytest.mark.parametrize("way", ["package"], indirect=True)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("codec", "modules"), [("dct-zstd", ["zstandard"]), ("dct-lz4", ["lz4", "lz4.block"])])
def test_without_library_and_package_the_codec_says_what_to_install(
    codec: str, modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = records_of(field_of(codec), 1)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyError, match=f"pip install {modules[0]}"):
        unpack(field_of(codec), records)


@functools.cache
def loops(way: str = "loop") -> Native:
    """Return the loops for this processor, or for one without AVX-512."""
    return compile_loops({} if way == "narrow" else None)


def empty(field: Field, rows: int) -> np.ndarray[Any, Any]:
    return np.full((rows, field.packed.nbytes), UNTOUCHED, np.uint8)


class Files:
    """Records in two files by turns, each with its length in front."""

    def __init__(self, directory: Path, records: list[bytes]) -> None:
        self.files = [(directory / name).open("w+b", buffering=0) for name in ("a", "b")]
        numbers, offsets, lengths = [], [], []
        for at, record in enumerate(records):
            file = self.files[at % 2]
            file.write(b"between")
            numbers.append(file.fileno())
            offsets.append(file.tell())
            lengths.append(LENGTH.size + len(record))
            file.write(LENGTH.pack(len(record)) + record)
        self.records = FileRecords(*(np.array(each) for each in (numbers, offsets, lengths)))

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.close()


@needs_loop
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("way", ["loop", "narrow"])
def test_records_of_files_unpack_into_their_rows(tmp_path: Path, codec: str, way: str) -> None:
    field = field_of(codec)
    records = records_of(field, 7)
    rows = np.array([5, 0, 8, 3, 1, 7, 4])
    out = empty(field, 9)
    with Files(tmp_path, records) as files, patch.object(dct, "native", lambda: loops(way)):
        assert unpack_files(field, files.records, out, rows) == 7
    assert (out[rows] == unpack(field, records)).all()
    assert (out[[2, 6]] == UNTOUCHED).all()


def changed(name: str, change: Callable[[int], int]) -> Callable[[Files, int], None]:
    """Return what changes where a record is said to be: `descriptors`, `offsets` or `lengths`."""

    def damage(files: Files, at: int) -> None:
        numbers = getattr(files.records, name)
        numbers[at] = change(int(numbers[at]))

    return damage


def written(content: bytes, after: int = 0) -> Callable[[Files, int], None]:
    def damage(files: Files, at: int) -> None:
        os.pwrite(int(files.records.descriptors[at]), content, int(files.records.offsets[at]) + after)

    return damage


def longer_than_memory(files: Files, at: int) -> None:
    """The file has as many bytes, and the length in front is the same."""
    length = 1 << 28
    files.records.lengths[at] = length
    written(LENGTH.pack(length - LENGTH.size))(files, at)
    os.truncate(int(files.records.descriptors[at]), int(files.records.offsets[at]) + length)


DAMAGES = {
    "longer": changed("lengths", lambda length: length + 1),
    "shorter": changed("lengths", lambda length: length - 1),
    "of a few bytes": changed("lengths", lambda _: 3),
    "of no bytes": changed("lengths", lambda _: 0),
    "longer than memory": longer_than_memory,
    "behind the end": changed("offsets", lambda _: 1 << 40),
    "before the start": changed("offsets", lambda _: -1),
    "of no file": changed("descriptors", lambda _: -1),
    "with another length in front": written(LENGTH.pack(1)),
    "with other bytes": written(b"\xff" * 9, LENGTH.size),
}


@needs_loop
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_loop_ends_at_a_record_that_it_cannot_unpack(tmp_path: Path, codec: str, damage: str) -> None:
    field = field_of(codec)
    records = records_of(field, 5)
    records[2] = records[1]  # what is left of the one before would be taken for it
    out = empty(field, 5)
    with Files(tmp_path, records) as files:
        DAMAGES[damage](files, 2)
        assert unpack_files(field, files.records, out, np.arange(5)) == 2
    assert (out[:2] == unpack(field, records[:2])).all()
    assert (out[3:] == UNTOUCHED).all()


@needs_loop
@pytest.mark.parametrize("rows", [[0, 3], [-1, 0], [0]])
def test_rows_that_are_not_there_are_refused(tmp_path: Path, rows: list[int]) -> None:
    field = field_of("dct-lz4")
    with Files(tmp_path, records_of(field, 2)) as files, pytest.raises(IndexError):
        unpack_files(field, files.records, empty(field, 3), np.array(rows))


@needs_loop
@pytest.mark.slow
@pytest.mark.usefixtures("no_leases")
@pytest.mark.parametrize("codec", CODECS)
def test_the_loop_reads_packed_batches_of_files_that_were_compared_with_their_checksums(
    photos: Path, tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "few").mkdir()
    for path in sorted(photos.glob("ant/*"))[:6]:
        shutil.copy(path, tmp_path / "few")
    build_cache(tmp_path / "few", tmp_path / "cache", Recipe(size=16, codec=codec), jobs=1)
    dataset = CachedDataset(tmp_path / "cache", in_memory=False)
    works: list[LoopWork] = []

    def images() -> torch.Tensor:
        return torch.cat([images for images, _ in CachedLoader(dataset, 4, finish="device", threads=1)])

    def unpack(work: LoopWork) -> int:
        works.append(work)
        return loops().unpack(work)

    with monkeypatch.context() as patch:
        patch.setattr(dct, "native", lambda: None)
        expected = images()
        dataset.cache.reader.close()
    monkeypatch.setattr(dct, "native", lambda: loops()._replace(unpack=unpack))
    for _ in range(2):
        assert torch.equal(images(), expected)
    assert [(work.records, work.descriptors > 0) for work in works] == [(4, False), (2, True), (4, True), (2, True)]
