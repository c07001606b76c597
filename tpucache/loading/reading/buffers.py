"""Batch buffers, used again when the last tensor over them is freed.

A fresh batch of 38 MB costs as much in page faults as the copy into it, so buffers are used again. A caller may keep
a batch as long as it likes: its buffer comes back to the pool only when nothing refers to it any more.
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
from tpucache.native import address, is_large, native
from tpucache.store.fields import Field
from tpucache.types import Array

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]

# A fresh buffer costs as much as several batches: what only some loops of a program need is kept from one to the next.
_BATCHES: Final = 64
_SECONDS: Final = 30.0
_POOLS: Final = 2  # one to train with, one to validate with


class Buffer:
    """The memory of one batch: an array (batch, *shape) for each field, and the bytes of each row."""

    def __init__(self, fields: Sequence[Field], batch: int, allocate: Allocate = np.empty) -> None:
        """Allocate for `batch` rows. Raises UsageError when there is not as much memory."""
        try:
            self.arrays = [allocate((batch, *field.shape), np.dtype(field.dtype)) for field in fields]
        except UsageError:  # an allocator's own
            raise
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than there are addresses
            gigabytes = batch * sum(field.nbytes for field in fields) / 1e9
            raise UsageError(
                f"a batch of {batch:,} samples takes {gigabytes:,.1f} GB, more than there is: make batches smaller"
            ) from error
        #: The bytes of a row of each field, and where each row of it begins: addresses, int64 (batch,).
        self.lengths = [field.nbytes for field in fields]
        self.starts = [
            address(array) + length * np.arange(batch) for array, length in zip(self.arrays, self.lengths, strict=True)
        ]
        #: Whether it is filled faster past the processor's caches.
        self.is_large = is_large(batch, batch * sum(self.lengths))

    @functools.cached_property
    def _views(self) -> list[list[memoryview]]:
        """The bytes of all fields of each row.

        Made where they are needed: thousands of objects a batch would set off Python's garbage collection again and
        again, which stops all threads for 0.1 s where torch is imported.
        """
        flat = [
            array.view(np.uint8).reshape(len(array), length)
            for array, length in zip(self.arrays, self.lengths, strict=True)
        ]
        return [[memoryview(part[row]) for part in flat] for row in range(len(self.starts[0]))]

    def views(self, rows: npt.NDArray[np.integer[Any]]) -> list[list[memoryview]]:
        """Return the bytes of all fields of each row, to be written."""
        return [self._views[row] for row in rows.tolist()]

    def parts(self, rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the address and the length of each field of each row, as `preadv` takes them: int64 (n, fields, 2)."""
        parts = np.empty((len(rows), len(self.lengths), 2), np.int64)
        for at, (starts, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            parts[:, at, 0] = starts[rows]
            parts[:, at, 1] = length
        return parts

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of these rows in the arrays."""
        return rows


class BufferPool:
    """Lends buffers of one shape, and frees those that no batch of the last 64, and of the last 30 s, needed."""

    def __init__(self, fields: Sequence[Field], batch: int) -> None:
        """Begin empty: a buffer is made when none is free."""
        self._fields = tuple(fields)
        self._batch = batch
        # A deque, because its append is atomic: a finalizer may run in any thread, inside any call, so it cannot lock.
        self._free: deque[Buffer] = deque()
        # Threads may lose an update of these two: a buffer is then freed a little early or late, which does no harm.
        self._taken = 0
        self._since = time.monotonic()
        self._unused = 0  # buffers that were free all the time since they were last counted

    def take(self) -> Buffer:
        """Return a free buffer, or a new one. It is the caller's until `lend` or `give_back`."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = Buffer(self._fields, self._batch)
        self._unused = min(self._unused, len(self._free))
        self._taken += 1
        if self._taken >= _BATCHES and time.monotonic() - self._since >= _SECONDS:
            self._free_unused()
        return buffer

    def prepare(self, buffers: int, rows: int) -> None:
        """Make free buffers until there are `buffers`, and touch the memory of their first `rows` rows.

        Touching new memory takes as long as copying into it. If the system has too little, `take` raises the error.
        """
        while len(self._free) < buffers and not self._taken:
            try:
                buffer = Buffer(self._fields, self._batch)
            except UsageError:
                return
            for array in buffer.arrays:
                array[:rows].reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0
            self._free.append(buffer)
            if buffer.is_large:
                native()

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back that nothing refers to."""
        self._free.append(buffer)

    def lend(self, buffer: Buffer, rows: int) -> list[Array]:
        """Return the first rows of a buffer's arrays; it comes back when the last object over any of them is freed."""
        loan = _Loan(buffer, self._free)
        return [loan.view(array[:rows]) for array in buffer.arrays]

    def _free_unused(self) -> None:
        for _ in range(self._unused):
            with contextlib.suppress(IndexError):  # other threads may have taken them just now
                self._free.popleft()
        self._taken, self._since, self._unused = 0, time.monotonic(), len(self._free)


class AllocatedBuffers:
    """Lends each batch memory of an allocator that itself uses memory again, such as torch's for page-locked memory."""

    def __init__(self, fields: Sequence[Field], batch: int, allocate: Allocate) -> None:
        """Begin with nothing allocated."""
        self._fields, self._batch, self._allocate = tuple(fields), batch, allocate

    def take(self) -> Buffer:
        """Return a new buffer."""
        return Buffer(self._fields, self._batch, self._allocate)

    def prepare(self, buffers: int, _rows: int) -> None:
        """Allocate and free this many, so that the allocator keeps their memory. Raises what it raises."""
        kept = [self.take() for _ in range(buffers)]
        if kept and kept[0].is_large:
            native()

    def give_back(self, buffer: Buffer) -> None:
        """Do nothing: the last reference frees its memory."""

    def lend(self, buffer: Buffer, rows: int) -> list[Array]:
        """Return the first rows of a buffer's arrays."""
        return [array[:rows] for array in buffer.arrays]


class BufferPools:
    """Pools by the rows of their buffers: a loader uses the pool of the loader before it, whose memory was touched."""

    def __init__(self, fields: Sequence[Field]) -> None:
        """Begin empty: a pool is made when it is asked for."""
        self._fields = tuple(fields)
        self._pools: dict[int, BufferPool] = {}

    def pool(self, batch: int, allocate: Allocate | None = None) -> BufferPool | AllocatedBuffers:
        """Return the pool of buffers for `batch` rows, or those that `allocate` makes. Pools of two sizes are kept."""
        if allocate is not None:
            return AllocatedBuffers(self._fields, batch, allocate)
        pool = self._pools.pop(batch, None) or BufferPool(self._fields, batch)
        self._pools[batch] = pool
        for size in list(self._pools)[:-_POOLS]:
            self._pools.pop(size, None)  # another thread may have done so
        return pool

    def compile_loops(self, batch: int) -> None:
        """Compile the loops that fill buffers of this many rows, in a thread."""
        if is_large(batch, batch * sum(field.nbytes for field in self._fields)):
            threading.Thread(target=native, name="tpucache-compile").start()

    def drop(self, pool: BufferPool | AllocatedBuffers) -> None:
        """Forget a pool, which ends with its last loader."""
        for batch, kept in list(self._pools.items()):
            if kept is pool:
                self._pools.pop(batch, None)


class _Loan:
    """The base of all arrays over one lent buffer.

    It is freed once, with the last of them, in whichever thread: so the buffer is given back exactly once.
    """

    __array_interface__: dict[str, Any]

    def __init__(self, buffer: Buffer, free: deque[Buffer]) -> None:
        self._buffer = buffer
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._buffer)

    def view(self, array: Array) -> Array:
        """Return an array over the memory of one of the buffer's, which keeps this loan alive."""
        self.__array_interface__ = array.__array_interface__
        return np.asarray(self)
