"""Reads labels and columns from the cells of a table, which are text, and from the values of JSON and parquet."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache.errors import SourceError
from tpucache.text import PREDICTION_COLUMNS, SEPARATOR, from_heading, part_names
from tpucache.warmup.sources.cells import CsvTable, are_names, in_order, to_number
from tpucache.warmup.sources.source import Column, Label, column_names

#: Names of labels; the first name that exists is used.
LABEL_NAMES: Final = ("label", "target", "labels", "targets", "class", "cls")
_TRUTH: Final = ("False", "True")
#: Texts that mean "no number" in a column of numbers, in lower case: those that pandas reads so.
MISSING_WORDS: Final = frozenset(
    ("na", "n/a", "nan", "-nan", "null", "none", "<na>", "#n/a", "#na", "#n/a n/a", "1.#qnan", "-1.#ind")
)

_SHOWN: Final = 4  # columns in a message, at most
#: Texts that people write between several names in one cell.
_SEPARATORS: Final = ("|", ";", ",", " ", "+", "&")
_DECIMAL_COMMA: Final = re.compile(r"\s*[+-]?\d+,\d+\s*")
_WORD_IS_CLASS: Final = "%s: %s is a class: if it means that there is no label, give --missing-label"

_log: Final = logging.getLogger("tpucache")


class TableLabels(NamedTuple):
    """The label of each row (None: no label), and the class names. `faults` says by row why a label cannot be read."""

    labels: Sequence[Label]
    classes: tuple[str, ...]
    faults: Mapping[int, str]


def read_labels(table: CsvTable, columns: Sequence[str], separator: str | None) -> TableLabels:
    """Return the labels of a table's rows.

    In a single column, whole numbers are classes in numerical order, other numbers are values to regress, and other
    texts, such as 007, are classes in alphabetical order. Several columns are a vector: of classes if all numbers are 0
    or 1, else of values. With a separator, a single column has several class names in each cell; its labels are vectors
    of classes, all 0 for an empty cell. Raises SourceError for a column without labels, for one of several columns in
    which no cell is a number, if no row has a number in each of several columns, and for several names or numbers in a
    cell of a table of predictions without a separator.
    """
    if not columns:
        return TableLabels([None] * len(table.lines), (), {})
    for name in columns:
        if not any(cell.strip() for cell in table.column(name)):
            raise SourceError(f"{table.path} has no label in any row of column {name!r}")
    if separator is not None:
        where = f"{table.path}, column {columns[0]!r}"
        return TableLabels(*split_names(table.column(columns[0]), separator, where, is_own=table.is_own), {})
    faults: dict[int, str] = {}
    if len(columns) == 1:
        _refuse_several(table, columns[0])
        labels, classes = labels_of_texts(table.column(columns[0]), f"{table.path}, column {columns[0]!r}")
        if not classes:
            _numbers(table, columns[0], faults)
        _tell_of_joined(classes, f"{table.path}, column {columns[0]!r}")
        return TableLabels([None if row in faults else label for row, label in enumerate(labels)], classes, faults)
    return TableLabels(*_vectors(table, columns, faults), faults)


def _refuse_several(table: CsvTable, column: str) -> None:
    """Raise SourceError if a cell of a table of predictions has several names or numbers, which are no class."""
    if tuple(table.names[: len(PREDICTION_COLUMNS)]) != PREDICTION_COLUMNS or column not in PREDICTION_COLUMNS:
        return
    others = table.names[len(PREDICTION_COLUMNS) :]
    classes = {*map(from_heading, others)}
    for row, cell in enumerate(table.column(column)):
        parts = part_names(cell)
        if cell in classes or not parts or parts == [cell.strip()]:
            continue
        if classes.issuperset(parts):
            raise table.wrong(row, column, f"{cell!r:.100} names several classes: add --label-sep {SEPARATOR!r}")
        if len(parts) > 1 and all(to_number(part) is not None for part in parts):
            names = " ".join(f"--label-col {name}" for name in others[:_SHOWN])
            more = " …" if len(others) > _SHOWN else ""
            raise table.wrong(row, column, f"{cell!r:.100} has several numbers: give their columns, {names}{more}")


def labels_of_texts(cells: Sequence[str], where: str) -> tuple[list[Label], tuple[str, ...]]:
    """Return the label of each text, None for an empty text, and the names of the classes.

    The texts are read as `read_labels` reads a single column. If all other texts are numbers, texts such as NA and nan
    mean no label.
    """
    distinct = without_words(cells, where)
    if are_names(distinct):
        names = sorted(distinct)
        by_name = {cell: number for number, cell in enumerate(names)}
        return [by_name.get(cell) for cell in cells], tuple(names)
    values = {cell: to_number(cell) for cell in distinct}
    if not all(isinstance(value, int) for value in values.values()):
        return [None if (value := values.get(cell)) is None else (float(value),) for cell in cells], ()
    whole = sorted({value for value in values.values() if value is not None})
    classes = {value: number for number, value in enumerate(whole)}
    return [None if (value := values.get(cell)) is None else classes[value] for cell in cells], tuple(map(str, classes))


def check_any(labels: Sequence[Label], columns: Sequence[str], where: str) -> None:
    """Raise SourceError if label `columns` are named and no sample has a label; the message begins with `where`."""
    if columns and all(label is None for label in labels):
        raise SourceError(f"{where} has no label in any row of {', '.join(map(repr, columns))}")


def tell_of_others(where: str, used: str, others: Sequence[str]) -> None:
    """Warn that the columns `others` are named like labels, but `used` is the label.

    The warning begins with `where`.
    """
    if others:
        shown = ", ".join(map(repr, others))
        _log.warning("%s: using the labels in %r, not in %s: --label-col names what to use", where, used, shown)


def without_words(cells: Collection[str], where: str) -> set[str]:
    """Return the distinct texts that are labels, without words such as NA and nan if all other texts are numbers.

    Warns of words and texts that a user may have meant otherwise; the warnings begin with `where`.
    """
    distinct = {cell for cell in set(cells) if cell.strip()}
    words = {cell for cell in distinct if cell.strip().lower() in MISSING_WORDS}
    others = distinct - words
    shown = ", ".join(map(repr, sorted(words)))
    if words and others and all(to_number(cell) is not None for cell in others):
        distinct = others
        _log.warning("%s: %s among numbers means no label", where, shown)
    elif words:
        _log.warning(_WORD_IS_CLASS, where, shown)
    _tell_of_alike(distinct, where)
    numbers = sum(to_number(name) is not None for name in distinct)
    if numbers and 2 * numbers >= len(distinct) and are_names(distinct):
        odd = next((name for name in sorted(distinct) if to_number(name) is None), min(distinct))
        _log.warning("%s: %r is not a number, so all labels are names of classes", where, odd)
    return distinct


def _tell_of_alike(names: Collection[str], where: str) -> None:
    """Warn of two names that differ only in spaces or capitals. The warning begins with `where`."""
    alike: dict[str, str] = {}
    for name in sorted(names):
        if (other := alike.setdefault(" ".join(name.split()).casefold(), name)) != name and to_number(name) is None:
            _log.warning(
                "%s: %r and %r are different classes: write them alike if they are meant to be one", where, other, name
            )
            break


def several_names(names: Collection[str], where: str) -> tuple[str, ...]:
    """Return class names, for samples with several classes, in the order of `in_order`.

    Warns of words such as NA, and of names that are nearly alike; the warnings begin with `where`.
    """
    if words := [name for name in sorted(names) if name.strip().lower() in MISSING_WORDS]:
        _log.warning(_WORD_IS_CLASS, where, ", ".join(map(repr, words)))
    _tell_of_alike(names, where)
    return in_order(names)


def _vectors(table: CsvTable, names: Sequence[str], faults: dict[int, str]) -> tuple[Sequence[Label], tuple[str, ...]]:
    columns = [_numbers(table, name, faults) for name in names]
    known = {value for value in itertools.chain(*columns) if value is not None}
    labels: list[Label] = []
    for row in zip(*columns, strict=True):
        values = tuple(float(value) for value in row if value is not None)
        labels.append(values if len(values) == len(names) else None)
    if not faults and all(label is None for label in labels):
        raise SourceError(f"{table.path} has no row with a number in each of the label columns {', '.join(names)}")
    return labels, tuple(names) if known <= {0, 1} else ()


def split_names(
    cells: Sequence[str], separator: str, where: str, *, is_own: bool = False
) -> tuple[Sequence[Label], tuple[str, ...]]:
    """Split cells with several class names. Return a 0 or 1 for each cell and class, and the names of all classes.

    `is_own` says that tpucache's `join_names` wrote the cells: the marks that it put before some names are removed.
    Raises SourceError for cells that are all lists of Python. Warns of the same names as `several_names`. Both texts
    begin with `where`.
    """
    if not is_own and (listed := _find_list(cells)):
        raise SourceError(
            f"{where}: {listed!r:.60} is a list of Python: write the names alone, with {separator!r} between them"
        )
    rows = [
        {*part_names(cell, separator)} if is_own else {part.strip() for part in cell.split(separator) if part.strip()}
        for cell in cells
    ]
    classes = several_names(set().union(*rows), where)
    return [tuple(float(name in row) for name in classes) for row in rows], classes


def _find_list(cells: Collection[str]) -> str:
    """Return the longest cell if all cells are lists of Python, else ""."""
    known = {cell.strip() for cell in cells} - {""}
    if not all((cell[0], cell[-1]) in (("[", "]"), ("(", ")"), ("{", "}")) for cell in known):
        return ""
    return max(sorted(known), key=len, default="")


def _tell_of_joined(names: Collection[str], where: str) -> None:
    """Warn of class names that are probably several names, or numbers with a comma; the warning begins with `where`."""
    if listed := _find_list(names):
        _log.warning(
            "%s: the list %.60r is one class: write names with a separator, and give --label-sep", where, listed
        )
        return
    commas = sorted(name for name in names if _DECIMAL_COMMA.fullmatch(name))
    if commas and all(name in commas or to_number(name) is not None for name in names):
        _log.warning("%s: %r is the name of a class: write a point where it is a number", where, commas[0])
        return
    known = {name.strip() for name in names}
    for separator in _SEPARATORS:
        for name in sorted(names):
            parts = [part.strip() for part in name.split(separator) if part.strip()]
            if len(parts) > 1 and known.issuperset(parts):
                _log.warning(
                    "%s: %.60r is a class of its own, besides those of its parts: --label-sep %r reads it as several",
                    where, name, separator,
                )  # fmt: skip
                return


def _numbers(table: CsvTable, name: str, faults: dict[int, str]) -> list[int | float | None]:
    """Return the numbers of a label column, None for a cell without a number.

    `faults` gets the reason for each wrong cell, by row. Empty cells and words such as NA are not wrong. Raises
    SourceError if no cell is a number.
    """
    cells = table.column(name)
    numbers: dict[str, int | float | None] = {}
    wrong = set[str]()
    for cell in set(cells):
        numbers[cell] = value = to_number(cell)
        if value is None or not math.isfinite(value):
            numbers[cell] = None
            wrong |= {cell} if cell.strip() and cell.strip().lower() not in MISSING_WORDS else set()
    reason = "is not a number: leave the cell empty where there is no label"
    if all(value is None for value in numbers.values()):
        if not wrong:
            raise SourceError(f"{table.path} has no number in any row of column {name!r}: leave this label column out")
        row = next(row for row, cell in enumerate(cells) if cell in wrong)
        raise table.wrong(row, name, f"{cells[row]!r} {reason}")
    if wrong:
        for row, cell in enumerate(cells):
            if cell in wrong:
                faults.setdefault(row, f"line {table.lines[row]}, column {name!r}: {cell!r:.60} {reason}")
    return [numbers[cell] for cell in cells]


def labels_of_values(
    values: Sequence[Any], where: str, classes: Sequence[str] = ()
) -> tuple[list[Label], tuple[str, ...]]:
    """Return each sample's label, None if it has none, and the names of the classes.

    With `classes`, which the source states, numbers and texts are these classes, and lists of them become a 0 or 1 for
    each class. Without `classes`, whole numbers are class numbers, texts mean the same as in a table, truth values are
    the classes False and True, other numbers are values to regress, lists of numbers are vectors, and lists of texts
    become a 0 or 1 for each class. A mixture of numbers, texts and lists of numbers is returned without classes. Raises
    SourceError for any other value, and for a text that is none of the classes; the message begins with `where`.
    """
    values = [None if _is_nothing(value) else value for value in values]
    known = [value for value in values if value is not None]
    lists = [value for value in known if isinstance(value, (list, tuple))]
    if lists and (classes or any(isinstance(part, str) for value in lists for part in value)):
        return _marks(values, classes, where)
    if classes:
        places = {name: number for number, name in enumerate(classes)}
        labels = [places.get(value, value) if isinstance(value, str) else value for value in values]
        wrong = next((label for label in labels if isinstance(label, str)), None)
        if wrong is not None:
            raise SourceError(f"{where}: the label {wrong!r:.60} is none of the {len(classes)} classes")
        return [_plain_number(label) for label in labels], tuple(classes)
    if all(isinstance(value, str) for value in known):
        return labels_of_texts(["" if value is None else value for value in values], where)
    if all(isinstance(value, int) for value in known):
        are_truths = known and all(isinstance(value, bool) for value in known)
        return [None if value is None else int(value) for value in values], _TRUTH if are_truths else ()
    if all(_is_float(value) for value in known):
        return [None if value is None else (float(value),) for value in values], ()
    return _of_several_kinds(values, where), ()


def _of_several_kinds(values: Sequence[Any], where: str) -> list[Label]:
    """Return numbers and texts unchanged, and lists of numbers as vectors. Raises SourceError for other values.

    `find_reading` decides later which kind is right; samples with another kind then do not load.
    """
    known = [value for value in values if value is not None]
    vectors = {id(value) for value in known if isinstance(value, (list, tuple)) and all(map(_is_float, value))}
    if len(known) != sum(id(value) in vectors or isinstance(value, (str, int, float)) for value in known):
        kinds = sorted({type(value).__name__ for value in known})
        raise SourceError(
            f"{where}: labels are {' and '.join(kinds)}: give only numbers, only texts, or only lists of numbers"
        )
    return [tuple(map(float, value)) if id(value) in vectors else value for value in values]


def labels_of_columns(columns: Mapping[str, Sequence[Any]], where: str) -> tuple[list[Label], tuple[str, ...]]:
    """Return a vector of the columns' values for each sample, and the columns as classes if all values are 0 or 1.

    A sample that lacks a value has no label. Raises SourceError for a value that is not a number; the message begins
    with `where`.
    """
    columns = {name: [None if _is_nothing(value) else value for value in values] for name, values in columns.items()}
    for name, values in columns.items():
        wrong = next((value for value in values if value is not None and not _is_number(value)), None)
        if wrong is not None:
            raise SourceError(f"{where}: label column {name!r} holds {wrong!r}: label columns must hold numbers")
    rows = list(zip(*columns.values(), strict=True))
    labels: list[Label] = [None if None in row else tuple(map(float, row)) for row in rows]
    marks = all(value in (0, 1) for row in rows for value in row if value is not None)
    return labels, tuple(columns) if marks else ()


def _marks(values: Sequence[Any], classes: Sequence[str], where: str) -> tuple[list[Label], tuple[str, ...]]:
    """Return lists of class numbers or names as a 0 or 1 for each class, and the names of the classes.

    With `classes`, the class number -1 means no class. Without `classes`, the classes are all texts, in the order of
    `in_order`. Raises SourceError for other values.
    """
    parts = (part for value in values if isinstance(value, (list, tuple)) for part in value)
    texts = {part for part in parts if isinstance(part, str) and part.strip()}
    names = tuple(classes) or several_names(texts, where)
    places: dict[Any, int] = {name: number for number, name in enumerate(names)}
    if classes:
        places |= {number: number for number in range(len(names))}
    labels: list[Label] = []
    for value in values:
        if value is not None and not isinstance(value, (list, tuple)):
            raise SourceError(f"{where}: {value!r:.60} is not a list of classes, as other labels are")
        found = {places.get(part) for part in value or () if not _is_nothing(part) and (part != -1 or not classes)}
        if None in found:
            raise SourceError(f"{where}: {value!r} are not all among the {len(names)} classes")
        labels.append(None if value is None else tuple(float(number in found) for number in range(len(names))))
    return labels, names


def _plain_number(value: Any) -> Label:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(map(float, value))
    return int(value) if isinstance(value, int) or float(value).is_integer() else (float(value),)


def _is_nothing(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or (isinstance(value, str) and not value.strip())
    )


def columns_of_values(columns: Mapping[str, Sequence[Any]]) -> dict[str, Column]:
    """Return columns of the samples table as int64, float64 or text, by their values; missing values are NaN or ""."""
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
    except OverflowError:  # a whole number beyond float64
        return False


def _is_float(value: Any) -> bool:
    """Return whether a value is a float (NaN and infinite ones, too) or an int that a float can hold.

    An infinite float is accepted here, and fails later as the error of a single sample.
    """
    return isinstance(value, float) or _is_number(value)


def _is_exact(value: Any) -> bool:
    return isinstance(value, int) and abs(value) <= 2**53
