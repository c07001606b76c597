"""Decides from many labels how to read the labels of a source, and then reads each label in that way."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tpucache.errors import SourceError
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources.cells import are_names, to_number
from tpucache.warmup.sources.labels import several_names, without_words
from tpucache.warmup.sources.source import Label

Form = Literal["none", "class", "number", "numbers", "marks", "indices"]

#: The class number of a sample without a label in Hugging Face's datasets and TensorFlow Datasets.
UNLABELLED: Final = -1


#: The most classes without names: each gets a name in the manifest.
MOST_CLASSES: Final = 1 << 22

_NAMED: Final = 8

_log: Final = logging.getLogger("tpucache")


def class_range(classes: int) -> str:
    """Return text that states the valid class numbers if there are `classes` classes; 0: their number is unknown."""
    if classes:
        return f"the {classes:,} classes are 0 to {classes - 1:,}"
    return (
        f"class numbers are 0 to {MOST_CLASSES - 1:,}; number the classes from 0, give their names, or give --labels "
        "numbers if labels are values"
    )


class LabelFault(Exception):
    """A label that cannot be read. The text is the rest of a sentence that begins with the sample's path."""


@dataclass(frozen=True)
class Reading:
    """How to read the labels of a source.

    `form` is the form of a label: a class, a number, a vector of numbers or of marks (a 0 or 1 for each class), or a
    list of class numbers (`indices`). `names` are the class names, () if classes are only numbers. `length` is the
    length of a vector. `missing` are texts that mean no label; None stands for the default: -1 if labels are class
    numbers. With `by_value`, a number means the class of that name, not the class at that position. With `is_int`, a
    float is not a class.
    """

    form: Form
    names: tuple[str, ...] = ()
    length: int = 0
    missing: tuple[str, ...] | None = None
    by_value: bool = False
    kind: LabelKind = "auto"
    is_int: bool = False

    def is_missing(self, value: Any) -> bool:
        """Return whether a value means no label."""
        if self.missing is None and self.form in ("class", "indices") and not self.by_value:
            return _single(value) == UNLABELLED
        return is_missing(value, self.names if self.form in ("class", "indices") else (), self.missing)

    def read(self, value: Any) -> Label:
        """Return `value` as a label of the form `form`, or None if it means no label. Raises LabelFault."""
        if value is None or self.form == "none" or self.is_missing(value):
            return None
        if self.form == "class":
            return self._class(value)
        if self.form in ("number", "numbers"):
            return self._numbers(value)
        return self._marks(value)

    def _class(self, value: Any) -> int:
        if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], str):
            value = value[0]
        if isinstance(value, str):
            if value in self.names:
                return self.names.index(value)
            number = None if not self.by_value or are_names(self.names) else to_number(value)
            if number is not None and _text(number) in self.names:
                return self.names.index(_text(number))
            if not self.names:
                raise LabelFault(
                    f"has the label {value!r:.60}, and most labels are numbers: give --labels classes if all "
                    "labels are names"
                )
            raise LabelFault(f"has the label {value!r:.60}, which is none of the classes {named(self.names)}")
        number = _single(value)
        if number is None:
            if self.kind == "classes" and _are_marks([value]) and sum(value) == 1:
                return int(value.index(1.0))
            raise LabelFault(
                f"has the label {shown(value)}: a class is one whole number or name. Give --labels multilabel "
                "if a sample may have several"
            )
        if self.by_value:
            text = _text(number)
            if text in self.names:
                return self.names.index(text)
            raise LabelFault(f"has the label {text}, which is none of the classes {named(self.names)}")
        if not _is_whole(number) or (self.is_int and isinstance(value, tuple)):
            raise LabelFault(
                f"has the label {shown(value)}, and the labels looked at are whole numbers: a class is one whole "
                "number or name. Give --labels numbers if labels are values"
            )
        if not 0 <= number < (len(self.names) or MOST_CLASSES):
            raise LabelFault(f"has the label {int(number)!r:.40}: {class_range(len(self.names))}")
        return int(number)

    def _numbers(self, value: Any) -> Label:
        if isinstance(value, int) and not isinstance(value, bool) and self.names:
            value = self.names[value] if 0 <= value < len(self.names) else value
        if isinstance(value, str):
            number = to_number(value)
            if number is None or not math.isfinite(number):
                raise LabelFault(f"has the label {value!r:.60}, which is no number")
            return (float(number),)
        values = tuple(map(float, value)) if isinstance(value, tuple) else (float(value),)
        if any(map(math.isinf, values)):  # in a vector, some values may be unknown
            raise LabelFault(f"has the label {shown(value)}, which is no finite number")
        if len(values) != self.length:
            raise LabelFault(f"has a label of {len(values)} numbers, and most samples have {self.length}")
        return values

    def _marks(self, value: Any) -> Label:
        several = "the labels of a sample are a 0 or 1 for each class"
        if self.form == "indices" and isinstance(value, (str, int)):  # a list of one value in a TFRecord
            value = (self._class(value) if self.by_value else value,)
        if not isinstance(value, tuple):
            raise LabelFault(f"has the label {shown(value)}: {several}")
        if self.form == "marks":
            if len(value) == self.length and {*value} <= {0.0, 1.0}:
                return value
            raise LabelFault(f"has the label {shown(value)}: {several}, {self.length} in all")
        places = {name: number for number, name in enumerate(self.names)}
        found = {places.get(part) if isinstance(part, str) else _position(part, len(self.names)) for part in value}
        if None in found:
            raise LabelFault(f"has the labels {shown(value)}, not all of which are classes: {named(self.names)}")
        return tuple(float(number in found) for number in range(len(self.names)))


