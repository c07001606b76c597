"""Resident: the records of a dataset in an accelerator's memory, uploaded while the first epoch uses them.

Afterwards a batch costs the host the numbers of its rows: the device gathers them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tpucache.errors import UsageError
from tpucache.imports import load_callable
from tpucache.ondevice.slots import DeviceFullError, Numbers, RecordBatch, RecordSlots, Tile, rows_of
from tpucache.store.fields import IMAGE, LABEL

Batch = Any  # (images, labels), or a dict of arrays where a record has more fields than an image


class Table(Protocol):
    """One field of all records, in a device's memory."""

    def write(self, number: Any, chunk: Any) -> None:
        """Write a chunk that was put, given its number, which was put, too."""
        ...

    def take(self, slots: Any) -> Any:
        """Return the rows that slots say, which were put, with the shape and dtype of the chunks."""
        ...


class Memory(Protocol):
    """The memory of a device, or of several that divide each batch along its first dimension."""

    @property
    def cores(self) -> int:
        """How many parts a batch is divided into."""
        ...

    @property
    def tile(self) -> Tile:
        """What a table's rows take whole multiples of, so that they may take more than their own bytes."""
        ...

    def put(self, array: Any, name: str = "rows") -> Any:
        """Send an array of the host, divided over the cores. Any thread may do so. `name` is for errors."""
        ...

    def put_all(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Send arrays of one shape and dtype together; what is returned is that of `put`, one after another."""
        ...

    def reserve(self, slots: RecordSlots, chunk: Any) -> Table:
        """Return memory for the rows of these slots, of chunks like this one, which was put.

        Raises DeviceFullError where there is not as much.
        """
        ...

    def itemsize(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes of a value there."""
        ...

    def free_bytes(self) -> int | None:
        """Return how much is left on all cores together; None where it is the host's or not reported."""
        ...

    def as_image(self, images: Any) -> Any:
        """Return images (batch, height, width, channels) as batches have them there."""
        ...


class SentBatch(NamedTuple):
    """A RecordBatch on its way to the device: its rows, and each chunk as its numbers, here and there, and fields.

    `numbers` are those of its records, on the host.
    """

    slots: Any
    uploads: Sequence[tuple[int, Any, Mapping[str, Any]]]
    numbers: Numbers


class Resident:
    """The records of a dataset in the memory of a device, where each is uploaded once, when it is first asked for.

        resident = Resident(dataset, "cuda")
        loader = CachedLoader(dataset, 256, shuffle=True, finish="device")
        for epoch in range(10):
            for images, labels in resident.batches(loader):
                ...

    Batches are those of the loader, in its order, and on the device. Records stay packed there, where their codec has
    such a form: `tpucache.ondevice.decoder` makes images of them. A CachedLoader with any order, weights or sampler
    will do, and a MixedLoader, for whose `dataset` this is then made.
    """

    def __init__(self, dataset: Any, device: Any = "cpu") -> None:
        """Upload nothing yet. `device` is as torch takes it, or a Sharding of JAX that divides a batch's first axis.

        Raises UsageError for a device that is not here, or a sharding that divides other axes.
        """
        self.dataset = dataset.packed() if hasattr(dataset, "packed") else dataset
        self._memory: Memory = device if hasattr(device, "reserve") else _memory_of(device)
        self._slots: RecordSlots | None = None
        self._tables: dict[str, Table] = {}
        self._is_pair = False
        self._has_begun = False
        #: Called with the error where there is no room for the records: batches are then read again. Else it is raised.
        self.on_no_room: Callable[[DeviceFullError], None] | None = None
        self._has_room = True
        #: Bytes that were put so far: records, and the numbers of rows.
        self.uploaded_bytes = self.row_bytes = 0

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            "resident data lie in the memory of this process's device: give the dataset to the other process, and make "
            "a Resident there"
        )

    @classmethod
    def of(cls, loader: Any, memory: Memory) -> Resident:
        """Return one for a loader's records as that reads them, also where the host decodes them."""
        resident = cls(loader.dataset, memory)
        resident.dataset = loader.dataset
        return resident

    @property
    def planned_bytes(self) -> int:
        """The bytes of all records with their labels and columns, on all cores together.

        From the first batch on, those of whole chunks and of the tiles that they take.
        """
        rows = int(self.dataset.records) if self._slots is None else self._slots.rows
        return rows * bytes_a_row(self.dataset, self._memory)

    @property
    def is_full(self) -> bool:
        """Whether all records are in the device's memory, or on their way."""
        return self._slots is not None and self._slots.is_full

    @property
    def slots(self) -> RecordSlots | None:
        """Where each record lies; None before the first iteration."""
        return self._slots

    @property
    def tables(self) -> Mapping[str, Table]:
        """The fields, labels and columns that are there, by name."""
        return self._tables

    def batches(self, loader: Any) -> Iterator[Batch]:
        """Yield the batches of one iteration of a loader, on the device: (images, labels), or dicts, as it gives them.

        Images are uint8 (batch, channels, height, width), channels last in memory, or packed (batch, n); of JAX (batch,
        height, width, channels). The loader's state counts them. Raises UsageError for a loader of other samples, and
        while another loop takes batches here.
        """
        self.begin()
        try:
            for read, confirm in self.iterate(loader):
                sent = self.put(read)
                self.receive(sent)
                fields = self.take(sent.slots)
                confirm()
                yield self._to_batch(fields)
        finally:
            self.end()

    def begin(self) -> None:
        """Begin to give batches to one loop. Raises UsageError where another one has not ended.

        Uploads of both would overwrite one another.
        """
        if self._has_begun:
            raise UsageError(
                "another loop takes batches of the same resident data: end it first, or make another Resident"
            )
        self._has_begun = True

    def end(self) -> None:
        """End what `begin` began; records that were read and not received are uploaded when they are needed again."""
        self._has_begun = False
        if self._slots is not None:
            self._slots.forget_unconfirmed()

    def iterate(self, loader: Any) -> Generator[Any, None, None]:
        """Begin an iteration of a loader whose batches are `RecordBatch`, as `CachedLoader.iterate_records` does.

        Raises UsageError for a loader of other samples, and for one whose order="local" divides them otherwise over
        the cores than the first loader did.
        """
        self._check(loader)
        cores, owners = self._memory.cores, loader.record_owners(self._memory.cores)
        if self._slots is None:
            self._slots = RecordSlots(self.dataset.records, loader.batch_size, cores, owners, self._memory.tile)
        elif not _are_same(owners, self._slots.owners):
            raise UsageError(
                'resident data lie where one order needs them, and shuffle="local" needs them elsewhere than another '
                "order, seed, or number of cores or ranks: make another Resident for this loader"
            )
        return self._handed_out(loader.iterate_records(self._slots), self._slots)

    @staticmethod
    def _handed_out(batches: Generator[Any, None, None], slots: RecordSlots) -> Generator[Any, None, None]:
        try:
            with contextlib.closing(batches):
                for read in batches:
                    slots.hand_out(upload.chunk for upload in read.batch.uploads)
                    yield read
        finally:  # where the loop is left early, batches were read ahead
            slots.forget_planned()

    def pairs(self, loader: Any) -> Generator[Any, None, None]:
        """Begin an iteration as `iterate` does, whose batches are `(resident, RecordBatch)`, for a Feeder."""
        return self._paired(self.iterate(loader))

    def _paired(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        with contextlib.closing(batches):
            for read in batches:
                yield read._replace(batch=(self, read.batch))

    def put(self, batch: RecordBatch) -> SentBatch:
        """Send a batch's numbers of rows, and the records that are not there yet. Any thread may do so."""
        if self._slots is not None:
            self._slots.check_owners(batch.slots)
        uploads = []
        for chunk, read in batch.uploads:
            self._is_pair = not isinstance(read, Mapping)
            fields = {name: channels_last(name, array) for name, array in as_named(read).items()}
            number = np.full(self._memory.cores, chunk, np.int32)
            sent = {name: self._memory.put(array, name) for name, array in fields.items()}
            uploads.append((chunk, self._memory.put(number), sent))
            self.uploaded_bytes += sum(array.nbytes for array in fields.values())
        self.row_bytes += batch.slots.nbytes
        return SentBatch(self._memory.put(batch.slots), uploads, batch.numbers)

    def put_rows(self, batches: Sequence[RecordBatch]) -> list[SentBatch]:
        """Send the numbers of rows of many batches of one size together, none of which has records to be uploaded."""
        for batch in batches:
            if self._slots is not None:
                self._slots.check_owners(batch.slots)
            self.row_bytes += batch.slots.nbytes
        sent = self._memory.put_all([batch.slots for batch in batches])
        return [SentBatch(slots, (), batch.numbers) for slots, batch in zip(sent, batches, strict=True)]

    def receive(self, sent: SentBatch, written: Callable[[], None] = lambda: None) -> None:
        """Write the records that were sent with a batch to where they stay; in the thread that computes.

        `written` is called after each chunk. Where this is interrupted, all records are uploaded again when they are
        needed. Raises DeviceFullError.
        """
        if self._slots is None:
            raise UsageError("a batch was sent before an iteration had begun")
        if not sent.uploads:
            return
        try:
            for chunk, number, fields in sent.uploads:
                for name, array in fields.items():
                    if name not in self._tables:
                        self._tables[name] = self._memory.reserve(self._slots, array)
                    self._tables[name].write(number, array)
                written()
                self._slots.confirm(chunk)
        except BaseException:  # a table may be half written, or given up for its successor
            self._slots, self._tables = None, {}
            raise

    def receive_or_read(self, sent: SentBatch, written: Callable[[], None] = lambda: None) -> Batch | None:
        """Receive a batch and return None; where there is no room for the records, return it as the loader reads it.

        Without room it calls `on_no_room` once; raises DeviceFullError where that is not given.
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
        """Return the fields, labels and columns of a batch, given its rows as they were sent.

        An image is (batch, height, width, channels), or packed (batch, n).
        """
        return {name: table.take(slots) for name, table in self._tables.items()}

    def _to_batch(self, fields: dict[str, Any]) -> Batch:
        if IMAGE in fields and fields[IMAGE].ndim == 4:
            fields[IMAGE] = self._memory.as_image(fields[IMAGE])
        return (fields[IMAGE], fields[LABEL]) if self._is_pair else fields

    def _check(self, loader: Any) -> None:
        """Raise UsageError unless a loader reads the samples that are here."""
        own, other = self.dataset, loader.dataset
        if other.record_fields != own.record_fields:
            raise UsageError(
                'the loader gives records of another form than the resident ones: give it finish="device", and the '
                "resident data a dataset of the same resolution"
            )
        if other.digest != own.digest:
            raise UsageError(
                "the loader has other samples than the resident data, or the same in another order: make both of one "
                "dataset"
            )


def bytes_a_record(dataset: Any, memory: Memory) -> int:
    """Return the bytes of a packed record in a device's memory; see `bytes_a_row`."""
    return bytes_a_row(dataset.packed() if hasattr(dataset, "packed") else dataset, memory)


def bytes_a_row(samples: Any, memory: Memory) -> int:
    """Return the bytes of a record as it is read in a device's memory, its label and columns included, with tiles."""
    values = as_named(samples.to_batch([np.empty((0, *f.shape), f.dtype) for f in samples.record_fields], np.arange(0)))
    arrays = [np.asarray(array) for array in values.values()]
    return sum(memory.itemsize(each.dtype) * memory.tile.padded(math.prod(each.shape[1:])) for each in arrays)


def table_bytes(dataset: Any, memory: Memory, batch_size: int, ranks: int = 1) -> int:
    """Return the bytes that records take on all cores together, uploaded in batches of this size.

    Of several `ranks`, each has an equal share of the records.
    """
    records = -(-int(dataset.records) // ranks)
    return rows_of(records, batch_size, memory.cores, memory.tile) * bytes_a_record(dataset, memory)


def _are_same(one: Numbers | None, other: Numbers | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def as_named(batch: Batch) -> Mapping[str, Any]:
    """Return a loader's batch, (images, labels) or a dict, as a dict with the labels under "label"."""
    if isinstance(batch, Mapping):
        return batch
    images, labels = batch
    return {IMAGE: images, LABEL: labels}


def channels_last(name: str, array: Any) -> Any:
    """Return an image as (batch, height, width, channels), which is how its memory lies: nothing is copied."""
    if name != IMAGE or array.ndim != 4:
        return array
    return np.moveaxis(array, 1, 3) if isinstance(array, np.ndarray) else array.permute(0, 2, 3, 1)


def _memory_of(device: Any) -> Memory:
    """Return the memory of a device of torch, or of the devices of a JAX sharding; each library where it is needed."""
    if type(device).__module__.partition(".")[0] in ("jax", "jaxlib"):
        memory: Memory = load_callable("tpucache.jax.memory:JaxMemory")(device)
        return memory
    from tpucache.ondevice.memory import TorchMemory  # torch, which a program of JAX does not need

    return TorchMemory(device)
