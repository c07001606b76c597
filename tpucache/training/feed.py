"""Feeds batches to the device: a run's loader, a thread that uploads ahead, and records that stay on the device."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tpucache.errors import UsageError
from tpucache.loading.ahead import Ahead
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import BatchLoader, CachedLoader
from tpucache.ondevice.draws import draw
from tpucache.ondevice.resident import (
    RecordBatch,
    RecordSlots,
    Residence,
    Resident,
    Tile,
    as_named,
    channels_last,
    table_bytes,
)
from tpucache.ondevice.settings import ResidentChoice
from tpucache.store.fields import IMAGE, LABEL
from tpucache.training.device import Device, open_device
from tpucache.training.device.base import ALONE, DeviceBatch, Processes, ResidentRows
from tpucache.training.settings import TrainSettings, in_size


@dataclass(frozen=True)
class DeviceMemory:
    """The functions by which a Resident puts records into the memory of a training device."""

    device: Device

    @property
    def cores(self) -> int:
        return self.device.cores

    @property
    def tile(self) -> Tile:
        return self.device.tile

    def put(self, array: Any, name: str = "rows") -> torch.Tensor:
        return self.device.put(torch.from_numpy(array) if isinstance(array, np.ndarray) else array)

    def put_all(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        return self.device.put_all([*map(torch.from_numpy, arrays)])

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> Any:
        return self.device.reserve(slots, chunk)

    def itemsize(self, dtype: np.dtype[Any]) -> int:
        return dtype.itemsize

    def free_bytes(self) -> int | None:
        """Return the free bytes on all cores together; None if the device does not report them."""
        return self.device.free_bytes()


class TrainingResidence(Residence):
    """Decides whether records stay in the device's memory; if they do, it yields a loader's batches as row numbers.

    "auto" needs to know the memory that the first steps leave free: until `decide` is called, batches contain the
    records themselves. If images grow during the run, the records of each size replace those of the size before.
    """

    def __init__(
        self,
        choice: ResidentChoice,
        settings: TrainSettings,
        train_set: CachedDataset,
        device: Device,
        valid_set: CachedDataset | None = None,
    ) -> None:
        memory = DeviceMemory(device)
        ranks, size = device.processes.world_size, settings.part_size
        sizes = dict.fromkeys(settings.sizes.epochs)
        planned = max(table_bytes(in_size(train_set, each).packed(), memory, size // ranks) for each in sizes)
        if valid_set is not None:
            planned += table_bytes(valid_set.packed(), memory, size // ranks, ranks)
        is_finished = train_set.is_finished and (valid_set is None or valid_set.is_finished)
        never = _problem(device) if is_finished else "the cache is not built yet"
        super().__init__(choice, memory, planned, never, _problem_of_auto(device))
        self._valid = Residence(choice, memory, 0, "", "")
        self._valid.is_resident, self._valid.sent = True, "each batch of validation samples"

    def begin(self) -> None:
        """Do nothing: records are uploaded when the first batch is read."""

    def end(self) -> None:
        if self.resident is not None:
            self.resident.end()
        self.resident = self._valid.resident = None  # frees their memory

    def batches(self, loader: CachedLoader, count: int) -> Iterator[Any]:
        """Yield the next batches of a loader, at most `count`: host batches, or pairs (Resident, RecordBatch)."""
        while count:
            is_resident = self.is_resident
            read = self._begun(loader).pairs(loader) if is_resident else loader.iterate_ahead()
            with contextlib.closing(read):
                for batch, confirm in itertools.islice(read, count):
                    confirm()
                    count -= 1
                    yield batch
                    if self.is_resident != is_resident:
                        break
                else:
                    return
            loader.load_state_dict(loader.state_dict())  # drops what was read ahead

    def keep(self, loader: CachedLoader) -> Resident | None:
        """Return the Resident that keeps the records of an evaluation's loader on the device.

        The result is None if each evaluation uploads its records.
        """
        return self._valid.resident_of(loader) if self.is_resident and self._valid.is_resident else None

    def _begun(self, loader: CachedLoader) -> Resident:
        before, resident = self.resident, self.resident_of(loader)
        if resident is not before:  # which is not ended yet: its last batches are still queued
            resident.begin()
        return resident


def _problem(device: Device) -> str:
    if device.name == "xla" and device.processes.world_size > 1:
        return "records cannot stay on the devices of several hosts of XLA"
    return ""


def _problem_of_auto(device: Device) -> str:
    if device.torch_device.type == "cpu":
        return "the device's memory is the host's"
    if device.free_bytes() is None:
        return "the device does not report its free memory; --resident yes keeps the records on it"
    return ""


_MEASURED_BYTES: Final = 4 << 20  # for each core: 28 images of 224 pixels
_MEASURED_SECONDS: Final = 0.5


def send(batch: Any, device: Device, draws: torch.Tensor | None = None) -> DeviceBatch:
    """Return a loader's batch on the device, together with `draws`, the batch's random numbers, if they are given."""
    named = as_named(batch)
    return DeviceBatch(
        # The channels-last view is contiguous, so the host does not transpose.
        {name: device.put(channels_last(name, array)) for name, array in named.items() if name != LABEL},
        device.put(named[LABEL]),
        None if draws is None else device.put(draws),
    )


def measure_upload(device: Device, seconds: float = _MEASURED_SECONDS) -> float:
    """Measure how many bytes a second one thread sends to a device, in batches of 4 MB for each core."""
    batch = torch.zeros(device.cores, _MEASURED_BYTES, dtype=torch.uint8)
    if device.pin_memory:
        batch = batch.pin_memory()
    for _ in range(2):  # allocates memory and loads code
        device.put(batch)
    device.wait()
    began, sent = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds or not sent:
        device.put(batch)
        device.wait()
        sent += batch.nbytes
    return sent / passed


def measure_xla() -> float:
    return measure_upload(open_device("xla"))


Draw = Callable[[int], npt.NDArray[np.float32]]

#: The steps of one graph; each step is the list of its batch's parts.
Execution = Sequence[Sequence[DeviceBatch]]


class Feeder(Ahead[DeviceBatch]):
    """Iterates over device batches, which a thread uploads ahead of the loop (see Ahead).

    `state_dict` and `load_state_dict` are those of the CachedLoader that the Feeder reads. The state counts the batches
    that the Feeder has yielded, not the batches that were read ahead.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        device: Device,
        depth: int = 2,
        draw: Draw | None = None,
        first: int = 0,
        resident: Resident | TrainingResidence | None = None,
    ) -> None:
        """Take a CachedLoader, or an iterable of host batches. The thread starts when the context is entered.

        `draw` returns the random numbers that are sent with a batch, given the batch's number, which begins at `first`.
        With a `resident`, later batches are only row numbers.
        """

        def prepare(batch: Any, number: int) -> DeviceBatch:
            if isinstance(batch, tuple) and isinstance(batch[1], RecordBatch):
                return prepare_rows([batch], number)[0]
            return send(batch, device, None if draw is None else torch.from_numpy(draw(number)))

        def prepare_rows(batches: Sequence[Any], number: int) -> list[DeviceBatch]:
            kept, draws = batches[0][0], list[torch.Tensor | None]([None] * len(batches))
            sent = kept.put([read for _, read in batches])
            if draw is not None:
                drawn = [torch.from_numpy(draw(number + at)) for at in range(len(batches))]
                draws = [*device.put_all(drawn)]
            return [
                DeviceBatch({}, each.slots, own, ResidentRows(kept, each))
                for each, own in zip(sent, draws, strict=True)
            ]

        super().__init__(batches, prepare, depth, first, prepare_rows, None if resident is None else resident.end)
        self._device, self._resident = device, resident
        #: The bytes of the batches that were yielded.
        self.sent_bytes = 0

    def __enter__(self) -> Feeder:
        if self._resident is not None:
            self._resident.begin()
        return super().__enter__()

    def _begin(self) -> Iterator[Any]:
        if isinstance(self._resident, Resident) and isinstance(self._batches, BatchLoader):
            return self._resident.pairs(self._batches)
        return super()._begin()

    def state_dict(self) -> dict[str, int | str]:
        """Return the loader's state, in which the yielded batches count as seen; see CachedLoader.state_dict.

        Raises UsageError unless this Feeder reads a CachedLoader.
        """
        return self._loader().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the loader continue at a state, before the context is entered; see CachedLoader.load_state_dict.

        Raises UsageError if the context has been entered, or this Feeder does not read a CachedLoader.
        """
        loader = self._loader()
        if self.has_begun:
            raise UsageError(
                "this Feeder has begun to read: load the state before its `with` block begins, or make another Feeder"
            )
        loader.load_state_dict(state)

    def _loader(self) -> BatchLoader[Any]:
        if not isinstance(self._batches, BatchLoader):
            raise UsageError(
                f"a Feeder has the state of the CachedLoader that it reads, and this Feeder reads a "
                f"{type(self._batches).__name__}: give the Feeder the loader itself, or count the batches that you took"
            )
        return self._batches

    def __iter__(self) -> Iterator[DeviceBatch]:
        for batch in super().__iter__():
            self._device.receive(batch.tensors)
            self.sent_bytes += sum(tensor.nbytes for tensor in batch.tensors)
            # A batch's new records are copied into the device's table in chunks, each by a graph of its own.
            if batch.rows is not None and (read := batch.rows.receive(self._device.step_end)) is not None:
                yield replace(send(read, self._device), draws=batch.draws)
            else:
                yield batch


def parts(
    settings: TrainSettings,
    train_set: CachedDataset,
    first_step: int = 0,
    epochs: int | None = None,
    *,
    pin_memory: bool = False,
    processes: Processes = ALONE,
    residence: TrainingResidence | None = None,
) -> Iterator[Any]:
    """Yield all batches from step `first_step` on, on the host, each as `accumulate` parts.

    If `epochs` is None, this has no end.
    """

    def open_loader(shown: CachedDataset) -> CachedLoader:
        return CachedLoader(
            shown,
            settings.part_size // processes.world_size,
            shuffle=True,
            seed=settings.seed,
            drop_last=True,
            threads=settings.threads,
            finish="device",
            balance=settings.balance,
            pin_memory=pin_memory,
            rank=processes.rank,
            world_size=processes.world_size,
        )

    each = settings.steps_per_epoch(len(train_set))
    first, skip = divmod(first_step, each)
    size, loader = settings.sizes.at(first), open_loader(in_size(train_set, settings.sizes.at(first)))
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        if settings.sizes.at(epoch) != size:
            size = settings.sizes.at(epoch)
            loader = open_loader(in_size(train_set, size))
        if skip:
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": skip * settings.batch})
        else:
            loader.set_epoch(epoch)
        count = (each - skip) * settings.accumulate
        yield from itertools.islice(loader, count) if residence is None else residence.batches(loader, count)
        skip = 0


def take_execution(stream: Iterator[DeviceBatch], settings: TrainSettings) -> Execution:
    """Return the next execution of `stream`: a list of steps, each a list of the batches that the step accumulates."""
    return [list(itertools.islice(stream, settings.accumulate)) for _ in range(settings.steps_per_execution)]


def drawer(settings: TrainSettings, train_set: CachedDataset, processes: Processes = ALONE) -> Draw | None:
    """Return the function that draws the random numbers for a part of a batch, given the part's number in the run.

    It draws for the whole batch, so that a sample's numbers do not depend on the number of processes and parts. For
    records without an image, the result is None.
    """
    if IMAGE not in train_set.names:
        return None
    image = train_set.names.index(IMAGE)
    part, own = settings.part_size, processes.share(settings.part_size)
    steps_an_epoch = max(1, settings.steps_per_epoch(len(train_set)))
    sides: dict[int | None, tuple[int, int]] = {}

    def draw_part(number: int) -> npt.NDArray[np.float32]:
        step, place = divmod(number, settings.accumulate)
        wanted = settings.sizes.at(step // steps_an_epoch)
        if wanted not in sides:
            height, width = in_size(train_set, wanted).manifest.fields[image].shape[:2]
            sides[wanted] = height, width
        drawn = draw(settings.augment, settings.seed, step, settings.batch, sides[wanted])
        return drawn[place * part : (place + 1) * part][own]

    return draw_part
