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

from tpucache.loading.records.streaming import gather
from tpucache.store.fields import Field
from tpucache.store.files.lock import ThreadLock

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int64]


class RecordMemory:
    """Records by their numbers in the index, each kept once for all datasets that were selected from one another.

    A dataset claims a slot for each of its records, then fills slots as it reads. The kernel gives memory only to slots
    that are filled. Threads may share one: two that fill the same slot at once write the same bytes. A pickled copy
    begins empty, without slots.
    """

    def __init__(self, fields: Sequence[Field], records: int, most: int) -> None:
        """Make no room yet; there are `records` in the index, of which at most `most` are ever claimed."""
        self._made_of = (tuple(fields), records, most)
        self._record_bytes = max(1, sum(field.nbytes for field in fields))
        self._slots = np.zeros(records, np.int64)  # one more than a record's slot, 0: it has none
        self._used = 0
        self._filled = np.zeros(0, np.bool_)
        self._bytes: list[Array] = []
        self._lock = ThreadLock()
        self.arrays: list[Array] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_made_of": self._made_of}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["_made_of"])  # type: ignore[misc]  # the copy in another process begins empty

    @property
    def unfilled_bytes(self) -> int:
        """Bytes that claimed records will still take when they are read."""
        return (self._used - int(np.count_nonzero(self._filled))) * self._record_bytes

    def bytes_of(self, numbers: Sequence[Numbers]) -> int:
        """Return how much more memory these records would take, all of them distinct."""
        return sum(int(np.count_nonzero(self._slots[part] == 0)) for part in numbers) * self._record_bytes

    def claim(self, numbers: Sequence[Numbers], free: int) -> bool:
        """Give each of these distinct records a slot, where there is room for all of them; return whether there is.

        The first claim decides how many slots there are: as many as fit into `free` bytes, or as it needs.
        """
        with self._lock:
            new = [part[self._slots[part] == 0] for part in numbers]
            count = sum(map(len, new))
            if self._used + count > len(self._filled) and (self._used or not self._make_room(count, free)):
                return False
            for part in new:
                first = self._used + 1
                self._used += len(part)  # before the slots are given out: a process forked in between has them unused
                self._slots[part] = np.arange(first, first + len(part))
            return True

    def slots(self, numbers: Numbers) -> Slots:
        """Return the slots of claimed records."""
        slots: Slots = self._slots[numbers] - 1
        return slots

    def missing(self, slots: Slots) -> npt.NDArray[np.intp]:
        """Return which of these slots, by their place among them, are not filled yet."""
        return np.flatnonzero(~self._filled[slots])

    def views(self, slots: Slots) -> list[list[memoryview]]:
        """Return the bytes of all fields of each slot, to be written; then call `fill`."""
        return [[memoryview(part[slot]) for part in self._bytes] for slot in slots.tolist()]

    def fill(self, slots: Slots) -> None:
        """Note that these slots have been written."""
        self._filled[slots] = True

    def gather(self, slots: Slots, arrays: Sequence[Array]) -> None:
        """Copy filled slots into the first rows of arrays (batch, *shape)."""
        for source, target in zip(self.arrays, arrays, strict=True):
            gather(source, slots, target[: len(slots)])

    def _make_room(self, needed: int, free: int) -> bool:
        """Allocate slots; return whether the system allows as many as are needed."""
        fields, _, most = self._made_of
        for slots in (max(needed, min(most, free // self._record_bytes)), needed):
            try:
                self.arrays = [np.empty((slots, *field.shape), field.dtype) for field in fields]
            except (MemoryError, ValueError):  # ValueError: more bytes than there are addresses
                continue
            self._bytes = [
                array.view(np.uint8).reshape(slots, field.nbytes)
                for array, field in zip(self.arrays, fields, strict=True)
            ]
            self._filled = np.zeros(slots, np.bool_)
            return True
        return False
