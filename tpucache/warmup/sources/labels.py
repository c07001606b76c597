"""Labels and columns: out of the cells of a table, which are text, and of values as JSON and parquet have them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpucache.errors import SourceError
from tpucache.warmup.sources.cells import Table, are_names, to_number
from tpucache.warmup.sources.source import Column, Label, column_names


def read_labels(table: Table, columns: Sequence[str], separator: str | None) -> tuple[Sequence[Label], tuple[str, ...]]:
    """Return each row's label, None where it has an empty cell, and the classes' names.

    One column of whole numbers is classes in the order of their numbers, one of other numbers values to regress, one of
    anything else, such as 007, classes in the order of their names. Several columns are a vector: of classes when all
    are 0 or 1, else of values. With a separator, one column of several names is a vector of classes, all 0 in an empty
    cell. Raises SourceError for a column without labels, or one of numbers that holds something else.
    """
    if not columns:
        return [None] * len(table.lines), ()
    for name in columns:
        if not any(cell.strip() for cell in table.column(name)):
            raise SourceError(f"{table.path} has no label in any row of column {name!r}")
    if separator is not None:
        return split_names(table.column(columns[0]), separator)
    if len(columns) == 1:
        return _single(table, columns[0])
    return _vectors(table, columns)


def _single(table: Table, name: str) -> tuple[Sequence[Label], tuple[str, ...]]:
    cells = table.column(name)
    distinct = {cell for cell in set(cells) if cell.strip()}
    if are_names(distinct):
        names = sorted(distinct)
        by_name = {cell: number for number, cell in enumerate(names)}
        return [by_name.get(cell) for cell in cells], tuple(names)
    values = _numbers(table, name)
    known = {value for value in values if value is not None}
    if not all(isinstance(value, int) for value in known):
        return [None if value is None else (float(value),) for value in values], ()
    classes = {value: number for number, value in enumerate(sorted(known))}
    return [None if value is None else classes[value] for value in values], tuple(map(str, classes))


def _vectors(table: Table, names: Sequence[str]) -> tuple[Sequence[Label], tuple[str, ...]]:
    columns = [_numbers(table, name) for name in names]
    known = {value for value in itertools.chain(*columns) if value is not None}
    labels: list[Label] = []
    for row in zip(*columns, strict=True):
        values = tuple(float(value) for value in row if value is not None)
        labels.append(values if len(values) == len(names) else None)
    return labels, tuple(names) if known <= {0, 1} else ()


def split_names(cells: Sequence[str], separator: str) -> tuple[Sequence[Label], tuple[str, ...]]:
    """Return lists of names in one text as a 0 or 1 for each of all names, which are the classes."""
    rows = [{part.strip() for part in cell.split(separator) if part.strip()} for cell in cells]
    classes = tuple(sorted(set().union(*rows)))
    return [tuple(float(name in row) for name in classes) for row in rows], classes


def _numbers(table: Table, name: str) -> list[int | float | None]:
    """Return a label column's numbers, None where a cell is empty. Raises SourceError for what is no finite number."""
    cells = table.column(name)
    numbers = {cell: to_number(cell) for cell in set(cells)}
    for cell, value in numbers.items():
        if cell.strip() and (value is None or not math.isfinite(value)):
            row = cells.index(cell)
            raise table.wrong(row, name, f"{cell!r} is no number: leave the cell empty where there is no label")
    return [numbers[cell] for cell in cells]


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
