"""Batch buffers, which are reused after the last tensor over them is freed.

The page faults of a new batch of 38 MB cost as much as the copy into it, so buffers are reused. A caller may keep a
batch as long as it likes: its buffer returns to the pool only when nothing refers to it any more.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.native import Array, address, is_large, native
from tpucache.store.fields import Field

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]

# A buffer is freed if neither the last 64 batches nor the last 30 seconds needed it. A new one costs as much as several
# batches, so it should survive the pause between two loops.
_BATCHES: Final = 64
_SECONDS: Final = 30.0
_POOLS: Final = 2  # one for training, one for validation


class Buffer:
    """The memory of one batch: an array (batch, *shape) for each field, and the addresses of its rows."""

    def __init__(self, fields: Sequence[Field], batch: int, allocate: Allocate = np.empty) -> None:
        """Allocate memory for `batch` rows."""
        try:
            self.arrays = [allocate((batch, *field.shape), np.dtype(field.dtype)) for field in fields]
        except UsageError:  # raised by the allocator
            raise
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than the address space has
            gigabytes = batch * sum(field.nbytes for field in fields) / 1e9
            raise UsageError(
                f"a batch of {batch:,} samples takes {gigabytes:,.1f} GB, more than there is in memory: make batches "
                "smaller"
            ) from error
        #: For each field: the size of a row in bytes, and the addresses of all rows, int64 (batch,).
        self.lengths = [field.nbytes for field in fields]
        self.starts = [
            address(array) + length * np.arange(batch) for array, length in zip(self.arrays, self.lengths, strict=True)
        ]
        #: Whether stores that bypass the CPU's caches fill the buffer faster.
        self.is_large = is_large(batch, batch * sum(self.lengths))

    @functools.cached_property
    def _views(self) -> list[list[memoryview]]:
        """Writable views of the bytes of each row, one per field."""
        flat = [
            array.view(np.uint8).reshape(len(array), length)
            for array, length in zip(self.arrays, self.lengths, strict=True)
        ]
        return [[memoryview(part[row]) for part in flat] for row in range(len(self.starts[0]))]

    def views(self, rows: npt.NDArray[np.integer[Any]]) -> list[list[memoryview]]:
        """Return writable views of the bytes of each row, one per field."""
        return [self._views[row] for row in rows.tolist()]

    def parts(self, rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the address and the length of each field of each row, as `preadv` takes them: int64 (n, fields, 2)."""
        parts = np.empty((len(rows), len(self.lengths), 2), np.int64)
        for at, (starts, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            parts[:, at, 0] = starts[rows]
            parts[:, at, 1] = length
        return parts

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows' positions in the arrays: the rows themselves, except in a view of another buffer."""
        return rows


class BufferPool:
    """Lends buffers of one shape. Frees buffers that neither the last 64 batches nor the last 30 s needed.

    With `allocate`, buffers are not used again: torch's allocator of page-locked memory does that, and knows when the
    copies from it have ended.
    """

    def __init__(self, fields: Sequence[Field], batch: int, allocate: Allocate | None = None) -> None:
        self._fields = tuple(fields)
        self._batch, self._allocate = batch, allocate
        # A deque, because its append is atomic: finalizers run in any thread, inside any call, so they cannot lock.
        self._free: deque[Buffer] = deque()
        # Without a lock, an update of these may be lost. Then a buffer is freed a little early or late.
        self._taken = 0
        self._since = time.monotonic()
        self._unused = 0  # the number of buffers that were never used since `_since`

    def take(self) -> Buffer:
        """Return a free buffer, or a new one. The caller owns it until it calls `lend` or `give_back`."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = Buffer(self._fields, self._batch, self._allocate or np.empty)
        self._unused = min(self._unused, len(self._free))
        self._taken += 1
        if self._taken >= _BATCHES and time.monotonic() - self._since >= _SECONDS:
            self._free_unused()
        return buffer

    def prepare(self, buffers: int, rows: int) -> None:
        """Allocate free buffers until there are `buffers`, and touch the memory of their first `rows` rows."""
        made: list[Buffer] = []
        while len(self._free) + len(made) < buffers and not self._taken:
            try:
                made.append(Buffer(self._fields, self._batch, self._allocate or np.empty))
            except UsageError:
                if self._allocate is not None:
                    raise
                break  # `take` raises it later
            for array in made[-1].arrays:
                array[:rows].reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0
        if made and made[0].is_large:
            native()
        if self._allocate is None:
            self._free.extend(made)

    def give_back(self, buffer: Buffer) -> None:
        """Put a buffer back into the pool. The caller must not use it afterwards."""
        if self._allocate is None:
            self._free.append(buffer)

    def lend(self, buffer: Buffer, rows: int) -> list[Array]:
        """Return the first rows of a buffer's arrays. When the last view of them is freed, the buffer is free again."""
        if self._allocate is not None:
            return [array[:rows] for array in buffer.arrays]
        loan = _Loan(buffer, self._free)
        return [loan.view(array[:rows]) for array in buffer.arrays]

    def _free_unused(self) -> None:
        for _ in range(self._unused):
            with contextlib.suppress(IndexError):  # other threads may have taken them meanwhile
                self._free.popleft()
        self._taken, self._since, self._unused = 0, time.monotonic(), len(self._free)


class BufferPools:
    """The buffer pools of a dataset, by batch size. A new loader reuses the pool of an earlier loader."""

    def __init__(self, fields: Sequence[Field]) -> None:
        """Make no pool yet. A pool is made on first use."""
        self._fields = tuple(fields)
        self._pools: dict[int, BufferPool] = {}

    def pool(self, batch: int, allocate: Allocate | None = None) -> BufferPool:
        """Return the pool of buffers with `batch` rows. If `allocate` is given, that function allocates each buffer.

        Only the pools of the last two batch sizes are kept.
        """
        if allocate is not None:
            return BufferPool(self._fields, batch, allocate)
        pool = self._pools.pop(batch, None) or BufferPool(self._fields, batch)
        self._pools[batch] = pool
        for size in list(self._pools)[:-_POOLS]:
            self._pools.pop(size, None)  # another thread may have removed it
        return pool

    def compile_loops(self, batch: int) -> None:
        """Start compiling the loops that fill buffers with this many rows, in a thread."""
        if is_large(batch, batch * sum(field.nbytes for field in self._fields)):
            threading.Thread(target=native, name="tpucache-compile").start()

    def drop(self, pool: BufferPool) -> None:
        """Remove a pool. Its buffers are freed when the last loader that uses them is freed."""
        for batch, kept in list(self._pools.items()):
            if kept is pool:
                self._pools.pop(batch, None)


class _Loan:
    """The numpy base object of all arrays over one lent buffer.

    It is freed exactly once, with the last of these arrays, in any thread. Then the buffer returns to the pool.
    """

    __array_interface__: dict[str, Any]

    def __init__(self, buffer: Buffer, free: deque[Buffer]) -> None:
        self._buffer = buffer
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._buffer)

    def view(self, array: Array) -> Array:
        """Return a view of one of the buffer's arrays that keeps this object alive."""
        self.__array_interface__ = array.__array_interface__
        return np.asarray(self)
