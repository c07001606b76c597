"""BufferRows: some rows of a buffer, for a reader to fill as if they were all."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.loading.records.buffers import Buffer

Rows = npt.NDArray[np.integer[Any]]


class BufferRows(Buffer):
    """The rows of a buffer that are given; it has no memory of its own."""

    def __init__(self, buffer: Buffer, rows: npt.NDArray[np.int64]) -> None:
        """Take a buffer and the rows of it, in the order in which they are filled."""
        self.arrays, self.lengths, self.is_large = buffer.arrays, buffer.lengths, buffer.is_large
        self.starts = [starts[rows] for starts in buffer.starts]
        self._buffer, self._rows = buffer, rows

    def views(self, rows: Rows) -> list[list[memoryview]]:
        """Return the bytes of all fields of each row, to be written."""
        return self._buffer.views(self._rows[rows])

    def parts(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Return the address and the length of each field of each row: int64 (n, fields, 2)."""
        return self._buffer.parts(self._rows[rows])

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where in the arrays rows are."""
        return self._rows[rows]
