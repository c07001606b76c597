import contextlib
import logging
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache import native as native_module
from tpucache import native as streaming_module
from tpucache.native import gather

pytest.importorskip("llvmlite", reason="the compiled loop needs it")


@pytest.fixture
def anew() -> Iterator[None]:
    """The loop is looked for again, and again afterwards."""
    for each in (native_module.native, native_module._compiled):
        each.cache_clear()
    yield
    for each in (native_module.native, native_module._compiled):
        each.cache_clear()


@contextlib.contextmanager
def streaming() -> Iterator[None]:
    """Whatever its size, nothing is left to numpy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming_module, "_LARGE", 0)
        patch.setattr(streaming_module, "_LONG", 0)
        patch.setattr(np, "take", None)
        yield


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
    rows = np.array(data.draw(st.lists(st.integers(0, source_rows - 1), min_size=1, max_size=7)))
    before, skip = offsets
    source = np.random.default_rng(length).integers(0, 256, skip + source_rows * length, np.uint8)[skip:]
    source = source.reshape(source_rows, length)
    memory = np.full(before + len(rows) * length + 64, 7, np.uint8)
    target = memory[before : before + len(rows) * length].reshape(len(rows), length)

    with streaming():
        gather(source, rows, target)

    assert (target == source[rows]).all()
    assert (memory[:before] == 7).all()
    assert (memory[before + len(rows) * length :] == 7).all()


def test_rows_asked_for_by_a_strided_array_are_the_right_ones() -> None:
    source = np.arange(600, dtype=np.uint8).reshape(6, 100)
    target = np.empty((3, 100), np.uint8)
    with streaming():
        gather(source, np.arange(6)[::2], target)
    assert (target == source[::2]).all()


@pytest.mark.parametrize("large", [0, 1 << 40], ids=["streamed", "by numpy"])
@pytest.mark.parametrize("rows", [[0, 6], [-1, 0]])
def test_a_row_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, large: int, rows: list[int]) -> None:
    monkeypatch.setattr(streaming_module, "_LARGE", large)
    with pytest.raises(IndexError, match="has 6 rows"):
        gather(np.zeros((6, 2000), np.uint8), np.array(rows), np.zeros((2, 2000), np.uint8))


@pytest.mark.parametrize("large", [0, 1 << 40], ids=["streamed", "by numpy"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 1999), "<u2"), ((3, 2000), "<u2"), ((2, 2000), "<u4"), ((2, 2000), "|u1"), ((2, 2000), ">u2")],
    ids=["shorter", "more", "wider", "narrower", "swapped"],
)
def test_a_target_that_does_not_fit_is_never_written_as_if_it_did(
    monkeypatch: pytest.MonkeyPatch, large: int, shape: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr(streaming_module, "_LARGE", large)
    source = np.ones((6, 2000), np.uint16)
    target = np.zeros(shape, dtype)
    with pytest.raises((ValueError, TypeError)):
        gather(source, np.array([0, 1]), target)
    assert not target.any()


def test_no_rows_fit_an_empty_target_alone() -> None:
    source, none = np.ones((6, 2000), np.uint8), np.zeros(0, np.int64)
    gather(source, none, np.zeros((0, 2000), np.uint8))
    with pytest.raises(ValueError, match="shape"):
        gather(source, none, np.zeros((1, 2000), np.uint8))


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(("rows", "length"), [(64, 100_000), (100_000, 1000)], ids=["small batch", "short rows"])
def test_what_ordinary_stores_copy_as_fast_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, rows: int, length: int
) -> None:
    monkeypatch.setattr(native_module, "compile_loops", lambda: pytest.fail("it was compiled"))
    gather(np.zeros((2, length), np.uint8), np.zeros(rows, np.int64), np.empty((rows, length), np.uint8))


@pytest.mark.usefixtures("anew")
def test_without_llvmlite_numpy_copies_after_one_hint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setattr(streaming_module, "_LARGE", 0)
    source = np.arange(6000, dtype=np.uint16).reshape(3, 2000)
    with caplog.at_level(logging.WARNING, "tpucache"):
        for row in (2, 0):
            target = np.empty((1, 2000), np.uint16)
            gather(source, np.array([row]), target)
            assert (target == source[row]).all()
    (record,) = caplog.records
    assert "pip install llvmlite" in record.message
