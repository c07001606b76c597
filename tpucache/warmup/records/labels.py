"""LabelRule: labels that are in the samples themselves must make one column of the samples table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tpucache.errors import SampleError
from tpucache.warmup.sources.base import Label

#: Classes that have no names, at most: each gets one in the manifest.
MOST_CLASSES: Final = 1 << 22


def class_range(classes: int) -> str:
    """Return which numbers are classes, of so many or of an unknown number (0) of them."""
    if classes:
        return f"the {classes:,} classes are 0 to {classes - 1:,}"
    return (
        f"class numbers are 0 to {MOST_CLASSES - 1:,}; number the classes from 0, give their names, or say --labels "
        "numbers where these are values"
    )


@dataclass(frozen=True)
class LabelRule:
    """What every label must be: of the same kind as `like`, and below `classes` where that is not 0."""

    like: Label
    classes: int = 0

    def check(self, label: Label, path: str) -> None:
        """Raise SampleError for another label. Noticed only at the end, it would make all that was built useless."""
        if _kind(label) != _kind(self.like):
            raise SampleError(path, f"has {_kind(label)}, the first sample has {_kind(self.like)}")
        if isinstance(label, tuple) and len(label) == self.classes and not all(0 <= mark <= 1 for mark in label):
            raise SampleError(path, f"has the label {label}: give 0 or 1 for each class, or say --labels numbers")
        if isinstance(label, int) and label < 0:
            raise SampleError(path, f"has the label {label!r:.40}: class numbers begin at 0")
        if isinstance(label, int) and label >= (self.classes or MOST_CLASSES):
            raise SampleError(path, f"has the label {label!r:.40}: {class_range(self.classes)}")


def _kind(label: Label) -> str:
    if label is None:
        return "no label"
    return "a class number" if isinstance(label, int) else f"a label of length {len(label)}"
