"""Columns of a source: which texts are numbers or names, and what cells become as labels, folds and kept columns."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import SourceError, UsageError
from tpucache.native import Array
from tpucache.options import option, options_of
from tpucache.text import part_names
from tpucache.warmup.sources.source import Column, Listing, RunsOrder, Sample, column_names, spellings

#: Names of labels; the first name that exists is used.
LABEL_NAMES: Final = ("label", "target", "labels", "targets", "class", "cls", "species")
#: Texts that mean "no number" in a column of numbers, in lower case: those that pandas reads so.
MISSING_WORDS: Final = frozenset(
    ("na", "n/a", "nan", "-nan", "null", "none", "<na>", "#n/a", "#na", "#n/a n/a", "1.#qnan", "-1.#ind")
)
#: Kinds of columns: numbers or text, and lists of numbers.
PLAIN, ARRAY = "plain", "array"
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


@dataclass(frozen=True)
class TableOptions:
    """The meaning of a table's columns, or of a record's features. Raises UsageError for options that do not fit.

    `path_col` has the paths of images, relative to `root` (default: the table's folder), without `suffix`. `label_cols`
    is one column of class names or numbers, or several columns of numbers; with `label_sep`, one column with several
    names in each row. `mask_col` has the paths of masks, relative to `root`. `fold_col` has whole numbers from 0, or -1
    for a row on which every fold trains. `rle_cols` have masks as run lengths: a single column has the class 1, or the
    class in `rle_class_col`, and several columns have the classes 1, 2, …. `rle_order` says how run lengths count
    pixels; None: down the columns, and a mask that makes sense only along the rows is an error. Other columns are kept
    if their name matches a pattern of `keep` (none: all), and none of `drop`.
    """

    path_col: str | None = option(
        None, "the column with the paths of images; default: path, file, image, id …", metavar="NAME"
    )
    label_cols: tuple[str, ...] = option(
        (),
        "the column of labels; can be repeated; default: a column called label, target …",
        metavar="NAME",
        flag="label-col",
    )
    label_sep: str | None = option(None, "the separator between several names in the label column", metavar="TEXT")
    suffix: str = option("", "the text to add to each path", metavar=".jpg")
    root: str | Path | None = option(
        None, "the folder that paths are relative to; default: the table's folder", metavar="DIR"
    )
    mask_col: str | None = option(None, "the column with the paths of masks", metavar="NAME")
    fold_col: str | None = option(None, "the column of fold numbers, for train --valid fold=N", metavar="NAME")
    rle_cols: tuple[str, ...] = option(
        (),
        "the column of masks as run lengths from pixel 1; one image may have several rows, or each class a column",
        metavar="NAME",
        flag="rle-col",
    )
    rle_class_col: str | None = option(None, "the column with the class of each row's run lengths", metavar="NAME")
    rle_order: RunsOrder | None = option(
        None, "count run lengths down the columns (default), or along the rows, as UW-Madison, Sartorius and Carvana do"
    )
    rle_relative: bool = option(False, "run lengths count from the end of the run before, from 0, as in SIIM-ACR")
    keep: tuple[str, ...] = option((), "other columns to keep, such as 'age*'; default: all", metavar="PATTERN")
    drop: tuple[str, ...] = option((), "columns to leave out", metavar="PATTERN")

    def __post_init__(self) -> None:
        if isinstance(self.label_cols, str) or len(set(self.label_cols)) != len(self.label_cols):
            raise UsageError(f"label_cols must be a list of different names, not {self.label_cols!r}")
        for name in ("label_cols", "rle_cols", "keep", "drop"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if (self.rle_class_col or self.rle_relative or self.rle_order) and not self.rle_cols:
            raise UsageError(
                "rle_class_col, rle_order and rle_relative need a column of run lengths: give rle_cols, too"
            )
        if self.rle_class_col and len(self.rle_cols) > 1:
            raise UsageError("each of several rle_cols is a class: leave rle_class_col out")
        if self.rle_cols and self.mask_col:
            raise UsageError("masks are either files or run lengths: give only one of mask_col and rle_cols")
        if self.label_sep is not None and (not self.label_sep or len(self.label_cols) != 1):
            raise UsageError(
                f"label_sep must be the text between names in one label column, not {self.label_sep!r} "
                f"with {len(self.label_cols)} label columns"
            )

    def check_used(self, names: Collection[str], source: str) -> None:
        """Raise UsageError if another option than `names` is given."""
        for name, each in options_of(TableOptions).items():
            if name not in names and getattr(self, name) != getattr(TableOptions, name):
                raise UsageError(f"{source}, which has no {each.flag}: leave {each.flag} out")

    def is_kept(self, name: str) -> bool:
        """Return whether `keep` and `drop` say that a column is kept, if no other option names the column."""
        is_wanted = not self.keep or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.keep)
        return is_wanted and not self.is_dropped(name)

    def is_dropped(self, name: str) -> bool:
        """Return whether a pattern of `drop` matches the name of a column."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.drop)

    def likely_labels(self, names: Iterable[str], first: str = "") -> list[str]:
        """Return the columns that are called like labels, the one that is the label by default first."""
        free = [name for name in names if not self.is_dropped(name) and name not in self.keep]
        return [name for known in (first, *LABEL_NAMES) for name in free if name.lower() == known]

    def tell_of_unused(self, names: Sequence[str], where: str) -> None:
        """Warn of patterns of `keep` and `drop` that match none of the columns; the warning begins with `where`."""
        for flag, patterns in (("--keep", self.keep), ("--drop", self.drop)):
            for pattern in patterns:
                if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                    shown = ", ".join(map(repr, names))
                    _log.warning("%s: %s %s matches no column: there are %s", where, flag, pattern, shown)


def classes_of(feature: Any) -> tuple[tuple[str, ...], bool]:
    """Return the class names that a feature of Hugging Face states, () if none, and whether its values are lists.

    The feature is an object of the package `datasets`, or the JSON that describes it.
    """

    def part(of: Any, name: str) -> Any:
        return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)

    is_list = isinstance(feature, list) and len(feature) == 1
    inner = feature[0] if is_list else part(feature, "feature") or feature
    names = part(inner, "names")
    is_named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return (tuple(names), inner is not feature) if is_named else ((), False)


