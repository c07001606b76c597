"""Values as JSON and parquet have them -> labels and columns. For the cells of a CSV file see `labels.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpucache.errors import SourceError
from tpucache.warmup.sources.base import Column, Label
from tpucache.warmup.sources.names import column_names

#: What a label is called, the first of these that there is.
LABEL_NAMES: Final = ("label", "target", "labels", "targets", "class", "cls")


def labels_of_values(values: Sequence[Any], where: str) -> tuple[list[Label], tuple[str, ...]]:
    """Return each sample's label, None where it has none, and the names of the classes.

    Whole numbers are class numbers as they are, texts are classes in the order of their names, other numbers are values
    to regress, and lists of numbers are vectors. Raises SourceError, with `where`, for values of several kinds.
    """
    known = [value for value in values if value is not None]
    if all(isinstance(value, str) for value in known):
        names = tuple(sorted(set(known)))
        numbers = {name: number for number, name in enumerate(names)}
        return [None if value is None else numbers[value] for value in values], names
    if all(isinstance(value, int) for value in known):
        return [None if value is None else int(value) for value in values], ()
    if all(_is_number(value) for value in known):
        return [None if value is None else (float(value),) for value in values], ()
    if all(isinstance(value, (list, tuple)) and all(map(_is_number, value)) for value in known):
        return [None if value is None else tuple(map(float, value)) for value in values], ()
    kinds = sorted({type(value).__name__ for value in known})
    raise SourceError(f"{where}: labels are {' and '.join(kinds)}: give numbers, texts, or lists of numbers alone")


def labels_of_columns(columns: Mapping[str, Sequence[Any]], where: str) -> tuple[list[Label], tuple[str, ...]]:
    """Return labels that are one value in each of several columns; classes are named where all values are 0 or 1.

    A sample that lacks one of the values has no label. Raises SourceError, with `where`, for what is no number.
    """
    for name, values in columns.items():
        wrong = next((value for value in values if value is not None and not _is_number(value)), None)
        if wrong is not None:
            raise SourceError(f"{where}: label column {name!r} holds {wrong!r}: several label columns hold numbers")
    rows = list(zip(*columns.values(), strict=True))
    labels: list[Label] = [None if None in row else tuple(map(float, row)) for row in rows]
    marks = all(value in (0, 1) for row in rows for value in row if value is not None)
    return labels, tuple(columns) if marks else ()


def marks_of_numbers(values: Sequence[Any], classes: Sequence[str], where: str) -> tuple[list[Label], tuple[str, ...]]:
    """Return a 0 or 1 for each class, of lists of class numbers. Raises SourceError for other numbers."""
    labels: list[Label] = []
    for value in values:
        numbers = set(value or ())
        if not all(isinstance(number, int) and 0 <= number < len(classes) for number in numbers):
            raise SourceError(f"{where}: {value!r} are no numbers of the {len(classes)} classes")
        labels.append(None if value is None else tuple(float(number in numbers) for number in range(len(classes))))
    return labels, tuple(classes)


def columns_of_values(columns: Mapping[str, Sequence[Any]]) -> dict[str, Column]:
    """Return columns of the samples table: int64, float64 or text, as their values are; missing ones are NaN or ""."""
    names = column_names(columns)
    return {names[name]: _column(values) for name, values in columns.items()}


def _column(values: Sequence[Any]) -> Column:
    if all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in values):
        return np.array(values, np.int64)
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, float) or _is_exact(value) for value in known):
        return np.array([math.nan if value is None else value for value in values], np.float64)
    return ["" if value is None else str(value) for value in values]


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # a whole number that no float64 is near
        return False


def _is_exact(value: Any) -> bool:
    """Return whether a number is the same as a float64."""
    return isinstance(value, int) and abs(value) <= 2**53
