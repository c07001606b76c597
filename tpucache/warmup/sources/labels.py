"""What labels mean, the same for every source.

A source states the raw label of each sample: None, a text, a number, a truth value, or a list of texts or numbers.
`decide` says from many raw labels how all of them are read, and a `Reading` reads each of them; `read_labels`
does both for a listing. labelled.py does it for labels that only the samples hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tpucache.errors import SourceError
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources.columns import MISSING_WORDS, are_names, find_list, in_order, is_nothing, to_number
from tpucache.warmup.sources.source import Label, Listing, name_some

#: The class number of a sample without a label in Hugging Face's datasets and TensorFlow Datasets.
UNLABELLED: Final = -1
#: The most classes without names: each gets a name in the manifest.
MOST_CLASSES: Final = 1 << 22

Form = Literal["none", "class", "numbers", "marks", "indices"]

_TRUTH: Final = ("False", "True")
#: Texts that people write between several names in one cell.
_SEPARATORS: Final = ("|", ";", ",", " ", "+", "&")
_DECIMAL_COMMA: Final = re.compile(r"\s*[+-]?\d+,\d+\s*")

_log: Final = logging.getLogger("tpucache")


class LabelFault(Exception):
    """A label that cannot be read. The text is the rest of a sentence that begins with the sample's path."""


def plain(value: Any) -> Any:
    """Return a raw label in one form: None, a text, an int, a tuple of texts, or a tuple of floats (one: a number).

    A value that is none of these becomes a LabelFault, which `Reading.read` raises.
    """
    if is_nothing(value):
        return None
    if isinstance(value, (str, int)):
        return int(value) if isinstance(value, bool) else value
    parts = [value] if isinstance(value, float) else value
    if isinstance(parts, (list, tuple)):
        if any(isinstance(part, str) for part in parts):
            parts = [part for part in parts if not is_nothing(part)]
            if all(isinstance(part, str) for part in parts):
                return tuple(parts)
        elif all(part is None or isinstance(part, (int, float)) for part in parts):
            try:
                return tuple(math.nan if part is None else float(part) for part in parts)
            except OverflowError:
                pass
    return LabelFault(f"has the label {value!r:.60}: give a number, a text, or a list of numbers or of texts")


