"""RecordSlots: says in which row of an accelerator's memory each record lies. It needs only numpy.

Records are uploaded in chunks of equally many records. With several cores, a chunk is divided as a batch is, and each
core appends its share of the chunk to the rows that it already has. So no core sends anything to another core, and all
uploads have one shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError

Numbers = npt.NDArray[np.int64]

#: The states of a chunk: it has no records; its records are being read, are being uploaded, or are on the device.
_FREE, _PLANNED, _SENT, _WRITTEN = range(4)


class Tile(NamedTuple):
    """The rows and values of a tile: an accelerator stores arrays of two dimensions in whole tiles.

    A tile of a TPU has 32 x 128 values of 1 byte, or 8 x 128 values of 4 bytes (https://openxla.org/xla/tiled_layout).
    """

    rows: int
    values: int

    def padded(self, values: int) -> int:
        """Return how many values a row of `values` values takes with its padding.

        A row of a single value is not padded, because its array has one dimension.
        """
        return values if values == 1 else _whole(values, self.values)


#: The tile of a memory that stores arrays without padding: one value.
NO_TILE: Final = Tile(1, 1)
#: The tile of XLA's devices for values of 1 byte. It holds a whole number of the tiles for larger values, too.
XLA_TILE: Final = Tile(32, 128)


class DeviceFullError(UsageError):
    """The memory of a device is too small for the records that it should keep."""


class RecordUpload(NamedTuple):
    """A chunk of records to upload: `chunk` is its number, and `batch` has its records as a loader's batch has them."""

    chunk: int
    batch: Any


class RecordBatch(NamedTuple):
    """A batch whose records lie in the device's memory, or will lie there after its uploads.

    `slots` are the rows of its records in that memory, int32 (batch,). `uploads` are the chunks to upload first.
    `numbers` are the numbers of its records in the dataset, int64 (batch,).
    """

    slots: npt.NDArray[np.int32]
    uploads: Sequence[RecordUpload]
    numbers: Numbers


class Placed(NamedTuple):
    """The rows that some records have in the device's memory, and which records must be read and uploaded first.

    `slots` are the rows of the records, int32 (n,), and `numbers` the numbers of the records in the dataset, int64
    (n,). `missing` has one pair for each new chunk: the chunk's number, and the numbers of the records to read for it.
    """

    slots: npt.NDArray[np.int32]
    missing: Sequence[tuple[int, Numbers]]
    numbers: Numbers

    def part(self, rows: slice) -> RecordBatch:
        """Return the records at the positions `rows` as a batch that has nothing to upload."""
        return RecordBatch(self.slots[rows], (), self.numbers[rows])

    def with_arrays(self, batches: Sequence[Any]) -> RecordBatch:
        """Return all records as one batch, which uploads `batches`: the records read for each chunk of `missing`."""
        uploads = [RecordUpload(chunk, batch) for (chunk, _), batch in zip(self.missing, batches, strict=True)]
        return RecordBatch(self.slots, uploads, self.numbers)


class RecordSlots:
    """Assigns rows of a device's memory to records, in the order in which the records are first needed.

    Records have numbers from 0 to `records` - 1. A chunk has `chunk` records, the last chunk fewer. One thread calls
    `place`; another thread may call `confirm`. An interrupt does no harm: records of chunks that were not confirmed get
    a row again and are uploaded again.
    """

    def __init__(
        self, records: int, chunk: int, cores: int = 1, owners: Numbers | None = None, tile: Tile = NO_TILE
    ) -> None:
        """Begin with no record in memory. `records` is their number, `chunk` the number of records in an upload.

        A batch is divided evenly over `cores`. `owners` has the core of each record, int64 (records,), and -1 for a
        record that is never needed; with None, a record may lie on any core. `tile` is the tile of the memory. Raises
        UsageError if a chunk does not divide evenly over the cores.
        """
        if chunk % cores:
            raise UsageError(f"batches of {chunk:,} do not divide evenly over {cores} cores: choose another batch size")
        self.records, self.chunk, self.cores, self.owners = records, chunk, cores, owners
        counts = [records] if owners is None else np.bincount(owners[owners >= 0], minlength=cores).tolist()
        self._width = chunk // len(counts)  # rows of a chunk for one owner
        self.chunks = max(-(-count // self._width) for count in counts)
        self._each = chunk // cores  # rows of a chunk on each core
        #: Rows on each core, rounded up to whole tiles.
        self.rows_a_core = _whole(self.chunks * self._each, tile.rows)
        self._slots = np.full(records, -1, np.int32)
        self._states = np.full(self.chunks, _FREE, np.int8)
        self._left = self._count_left()  # the number of records without a row, by owner

    @property
    def rows(self) -> int:
        """The number of rows in the memories of all cores together."""
        return self.cores * self.rows_a_core

    @property
    def is_local(self) -> bool:
        """Whether each core only uses records in its own memory."""
        return self.owners is not None and self.cores > 1

    @property
    def is_full(self) -> bool:
        """Whether every record has a row."""
        return not self._left.any()

    def hand_out(self, chunks: Iterable[int]) -> None:
        """Note that the records of these chunks are being uploaded; a call of `confirm` for each chunk will follow."""
        for chunk in chunks:
            self._states[chunk] = _SENT

    def forget_planned(self) -> None:
        """Free the rows of chunks that were not passed to `hand_out`: their records will not be uploaded."""
        self._forget((_PLANNED,))

    def forget_unconfirmed(self) -> None:
        """Free the rows of all chunks that were not passed to `confirm`."""
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
        """Return the rows of the records with these numbers, int64 (n,).

        Records without a row get one, and the result lists them in `missing`. If a new chunk is not full, it also takes
        the records with the lowest numbers that have no row. If fewer records than a chunk would then be left without a
        row, they get a row, too, in one more chunk. Raises UsageError for a record without an owner.
        """
        missing: list[tuple[int, Numbers]] = []
        if self._left.any():
            found, first = np.unique(numbers[self._slots[numbers] < 0], return_index=True)
            if len(found):
                missing = self._place_chunks(found[np.argsort(first)])
        slots = self._slots[numbers]
        if (slots < 0).any():
            raise UsageError(
                "this Resident has no rows for some of these records, because the order that it was made for never "
                "needs them: make another Resident for this loader"
            )
        return Placed(slots, missing, numbers)

    def check_owners(self, slots: npt.NDArray[np.int32]) -> None:
        """Raise UsageError if a core's part of a batch has a record that lies in the memory of another core.

        This can happen only if records have owners. Then the cores exchange no records, so the core would read a wrong
        record. `slots` are the rows of the batch's records, int32 (batch,).
        """
        if not self.is_local:
            return
        own = np.arange(len(slots)) * self.cores // max(1, len(slots))
        if len(slots) % self.cores or (slots // self.rows_a_core != own).any():
            raise UsageError(
                'shuffle="local" gives each core the samples in its own memory, and in this batch a core would get '
                "samples of another core: give the loader `cores`, the number of cores that share a batch, and leave "
                "pad_last out"
            )

    def confirm(self, chunk: int) -> None:
        """Note that a chunk's records were written to the device's memory, where they stay."""
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
        """Return the records of `group`, followed by other records of the same owner that have no row.

        The other records have the lowest numbers, in ascending order. At most `most` records are returned in all.
        """
        more = min(most, int(self._left[owner])) - len(group)
        if not more:
            return group
        is_left = self._slots < 0
        is_left[group] = False
        if self.owners is not None:
            is_left &= self.owners == owner
        return np.concatenate([group, np.flatnonzero(is_left)[:more]])

    def _fill(self, chunk: int, numbers: Numbers) -> Numbers:
        """Assign the rows of a chunk to the records in `numbers`, and return the numbers of the records to read.

        `numbers` has an entry for each row: -1 if the row gets no record. The result is `numbers` up to the last
        record. It has the first record in place of each -1, so that the chunk is read in one piece.
        """
        is_record = numbers >= 0
        self._states[chunk] = _PLANNED  # first, so that an interrupt frees the rows again
        self._slots[numbers[is_record]] = self.rows_of_chunk(chunk)[is_record]
        self._left -= np.bincount(np.flatnonzero(is_record) // self._width, minlength=len(self._left))
        last = int(np.flatnonzero(is_record)[-1]) + 1
        return np.where(is_record, numbers, numbers[is_record][0])[:last]

    def rows_of_chunk(self, chunk: int) -> npt.NDArray[np.int32]:
        """Return the rows of the chunk with the number `chunk`, int32 (n,). The rows on one core are consecutive."""
        cores, places = np.divmod(np.arange(self.chunk), self._each)
        return (cores * self.rows_a_core + chunk * self._each + places).astype(np.int32)


def rows_of(records: int, chunk: int, cores: int, tile: Tile) -> int:
    """Return the number of rows on all cores together for this number of records, uploaded in chunks of `chunk`."""
    return cores * _whole(-(-records // chunk) * (chunk // cores), tile.rows)


def _whole(count: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit
