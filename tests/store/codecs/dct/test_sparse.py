"""Sparse forms and nibbles: the same bytes come back, and what is none of them is refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.store.codecs.sparse import NIBBLES, SPARSE, most_bytes, narrow, scratch_for, spread, squeeze, widen

PACKINGS = [SPARSE, NIBBLES]

#: Bytes that are mostly 0, in runs.
PLAIN = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 255, 7, 8]), st.integers(1, 90)), min_size=1).map(
    lambda runs: b"".join(bytes([value]) * count for value, count in runs)
)


def spread_to(form: bytes, size: int, packing: str) -> bytes:
    out = np.full(size, 77, np.uint8)
    spread(np.frombuffer(form, np.uint8), out, packing)
    return out.tobytes()


@pytest.mark.parametrize("packing", PACKINGS)
@given(plain=PLAIN)
def test_the_same_bytes_come_back(packing: str, plain: bytes) -> None:
    form = squeeze(plain, packing)
    assert spread_to(form.masks + form.values, len(plain), packing) == plain
    count, large = len(plain) - plain.count(0), plain.count(8)
    assert len(form.values) == (count if packing == SPARSE else (count + 1) // 2 + large)
    assert len(form.masks) + len(form.values) <= most_bytes(len(plain), packing)


@pytest.mark.parametrize("packing", PACKINGS)
@given(plain=PLAIN, data=st.data())
def test_a_form_of_another_length_is_refused(packing: str, plain: bytes, data: st.DataObject) -> None:
    form = b"".join(squeeze(plain, packing))
    with pytest.raises(ValueError, match="bytes"):
        spread_to(form + b"\1", len(plain), packing)
    with pytest.raises(ValueError, match="bytes"):
        spread_to(form[: data.draw(st.integers(0, len(form) - 1))], len(plain), packing)


@pytest.mark.parametrize("packing", PACKINGS)
@given(form=st.binary(max_size=200), size=st.integers(1, 200))
def test_any_bytes_fill_the_row_or_are_refused(packing: str, form: bytes, size: int) -> None:
    with contextlib.suppress(ValueError):
        assert len(spread_to(form, size, packing)) == size


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 86_632])
def test_masks_that_are_all_set_lead_to_the_end_of_the_scratch_memory(packing: str, size: int) -> None:
    """The compiled loop reads and writes where the masks lead, in steps of 64 bytes, before it compares lengths."""
    groups = -(-size // 64)
    memory, room, values = scratch_for(size, packing)
    assert not memory.any()
    if packing == SPARSE:
        assert room == groups + 8 * groups + 64 * groups
        assert values == 0
        assert len(memory) >= room + 64
    else:
        assert room == groups + 8 * groups + 32 * groups + 64 * groups
        assert values >= room + 64
        assert len(memory) >= values + 64 * groups + 64


#: Values without 0, mostly small ones and those just too large for a nibble.
VALUES = st.lists(st.sampled_from([1, 2, 7, 8, 255, 249, 248, 247]) | st.integers(1, 255), max_size=40).map(bytes)


def narrowed(values: bytes) -> bytes:
    return narrow(np.frombuffer(values, np.uint8))


def widened(form: bytes, count: int) -> bytes:
    return widen(np.frombuffer(form, np.uint8), count).tobytes()


def widened_slowly(form: bytes, count: int) -> bytes | None:
    """Return what docs/format.md says, one value after the other, or None where the length is wrong."""
    pairs = (count + 1) // 2
    whole = iter(form[pairs:])
    values = []
    for number in range(count):
        nibble = form[number // 2] >> 4 * (number % 2) & 15 if number // 2 < len(form) else 0
        values.append(next(whole, None) if nibble == 0 else nibble if nibble < 8 else 240 + nibble)
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == count and next(whole, None) is None else None


@given(VALUES)
def test_the_same_values_come_back(values: bytes) -> None:
    form = narrowed(values)
    assert widened(form, len(values)) == values
    whole = bytes(value for value in values if 7 < value < 248)
    assert len(form) == (len(values) + 1) // 2 + len(whole)
    assert form.endswith(whole)


@given(VALUES, st.data())
def test_bytes_of_another_length_are_refused(values: bytes, data: st.DataObject) -> None:
    form = narrowed(values)
    with pytest.raises(ValueError, match=f"{len(form) + 1} bytes do not hold {len(values)} values"):
        widened(form + b"\1", len(values))
    if form:
        with pytest.raises(ValueError, match="bytes do not hold"):
            widened(form[: data.draw(st.integers(0, len(form) - 1))], len(values))


@given(st.binary(max_size=24) | st.lists(st.sampled_from([0, 1, 0x10]), max_size=24).map(bytes), st.integers(0, 40))
def test_any_bytes_are_widened_as_the_page_says_or_refused(form: bytes, count: int) -> None:
    expected = widened_slowly(form, count)
    if expected is None:
        with pytest.raises(ValueError, match="bytes do not hold"):
            widened(form, count)
    else:
        assert widened(form, count) == expected
