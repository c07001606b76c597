"""What labels mean, the same for every source.

A raw label is None, a text, a number, a truth value, or a list of texts or numbers. `decide` finds how all labels of a
source are read, and a `Reading` reads each of them; `read_labels` does both for a listing. labelled.py does it for
labels that only the samples hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tpucache.errors import SourceError
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources.columns import MISSING_WORDS, are_names, find_list, in_order, is_nothing, to_number
from tpucache.warmup.sources.source import Label, Listing, name_some

#: The class number of a sample without a label in Hugging Face's datasets and TensorFlow Datasets.
UNLABELLED: Final = -1
#: The most classes without names: each gets a name in the manifest.
MOST_CLASSES: Final = 1 << 22

#: What a label of each kind is, and what to do if labels are of another kind than those of the cache in --like.
_KINDS: Final = {
    "classes": ("one class", "give one class for each sample, or leave --like out"),
    "multilabel": (
        "several classes",
        "give --label-sep if a cell has several names, and --labels multilabel if each has one",
    ),
    "numbers": ("one or several numbers", "give numbers, or leave --like out"),
}
_TRUTH: Final = ("False", "True")
#: Texts that people write between several names in one cell.
_SEPARATORS: Final = ("|", ";", ",", " ", "+", "&")
_DECIMAL_COMMA: Final = re.compile(r"\s*[+-]?\d+,\d+\s*")

_log: Final = logging.getLogger("tpucache")


class LabelFault(Exception):
    """A label that cannot be read. The text completes a sentence that begins with the sample's path."""


def plain(value: Any) -> Any:
    """Return a raw label as None, a text, a number, or a tuple of texts or of floats; any other value as a LabelFault.

    A list of one number is that number, and a list of None and NaN alone is None.
    """
    if is_nothing(value):
        return None
    if isinstance(value, (str, int, float)):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, (list, tuple)):
        known = [part for part in value if not is_nothing(part)]
        if all(isinstance(part, str) for part in known or value):
            return tuple(known)
        if not known:
            return None
        if all(part is None or isinstance(part, (int, float)) for part in value):
            with contextlib.suppress(OverflowError):
                numbers = tuple(math.nan if part is None else float(part) for part in value)
                return numbers if len(numbers) > 1 else numbers[0]
    return LabelFault(f"has the label {value!r:.60}: give a number, a text, or a list of numbers or of texts")


