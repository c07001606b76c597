"""A source whose labels are read as the user states, whatever they look like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from tpucache.errors import SampleError, UsageError
from tpucache.warmup.options import LabelKind
from tpucache.warmup.sources.base import Item, Label, Listing, Sample, Source
from tpucache.warmup.sources.cells import to_number


def label_source(source: Source, kind: LabelKind) -> Source:
    """Return a source whose labels are of a kind, or that are as they come for "auto". Raises UsageError."""
    if kind not in get_args(LabelKind):
        raise UsageError(f"labels are one of {', '.join(get_args(LabelKind))}, not {kind!r}")
    return source if kind == "auto" else LabelledSource(source, kind)


@dataclass(frozen=True)
class LabelledSource:
    """The samples of another source. One whose label cannot be of this kind does not load."""

    source: Source
    kind: LabelKind

    def __repr__(self) -> str:
        return repr(self.source)

    def list(self) -> Listing:
        """Return the other source's listing, with labels and classes of this kind. Raises SampleError."""
        listing = self.source.list()
        labels = [sample.label for sample in listing.samples]
        classes = listing.classes
        if self.kind == "classes" and any(isinstance(label, tuple) for label in labels):
            classes = _value_names(labels) or classes
        samples = [
            dataclasses.replace(sample, label=self._read(sample.label, listing.classes, classes, sample.path))
            for sample in listing.samples
        ]
        return dataclasses.replace(listing, samples=samples, classes=() if self.kind == "numbers" else classes)

    def load(self, sample: Sample) -> Item:
        """Return the other source's item, with a label of this kind. Raises SampleError."""
        item = self.source.load(sample)
        return dataclasses.replace(item, label=self._read(item.label, (), (), sample.path))

    def _read(self, label: Label, names: Sequence[str], classes: Sequence[str], path: str) -> Label:
        readers: dict[LabelKind, Callable[[], Label]] = {
            "auto": lambda: label,
            "classes": lambda: _class_number(label, classes, path),
            "numbers": lambda: _numbers(label, names, path),
            "multilabel": lambda: _marks(label, path),
        }
        return None if label is None else readers[self.kind]()


def _value_names(labels: Sequence[Label]) -> tuple[str, ...]:
    """Return the names of the classes that single numbers are, in the order of these."""
    values = sorted({label[0] for label in labels if isinstance(label, tuple) and len(label) == 1})
    return tuple(map(_name, values))


def _name(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _class_number(label: Label, classes: Sequence[str], path: str) -> Label:
    if isinstance(label, int):
        return label
    if isinstance(label, tuple) and len(label) == 1:
        if classes:
            return classes.index(_name(label[0]))
        if label[0].is_integer():
            return int(label[0])
    raise SampleError(path, f"has the label {label}: a class is one whole number or name a sample")


def _numbers(label: Label, names: Sequence[str], path: str) -> Label:
    if not isinstance(label, int):
        return label
    value = to_number(names[label]) if names else label
    if value is None:
        raise SampleError(path, f"has the label {names[label]!r}, which is no number")
    return (float(value),)


def _marks(label: Label, path: str) -> Label:
    if isinstance(label, tuple) and len(label) > 1 and set(label) <= {0.0, 1.0}:
        return label
    raise SampleError(path, f"has the label {label}: several labels a sample are a 0 or 1 for each class")
