"""TableSource: a CSV table with one sample in each row: an image's path, its label, mask, fold and other columns.

Masks may be run lengths in cells, in Kaggle's order: down the columns, and the first pixel is 1.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import logging
import posixpath
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError, SourceError
from tpucache.store.fields import IMAGE, MASK
from tpucache.store.files import read_file
from tpucache.text import OWN_HEADING, PREDICTION_COLUMNS, SEPARATOR, from_cell, from_heading, part_names
from tpucache.warmup.sources.archives import find_archive
from tpucache.warmup.sources.columns import (
    MISSING_WORDS,
    PLAIN,
    TableOptions,
    are_names,
    find_roles,
    numbers_of_texts,
    to_listing,
    to_number,
)
from tpucache.warmup.sources.folder import SUFFIXES, DiskFiles
from tpucache.warmup.sources.source import (
    Files,
    Item,
    Listing,
    Member,
    Sample,
    SourceKind,
    repeated,
    unique,
)

#: Names of the column of paths; the first name that exists is used, or else the first column.
PATH_NAMES: Final = (
    *("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img_path"),
    *("image_name", "img_name", "image_id", "id"),
)
#: The name of a column of row numbers, as pandas writes it, or "Unnamed: 0" after it was read again.
_INDEX: Final = re.compile(r"\s*|Unnamed: \d+")
#: Cells that stand for an image with an empty mask.
_NOTHING: Final = ("", "-1", "nan")
_MOST_CLASSES: Final = 255

#: The run lengths of a sample's masks: class numbers and texts.
Runs = Sequence[tuple[int, str]]

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class CsvTable:
    """The cells of a CSV file by column, and the line in which each row begins.

    `is_own` says that `predict` or `suspects` wrote the file. These commands put a mark before text that a spreadsheet
    would read as a formula; the marks have been removed from the cells.
    """

    path: Path
    columns: dict[str, list[str]]
    lines: Sequence[int]
    is_own: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.columns)

    def column(self, name: str) -> list[str]:
        """Return a column's cells, one for each row."""
        if name not in self.columns:
            raise SourceError(f"{self.path} has no column {name!r}: there are {', '.join(map(repr, self.names))}")
        return self.columns[name]

    def wrong(self, row: int, column: str, reason: str) -> SourceError:
        """Return a SourceError that names the line and the column of a cell, and gives the `reason`."""
        return SourceError(f"{self.path}, line {self.lines[row]}, column {column!r}: {reason}")


