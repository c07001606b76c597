"""Reads samples from parquet files, one for each row. Only this file imports pyarrow."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tpucache.errors import DependencyError, SampleError, SourceError, TpucacheError
from tpucache.native import Array
from tpucache.progress import Progress
from tpucache.store.fields import IMAGE, MASK
from tpucache.warmup.sources.columns import (
    ARRAY,
    PLAIN,
    TableOptions,
    classes_of,
    find_roles,
    numbers_of_texts,
    to_listing,
)
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


class ParquetSource:
    """The rows of parquet files, file by file in the order of the bytes of their names."""

    def __init__(self, pattern: str | Path, options: TableOptions | None = None) -> None:
        """Take a parquet file, a folder of them, or a pattern, and options for the columns. This reads nothing yet."""
        path = Path(pattern)
        self._options = options or TableOptions()
        self._root, self._pattern = split_pattern(path / f"*{_SUFFIX}" if path.is_dir() else path)
        self._images = Path(self._options.root or self._root).absolute()
        self._heavy: dict[str, str] = {}  # `list` finds the columns that `load` reads, and their fields

    def __repr__(self) -> str:
        return str(self._root / self._pattern)

    def list(self) -> Listing:
        """Return all rows as samples, with paths such as `file#row`."""
        options, where = self._options, repr(self)
        names = [name.as_posix() for name in find_shards(self._root, self._pattern)]
        first = f"{self._root}/{names[0]}"
        described = _describe(open_rows(self._root / names[0]).schema)
        kinds, classes = {**described[0], **dict.fromkeys(_in_folders(names[0]), PLAIN)}, described[1]
        image, mask = _find_images(kinds, options, first)
        free = [name for name in kinds if name not in {image, mask, options.fold_col} and not options.is_dropped(name)]
        likely = options.likely_labels(free) or [name for name in free if name in classes]
        if len(likely) > 1 and not options.label_cols and not options.likely_labels(free):
            raise SourceError(f"{first} has several columns of classes, {', '.join(likely)}: name one with --label-col")
        roles = find_roles(kinds, options, first, used=(image, mask), likely=likely)
        arrays = field_names(roles.arrays)
        self._heavy = {column: field for column, field in ((image, IMAGE), (mask, MASK)) if column} | arrays
        if not self._heavy:
            raise SourceError(
                f"{first} has neither images nor lists of numbers, only {', '.join(kinds)}: if it describes images in "
                "folders or archives beside it, give one of those as the source"
            )
        light = {name for name in (*roles.labels, *roles.kept, options.fold_col) if name}
        values: dict[str, list[Any]] = {name: [] for name in kinds if name in light}
        samples: list[Sample] = []
        with Progress(None, "list", "rows", is_brief=True) as progress:
            for name in names:
                rows, stated = open_rows(self._root / name), _in_folders(name)
                if _describe(rows.schema) != described or stated.keys() != _in_folders(names[0]).keys():
                    raise SourceError(f"{self._root}/{name} has other columns than {names[0]}: give files of one kind")
                sizes = rows.sizes(self._heavy)
                found = rows.read_columns([each for each in values if each not in stated])
                for column in values:
                    values[column] += found[column] if column in found else [stated[column]] * len(sizes)
                samples += [
                    Sample(number, f"{name}#{row}", None, size)
                    for row, (number, size) in enumerate(enumerate(sizes, len(samples)))
                ]
                progress.advance(len(sizes))
        if not samples:
            raise SourceError(f"{where} holds no rows")
        for name in _in_folders(names[0]).keys() & {*roles.kept}:
            values[name] = [*numbers_of_texts(values[name])]
        own, has_lists = classes.get(roles.labels[0], ((), False)) if len(roles.labels) == 1 else ((), False)
        return to_listing(samples, values, where, options, roles, classes=own, has_class_lists=has_lists)

    def load(self, sample: Sample) -> Item:
        """Return its content."""
        name, _, row = sample.path.rpartition("#")
        try:
            cells = open_rows(self._root / name).row(int(row), tuple(self._heavy))
        except IndexError as error:
            raise SampleError(sample.path, "is no longer in its file, which has fewer rows now") from error
        except SourceError as error:
            raise SampleError(sample.path, f"cannot be read: {error}") from error
        return Item({field: self._field(cells[column], column, sample.path) for column, field in self._heavy.items()})

    def _field(self, cell: Any, column: str, path: str) -> bytes | Array:
        value = cell.as_py()
        if isinstance(value, list):
            return _array(cell, value, column, path)
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes) and value:
            return value
        if not isinstance(value, str) or not value:
            raise SampleError(path, f"has no image in column {column!r}")
        name = value + self._options.suffix
        try:
            return read_below(self._images, name, path)
        except SampleError as error:
            raise SampleError(path, f"{name!r} {error.reason} (--root is the folder of such files)") from error


def _array(cell: Any, value: Sequence[Any], column: str, path: str) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SampleError(path, f"column {column!r} holds lists of different lengths in one row") from error
    if array.dtype.kind not in "biuf":
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


def _describe(schema: Any) -> tuple[dict[str, str], dict[str, tuple[tuple[str, ...], bool]]]:
    """Return the kind of each column of an Arrow schema, and the results of `classes_of` for columns of classes."""
    kinds = {field.name: _kind(field.type) for field in schema}
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        features = {}
    stated = features if isinstance(features, dict) else {}
    return kinds, {name: found for name in kinds if (found := classes_of(stated.get(name)))[0]}


def _in_folders(name: str) -> dict[str, str]:
    """Return the columns that the folders of a file state for all its rows, as `label=cat/0.parquet` does."""
    return {key: value for part in name.split("/")[:-1] for key, equal, value in [part.partition("=")] if equal}


def _kind(kind: Any) -> str:
    """Return what an Arrow type holds: IMAGE (bytes, or a struct with them), PLAIN, ARRAY, or ""."""
    types = _pyarrow().types
    kind = getattr(kind, "storage_type", kind)  # Hugging Face's arrays have an extension type
    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    is_struct = types.is_struct(kind) and "bytes" in [kind.field(number).name for number in range(kind.num_fields)]
    if is_struct or types.is_binary(kind) or types.is_large_binary(kind):
        return IMAGE
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        is_text = types.is_string(kind.value_type) or types.is_large_string(kind.value_type)
        return ARRAY if not is_text and _kind(kind.value_type) in (PLAIN, ARRAY) else ""
    are_values = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    return PLAIN if are_values or types.is_string(kind) or types.is_large_string(kind) else ""


def _find_images(kinds: Mapping[str, str], options: TableOptions, where: str) -> tuple[str, str]:
    """Return the columns of images, or of their paths, and of masks; "" if there is none."""
    for name in (options.path_col, options.mask_col, options.fold_col, *options.label_cols):
        if name is not None and name not in kinds:
            raise SourceError(f"{where} has no column {name!r}: there are {', '.join(map(repr, kinds))}")
    free = [name for name in kinds if not options.is_dropped(name)]
    images = [name for name in free if kinds[name] == IMAGE]
    mask = options.mask_col or (MASK if MASK in images else "")
    others = [name for name in images if name != mask]
    if options.path_col is not None or len(others) == 1:
        return options.path_col or others[0], mask
    if others and IMAGE not in others:
        raise SourceError(f"{where} has several columns of images, {', '.join(others)}: name one with --path-col")
    if others:
        return IMAGE, mask
    paths = [name for known in PATH_NAMES for name in free if name.lower() == known and kinds[name] == PLAIN]
    has_arrays = ARRAY in kinds.values()
    return next((name for name in paths if not (has_arrays and name.lower() == "id")), ""), mask


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

    def sizes(self, names: Collection[str]) -> list[int]:
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
