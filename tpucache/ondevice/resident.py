"""Resident: the records of a dataset in an accelerator's memory, uploaded while the first epoch uses them.

Afterwards a batch costs the host the numbers of its rows: the device gathers them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tpucache.errors import UsageError
from tpucache.ondevice.slots import RecordBatch, RecordSlots
from tpucache.store.fields import IMAGE, LABEL

if TYPE_CHECKING:
    from tpucache.ondevice.memory import TorchMemory

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

    cores: int

    def put(self, array: Any) -> Any:
        """Send an array of the host, divided over the cores. Any thread may do so."""
        ...

    def reserve(self, chunks: int, chunk: Any) -> Table:
        """Return memory for this number of chunks like this one, which was put."""
        ...


class SentBatch(NamedTuple):
    """A RecordBatch on its way to the device: its rows, and each chunk as its numbers, here and there, and fields."""

    slots: Any
    uploads: Sequence[tuple[int, Any, Mapping[str, Any]]]


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
        """Upload nothing yet. `device` is as torch takes it. Raises UsageError for a device that is not here."""
        self.dataset = dataset.packed() if hasattr(dataset, "packed") else dataset
        self._memory: Memory = device if hasattr(device, "reserve") else _torch_memory(device)
        self._slots: RecordSlots | None = None
        self._tables: dict[str, Table] = {}
        self._is_pair = False
        self._has_begun = False
        #: Bytes that were put so far: records, and the numbers of rows.
        self.uploaded_bytes = self.row_bytes = 0

    @property
    def planned_bytes(self) -> int:
        """The bytes of all records with their labels and columns, on all cores together."""
        return int(self.dataset.records) * bytes_a_record(self.dataset)

    @property
    def is_full(self) -> bool:
        """Whether all records are in the device's memory, or on their way."""
        return self._slots is not None and self._slots.is_full

    def batches(self, loader: Any) -> Iterator[Batch]:
        """Yield the batches of one iteration of a loader, on the device: (images, labels), or dicts, as it gives them.

        Images are uint8 (batch, channels, height, width), channels last in memory, or packed (batch, n). The loader's
        state counts them. Raises UsageError for a loader of other samples, and while another loop takes batches here.
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

        Raises UsageError for a loader of other samples.
        """
        self._check(loader)
        if self._slots is None:
            self._slots = RecordSlots(self.dataset.records, loader.batch_size, self._memory.cores)
        return self._handed_out(loader, self._slots)

    @staticmethod
    def _handed_out(loader: Any, slots: RecordSlots) -> Generator[Any, None, None]:
        try:
            with contextlib.closing(loader.iterate_records(slots)) as batches:
                for read in batches:
                    slots.hand_out(upload.chunk for upload in read.batch.uploads)
                    yield read
        finally:  # where the loop is left early, batches were read ahead
            slots.forget_planned()

    def pairs(self, loader: Any) -> Iterator[Any]:
        """Begin an iteration as `iterate` does, whose batches are `(resident, RecordBatch)`, for a Feeder."""
        return (read._replace(batch=(self, read.batch)) for read in self.iterate(loader))

    def put(self, batch: RecordBatch) -> SentBatch:
        """Send a batch's numbers of rows, and the records that are not there yet. Any thread may do so."""
        uploads = []
        for chunk, read in batch.uploads:
            self._is_pair = not isinstance(read, Mapping)
            fields = {name: channels_last(name, array) for name, array in as_named(read).items()}
            number = np.full(self._memory.cores, chunk, np.int64)
            uploads.append((chunk, self._memory.put(number), {name: self._memory.put(a) for name, a in fields.items()}))
            self.uploaded_bytes += sum(array.nbytes for array in fields.values())
        self.row_bytes += batch.slots.nbytes
        return SentBatch(self._memory.put(batch.slots), uploads)

    def receive(self, sent: SentBatch, written: Callable[[], None] = lambda: None) -> None:
        """Write the records that were sent with a batch to where they stay; in the thread that computes.

        `written` is called after each chunk.
        """
        if self._slots is None:
            raise UsageError("a batch was sent before an iteration had begun")
        for chunk, number, fields in sent.uploads:
            for name, array in fields.items():
                if name not in self._tables:
                    self._tables[name] = self._memory.reserve(self._slots.chunks, array)
                self._tables[name].write(number, array)
            self._slots.confirm(chunk)
            written()

    def take(self, slots: Any) -> dict[str, Any]:
        """Return the fields, labels and columns of a batch, given its rows as they were sent.

        An image is (batch, height, width, channels), or packed (batch, n).
        """
        return {name: table.take(slots) for name, table in self._tables.items()}

    def _to_batch(self, fields: dict[str, Any]) -> Batch:
        if IMAGE in fields and fields[IMAGE].ndim == 4:
            fields[IMAGE] = fields[IMAGE].permute(0, 3, 1, 2)
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


def bytes_a_record(dataset: Any) -> int:
    """Return the bytes of a packed record in a device's memory, its label and columns included."""
    samples = dataset.packed() if hasattr(dataset, "packed") else dataset
    values = as_named(samples.to_batch([np.empty((0, *f.shape), f.dtype) for f in samples.record_fields], np.arange(0)))
    return sum(array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in values.values())


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


def _torch_memory(device: Any) -> TorchMemory:
    from tpucache.ondevice.memory import TorchMemory  # torch, which a program of JAX does not need

    return TorchMemory(device)
