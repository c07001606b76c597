"""Resident: the records of a dataset in an accelerator's memory, uploaded while the first epoch uses them.

After the first epoch, the host sends only row numbers for a batch, and the device gathers the rows. Records are
uploaded in chunks of equally many records. With several cores, a chunk is divided as a batch is, and each core appends
its share of the chunk to the rows that it already has. So no core sends anything to another core, and all uploads have
one shape.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.ondevice.settings import ResidentChoice
from tpucache.plugins import load_callable
from tpucache.store.fields import IMAGE, LABEL

Batch = Any  # (images, labels), or a dict of arrays where a record has other fields than one image
Numbers = npt.NDArray[np.int64]

#: Records may take this share of the memory that is free after the first steps. Fragmentation takes some of the rest.
MOST_OF_FREE: Final = 0.8
#: The states of a chunk: it has no records; its records are being read, are being uploaded, or are on the device.
_FREE, _PLANNED, _SENT, _WRITTEN = range(4)

_log: Final = logging.getLogger("tpucache")


class Tile(NamedTuple):
    """The rows and values of a tile: an accelerator stores arrays of two dimensions in whole tiles.

    A tile of a TPU has 32 x 128 values of 1 byte, or 8 x 128 values of 4 bytes (https://openxla.org/xla/tiled_layout).
    """

    rows: int
    values: int

    def padded(self, values: int) -> int:
        """Return how many values a row takes with its padding; an array of single values has one dimension and none."""
        return values if values == 1 else _whole(values, self.values)


#: The tile of a memory that stores arrays without padding: one value.
NO_TILE: Final = Tile(1, 1)
#: The tile of XLA's devices for values of 1 byte. It holds a whole number of the tiles for larger values, too.
XLA_TILE: Final = Tile(32, 128)


class DeviceFullError(UsageError):
    """The memory of a device is too small for the records that it should keep."""


class DeviceMemory(Protocol):
    """The memory of a device, or of several devices that divide each batch along its first dimension.

    A table, which `reserve` returns, has `write(number, chunk)`, which writes the rows of chunk `number`, and
    `take(slots)`, which returns these rows in the records' shape and dtype. All their arrays are on the device.
    """

    @property
    def cores(self) -> int: ...

    @property
    def tile(self) -> Tile: ...

    def put(self, array: Any, name: str = "rows") -> Any:
        """Return a host array on the device, divided over the cores. Any thread may call this."""
        ...

    def put_all(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Send arrays of one shape and dtype together; return for each array what `put` would return."""
        ...

    def reserve(self, slots: RecordSlots, chunk: Any) -> Any:
        """Return a table with as many rows as `slots`, for records like those of `chunk`, which is on the device."""
        ...

    def itemsize(self, dtype: np.dtype[Any]) -> int: ...

    def free_bytes(self) -> int | None:
        """Return the free bytes on all cores together; None for the host's memory, or if they are not reported."""
        ...


class RecordBatch(NamedTuple):
    """A batch whose records lie in the device's memory, or will lie there after its uploads.

    `slots` are the rows of its records in that memory, int32 (batch,), and `numbers` the numbers of its records in the
    dataset, int64 (batch,). `uploads` has a pair for each chunk to upload first: its number, and the numbers of the
    records to read for it, or, once they are read, a loader's batch of these records. Once it was sent, `slots` are on
    the device, and `uploads` has the chunk's number, the same number on the device, and its arrays there by field name.
    """

    slots: Any
    uploads: Sequence[tuple[Any, ...]]
    numbers: Numbers


class RecordSlots:
    """Assigns rows of a device's memory to records, in the order in which the records are first needed.

    Records have numbers from 0 to `records` - 1. A chunk has `chunk` records, the last chunk fewer. One thread calls
    `place`; another thread may call `confirm`. An interrupt does no harm: records of chunks that were not confirmed get
    a row again and are uploaded again.
    """

    def __init__(
        self, records: int, chunk: int, cores: int = 1, owners: Numbers | None = None, tile: Tile = NO_TILE
    ) -> None:
        """Begin with no record in memory.

        `owners` has the core of each record, int64 (records,), and -1 for a record that is never needed; with None, a
        record may lie on any core.
        """
        if chunk % cores:
            raise UsageError(f"batches of {chunk:,} do not divide evenly over {cores} cores: choose another batch size")
        self.records, self.chunk, self.cores, self.owners = records, chunk, cores, owners
        counts = [records] if owners is None else np.bincount(owners[owners >= 0], minlength=cores).tolist()
        self._width = chunk // len(counts)  # rows of a chunk for one owner
        self.chunks = max(-(-count // self._width) for count in counts)
        self._each = chunk // cores  # rows of a chunk on each core
        self.rows_a_core = _whole(self.chunks * self._each, tile.rows)
        self._slots = np.full(records, -1, np.int32)
        self._states = np.full(self.chunks, _FREE, np.int8)
        self._left = self._count_left()  # the number of records without a row, by owner

    @property
    def rows(self) -> int:
        return self.cores * self.rows_a_core

    @property
    def is_local(self) -> bool:
        """Whether each core only uses records in its own memory."""
        return self.owners is not None and self.cores > 1

    @property
    def is_full(self) -> bool:
        return not self._left.any()

    def hand_out(self, chunks: Iterable[int]) -> None:
        """Note that the records of these chunks are being uploaded; a call of `confirm` for each chunk will follow."""
        self._states[[*chunks]] = _SENT

    def confirm(self, chunk: int) -> None:
        self._states[chunk] = _WRITTEN

    def forget_planned(self) -> None:
        """Free the rows of chunks that were not passed to `hand_out`: their records will not be uploaded."""
        self._forget((_PLANNED,))

    def forget_unconfirmed(self) -> None:
        self._forget((_PLANNED, _SENT))

    def _forget(self, states: tuple[int, ...]) -> None:
        is_gone = np.isin(self._states, states)
        if not is_gone.any():
            return
        chunks = self._slots % self.rows_a_core // self._each
        self._slots[(self._slots >= 0) & is_gone[chunks.clip(0, self.chunks - 1)]] = -1
        self._left = self._count_left()
        self._states[is_gone] = _FREE

    def place(self, numbers: Numbers) -> RecordBatch:
        """Return the batch of the records with these numbers. Records without a row get one, and must be read."""
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
        return RecordBatch(slots, missing, numbers)

    def check_owners(self, slots: npt.NDArray[np.int32]) -> None:
        """Raise UsageError if a core's part of a batch has a record that lies in the memory of another core."""
        if not self.is_local:
            return
        own = np.arange(len(slots)) * self.cores // max(1, len(slots))
        if len(slots) % self.cores or (slots // self.rows_a_core != own).any():
            raise UsageError(
                'shuffle="local" gives each core the samples in its own memory, and in this batch a core would get '
                "samples of another core: give the loader `cores`, the number of cores that share a batch, and leave "
                "pad_last out"
            )

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
        """Return the records of `group`, then other records of the same owner without a row, at most `most` in all."""
        more = min(most, int(self._left[owner])) - len(group)
        if not more:
            return group
        is_left = self._slots < 0
        is_left[group] = False
        if self.owners is not None:
            is_left &= self.owners == owner
        return np.concatenate([group, np.flatnonzero(is_left)[:more]])

    def _fill(self, chunk: int, numbers: Numbers) -> Numbers:
        """Assign the rows of a chunk to the records in `numbers`, -1 for none; return the numbers of those to read.

        The result has the first record in place of each -1, so that the chunk is read in one piece.
        """
        is_record = numbers >= 0
        self._states[chunk] = _PLANNED  # first, so that an interrupt frees the rows again
        self._slots[numbers[is_record]] = self.rows_of_chunk(chunk)[is_record]
        self._left -= np.bincount(np.flatnonzero(is_record) // self._width, minlength=len(self._left))
        last = int(np.flatnonzero(is_record)[-1]) + 1
        return np.where(is_record, numbers, numbers[is_record][0])[:last]

    def rows_of_chunk(self, chunk: int) -> npt.NDArray[np.int32]:
        """Return the rows of a chunk, int32 (n,). The rows on one core are consecutive."""
        cores, places = np.divmod(np.arange(self.chunk), self._each)
        return (cores * self.rows_a_core + chunk * self._each + places).astype(np.int32)


class Resident:
    """The records of a dataset in the memory of a device. Each record is uploaded once, when it is first needed.

            resident = Resident(dataset, "cuda")
            loader = CachedLoader(dataset, 256, shuffle=True, finish="device")
            for epoch in range(10):
                for images, labels in resident.batches(loader):
                    ...

    Batches are those of the loader, in its order, on the device. Records stay packed on the device if their codec has a
    packed form: `tpucache.ondevice.decoder` decodes them. The loader may be a CachedLoader with any order, weights or
    sampler, or a MixedLoader; for a MixedLoader, make the Resident from the loader's `dataset`.
    """

    def __init__(self, dataset: Any, device: Any = "cpu") -> None:
        """Begin with no record on the device.

        `device` is a torch device, or a JAX Sharding that divides the first axis of a batch. Raises UsageError for a
        device that this machine does not have, or a sharding that divides other axes.
        """
        self.dataset = dataset.packed() if hasattr(dataset, "packed") else dataset
        self._memory: DeviceMemory = device if hasattr(device, "reserve") else _memory_of(device)
        #: The row in which each record lies; None before the first iteration.
        self.slots: RecordSlots | None = None
        #: The tables in the device's memory, by the names of fields, "label" and the names of columns.
        self.tables: dict[str, Any] = {}
        self._is_pair = self._has_begun = False
        #: Called with the error if the records do not fit; from then on, the host reads every batch. If this is None,
        #: the error is raised.
        self.on_no_room: Callable[[DeviceFullError], None] | None = None
        self._has_room = True
        #: Bytes that were sent to the device so far: of records, and of row numbers.
        self.uploaded_bytes = self.row_bytes = 0

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            "the records of a Resident lie in the memory of this process's device: give the dataset to the other "
            "process, and make a Resident there"
        )

    @property
    def planned_bytes(self) -> int:
        """The bytes of all records, with their labels and columns, in the memories of all cores together.

        From the first iteration on, this also counts the rows that fill up the last chunks and tiles.
        """
        rows = int(self.dataset.records) if self.slots is None else self.slots.rows
        return rows * _row_bytes(self.dataset, self._memory)

    @property
    def is_full(self) -> bool:
        """Whether all records are in the device's memory, or are being read or sent."""
        return self.slots is not None and self.slots.is_full

    def batches(self, loader: Any) -> Iterator[Batch]:
        """Yield the batches of one iteration of `loader`, on the device: (images, labels) or dicts, as the loader does.

        Images are uint8 (batch, channels, height, width), channels last in memory, or packed (batch, bytes); in JAX
        they are (batch, height, width, channels). The loader's state counts these batches. Raises UsageError for a
        loader of other samples, and while another loop takes batches from this Resident.
        """
        self.begin()
        try:
            for (_, read), confirm in self.pairs(loader):
                (sent,) = self.put([read])
                self.receive(sent)
                fields = self.take(sent.slots)
                confirm()
                yield self._to_batch(fields)
        finally:
            self.end()

    def begin(self) -> None:
        """Begin to give batches to one loop. Two loops at once would overwrite each other's uploads."""
        if self._has_begun:
            raise UsageError(
                "another loop takes batches of the same Resident: end that loop first, or make another Resident"
            )
        self._has_begun = True

    def end(self) -> None:
        """End the loop. Records that were read but not received are read and uploaded again when they are needed."""
        self._has_begun = False
        if self.slots is not None:
            self.slots.forget_unconfirmed()

    def pairs(self, loader: Any) -> Generator[Any, None, None]:
        """Begin an iteration of `loader`, and return a generator of what `loader.iterate_records` yields.

        Each batch is the pair (this Resident, RecordBatch). Raises UsageError for a loader of other samples, and for an
        order "local" that assigns samples to other cores than the first loader's order.
        """
        self._check(loader)
        cores, owners = self._memory.cores, loader.record_owners(self._memory.cores)
        if self.slots is None:
            self.slots = RecordSlots(self.dataset.records, loader.batch_size, cores, owners, self._memory.tile)
        elif not np.array_equal(owners, self.slots.owners):  # type: ignore[arg-type]  # None equals None alone
            raise UsageError(
                'with shuffle="local" the rows of a Resident depend on order, seed, cores and ranks, and this loader '
                "has another order, seed, cores or ranks: make another Resident for this loader"
            )
        return self._handed_out(loader.iterate_records(self.slots), self.slots)

    def _handed_out(self, batches: Generator[Any, None, None], slots: RecordSlots) -> Generator[Any, None, None]:
        try:
            with contextlib.closing(batches):
                for read in batches:
                    slots.hand_out(chunk for chunk, _ in read.batch.uploads)
                    yield read._replace(batch=(self, read.batch))
        finally:  # if the loop ends early, batches were read ahead
            slots.forget_planned()

    def put(self, batches: Sequence[RecordBatch]) -> list[RecordBatch]:
        """Send batches' chunks of records, and together their row numbers, to the device. Any thread may call this.

        All batches must have the same size.
        """
        for batch in batches:
            if self.slots is not None:
                self.slots.check_owners(batch.slots)
            self.row_bytes += batch.slots.nbytes
        uploads = [[self._put_chunk(*upload) for upload in batch.uploads] for batch in batches]
        sent = zip(self._memory.put_all([batch.slots for batch in batches]), uploads, strict=True)
        return [RecordBatch(*each, batch.numbers) for each, batch in zip(sent, batches, strict=True)]

    def _put_chunk(self, chunk: int, read: Batch) -> tuple[int, Any, dict[str, Any]]:
        self._is_pair = not isinstance(read, Mapping)
        fields = {name: channels_last(name, array) for name, array in as_named(read).items()}
        number = np.full(self._memory.cores, chunk, np.int32)
        self.uploaded_bytes += sum(array.nbytes for array in fields.values())
        return chunk, self._memory.put(number), {name: self._memory.put(each, name) for name, each in fields.items()}

    def receive(self, sent: RecordBatch, written: Callable[[], None] = lambda: None) -> None:
        """Write the records that were sent with a batch to their rows; call this in the thread that computes.

        `written` is called after each chunk. If writing is interrupted or fails, all records are uploaded again when
        they are needed. Raises DeviceFullError if the records do not fit into the device's memory.
        """
        if self.slots is None:
            raise UsageError("a batch was received before an iteration had begun: call iterate or batches first")
        try:
            for chunk, number, fields in sent.uploads:
                for name, array in fields.items():
                    if name not in self.tables:
                        self.tables[name] = self._memory.reserve(self.slots, array)
                    self.tables[name].write(number, array)
                written()
                self.slots.confirm(chunk)
        except BaseException:  # a table may be half written
            self.slots, self.tables = None, {}
            raise

    def receive_or_read(self, sent: RecordBatch, written: Callable[[], None] = lambda: None) -> Batch | None:
        """Receive a batch as `receive` does, and return None. If the records do not fit, read the batch and return it.

        A batch that was read here is in the host's memory.
        """
        if self._has_room:
            try:
                self.receive(sent, written)
                return None
            except DeviceFullError as error:
                if self.on_no_room is None:
                    raise
                self._has_room = False
                self.on_no_room(error)
        numbers, pool = sent.numbers, self.dataset.buffer_pools.pool(len(sent.numbers), None)
        buffer = pool.take()
        self.dataset.read_records(buffer, numbers)
        return self.dataset.to_batch(pool.lend(buffer, len(numbers)), self.dataset.record_indices(numbers))

    def take(self, slots: Any) -> dict[str, Any]:
        """Return a batch's fields, labels and columns by name. `slots` are the rows of its records, on the device.

        An image is (batch, height, width, channels), or packed (batch, bytes).
        """
        return {name: table.take(slots) for name, table in self.tables.items()}

    def _to_batch(self, fields: dict[str, Any]) -> Batch:
        if IMAGE in fields and fields[IMAGE].ndim == 4 and hasattr(fields[IMAGE], "permute"):  # JAX keeps channels last
            fields[IMAGE] = fields[IMAGE].permute(0, 3, 1, 2)
        return (fields[IMAGE], fields[LABEL]) if self._is_pair else fields

    def _check(self, loader: Any) -> None:
        own, other = self.dataset, loader.dataset
        if other.record_fields != own.record_fields:
            raise UsageError(
                "the loader reads records in another form than the Resident keeps: give the loader "
                'finish="device", and make the Resident from a dataset of the same resolution'
            )
        if other.digest != own.digest:
            raise UsageError(
                "the loader has other samples than the Resident, or the same samples in another order: make the loader "
                "and the Resident from one dataset"
            )


class Residence:
    """Says whether records stay on a device, how many bytes of its memory they need, and why; keeps their Resident.

    With the choice "auto" this is decided when `decide` is called, after the first steps have allocated their memory.
    Until then, `is_resident` is False.
    """

    def __init__(
        self, choice: ResidentChoice, memory: DeviceMemory | None, planned_bytes: int, never: str, not_auto: str
    ) -> None:
        """`never` says why the device cannot keep records, and `not_auto` why the choice "auto" does not keep them.

        Each is "" if there is no such reason.
        """
        self.planned_bytes, self.choice, self.memory = planned_bytes, choice, memory
        self.resident: Resident | None = None
        self.sent = "each batch"  # what is sent to the device when it is needed, once records have not fitted
        self.is_resident, self.reason, self._is_open = False, f"resident={choice}", False
        if choice == "yes":
            free = None if never or memory is None else memory.free_bytes()
            if free is not None and planned_bytes > free:
                never = f"the device has {free / 1e9:,.2f} GB left"
            if never:
                raise UsageError(
                    f"resident=yes would keep {self._gigabytes} of records on the device, but {never}: use resident=no"
                )
            self.is_resident = True
        elif choice == "auto":
            self._is_open = not (never or not_auto)
            self.reason = never or not_auto or "the first steps have not ended yet"

    def decide(self) -> bool:
        """Decide for the choice "auto" whether records stay on the device; False if there is nothing left to decide."""
        if not self._is_open:
            return False
        free, self._is_open = (self.memory and self.memory.free_bytes()) or 0, False
        self.is_resident = self.planned_bytes <= MOST_OF_FREE * free
        relation = "fit into" if self.is_resident else "are more than"
        self.reason = f"they {relation} {MOST_OF_FREE:.0%} of the {free / 1e9:,.2f} GB that steps leave"
        return self.is_resident

    def resident_of(self, loader: Any) -> Resident:
        """Return the Resident of a loader's records: another one if they have another form than those before."""
        dataset = loader.dataset
        if self.resident is None or self.resident.dataset.record_fields != dataset.record_fields:
            self.resident = Resident(dataset, self.memory)
            self.resident.dataset, self.resident.on_no_room = dataset, self.give_up
        return self.resident

    def give_up(self, error: DeviceFullError) -> None:
        """Keep no records on the device from now on, and log a warning; raise `error` if the choice is "yes"."""
        if self.choice == "yes":
            raise error
        self.is_resident, self.reason = False, str(error)
        _log.warning("%s. From now on, %s is sent to the device when it is needed", error, self.sent)

    def describe(self) -> str:
        if self.is_resident:
            return f"yes, {self._gigabytes} of records in the device's memory: {self.reason}"
        return f"no, {self._gigabytes} of records are sent as they are needed: {self.reason}"

    @property
    def _gigabytes(self) -> str:
        return f"{self.planned_bytes / 1e9:,.2f} GB"


def table_bytes(samples: Any, memory: DeviceMemory, batch_size: int, ranks: int = 1) -> int:
    """Return the bytes of all records in the memories of all cores, uploaded in chunks of `batch_size` records."""
    records = -(-int(samples.records) // ranks)
    rows = memory.cores * _whole(-(-records // batch_size) * (batch_size // memory.cores), memory.tile.rows)
    return rows * _row_bytes(samples, memory)


def _row_bytes(samples: Any, memory: DeviceMemory) -> int:
    """Return the bytes of one record in a device's memory, with its label, its columns and the padding of tiles."""
    arrays = [np.asarray(array) for array in without_records(samples, 0).values()]
    return sum(memory.itemsize(each.dtype) * memory.tile.padded(math.prod(each.shape[1:])) for each in arrays)


def without_records(samples: Any, count: int) -> Mapping[str, Any]:
    """Return a batch by name: no records, and the labels and columns of the first `count` samples."""
    nothing = [np.empty((0, *field.shape), field.dtype) for field in samples.record_fields]
    return as_named(samples.to_batch(nothing, np.arange(count)))


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def as_named(batch: Batch) -> Mapping[str, Any]:
    return batch if isinstance(batch, Mapping) else dict(zip((IMAGE, LABEL), batch, strict=True))


def channels_last(name: str, array: Any) -> Any:
    """Return images (batch, channels, height, width) as a view (batch, height, width, channels), without a copy."""
    if name != IMAGE or array.ndim != 4:
        return array
    return np.moveaxis(array, 1, 3) if isinstance(array, np.ndarray) else array.permute(0, 2, 3, 1)


def _memory_of(device: Any) -> DeviceMemory:
    is_jax = type(device).__module__.partition(".")[0] in ("jax", "jaxlib")
    # By their names, because JAX programs do not need torch, nor programs of torch JAX.
    name = "tpucache.jax.resident:JaxMemory" if is_jax else "tpucache.ondevice.modules:TorchMemory"
    memory: DeviceMemory = load_callable(name)(device)
    return memory
