"""RecordIndex: where each record lies, read with `pread` in blocks when it is asked for.

Nothing is mapped: a file that is truncated while it is mapped kills the process, through `pread` it is an exception.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache import system
from tpucache.errors import DamageError, FormatError, StoreError
from tpucache.store.files import OpenFile, read_npy_header
from tpucache.store.format import INDEX_DTYPE, MAX_HEADER_BYTES
from tpucache.store.manifest import FileEntry, Manifest

_BLOCK_BITS: Final = 12
_BLOCK: Final = 1 << _BLOCK_BITS  # rows read at once: 80 KiB

Rows = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]


class _Table(NamedTuple):
    """The open file, where its rows begin, those that were read, and which blocks of them were."""

    file: OpenFile
    offset: int
    memory: memoryview
    rows: Rows
    loaded: npt.NDArray[np.bool_]


class RecordIndex:
    """The index rows of a cache by their numbers, variant by variant in the manifest's order; threads may share it.

    Opening reads the header alone. A block of rows is read when one of them is asked for, and kept: 20 bytes a record,
    in memory that forked processes share. A pickled copy opens the file again where it is used.
    """

    def __init__(self, directory: Path, manifest: Manifest, check: Callable[[FileEntry], None] | None = None) -> None:
        """Open a cache's index; `check` raises StoreError where it is another file by now than it was.

        Raises DamageError when the file is missing or has another size than the manifest says, FormatError when its
        dtype or length is wrong, StoreError when too many files are open.
        """
        self._directory = directory
        self._manifest = manifest
        self._check = check
        self._longest = max(layout.largest_bytes for layout in manifest.layouts)
        self._opened: _Table | None = self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __len__(self) -> int:
        return self._manifest.records

    def __getitem__(self, numbers: Numbers) -> Rows:
        """Return the rows of these numbers: INDEX_DTYPE (n,). Raises IndexError, DamageError, FormatError."""
        table = self._table()
        blocks = numbers >> _BLOCK_BITS
        missing = blocks[~table.loaded[blocks]]
        if len(missing):
            self._load(table, np.unique(missing))
        rows: Rows = table.rows[numbers]
        return rows

    def read_all(self) -> Rows:
        """Return all rows, read-only: INDEX_DTYPE (records,). Raises DamageError, FormatError."""
        table = self._table()
        self._load(table, np.flatnonzero(~table.loaded))
        rows: Rows = table.rows.view()
        rows.flags.writeable = False
        return rows

    def is_right(self) -> bool:
        """Read all rows, and return whether they are what the manifest says. Raises DamageError, FormatError."""
        rows, table = self.read_all(), self._table()
        digest = hashlib.sha256(system.pread(table.file.number, table.offset, 0))
        digest.update(rows.view(np.uint8).data)
        return digest.hexdigest() == self._manifest.index.sha256

    def _table(self) -> _Table:
        if self._opened is None:  # two threads may both open it, and both are right
            self._opened = self._open()
        return self._opened

    def _load(self, table: _Table, blocks: Numbers) -> None:
        """Read blocks of rows, and refuse records that are too long.

        Threads, and forked processes, may write the same bytes into the same place at once.
        """
        size = _BLOCK * INDEX_DTYPE.itemsize
        if len(blocks) > 1:  # all are asked for at once, so that a disk far away is waited for once
            with contextlib.suppress(OSError):
                for block in blocks.tolist():
                    system.read_ahead(table.file.number, table.offset + block * size, size)
        for block in blocks.tolist():
            part = table.memory[block * size : (block + 1) * size]
            try:
                count = system.preadv(table.file.number, [part], table.offset + block * size)
            except OSError as error:
                raise DamageError(f"{self._path} cannot be read: {error}. Copy the cache again") from error
            if count != len(part):
                raise DamageError(f"{self._path} was cut short while it was open: copy it again")
            longest = int(table.rows["length"][block << _BLOCK_BITS : (block + 1) << _BLOCK_BITS].max(initial=0))
            if longest > self._longest:
                raise DamageError(
                    f"{self._path} has a record of {longest:,} bytes by the index, more than there is in any of these "
                    f"fields, {self._longest:,}: run `tpucache verify`, or copy the cache again"
                )
            table.loaded[block] = True

    @property
    def _path(self) -> Path:
        return self._directory / self._manifest.index.name

    def _open(self) -> _Table:
        path, records = self._path, self._manifest.records
        try:
            file = OpenFile(path)
            size = os.fstat(file.number).st_size
            if self._check is not None:
                self._check(self._manifest.index)
            if size != self._manifest.index.bytes:
                raise DamageError(
                    f"{path} is {size:,} bytes, the manifest says {self._manifest.index.bytes:,}: copy it again"
                )
            header = read_npy_header(io.BytesIO(system.pread(file.number, MAX_HEADER_BYTES, 0)), INDEX_DTYPE)
        except OSError as error:
            raise DamageError(f"{path} cannot be read: {error}. Copy the cache again") from error
        except FormatError as error:
            raise FormatError(f"{path} is not an index: {error}") from error
        if header.dtype != INDEX_DTYPE or header.shape != (records,):
            raise FormatError(f"{path} has {header.dtype} {header.shape}, not {records} index rows")
        if size != header.offset + records * INDEX_DTYPE.itemsize:
            raise FormatError(f"{path}: {size:,} bytes do not hold {records:,} index rows")
        memory = _reserve(records * INDEX_DTYPE.itemsize)
        blocks = (records + _BLOCK - 1) >> _BLOCK_BITS
        return _Table(file, header.offset, memory, np.frombuffer(memory, INDEX_DTYPE), np.zeros(blocks, np.bool_))


def encode_index(index: Rows) -> bytes:
    """Return index rows as the bytes of their file."""
    target = io.BytesIO()
    np.save(target, index, allow_pickle=False)
    return target.getvalue()


def _reserve(size: int) -> memoryview:
    """Return memory that forked processes share; the kernel gives it only where it is written."""
    try:
        return memoryview(mmap.mmap(-1, size) if size else bytearray())
    except (OSError, OverflowError, MemoryError) as error:
        raise StoreError(f"there is no memory for an index of {size / 1e9:,.1f} GB: {error}") from error
