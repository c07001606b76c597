"""ParquetSource: one sample a row. What is small is read when rows are listed, images and arrays batch by batch."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.fields import IMAGE, MASK
from tpucache.warmup.sources.base import Array, Item, Label, Listing, Sample, SourceKind
from tpucache.warmup.sources.folder import read_below
from tpucache.warmup.sources.labels import split_names
from tpucache.warmup.sources.names import field_names
from tpucache.warmup.sources.parquet.columns import Roles, find_roles
from tpucache.warmup.sources.parquet.rows import ParquetRows, open_rows
from tpucache.warmup.sources.patterns import find_files, has_wildcard, split_pattern
from tpucache.warmup.sources.table import TableOptions
from tpucache.warmup.sources.values import columns_of_values, labels_of_columns, labels_of_values, marks_of_numbers

_SUFFIX: Final = ".parquet"
#: `train-00000-of-00002.parquet`: Hugging Face's name of a part of a split.
_SPLIT: Final = re.compile(r"(.+)-\d{5}-of-\d{5}(-\w+)?\.parquet")

#: What numpy calls otherwise than Arrow. `to_pandas_dtype` would say so, too, and needs pandas in some releases.
_DTYPES: Final = {"halffloat": "float16", "float": "float32", "double": "float64"}

_log: Final = logging.getLogger("tpucache")


class ParquetSource:
    """The rows of parquet files, file by file in the order of their names' bytes."""

    def __init__(self, pattern: str | Path, options: TableOptions | None = None) -> None:
        """Take a file, a folder of such files, or a pattern, and what columns mean; nothing is read yet."""
        path = Path(pattern)
        self._root, self._pattern = split_pattern(path / f"*{_SUFFIX}" if path.is_dir() else path)
        self._options = options or TableOptions()
        self._images = Path(self._options.root or self._root).absolute()

    def __repr__(self) -> str:
        return str(self._root / self._pattern)

    def list(self) -> Listing:
        """Return all rows as samples, called `file#row`.

        Raises SourceError when a file is broken or has other columns than the first, or there are files of several
        splits; DependencyError without pyarrow.
        """
        names = [name.as_posix() for name in find_files(self._root, self._pattern)]
        self._check_names(names)
        roles = self._roles(names[0])
        light = (*roles.labels, *roles.kept, *([self._options.fold_col] if self._options.fold_col else []))
        values: dict[str, list[Any]] = {name: [] for name in light}
        samples: list[Sample] = []
        with Progress(None, "list", "rows", is_brief=True) as progress:
            for name in names:
                rows = open_rows(self._root / name)
                if self._roles(name) != roles:
                    raise SourceError(f"{self._root / name} has other columns than {names[0]}: give files of one kind")
                for column, found in rows.read_columns(light).items():
                    values[column] += found
                first, sizes = len(samples), rows.sizes(roles.heavy)
                samples += [Sample(first + row, f"{name}#{row}", None, size) for row, size in enumerate(sizes)]
                progress.advance(len(sizes))
        where = str(self._root / self._pattern)
        if not samples:
            raise SourceError(f"{where} holds no rows")
        if roles.unread:
            _log.warning("columns of %s that are neither numbers nor text are left out: %s", where, roles.unread)
        labels, classes = _labels(values, roles, self._options.label_sep, where)
        if labels:
            samples = [dataclasses.replace(sample, label=label) for sample, label in zip(samples, labels, strict=True)]
        columns = columns_of_values({name: values[name] for name in roles.kept})
        if self._options.fold_col:
            columns["fold"] = _folds(values[self._options.fold_col], where)
        return Listing(samples, classes, columns)

    def load(self, sample: Sample) -> Item:
        """Return a row's image, mask and arrays. Raises SampleError when one is missing or the file is broken."""
        name, _, row = sample.path.rpartition("#")
        try:
            roles = self._roles(name)
            cells = open_rows(self._root / name).row(int(row), roles.heavy)
        except IndexError as error:
            raise SampleError(sample.path, "is no longer in its file, which holds fewer rows now") from error
        except SourceError as error:
            raise SampleError(sample.path, f"cannot be read: {error}") from error
        fields: dict[str, bytes | Array] = {}
        for column, field in ((roles.image, IMAGE), (roles.mask, MASK)):
            if column:
                fields[field] = self._encoded(cells[column].as_py(), column, sample.path)
        safe = field_names(roles.arrays)
        fields |= {safe[column]: _array(cells[column], column, sample.path) for column in roles.arrays}
        return Item(fields)

    def _roles(self, name: str) -> Roles:
        path = self._root / name
        return _roles_of(open_rows(path), self._options, str(path))

    def _check_names(self, names: Sequence[str]) -> None:
        splits = sorted({found[1] for name in names if (found := _SPLIT.fullmatch(Path(name).name))})
        if len(splits) > 1:
            raise SourceError(
                f"{self._root} holds files of the splits {', '.join(splits)}: give a pattern of one, such as "
                f"'{self._root / splits[-1]}-*{_SUFFIX}'"
            )

    def _encoded(self, cell: Any, column: str, path: str) -> bytes:
        """Return the bytes of an image: those in the cell, or those of the file that it names."""
        if isinstance(cell, Mapping):
            cell = cell.get("bytes") or cell.get("path")
        if isinstance(cell, bytes) and cell:
            return cell
        if isinstance(cell, str) and cell:
            name = cell + self._options.suffix
            try:
                return read_below(self._images, name, path)
            except SampleError as error:
                raise SampleError(path, f"{name!r} {error.reason}") from error
        raise SampleError(path, f"has no image in column {column!r}")


@functools.lru_cache(maxsize=4)
def _roles_of(rows: ParquetRows, options: TableOptions, where: str) -> Roles:
    return find_roles(rows.schema, options, where)


def _labels(
    values: Mapping[str, list[Any]], roles: Roles, separator: str | None, where: str
) -> tuple[Sequence[Label], tuple[str, ...]]:
    names = roles.labels
    if len(names) > 1:
        return labels_of_columns({name: values[name] for name in names}, where)
    if not names:
        return (), ()
    found = values[names[0]]
    if separator is not None:
        return split_names([value or "" for value in found], separator)
    if roles.classes and any(isinstance(value, list) for value in found):
        return marks_of_numbers(found, roles.classes, where)
    labels, classes = labels_of_values(found, where)
    return labels, roles.classes or classes


def _folds(values: Sequence[Any], where: str) -> Array:
    wrong = next((value for value in values if type(value) is not int or not 0 <= value < 2**31), 0)
    if wrong:
        raise SourceError(f"{where}: {wrong!r} is no fold: a fold is a whole number from 0")
    return np.array(values, np.int64)


def _array(cell: Any, column: str, path: str) -> Array:
    value = cell.as_py()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SampleError(path, f"column {column!r} holds lists of different lengths in one row") from error
    if value is None or array.dtype.kind not in "biuf":
        raise SampleError(path, f"column {column!r} has no numbers, or misses some")
    kind = getattr(cell.type, "storage_type", cell.type)
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return array.astype(_DTYPES.get(str(kind), str(kind)), copy=False)


def _is_parquet(source: str | Path) -> bool:
    path = Path(source)
    if path.is_dir():
        return next(path.glob(f"*{_SUFFIX}"), None) is not None
    return path.suffix.lower() == _SUFFIX and (path.is_file() or has_wildcard(str(source)))


KIND: Final = SourceKind(
    "parquet files (one, a folder of them, or a pattern)",
    _is_parquet,
    ParquetSource,
    frozenset(("path_col", "label_cols", "label_sep", "suffix", "root", "mask_col", "fold_col", "keep", "drop")),
)