@dataclass(frozen=True)
class Reading:
    """How to read the labels of a source.

    `names` are the classes as the source numbers them, () if classes are only numbers, and `classes` those of the
    listing. `terms` has the name that a text or a number means: with `by_value`, what is spelled alike, otherwise the
    name and its position. With a `length`, labels are that many numbers: values, or marks, a 1 for each class of the
    sample and `low` for others. `missing` are texts and numbers that mean no label; with `skips_minus_one`, -1 does,
    among class numbers. With `has_lists`, parts of lists are classes. `where` names the source.
    """

    kind: Literal["none", "classes", "numbers", "multilabel"] = "none"
    names: tuple[str, ...] = ()
    terms: Mapping[Any, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    length: int = 0
    low: float = 0.0
    missing: Collection[str | float] = ()
    skips_minus_one: bool = False
    by_value: bool = False
    has_lists: bool = False
    is_int: bool = False
    where: str = ""

    def warn(self, *texts: str) -> None:
        """Log warnings about the source."""
        for text in texts:
            _log.warning("%s: %s", self.where, text)

    def named(self, names: Sequence[str], **changes: Any) -> Reading:
        """Return a reading with classes that a text or a position means."""
        terms: dict[Any, str] = {**dict(enumerate(names)), **dict(zip(names, names, strict=True))}
        return dataclasses.replace(self, names=tuple(names), terms=terms, **changes)

    def read(self, value: Any) -> tuple[Label, str]:
        """Return the label that a result of `plain` means, and why it cannot be read, or ""."""
        try:
            return self._read(value), ""
        except LabelFault as fault:
            return None, str(fault)

    def _read(self, value: Any) -> Label:
        if isinstance(value, LabelFault):
            raise value
        if value is None or self.is_missing(value):
            return None
        if self.kind == "numbers":
            return self._numbers(value)
        if not self.length and value == UNLABELLED and self.skips_minus_one:
            return None
        if self.kind == "none":
            raise LabelFault(f"has the label {value!r:.80}, and other samples have none")
        parts = self._marked(value) if self.length else _parts(value)
        if self.kind == "classes":
            if len(parts) == 1:
                return self._place(parts[0])
            raise LabelFault(
                f"has the label {value!r:.80}: a class is one whole number or name. Give --labels multilabel if a "
                "sample may have several"
            )
        places = {self._place(part) for part in parts if part != UNLABELLED or not self.skips_minus_one}
        return tuple(float(place in places) for place in range(len(self.classes)))

    def is_missing(self, label: Any) -> bool:
        """Return whether a label, or a part of it, is one of `missing`, or the position of a class with that name."""
        is_class = self.has_lists or isinstance(label, int)
        parts = (self.terms.get(part, part) if is_class else part for part in _parts(label))
        return bool(self.missing) and any(_value(part) in self.missing for part in parts)

    def _place(self, part: str | float) -> int:
        """Return the position in `classes` that a text or a number means."""
        key = _text(part) if self.by_value and not isinstance(part, str) else part
        if key in self.terms:
            name = self.terms[key]
            if name in self._places:
                return self._places[name]
            raise LabelFault(
                f"has the class {name!r}, which is none of the {len(self.classes):,} given classes: "
                f"{name_some(self.classes)}. Add it, or leave its samples out"
            )
        if isinstance(part, str) and not self.names:
            raise LabelFault(
                f"has the label {part!r:.60}, and most labels are numbers: give --labels classes if all labels are "
                "names"
            )
        if isinstance(part, str) or self.by_value:
            raise LabelFault(f"has the label {part!r:.60}, which is none of the classes {name_some(self.names)}")
        if not _is_whole(part) or (self.is_int and isinstance(part, float)):
            raise LabelFault(
                f"has the label {part!r}, and the labels looked at are whole numbers: a class is one whole number or "
                "name. Give --labels numbers if labels are values"
            )
        if not self.names and 0 <= part < MOST_CLASSES:
            return int(part)
        valid = (
            f"the {len(self.names):,} classes are 0 to {len(self.names) - 1:,}"
            if self.names
            else f"class numbers are 0 to {MOST_CLASSES - 1:,}; number the classes from 0, give their names, or give "
            "--labels numbers if labels are values"
        )
        raise LabelFault(f"has the label {int(part)!r:.40}: {valid}")

    @functools.cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.classes)}

    def _numbers(self, value: Any) -> tuple[float, ...]:
        value = self.terms.get(value, value) if isinstance(value, int) else value
        number = _number(value)
        numbers = _parts(number)
        # In a vector, some numbers may be unknown.
        if is_nothing(number) or any(isinstance(each, str) or abs(each) > sys.float_info.max for each in numbers):
            raise LabelFault(f"has the label {value!r:.80}, which is no number, or not a finite one")
        if len(numbers) != self.length:
            raise LabelFault(f"has a label of {len(numbers)} numbers, and most samples have {self.length}")
        return tuple(map(float, numbers))

    def _marked(self, value: Any) -> Sequence[int]:
        if not isinstance(value, tuple) or len(value) != self.length or not {*value} <= {self.low, 1.0}:
            raise LabelFault(
                f"has the label {value!r:.80}: the labels of a sample are a {self.low:g} or 1 for each class, "
                f"{self.length} in all"
            )
        return [number for number, mark in enumerate(value) if mark == 1]


