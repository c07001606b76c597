"""RecordSlots: which records lie in an accelerator's memory, and in which row. It needs numpy alone.

Memory is filled by chunks of equally many records. Over several cores, a chunk is divided as a batch is: each core gets
its rows of it, and lays them behind those that it has. So no core sends anything to another, and every upload has one
shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError

Numbers = npt.NDArray[np.int64]


class RecordUpload(NamedTuple):
    """A chunk of records to be brought to the device: its number, and its records as a loader gives a batch."""

    chunk: int
    batch: Any


class RecordBatch(NamedTuple):
    """A batch as the rows of its records in the device's memory, int32 (batch,), and what has to be uploaded before."""

    slots: npt.NDArray[np.int32]
    uploads: Sequence[RecordUpload]


class Placed(NamedTuple):
    """The rows of some records, and of those that have to be read first, by chunk, the numbers."""

    slots: npt.NDArray[np.int32]
    missing: Sequence[tuple[int, Numbers]]

    def with_arrays(self, batches: Sequence[Any]) -> RecordBatch:
        """Return the batch, given what was read of each chunk."""
        uploads = [RecordUpload(chunk, batch) for (chunk, _), batch in zip(self.missing, batches, strict=True)]
        return RecordBatch(self.slots, uploads)


class RecordSlots:
    """Gives records rows of a device's memory, in the order in which they are first asked for.

    Records are numbered from 0 to below `records`. A chunk has `chunk` of them, the last one fewer. `place` belongs to
    one thread, `confirm` may be called by another.
    """

    def __init__(self, records: int, chunk: int, cores: int = 1) -> None:
        """Begin empty. Raises UsageError where a chunk does not divide over the cores."""
        if chunk % cores:
            raise UsageError(f"batches of {chunk:,} do not divide evenly over {cores} cores: choose another batch size")
        self.records, self.chunk, self.cores = records, chunk, cores
        self.chunks = -(-records // chunk)
        self._slots = np.full(records, -1, np.int32)
        self._left = records  # records without a place
        self._free = [*range(self.chunks)][::-1]
        self._planned: dict[int, Numbers] = {}  # chunks whose records have places, and are being read
        self._sent: dict[int, Numbers] = {}  # those that were handed out and not confirmed

    @property
    def rows(self) -> int:
        """How many rows there are, on all cores together."""
        return self.chunks * self.chunk

    @property
    def is_full(self) -> bool:
        """Whether each record has a place."""
        return not self._left

    def hand_out(self, chunks: Iterable[int]) -> None:
        """Note that what was read of these chunks was given to whoever uploads it, and `confirm` will follow."""
        for chunk in chunks:
            self._sent[chunk] = self._planned.pop(chunk)

    def forget_planned(self) -> None:
        """Take their places from the records of chunks that were not handed out: nobody will upload them."""
        self._forget(self._planned)

    def forget_unconfirmed(self) -> None:
        """Take their places from the records of all chunks that were not confirmed."""
        self._forget(self._planned)
        self._forget(self._sent)

    def _forget(self, chunks: dict[int, Numbers]) -> None:
        for chunk, numbers in chunks.items():
            self._slots[numbers] = -1
            self._left += len(numbers)
            self._free.append(chunk)
        chunks.clear()

    def place(self, numbers: Numbers) -> Placed:
        """Return the rows of records, with places for those that had none, and which of these are to be uploaded.

        Chunks are filled up with the records of the lowest numbers that have no place. The last few records, fewer than
        a chunk, follow as soon as they are the last.
        """
        missing: list[tuple[int, Numbers]] = []
        if self._left:
            found, first = np.unique(numbers[self._slots[numbers] < 0], return_index=True)
            missing = self._place_chunks(found[np.argsort(first)])
        return Placed(self._slots[numbers], missing)

    def confirm(self, chunk: int) -> None:
        """Note that a chunk was written to the device's memory, where it stays."""
        self._sent.pop(chunk)

    def _place_chunks(self, new: Numbers) -> list[tuple[int, Numbers]]:
        more = -len(new) % self.chunk
        if 0 < self._left - len(new) - more < self.chunk:
            more = self._left - len(new)
        if more:
            is_left = self._slots < 0
            is_left[new] = False
            new = np.concatenate([new, np.flatnonzero(is_left)[:more]])
        placed = []
        for first in range(0, len(new), self.chunk):
            chunk, numbers = self._free.pop(), new[first : first + self.chunk]
            self._slots[numbers] = self._rows_of(chunk)[: len(numbers)]
            self._left -= len(numbers)
            self._planned[chunk] = numbers
            placed.append((chunk, numbers))
        return placed

    def _rows_of(self, chunk: int) -> npt.NDArray[np.int32]:
        """Return the rows of a chunk's records: each core's are one after another."""
        each = self.chunk // self.cores
        cores, places = np.divmod(np.arange(self.chunk), each)
        return (cores * (self.chunks * each) + chunk * each + places).astype(np.int32)