@dataclass(frozen=True)
class Roles:
    """The columns that are the label, go into the samples table, or hold the arrays of samples."""

    labels: tuple[str, ...]
    kept: tuple[str, ...]
    arrays: tuple[str, ...] = ()


def find_roles(
    kinds: Mapping[str, str], options: TableOptions, where: str, *, used: Iterable[str] = (), likely: Sequence[str] = ()
) -> Roles:
    """Return what the columns of `kinds` are, and warn of those that are left out.

    A kind is PLAIN for numbers or text, ARRAY for lists of numbers, or any other text. Columns that are `used`
    otherwise are left out. Without the option `label_cols`, the first of the `likely` labels is the label.
    """
    for name in (*options.label_cols, options.fold_col):
        if name is not None and name not in kinds:
            raise SourceError(f"{where} has no column {name!r}: there are {', '.join(map(repr, kinds))}")
    if not options.rle_cols:  # columns that differ within an image are left out by now
        options.tell_of_unused([*kinds], where)
    labels = options.label_cols or tuple(likely[:1])
    if not options.label_cols:
        tell_of_others(where, likely)
    others = {*used, *labels, options.fold_col}
    free = [name for name in kinds if name not in others and options.is_kept(name)]
    if unread := [name for name in free if kinds[name] not in (PLAIN, ARRAY)]:
        _log.warning("%s: leaving out columns that are neither numbers nor plain text: %s", where, ", ".join(unread))
    kept, arrays = (tuple(name for name in free if kinds[name] == kind) for kind in (PLAIN, ARRAY))
    return Roles(labels, kept, arrays)


def tell_of_others(where: str, likely: Sequence[str]) -> None:
    """Warn that the first column is the label, and the others are named like labels, too."""
    if likely[1:]:
        shown = ", ".join(map(repr, likely[1:]))
        _log.warning("%s: using the labels in %r, not in %s: --label-col names what to use", where, likely[0], shown)


def to_listing(
    samples: Sequence[Sample],
    columns: Mapping[str, Sequence[Any]],
    where: str,
    options: TableOptions,
    roles: Roles,
    *,
    lines: Sequence[int] = (),
    is_own: bool = False,
    **facts: Any,
) -> Listing:
    """Return the listing of samples with these columns.

    `lines` are the lines of the samples, which errors name; `is_own` is that of `column_labels`, whose errors are
    raised; `facts` are fields of the Listing.
    """
    if roles.labels:
        given = {name: columns[name] for name in roles.labels}
        found, faults = column_labels(
            given, where, separator=options.label_sep, is_own=is_own, must_have=bool(options.label_cols)
        )
        faults = {at: f"line {lines[at]}, {fault}" if lines else fault for at, fault in faults.items()}
        samples = [
            dataclasses.replace(sample, label=label, fault=sample.fault or faults.get(at, ""))
            for at, (sample, label) in enumerate(zip(samples, found, strict=True))
        ]
    fold, own = options.fold_col, {name: columns[name] for name in roles.kept}
    table = {} if fold is None else {"fold": fold_numbers(columns[fold], f"{where}, column {fold!r}")}
    return Listing(
        samples, columns=table | sample_columns(own), value_names=roles.labels, spellings=spellings(own), **facts
    )


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
