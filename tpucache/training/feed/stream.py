"""A run's batches in their order, in the parts that are sent to the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.ondevice.draws import draw
from tpucache.store.fields import IMAGE
from tpucache.training.device.processes import ALONE, Processes
from tpucache.training.device.tensors import DeviceBatch
from tpucache.training.feed.feeder import Draw
from tpucache.training.settings import TrainSettings

#: Of each step in one graph, the parts of its batch.
Execution = Sequence[Sequence[DeviceBatch]]


def parts(
    settings: TrainSettings,
    train_set: CachedDataset,
    first_step: int = 0,
    epochs: int | None = None,
    *,
    pin_memory: bool = False,
    processes: Processes = ALONE,
) -> Iterator[Any]:
    """Yield the parts of all batches from step `first_step` on, on the host; without end if `epochs` is None.

    Of each part it is this process's slice. `pin_memory` is as CachedLoader takes it.

    It is one stream, so that the next epoch's first batches are uploaded while the last one is evaluated.
    """
    loader = CachedLoader(
        train_set,
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
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": skip * settings.batch_size})
        yield from itertools.islice(loader, (each - skip) * settings.accumulate)
        skip = 0


def take_execution(stream: Iterator[DeviceBatch], settings: TrainSettings) -> Execution:
    """Return the parts of all batches of one execution."""
    return [list(itertools.islice(stream, settings.accumulate)) for _ in range(settings.steps_per_execution)]


def drawer(settings: TrainSettings, train_set: CachedDataset, processes: Processes = ALONE) -> Draw | None:
    """Return the function that draws the random numbers for each part of a batch; None for records without an image.

    They are drawn for the whole part, so that a sample's are the same in any number of processes.
    """
    if IMAGE not in train_set.names:
        return None
    height, width = train_set.manifest.fields[train_set.names.index(IMAGE)].shape[:2]
    size, own = settings.part_size, processes.share(settings.part_size)
    return lambda number: draw(settings.augment, settings.seed, number, size, (height, width))[own]
