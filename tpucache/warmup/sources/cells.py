"""A CSV file -> its cells, all of them text, and the numbers that they hold."""

from __future__ import annotations

import csv
import dataclasses
import io
import posixpath
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from tpucache.errors import SourceError
from tpucache.warmup.sources.archives.archive import find_archive

_ROWS_AT_ONCE: Final = 4096


@dataclass(frozen=True)
class Table:
    """The cells of a CSV file by column, and the line that each row begins on."""

    path: Path
    columns: Mapping[str, list[str]]
    lines: list[int]

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.columns)

    def column(self, name: str) -> list[str]:
        """Return a column's cells, one a row. Raises SourceError when there is no such column."""
        if name not in self.names:
            raise SourceError(f"{self.path} has no column {name!r}: there are {', '.join(map(repr, self.names))}")
        return self.columns[name]

    def wrong(self, row: int, column: str, reason: str) -> SourceError:
        """Return the error that a cell is, with its line."""
        return SourceError(f"{self.path}, line {self.lines[row]}, column {column!r}: {reason}")


def read_table(path: str | Path) -> Table:
    """Read a whole CSV file: UTF-8, with or without a byte order mark, commas between the cells.

    Raises SourceError for what is no such file, has rows of the wrong length, names a column twice or has no rows.
    """
    path = Path(path)
    names: list[str] = []
    columns: list[list[str]] = []
    rows: list[list[str]] = []
    lines: list[int] = []
    line = 1
    limit = csv.field_size_limit(sys.maxsize)  # run lengths of masks are long
    try:
        with _open(path) as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                if row and not names:
                    names = row
                    columns = [[] for _ in names]
                elif row:  # an empty line is no row
                    if len(row) != len(names):
                        raise SourceError(
                            f"{path}, line {line}: it has {len(row)} cells, not {len(names)} as the first line"
                        )
                    rows.append(row)
                    lines.append(line)
                if len(rows) == _ROWS_AT_ONCE:
                    _append(columns, rows)
                line = reader.line_num + 1
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8, at or after line {line}: save it as UTF-8") from error
    except csv.Error as error:
        raise SourceError(f"{path}, line {line}: {error}") from error
    finally:
        csv.field_size_limit(limit)
    _append(columns, rows)
    if not lines:
        raise SourceError(f"{path} has no rows: the first line names the columns, and each further one is a sample")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise SourceError(f"{path} has more than one column {twice[0]!r}: give each a name of its own")
    return Table(path, dict(zip(names, columns, strict=True)), lines)


def _append(columns: Sequence[list[str]], rows: list[list[str]]) -> None:
    """Move rows to the ends of the columns: millions of lists would keep Python's garbage collector busy."""
    for column, cells in zip(columns, zip(*rows, strict=True), strict=False):
        column.extend(cells)
    rows.clear()


def _open(path: Path) -> TextIO:
    """Open a file on disk or, where its path leads into an archive, there."""
    files = find_archive(path)
    if files is None:
        return path.open(encoding="utf-8-sig", newline="")
    folder = dataclasses.replace(files, inside=posixpath.dirname(files.inside))
    member = folder.list().get(path.name)
    if member is None:
        raise SourceError(f"{folder} has no file {path.name!r}")
    return io.TextIOWrapper(io.BytesIO(folder.read(member, path.name)), encoding="utf-8-sig", newline="")


def to_number(text: str) -> int | float | None:
    """Return the number that a cell holds, an int when it is whole; None when it holds none."""
    try:
        value = float(text)
    except ValueError:
        return None
    if "_" in text:  # Python's own way to write numbers
        return None
    if not value.is_integer():  # nor are nan and inf
        return value
    return int(text) if text.strip().lstrip("+-").isdecimal() else int(value)