def find_reading(
    values: Sequence[Any],
    kind: LabelKind,
    names: tuple[str, ...],
    missing: tuple[str, ...] | None,
    *,
    where: str,
    is_all: bool,
    may_index: bool,
) -> Reading:
    """Return how to read labels as `kind`. `values` are the labels of all samples (with `is_all`) or of some.

    `names` are the classes that the source states. The texts `missing` mean no label. `may_index` says whether lists of
    whole numbers may be class numbers. Raises SourceError for ambiguous labels; the message begins with `where` and
    names the options that decide.
    """
    if {*map(type, values)} == {int}:
        values = list(dict.fromkeys(values))  # the frequency of a value does not matter
    known = [value for value in values if value is not None and not is_missing(value, names, missing)]
    if not known:
        return Reading("none", names, missing=missing, kind=kind)
    texts = [value for value in known if isinstance(value, str)]
    lists = [value for value in known if isinstance(value, tuple) and (len(value) != 1 or isinstance(value[0], str))]
    if not names and all(value == () for value in known):
        raise SourceError(
            f"{where}: all labels looked at are empty lists: give the labels, or leave them out (--drop with their "
            "column; in Python None)"
        )
    if any(isinstance(part, str) for value in lists for part in value):
        return _name_lists_reading(known, kind, names, missing, where)
    if kind == "multilabel" and not lists and (singles := _singles(known, names, missing)):
        return _sets_of_one(singles, names, missing, where, may_index)
    if texts and kind == "auto" and not names and 2 * len(texts) <= len(known):
        known = [value for value in known if not isinstance(value, str)]  # a few texts count as faults of their samples
    elif texts and kind != "numbers":
        return _text_reading(known, kind, names, missing, where)
    singles = [value for value in known if isinstance(value, int)]
    if kind == "auto" and len(singles) == len(known) - len(lists) > len(lists):
        known, lists = singles, []  # a few lists among class numbers count as faults of their samples
    if not lists or kind == "classes":
        return _single_reading(known, kind, names, missing, is_all)
    return _list_reading(known, kind, names, missing, where, may_index)


def _name_lists_reading(
    known: Sequence[Any], kind: LabelKind, names: tuple[str, ...], missing: tuple[str, ...] | None, where: str
) -> Reading:
    """Return how to read the labels `known`, which hold at least one list of texts. Raises SourceError."""
    texts = [value for value in known if isinstance(value, str)]
    lists = [value for value in known if isinstance(value, tuple) and (len(value) != 1 or isinstance(value[0], str))]
    if kind == "numbers":
        raise SourceError(f"{where}: labels are lists of texts, which are classes: leave out --labels numbers")
    if kind == "classes":
        return _text_reading(_lists_of_one(known, where), kind, names, missing, where)
    if len(lists) + len(texts) < len(known):
        other = next(value for value in known if not isinstance(value, str) and value not in lists)
        raise SourceError(
            f"{where}: some labels are lists of texts and others are not, such as {shown(other)}: give a list of "
            "texts for each sample"
        )
    if texts and kind != "multilabel":
        raise SourceError(
            f"{where}: some labels are lists of texts and others are one text, such as {shown(texts[0])}: give "
            "--labels multilabel if a sample may have several"
        )
    parts = {part for value in lists for part in value if isinstance(part, str)} | {*texts}
    return Reading("indices", names or several_names(parts, where), missing=missing, kind=kind)


def _lists_of_one(known: Sequence[Any], where: str) -> list[Any]:
    """Return labels with lists of one text as that text, without longer lists, which count as faults of their samples.

    Raises SourceError if no label is left.
    """
    found = [value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in known]
    if left := [value for value in found if not isinstance(value, tuple)]:
        return left
    raise SourceError(
        f"{where}: labels are lists of texts, such as {shown(known[0])}, and a class is one name: give --labels "
        "multilabel"
    )


