"""Index rows are read when they are asked for, by threads and processes at once; a damaged file is an error."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache.errors import DamageError, FormatError
from tpucache.store.cache import Cache
from tpucache.store.fields import Field
from tpucache.store.format import INDEX_DTYPE
from tpucache.store.index import RecordIndex
from tpucache.store.manifest import Manifest

WriteCache = Callable[..., Manifest]

RECORDS = 10_000  # three blocks, the last of them short


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, write_cache: WriteCache) -> tuple[Path, Manifest]:
    directory = tmp_path_factory.mktemp("large")
    return directory, write_cache(directory, [[b"%d" % number for number in range(RECORDS)]], block=2500)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, RECORDS - 1), max_size=50), max_size=5))
def test_rows_come_in_the_order_they_are_asked_for(large: tuple[Path, Manifest], asked: list[list[int]]) -> None:
    rows, index = Cache(*large).index.read_all(), RecordIndex(*large)
    assert len(index) == len(rows) == RECORDS
    for numbers in asked:
        chosen = np.array(numbers, np.int64)
        assert np.array_equal(index[chosen], rows[chosen])


def test_a_row_that_is_not_there_is_an_error(large: tuple[Path, Manifest]) -> None:
    with pytest.raises(IndexError):
        RecordIndex(*large)[np.array([5 * RECORDS])]


def test_a_pickled_index_is_small_and_opens_again(large: tuple[Path, Manifest]) -> None:
    index = RecordIndex(*large)
    index.read_all()
    data = pickle.dumps(index)
    assert len(data) < 5000
    assert np.array_equal(pickle.loads(data).read_all(), index.read_all())


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 128, 4096, 100_000])
def test_an_index_cut_short_while_it_is_open_is_damage_and_not_a_crash(
    tmp_path: Path, write_cache: WriteCache, size: int
) -> None:
    manifest = write_cache(tmp_path, [[b"%d" % number for number in range(RECORDS)]], block=RECORDS)
    index = RecordIndex(tmp_path, manifest)
    index[np.array([0])]
    os.truncate(tmp_path / "index.npy", size)
    assert index[np.array([4000])]["length"].tolist() == [4]  # it was read before
    with pytest.raises(DamageError, match=r"index\.npy was cut short while it was open"):
        index[np.array([RECORDS - 1])]


def test_a_record_that_no_field_can_have_is_refused_before_it_is_read(
    large: tuple[Path, Manifest], tmp_path: Path
) -> None:
    directory, manifest = large
    image = dataclasses.replace(manifest, fields=(Field("image", "png", "|u1", (4, 4, 3)),))
    assert len(RecordIndex(directory, image).read_all()) == RECORDS
    rows = np.load(directory / "index.npy")
    rows["length"][5000] = (1 << 32) - 1
    np.save(tmp_path / "index.npy", rows)
    index = RecordIndex(tmp_path, image)
    assert len(index[np.array([0, 4095])]) == 2
    for numbers in (np.array([5000]), np.arange(RECORDS)):
        with pytest.raises(DamageError, match="has a record of 4,294,967,295 bytes"):
            index[numbers]
    with pytest.raises(DamageError, match="but the cache's fields take at most"):
        index.read_all()


@pytest.mark.parametrize("extra", [b"\0", bytes(INDEX_DTYPE.itemsize)])
def test_bytes_after_the_rows_are_refused(cache: Path, replace_table: Callable[..., None], extra: bytes) -> None:
    replace_table("index.npy", (cache / "index.npy").read_bytes() + extra)
    with pytest.raises(FormatError, match="do not hold 16 index rows"):
        RecordIndex(cache, Manifest.load(cache))
