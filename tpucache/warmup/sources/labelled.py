"""Reads labels as the user's options say, and puts classes into the order that the user gives."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from tpucache.errors import SampleError, SourceError, TpucacheError, UsageError
from tpucache.progress import Progress
from tpucache.store.copying import earlier_tables
from tpucache.store.files import read_text
from tpucache.store.history import load_version, split_version
from tpucache.store.manifest import Manifest, differ_in_values, label_options
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources.cells import are_names, in_order, to_number
from tpucache.warmup.sources.reading import (
    UNLABELLED,
    LabelFault,
    Reading,
    are_counted_from_minus_one,
    find_reading,
    is_missing,
    is_one_hot,
    named,
    shown,
)
from tpucache.warmup.sources.source import (
    DerivedSource,
    Item,
    Label,
    Listing,
    Sample,
    Source,
    loads_in_threads,
    source_name,
)

#: Why a sample without a label cannot be used where other samples have one.
NO_LABEL_REASON: Final = (
    "has no label, as other samples have (--missing-label states what means no label): give it a label, or leave "
    "such samples out with --on-error skip"
)
#: If labels are stored in the samples, this many evenly spread samples are read to decide how to read labels.
_LOOKED_AT: Final = 64
#: The same number if a finished cache states how its labels were read.
_LOOKED_AT_AGAIN: Final = 8

#: What a label is, by the kind in a manifest and by the form of a reading.
_KINDS: Final = {"classes": "one class", "multilabel": "several classes", "numbers": "one or several numbers"}
_FORMS: Final = {
    "class": _KINDS["classes"],
    "number": _KINDS["numbers"],
    "numbers": _KINDS["numbers"],
    "marks": _KINDS["multilabel"],
    "indices": _KINDS["multilabel"],
}
_LIKE_ADVICE: Final = {
    _KINDS["classes"]: "give one class for each sample, or leave --like out",
    _KINDS["multilabel"]: "give --label-sep if a cell has several names, and --labels multilabel if each has one",
    _KINDS["numbers"]: "give numbers, or leave --like out",
}

_log: Final = logging.getLogger("tpucache")


def label_source(
    source: Source,
    kind: LabelKind,
    classes: Sequence[str] = (),
    missing: Sequence[str] | None = None,
    before: Mapping[str, Any] | None = None,
) -> Source:
    """Return `source` with labels that are read as `kind`, and converted to `classes` if these are given.

    The texts `missing` mean no label. `before` is the result of `labels_before` for a finished cache; labels are then
    read as they were for the cache. Raises UsageError for an unknown kind, for `classes` of labels that are numbers,
    and if `missing` is a single text.
    """
    check_kind(kind, classes)
    return LabelledSource(source, kind, classes, _missing_texts(missing), before)


def labels_before(cache: Path | Manifest) -> Mapping[str, Any] | None:
    """Return how the labels of a finished cache were read, and the names of its classes.

    None without a cache, or if it was relabelled.
    A damaged cache counts as no cache here; opening it later raises the error.
    """
    if isinstance(cache, Path):
        try:
            cache = Manifest.load(cache)
        except TpucacheError:
            return None
    read = cache.source.get("labels")
    return {**read, "names": cache.classes} if isinstance(read, dict) and not earlier_tables(cache) else None


def _missing_texts(missing: Sequence[Any] | None) -> tuple[str, ...] | None:
    if isinstance(missing, str):
        raise UsageError(f"missing_label must be a list of values, such as [{missing!r:.60}], not one text")
    return tuple(str(value).strip() for value in missing) if missing else None


def check_kind(kind: LabelKind, classes: Sequence[str] = ()) -> None:
    """Raise UsageError for an unknown kind, and if `classes` are given for labels that are numbers."""
    if kind not in get_args(LabelKind):
        raise UsageError(f"labels must be one of {', '.join(get_args(LabelKind))}, not {kind!r}")
    if classes and kind == "numbers":
        raise UsageError("labels that are numbers have no classes: leave out --classes, or --labels numbers")


def check_separator(kind: LabelKind, separator: str | None) -> None:
    """Raise UsageError for a separator between names if labels are numbers."""
    if separator is not None and kind == "numbers":
        raise UsageError("--label-sep is for several names of classes: leave it out, or --labels numbers")


def class_names(classes: str | Path | Sequence[str] | None) -> tuple[str, ...]:
    """Return class names in order: the given names, those of a cache, or the lines of a text file.

    Empty lines are skipped. Raises UsageError for a repeated name and if there are no names, and the errors of
    `load_version` for a folder.
    """
    if classes is None:
        return ()
    where = str(classes) if isinstance(classes, (str, Path)) else "classes"
    names = _read_names(Path(classes)) if isinstance(classes, (str, Path)) else tuple(classes)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"{where} has no class names: give a text file with one on each line, or a cache with classes")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"{where} has the class {twice[0]!r} more than once: name each class once")
    return names


def labels_like(
    cache: str | Path,
    kind: LabelKind,
    classes: str | Path | Sequence[str] | None = None,
    columns: Sequence[str] = (),
) -> tuple[LabelKind, tuple[str, ...] | None]:
    """Return the kind of labels and the classes for a new cache whose labels are like those of a finished cache.

    The kind is "numbers" if the cache's labels are numbers, and otherwise `kind`. The classes are None if the cache has
    no class names. Raises UsageError for a different kind, for other classes, and if `columns`, the names of the label
    columns, are not those of the cache; and the errors of `load_version`.
    """
    manifest, names = load_version(*split_version(cache)), class_names(classes)
    if differ_in_values(manifest.value_names, columns):
        raise UsageError(
            f"the labels of {cache} are the columns {', '.join(manifest.value_names)}, not {', '.join(columns)}: give "
            f"{label_options(manifest.value_names)}, or leave --like out"
        )
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


def like_source(source: Source, cache: str | Path) -> Source:
    """Return a source whose labels are refused unless they have the form of those of a finished cache.

    Raises the errors of `load_version`.
    """
    read = load_version(*split_version(cache)).source.get("labels")
    return _LikeSource(source, {**read, "cache": str(cache)}) if isinstance(read, dict) else source


@dataclasses.dataclass(frozen=True, repr=False)
class _LikeSource(DerivedSource):
    source: Source
    like: Mapping[str, Any]

    def list(self) -> Listing:
        return dataclasses.replace(self.source.list(), like=self.like)

    def load(self, sample: Sample) -> Item:
        return self.source.load(sample)


def _check_like(reading: Reading, like: Mapping[str, Any], where: str) -> None:
    """Raise SourceError if labels have another form than those of the cache that `like` describes."""
    wanted, found = _KINDS.get(str(like.get("kind")), ""), _FORMS.get(reading.form, "")
    values, length = like.get("columns"), reading.length
    if found and wanted and found != wanted:
        raise SourceError(f"{where}: a label is {found}, and {wanted} in {like['cache']}: {_LIKE_ADVICE[wanted]}")
    if found == wanted == _KINDS["numbers"] and isinstance(values, int) and length != values:
        raise SourceError(
            f"{where}: a label has {length} numbers, and {values} in {like['cache']}: name the same columns with "
            "--label-col, or leave --like out"
        )


def _read_names(path: Path) -> tuple[str, ...]:
    folder, version = split_version(path)
    if Path(folder).is_dir():
        return load_version(folder, version).classes
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the classes in {path} cannot be read: {error}. Give a text file, or a cache") from error
    return tuple(line.strip() for line in lines if line.strip())


def read_labels_as(
    labels: Sequence[Label],
    own: Sequence[str],
    kind: LabelKind,
    classes: Sequence[str],
    paths: Sequence[str],
    missing: Sequence[str] | None = None,
    value_names: tuple[str, ...] = (),
) -> tuple[list[Label], tuple[str, ...]]:
    """Return `labels`, read as `kind`, and their classes. `own` are the source's classes, `classes` the user's.

    The texts `missing` mean no label. `value_names` are those of a Listing. A class may have no sample. Raises
    SampleError, with the sample's path, for a label that does not fit `kind`, or whose class is not among the user's.
    Without `paths`, the error names the row.
    """
    asked = _missing_texts(missing)
    listing = Listing((), tuple(own), value_names=value_names)
    read = _read_all(labels, listing, kind, tuple(classes), asked, where="the table", may_index=False)
    for fault in read.faults:
        raise SampleError(paths[fault] if paths else f"row {fault + 1}", read.faults[fault])
    return read.labels, read.classes


class _ReadLabels(NamedTuple):
    labels: list[Label]
    classes: tuple[str, ...]
    faults: dict[int, str]


def _read_all(
    values: Sequence[Any],
    listing: Listing,
    kind: LabelKind,
    classes: tuple[str, ...],
    missing: tuple[str, ...] | None,
    *,
    where: str,
    may_index: bool,
    before: Mapping[str, Any] | None = None,
) -> _ReadLabels:
    """Return labels, their classes, and the reasons why some labels cannot be read, by position in `values`.

    `listing` has the source's classes, and `classes` are the user's. The texts `missing` mean no label. `may_index`
    says whether a list of whole numbers may be class numbers. `where` names the source in messages. `before` is the
    result of `labels_before`. Raises SourceError if labels of several classes are read as numbers.
    """
    given, stated = values, missing
    columns = _label_columns(listing)
    own = () if columns else listing.classes
    if kind == "numbers" and own and any(map(_is_marks, values)):
        raise SourceError(f"{where}: labels are lists of the classes {named(own)}: leave out --labels numbers")
    numbers = () if are_names(own) else [to_number(name) or 0 for name in own]
    is_class = str(UNLABELLED) in classes
    if missing is None and kind != "numbers" and not is_class and are_counted_from_minus_one(numbers):
        missing = (str(UNLABELLED),)
    values, own = _without_missing(values, own, missing)
    if kind == "auto" and classes and not own and _are_single_floats(values):
        kind = "classes"
    names = columns or own
    reading = find_reading(values, kind, names, missing, where=where, is_all=True, may_index=may_index)
    _check_like(reading, listing.like, where)
    known = classes_of(reading)
    classes = classes or _earlier_order(reading, before or {})
    convert = _Conversion(known, classes) if classes else None
    keys = list(zip(map(type, values), values, strict=True))

    def read(value: Any) -> Label | LabelFault:
        try:
            label = reading.read(value)
            return convert(label) if convert else label
        except LabelFault as fault:
            return fault

    once = {key: read(key[1]) for key in dict.fromkeys(keys)}  # each distinct label once
    found = list(map(once.__getitem__, keys))
    faults: dict[int, str] = {}
    if any(isinstance(label, LabelFault) for label in once.values()):
        faults = {at: str(label) for at, label in enumerate(found) if isinstance(label, LabelFault)}
    labels: list[Label] = [None if isinstance(label, LabelFault) else label for label in found]
    lost = labels.count(None) - [*given].count(None) - len(faults)
    if lost and stated is None and reading.form != "none":
        _log.warning(
            "%s: %d samples have the label -1 or NaN, which means no label: --missing-label names other values",
            where,
            lost,
        )
    _tell_of_one_hot(where, reading, labels)
    return _ReadLabels(labels, classes or known, faults)


def _tell_of_one_hot(where: str, reading: Reading, labels: Sequence[Any]) -> None:
    if reading.kind == "auto" and reading.form == "marks" and is_one_hot(labels):
        _log.warning(
            "%s: each sample has a 1 for exactly one of %d classes. They are read as samples with several labels: give "
            "--labels classes where one class is meant, --labels numbers for values", where, len(reading.names),
        )  # fmt: skip


def _label_columns(listing: Listing) -> tuple[str, ...]:
    """Return the columns of labels if there are several: then they are the classes of marks."""
    return listing.value_names if len(listing.value_names) > 1 else ()


def _is_marks(value: Any) -> bool:
    return isinstance(value, tuple) and {*value} <= {0.0, 1.0}


def _earlier_order(reading: Reading, before: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the several classes of a finished cache if they are those of a reading in another order; else ()."""
    names, earlier = classes_of(reading), tuple(before.get("names", ()))
    is_several = reading.form in ("marks", "indices") and names != earlier
    return earlier if is_several and sorted(names) == sorted(earlier) else ()


