"""Where the fields of many records lie, found at once: as for one record after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache import DamageError, FormatError
from tpucache.store.codecs import CODECS
from tpucache.store.fields import Field, RecordLayout, check_field

FIELDS = [
    Field("image", "raw", "|u1", (2,)),
    Field("photo", "jpeg", "|u1", (1, 1, 3)),
    Field("planes", "yuv420", "|u1", (2, 1, 3)),
    Field("tokens", "bytes", "|u1", ()),
]


def all_parts(layout: RecordLayout, records: list[bytes]) -> list[list[bytes]]:
    """Return the fields' bytes by `spans_of`, with records one after the other in a block that is longer."""
    block = np.frombuffer(b"\xff" * 3 + b"".join(records) + b"\xff" * 9, np.uint8)
    lengths = np.array([len(record) for record in records], np.int64)
    spans = layout.spans_of(block, 3 + np.cumsum(lengths) - lengths, lengths)
    return [[block[start:end].tobytes() for start, end in each] for each in spans.tolist()]


@pytest.mark.slow
@given(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4), st.data())
def test_records_split_at_once_as_one_by_one(fields: list[Field], data: st.DataObject) -> None:
    layout = RecordLayout(tuple(fields))
    sizes = [field.stored_bytes for field in fields]
    draws = [st.binary(min_size=size or 0, max_size=20 if size is None else size) for size in sizes]
    expected = data.draw(st.lists(st.tuples(*draws).map(list), max_size=4))
    assert all_parts(layout, [layout.join(parts) for parts in expected]) == expected


@given(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4), st.binary(max_size=40))
def test_hostile_records_are_damage_as_one_by_one(fields: list[Field], record: bytes) -> None:
    layout = RecordLayout(tuple(fields))
    try:
        expected = layout.split(memoryview(record))
    except DamageError:
        with pytest.raises(DamageError, match="bytes"):
            all_parts(layout, [record])
    else:
        assert all_parts(layout, [record]) == [[bytes(part) for part in expected]]


@pytest.mark.parametrize("codec", ["dct-zstd", "dct-lz4"])
def test_a_quality_is_one_to_a_hundred(codec: str) -> None:
    for quality in (0, 1, 100, 101):
        field = Field("image", codec, "|u1", (8, 8, 3), quality, "420", CODECS[codec].packing)
        if 1 <= quality <= 100:
            check_field(field)
        else:
            with pytest.raises(FormatError, match=f"not quality {quality} "):
                check_field(field)
