"""Labels that come with the loaded sample: one that is unlike the others costs its sample, never the whole build."""

from __future__ import annotations

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
    """Arrays that come with these labels, under class names or none."""

    labels: Sequence[Label]
    classes: tuple[str, ...] = ()

    def list(self) -> Listing:
        return Listing([Sample(number, str(number)) for number in range(len(self.labels))], self.classes)

    def load(self, sample: Sample) -> Item:
        return Item({"tokens": np.arange(4)}, self.labels[sample.number])


_ODD = {
    "negative": (0, -1, (), "has the label -1: class numbers begin at 0"),
    "beyond the classes": (0, 2, ("ant", "bee"), "has the label 2: the 2 classes are 0 to 1"),
    "missing": (0, None, (), "has no label, the first sample has a class number"),
    "the only one": (None, 3, (), "has a class number, the first sample has no label"),
    "longer": ((0.5, 1.0), (1.0, 2.0, 3.0), (), "has a label of length 3, the first sample has a label of length 2"),
    "no class": (1, (1.0,), (), "has a label of length 1, the first sample has a class number"),
}


@pytest.mark.parametrize(("usual", "odd", "classes", "reason"), _ODD.values(), ids=_ODD)
def test_an_odd_label_is_reported_at_its_sample_and_can_be_skipped(
    usual: Label, odd: Label, classes: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    source = Labelled([usual] * 7 + [odd] + [usual] * 4, classes)
    with pytest.raises(SampleError, match=f"'7': {reason}"):
        build_cache(source, tmp_path / "cache", Recipe(size=8), jobs=1)
    manifest = build_cache(source, tmp_path / "cache", Recipe(size=8), jobs=1, on_error="skip")
    assert [(skipped.number, skipped.reason) for skipped in manifest.skipped] == [(7, reason)]


@pytest.mark.parametrize("usual", [1, (0.5, 1.0), None], ids=["class", "vector", "none"])
def test_added_samples_have_labels_like_existing_ones(usual: Label, tmp_path: Path) -> None:
    build_cache(Labelled([usual] * 5), tmp_path / "cache", Recipe(size=8), jobs=1)
    more = Labelled([usual] * 6 + [(1.0, 2.0, 3.0), usual])
    with pytest.raises(SampleError, match="'6': has a label of length 3, the first sample has"):
        build_cache(more, tmp_path / "cache", Recipe(size=8), jobs=1)
    manifest = build_cache(more, tmp_path / "cache", Recipe(size=8), jobs=1, on_error="skip")
    assert [skipped.number for skipped in manifest.skipped] == [6]
    assert CachedDataset(tmp_path / "cache").labels[6].tolist() == (-1 if usual is None else np.array(usual).tolist())


@pytest.mark.parametrize("label", [0, 4, (1.0,), None], ids=str)
def test_labels_of_one_kind_pass(label: Label) -> None:
    LabelRule(label, 5).check(label, "a")
