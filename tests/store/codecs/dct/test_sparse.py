"""Sparse forms: the same bytes come back, and what is no sparse form is refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.store.codecs.dct.sparse import most_bytes, scratch_for, spread, squeeze

#: Bytes that are mostly 0, in runs.
PLAIN = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 255, 7]), st.integers(1, 90)), min_size=1).map(
    lambda runs: b"".join(bytes([value]) * count for value, count in runs)
)


def spread_to(form: bytes, size: int) -> bytes:
    out = np.full(size, 77, np.uint8)
    spread(np.frombuffer(form, np.uint8), out)
    return out.tobytes()


@given(PLAIN)
def test_the_same_bytes_come_back(plain: bytes) -> None:
    form = squeeze(plain)
    assert spread_to(form.masks + form.values, len(plain)) == plain
    assert len(form.values) == len(plain) - plain.count(0)
    assert len(form.masks) + len(form.values) <= most_bytes(len(plain))


@given(PLAIN, st.data())
def test_a_form_of_another_length_is_refused(plain: bytes, data: st.DataObject) -> None:
    form = b"".join(squeeze(plain))
    with pytest.raises(ValueError, match="bytes"):
        spread_to(form + b"\1", len(plain))
    with pytest.raises(ValueError, match="bytes"):
        spread_to(form[: data.draw(st.integers(0, len(form) - 1))], len(plain))


@given(st.binary(max_size=200), st.integers(1, 200))
def test_any_bytes_fill_the_row_or_are_refused(form: bytes, size: int) -> None:
    with contextlib.suppress(ValueError):
        assert len(spread_to(form, size)) == size


@pytest.mark.parametrize("size", [1, 63, 64, 65, 86_632])
def test_masks_that_are_all_set_lead_to_the_end_of_the_scratch_memory(size: int) -> None:
    """The compiled loop reads where the masks lead, in steps of 64 bytes, before it compares lengths."""
    groups = -(-size // 64)
    scratch, room = scratch_for(size)
    assert room == groups + 8 * groups + 64 * groups
    assert len(scratch) >= room + 64
    assert not scratch.any()
