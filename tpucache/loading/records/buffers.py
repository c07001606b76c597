"""Batch buffers, used again when the last tensor over them is freed.

A fresh batch of 38 MB costs as much in page faults as the copy into it, so buffers are used again. A caller may keep
a batch as long as it likes: its buffer comes back to the pool only when nothing refers to it any more.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.store.fields import Field

Array = npt.NDArray[Any]

_BATCHES: Final = 64


class Buffer:
    """The memory of one batch: an array (batch, *shape) a field, and each row's bytes of all fields, made once."""

    def __init__(self, fields: Sequence[Field], batch: int) -> None:
        """Allocate for `batch` rows. Raises UsageError when there is not as much memory."""
        try:
            self.arrays = [np.empty((batch, *field.shape), field.dtype) for field in fields]
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than there are addresses
            gigabytes = batch * sum(field.nbytes for field in fields) / 1e9
            raise UsageError(
                f"a batch of {batch:,} samples takes {gigabytes:,.1f} GB, more than there is: make batches smaller"
            ) from error
        flat = [
            array.view(np.uint8).reshape(batch, field.nbytes) for array, field in zip(self.arrays, fields, strict=True)
        ]
        self._views = [[memoryview(part[row]) for part in flat] for row in range(batch)]

    def views(self, rows: npt.NDArray[np.int64]) -> list[list[memoryview]]:
        """Return the bytes of all fields of each row, to be written."""
        return [self._views[row] for row in rows.tolist()]


class BufferPool:
    """Lends buffers of one shape, and frees those that no batch of the last 64 needed."""

    def __init__(self, fields: Sequence[Field], batch: int) -> None:
        """Begin empty: a buffer is made when none is free."""
        self._fields = tuple(fields)
        self._batch = batch
        # A deque, because its append is atomic: a finalizer may run in any thread, inside any call, so it cannot lock.
        self._free: deque[Buffer] = deque()
        # Threads may lose an update of these two: a buffer is then freed a little early or late, which does no harm.
        self._taken = 0
        self._unused = 0  # buffers that were free all the time since they were last counted

    def take(self) -> Buffer:
        """Return a free buffer, or a new one. It is the caller's until `lend` or `give_back`."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = Buffer(self._fields, self._batch)
        self._unused = min(self._unused, len(self._free))
        self._taken += 1
        if self._taken >= _BATCHES:
            self._free_unused()
        return buffer

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
        self._taken, self._unused = 0, len(self._free)


class _Loan:
    """What all arrays over one lent buffer have as their base.

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
