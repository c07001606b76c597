"""Memory for the encoded records of a batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]


class Scratch(threading.local):
    """Memory for the encoded records of a batch, kept from one to the next: new memory is cleared before it is read."""

    def __init__(self) -> None:
        self._block: Array = np.empty(0, np.uint8)

    def block(self, lengths: Numbers) -> tuple[Array, Numbers]:
        """Return a block of bytes, uint8, and where records of these lengths begin in it, side by side.

        The next call of the same thread takes it back. Raises DamageError when there is not as much memory.
        """
        ends = np.cumsum(lengths)
        size = int(ends[-1]) if len(ends) else 0
        if size > len(self._block):
            try:
                self._block = np.empty(size + size // 4, np.uint8)
            except MemoryError as error:
                raise DamageError(
                    f"{len(ends)} encoded records take {size / 1e9:,.1f} GB by the index, more than there is: "
                    "it is damaged (`python -m tpucache verify`), or a batch is too large"
                ) from error
        return self._block, ends - lengths
