import logging
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache import native

pytest.importorskip("llvmlite", reason="the compiled loop needs it")
Array = np.ndarray[Any, Any]


@pytest.fixture
def anew() -> Iterator[None]:
    """The loops are looked for again, and again afterwards."""
    native.native.cache_clear()
    native._compiled.cache_clear()
    yield
    native.native.cache_clear()
    native._compiled.cache_clear()


def copy(source: Array, rows: Array, target: Array) -> None:
    """Copy source[rows] into `target`."""
    length = source.shape[1]
    to = native.address(target) + length * np.arange(len(rows))
    native.copy_rows(to, native.address(source) + length * rows, length, past_caches=True)


@pytest.mark.slow
@given(
    length=st.integers(1, 300) | st.integers(3900, 4500) | st.just(9000),
    source_rows=st.integers(1, 5),
    offsets=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    data=st.data(),
)
def test_rows_are_copied_to_the_byte_wherever_they_lie_and_nothing_beside_them(
    length: int, source_rows: int, offsets: tuple[int, int], data: st.DataObject
) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, source_rows - 1), max_size=7)), np.int64)
    before, skip = offsets
    source = np.random.default_rng(length).integers(0, 256, skip + source_rows * length, np.uint8)[skip:]
    source = source.reshape(source_rows, length)
    memory = np.full(before + len(rows) * length + 64, 7, np.uint8)
    copy(source, rows, memory[before:])
    assert memory[before:-64].tobytes() == source[rows].tobytes()
    assert {*memory[:before], *memory[-64:]} == {7}


@pytest.mark.parametrize(
    ("rows", "length", "is_large"), [(64, 1000, False), (100_000, 100, False), (90, 100_000, True)]
)
def test_ordinary_stores_copy_small_batches_and_short_rows(rows: int, length: int, is_large: bool) -> None:
    source, target = np.arange(3 * length).reshape(3, length).astype(np.uint8), np.empty((rows, length), np.uint8)
    chosen = np.random.default_rng(0).integers(3, size=rows)
    with patch.object(native, "copy_rows", side_effect=native.copy_rows) as copied:
        native.gather(source, chosen, target)
    assert (target == source[chosen]).all()
    assert copied.called == is_large


@pytest.mark.usefixtures("anew")
def test_without_llvmlite_rows_are_copied_after_one_hint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    source, target = np.arange(6000).reshape(3, 2000).astype(np.uint8), np.empty((1, 2000), np.uint8)
    with caplog.at_level(logging.WARNING, "tpucache"):
        for row in (2, 0):
            copy(source, np.array([row]), target)
            assert (target == source[row]).all()
    (record,) = caplog.records
    assert "pip install llvmlite" in record.message
