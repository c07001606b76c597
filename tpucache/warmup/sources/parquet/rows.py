"""One parquet file: how many rows it has, its small columns at once, and its large ones batch by batch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import DependencyError, SourceError

#: Rows that are decoded at a time: a batch of large photographs should not fill the memory.
_BATCH: Final = 16
_BUFFER: Final = 1 << 20


class ParquetRows:
    """An open parquet file. Checksums of its pages are verified where it has any."""

    def __init__(self, path: Path) -> None:
        """Read the file's end, which describes it. Raises SourceError, and DependencyError without pyarrow."""
        self._path = path
        self._file = _checked(path, lambda: _open(path))
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._bounds = np.cumsum([0, *(group.num_rows for group in groups)])
        self._groups = groups
        self._lock = threading.Lock()
        self._last: tuple[Any, ...] = ()

    @property
    def schema(self) -> Any:
        """The Arrow schema of the file."""
        return self._file.schema_arrow

    def read_columns(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return whole columns as Python values. Raises SourceError."""
        if not names:
            return {}
        table = _checked(self._path, lambda: self._file.read(list(names), use_threads=False))
        return {name: _checked(self._path, table.column(name).to_pylist) for name in names}

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return about how many bytes each row's large columns take in the file: the mean of its row group."""
        sizes: list[int] = []
        for group in self._groups:
            chunks = [group.column(number) for number in range(group.num_columns)]
            total = sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in names)
            sizes += [max(1, total // group.num_rows)] * group.num_rows if group.num_rows else []
        return sizes

    def row(self, number: int, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the cells of a row, as Arrow scalars by column. Rows in order are read once; IndexError for no row.

        Raises SourceError when the file is broken.
        """
        if not 0 <= number < self._bounds[-1]:
            raise IndexError(number)
        group = int(np.searchsorted(self._bounds, number, "right")) - 1
        place = number - int(self._bounds[group])
        with self._lock:
            if not self._last or self._last[:2] != (group, names) or place < self._last[3]:
                batches = self._file.iter_batches(_BATCH, [group], list(names), use_threads=False)
                self._last = (group, names, batches, 0, None)
            _, _, batches, start, batch = self._last
            while batch is None or place >= start + batch.num_rows:
                start += batch.num_rows if batch is not None else 0
                batch = _checked(self._path, lambda: next(batches))
                self._last = (group, names, batches, start, batch)
        cells: dict[str, Any] = _checked(
            self._path, lambda: {name: batch.column(name)[place - start] for name in names}
        )
        return cells


def open_rows(path: Path) -> ParquetRows:
    """Return an open file, opened once a process as long as it does not change. Raises SourceError."""
    try:
        status = path.stat()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    return _opened(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _opened(path: Path, size: int, changed: int) -> ParquetRows:
    """Return an open file. The size and time of change are part of the cache's key."""
    return ParquetRows(path)


def _open(path: Path) -> Any:
    return _pyarrow().parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True)


def _checked(path: Path, read: Any) -> Any:
    """Return what a function of pyarrow returns. Raises SourceError for whatever it raises on a broken file."""
    pyarrow = _pyarrow()
    try:
        return read()
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, MemoryError, StopIteration) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(f"{path} is no whole parquet file: {text}. Copy it again") from error


@functools.cache
def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DependencyError("parquet files need pyarrow: `pip install pyarrow`") from error
    return pyarrow
