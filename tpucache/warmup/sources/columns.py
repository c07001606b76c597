"""Columns of a source: which texts are numbers or names, and what cells become as labels, folds and kept columns."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np

from tpucache.errors import SourceError
from tpucache.native import Array
from tpucache.text import part_names
from tpucache.warmup.sources.source import Column, Listing, Sample, column_names, spellings

#: Names of labels; the first name that exists is used.
LABEL_NAMES: Final = ("label", "target", "labels", "targets", "class", "cls")
#: Texts that mean "no number" in a column of numbers, in lower case: those that pandas reads so.
MISSING_WORDS: Final = frozenset(
    ("na", "n/a", "nan", "-nan", "null", "none", "<na>", "#n/a", "#na", "#n/a n/a", "1.#qnan", "-1.#ind")
)
_PADDED: Final = re.compile(r"\s*[+-]?0\d")
#: float64 holds every whole number below this one.
_EXACT: Final = 2**53

_log: Final = logging.getLogger("tpucache")


def to_number(text: str) -> int | float | None:
    """Return the number in a text, an int if it is whole, or None if it is not a number.

    Python's 1_0 is not a number here, and neither are digits of other scripts.
    """
    try:
        value = float(text)
    except ValueError:
        return None
    if "_" in text or not text.isascii():
        return None
    if not value.is_integer():  # nan and inf are not integers either
        return value
    if text.strip().lstrip("+-").isdecimal():
        return int(text)
    if abs(value) < _EXACT or "e" in text.lower():  # programs write large floats with an exponent
        return int(value)
    exact = Decimal(text)  # the float may be a neighbour of the number in the text
    return int(exact) if exact == exact.to_integral_value() else value


def are_names(texts: Iterable[str]) -> bool:
    """Return whether texts are class names, not class numbers: one is not a number, or 007 is among whole numbers."""
    distinct = set(texts)
    numbers = [to_number(text) for text in distinct]
    is_padded = all(isinstance(number, int) for number in numbers) and any(map(_PADDED.match, distinct))
    return None in numbers or is_padded


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return class names in the order of their classes: by value if all are numbers, else in alphabetical order."""
    numbers = {name: to_number(name) for name in names}
    if are_names(numbers) or not all(math.isfinite(number or 0) for number in numbers.values()):
        return tuple(sorted(numbers))
    return tuple(sorted(numbers, key=lambda name: (numbers[name], name)))


def to_listing(
    samples: Sequence[Sample],
    columns: Mapping[str, Sequence[Any]],
    where: str,
    *,
    labels: Sequence[str],
    kept: Iterable[str],
    separator: str | None = None,
    must_have: bool = True,
    more: Mapping[str, Column] | None = None,
    **facts: Any,
) -> Listing:
    """Return the listing of samples with these columns: some are `labels`, and others `kept` in the samples table.

    `separator` and `must_have` are those of `column_labels`, whose errors are raised. `more` are columns of the samples
    table, and `facts` fields of the Listing.
    """
    if labels:
        given = {name: columns[name] for name in labels}
        found, faults = column_labels(given, where, separator=separator, must_have=must_have)
        samples = [
            dataclasses.replace(sample, label=label, fault=faults.get(at, ""))
            for at, (sample, label) in enumerate(zip(samples, found, strict=True))
        ]
    own = {name: columns[name] for name in kept}
    table = {**(more or {}), **sample_columns(own)}
    return Listing(samples, columns=table, value_names=tuple(labels), spellings=spellings(own), **facts)


def column_labels(
    columns: Mapping[str, Sequence[Any]],
    where: str,
    *,
    separator: str | None = None,
    is_own: bool = False,
    must_have: bool = True,
) -> tuple[list[Any], Mapping[int, str]]:
    """Return the raw label of each sample from its columns of labels, and faults by position.

    One column has the labels; with a separator, several names in each text. Several columns have a number each; a
    sample that lacks one has no label. `is_own` says that tpucache's `join_names` wrote the texts.
    """
    if must_have and (empty := [name for name, values in columns.items() if all(map(is_nothing, values))]):
        raise SourceError(f"{where} has no label in any row of column {empty[0]!r}")
    if len(columns) > 1:
        return _vectors(columns, where)
    name, values = next(iter(columns.items()))
    if separator is not None:
        values = _split(values, separator, f"{where}, column {name!r}", is_own)
    return [tuple(value) if isinstance(value, list) else value for value in values], {}


