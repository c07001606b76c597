"""A candidate's estimate of its build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpucache import Recipe
from tpucache.warmup.candidates import Candidate, Cost


def _candidate(**options: Any) -> Candidate:
    """Return one of a hundred samples of 0.04 s: 0.02 to load, 0.01 to encode, 0.01 to write."""
    known: dict[str, Any] = {
        "recipe": Recipe(),
        "samples": 100,
        "blocks": 4,
        "workers": 2,
        "start_seconds": 1.0,
        "augment_seconds": 3.0,
        "sample_seconds": 0.02,
        "write_seconds": 0.01,
        "finish_seconds": 0.5,
        "sample_bytes": 20.0,
        "clean": Cost(4096.0, 0.01),
        "augmented": Cost(4096.0, 0.05),
        "cache": Path("cache"),
        "images": (),
    }
    return Candidate(**{**known, **options})


@pytest.mark.parametrize(
    ("options", "variants", "seconds"),
    [
        ({}, 0, 1.5 + 4 / 2),
        ({"workers": 1}, 0, 1.5 + 4),
        ({}, 2, 4.5 + (4 + 2 * 6) / 2),
        ({"blocks": 1}, 0, 1.5 + 0.5 + 3.5 / 2),  # one process begins alone, for half a second
        ({"blocks": 1, "workers": 1}, 0, 1.5 + 4),
        ({"blocks": 1, "samples": 10}, 0, 1.5 + 0.4),  # and does all of it
    ],
)
def test_the_seconds_are_those_of_the_start_the_samples_and_the_tables(
    options: dict[str, Any], variants: int, seconds: float
) -> None:
    assert _candidate(**options).seconds(variants) == pytest.approx(seconds)
