"""Reads samples from parquet files, one for each row. Only this file imports pyarrow."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tpucache.errors import DependencyError, SampleError, SourceError, TpucacheError
from tpucache.native import Array
from tpucache.progress import Progress
from tpucache.store.fields import IMAGE, MASK
from tpucache.warmup.sources.columns import TableOptions, classes_of, tell_of_others, to_listing
from tpucache.warmup.sources.folder import find_shards, read_below
from tpucache.warmup.sources.source import (
    Item,
    Listing,
    Sample,
    SourceKind,
    cached_until_changed,
    field_names,
    has_wildcard,
    split_pattern,
)
from tpucache.warmup.sources.table import PATH_NAMES

_SUFFIX: Final = ".parquet"

#: Types whose names differ between numpy and Arrow. `to_pandas_dtype` knows them, too, but may need pandas.
_DTYPES: Final = {"halffloat": "float16", "float": "float32", "double": "float64"}

#: The number of rows that are decoded at a time: few, so that large photographs do not fill the memory.
_BATCH: Final = 16
_BUFFER: Final = 1 << 20

T = TypeVar("T")

_log: Final = logging.getLogger("tpucache")


class ParquetSource:
    """The rows of parquet files, file by file in the order of the bytes of their names."""

    def __init__(self, pattern: str | Path, options: TableOptions | None = None) -> None:
        """Take a parquet file, a folder of them, or a pattern, and options for the columns. This reads nothing yet."""
        path = Path(pattern)
        self._options = options or TableOptions()
        self._root, self._pattern = split_pattern(path / f"*{_SUFFIX}" if path.is_dir() else path)
        self._where = str(self._root / self._pattern)
        self._images = Path(self._options.root or self._root).absolute()

    def __repr__(self) -> str:
        return self._where

    def list(self) -> Listing:
        """Return all rows as samples, with paths such as `file#row`."""
        options, where = self._options, self._where
        names = [name.as_posix() for name in find_shards(self._root, self._pattern)]
        first = names[0]
        roles = self._roles(first)
        schema = open_rows(self._root / first).schema
        if not roles.heavy:
            raise SourceError(
                f"{self._root}/{first} has neither images nor lists of numbers, only {', '.join(schema.names)}: if it "
                "describes images in folders or archives beside it, give one of those as the source"
            )
        if "=" in first:
            _log.warning("%s: columns in the names of folders are not read: write them into the files", where)
        options.tell_of_unused(schema.names, where)
        light = [name for name in dict.fromkeys((*roles.labels, *roles.kept, options.fold_col)) if name]
        values: dict[str, list[Any]] = {name: [] for name in light}
        samples: list[Sample] = []
        with Progress(None, "list", "rows", is_brief=True) as progress:
            for name in names:
                if self._roles(name) != roles:
                    raise SourceError(f"{self._root}/{name} has other columns than {first}: give files of one kind")
                rows = open_rows(self._root / name)
                for column, found in rows.read_columns(light).items():
                    values[column] += found
                sizes = rows.sizes(roles.heavy)
                samples += [
                    Sample(number, f"{name}#{row}", None, size)
                    for row, (number, size) in enumerate(enumerate(sizes, len(samples)))
                ]
                progress.advance(len(sizes))
        if not samples:
            raise SourceError(f"{where} holds no rows")
        if roles.unread:
            _log.warning("leaving out columns of %s that are neither numbers nor text: %s", where, roles.unread)
        if not options.label_cols:
            tell_of_others(where, options.likely_labels([*roles.labels, *roles.kept]))
        return to_listing(
            samples,
            values,
            where,
            options,
            labels=roles.labels,
            kept=roles.kept,
            classes=roles.classes,
            has_class_lists=roles.has_class_lists,
        )

    def load(self, sample: Sample) -> Item:
        """Return its content."""
        name, _, row = sample.path.rpartition("#")
        try:
            roles = self._roles(name)
            cells = open_rows(self._root / name).row(int(row), roles.heavy)
        except IndexError as error:
            raise SampleError(sample.path, "is no longer in its file, which has fewer rows now") from error
        except SourceError as error:
            raise SampleError(sample.path, f"cannot be read: {error}") from error
        fields: dict[str, bytes | Array] = {
            field: self._encoded(cells[column].as_py(), column, sample.path)
            for column, field in ((roles.image, IMAGE), (roles.mask, MASK))
            if column
        }
        safe = field_names(roles.arrays)
        fields |= {safe[column]: _array(cells[column], column, sample.path) for column in roles.arrays}
        return Item(fields)

    def _roles(self, name: str) -> Roles:
        return find_roles(open_rows(self._root / name).schema, self._options, f"{self._root}/{name}")

    def _encoded(self, cell: Any, column: str, path: str) -> bytes:
        if isinstance(cell, Mapping):
            cell = cell.get("bytes") or cell.get("path")
        if isinstance(cell, bytes) and cell:
            return cell
        if not isinstance(cell, str) or not cell:
            raise SampleError(path, f"has no image in column {column!r}")
        name = cell + self._options.suffix
        try:
            return read_below(self._images, name, path)
        except SampleError as error:
            raise SampleError(path, f"{name!r} {error.reason} (--root is the folder of such files)") from error


def _array(cell: Any, column: str, path: str) -> Array:
    value = cell.as_py()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SampleError(path, f"column {column!r} holds lists of different lengths in one row") from error
    if value is None or array.dtype.kind not in "biuf":
        raise SampleError(path, f"column {column!r} has no numbers in this row, or one is missing")
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


@dataclass(frozen=True)
class Roles:
    """The names of columns by their meaning; `image` and `mask` are "" if there is none.

    `kept` are the columns that go into the samples table. `unread` are columns of types that are not kept. `classes`
    are the names of the classes, if the metadata has them; of those in lists with `has_class_lists`.
    """

    image: str
    mask: str
    labels: tuple[str, ...]
    classes: tuple[str, ...]
    has_class_lists: bool
    arrays: tuple[str, ...]
    kept: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def heavy(self) -> tuple[str, ...]:
        """The columns that are read sample by sample."""
        return tuple(name for name in (self.image, self.mask, *self.arrays) if name)


def find_roles(schema: Any, options: TableOptions, where: str) -> Roles:
    """Return the meanings of the columns of an Arrow schema. `where` names the file in messages."""
    kinds = {field.name: _kind(field.type) for field in schema if not options.is_dropped(field.name)}
    stated = _features(schema)
    features = {name: found for name in kinds if (found := classes_of(stated.get(name)))[0]}
    for name in (options.path_col, options.mask_col, options.fold_col, *options.label_cols):
        if name is not None and name not in kinds:
            raise SourceError(f"{where} has no column {name!r}: there are {', '.join(map(repr, kinds))}")
    images = [name for name, kind in kinds.items() if kind == "image"]
    mask = options.mask_col or (MASK if MASK in images else "")
    image = options.path_col or _image([name for name in images if name != mask], kinds, where)
    free = [name for name in kinds if name not in {image, mask, options.fold_col}]
    labels = options.label_cols or tuple(options.likely_labels(free)[:1])
    if not labels and (classes := [name for name in free if name in features]):
        if len(classes) > 1:
            raise SourceError(
                f"{where} has several columns of classes, {', '.join(classes)}: name one with --label-col"
            )
        labels = tuple(classes)
    wanted = [name for name in free if name not in labels and options.is_kept(name)]
    arrays = tuple(name for name in wanted if kinds[name] == "numbers")
    kept = tuple(name for name in wanted if kinds[name] in ("text", "number"))
    unread = tuple(name for name in wanted if name not in (*arrays, *kept))
    own, has_lists = features.get(labels[0], ((), False)) if len(labels) == 1 else ((), False)
    return Roles(image, mask, labels, own, has_lists, arrays, kept, unread)


def _features(schema: Any) -> Mapping[str, Any]:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _kind(kind: Any) -> str:
    """Return what an Arrow type holds: image (bytes, or a struct with them), text, number, numbers (lists), or ""."""
    types = _pyarrow().types
    kind = getattr(kind, "storage_type", kind)  # Hugging Face's arrays have an extension type
    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    is_struct = types.is_struct(kind) and "bytes" in [kind.field(number).name for number in range(kind.num_fields)]
    if is_struct or types.is_binary(kind) or types.is_large_binary(kind):
        return "image"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return "number"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "numbers" if _kind(kind.value_type) in ("number", "numbers") else ""
    return ""


def _image(images: Sequence[str], kinds: Mapping[str, str], where: str) -> str:
    if IMAGE in images or len(images) == 1:
        return IMAGE if IMAGE in images else images[0]
    if images:
        raise SourceError(f"{where} has several columns of images, {', '.join(images)}: name one with --path-col")
    paths = [name for known in PATH_NAMES for name, kind in kinds.items() if name.lower() == known and kind == "text"]
    has_numbers = "numbers" in kinds.values()
    return next((name for name in paths if not (has_numbers and name.lower() == "id")), "")


class ParquetRows:
    """An open parquet file. Checksums of its pages are verified if it has them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _checked(
            path,
            lambda: _pyarrow().parquet.ParquetFile(
                path, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True
            ),
        )
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._bounds = np.cumsum([0, *(group.num_rows for group in groups)])
        self._groups = groups
        self._lock = threading.Lock()
        #: What was read last: the row group and columns, the batches to come, and the last one and its first row.
        self._read: tuple[Any, ...] = ()
        self._batches: Any = None
        self._batch: Any = ()
        self._start = 0

    @property
    def schema(self) -> Any:
        """The Arrow schema of the file."""
        return self._file.schema_arrow

    def read_columns(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return whole columns as Python values."""
        if not names:
            return {}
        table = _checked(self._path, lambda: self._file.read(list(names), use_threads=False))
        return {name: _checked(self._path, table.column(name).to_pylist) for name in names}

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the approximate bytes of some columns in each row: the mean over its row group."""
        sizes: list[int] = []
        for group in self._groups:
            chunks = [group.column(number) for number in range(group.num_columns)]
            total = sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in names)
            sizes += [max(1, total // group.num_rows)] * group.num_rows if group.num_rows else []
        return sizes

    def row(self, number: int, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the cells of a row, as Arrow scalars by column.

        If rows are read in order, each part of the file is read only once.
        """
        if not 0 <= number < self._bounds[-1]:
            raise IndexError(number)
        group = int(np.searchsorted(self._bounds, number, "right")) - 1
        place = number - int(self._bounds[group])
        with self._lock:
            if self._read != (group, names) or place < self._start:
                read = functools.partial(self._file.iter_batches, _BATCH, [group], list(names), use_threads=False)
                self._batches, self._batch, self._start = _checked(self._path, read), (), 0
                self._read = group, names
            while place >= self._start + len(self._batch):
                self._start += len(self._batch)
                self._batch = _checked(self._path, lambda: next(self._batches))
            batch, start = self._batch, self._start
        return _checked(self._path, lambda: {name: batch.column(name)[place - start] for name in names})


#: Opens the parquet file at a path.
open_rows: Final = cached_until_changed(2)(ParquetRows)


def _checked(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except TpucacheError:
        raise
    except Exception as error:
        text = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SourceError(f"{path} is not a complete parquet file: {text}. Copy it again") from error


@functools.cache
def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DependencyError("parquet files need pyarrow: `pip install pyarrow`") from error
    return pyarrow