def _singles(known: Sequence[Any], names: Sequence[str], missing: Collection[str] | None) -> list[Any]:
    """Return labels that are one class each: texts or numbers, or numbers and lists of one number without `names`.

    Returns [] if other labels are among them.
    """
    found = [value for value in known if missing is not None or _single(value) != UNLABELLED]
    are_numbers = not names and all(_single(value) is not None for value in found)
    return found if are_numbers or all(isinstance(value, (str, int)) for value in found) else []


def _sets_of_one(
    known: Sequence[Any], names: tuple[str, ...], missing: tuple[str, ...] | None, where: str, may_index: bool
) -> Reading:
    """Return how to read labels of one class each as the only class of several possible ones."""
    if any(isinstance(value, str) for value in known):
        reading = dataclasses.replace(_text_reading(known, "multilabel", names, missing, where), form="indices")
    elif names:
        reading = Reading("indices", names, missing=missing, kind="multilabel")
    else:
        return _list_reading(known, "multilabel", names, missing, where, may_index)
    _log.warning(
        "%s: each sample has one name, such as %r, and --labels multilabel reads it as its only class: where a name is "
        "several, give lists of names, or --label-sep in a table", where, max(reading.names, key=len, default=""),
    )  # fmt: skip
    return reading


def _text_reading(
    known: Sequence[Any], kind: LabelKind, names: tuple[str, ...], missing: tuple[str, ...] | None, where: str
) -> Reading:
    """Return how to read the labels `known`, which hold at least one text.

    With `names`, a text is the name of a class, and a number its position in `names`. Without `names`, labels are read
    as `labels_of_texts` reads the cells of a table; if `missing` is None, -1 may mean no label: see
    `are_counted_from_minus_one`.
    """
    if names:
        return Reading("class", names, missing=missing, kind=kind)
    texts = {value for value in known if isinstance(value, str)}
    kept = without_words(texts, where)
    gone = [*(missing or ()), *(text.strip() for text in texts - kept)]
    others = () if kind == "auto" else (value for value in known if not isinstance(value, str))
    labels = kept | {_text(_single(value) or 0) for value in others}
    if are_names(labels):
        return Reading("class", tuple(sorted(labels)), missing=tuple(gone) or missing, by_value=True, kind=kind)
    numbers = {number for text in labels if _is_finite(number := to_number(text) or 0)}
    if missing is None and are_counted_from_minus_one(numbers):
        gone, numbers = [*gone, str(UNLABELLED)], numbers - {UNLABELLED}
    missing = tuple(gone) or missing
    if kind == "auto" and not all(map(_is_whole, numbers)):
        return Reading("number", (), 1, missing, kind=kind)
    return Reading("class", tuple(map(_text, sorted(numbers))), missing=missing, by_value=True, kind=kind)


def _single_reading(
    known: Sequence[Any], kind: LabelKind, names: tuple[str, ...], missing: tuple[str, ...] | None, is_all: bool
) -> Reading:
    found = [number for value in known if (number := _single(value)) is not None]
    numbers = [number for number in found if _is_finite(number)]  # others count as faults of their samples
    are_whole = all(map(_is_whole, numbers or found))
    has_floats = any(isinstance(value, tuple) for value in known) and len(found) == len(known)
    is_only_class = is_all and len(names) == 1 and all(value in ((0.0,), (1.0,)) for value in known)
    if kind == "multilabel" or (kind == "auto" and is_only_class):
        return Reading("marks", names, len(names), missing, kind=kind)
    if kind == "numbers" or (kind == "auto" and not are_whole):
        return Reading("number", names, 1, missing, kind=kind)
    if not is_all and not names and kind == "auto":
        integers = sum(isinstance(value, int) for value in known)
        if 2 * integers >= len(known):
            return Reading("class", names, missing=missing, kind=kind, is_int=True)
        if not _are_counted(numbers):
            return Reading("number", names, 1, missing, kind=kind)
    if has_floats and is_all and not names:
        values = sorted({float(number) for number in numbers})
        if missing is None and are_counted_from_minus_one(values):
            values, missing = values[1:], (str(UNLABELLED),)
        return Reading("class", tuple(map(_text, values)), missing=missing, by_value=True, kind=kind)
    return Reading("class", names, missing=missing, kind=kind)


def are_counted_from_minus_one(numbers: Collection[float]) -> bool:
    """Return whether -1 and 0 are among `numbers`, and none is below -1: then -1 means no label."""
    return UNLABELLED in numbers and 0 in numbers and min(numbers) == UNLABELLED


