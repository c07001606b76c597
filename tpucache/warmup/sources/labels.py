"""Columns of a table -> the samples' labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tpucache.errors import SourceError
from tpucache.warmup.sources.base import Label
from tpucache.warmup.sources.cells import Table, are_names, to_number


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
