"""Labels read as the user states, whatever they look like, and classes in an order that the user gives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, get_args

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.store.files import read_text
from tpucache.store.manifest import Manifest
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources.cells import to_number
from tpucache.warmup.sources.source import Item, Label, Listing, Sample, Source, source_name

_NAMED: Final = 8


def label_source(source: Source, kind: LabelKind, classes: Sequence[str] = ()) -> Source:
    """Return a source whose labels are of a kind, or as they come for "auto", with these classes if any are given.

    Raises UsageError.
    """
    check_kind(kind, classes)
    return source if kind == "auto" and not classes else LabelledSource(source, kind, classes)


def check_kind(kind: LabelKind, classes: Sequence[str] = ()) -> None:
    """Raise UsageError for a kind that there is not, and for classes of labels that are numbers."""
    if kind not in get_args(LabelKind):
        raise UsageError(f"labels are one of {', '.join(get_args(LabelKind))}, not {kind!r}")
    if classes and kind == "numbers":
        raise UsageError("labels that are numbers have no classes: leave out --classes, or --labels numbers")


def class_names(classes: str | Path | Sequence[str] | None) -> tuple[str, ...]:
    """Return class names in their order: the names given, those of a cache, or the lines of a text file.

    Empty lines are no names. Raises UsageError for a name that is there twice and where there are none, and what
    `Manifest.load` raises for a folder.
    """
    if classes is None:
        return ()
    where = str(classes) if isinstance(classes, (str, Path)) else "classes"
    names = _read_names(Path(classes)) if isinstance(classes, (str, Path)) else tuple(classes)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"{where} has no class names: give a text file with one on each line, or a cache with classes")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"{where} has the class {twice[0]!r} more than once: each class has one number")
    return names


def labels_like(
    cache: str | Path, kind: LabelKind, classes: str | Path | Sequence[str] | None = None
) -> tuple[LabelKind, tuple[str, ...] | None]:
    """Return what the labels of a finished cache were read as, and its classes, for a cache that belongs to it.

    Raises UsageError for a kind or classes that are other ones, and what `Manifest.load` raises.
    """
    manifest, names = Manifest.load(cache), class_names(classes)
    if names and names != manifest.classes:
        raise UsageError(f"{cache} has other classes than those given: leave --classes out, or --like")
    read = manifest.source.get("labels")
    known = read.get("kind") if isinstance(read, dict) else None
    found: LabelKind = "numbers" if known == "numbers" else "multilabel" if known == "multilabel" else "auto"
    if found == "auto" and manifest.classes:
        found = "classes"
    if kind not in ("auto", found):
        raise UsageError(f"the labels of {cache} are {known or 'none'}, not {kind}: leave --labels out, or --like")
    return (found if found == "numbers" else kind), manifest.classes or None


def _read_names(path: Path) -> tuple[str, ...]:
    if path.is_dir():
        return Manifest.load(path).classes
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the classes in {path} cannot be read: {error}. Give a text file, or a cache") from error
    return tuple(line.strip() for line in lines if line.strip())


def read_labels_as(
    labels: Sequence[Label], own: Sequence[str], kind: LabelKind, classes: Sequence[str], paths: Sequence[str]
) -> tuple[list[Label], tuple[str, ...]]:
    """Return labels as a kind, and their classes; `own` are the classes as they come, `classes` those wanted, if any.

    A class that no label has is no error. Raises SampleError for a label that cannot be of this kind, SourceError for
    a class that is not wanted.
    """
    if kind == "auto" and classes and any(isinstance(label, tuple) and len(label) == 1 for label in labels):
        kind = "classes"
    known = tuple(own)
    if kind == "classes" and any(isinstance(label, tuple) for label in labels):
        known = _value_names(labels) or known
    if kind != "auto":
        labels = [read_label(label, kind, own, known, path) for label, path in zip(labels, paths, strict=True)]
    known = () if kind == "numbers" else known
    if not classes:
        return list(labels), known
    convert = _Conversion(known, classes)
    return [convert(label, path) for label, path in zip(labels, paths, strict=True)], tuple(classes)


class LabelledSource:
    """The samples of another source. One whose label cannot be of this kind, or of these classes, does not load.

    `list` is called before the source is sent to workers: it finds what the numbers of labels in the samples mean.
    """

    def __init__(self, source: Source, kind: LabelKind, classes: Sequence[str] = ()) -> None:
        self._source, self._kind, self._classes = source, kind, tuple(classes)
        self._own: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return source_name(self._source)

    def list(self) -> Listing:
        """Return the other source's listing, with labels and classes of this kind. Raises SourceError."""
        listing = self._source.list()
        self._own = listing.classes
        labels = [sample.label for sample in listing.samples]
        paths = [sample.path for sample in listing.samples]
        labels, classes = read_labels_as(labels, listing.classes, self._kind, self._classes, paths)
        samples = [
            sample if sample.label == label else dataclasses.replace(sample, label=label)
            for sample, label in zip(listing.samples, labels, strict=True)
        ]
        asked = {**listing.asked, "classes": "given"} if self._classes else listing.asked
        return dataclasses.replace(listing, samples=samples, classes=classes, asked=asked)

    def load(self, sample: Sample) -> Item:
        """Return the other source's item, with a label of this kind. Raises SampleError."""
        item = self._source.load(sample)
        label = read_label(item.label, self._kind, (), (), sample.path)
        if self._classes and self._own:
            label = _Conversion(self._own, self._classes)(label, sample.path)
        return dataclasses.replace(item, label=label)


class _Conversion:
    """Labels of known classes -> labels of the classes wanted. Numbers without names are positions already."""

    def __init__(self, known: Sequence[str], classes: Sequence[str]) -> None:
        self._known, self._classes = known, classes
        places = {name: number for number, name in enumerate(classes)}
        self._places = [places.get(name) for name in known]

    def __call__(self, label: Label, path: str) -> Label:
        if label is None:
            return None
        if isinstance(label, int):
            return self._place(label, path) if self._known else label
        if len(label) != len(self._known):
            raise SampleError(path, f"has the label {label}, which is none of the classes {_named(self._classes)}")
        marks = [0.0] * len(self._classes)
        for number, mark in enumerate(label):
            if mark:
                marks[self._place(number, path)] = mark
        return tuple(marks)

    def _place(self, number: int, path: str) -> int:
        if not 0 <= number < len(self._places):
            raise SampleError(path, f"has the label {number}: the classes are 0 to {len(self._places) - 1}")
        place = self._places[number]
        if place is None:
            raise SourceError(
                f"{path!r} has the class {self._known[number]!r}, which is none of the {len(self._classes):,} given: "
                f"{_named(self._classes)}. Add it to them, or leave its samples out"
            )
        return place


def _named(classes: Sequence[str]) -> str:
    more = f" and {len(classes) - _NAMED:,} more" if len(classes) > _NAMED else ""
    return ", ".join(map(repr, classes[:_NAMED])) + more


def read_label(label: Label, kind: LabelKind, names: Sequence[str], classes: Sequence[str], path: str) -> Label:
    """Return a label as a kind; its number is among `names`, and is to be among `classes`. Raises SampleError."""
    readers: dict[LabelKind, Callable[[], Label]] = {
        "auto": lambda: label,
        "classes": lambda: _class_number(label, classes, path),
        "numbers": lambda: _numbers(label, names, path),
        "multilabel": lambda: _marks(label, path),
    }
    return None if label is None else readers[kind]()


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
