"""Batch buffers, recycled when the last tensor over them dies.

A fresh batch of 38 MB costs as much in page faults as the copy into it, so buffers are used again. A caller may keep
a batch as long as it likes: its buffer comes back to the pool only when nothing refers to it any more.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.store.codec import Field

Array = npt.NDArray[Any]


class Buffer:
    """The memory of one batch: an array (batch, *shape) a field, and each row's bytes of all fields, made once."""

    def __init__(self, fields: Sequence[Field], batch: int) -> None:
        """Allocate for `batch` rows."""
        self.arrays = [np.empty((batch, *field.shape), field.dtype) for field in fields]
        flat = [array.reshape(batch, -1).view(np.uint8) for array in self.arrays]
        self._views = [[memoryview(part[row]) for part in flat] for row in range(batch)]

    def views(self, rows: npt.NDArray[np.int64]) -> list[list[memoryview]]:
        """Return the bytes of all fields of each row, to be written."""
        return [self._views[row] for row in rows.tolist()]


class BufferPool:
    """Lends buffers of one shape; there are as many as were ever out at once."""

    def __init__(self, fields: Sequence[Field], batch: int) -> None:
        """Begin empty: a buffer is made when none is free."""
        self._fields = tuple(fields)
        self._batch = batch
        # A deque, because its append is atomic: a finalizer may run in any thread, inside any call, so it cannot lock.
        self._free: deque[Buffer] = deque()

    def take(self) -> Buffer:
        """Return a free buffer, or a new one. It is the caller's until `lend` or `give_back`."""
        try:
            return self._free.pop()
        except IndexError:
            return Buffer(self._fields, self._batch)

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back that nothing refers to."""
        self._free.append(buffer)

    def lend(self, buffer: Buffer, rows: int) -> list[Array]:
        """Return the first rows of a buffer's arrays; it comes back when the last object over any of them dies."""
        views = [array[:rows] for array in buffer.arrays]
        out = [None] * len(views)

        def release() -> None:
            out.pop()
            if not out:
                self._free.append(buffer)

        for view in views:
            weakref.finalize(view, release).atexit = False
        return views
