"""Packed records that the loop reads from files itself: the same bytes and the same damage as where Python reads."""

from __future__ import annotations

import functools
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tpucache import CachedDataset, CachedLoader, Recipe, build_cache
from tpucache.native import FileRecords, LoopWork, Native, compile_loops
from tpucache.store.codecs import dct, encode, unpack_files, unpack_rows
from tpucache.store.fields import Field

pytest.importorskip("llvmlite", reason="the compiled loop needs it")
pytest.importorskip("lz4.block")
pytestmark = pytest.mark.skipif(
    None in (dct.unpack_zstd(), dct.unpack_lz4()), reason="this system has no libzstd.so.1 or liblz4.so.1"
)

CODECS = ["dct-zstd", "dct-lz4"]
UNTOUCHED = 77
LENGTH = struct.Struct("<I")


@functools.cache
def loops(way: str = "loop") -> Native:
    """Return the loops for this processor, or for one without AVX-512."""
    return compile_loops({} if way == "narrow" else None)


def field_of(codec: str) -> Field:
    return Field("image", codec, "|u1", (24, 40, 3), 90, "420")


def records_of(field: Field, count: int) -> list[bytes]:
    """Return images from smooth to noisy, encoded."""
    rng = np.random.default_rng(3)
    images = [rng.normal(128, 12 * turn, field.shape).clip(0, 255).astype(np.uint8) for turn in range(count)]
    return [encode(field, image) for image in images]


def empty(field: Field, rows: int) -> np.ndarray[Any, Any]:
    return np.full((rows, field.packed.nbytes), UNTOUCHED, np.uint8)


def expected_of(field: Field, records: list[bytes]) -> np.ndarray[Any, Any]:
    """Return what Python unpacks of records in memory."""
    out = empty(field, len(records))
    ends = np.cumsum([len(record) for record in records])
    spans = np.stack([ends - [len(record) for record in records], ends], 1)
    unpack_rows(field, np.frombuffer(b"".join(records), np.uint8), spans, out, np.arange(len(records)))
    return out


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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("way", ["loop", "narrow"])
def test_records_of_files_unpack_into_their_rows(tmp_path: Path, codec: str, way: str) -> None:
    field = field_of(codec)
    records = records_of(field, 7)
    rows = np.array([5, 0, 8, 3, 1, 7, 4])
    out = empty(field, 9)
    with Files(tmp_path, records) as files, patch.object(dct, "native", lambda: loops(way)):
        assert unpack_files(field, files.records, out, rows) == 7
    assert (out[rows] == expected_of(field, records)).all()
    assert (out[[2, 6]] == UNTOUCHED).all()


def longer(files: Files, at: int) -> None:
    files.records.lengths[at] += 1


def shorter(files: Files, at: int) -> None:
    files.records.lengths[at] -= 1


def of_a_few_bytes(files: Files, at: int) -> None:
    files.records.lengths[at] = 3


def of_no_bytes(files: Files, at: int) -> None:
    files.records.lengths[at] = 0


def longer_than_memory(files: Files, at: int) -> None:
    """The file has as many bytes, and the length in front is the same."""
    length = 1 << 28
    files.records.lengths[at] = length
    file = files.files[at % 2]
    file.seek(int(files.records.offsets[at]))
    file.write(LENGTH.pack(length - LENGTH.size))
    file.truncate(int(files.records.offsets[at]) + length)


def behind_the_end(files: Files, at: int) -> None:
    files.records.offsets[at] = 1 << 40


def before_the_start(files: Files, at: int) -> None:
    files.records.offsets[at] = -1


def of_no_file(files: Files, at: int) -> None:
    files.records.descriptors[at] = -1


def with_another_length_in_front(files: Files, at: int) -> None:
    file = files.files[at % 2]
    file.seek(int(files.records.offsets[at]))
    file.write(LENGTH.pack(int(files.records.lengths[at]) - LENGTH.size + 1))


def with_other_bytes(files: Files, at: int) -> None:
    file = files.files[at % 2]
    file.seek(int(files.records.offsets[at]) + LENGTH.size)
    file.write(b"\xff" * 9)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "damage",
    [
        longer,
        shorter,
        of_a_few_bytes,
        of_no_bytes,
        longer_than_memory,
        behind_the_end,
        before_the_start,
        of_no_file,
        with_another_length_in_front,
        with_other_bytes,
    ],
)
def test_the_loop_ends_at_a_record_that_it_cannot_unpack(
    tmp_path: Path, codec: str, damage: Callable[[Files, int], None]
) -> None:
    field = field_of(codec)
    records = records_of(field, 5)
    records[2] = records[1]  # what is left of the one before would be taken for it
    out = empty(field, 5)
    with Files(tmp_path, records) as files:
        damage(files, 2)
        assert unpack_files(field, files.records, out, np.arange(5)) == 2
    assert (out[:2] == expected_of(field, records[:2])).all()
    assert (out[3:] == UNTOUCHED).all()


@pytest.mark.parametrize("rows", [[0, 3], [-1, 0], [0]])
def test_rows_that_are_not_there_are_refused(tmp_path: Path, rows: list[int]) -> None:
    field = field_of("dct-lz4")
    with Files(tmp_path, records_of(field, 2)) as files, pytest.raises(IndexError):
        unpack_files(field, files.records, empty(field, 3), np.array(rows))


class Batches:
    """A cache of six photographs whose packed batches are read from files again and again, neither kept nor mapped."""

    def __init__(self, photos: Path, directory: Path, codec: str) -> None:
        (directory / "few").mkdir()
        for path in sorted(photos.glob("ant/*"))[:6]:
            shutil.copy(path, directory / "few")
        build_cache(directory / "few", directory / "cache", Recipe(size=16, codec=codec), jobs=1)
        self.dataset = CachedDataset(directory / "cache", in_memory=False)
        self.shard = directory / "cache" / self.dataset.manifest.shards[0].name

    def images(self) -> torch.Tensor:
        return torch.cat([images for images, _ in CachedLoader(self.dataset, 4, finish="device", threads=1)])


@pytest.fixture
def batches(photos: Path, tmp_path: Path, codec: str, no_leases: None) -> Batches:
    return Batches(photos, tmp_path, codec)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_the_loop_reads_packed_batches_of_files_that_were_compared_with_their_checksums(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[LoopWork] = []

    def unpack(work: LoopWork) -> int:
        works.append(work)
        return loops().unpack(work)

    with monkeypatch.context() as patch:
        patch.setattr(dct, "native", lambda: None)
        expected = batches.images()
        batches.dataset._reader.cache.reader.close()
    monkeypatch.setattr(dct, "native", lambda: loops()._replace(unpack=unpack))
    for _ in range(2):
        assert torch.equal(batches.images(), expected)
    assert [(work.records, work.descriptors > 0) for work in works] == [(4, False), (2, True), (4, True), (2, True)]