def _are_counted(numbers: Sequence[float]) -> bool:
    """Return whether floats, except -1, are 0, 1, 2 and so on, so that they are classes and not measurements."""
    values = {number for number in numbers if number != UNLABELLED}
    return len(values) > 1 and values == set(range(len(values)))


def _list_reading(
    known: Sequence[Any],
    kind: LabelKind,
    names: tuple[str, ...],
    missing: tuple[str, ...] | None,
    where: str,
    may_index: bool,
) -> Reading:
    lengths = Counter(len(value) if isinstance(value, tuple) else 1 for value in known)
    length, count = lengths.most_common(1)[0]
    alike = [value for value in known if isinstance(value, tuple) and len(value) == length]
    are_marks = length > 1 and _are_marks(alike)
    several = [value if isinstance(value, tuple) else (value,) for value in known]
    can_index = may_index and all(_position(part, MOST_CLASSES) is not None for value in several for part in value)
    if kind == "numbers":
        return Reading("numbers", (), length, missing, kind=kind)
    if kind == "multilabel" and not are_marks and can_index and (len(lengths) > 1 or length < 2):
        most = max((int(part) for value in several for part in value), default=-1)
        return Reading("indices", names or tuple(map(str, range(most + 1))), missing=missing, kind=kind)
    if kind == "auto" and (2 * count <= len(known) or (can_index and len(lengths) > 1 and not are_marks)):
        raise SourceError(
            f"{where}: labels are lists of different lengths, {', '.join(map(str, sorted(lengths)))} numbers. If the "
            "numbers are classes, give --labels multilabel. If they are values, give every sample equally many, or "
            "give --labels numbers, which refuses samples with more or fewer than most have"
        )
    if kind == "multilabel" or are_marks:
        own = names if len(names) == length else tuple(map(str, range(length)))
        return Reading("marks", own, length, missing, kind=kind)
    return Reading("numbers", (), length, missing, kind=kind)


def is_missing(value: Any, names: Sequence[str], missing: Collection[str] | None) -> bool:
    """Return whether `value` means that the sample has no label: it is NaN, or one of the texts `missing`.

    `value` may be a text, a number, the number of a class in `names`, or a vector.
    """
    if isinstance(value, tuple):
        return _is_missing_vector(value, missing)
    if isinstance(value, float) and math.isnan(value):
        return True
    if not missing:
        return False
    if isinstance(value, int) and 0 <= value < len(names):
        value = names[value]
    return value.strip() in missing if isinstance(value, str) else value in {to_number(text) for text in missing}


def _is_missing_vector(value: tuple[Any, ...], missing: Collection[str] | None) -> bool:
    """Return whether a vector means that the sample has no label.

    This is so if all of its numbers are missing, or one of its numbers or texts is listed in `missing`. A NaN among
    other numbers is only an unknown value.
    """
    if missing and any(isinstance(part, str) and part.strip() in missing for part in value):
        return True
    if not value or not all(isinstance(part, (int, float)) for part in value):
        return False
    found = [is_missing(part, (), missing) for part in value]
    stated = [is_it for part, is_it in zip(value, found, strict=True) if not math.isnan(part)]
    return all(found) or any(stated)


def is_one_hot(labels: Sequence[Label]) -> bool:
    """Return whether all vectors among `labels` have one 1 and otherwise 0, not always at the same position."""
    known = [label for label in labels if isinstance(label, tuple)]
    return len(set(known)) > 1 and _are_marks(known) and all(sum(label) == 1 for label in known)


def _single(value: Any) -> int | float | None:
    """Return a value that is a number, or the only number of a vector; None for any other value."""
    if isinstance(value, tuple):
        value = value[0] if len(value) == 1 else None
    return value if isinstance(value, (int, float)) else None


def _are_marks(values: Sequence[Any]) -> bool:
    return all(isinstance(value, tuple) and len(value) > 1 and set(value) <= {0.0, 1.0} for value in values)


def _position(value: Any, classes: int) -> int | None:
    """Return a class number below `classes` as an int, or None for any other value."""
    return int(value) if isinstance(value, (int, float)) and _is_whole(value) and 0 <= value < classes else None


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _text(value: float) -> str:
    return str(int(value)) if _is_whole(value) else repr(value)


def shown(value: Any) -> str:
    """Return a label as text for messages."""
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return f"{value!r:.80}"


def named(classes: Sequence[str]) -> str:
    """Return the first eight classes as text, and how many more there are."""
    more = f" and {len(classes) - _NAMED:,} more" if len(classes) > _NAMED else ""
    return ", ".join(map(repr, itertools.islice(classes, _NAMED))) + more
