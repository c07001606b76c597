"""Resident: the records of a dataset in an accelerator's memory, uploaded while the first epoch uses them.

After the first epoch, the host sends only row numbers for a batch, and the device gathers the rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tpucache.errors import UsageError
from tpucache.ondevice.slots import DeviceFullError, Numbers, RecordBatch, RecordSlots, Tile, rows_of
from tpucache.plugins import load_callable
from tpucache.store.fields import IMAGE, LABEL

Batch = Any  # (images, labels), or a dict of arrays where a record has other fields than one image


class ResidentTable(Protocol):
    """One field of all records, in a device's memory."""

    def write(self, number: Any, chunk: Any) -> None:
        """Write the records `chunk` to the rows of chunk number `number`. Both arguments are on the device."""
        ...

    def take(self, slots: Any) -> Any:
        """Return the records in these rows of the table, as one array on the device: (len(slots), ...).

        `slots` has the row numbers, and is on the device, too. The result has the dtype of the chunks that `write`
        took, and is divided over the cores as a batch is.
        """
        ...


class ResidentMemory(Protocol):
    """The memory of a device, or of several devices that divide each batch along its first dimension."""

    @property
    def cores(self) -> int:
        """The number of cores over which a batch is divided; each has memory of its own."""
        ...

    @property
    def tile(self) -> Tile:
        """The rows and values of a tile. This memory pads arrays of two dimensions to whole tiles."""
        ...

    def put(self, array: Any, name: str = "rows") -> Any:
        """Return a host array on the device, divided over the cores. Any thread may call this.

        `name` is the array's name in error messages.
        """
        ...

    def put_all(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Send arrays of one shape and dtype together; return for each array what `put` would return."""
        ...

    def reserve(self, slots: RecordSlots, chunk: Any) -> ResidentTable:
        """Return a table with as many rows as `slots`.

        Records will be written to the table in chunks of the dtype and shape of `chunk`, which is on the device. Raises
        DeviceFullError if the memory is too small.
        """
        ...

    def itemsize(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes that a value of this dtype takes in this memory."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free bytes in the memories of all cores together.

        The result is None for the host's memory, and for a device that does not report its free memory.
        """
        ...

    def as_image(self, images: Any) -> Any:
        """Return images (batch, height, width, channels) as (batch, channels, height, width); for JAX unchanged."""
        ...


class SentBatch(NamedTuple):
    """A RecordBatch that was sent to the device.

    `slots` are the row numbers of its records, on the device. `uploads` has an entry for each chunk that was sent with
    the batch: the chunk's number, the same number as an array on the device, and the chunk's arrays on the device by
    field name. `numbers` are the numbers of the batch's records in the dataset, on the host.
    """

    slots: Any
    uploads: Sequence[tuple[int, Any, Mapping[str, Any]]]
    numbers: Numbers


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

        `device` is a torch device, a JAX Sharding that divides the first axis of a batch, or a ResidentMemory. Raises
        UsageError for a device that this machine does not have, or a sharding that divides other axes.
        """
        self.dataset = dataset.packed() if hasattr(dataset, "packed") else dataset
        self._memory: ResidentMemory = device if hasattr(device, "reserve") else _memory_of(device)
        self._slots: RecordSlots | None = None
        self._tables: dict[str, ResidentTable] = {}
        self._is_pair = False
        self._has_begun = False
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

    @classmethod
    def of(cls, loader: Any, memory: ResidentMemory) -> Resident:
        """Return a Resident that keeps records in the form in which `loader` reads them.

        Records are packed only if the loader reads packed records. In contrast, `Resident(dataset, device)` packs
        records whenever their codec has a packed form.
        """
        resident = cls(loader.dataset, memory)
        resident.dataset = loader.dataset
        return resident

    @property
    def planned_bytes(self) -> int:
        """The bytes of all records, with their labels and columns, in the memories of all cores together.

        From the first iteration on, this also counts the rows that fill up the last chunks and tiles.
        """
        rows = int(self.dataset.records) if self._slots is None else self._slots.rows
        return rows * bytes_a_row(self.dataset, self._memory)

    @property
    def is_full(self) -> bool:
        """Whether all records are in the device's memory, or are being read or sent."""
        return self._slots is not None and self._slots.is_full

    @property
    def slots(self) -> RecordSlots | None:
        """The RecordSlots that says in which row each record lies; None before the first iteration."""
        return self._slots

    @property
    def tables(self) -> Mapping[str, ResidentTable]:
        """The tables in the device's memory, by the names of fields, "label" and the names of columns."""
        return self._tables

    def batches(self, loader: Any) -> Iterator[Batch]:
        """Yield the batches of one iteration of `loader`, on the device: (images, labels) or dicts, as the loader does.

        Images are uint8 (batch, channels, height, width), channels last in memory, or packed (batch, bytes); in JAX
        they are (batch, height, width, channels). The loader's state counts these batches. Raises UsageError for a
        loader of other samples, and while another loop takes batches from this Resident.
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
        """Begin to give batches to one loop. Raises UsageError while another loop takes batches.

        Two loops at once would overwrite each other's uploads.
        """
        if self._has_begun:
            raise UsageError(
                "another loop takes batches of the same Resident: end that loop first, or make another Resident"
            )
        self._has_begun = True

    def end(self) -> None:
        """End the loop. Records that were read but not received are read and uploaded again when they are needed."""
        self._has_begun = False
        if self._slots is not None:
            self._slots.forget_unconfirmed()

    def iterate(self, loader: Any) -> Generator[Any, None, None]:
        """Begin an iteration of `loader`, and return a generator of what `loader.iterate_records` yields.

        The batches in it are `RecordBatch`es. Raises UsageError for a loader of other samples, and for an order "local"
        that assigns samples to other cores than the first loader's order.
        """
        self._check(loader)
        cores, owners = self._memory.cores, loader.record_owners(self._memory.cores)
        if self._slots is None:
            self._slots = RecordSlots(self.dataset.records, loader.batch_size, cores, owners, self._memory.tile)
        elif not _are_same(owners, self._slots.owners):
            raise UsageError(
                'with shuffle="local" the rows of a Resident depend on order, seed, cores and ranks, and this loader '
                "has another order, seed, cores or ranks: make another Resident for this loader"
            )
        return self._handed_out(loader.iterate_records(self._slots), self._slots)

    @staticmethod
    def _handed_out(batches: Generator[Any, None, None], slots: RecordSlots) -> Generator[Any, None, None]:
        try:
            with contextlib.closing(batches):
                for read in batches:
                    slots.hand_out(upload.chunk for upload in read.batch.uploads)
                    yield read
        finally:  # if the loop ends early, batches were read ahead
            slots.forget_planned()

    def pairs(self, loader: Any) -> Generator[Any, None, None]:
        """Begin an iteration as `iterate` does; each batch is the pair (this Resident, RecordBatch), for a Feeder."""
        return self._paired(self.iterate(loader))

    def _paired(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        with contextlib.closing(batches):
            for read in batches:
                yield read._replace(batch=(self, read.batch))

    def put(self, batch: RecordBatch) -> SentBatch:
        """Send a batch's row numbers, and its chunks of records, to the device. Any thread may call this."""
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
        """Send the row numbers of several batches of one size together; no batch may have records to upload."""
        for batch in batches:
            if self._slots is not None:
                self._slots.check_owners(batch.slots)
            self.row_bytes += batch.slots.nbytes
        sent = self._memory.put_all([batch.slots for batch in batches])
        return [SentBatch(slots, (), batch.numbers) for slots, batch in zip(sent, batches, strict=True)]

    def receive(self, sent: SentBatch, written: Callable[[], None] = lambda: None) -> None:
        """Write the records that were sent with a batch to their rows; call this in the thread that computes.

        `written` is called after each chunk. If writing is interrupted or fails, all records are uploaded again when
        they are needed. Raises DeviceFullError if the records do not fit into the device's memory, and UsageError
        before the first iteration.
        """
        if self._slots is None:
            raise UsageError("a batch was received before an iteration had begun: call iterate or batches first")
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
        except BaseException:  # a table may be half written
            self._slots, self._tables = None, {}
            raise

    def receive_or_read(self, sent: SentBatch, written: Callable[[], None] = lambda: None) -> Batch | None:
        """Receive a batch as `receive` does, and return None. If the records do not fit, read the batch and return it.

        A batch that was read here is in the host's memory. The first time that the records do not fit, `on_no_room` is
        called; if `on_no_room` is None, DeviceFullError is raised. `written` is called after each chunk.
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
        return {name: table.take(slots) for name, table in self._tables.items()}

    def _to_batch(self, fields: dict[str, Any]) -> Batch:
        if IMAGE in fields and fields[IMAGE].ndim == 4:
            fields[IMAGE] = self._memory.as_image(fields[IMAGE])
        return (fields[IMAGE], fields[LABEL]) if self._is_pair else fields

    def _check(self, loader: Any) -> None:
        """Raise UsageError unless `loader` reads this Resident's samples, in the form that this Resident keeps."""
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


def bytes_a_record(dataset: Any, memory: ResidentMemory) -> int:
    """Return the bytes of a record in a device's memory, packed if its codec has a packed form; see `bytes_a_row`."""
    return bytes_a_row(dataset.packed() if hasattr(dataset, "packed") else dataset, memory)


def bytes_a_row(samples: Any, memory: ResidentMemory) -> int:
    """Return the bytes of one record in a device's memory, with its label, its columns and the padding of tiles."""
    values = as_named(samples.to_batch([np.empty((0, *f.shape), f.dtype) for f in samples.record_fields], np.arange(0)))
    arrays = [np.asarray(array) for array in values.values()]
    return sum(memory.itemsize(each.dtype) * memory.tile.padded(math.prod(each.shape[1:])) for each in arrays)


def table_bytes(dataset: Any, memory: ResidentMemory, batch_size: int, ranks: int = 1) -> int:
    """Return the bytes of all records in the memories of all cores, uploaded in chunks of `batch_size` records.

    With several `ranks`, these are the bytes of one rank, which has an equal share of the records.
    """
    records = -(-int(dataset.records) // ranks)
    return rows_of(records, batch_size, memory.cores, memory.tile) * bytes_a_record(dataset, memory)


def _are_same(one: Numbers | None, other: Numbers | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def as_named(batch: Batch) -> Mapping[str, Any]:
    """Return a loader's batch as a dict by field name; (images, labels) become "image" and "label"."""
    if isinstance(batch, Mapping):
        return batch
    images, labels = batch
    return {IMAGE: images, LABEL: labels}


def channels_last(name: str, array: Any) -> Any:
    """Return images (batch, channels, height, width) as a view (batch, height, width, channels), without a copy.

    Other fields and packed images, which do not have four dimensions, are returned unchanged.
    """
    if name != IMAGE or array.ndim != 4:
        return array
    return np.moveaxis(array, 1, 3) if isinstance(array, np.ndarray) else array.permute(0, 2, 3, 1)


def _memory_of(device: Any) -> ResidentMemory:
    if type(device).__module__.partition(".")[0] in ("jax", "jaxlib"):
        memory: ResidentMemory = load_callable("tpucache.jax.memory:JaxMemory")(device)
        return memory
    from tpucache.ondevice.memory import TorchMemory  # it imports torch, which JAX programs do not need

    return TorchMemory(device)
