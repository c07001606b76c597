"""RecordIndex: one row per record, with its shard, offset, length and checksum, read when it is needed.

The file is read with `pread` and not mapped: reading a mapped file that was truncated kills the process.
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

from tpucache import machine
from tpucache.errors import DamageError, FormatError, StoreError
from tpucache.store.files import OpenFile, ask_for, read_npy_header
from tpucache.store.format import INDEX_DTYPE, MAX_HEADER_BYTES
from tpucache.store.manifest import FileEntry, Manifest

_BLOCK_BITS: Final = 12
_BLOCK: Final = 1 << _BLOCK_BITS  # rows read at once: 80 KiB

Rows = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]


class _OpenIndex(NamedTuple):
    """An open index file, whose first row starts at the byte `offset`.

    `memory` is that of `rows`, as bytes. `loaded` says which blocks of rows were read; other rows are zeros.
    """

    file: OpenFile
    offset: int
    memory: memoryview
    rows: Rows
    loaded: npt.NDArray[np.bool_]


class RecordIndex:
    """The index rows of a cache, by their numbers. Threads may share a RecordIndex.

    Opening reads only the header. A block of rows is read when one of its rows is needed, and kept in memory that
    forked processes share: 20 bytes per record. A pickled copy opens the file again.
    """

    def __init__(self, directory: Path, manifest: Manifest, check: Callable[[FileEntry], None] | None = None) -> None:
        """Open a cache's index. `check` raises StoreError if the file was replaced since the cache was opened."""
        self._directory = directory
        self._manifest = manifest
        self._check = check
        self._longest = manifest.layout.largest_bytes
        self._opened: _OpenIndex | None = self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __len__(self) -> int:
        return self._manifest.records

    def __getitem__(self, numbers: Numbers) -> Rows:
        table = self._table()
        blocks = numbers >> _BLOCK_BITS
        missing = blocks[~table.loaded[blocks]]
        if len(missing):
            self._load(table, np.unique(missing))
        rows: Rows = table.rows[numbers]
        return rows

    def read_all(self) -> Rows:
        """Return all rows, read-only: INDEX_DTYPE (records,)."""
        table = self._table()
        self._load(table, np.flatnonzero(~table.loaded))
        rows: Rows = table.rows.view()
        rows.flags.writeable = False
        return rows

    def is_right(self) -> bool:
        """Read all rows, and return whether they have the manifest's SHA-256."""
        rows, table = self.read_all(), self._table()
        digest = hashlib.sha256(machine.pread(table.file.number, table.offset, 0))
        digest.update(rows.view(np.uint8).data)
        return digest.hexdigest() == self._manifest.index.sha256

    def _table(self) -> _OpenIndex:
        if self._opened is None:  # two threads may open it at once: either result may be kept
            self._opened = self._open()
        return self._opened

    def _load(self, table: _OpenIndex, blocks: Numbers) -> None:
        """Read these blocks of rows into memory. Threads and forked processes may do so at once: they write the same
        bytes.
        """
        size = _BLOCK * INDEX_DTYPE.itemsize
        if len(blocks) > 1:  # all blocks are requested at once, so that a slow disk's latency is paid once
            with contextlib.suppress(OSError):
                for block in blocks.tolist():
                    machine.read_ahead(table.file.number, table.offset + block * size, size)
        for block in blocks.tolist():
            part = table.memory[block * size : (block + 1) * size]
            try:
                count = machine.preadv(table.file.number, [part], table.offset + block * size)
            except OSError as error:
                raise DamageError(f"{self._path} cannot be read: {error}. Copy the cache again") from error
            if count != len(part):
                raise DamageError(f"{self._path} was cut short while it was open: copy it again")
            longest = int(table.rows["length"][block << _BLOCK_BITS : (block + 1) << _BLOCK_BITS].max(initial=0))
            if longest > self._longest:
                raise DamageError(
                    f"{self._path} has a record of {longest:,} bytes, but the cache's fields take at most "
                    f"{self._longest:,} bytes: run `tpucache verify`, or copy the cache again"
                )
            table.loaded[block] = True

    @property
    def _path(self) -> Path:
        return self._directory / self._manifest.index.name

    def _open(self) -> _OpenIndex:
        path, records = self._path, self._manifest.records
        try:
            file = OpenFile(path)
            size = os.fstat(file.number).st_size
            ask_for(file.number, 0, size)  # a shuffled epoch needs rows of all blocks at once
            if self._check is not None:
                self._check(self._manifest.index)
            if size != self._manifest.index.bytes:
                raise DamageError(
                    f"{path} is {size:,} bytes, the manifest says {self._manifest.index.bytes:,}: copy it again"
                )
            header = read_npy_header(io.BytesIO(machine.pread(file.number, MAX_HEADER_BYTES, 0)), INDEX_DTYPE)
        except OSError as error:
            raise DamageError(f"{path} cannot be read: {error}. Copy the cache again") from error
        except FormatError as error:
            raise FormatError(f"{path} is not an index: {error}. Copy the cache again") from error
        if header.dtype != INDEX_DTYPE or header.shape != (records,):
            raise FormatError(
                f"{path} has an array of {header.dtype} {header.shape}, not {records} index rows: copy the cache again"
            )
        if size != header.offset + records * INDEX_DTYPE.itemsize:
            raise FormatError(f"{path}: {size:,} bytes do not hold {records:,} index rows: copy the cache again")
        memory = _reserve(records * INDEX_DTYPE.itemsize)
        blocks = (records + _BLOCK - 1) >> _BLOCK_BITS
        return _OpenIndex(file, header.offset, memory, np.frombuffer(memory, INDEX_DTYPE), np.zeros(blocks, np.bool_))


def encode_index(index: Rows) -> bytes:
    target = io.BytesIO()
    np.save(target, index, allow_pickle=False)
    return target.getvalue()


def _reserve(size: int) -> memoryview:
    """Return `size` bytes of memory that forked processes share; the kernel allocates each page at its first write."""
    try:
        return memoryview(mmap.mmap(-1, size) if size else bytearray())
    except (OSError, OverflowError, MemoryError) as error:
        raise StoreError(
            f"there is no memory for an index of {size / 1e9:,.1f} GB: {error}. End other programs"
        ) from error
