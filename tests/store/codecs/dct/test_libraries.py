"""Packed records, unpacked in place by the system's libraries and by the Python packages: the same bytes, or damage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache import DamageError, DependencyError
from tpucache.store.codecs import dct, encode, unpack_rows
from tpucache.store.fields import Field

CODECS = ["dct-zstd", "dct-lz4"]
LIBRARIES = (dct.unpack_zstd, dct.unpack_lz4)
SIDE = 24


def field_of(codec: str, height: int = SIDE) -> Field:
    return Field("image", codec, "|u1", (height, SIDE, 3), 90, "420")


def records_of(field: Field, count: int = 5) -> list[bytes]:
    """Return images from smooth to noisy, encoded."""
    rng = np.random.default_rng(5)
    images = [rng.normal(128, 12 * turn, (SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8) for turn in range(count)]
    return [encode(field, image) for image in images]


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