def read_labels(
    listing: Listing,
    kind: LabelKind = "auto",
    classes: tuple[str, ...] = (),
    missing: tuple[str, ...] | None = None,
    *,
    where: str,
) -> Listing:
    """Return a listing with labels and classes as `decide` says. A label that cannot be read becomes a `fault`."""
    known = [sample.label for sample in listing.samples if sample.label is not None]
    if not listing.classes and known and all(isinstance(label, bool) for label in known):
        listing = dataclasses.replace(listing, classes=_TRUTH)
    values = [plain(sample.label) for sample in listing.samples]
    reading = decide([*values, *map(plain, listing.more_labels)], listing, kind, classes, missing, where=where)
    once = {value: reading.read(value) for value in dict.fromkeys(values)}
    samples, lost = list(listing.samples), 0
    for at, (value, sample) in enumerate(zip(values, listing.samples, strict=True)):
        label, fault = once[value]
        lost += label is None and not fault and _number(value) == UNLABELLED
        if fault or label != sample.label or type(label) is not type(sample.label):
            samples[at] = dataclasses.replace(sample, label=label, fault=sample.fault or fault)
    if lost and missing is None and reading.kind != "none":
        reading.warn(
            f"{lost} samples have the label -1 or NaN, which means no label: --missing-label names other values"
        )
    return dataclasses.replace(listing, samples=samples, classes=reading.classes, more_labels=())


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
    """Return how to read the labels of a listing.

    `values` are results of `plain`; with `is_all`, those of all samples. `kind`, `classes` and `missing`, texts that
    mean no label, are the user's. Raises SourceError for labels that do not fit these or the cache in --like.
    """
    columns = listing.value_names if len(listing.value_names) > 1 else ()
    names = columns or listing.classes
    is_class = str(UNLABELLED) in classes and not any(isinstance(value, int) for value in values)
    skips_minus_one = missing is None and not is_class
    if skips_minus_one and is_all and kind != "numbers" and not columns and _begin_at_minus_one(names):
        missing, skips_minus_one = (str(UNLABELLED),), False
    if kind == "auto" and classes and not names:
        may_be_names = (str, float, LabelFault, type(None))
        kind = "classes" if all(isinstance(value, may_be_names) for value in values) else kind
    plainly = Reading(
        missing={*map(_value, missing or ())},
        skips_minus_one=skips_minus_one,
        has_lists=listing.has_class_lists,
        where=where,
    ).named(names)
    plainly.warn(*_doubts(listing.classes))
    if {*map(type, values)} == {int}:
        values = list(dict.fromkeys(values))  # the frequency of a value does not matter
    readable = (value for value in values if value is not None and not isinstance(value, LabelFault))
    known = [value for value in readable if not plainly.is_missing(value)]
    reading = _find_reading(known, plainly, kind, is_all) if known else plainly
    if reading.kind == "numbers" and classes:
        some = name_some(classes)
        raise SourceError(f"{where}: labels are numbers, none of the classes {some}: leave out --classes")
    if reading.kind == "classes" and not reading.names:
        reading = reading.named(classes)
    _check_like(reading, listing.like)
    own = [name for name in reading.names if not names or reading.length or not reading.is_missing(name)]
    return dataclasses.replace(reading, classes=classes or tuple(own))


def _find_reading(known: Sequence[Any], plainly: Reading, kind: LabelKind, is_all: bool) -> Reading:
    """Return how to read labels; `plainly` has what is known before."""
    texts = {part for value in known for part in _parts(value) if isinstance(part, str)}
    words = {text for text in texts if text.strip().lower() in MISSING_WORDS}
    if words and texts > words and not plainly.names and None not in map(to_number, texts - words):
        plainly.warn(f"{', '.join(map(repr, sorted(words)))} among numbers means no label")
        plainly = dataclasses.replace(plainly, missing={*plainly.missing, *map(_value, words)})
        known = [value for value in known if not plainly.is_missing(value)]
    if not plainly.names and all(value == () for value in known):
        raise SourceError(
            f"{plainly.where}: all labels looked at are empty lists: give the labels, or leave them out (--drop with "
            "their column; in Python None)"
        )
    if texts and any(isinstance(part, str) for value in known if isinstance(value, tuple) for part in value):
        plainly = dataclasses.replace(plainly, has_lists=True)
    if kind == "auto":
        return _likely_reading(known, plainly, is_all)
    if kind == "classes":
        return _class_reading(known, plainly, is_all)
    if kind == "multilabel":
        return _several_reading(known, plainly, kind)
    if plainly.has_lists:
        raise SourceError(f"{plainly.where}: labels are lists of texts, which are classes: leave out --labels numbers")
    return _values_reading(known, plainly)


def _likely_reading(known: Sequence[Any], plainly: Reading, is_all: bool) -> Reading:
    """Return how to read labels by what most of them are; others are faults of their samples."""
    lists = [value for value in known if isinstance(value, tuple)]
    texts = [value for value in known if isinstance(value, str)]
    numbers = [value for value in known if isinstance(value, (int, float))]
    if plainly.has_lists:
        return _several_reading(known, plainly, "auto")
    if texts and (plainly.names or 2 * len(texts) > len(known)):
        return _single_reading(texts, plainly, is_all)
    if lists and (len(lists) >= len(numbers) or any(isinstance(value, float) for value in numbers)):
        return _list_reading([*lists, *numbers], plainly, "auto")
    return _single_reading(numbers, plainly, is_all)


def _single_reading(known: Sequence[Any], plainly: Reading, is_all: bool) -> Reading:
    """Return how to read texts, or numbers: as classes if they are names or whole."""
    are_texts = isinstance(known[0], str)
    if are_texts and (plainly.names or are_names(known)):
        return _class_reading(known, plainly, is_all)
    numbers = {number for value in known if abs(number := _number(value)) < math.inf}
    if not numbers or not all(map(_is_whole, numbers)):
        return _values_reading(known, plainly)
    if are_texts or is_all or plainly.names:
        return _class_reading(known, plainly, is_all)
    is_int = 2 * sum(isinstance(value, int) for value in known) >= len(known)
    counted = numbers - {UNLABELLED}
    if is_int or (len(counted) > 1 and counted == {*range(len(counted))}):
        return dataclasses.replace(plainly, kind="classes", is_int=is_int)
    return _values_reading(known, plainly)


