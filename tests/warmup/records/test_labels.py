"""Labels and columns that come with the loaded sample: an odd one costs its sample, never the whole build."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from made import Made, build_here, labelled
from numpy.testing import assert_array_equal

from tpucache import CachedDataset
from tpucache.errors import SampleError, SourceError
from tpucache.store.cache import Cache
from tpucache.store.format import WORK_NAME
from tpucache.store.samples import Strings
from tpucache.warmup.sources import label_source
from tpucache.warmup.sources.labels import MOST_CLASSES
from tpucache.warmup.sources.source import Item, Label

_NONE = "has no label, as other samples have"
_ODD = {
    "negative": (0, -1, (), "has the label -1, which means no label .class numbers begin at 0"),
    "beyond the classes": (0, 2, ("ant", "bee"), "has the label 2: the 2 classes are 0 to 1"),
    "missing": (0, None, (), _NONE),
    "longer": ((0.5, 1.0), (1.0, 2.0, 3.0), (), "has a label of 3 numbers, and most samples have 2"),
    "no class": (1, (1.0,), (), "has the label 1.0, and the labels looked at are whole numbers"),
    "a list": (1, (1.0, 2.0, 3.0), (), r"has the label \(1.0, 2.0, 3.0\): a class is one whole number"),
}


@pytest.mark.parametrize(("usual", "odd", "classes", "reason"), _ODD.values(), ids=_ODD)
def test_an_odd_label_is_reported_at_its_sample_and_can_be_skipped(
    usual: Label, odd: Label, classes: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    source = labelled([usual] * 7 + [odd] + [usual] * 4, classes)
    with pytest.raises(SampleError, match=f"'7': {reason}"):
        build_here(source, tmp_path / "cache")
    manifest = build_here(source, tmp_path / "cache", on_error="skip")
    assert [skipped.number for skipped in manifest.skipped] == [7]
    assert re.match(reason, manifest.skipped[0].reason)


def test_samples_without_a_label_are_reported_where_only_one_has_one(tmp_path: Path) -> None:
    source = labelled([None] * 7 + [3] + [None] * 4)
    with pytest.raises(SampleError, match=f"'0': {_NONE}"):
        build_here(source, tmp_path / "cache")
    manifest = build_here(source, tmp_path / "cache", on_error="skip")
    assert [skipped.number for skipped in manifest.skipped] == [*range(7), *range(8, 12)]
    assert CachedDataset(tmp_path / "cache").labels.tolist() == [3]


_ADDED = {
    "class": (1, "has the label .*: a class is one whole number"),
    "vector": ((0.5, 1.0), "has a label of 3 numbers, and most samples have 2"),
    "number": ((3.0,), "has a label of 3 numbers, and most samples have 1"),
    "none": (None, "has a label, and other samples have none"),
}


@pytest.mark.parametrize(("usual", "reason"), _ADDED.values(), ids=_ADDED)
def test_added_samples_have_labels_like_existing_ones(usual: Label, reason: str, tmp_path: Path) -> None:
    build_here(labelled([usual] * 5), tmp_path / "cache")
    more = labelled([usual] * 6 + [(1.0, 2.0, 3.0), usual])
    with pytest.raises(SampleError, match=f"'6': {reason}"):
        build_here(more, tmp_path / "cache")
    manifest = build_here(more, tmp_path / "cache", on_error="skip")
    assert [skipped.number for skipped in manifest.skipped] == [6]
    assert CachedDataset(tmp_path / "cache").labels[6].tolist() == (-1 if usual is None else np.array(usual).tolist())


def test_values_that_are_added_are_numbers_where_those_of_the_cache_are(tmp_path: Path) -> None:
    build_here(labelled([(3.0,), (7.0,), (0.5,)]), tmp_path / "cache")
    more: list[Label] = [(3.0,), (7.0,), (0.5,), *[(float(number % 2),) for number in range(200)]]
    build_here(labelled(more), tmp_path / "cache")
    assert CachedDataset(tmp_path / "cache").labels[:5, 0].tolist() == [3, 7, 0.5, 0, 1]


def test_whole_floats_are_classes_where_they_count_from_0_and_else_numbers(tmp_path: Path) -> None:
    build_here(labelled([(3.0,), (7.0,)]), tmp_path / "numbers")
    assert CachedDataset(tmp_path / "numbers").labels.tolist() == [[3], [7]]
    build_here(labelled([(1.0,), (0.0,), (2.0,)]), tmp_path / "classes")
    assert CachedDataset(tmp_path / "classes").labels.tolist() == [1, 0, 2]


def uneven(number: int) -> Item:
    columns: dict[str, str | int | float] = {"rank": number}
    if number % 3 == 1:
        columns["score"] = number / 2
    if number > 150:
        columns |= {"remark": "late", "count": 1}
    return Item({"tokens": np.arange(4)}, columns=columns)


def test_a_column_that_only_some_samples_have_is_nan_or_no_text_in_the_others(tmp_path: Path) -> None:
    build_here(Made(200, uneven), tmp_path)
    table = Cache.open(tmp_path).samples
    numbers = np.arange(200)
    assert_array_equal(table["score"], np.where(numbers % 3 == 1, numbers / 2, np.nan))
    assert_array_equal(table["count"], np.where(numbers > 150, 1, np.nan))
    assert_array_equal(table["rank"], numbers)
    remarks = table["remark"]
    assert isinstance(remarks, Strings)
    assert list(remarks) == [""] * 151 + ["late"] * 49


WRONG = [-7, 2**62, MOST_CLASSES, 10**400]


def images(wrong: int, is_listed: bool) -> Made:
    labels = [0, 1, wrong, 0] if is_listed else [wrong, 1, 1, 0]

    def item(number: int) -> Item:
        return Item({"image": np.zeros((8, 8, 3), np.uint8)}, None if is_listed else labels[number])

    return Made(4, item, lambda at: labels[at] if is_listed else None)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda number: str(number)[:20])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_number_that_is_no_class_is_refused_before_a_block_is_written(
    wrong: int, is_listed: bool, tmp_path: Path
) -> None:
    with pytest.raises(SourceError if is_listed else SampleError, match=r"has the label .*class numbers"):
        build_here(images(wrong, is_listed), tmp_path / "cache")
    written = [
        path for path in (tmp_path / "cache" / WORK_NAME).glob("*") if path.suffix == ".lmdb" or path.match("spool-*")
    ]
    assert written == []
    assert [*(tmp_path / "cache").glob("*.lmdb")] == []


def test_the_largest_number_of_a_class_is_still_one() -> None:
    listing = label_source(images(MOST_CLASSES - 1, is_listed=True), "auto").list()
    assert [sample.label for sample in listing.samples] == [0, 1, MOST_CLASSES - 1, 0]
