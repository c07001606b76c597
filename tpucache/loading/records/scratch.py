"""Memory for the encoded records of a batch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np

from tpucache.errors import DamageError


class Scratch(threading.local):
    """Memory for the encoded records of a batch, kept from one to the next: new memory is cleared before it is read."""

    def __init__(self) -> None:
        self._block = memoryview(b"")

    def slices(self, lengths: Sequence[int]) -> list[memoryview]:
        """Return memory of these lengths, side by side; the next call of the same thread takes it back.

        Raises DamageError when there is not as much memory.
        """
        ends = list(itertools.accumulate(lengths))
        if ends and ends[-1] > len(self._block):
            try:
                self._block = np.empty(ends[-1] + ends[-1] // 4, np.uint8).data
            except MemoryError as error:
                raise DamageError(
                    f"{len(ends)} encoded records take {ends[-1] / 1e9:,.1f} GB by the index, more than there is: "
                    "it is damaged (`python -m tpucache verify`), or a batch is too large"
                ) from error
        return [self._block[end - length : end] for end, length in zip(ends, lengths, strict=True)]
