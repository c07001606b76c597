"""RecordSlots: which records lie in an accelerator's memory, and in which row. It needs numpy alone.

Memory is filled by chunks of equally many records. Over several cores, a chunk is divided as a batch is: each core gets
its rows of it, and lays them behind those that it has. So no core sends anything to another, and every upload has one
shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError

Numbers = npt.NDArray[np.int64]

#: What becomes of a chunk: it has no records, they are being read, they were given to whoever uploads, they are there.
_FREE, _PLANNED, _SENT, _WRITTEN = range(4)


class Tile(NamedTuple):
    """The rows and values of which an accelerator's memory takes whole multiples for an array of two dimensions.

    A TPU lays 32 x 128 values of 1 byte in a tile, and 8 x 128 of 4 bytes (https://openxla.org/xla/tiled_layout).
    """

    rows: int
    values: int

    def padded(self, values: int) -> int:
        """Return how many values a row takes with its padding. A single value has none: its array has one dimension."""
        return values if values == 1 else _whole(values, self.values)


#: Of memory that takes arrays as they are.
NO_TILE: Final = Tile(1, 1)
#: Of what XLA compiles for, with values of 1 byte; it holds whole tiles of larger ones, too.
XLA_TILE: Final = Tile(32, 128)


class DeviceFullError(UsageError):
    """A device has not as much memory as the records need."""


class RecordUpload(NamedTuple):
    """A chunk of records to be brought to the device: its number, and its records as a loader gives a batch."""

    chunk: int
    batch: Any


class RecordBatch(NamedTuple):
    """A batch as the rows of its records in the device's memory, int32 (batch,), and what has to be uploaded before.

    `numbers` are those of its records, int64 (batch,).
    """

    slots: npt.NDArray[np.int32]
    uploads: Sequence[RecordUpload]
    numbers: Numbers


class Placed(NamedTuple):
    """The rows of some records, and of those that have to be read first, by chunk, the numbers."""

    slots: npt.NDArray[np.int32]
    missing: Sequence[tuple[int, Numbers]]
    numbers: Numbers

    def part(self, rows: slice) -> RecordBatch:
        """Return some of the records as a batch, where none is to be read."""
        return RecordBatch(self.slots[rows], (), self.numbers[rows])

    def with_arrays(self, batches: Sequence[Any]) -> RecordBatch:
        """Return the batch, given what was read of each chunk."""
        uploads = [RecordUpload(chunk, batch) for (chunk, _), batch in zip(self.missing, batches, strict=True)]
        return RecordBatch(self.slots, uploads, self.numbers)


class RecordSlots:
    """Gives records rows of a device's memory, in the order in which they are first asked for.

    Records are numbered from 0 to below `records`. A chunk has `chunk` of them, the last one fewer. `place` belongs to
    one thread, `confirm` may be called by another. An interrupt anywhere loses nothing: what a chunk's state does not
    call written is forgotten.
    """

    def __init__(
        self, records: int, chunk: int, cores: int = 1, owners: Numbers | None = None, tile: Tile = NO_TILE
    ) -> None:
        """Begin empty. `owners` is the core on which each record has to lie, -1 for one that is never asked for.

        Raises UsageError where a chunk does not divide over the cores.
        """
        if chunk % cores:
            raise UsageError(f"batches of {chunk:,} do not divide evenly over {cores} cores: choose another batch size")
        self.records, self.chunk, self.cores, self.owners = records, chunk, cores, owners
        counts = [records] if owners is None else np.bincount(owners[owners >= 0], minlength=cores).tolist()
        self._width = chunk // len(counts)  # rows of a chunk that are filled by records of one owner
        self.chunks = max(-(-count // self._width) for count in counts)
        self._each = chunk // cores  # rows of a chunk on each core
        #: Rows on each core, whole tiles of them.
        self.rows_a_core = _whole(self.chunks * self._each, tile.rows)
        self._slots = np.full(records, -1, np.int32)
        self._states = np.full(self.chunks, _FREE, np.int8)
        self._left = self._count_left()  # records without a place, by owner

    @property
    def rows(self) -> int:
        """How many rows there are, on all cores together."""
        return self.cores * self.rows_a_core

    @property
    def is_local(self) -> bool:
        """Whether each core gets those records alone that lie there."""
        return self.owners is not None and self.cores > 1

    @property
    def is_full(self) -> bool:
        """Whether each record has a place."""
        return not self._left.any()

    def hand_out(self, chunks: Iterable[int]) -> None:
        """Note that what was read of these chunks was given to whoever uploads it, and `confirm` will follow."""
        for chunk in chunks:
            self._states[chunk] = _SENT

    def forget_planned(self) -> None:
        """Take their places from the records of chunks that were not handed out: nobody will upload them."""
        self._forget((_PLANNED,))

    def forget_unconfirmed(self) -> None:
        """Take their places from the records of all chunks that were not confirmed."""
        self._forget((_PLANNED, _SENT))

    def _forget(self, states: tuple[int, ...]) -> None:
        is_gone = np.isin(self._states, states)
        if not is_gone.any():
            return
        chunks = self._slots % self.rows_a_core // self._each
        self._slots[(self._slots >= 0) & is_gone[chunks.clip(0, self.chunks - 1)]] = -1
        self._left = self._count_left()
        self._states[is_gone] = _FREE

    def place(self, numbers: Numbers) -> Placed:
        """Return the rows of records, with places for those that had none, and which of these are to be uploaded.

        Chunks are filled up with the records of the lowest numbers that have no place. The last few records, fewer than
        a chunk, follow as soon as they are the last. Raises UsageError for a record that no core owns.
        """
        missing: list[tuple[int, Numbers]] = []
        if self._left.any():
            found, first = np.unique(numbers[self._slots[numbers] < 0], return_index=True)
            if len(found):
                missing = self._place_chunks(found[np.argsort(first)])
        slots = self._slots[numbers]
        if (slots < 0).any():
            raise UsageError("records of other samples are asked for than those that lie here: make another Resident")
        return Placed(slots, missing, numbers)

    def check_owners(self, slots: npt.NDArray[np.int32]) -> None:
        """Raise UsageError where records have owners and a core's part of a batch has one of another core.

        The cores exchange nothing then, so that it would get another record.
        """
        if not self.is_local:
            return
        own = np.arange(len(slots)) * self.cores // max(1, len(slots))
        if len(slots) % self.cores or (slots // self.rows_a_core != own).any():
            raise UsageError(
                'shuffle="local" gives each core the samples that lie there, and this batch is divided otherwise: give '
                "the loader the cores that divide a batch, and leave pad_last out"
            )

    def confirm(self, chunk: int) -> None:
        """Note that a chunk was written to the device's memory, where it stays."""
        self._states[chunk] = _WRITTEN

    def _count_left(self) -> Numbers:
        is_left = self._slots < 0
        if self.owners is None:
            return np.array([int(is_left.sum())])
        counts: Numbers = np.bincount(self.owners[is_left & (self.owners >= 0)], minlength=self.cores)
        return counts

    def _place_chunks(self, new: Numbers) -> list[tuple[int, Numbers]]:
        groups = [new] if self.owners is None else [new[self.owners[new] == core] for core in range(self.cores)]
        count = max(-(-len(group) // self._width) for group in groups)
        if 0 < int(self._left.max()) - count * self._width < self._width:
            count += 1
        rows = np.full((len(groups), count * self._width), -1)
        for at, group in enumerate(groups):
            filled = self._filled(group, at, count * self._width)
            rows[at, : len(filled)] = filled
        chunks = np.flatnonzero(self._states == _FREE)[:count].tolist()
        return [
            (chunk, self._fill(chunk, rows[:, first : first + self._width].reshape(-1)))
            for chunk, first in zip(chunks, range(0, count * self._width, self._width), strict=True)
        ]

    def _filled(self, group: Numbers, owner: int, most: int) -> Numbers:
        """Return these records of one owner, and the first of its others that have no place, up to the chunk's size."""
        more = min(most, int(self._left[owner])) - len(group)
        if not more:
            return group
        is_left = self._slots < 0
        is_left[group] = False
        if self.owners is not None:
            is_left &= self.owners == owner
        return np.concatenate([group, np.flatnonzero(is_left)[:more]])

    def _fill(self, chunk: int, numbers: Numbers) -> Numbers:
        """Give a chunk's records their places; return the numbers of what is to be read, to its last record.

        A row without a record, -1, is read as another one's: so all that is read is one piece.
        """
        is_record = numbers >= 0
        self._states[chunk] = _PLANNED  # before any record has its place, so that it is taken back
        self._slots[numbers[is_record]] = self.rows_of_chunk(chunk)[is_record]
        self._left -= np.bincount(np.flatnonzero(is_record) // self._width, minlength=len(self._left))
        last = int(np.flatnonzero(is_record)[-1]) + 1
        return np.where(is_record, numbers, numbers[is_record][0])[:last]

    def rows_of_chunk(self, chunk: int) -> npt.NDArray[np.int32]:
        """Return the rows of a chunk's records: each core's are one after another."""
        cores, places = np.divmod(np.arange(self.chunk), self._each)
        return (cores * self.rows_a_core + chunk * self._each + places).astype(np.int32)


def rows_of(records: int, chunk: int, cores: int, tile: Tile) -> int:
    """Return how many rows a number of records take on all cores together, given the records of a chunk."""
    return cores * _whole(-(-records // chunk) * (chunk // cores), tile.rows)


def _whole(count: int, unit: int) -> int:
    """Return the smallest multiple of a unit that is at least a count."""
    return -(-count // unit) * unit