def read_table(path: str | Path) -> CsvTable:
    """Read a whole CSV file: UTF-8, with or without a byte order mark, with commas between the cells."""
    path = Path(path)
    try:
        data = _content(path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise SourceError(f"{path} is not UTF-8, in line {line}: save it as UTF-8") from error
    columns, lines = _split(text, path)
    if len(lines) < 2:
        raise SourceError(f"{path} has no rows: the first line names the columns, and each further line is a sample")
    names = [cells.pop(0) for cells in columns]
    if (twice := repeated(names)) is not None:
        raise SourceError(f"{path} has more than one column {twice!r}: give each a name of its own")
    is_own = tuple(names[: len(OWN_HEADING)]) == OWN_HEADING
    if is_own:
        texts = {*PREDICTION_COLUMNS[1:], "predicted"}
        columns = [
            [*map(from_cell, cells)] if name in texts else cells for name, cells in zip(names, columns, strict=True)
        ]
    return CsvTable(path, dict(zip(names, columns, strict=True)), lines[1:], is_own)


def _split(text: str, path: Path) -> tuple[list[list[str]], list[int]]:
    """Return the columns of a text, and the line in which each row begins."""
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


def _content(path: Path) -> bytes:
    files = find_archive(path)
    if files is None:
        return read_file(path)
    folder = dataclasses.replace(files, inside=posixpath.dirname(files.inside))
    member = folder.list().get(path.name)
    if member is None:
        raise SourceError(f"{folder} has no file {path.name!r}")
    return folder.read(member, path.name)


class TableSource:
    """The rows of a CSV file, in order.

    If masks are run lengths, rows with the same path are one sample. Otherwise `#2`, `#3` … is appended to all of these
    paths but the first. A row without a path, label or mask is a sample that does not load.
    """

    loads_in_threads = True

    def __init__(self, path: str | Path, options: TableOptions | None = None, files: Files | None = None) -> None:
        """Take the path of a CSV file. This reads nothing yet. `files` are those that paths are relative to."""
        self._path = Path(path).absolute()
        self._options = options or TableOptions()
        root = Path(self._options.root or self._path.parent).absolute()
        self._files = files or find_archive(root) or DiskFiles(root)

    def __repr__(self) -> str:
        return str(self._path)

    def list(self) -> Listing:
        """Return all rows as samples."""
        table, options = read_table(self._path), self._options
        path_name, likely = path_column(table, options), self._likely_labels(table)
        runs, mask_names = None, tuple[str, ...]()
        if options.rle_cols:
            table, runs, mask_names = join_rows(table, path_name, options)
        images = [cell + options.suffix if cell.strip() else "" for cell in table.column(path_name)]
        masks = [name for name in [options.mask_col] if name is not None]
        columns = [images, *map(table.column, masks)]
        heading = path_name + options.suffix
        found = self._files.entries([*filter(None, itertools.chain(*columns)), heading])
        self._check_heading(heading, found)
        self._tell_of_repeated(table, images)
        labels = (options.label_cols or likely[:1]) if options.label_sep is None else ()
        needed = {path_name: "path", **dict.fromkeys(labels, "label"), **dict.fromkeys(masks, "mask")}
        lacks = _lacks(table, needed)
        samples = list[Sample]()
        paths = unique(image or f"line {line}" for image, line in zip(images, table.lines, strict=True))
        for row, (path, *names) in enumerate(zip(paths, *columns, strict=True)):
            members = tuple(member for name in names if (member := found.get(posixpath.normpath(name))) is not None)
            fault = "" if len(members) == len(names) else f"is not in {self._files}, or its mask is not"
            own = runs[row] if runs else None
            size = sum(member.bytes for member in members) + sum(len(text) for _, text in own or ())
            written = max((member.written_ns for member in members), default=0)
            samples.append(Sample(row, path, None, size, members, lacks.get(row, fault), written, own))
        return table_listing(table, samples, options, likely, mask_names=mask_names)

    def load(self, sample: Sample) -> Item:
        """Return the bytes of a row's image, and its mask, if the table has masks: bytes or run lengths."""
        if sample.fault:
            raise SampleError(sample.path, sample.fault)
        image, *masks = sample.members
        fields = {IMAGE: self._files.read(image, sample.path)}
        for mask in masks:
            try:
                fields[MASK] = self._files.read(mask, sample.path)
            except SampleError as error:
                raise SampleError(sample.path, f"its mask {mask.name!r} {error.reason}", error.file) from error
        if sample.runs is None:
            return Item(fields)
        runs = read_runs(sample.runs, self._options.rle_relative, sample.path)
        return Item(fields, mask_runs=runs, runs_order=self._options.rle_order)

    def _likely_labels(self, table: CsvTable) -> Sequence[str]:
        """Return the columns that are labels by their names, if the options name neither labels nor masks."""
        options = self._options
        if options.label_cols or options.mask_col or options.rle_cols:
            return ()
        others = path_column(table, options), options.fold_col
        likely = options.likely_labels([name for name in table.names if name not in others])
        likely = [name for name in likely if any(map(str.strip, table.column(name)))]
        if likely:
            _log.warning(
                "%s: using the labels in column %r; --label-col chooses another, --keep %s makes it a plain column",
                self._path, likely[0], likely[0],
            )  # fmt: skip
        return likely

    def _tell_of_repeated(self, table: CsvTable, images: Sequence[str]) -> None:
        first: dict[str, int] = {}
        again = [row for row, image in enumerate(images) if image and first.setdefault(image, row) != row]
        if again:
            image = images[again[0]]
            _log.warning(
                "%s: %d rows name an image again, such as %r in the lines %d and %d: each row is a sample of its own",
                self._path, len(again), image, table.lines[first[image]], table.lines[again[0]],
            )  # fmt: skip

    def _check_heading(self, name: str, found: Mapping[str, Member]) -> None:
        """Raise SourceError if the heading of the column of paths, with the suffix, is the `name` of an image."""
        member = found.get(posixpath.normpath(name))
        is_there = member is not None and bool(member.archive or member.written_ns)
        if is_there or (PurePath(name).suffix.lower() in SUFFIXES and not self._options.suffix):
            raise SourceError(
                f"{self._path}: the first line must name the columns, but has {name!r:.200}, an image: put a line such "
                "as path,label above it"
            )


def _lacks(table: CsvTable, needed: Mapping[str, str]) -> dict[int, str]:
    """Return why some rows cannot be loaded: they lack what a column has."""
    lacks: dict[int, str] = {}
    for name, what in needed.items():
        for row, cell in enumerate(table.column(name)):
            if not cell.strip():
                lacks.setdefault(row, f"has no {what} in column {name!r}")
    return lacks


def table_listing(
    table: CsvTable, samples: Sequence[Sample], options: TableOptions, likely: Sequence[str] = (), **facts: Any
) -> Listing:
    """Return the listing of samples, one for each row of a table, with raw labels, folds and kept columns.

    The first of the `likely` labels is the label if the options name none.
    """
    used = (path_column(table, options), options.mask_col or "")
    roles = find_roles(dict.fromkeys(table.names, PLAIN), options, str(table.path), used=used, likely=likely)
    if len(roles.labels) == 1 and options.label_sep is None:
        _refuse_several(table, roles.labels[0])
    columns: dict[str, Sequence[Any]] = {**table.columns}
    columns |= {name: numbers_of_texts(table.column(name)) for name in roles.kept}
    return to_listing(
        samples, columns, str(table.path), options, roles, lines=table.lines, is_own=table.is_own, **facts
    )


def _refuse_several(table: CsvTable, column: str) -> None:
    """Raise SourceError if a cell of a table of predictions has several names or numbers, which are no class."""
    if tuple(table.names[: len(PREDICTION_COLUMNS)]) != PREDICTION_COLUMNS or column not in PREDICTION_COLUMNS:
        return
    classes = {*map(from_heading, table.names[len(PREDICTION_COLUMNS) :])}
    for row, cell in enumerate(table.column(column)):
        parts = part_names(cell)
        are_several = parts != [cell.strip()] and classes.issuperset(parts)
        if parts and cell not in classes and (are_several or (len(parts) > 1 and not are_names(parts))):
            raise table.wrong(
                row, column, f"{cell!r:.100} is several: add --label-sep {SEPARATOR!r} for classes, or give columns "
                "of numbers by --label-col",
            )  # fmt: skip


def path_column(table: CsvTable, options: TableOptions) -> str:
    """Return the name of the column of paths."""
    if options.path_col is not None:
        return options.path_col
    others = {*options.label_cols, options.mask_col, options.fold_col, *options.rle_cols, options.rle_class_col}
    free = [name for name in table.names if name not in others]
    if not free:
        raise SourceError(
            f"{table.path} has no column left for the paths of images: other options name all of "
            f"{', '.join(map(repr, table.names))}"
        )
    named = [name for name in free if not _INDEX.fullmatch(name)] or free
    return next((name for known in PATH_NAMES for name in free if name.lower() == known), named[0])


#: The options of a table, in an archive too.
OPTIONS: Final = frozenset(field.name for field in dataclasses.fields(TableOptions))
KIND: Final = SourceKind(
    "a .csv table of them",
    lambda source: Path(source).is_file() and Path(source).suffix.lower() == ".csv",
    TableSource,
    OPTIONS,
)


def join_rows(table: CsvTable, path_col: str, options: TableOptions) -> tuple[CsvTable, list[Runs], tuple[str, ...]]:
    """Return a table with one row for each path, the run lengths of all rows of that path, and the names of classes.

    A single column of run lengths is class 1, or the class that its row has in the column `rle_class_col`; several
    columns are the classes 1, 2, … in order. Class names are numbered from 1 in alphabetical order; a row without run
    lengths needs no class. Other columns that differ between the rows of an image are left out, with a warning; for
    those of labels and folds, SourceError is raised. It is also raised for run lengths without a class, and if class
    numbers are not from 1 to 255.
    """
    rows: dict[str, list[int]] = {}
    for row, path in enumerate(table.column(path_col)):
        rows.setdefault(path if path.strip() else f"#{row}", []).append(row)
    columns = [table.column(name) for name in options.rle_cols]
    numbers, names = None, options.rle_cols if len(columns) > 1 else ()
    if options.rle_class_col is not None:
        numbers, names = _class_numbers(table, options.rle_class_col, columns[0])
    runs: list[Runs] = [
        [
            (place + 1 if numbers is None else numbers[row], cells[row].strip())
            for row in group
            for place, cells in enumerate(columns)
            if not _is_nothing(cells[row])
        ]
        for group in rows.values()
    ]
    used = {*options.rle_cols, options.rle_class_col}
    alike = {name for name in table.names if name not in used and _is_alike(table.column(name), rows)}
    for name in (*options.label_cols, options.fold_col):
        if name is not None and name not in alike:
            raise SourceError(f"{table.path}: rows of the same image differ in column {name!r}: make them alike")
    if left_out := [name for name in table.names if name not in alike | used]:
        _log.warning("leaving out columns that differ within an image: %s", ", ".join(left_out))
    firsts = [group[0] for group in rows.values()]
    kept = {name: [table.column(name)[row] for row in firsts] for name in table.names if name in alike}
    return CsvTable(table.path, kept, [table.lines[row] for row in firsts]), runs, names


def read_runs(runs: Runs, is_relative: bool, path: str) -> npt.NDArray[np.int64]:
    """Return run lengths as rows of class, first pixel (from 0) and length: int64 (n, 3), classes ascending.

    Relative runs count from the end of the previous run, as in SIIM-ACR.
    """
    parts: list[npt.NDArray[np.int64]] = [np.empty((0, 3), np.int64)]
    for number, text in sorted(runs, key=lambda each: each[0]):
        short = repr(text if len(text) <= 40 else f"{text[:37]}...")
        try:
            values = np.array(text.split(), np.int64)
        except (ValueError, OverflowError) as error:
            raise SampleError(path, f"its run lengths {short} are not whole numbers") from error
        starts, lengths = values[::2], values[1::2]
        if len(starts) != len(lengths) or (lengths < 1).any():
            raise SampleError(path, f"its run lengths {short} are not pairs of a start and a length, both from 1")
        first = np.cumsum(starts + lengths) - lengths if is_relative else starts - 1
        if (first < 0).any():
            raise SampleError(path, f"its run lengths {short} begin before the first pixel")
        parts.append(np.stack([np.full(len(first), number), first, lengths], axis=1))
    return np.concatenate(parts)


def _class_numbers(table: CsvTable, name: str, runs: Sequence[str]) -> tuple[Sequence[int], tuple[str, ...]]:
    """Return the class number of each row, 0 for a row without run lengths that names no class, and the classes' names.

    There are no names if the classes are numbers.
    """
    cells = [cell.strip() for cell in table.column(name)]
    nameless = {cell for cell in set(cells) if not cell or cell.lower() in MISSING_WORDS}
    for row, cell in enumerate(cells):
        if cell in nameless and not _is_nothing(runs[row]):
            raise table.wrong(row, name, f"{cell!r} is no class, and the row has run lengths: name their class")
    known: dict[str, Any] = {cell: to_number(cell) for cell in {*cells} - nameless}
    names = () if all(isinstance(number, int) for number in known.values()) else tuple(sorted(known))
    if names:
        known = {cell: number for number, cell in enumerate(names, 1)}
    if known and (min(known.values()) < 1 or max(known.values()) > _MOST_CLASSES):
        raise SourceError(
            f"{table.path}, column {name!r}: classes of masks are 1 to {_MOST_CLASSES}, as 0 means not masked, "
            f"not {min(known.values())} to {max(known.values())}"
        )
    return [known.get(cell, 0) for cell in cells], names


def _is_nothing(runs: str) -> bool:
    return runs.strip().lower() in _NOTHING


def _is_alike(cells: Sequence[str], rows: Mapping[str, Sequence[int]]) -> bool:
    return all(cells[row] == cells[group[0]] for group in rows.values() for row in group[1:])
