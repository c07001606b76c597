"""Damaged pictures: those that a fresh Pillow refuses are refused, and those that it decodes are accepted."""

from __future__ import annotations

import pytest

from scripts.checks.sources import ENCODINGS, differences


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_damaged_picture_is_accepted_or_refused_as_by_a_fresh_pillow(encoding: str) -> None:
    try:
        ENCODINGS[encoding]()
    except (KeyError, OSError):
        pytest.skip(f"this Pillow has no {encoding.partition(' ')[0]}")
    found = differences(encoding, times=12, seed=1)
    assert found["refused by Pillow"] > 0, "no damage of these is one: the test tests nothing"
    assert [what for what in found if "ACCEPTED" in what or "REFUSED" in what] == []
