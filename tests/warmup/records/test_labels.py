"""Labels that come with the loaded sample: one that is unlike the others costs its sample, never the whole build."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tpucache import CachedDataset, Recipe, SampleError, build_cache
from tpucache.warmup.records.encode import LabelRule
from tpucache.warmup.sources.source import Item, Label, Listing, Sample


@dataclass(frozen=True)
class Labelled:
    labels: Sequence[Label]
    classes: tuple[str, ...] = ()

    def list(self) -> Listing:
        return Listing([Sample(number, str(number)) for number in range(len(self.labels))], self.classes)

    def load(self, sample: Sample) -> Item:
        return Item({"tokens": np.arange(4)}, self.labels[sample.number])


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
    source = Labelled([usual] * 7 + [odd] + [usual] * 4, classes)
    with pytest.raises(SampleError, match=f"'7': {reason}"):
        build_cache(source, tmp_path / "cache", Recipe(size=8), jobs=1)
    manifest = build_cache(source, tmp_path / "cache", Recipe(size=8), jobs=1, on_error="skip")
    assert [skipped.number for skipped in manifest.skipped] == [7]
    assert re.match(reason, manifest.skipped[0].reason)


def test_samples_without_a_label_are_reported_where_only_one_has_one(tmp_path: Path) -> None:
    source = Labelled([None] * 7 + [3] + [None] * 4)
    with pytest.raises(SampleError, match=f"'0': {_NONE}"):
        build_cache(source, tmp_path / "cache", Recipe(size=8), jobs=1)
    manifest = build_cache(source, tmp_path / "cache", Recipe(size=8), jobs=1, on_error="skip")
    assert [skipped.number for skipped in manifest.skipped] == [*range(7), *range(8, 12)]
    assert CachedDataset(tmp_path / "cache").labels.tolist() == [3]


_ADDED = {
    "class": (1, "has the label .*: a class is one whole number"),
    "vector": ((0.5, 1.0), "has a label of 3 numbers, and most samples have 2"),
    "number": ((3.0,), "has a label of 3 numbers, and most samples have 1"),
    "none": (None, "has a label of length 3, the first sample has no label"),
}


@pytest.mark.parametrize(("usual", "reason"), _ADDED.values(), ids=_ADDED)
def test_added_samples_have_labels_like_existing_ones(usual: Label, reason: str, tmp_path: Path) -> None:
    build_cache(Labelled([usual] * 5), tmp_path / "cache", Recipe(size=8), jobs=1)
    more = Labelled([usual] * 6 + [(1.0, 2.0, 3.0), usual])
    with pytest.raises(SampleError, match=f"'6': {reason}"):
        build_cache(more, tmp_path / "cache", Recipe(size=8), jobs=1)
    manifest = build_cache(more, tmp_path / "cache", Recipe(size=8), jobs=1, on_error="skip")
    assert [skipped.number for skipped in manifest.skipped] == [6]
    assert CachedDataset(tmp_path / "cache").labels[6].tolist() == (-1 if usual is None else np.array(usual).tolist())


def test_values_that_are_added_are_numbers_where_those_of_the_cache_are(tmp_path: Path) -> None:
    build_cache(Labelled([(3.0,), (7.0,), (0.5,)]), tmp_path / "cache", Recipe(size=8), jobs=1)
    more: list[Label] = [(3.0,), (7.0,), (0.5,), *[(float(number % 2),) for number in range(200)]]
    build_cache(Labelled(more), tmp_path / "cache", Recipe(size=8), jobs=1)
    assert CachedDataset(tmp_path / "cache").labels[:5, 0].tolist() == [3, 7, 0.5, 0, 1]


def test_whole_floats_are_classes_where_they_count_from_0_and_else_numbers(tmp_path: Path) -> None:
    build_cache(Labelled([(3.0,), (7.0,)]), tmp_path / "numbers", Recipe(size=8), jobs=1)
    assert CachedDataset(tmp_path / "numbers").labels.tolist() == [[3], [7]]
    build_cache(Labelled([(1.0,), (0.0,), (2.0,)]), tmp_path / "classes", Recipe(size=8), jobs=1)
    assert CachedDataset(tmp_path / "classes").labels.tolist() == [1, 0, 2]


@pytest.mark.parametrize("label", [0, 4, (1.0,), None], ids=str)
def test_labels_of_one_kind_pass(label: Label) -> None:
    LabelRule(label, 5).check(label, "a")
