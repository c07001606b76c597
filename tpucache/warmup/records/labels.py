"""The labels that samples tell themselves, which must make one column of the samples table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpucache.errors import SampleError
from tpucache.warmup.sources.base import Label


def labels_asked(source: Mapping[str, Any]) -> Any:
    """Return what `labels` was when a cache was built, by what its manifest says of the source."""
    read = source.get("labels")
    return read.get("asked", "auto") if isinstance(read, dict) else "auto"


def labels_unused(source: Mapping[str, Any]) -> list[str]:
    """Return what could have been labels of a cache without any, by what its manifest says of the source."""
    read = source.get("labels")
    unused = read.get("unused") if isinstance(read, dict) else None
    return [name for name in unused if isinstance(name, str)] if isinstance(unused, list) else []


@dataclass(frozen=True)
class LabelRule:
    """What every label must be: of the same kind as `like`, and below `classes` where that is not 0."""

    like: Label
    classes: int = 0

    def check(self, label: Label, path: str) -> None:
        """Raise SampleError for another label: found when all is built, it would cost all that was built."""
        if _kind(label) != _kind(self.like):
            raise SampleError(path, f"has {_kind(label)}, the first sample has {_kind(self.like)}")
        if isinstance(label, int) and label < 0:
            raise SampleError(path, f"has the label {label}: class numbers begin at 0")
        if isinstance(label, int) and label >= self.classes > 0:
            raise SampleError(path, f"has the label {label}: the {self.classes} classes are 0 to {self.classes - 1}")


def _kind(label: Label) -> str:
    if label is None:
        return "no label"
    return "a class number" if isinstance(label, int) else f"a label of length {len(label)}"
