"""A number that is no class is refused before a block is written, wherever labels come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tpucache import Recipe, build_cache
from tpucache.errors import SampleError, SourceError
from tpucache.store.format import WORK_NAME
from tpucache.warmup.plan import check_labels
from tpucache.warmup.sources.labels import MOST_CLASSES
from tpucache.warmup.sources.source import Item, Listing, Sample

WRONG = [-7, 2**62, MOST_CLASSES, 10**400]


class Images:
    def __init__(self, wrong: int, is_listed: bool) -> None:
        self.labels, self.is_listed = [0, 1, 1, 0], is_listed
        self.labels[2 if is_listed else 0] = wrong

    def list(self) -> Listing:
        return Listing([Sample(n, f"{n}.png", self.labels[n] if self.is_listed else None) for n in range(4)])

    def load(self, sample: Sample) -> Item:
        label = None if self.is_listed else self.labels[sample.number]
        return Item({"image": np.zeros((8, 8, 3), np.uint8)}, label)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda number: str(number)[:20])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_number_that_is_no_class_is_refused_before_a_block_is_written(
    wrong: int, is_listed: bool, tmp_path: Path
) -> None:
    with pytest.raises(SourceError if is_listed else SampleError, match=r"has the label .*class numbers"):
        build_cache(Images(wrong, is_listed), tmp_path / "cache", Recipe(size=8), jobs=1)
    written = [
        path for path in (tmp_path / "cache" / WORK_NAME).glob("*") if path.suffix == ".lmdb" or path.match("spool-*")
    ]
    assert written == []
    assert [*(tmp_path / "cache").glob("*.lmdb")] == []


def test_the_largest_number_of_a_class_is_still_one() -> None:
    check_labels(Images(MOST_CLASSES - 1, is_listed=True).list())