def _vectors(columns: Mapping[str, Sequence[Any]], where: str) -> tuple[list[Any], Mapping[int, str]]:
    faults: dict[int, str] = {}
    found: list[list[float | None]] = []
    for name, values in columns.items():
        numbers = [_finite(value) for value in values]
        reason = "is not a number: leave the cell empty where there is no label"
        for row, (value, number) in enumerate(zip(values, numbers, strict=True)):
            is_word = isinstance(value, str) and value.strip().lower() in MISSING_WORDS
            if number is None and not is_word and not is_nothing(value):
                faults.setdefault(row, f"column {name!r}: {value!r:.60} {reason}")
        if all(number is None for number in numbers):
            if faults:
                raise SourceError(f"{where}, {next(iter(faults.values()))}")
            raise SourceError(f"{where} has no number in any row of column {name!r}: leave this label column out")
        found.append(numbers)
    labels = [None if None in row else row for row in zip(*found, strict=True)]
    if not faults and all(label is None for label in labels):
        raise SourceError(f"{where} has no row with a number in each of the label columns {', '.join(columns)}")
    return labels, faults


def _split(cells: Sequence[Any], separator: str, where: str, is_own: bool) -> list[tuple[str, ...]]:
    if wrong := [cell for cell in cells if not (cell is None or isinstance(cell, str))]:
        raise SourceError(f"{where} holds {wrong[0]!r:.60}, not text: leave --label-sep out")
    texts = [cell or "" for cell in cells]
    if not is_own and (listed := find_list(texts)):
        raise SourceError(
            f"{where}: {listed!r:.60} is a list of Python: write the names alone, with {separator!r} between them"
        )
    if is_own:
        return [tuple(part_names(cell, separator)) for cell in texts]
    return [tuple(part.strip() for part in cell.split(separator) if part.strip()) for cell in texts]


def tell_of_others(where: str, used: str, others: Sequence[str]) -> None:
    """Warn that the columns `others` are named like labels, but `used` is the label."""
    if others:
        shown = ", ".join(map(repr, others))
        _log.warning("%s: using the labels in %r, not in %s: --label-col names what to use", where, used, shown)


def sample_columns(columns: Mapping[str, Sequence[Any]]) -> dict[str, Column]:
    """Return columns of the samples table as int64, float64 or text, by their values; missing values are NaN or ""."""
    names = column_names(columns)
    return {names[name]: _column(values) for name, values in columns.items()}


def _column(values: Sequence[Any]) -> Column:
    if all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in values):
        return np.array(values, np.int64)
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, float) or (isinstance(value, int) and abs(value) <= _EXACT) for value in known):
        return np.array([math.nan if value is None else value for value in values], np.float64)
    return ["" if value is None else str(value) for value in values]


def numbers_of_texts(cells: Sequence[str]) -> Sequence[Any]:
    """Return the cells of a column as numbers if all are numbers that float64 or int64 holds, else unchanged.

    An empty cell among numbers is None.
    """
    known = {cell: to_number(cell) for cell in {*cells} if cell.strip()}
    if not known or None in known.values() or any(map(_PADDED.match, known)):  # 007 is a name
        return cells
    numbers = [known.get(cell) for cell in cells]
    if all(isinstance(number, int) and -(2**63) <= number < 2**63 for number in known.values()):
        return numbers
    if any(isinstance(number, int) and (abs(number) > 10**300 or float(number) != number) for number in known.values()):
        return cells
    return [None if number is None else float(number) for number in numbers]


def fold_numbers(values: Sequence[Any], where: str) -> Array:
    """Return a column of folds."""
    known = {value: to_number(value) if isinstance(value, str) else value for value in set(values)}
    for value, fold in known.items():
        if type(fold) is not int or not -1 <= fold < 2**31:
            raise SourceError(
                f"{where}: {value!r} is not a fold: a fold must be a whole number from 0, or -1 for a sample that "
                "every fold trains on"
            )
    return np.array([known[value] for value in values], np.int64)


def find_list(cells: Collection[str]) -> str:
    """Return the longest cell if all cells are lists of Python, else ""."""
    known = {cell.strip() for cell in cells} - {""}
    if not all((cell[0], cell[-1]) in (("[", "]"), ("(", ")"), ("{", "}")) for cell in known):
        return ""
    return max(sorted(known), key=len, default="")


def is_nothing(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def _finite(value: Any) -> float | None:
    """Return a number, or that in a text, if float64 holds it, else None."""
    number = to_number(value) if isinstance(value, str) else value
    try:
        return float(number) if isinstance(number, (int, float)) and math.isfinite(number) else None
    except OverflowError:  # a whole number beyond float64
        return None