@dataclass(frozen=True)
class Reading:
    """How to read the labels of a source.

    `form` is what a label is: a class, numbers, marks (a 0 or 1 for each class), or class numbers (`indices`). `names`
    are the classes as the source numbers them, () if classes are only numbers, and `classes` are those of the listing.
    `missing` are texts that mean no label; None: -1 means it among class numbers. With `by_value`, a number means the
    class of that name, not the class at that position. With `has_lists`, numbers in lists are classes. `low` is the
    mark of a class that a sample does not have: -1 in the columns of some data sets.
    """

    form: Form
    names: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    length: int = 0
    missing: tuple[str, ...] | None = None
    kind: LabelKind = "auto"
    by_value: bool = False
    has_lists: bool = False
    is_int: bool = False
    low: float = 0.0

    def read(self, value: Any) -> Label:
        """Return the result of `plain` as a label, or None if it means no label."""
        if isinstance(value, LabelFault):
            raise value
        if value is None or self.form == "none" or self.is_stated(value):
            return None
        is_class = self.form in ("class", "indices") and not self.by_value
        if is_class and self.missing is None and _single(value) == UNLABELLED:
            return None
        if self.form == "numbers":
            return self._numbers(value)
        if self.form == "class":
            return self._placed(self._class(value))
        marks = [0.0] * len(self.classes)
        for number in self._several(value):
            marks[self._placed(number)] = 1.0
        return tuple(marks)

    def is_stated(self, label: Any) -> bool:
        """Return whether a label is one of `missing`: the text, a number of the same value, or a class with that name.

        A list is one if a part of it is, or if all are NaN. (A NaN among numbers is an unknown value.)
        """
        if not isinstance(label, tuple):
            return self._is_stated(label, not self.by_value)
        are_unknown = bool(label) and all(isinstance(part, float) and math.isnan(part) for part in label)
        return are_unknown or any(self._is_stated(part, self.has_lists) for part in label)

    def _is_stated(self, part: Any, is_place: bool) -> bool:
        texts, numbers = self._stated
        if isinstance(part, str):
            is_number = bool(numbers) and not are_names([part]) and to_number(part) in numbers
            return is_number or part.strip() in texts
        return part in (self.gone if is_place and 0 <= part < len(self.names) else numbers)

    def _class(self, value: Any) -> int:
        if isinstance(value, tuple) and len(value) == 1:
            value = value[0]
        if isinstance(value, tuple):
            if self.kind == "classes" and not self.has_lists and _are_marks([value]) and sum(value) == 1:
                return value.index(1.0)
            raise LabelFault(
                f"has the label {shown(value)}: a class is one whole number or name. Give --labels multilabel if a "
                "sample may have several"
            )
        if isinstance(value, str) or self.by_value:
            return self._named(value)
        if not _is_whole(value) or (self.is_int and isinstance(value, float)):
            raise LabelFault(
                f"has the label {shown(value)}, and the labels looked at are whole numbers: a class is one whole "
                "number or name. Give --labels numbers if labels are values"
            )
        if not 0 <= value < (len(self.names) or MOST_CLASSES):
            raise LabelFault(f"has the label {int(value)!r:.40}: {class_range(len(self.names))}")
        return int(value)

    def _named(self, value: Any) -> int:
        text = value if isinstance(value, str) else _text(value)
        if text not in self._positions and self.by_value and not are_names(self.names):
            number = to_number(text)
            text = text if number is None else _text(number)
        if text in self._positions:
            return self._positions[text]
        if not self.names:
            raise LabelFault(
                f"has the label {value!r:.60}, and most labels are numbers: give --labels classes if all labels are "
                "names"
            )
        raise LabelFault(f"has the label {value!r:.60}, which is none of the classes {name_some(self.names)}")

    def _numbers(self, value: Any) -> Label:
        if isinstance(value, int) and self.names:
            value = self.names[value] if 0 <= value < len(self.names) else value
        if isinstance(value, str):
            number = to_number(value)
            if number is None or not math.isfinite(number):
                raise LabelFault(f"has the label {value!r:.60}, which is no number")
            value = number
        values = value if isinstance(value, tuple) else (float(value),)
        if any(isinstance(each, str) or math.isinf(each) for each in values):  # in a vector, some may be unknown
            raise LabelFault(f"has the label {shown(value)}, which is no finite number")
        if len(values) != self.length:
            raise LabelFault(f"has a label of {len(values)} numbers, and most samples have {self.length}")
        return values

    def _several(self, value: Any) -> Collection[int]:
        if self.form == "marks":
            if not isinstance(value, tuple) or len(value) != self.length or not {*value} <= {self.low, 1.0}:
                several = f"the labels of a sample are a {self.low:g} or 1 for each class, {self.length} in all"
                raise LabelFault(f"has the label {shown(value)}: {several}")
            return [number for number, mark in enumerate(value) if mark == 1]
        if not isinstance(value, tuple):
            return [self._class(value)]
        found = {
            self._positions.get(part) if isinstance(part, str) else _position(part, len(self.names))
            for part in value
            if part != UNLABELLED or self.missing is not None
        }
        numbers = [number for number in found if number is not None]
        if len(numbers) < len(found):
            raise LabelFault(f"has the labels {shown(value)}, not all of which are classes: {name_some(self.names)}")
        return numbers

    def _placed(self, number: int) -> int:
        """Return the position in `classes` of the class at the position `number` in `names`."""
        if not self.names or self.names == self.classes:
            return number
        place = self._places[number]
        if place is None:
            raise LabelFault(
                f"has the class {self.names[number]!r}, which is none of the {len(self.classes):,} given classes: "
                f"{name_some(self.classes)}. Add it, or leave its samples out"
            )
        return place

    @functools.cached_property
    def _stated(self) -> tuple[Collection[str], Collection[float]]:
        texts = {*(self.missing or ())}
        return texts, {number for text in texts if (number := to_number(text)) is not None}

    @functools.cached_property
    def gone(self) -> Collection[int]:
        """The positions in `names` of those that mean no label."""
        texts, numbers = self._stated
        values = numbers if numbers and not are_names(self.names) else ()
        return {
            number
            for number, name in enumerate(self.names if texts else ())
            if name.strip() in texts or (values and to_number(name) in values)
        }

    @functools.cached_property
    def _positions(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @functools.cached_property
    def _places(self) -> Sequence[int | None]:
        places = {name: number for number, name in enumerate(self.classes)}
        return [places.get(name) for name in self.names]


def _find_reading(values: Sequence[Any], plainly: Reading, where: str, is_all: bool) -> Reading:
    """Return how to read raw labels. `plainly` has what the user and the source state.

    With `is_all`, the `values` are those of all samples.
    """
    if {*map(type, values)} == {int}:
        values = list(dict.fromkeys(values))  # the frequency of a value does not matter
    kind, names = plainly.kind, plainly.names
    readable = (value for value in values if value is not None and not isinstance(value, LabelFault))
    known = [value for value in readable if not plainly.is_stated(value)]
    if not known:
        return plainly
    texts = [value for value in known if isinstance(value, str)]
    lists = [value for value in known if _is_list(value) or (plainly.has_lists and isinstance(value, tuple))]
    if not names and all(value == () for value in known):
        raise SourceError(
            f"{where}: all labels looked at are empty lists: give the labels, or leave them out (--drop with their "
            "column; in Python None)"
        )
    if plainly.has_lists or any(isinstance(part, str) for value in lists for part in value):
        return _several_names_reading(known, lists, plainly, where)
    if kind == "numbers":
        return _values_reading(known, plainly)
    if kind == "multilabel" and not lists:
        return _sets_of_one(known, plainly, where)
    if texts and kind == "auto" and not names and 2 * len(texts) <= len(known):
        known = [value for value in known if not isinstance(value, str)]  # a few texts count as faults of their samples
    elif texts:
        return _text_reading(known, plainly, where)
    singles = [value for value in known if isinstance(value, int)]
    if kind == "auto" and len(singles) == len(known) - len(lists) > len(lists):
        known, lists = singles, []  # a few lists among class numbers count as faults of their samples
    is_single = not lists or kind == "classes"
    return _single_reading(known, plainly, where, is_all) if is_single else _list_reading(known, plainly, where)


def _values_reading(known: Sequence[Any], plainly: Reading) -> Reading:
    """Return how to read labels as numbers: as many as most labels have."""
    length = _lengths(known).most_common(1)[0][0]
    names = () if any(map(_is_list, known)) else plainly.names
    return dataclasses.replace(plainly, form="numbers", names=names, length=length)


def _lengths(known: Sequence[Any]) -> Counter[int]:
    return Counter(len(value) if isinstance(value, tuple) else 1 for value in known)


def _several_names_reading(known: Sequence[Any], lists: Sequence[Any], plainly: Reading, where: str) -> Reading:
    """Return how to read lists of texts, or of class numbers whose names are stated."""
    kind, names = plainly.kind, plainly.names
    if kind == "numbers":
        raise SourceError(f"{where}: labels are lists of texts, which are classes: leave out --labels numbers")
    if kind == "classes":
        ones = [value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in known]
        ones = [value for value in ones if not isinstance(value, tuple)]  # longer lists are faults of their samples
        if not ones:
            raise SourceError(
                f"{where}: labels are lists of texts, such as {shown(known[0])}, and a class is one name: give "
                "--labels multilabel"
            )
        return _text_reading(ones, plainly, where)
    texts = [value for value in known if isinstance(value, str)]
    if len(lists) + len(texts) < len(known) or (texts and kind != "multilabel"):
        others = [value for value in known if not isinstance(value, tuple)] or known
        raise SourceError(
            f"{where}: some labels are lists of texts and others are not, such as {shown(others[0])}: give a list of "
            "texts for each sample, or --labels multilabel if a text alone is the only class"
        )
    parts = {part for value in lists for part in value if isinstance(part, str)} | {*texts}
    own, missing = names or in_order(parts), plainly.missing
    if not names:
        _tell_of_words({name for name in parts if name.strip().lower() in MISSING_WORDS}, where)
        _tell_of_alike(parts, where)
    if missing is None and not names and are_counted_from_minus_one(_values_of(own)):
        missing = (str(UNLABELLED),)
    return dataclasses.replace(plainly, form="indices", names=own, missing=missing)


def _sets_of_one(known: Sequence[Any], plainly: Reading, where: str) -> Reading:
    """Return how to read labels of one class each as the only class of several possible ones."""
    known = [value for value in known if plainly.missing is not None or _single(value) != UNLABELLED] or known
    if any(isinstance(value, str) for value in known):
        reading = dataclasses.replace(_text_reading(known, plainly, where), form="indices")
    elif plainly.names and all(isinstance(value, int) for value in known):
        reading = dataclasses.replace(plainly, form="indices")
    else:
        return _list_reading(known, plainly, where)
    _log.warning(
        "%s: each sample has one name, such as %r, and --labels multilabel reads it as its only class: where a name is "
        "several, give lists of names, or --label-sep in a table", where, max(reading.names, key=len, default=""),
    )  # fmt: skip
    return reading


def _text_reading(known: Sequence[Any], plainly: Reading, where: str) -> Reading:
    """Return how to read texts, perhaps beside numbers, as one class each, or as values if they are other numbers.

    With stated names, a text is the name of a class. Otherwise whole numbers are classes in numerical order, and names,
    such as 007, in alphabetical order. NA and the like mean no label among numbers.
    """
    if plainly.names:
        return dataclasses.replace(plainly, form="class")
    kind, missing = plainly.kind, plainly.missing
    texts = {value for value in known if isinstance(value, str)}
    kept = _without_words(texts, where)
    gone = [*(missing or ()), *(text.strip() for text in texts - kept)]
    others = () if kind == "auto" else (value for value in known if not isinstance(value, str))
    labels = kept | {_text(_single(value) or 0) for value in others}
    if are_names(labels):
        _tell_of_joined(labels, where)
        names = tuple(sorted(labels))
    else:
        numbers = {number for text in labels if math.isfinite(number := to_number(text) or 0)}
        if missing is None and are_counted_from_minus_one(numbers):
            gone, numbers = [*gone, str(UNLABELLED)], numbers - {UNLABELLED}
        if kind == "auto" and not (numbers and all(map(_is_whole, numbers))):
            return dataclasses.replace(plainly, form="numbers", length=1, missing=tuple(gone) or missing)
        names = tuple(map(_text, sorted(numbers)))
    return dataclasses.replace(plainly, form="class", names=names, missing=tuple(gone) or missing, by_value=True)


def _single_reading(known: Sequence[Any], plainly: Reading, where: str, is_all: bool) -> Reading:
    """Return how to read single numbers. Numbers that are not finite count as faults of their samples."""
    found = [number for value in known if (number := _single(value)) is not None]
    numbers = [number for number in found if isinstance(number, int) or math.isfinite(number)] or found
    values = dataclasses.replace(plainly, form="numbers", length=1)
    reading = dataclasses.replace(plainly, form="class")
    if plainly.kind == "auto" and not all(map(_is_whole, numbers)):
        return values
    if plainly.names:
        return reading
    if not is_all and plainly.kind == "auto":
        if 2 * sum(isinstance(value, int) for value in known) >= len(known):
            return dataclasses.replace(reading, is_int=True)
        counted = {*numbers} - {UNLABELLED}
        return reading if len(counted) > 1 and counted == {*range(len(counted))} else values
    are_floats = len(found) == len(known) and any(isinstance(value, tuple) for value in known)
    return _text_reading([*map(_text, found)], plainly, where) if is_all and are_floats else reading


def _list_reading(known: Sequence[Any], plainly: Reading, where: str) -> Reading:
    kind, names = plainly.kind, plainly.names
    several = [value if isinstance(value, tuple) else (value,) for value in known]
    lengths = _lengths(known)
    length, count = lengths.most_common(1)[0]
    parts = {part for value in several for part in value}
    are_marks = length > 1 and _are_marks([value for value in several if len(value) == length])
    are_indices = not are_marks and all(_position(part, MOST_CLASSES) is not None for part in parts)
    if kind == "multilabel" and are_indices and (len(lengths) > 1 or length < 2):
        own = names or tuple(map(str, range(int(max(parts, default=-1)) + 1)))
        return dataclasses.replace(plainly, form="indices", names=own)
    if kind == "auto" and (2 * count <= len(known) or (are_indices and len(lengths) > 1)):
        raise SourceError(
            f"{where}: labels are lists of different lengths, {', '.join(map(str, sorted(lengths)))} numbers. If the "
            "numbers are classes, give --labels multilabel. If they are values, give every sample equally many, or "
            "give --labels numbers, which refuses samples with more or fewer than most have"
        )
    are_flags = parts == {-1.0, 1.0} and length > 1
    if kind == "multilabel" or are_marks or (are_flags and names):
        own = names if len(names) == length else tuple(map(str, range(length)))
        low = -1.0 if are_flags else 0.0
        return dataclasses.replace(plainly, form="marks", names=own, length=length, low=low)
    return _values_reading(known, plainly)


def decide(
    values: Sequence[Any],
    listing: Listing,
    kind: LabelKind,
    classes: tuple[str, ...],
    missing: tuple[str, ...] | None,
    *,
    where: str,
    is_all: bool = True,
) -> Reading:
    """Return how to read the labels of a listing, with the classes in the order that the user gives.

    `classes` are the user's, and the texts `missing` mean no label.
    """
    columns = listing.value_names if len(listing.value_names) > 1 else ()
    names = columns or listing.classes
    if missing is None and str(UNLABELLED) in classes and not any(isinstance(value, int) for value in values):
        missing = ()
    elif (
        missing is None
        and kind != "numbers"
        and is_all
        and not columns
        and are_counted_from_minus_one(_values_of(names))
    ):
        missing = (str(UNLABELLED),)
    singles = (str, LabelFault, type(None))
    if (
        kind == "auto"
        and classes
        and not names
        and all(
            isinstance(v, singles) or (isinstance(v, tuple) and len(v) == 1 and isinstance(v[0], float)) for v in values
        )
    ):
        kind = "classes"
    plainly = Reading("none", names, missing=missing, kind=kind, has_lists=listing.has_class_lists)
    reading = _find_reading(values, plainly, where, is_all)
    if classes and reading.form == "numbers":
        raise SourceError(f"{where}: labels are numbers, none of the classes {name_some(classes)}: leave out --classes")
    known = () if reading.form == "numbers" else reading.names
    if names and reading.form in ("class", "indices") and not columns:
        known = tuple(name for number, name in enumerate(known) if number not in reading.gone)
    _tell_of_one_hot(reading, values, where)
    return dataclasses.replace(reading, classes=classes or known)


def read_labels(
    listing: Listing,
    kind: LabelKind = "auto",
    classes: tuple[str, ...] = (),
    missing: tuple[str, ...] | None = None,
    *,
    where: str,
    check: Callable[[Reading], object] = lambda _: None,
) -> Listing:
    """Return a listing with its raw labels read, and their classes. A label that cannot be read becomes a `fault`.

    `check` is called with the Reading. The other arguments are those of `decide`.
    """
    raw = [sample.label for sample in listing.samples]
    known = [value for value in raw if value is not None]
    if not listing.classes and known and all(isinstance(value, bool) for value in known):
        listing = dataclasses.replace(listing, classes=_TRUTH)
    values = list(map(plain, raw))
    seen = [*values, *map(plain, listing.more_labels)] if listing.more_labels else values
    reading = decide(seen, listing, kind, classes, missing, where=where)
    check(reading)

    def read(value: Any) -> Label | LabelFault:
        try:
            return reading.read(value)
        except LabelFault as fault:
            return fault

    once = {value: read(value) for value in dict.fromkeys(values)}
    samples = []
    for sample, value in zip(listing.samples, values, strict=True):
        label, fault = once[value], sample.fault
        if isinstance(label, LabelFault):
            label, fault = None, fault or str(label)
        is_same = label == sample.label and type(label) is type(sample.label) and fault == sample.fault
        samples.append(sample if is_same else dataclasses.replace(sample, label=label, fault=fault))
    lost = sum(value is not None and once[value] is None and _is_minus_one(value) for value in values)
    if lost and missing is None and reading.form != "none":
        _log.warning(
            "%s: %d samples have the label -1 or NaN, which means no label: --missing-label names other values",
            where, lost,
        )  # fmt: skip
    return dataclasses.replace(listing, samples=samples, classes=reading.classes, more_labels=())


def _without_words(texts: Collection[str], where: str) -> set[str]:
    """Return the texts that are labels, without words such as NA and nan if all other texts are numbers.

    Warns of words and texts that a user may have meant otherwise.
    """
    distinct = {*texts}
    words = {text for text in distinct if text.strip().lower() in MISSING_WORDS}
    others = distinct - words
    if words and others and all(to_number(text) is not None for text in others):
        distinct = others
        _log.warning("%s: %s among numbers means no label", where, ", ".join(map(repr, sorted(words))))
    else:
        _tell_of_words(words, where)
    _tell_of_alike(distinct, where)
    numbers = sum(to_number(name) is not None for name in distinct)
    if numbers and 2 * numbers >= len(distinct) and are_names(distinct):
        odd = next((name for name in sorted(distinct) if to_number(name) is None), min(distinct))
        _log.warning("%s: %r is not a number, so all labels are names of classes", where, odd)
    return distinct


def _tell_of_words(words: Collection[str], where: str) -> None:
    if words:
        shown_ = ", ".join(map(repr, sorted(words)))
        _log.warning("%s: %s is a class: if it means that there is no label, give --missing-label", where, shown_)


def _tell_of_alike(names: Collection[str], where: str) -> None:
    alike: dict[str, str] = {}
    for name in sorted(names):
        plainly = " ".join(unicodedata.normalize("NFC", name).split()).casefold()
        if (other := alike.setdefault(plainly, name)) != name and to_number(name) is None:
            _log.warning(
                "%s: %r and %r are different classes: write them alike if they are meant to be one", where, other, name
            )
            break


def _tell_of_joined(names: Collection[str], where: str) -> None:
    """Warn of class names that are probably several names, or numbers with a comma."""
    if listed := find_list(names):
        _log.warning(
            "%s: the list %.60r is one class: write names with a separator, and give --label-sep", where, listed
        )
        return
    commas = sorted(name for name in names if _DECIMAL_COMMA.fullmatch(name))
    if commas and all(name in commas or to_number(name) is not None for name in names):
        _log.warning("%s: %r is the name of a class: write a point where it is a number", where, commas[0])
        return
    known = {name.strip() for name in names}
    for separator, name in itertools.product(_SEPARATORS, sorted(names)):
        parts = [part.strip() for part in name.split(separator) if part.strip()]
        if len(parts) > 1 and known.issuperset(parts):
            _log.warning(
                "%s: %.60r is a class of its own, besides those of its parts: --label-sep %r reads it as several",
                where, name, separator,
            )  # fmt: skip
            return


def _tell_of_one_hot(reading: Reading, values: Sequence[Any], where: str) -> None:
    marks = {value for value in values if isinstance(value, tuple)}
    is_one_hot = len(marks) > 1 and _are_marks([*marks]) and all(sum(value) == 1 for value in marks)
    if reading.kind == "auto" and reading.form == "marks" and is_one_hot:
        _log.warning(
            "%s: each sample has a 1 for exactly one of %d classes. They are read as samples with several labels: give "
            "--labels classes where one class is meant, --labels numbers for values", where, len(reading.names),
        )  # fmt: skip


def are_counted_from_minus_one(numbers: Collection[float]) -> bool:
    """Return whether -1 and 0 are among `numbers`, and none is below -1: then -1 means no label."""
    return UNLABELLED in numbers and 0 in numbers and min(numbers) == UNLABELLED


def _values_of(names: Collection[str]) -> Collection[float]:
    """Return the numbers that all of these names are, () if they are names."""
    return () if are_names(names) else {number for name in names if (number := to_number(name)) is not None}


def class_range(classes: int) -> str:
    """Return text that states the valid class numbers if there are `classes` classes; 0: their number is unknown."""
    if classes:
        return f"the {classes:,} classes are 0 to {classes - 1:,}"
    return (
        f"class numbers are 0 to {MOST_CLASSES - 1:,}; number the classes from 0, give their names, or give --labels "
        "numbers if labels are values"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple) and (len(value) != 1 or isinstance(value[0], str))


def _is_minus_one(value: Any) -> bool:
    return to_number(value) == UNLABELLED if isinstance(value, str) else _single(value) == UNLABELLED


def _single(value: Any) -> int | float | None:
    """Return a value that is a number, or the only number of a vector; None for any other value."""
    if isinstance(value, tuple):
        value = value[0] if len(value) == 1 else None
    return value if isinstance(value, (int, float)) else None


def _are_marks(values: Sequence[Any]) -> bool:
    return all(isinstance(value, tuple) and len(value) > 1 and {*value} <= {0.0, 1.0} for value in values)


def _position(value: Any, classes: int) -> int | None:
    """Return a class number below `classes` as an int, or None for any other value."""
    return int(value) if isinstance(value, (int, float)) and _is_whole(value) and 0 <= value < classes else None


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _text(value: float) -> str:
    return str(int(value)) if _is_whole(value) else repr(value)


def shown(value: Any) -> str:
    """Return a label as text for messages."""
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return f"{value!r:.80}"