def classes_of(reading: Reading) -> tuple[str, ...]:
    """Return the names of the classes of a Reading; () if its labels are not classes."""
    if reading.form in ("number", "numbers"):
        return ()
    if reading.form == "class" and not reading.names and reading.length:
        return tuple(map(str, range(reading.length)))
    return reading.names


def _without_missing(
    values: Sequence[Any], own: tuple[str, ...], missing: tuple[str, ...] | None
) -> tuple[Sequence[Any], tuple[str, ...]]:
    """Return `values` and the classes `own` without the classes whose names mean no label.

    Samples of these classes get the label None. If the remaining names are whole numbers, the classes are in numerical
    order. If they are other numbers, they become values to regress, and there are no classes.
    """
    stated = set() if are_names(own) else {to_number(text) for text in missing or ()}  # -1.0 is the class -1
    gone = {
        number for number, name in enumerate(own) if missing and (name.strip() in missing or to_number(name) in stated)
    }
    left = [name for number, name in enumerate(own) if number not in gone]
    if gone and all(value is None or (isinstance(value, tuple) and len(value) == len(own)) for value in values):
        order = in_order(left) if own == in_order(own) else left  # without a word, all may be numbers
        kept = [own.index(name) for name in order]
        return [
            None if value is None or any(value[number] for number in gone) else tuple(value[number] for number in kept)
            for value in values
        ], tuple(order)
    if not gone or not all(value is None or isinstance(value, int) for value in values):
        return values, own
    texts = [
        None if value is None or value in gone else own[value] if 0 <= value < len(own) else value for value in values
    ]
    if are_names(left):
        return [left.index(text) if isinstance(text, str) else text for text in texts], tuple(left)
    numbers = {text: to_number(text) for text in left}
    if not all(isinstance(number, int) for number in numbers.values()):
        return [(float(numbers[text] or 0),) if isinstance(text, str) else text for text in texts], ()
    names = sorted(left, key=lambda text: numbers[text] or 0)
    return [names.index(text) if isinstance(text, str) else text for text in texts], tuple(names)