def _values_reading(known: Sequence[Any], plainly: Reading) -> Reading:
    """Return how to read labels as numbers, as many as most have."""
    return dataclasses.replace(plainly, kind="numbers", names=(), length=_lengths(known).most_common(1)[0][0])


def _class_reading(known: Sequence[Any], plainly: Reading, is_all: bool) -> Reading:
    """Return how to read labels as one class each; if all are lists, each has a single 1."""
    ones = [_parts(value)[0] for value in known if len(_parts(value)) == 1]
    if any(isinstance(value, (str, float) if is_all else str) for value in ones):
        return _named_reading(ones, plainly, "classes")
    if not ones and plainly.has_lists:
        raise SourceError(
            f"{plainly.where}: labels are lists of texts, such as {known[0]!r:.80}, and a class is one name: give "
            "--labels multilabel"
        )
    return dataclasses.replace(plainly, kind="classes", length=0 if ones else _lengths(known).most_common(1)[0][0])


def _several_reading(known: Sequence[Any], plainly: Reading, kind: LabelKind) -> Reading:
    """Return how to read labels as any number of classes each."""
    known = [value for value in known if value != UNLABELLED or not plainly.skips_minus_one] or known
    parts = [part for value in known for part in _parts(value)]
    are_lists = plainly.has_lists or any(isinstance(value, tuple) for value in known)
    others = [part for part in parts if not isinstance(part, str)]
    if not plainly.has_lists and (are_lists or (len(others) == len(parts) and not plainly.names)):
        return _list_reading(known, plainly, "multilabel")
    if kind == "auto":
        others += [value for value in known if isinstance(value, str)]
    if are_lists and others and not plainly.names:
        raise SourceError(
            f"{plainly.where}: some labels are lists of texts and others are not, such as {others[0]!r:.80}: give a "
            "list of texts for each sample, or --labels multilabel if a text alone is the only class"
        )
    reading = _named_reading(parts, plainly, "multilabel")
    if not are_lists and float not in map(type, known):
        reading.warn(
            f"each sample has one name, such as {max(reading.names, key=len, default='')!r}, and --labels multilabel "
            "reads it as its only class: where a name is several, give lists of names, or --label-sep in a table"
        )
    return reading


def _list_reading(known: Sequence[Any], plainly: Reading, kind: LabelKind) -> Reading:
    """Return how to read lists of numbers: as classes, marks or values."""
    known = [value for value in known if not isinstance(value, str)]
    lengths = _lengths(known)
    length, count = lengths.most_common(1)[0]
    usual = {value for value in map(_parts, known) if len(value) == length}
    parts = {part for value in known for part in _parts(value)}
    are_marks = length > 1 and all({*value} <= {0.0, 1.0} for value in usual)
    are_places = not are_marks and all(_is_whole(part) and 0 <= part < MOST_CLASSES for part in parts)
    if kind == "multilabel" and are_places and (len(lengths) > 1 or length < 2):
        names = plainly.names or tuple(map(str, range(int(max(parts, default=-1)) + 1)))
        return plainly.named(names, kind=kind)
    if kind == "auto" and (2 * count <= len(known) or (are_places and len(lengths) > 1)):
        raise SourceError(
            f"{plainly.where}: labels are lists of different lengths, {', '.join(map(str, sorted(lengths)))} numbers. "
            "If the numbers are classes, give --labels multilabel. If they are values, give every sample equally many, "
            "or give --labels numbers, which refuses samples with more or fewer than most have"
        )
    are_flags = parts == {-1.0, 1.0} and length > 1
    if not (kind == "multilabel" or are_marks or (are_flags and plainly.names)):
        return _values_reading(known, plainly)
    if kind == "auto" and len(usual) > 1 and {*map(sum, usual)} == {1}:
        plainly.warn(
            f"each sample has a 1 for exactly one of {length} classes. They are read as samples with several labels: "
            "give --labels classes where one class is meant, --labels numbers for values"
        )
    names = plainly.names if len(plainly.names) == length else tuple(map(str, range(length)))
    return plainly.named(names, kind="multilabel", length=length, low=-1.0 if are_flags else 0.0)


