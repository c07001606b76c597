"""Reads a CSV file into cells of text, and converts cells to numbers."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import posixpath
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

from tpucache.errors import SourceError
from tpucache.store.files import read_file
from tpucache.text import OWN_HEADING, PREDICTION_COLUMNS, from_cell
from tpucache.warmup.sources.archives import find_archive

_PADDED: Final = re.compile(r"\s*0\d")
#: float64 holds every whole number below this one.
_EXACT: Final = 2**53


@dataclass(frozen=True)
class CsvTable:
    """The cells of a CSV file by column, and the line in which each row begins.

    `is_own` says that `predict` or `suspects` wrote the file. These commands put a mark before text that a spreadsheet
    would read as a formula; the marks have been removed from the cells.
    """

    path: Path
    columns: Mapping[str, list[str]]
    lines: Sequence[int]
    is_own: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.columns)

    def column(self, name: str) -> list[str]:
        """Return a column's cells, one for each row. Raises SourceError if there is no such column."""
        if name not in self.names:
            raise SourceError(f"{self.path} has no column {name!r}: there are {', '.join(map(repr, self.names))}")
        return self.columns[name]

    def wrong(self, row: int, column: str, reason: str) -> SourceError:
        """Return a SourceError that names the line and the column of a cell, and gives the `reason`."""
        return SourceError(f"{self.path}, line {self.lines[row]}, column {column!r}: {reason}")


def read_table(path: str | Path) -> CsvTable:
    """Read a whole CSV file: UTF-8, with or without a byte order mark, with commas between the cells.

    Raises SourceError for a file that is not a CSV, has rows of different lengths, names a column twice or has no rows.
    """
    path = Path(path)
    try:
        data = _read(path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise SourceError(f"{path} is not UTF-8, in line {line}: save it as UTF-8") from error
    columns = _plain_columns(text)
    lines: Sequence[int] = range(1, 1 + len(columns[0])) if columns else []
    if not columns:
        columns, lines = _parsed_columns(text, path)
    if len(lines) < 2:
        raise SourceError(f"{path} has no rows: the first line names the columns, and each further line is a sample")
    names = [cells.pop(0) for cells in columns]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise SourceError(f"{path} has more than one column {twice[0]!r}: give each a name of its own")
    is_own = tuple(names[: len(OWN_HEADING)]) == OWN_HEADING
    table = CsvTable(path, dict(zip(names, columns, strict=True)), lines[1:], is_own)
    if not is_own:
        return table
    texts = {*PREDICTION_COLUMNS[1:], "predicted"}
    plain = {name: [*map(from_cell, cells)] if name in texts else cells for name, cells in table.columns.items()}
    return dataclasses.replace(table, columns=plain)


def _plain_columns(text: str) -> list[list[str]]:
    """Split a text without quotes into its columns; return an empty list if the text needs a parser.

    This takes a fifth of the parser's time, which matters for tables of millions of rows.
    """
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if any(part in text for part in ('"', "\r", "\0", "\n\n")) or not text.strip("\n") or text[0] == "\n":
        return []
    commas = {line.count(",") for line in text.split("\n")}
    if len(commas) > 1:
        return []
    width = 1 + commas.pop()
    cells = text.replace("\n", ",").split(",")
    return [cells[column::width] for column in range(width)]


def _parsed_columns(text: str, path: Path) -> tuple[list[list[str]], list[int]]:
    """Return the columns of any CSV text, and the line in which each row begins. Raises SourceError."""
    rows: list[list[str]] = []
    lines: list[int] = []
    line = 1
    limit = csv.field_size_limit(sys.maxsize)  # run lengths of masks are long
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        for row in reader:
            if row:  # an empty line is not a row
                rows.append(row)
                lines.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise SourceError(f"{path}, line {line}: {error}") from error
    finally:
        csv.field_size_limit(limit)
    for row, start in zip(rows, lines, strict=True):
        if len(row) != len(rows[0]):
            raise SourceError(f"{path}, line {start}: the line has {len(row)} cells, the first line {len(rows[0])}")
    return [list(cells) for cells in zip(*rows, strict=True)], lines


def _read(path: Path) -> bytes:
    files = find_archive(path)
    if files is None:
        return read_file(path)
    folder = dataclasses.replace(files, inside=posixpath.dirname(files.inside))
    member = folder.list().get(path.name)
    if member is None:
        raise SourceError(f"{folder} has no file {path.name!r}")
    return folder.read(member, path.name)


def are_names(texts: Iterable[str]) -> bool:
    """Return whether texts are class names, not class numbers.

    That is so if one text is not a number, or if all are whole numbers and one has leading zeros: 007 is a name, and a
    different class than 7.
    """
    distinct = set(texts)
    numbers = [to_number(text) for text in distinct]
    is_padded = all(isinstance(number, int) for number in numbers) and any(map(_PADDED.match, distinct))
    return None in numbers or is_padded


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return class names in the order of their classes: by value if all are numbers, else in alphabetical order."""
    numbers = {name: to_number(name) for name in names}
    if are_names(numbers) or not all(map(math.isfinite, (number or 0 for number in numbers.values()))):
        return tuple(sorted(numbers))
    return tuple(sorted(numbers, key=lambda name: (numbers[name], name)))


def to_number(text: str) -> int | float | None:
    """Return the number in a cell, an int if it is whole, or None if the cell is not a number.

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