class UnreadLabelError(SampleError):
    """A sample has no label, or one that cannot be converted to the kind of the other labels, such as a class."""


class LabelledSource:
    """The samples of another source, with labels of one kind. A sample does not load if its label cannot be converted.

    If the listing has labels, all of them decide how labels are read. If labels are stored in the samples, some evenly
    spread samples decide. If the labels of these samples are texts or lists of classes that are not known, all samples
    are read to decide. Call `list` before the source is sent to workers.
    """

    def __init__(
        self,
        source: Source,
        kind: LabelKind,
        classes: Sequence[str] = (),
        missing: tuple[str, ...] | None = None,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        self._source, self._kind, self._classes, self._missing = source, kind, tuple(classes), missing
        self._before = before or {}
        self._reading: Reading | None = None
        self._order = self._classes

    @property
    def loads_in_threads(self) -> bool:
        """Whether threads may load several samples of the wrapped source at once."""
        return loads_in_threads(self._source)

    def __repr__(self) -> str:
        return source_name(self._source)

    def list(self) -> Listing:
        """Return the listing of the wrapped source, with its labels converted to one kind, and their classes.

        Raises SourceError.
        """
        listing = self._source.list()
        asked = {**listing.asked, "classes": "given"} if self._classes else dict(listing.asked)
        if self._missing:
            asked["missing_label"] = [*self._missing]
        if all(sample.label is None for sample in listing.samples):
            self._reading = self._look(listing)
            self._order = self._classes or _earlier_order(self._reading, self._before)
            return dataclasses.replace(listing, classes=self._order or classes_of(self._reading), asked=asked)
        self._reading = None
        values = [sample.label for sample in listing.samples]
        read = _read_all(
            values,
            listing,
            self._kind,
            self._classes,
            self._missing,
            where=repr(self),
            may_index=True,
            before=self._before,
        )
        is_same = values == read.labels and [*map(type, values)] == [*map(type, read.labels)] and not read.faults
        samples = listing.samples if is_same else [
            sample if sample.label == label and type(sample.label) is type(label) and at not in read.faults
            else dataclasses.replace(sample, label=label, fault=sample.fault or read.faults.get(at, ""))
            for at, (sample, label) in enumerate(zip(listing.samples, read.labels, strict=True))
        ]  # fmt: skip
        return dataclasses.replace(listing, samples=samples, classes=read.classes, asked=asked)

    def load(self, sample: Sample) -> Item:
        """Load a sample from the wrapped source, and return its item with the label converted as `list` has decided.

        Raises SampleError.
        """
        if self._reading is None:
            return self._source.load(sample)
        item, reading = self._source.load(sample), self._reading
        if reading.form == "none":
            return item if item.label is None else self._unexpected(item, sample)
        try:
            label = reading.read(item.label)
            if label is not None and self._order:
                label = _Conversion(classes_of(reading), self._order)(label)
        except LabelFault as fault:
            raise UnreadLabelError(sample.path, str(fault)) from None
        if label is None and item.label is None:
            raise UnreadLabelError(sample.path, NO_LABEL_REASON)
        if label is None:
            raise UnreadLabelError(
                sample.path,
                f"has the label {shown(item.label)}, which means no label (class numbers begin at 0; see "
                "--missing-label): give it a label, or leave such samples out with --on-error skip",
            )
        return dataclasses.replace(item, label=label)

    def _unexpected(self, item: Item, sample: Sample) -> Item:
        if is_missing(item.label, (), self._missing) or (self._missing is None and item.label == UNLABELLED):
            return dataclasses.replace(item, label=None)
        if self._before:
            return item  # it is compared with the labels of the cache later
        raise SourceError(
            f"{sample.path!r} has the label {shown(item.label)}, and the {_LOOKED_AT} samples that were looked at have "
            "none: say with --labels how to read labels"
        )

    def _look(self, listing: Listing) -> Reading:
        """Read the labels of some samples, and return how to read all labels. Raises SourceError."""
        samples, where, before = listing.samples, repr(self), self._before.get("kind")
        if before == "none" and self._kind == "auto":
            return Reading("none", missing=self._missing)
        count = _LOOKED_AT_AGAIN if before else _LOOKED_AT
        chosen = sorted({*np.linspace(0, max(0, len(samples) - 1), count).round().astype(int).tolist()})
        is_all = len(chosen) >= len(samples)
        values = self._labels_of([samples[at] for at in chosen[: len(samples)]])
        given = self._classes if any(map(_has_text, values)) else ()
        names = _label_columns(listing) or listing.classes or given
        kind = self._kind
        if kind == "auto" and before in ("classes", "multilabel", "numbers"):
            kind = before
        elif kind == "auto" and self._classes and _are_single_floats(values):
            kind = "classes"
        needs_all = not names and (any(map(_has_text, values)) or _has_lists(values, kind))
        if needs_all and not is_all and kind != "numbers":
            _log.warning("%s: the labels are texts or lists: reading all samples to find their classes", where)
            values, is_all = self._labels_of(samples), True
        reading = find_reading(values, kind, names, self._missing, where=where, is_all=False, may_index=True)
        _check_like(reading, listing.like, where)
        _tell_of_one_hot(where, reading, values)
        if reading.form == "none" and kind == "classes":
            return Reading("class", names, missing=self._missing, kind=kind)
        if reading.form in ("number", "numbers") and isinstance(columns := self._before.get("columns"), int):
            return dataclasses.replace(reading, length=columns)
        return reading

    def _labels_of(self, samples: Sequence[Sample]) -> Sequence[Any]:
        source: Any = self._source
        while not hasattr(source, "read_label") and hasattr(source, "source"):
            source = source.source  # the other source's items have the same labels
        read = getattr(source, "read_label", None) or (lambda sample: self._source.load(sample).label)
        values: list[Any] = []
        with Progress(len(samples), "read labels", "samples", is_brief=True) as progress:
            for sample in samples:
                with contextlib.suppress(SampleError):
                    values.append(read(sample))
                progress.advance(1)
        return values


def _has_lists(values: Sequence[Any], kind: LabelKind) -> bool:
    """Return whether labels may be lists of class numbers, or single ones: all samples know the highest number."""
    lengths = {len(value) if isinstance(value, tuple) else 1 for value in values if value is not None}
    return kind == "multilabel" and (len(lengths) > 1 or lengths == {1})


def _are_single_floats(values: Sequence[Any]) -> bool:
    lengths = {len(value) for value in values if isinstance(value, tuple)}
    return lengths == {1}


def _has_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, tuple) and any(isinstance(part, str) for part in value))


class _Conversion:
    """Converts labels of the source, whose classes are `known`, to the user's `classes`.

    If `known` is empty, class numbers stay as they are.
    """

    def __init__(self, known: Sequence[str], classes: Sequence[str]) -> None:
        self._known, self._classes = known, classes
        places = {name: number for number, name in enumerate(classes)}
        self._places = [places.get(name) for name in known]

    def __call__(self, label: Label) -> Label:
        if label is None:
            return None
        if isinstance(label, int):
            return self._place(label) if self._known else label
        if len(label) != len(self._known):
            raise LabelFault(f"has the label {shown(label)}, which is none of the classes {named(self._classes)}")
        marks = [0.0] * len(self._classes)
        for number, mark in enumerate(label):
            if mark:
                marks[self._place(number)] = mark
        return tuple(marks)

    def _place(self, number: int) -> int:
        if not 0 <= number < len(self._places):
            raise LabelFault(f"has the label {number}: the classes are 0 to {len(self._places) - 1}")
        place = self._places[number]
        if place is None:
            raise LabelFault(
                f"has the class {self._known[number]!r}, which is none of the "
                f"{len(self._classes):,} given classes: {named(self._classes)}. Add it, or leave its samples out"
            )
        return place
