"""Feeds batches to the device: the loader that a run reads, and a thread that uploads two batches ahead."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tpucache.errors import UsageError
from tpucache.loading.ahead import Ahead
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import BatchLoader, CachedLoader
from tpucache.ondevice.draws import draw, pack
from tpucache.ondevice.resident import Resident
from tpucache.ondevice.slots import RecordBatch
from tpucache.store.fields import IMAGE
from tpucache.training.device import Device
from tpucache.training.device.processes import ALONE, Processes
from tpucache.training.device.tensors import DeviceBatch, ResidentRows, put_all
from tpucache.training.feed.residence import Residence
from tpucache.training.feed.upload import send
from tpucache.training.settings import TrainSettings
from tpucache.training.sizes import in_size

Draw = Callable[[int], npt.NDArray[np.float32 | np.int16]]

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
        resident: Resident | Residence | None = None,
    ) -> None:
        """Take a CachedLoader, or an iterable of host batches. The thread starts when the context is entered.

        At most `depth` batches are uploaded ahead. `draw` returns the random numbers that are sent with a batch, given
        the batch's number, which begins at `first`. With a `resident`, a CachedLoader's records stay on the device, and
        later batches are only row numbers.
        """

        def prepare(batch: Any, number: int) -> DeviceBatch:
            draws = None if draw is None else torch.from_numpy(draw(number))
            if isinstance(batch, tuple) and isinstance(batch[1], RecordBatch):
                kept, read = batch
                sent = kept.put(read)
                return DeviceBatch(
                    {}, sent.slots, None if draws is None else device.put(draws), ResidentRows(kept, sent)
                )
            return send(batch, device, draws)

        def prepare_rows(batches: Sequence[Any], number: int) -> list[DeviceBatch]:
            kept, draws = batches[0][0], list[torch.Tensor | None]([None] * len(batches))
            sent = kept.put_rows([read for _, read in batches])
            if draw is not None:
                drawn = [torch.from_numpy(draw(number + at)) for at in range(len(batches))]
                draws = [*put_all(device, drawn)]
            return [
                DeviceBatch({}, each.slots, own, ResidentRows(kept, each))
                for each, own in zip(sent, draws, strict=True)
            ]

        super().__init__(batches, prepare, depth, first, prepare_rows)
        self._device, self._resident = device, resident
        #: The bytes of the batches that were yielded.
        self.sent_bytes = 0

    def __enter__(self) -> Feeder:
        if self._resident is not None:
            self._resident.begin()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._resident is not None:
            self._resident.end()

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
    residence: Residence | None = None,
) -> Iterator[Any]:
    """Yield all batches from step `first_step` on, on the host, each as `accumulate` parts.

    If `epochs` is None, this has no end.

    A process yields only its slice of each part. `pin_memory` is that of CachedLoader. If `residence` keeps the records
    on the device, a part has the row numbers of its records in the device's memory, instead of the records. The
    settings say how large the images of each epoch are.
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

    def draw_part(number: int) -> npt.NDArray[np.float32 | np.int16]:
        step, place = divmod(number, settings.accumulate)
        wanted = settings.sizes.at(step // steps_an_epoch)
        if wanted not in sides:
            height, width = in_size(train_set, wanted).manifest.fields[image].shape[:2]
            sides[wanted] = height, width
        drawn = draw(settings.augment, settings.seed, step, settings.batch, sides[wanted])
        return pack(settings.augment, drawn[place * part : (place + 1) * part][own], sides[wanted])

    return draw_part
