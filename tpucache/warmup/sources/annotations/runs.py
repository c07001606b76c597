"""Masks as run lengths in the cells of a table, in the order of Kaggle: down the columns, the first pixel is 1."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError, SourceError
from tpucache.warmup.sources.cells import Table, to_number

#: Cells of images without anything to mask.
_NOTHING: Final = ("", "-1", "nan")
_MOST_CLASSES: Final = 255

_log: Final = logging.getLogger("tpucache")


class Runs(NamedTuple):
    """The run lengths of one class of a sample, as text."""

    class_number: int
    text: str


@dataclasses.dataclass(frozen=True)
class RunTable:
    """A table with one row for each image, and the run lengths of each row."""

    table: Table
    runs: list[list[Runs]]

    def bytes(self, row: int) -> int:
        """Return how long the run lengths of a row are."""
        return sum(len(runs.text) for runs in self.runs[row])


def join_rows(
    table: Table, path_col: str, rle_cols: Sequence[str], class_col: str | None, labels: Sequence[str]
) -> RunTable:
    """Return a table with one row for each path, and the run lengths of all rows of that path.

    One column of run lengths is class 1, or the class that `class_col` names in its row; several are classes 1, 2, …
    in their order. Columns that differ within an image are left out, with a warning. Raises SourceError where one of
    the `labels` differs, and for classes beyond 255.
    """
    paths = table.column(path_col)
    rows: dict[str, list[int]] = {}
    for row, path in enumerate(paths):
        rows.setdefault(path if path.strip() else f"#{row}", []).append(row)
    numbers = None if class_col is None else _class_numbers(table, class_col)
    columns = [table.column(name) for name in rle_cols]
    runs = [
        [
            Runs(place + 1 if numbers is None else numbers[row], cells[row].strip())
            for row in group
            for place, cells in enumerate(columns)
            if cells[row].strip().lower() not in _NOTHING
        ]
        for group in rows.values()
    ]
    used = {*rle_cols, class_col}
    alike = {name for name in table.names if name not in used and _is_alike(table.column(name), rows)}
    if differing := [name for name in labels if name not in alike]:
        raise SourceError(f"{table.path}: rows of the same image differ in column {differing[0]!r}: make them alike")
    if left_out := [name for name in table.names if name not in alike | used]:
        _log.warning("columns that differ within an image are left out: %s", ", ".join(left_out))
    firsts = [group[0] for group in rows.values()]
    kept = {name: [table.column(name)[row] for row in firsts] for name in table.names if name in alike}
    return RunTable(Table(table.path, kept, [table.lines[row] for row in firsts]), runs)


def read_runs(runs: Sequence[Runs], is_relative: bool, path: str) -> npt.NDArray[np.int64]:
    """Return run lengths as rows of class, first pixel (from 0) and length: int64 (n, 3), classes ascending.

    Relative runs count from the end of the one before, as SIIM-ACR's do. Raises SampleError for what are none.
    """
    parts: list[npt.NDArray[np.int64]] = [np.empty((0, 3), np.int64)]
    for number, text in sorted(runs, key=lambda each: each.class_number):
        try:
            values = np.array(text.split(), np.int64)
        except (ValueError, OverflowError) as error:
            raise SampleError(path, f"its run lengths {_short(text)} are no whole numbers") from error
        starts, lengths = values[::2], values[1::2]
        if len(starts) != len(lengths) or (lengths < 1).any():
            raise SampleError(path, f"its run lengths {_short(text)} are no pairs of a start and a length from 1")
        first = np.cumsum(starts + lengths) - lengths if is_relative else starts - 1
        if (first < 0).any():
            raise SampleError(path, f"its run lengths {_short(text)} begin before the first pixel")
        parts.append(np.stack([np.full(len(first), number), first, lengths], axis=1))
    return np.concatenate(parts)


def _class_numbers(table: Table, name: str) -> Sequence[int]:
    """Return the class of each row: whole numbers as they are, names by their order from 1."""
    cells = [cell.strip() for cell in table.column(name)]
    known: Mapping[str, Any] = {cell: to_number(cell) for cell in set(cells)}
    if not all(isinstance(number, int) for number in known.values()):
        known = {cell: number for number, cell in enumerate(sorted(known), 1)}
    if min(known.values()) < 1 or max(known.values()) > _MOST_CLASSES:
        raise SourceError(
            f"{table.path}, column {name!r}: classes of masks are 1 to {_MOST_CLASSES}, as 0 is what is not masked, "
            f"not {min(known.values())} to {max(known.values())}"
        )
    return [known[cell] for cell in cells]


def _is_alike(cells: Sequence[str], rows: Mapping[str, Sequence[int]]) -> bool:
    return all(cells[row] == cells[group[0]] for group in rows.values() for row in group[1:])


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
