"""Records kept in memory, decoded, from the first time they are read.

The kernel's copy out of its page cache is slower than a copy between two arrays, a compressed record is decoded each
time, and a shard on a network mount is fetched again when memory is short. A copy of one's own has none of that, and
nobody can cut it short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.loading.gather import gather
from tpucache.store.codec import Field

Array = npt.NDArray[Any]
Slots = npt.NDArray[np.int64]


class Held:
    """An array (slots, *shape) a field, filled slot by slot. The kernel gives memory only to slots that are filled.

    Threads may share one: two that fill the same slot at once write the same bytes.
    """

    def __init__(self, fields: Sequence[Field], slots: int) -> None:
        """Make room for so many records."""
        self._made_of = (tuple(fields), slots)
        self.arrays = [np.empty((slots, *field.shape), field.dtype) for field in fields]
        self._bytes = [array.reshape(slots, -1).view(np.uint8) for array in self.arrays]
        self._filled = np.zeros(slots, np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        return {"_made_of": self._made_of}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["_made_of"])  # type: ignore[misc]  # the copy in another process begins empty

    def missing(self, slots: Slots) -> npt.NDArray[np.intp]:
        """Return which of these slots, by their place among them, are not filled yet."""
        return np.flatnonzero(~self._filled[slots])

    def views(self, slots: Slots) -> list[list[memoryview]]:
        """Return the bytes of all fields of each slot, to be written; then call `fill`."""
        return [[memoryview(part[slot]) for part in self._bytes] for slot in slots.tolist()]

    def fill(self, slots: Slots) -> None:
        """Say that these slots have been written."""
        self._filled[slots] = True

    def gather(self, slots: Slots, arrays: Sequence[Array]) -> None:
        """Copy filled slots into the first rows of arrays (batch, *shape)."""
        for source, target in zip(self.arrays, arrays, strict=True):
            gather(source, slots, target[: len(slots)])
