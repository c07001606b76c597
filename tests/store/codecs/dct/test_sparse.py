"""Sparse forms: the same bytes come back, and what is no sparse form is refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.store.codecs.sparse import NIBBLES, SPARSE, most_bytes, scratch_for, spread, squeeze

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