def _named_reading(parts: Sequence[str | float], plainly: Reading, kind: Literal["classes", "multilabel"]) -> Reading:
    """Return how to read texts, perhaps beside numbers, as names of classes.

    Whole numbers are in numerical order, and names, such as 007, in alphabetical order.
    """
    if plainly.names:
        return dataclasses.replace(plainly, kind=kind)
    missing = plainly.missing
    texts = {part for part in parts if isinstance(part, str)}
    spelled = texts | {_text(part) for part in parts if not isinstance(part, str)}
    if are_names(spelled):
        terms = {text: text for text in spelled}
        plainly.warn(*_doubts(texts))
        if kind == "classes":
            plainly.warn(*_doubts_of_one(texts))
    else:
        if plainly.skips_minus_one and _begin_at_minus_one(spelled):
            missing = {*missing, UNLABELLED}
        numbers = {text: number for text in spelled if abs(number := _number(text)) < math.inf}
        terms = {text: _text(number) for text, number in numbers.items() if number not in missing}
    names = in_order(terms.values())
    return dataclasses.replace(
        plainly,
        kind=kind,
        names=names,
        terms={**terms, **dict(zip(names, names, strict=True))},
        missing=missing,
        skips_minus_one=False,
        by_value=True,
    )


def _check_like(reading: Reading, like: Mapping[str, Any]) -> None:
    """Raise SourceError for labels of another form than those of the cache that `like` describes."""
    wanted, found = like.get("kind"), reading.kind
    if found not in _KINDS or wanted not in _KINDS:
        return
    (what, advice), (now, _) = _KINDS[str(wanted)], _KINDS[found]
    if found != wanted:
        raise SourceError(f"{reading.where}: a label is {now}, and {what} in {like['cache']}: {advice}")
    values = like.get("columns")
    if found == "numbers" and isinstance(values, int) and reading.length != values:
        raise SourceError(
            f"{reading.where}: a label has {reading.length} numbers, and {values} in {like['cache']}: name the same "
            "columns with --label-col, or leave --like out"
        )


def _doubts(names: Collection[str]) -> Iterator[str]:
    """Yield what users may have meant otherwise in names of classes."""
    if words := sorted(name for name in names if name.strip().lower() in MISSING_WORDS):
        yield f"{', '.join(map(repr, words))} is a class: if it means that there is no label, give --missing-label"
    alike: dict[str, str] = {}
    for name in sorted(names):
        plainly = " ".join(unicodedata.normalize("NFC", name).split()).casefold()
        if (other := alike.setdefault(plainly, name)) != name and to_number(name) is None:
            yield f"{other!r} and {name!r} are different classes: write them alike if they are meant to be one"
            break
    others = sorted(name for name in names if to_number(name) is None)
    if len(others) < len(names) >= 2 * len(others):
        odd = (others or [min(names)])[0]
        yield f"{odd!r} is not a number, so all labels are names of classes"


def _doubts_of_one(names: Collection[str]) -> Iterator[str]:
    """Yield which name may be several, or a number with a comma."""
    if listed := find_list(names):
        yield f"the list {listed!r:.60} is one class: write names with a separator, and give --label-sep"
        return
    commas = sorted(name for name in names if _DECIMAL_COMMA.fullmatch(name))
    if commas and all(name in commas or to_number(name) is not None for name in names):
        yield f"{commas[0]!r} is the name of a class: write a point where it is a number"
        return
    known = {name.strip() for name in names}
    for separator, name in itertools.product(_SEPARATORS, sorted(names)):
        parts = [part.strip() for part in name.split(separator) if part.strip()]
        if len(parts) > 1 and known.issuperset(parts):
            which = f"{name!r:.60} is a class of its own, besides those of its parts"
            yield f"{which}: --label-sep {separator!r} reads it as several"
            return


def _begin_at_minus_one(names: Collection[str]) -> bool:
    """Return whether names are numbers, with 0 and -1 and none below: -1 then means no label."""
    numbers = () if are_names(names) else {*map(_number, names)}
    return UNLABELLED in numbers and 0 in numbers and not any(number < UNLABELLED for number in numbers)


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _lengths(values: Sequence[Any]) -> Counter[int]:
    return Counter(len(_parts(value)) for value in values)


def _value(part: str | float) -> str | float:
    """Return what to compare with `Reading.missing`: a number, or a text that is none, such as 007 or nan."""
    if isinstance(part, str) and (are_names([part]) or math.isnan(_number(part))):
        return part.strip()
    number: float = _number(part)
    return number


def _number(value: Any) -> Any:
    """Return the number in a text, or NaN; any other value unchanged."""
    number = to_number(value) if isinstance(value, str) else value
    return math.nan if number is None else number


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _text(value: float) -> str:
    return str(int(value)) if _is_whole(value) else repr(value)
