"""Values in nibbles: the same values come back, and what is not as long as their nibbles say is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.store.codecs.sparse import narrow, widen

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
