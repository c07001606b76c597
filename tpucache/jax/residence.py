"""KeptRecords: decides whether the records of a feed stay in the devices' memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from tpucache.jax.memory import JaxMemory
from tpucache.loading.loader import CachedLoader
from tpucache.ondevice.augment import check_labels
from tpucache.ondevice.residence import ResidentDecision
from tpucache.ondevice.resident import Resident, as_named, bytes_a_row
from tpucache.ondevice.settings import AugmentSettings, ResidentChoice
from tpucache.ondevice.slots import RecordBatch, rows_of
from tpucache.store.fields import LABEL


class KeptRecords:
    """Decides whether a loader's records stay on the devices, and iterates over the loader's batches accordingly."""

    def __init__(
        self, loader: CachedLoader, sharding: jax.sharding.Sharding, resident: ResidentChoice | Resident
    ) -> None:
        """Plan the memory for the loader's records. Raises UsageError if `resident` is "yes" and they cannot stay."""
        self._loader, self._resident, self._decision = loader, None, None
        self._unlabelled: npt.NDArray[np.bool_] | None = None  # for each row; only used if classes are mixed
        if isinstance(resident, Resident):
            self._resident = resident
        elif resident != "no":
            never = _problem(loader, sharding)
            memory = None if never else JaxMemory(sharding)
            planned = 0 if memory is None else table_bytes_of(loader, memory)
            self._decision = ResidentDecision(resident, memory, planned, never, _problem_of_auto(memory))
            self._memory: Any = memory  # None: nothing can be kept

    _resident: Resident | None
    _decision: ResidentDecision | None

    def decide(self) -> None:
        """Decide whether records stay on the devices, if `resident` is "auto" and this is not decided yet.

        The decision depends on the memory that is free now: call this after the first steps.
        """
        if self._decision is not None:
            self._decision.decide()

    def describe(self) -> str:
        """Return, as text, whether records stay on the devices, and why."""
        if self._decision is not None:
            return self._decision.describe()
        return "no" if self._resident is None else "yes, in the Resident given"

    def begin(self, stack: contextlib.ExitStack) -> Iterator[Any]:
        """Begin an iteration of the loader, and return its batches. The iteration ends when the stack is closed.

        If records stay on the devices, a batch is a pair of the Resident and a RecordBatch of row numbers.
        """
        if self._decision is not None:
            if not self._decision.is_resident:
                self._resident = None
                return self._loader.iterate_ahead()
            if self._resident is None:
                self._resident = Resident.of(self._loader, self._memory)
                self._resident.on_no_room = self._decision.give_up
        if self._resident is None:
            return self._loader.iterate_ahead()
        self._resident.begin()
        stack.callback(self._resident.end)
        return self._resident.pairs(self._loader)

    def check_labels(self, read: RecordBatch, settings: AugmentSettings | None) -> None:
        """Raise UsageError if a batch's labels cannot be mixed by mixup or cutmix.

        Does nothing if records do not stay on the devices, or if `settings` do not mix. A record's label is checked
        when the record is uploaded, and the result is remembered for later batches.
        """
        if settings is None or not settings.mixes or self._resident is None or self._resident.slots is None:
            return
        slots = self._resident.slots
        if self._unlabelled is None or len(self._unlabelled) != slots.rows:
            self._unlabelled = np.zeros(slots.rows, bool)
        for chunk, batch in read.uploads:
            named = as_named(batch)
            labels = np.asarray(named[LABEL])
            check_labels(labels[:0], settings, named)
            if labels.ndim == 1:
                self._unlabelled[slots.rows_of_chunk(chunk)] = labels < 0
        if self._unlabelled[read.slots].any():
            check_labels(np.array([-1]), settings, ())


def table_bytes_of(loader: CachedLoader, memory: JaxMemory) -> int:
    """Return the bytes that all records of a loader take in the devices' memory.

    A record that several devices hold counts once. Images count as the loader reads them: packed or as pixels.
    """
    dataset = loader.dataset
    return rows_of(dataset.records, loader.batch_size, memory.cores, memory.tile) * bytes_a_row(dataset, memory)


def _problem(loader: CachedLoader, sharding: jax.sharding.Sharding) -> str:
    if not getattr(loader.dataset, "is_finished", True):
        return "the cache is not built yet"
    if not sharding.is_fully_addressable:
        return "records cannot stay on the devices of several processes"
    if not isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.device_set) > 1:
        return "records that stay on several devices need a NamedSharding"
    return ""


def _problem_of_auto(memory: JaxMemory | None) -> str:
    """Return why "auto" never keeps records on the devices; "" if that depends on the free memory."""
    if memory is None or all(device.platform == "cpu" for device in memory.sharding.device_set):
        return "the devices' memory is the host's"
    if memory.free_bytes() is None:
        return 'the devices do not say how much memory is free; resident="yes" keeps records in it'
    return ""
