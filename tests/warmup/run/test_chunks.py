"""Metadata of chunks: what is known only of loaded samples is kept in order, and what some lack stays absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tpucache import Recipe, build_cache
from tpucache.store.cache import Cache
from tpucache.store.samples import Strings
from tpucache.warmup.sources.source import Item, Listing, Sample


class Uneven:
    def list(self) -> Listing:
        return Listing([Sample(number, f"{number}") for number in range(200)])

    def load(self, sample: Sample) -> Item:
        columns: dict[str, str | int | float] = {"rank": sample.number}
        if sample.number % 3 == 1:
            columns["score"] = sample.number / 2
        if sample.number > 150:
            columns |= {"remark": "late", "count": 1}
        return Item({"tokens": np.arange(4)}, columns=columns)


def test_a_column_that_only_some_samples_have_is_nan_or_no_text_in_the_others(tmp_path: Path) -> None:
    build_cache(Uneven(), tmp_path, Recipe(size=8), jobs=1)
    table = Cache.open(tmp_path).samples
    numbers = np.arange(200)
    np.testing.assert_array_equal(table["score"], np.where(numbers % 3 == 1, numbers / 2, np.nan))
    np.testing.assert_array_equal(table["count"], np.where(numbers > 150, 1, np.nan))
    np.testing.assert_array_equal(table["rank"], numbers)
    remarks = table["remark"]
    assert isinstance(remarks, Strings)
    assert list(remarks) == [""] * 151 + ["late"] * 49
