"""Decides whether a run's records stay in the device's memory, and yields its loaders' batches in both cases."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.ondevice.residence import ResidentDecision
from tpucache.ondevice.resident import Resident, ResidentTable, table_bytes
from tpucache.ondevice.settings import ResidentChoice
from tpucache.ondevice.slots import NO_TILE, DeviceFullError, RecordSlots, Tile
from tpucache.training.device import Device
from tpucache.training.device.tensors import put_all
from tpucache.training.settings import TrainSettings
from tpucache.training.sizes import in_size

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class DeviceMemory:
    """The functions by which a Resident puts records into the memory of a training device."""

    device: Device

    @property
    def cores(self) -> int:
        """The number of cores over which each batch is divided."""
        return self.device.cores

    @property
    def tile(self) -> Tile:
        """The unit in which memory is allocated; `NO_TILE` for a plug-in's device without a `tile`."""
        return getattr(self.device, "tile", NO_TILE)

    def put(self, array: Any, name: str = "rows") -> torch.Tensor:
        """Copy an array or tensor to the device, and return the copy. `name` is not used."""
        return self.device.put(torch.from_numpy(array) if isinstance(array, np.ndarray) else array)

    def put_all(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        """Return arrays of one shape and dtype on the device, sent in one transfer if the device can do that."""
        return put_all(self.device, [*map(torch.from_numpy, arrays)])

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> ResidentTable:
        """Return a table on the device with a row for each row of `slots`.

        The records that are written to it have the dtype and shape of `chunk`.
        """
        return self.device.reserve(slots, chunk)

    def itemsize(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes that a value of this dtype takes: as many as on the host."""
        return dtype.itemsize

    def free_bytes(self) -> int | None:
        """Return the free bytes on all cores together; None if the device does not report them."""
        return self.device.free_bytes()

    def as_image(self, images: torch.Tensor) -> torch.Tensor:
        """Return a view (batch, channels, height, width) of images (batch, height, width, channels)."""
        return images.permute(0, 3, 1, 2)


class Residence:
    """Decides whether records stay in the device's memory; if they do, it yields a loader's batches as row numbers.

    With the choice "auto", the decision needs the memory that the first steps leave free. Until `decide` is called, and
    if the records do not fit, batches contain the records themselves. If images grow during the run, the records of
    each size are uploaded in its first epoch, and replace those of the size before. Validation records stay, too, in
    their own size.
    """

    def __init__(
        self,
        choice: ResidentChoice,
        settings: TrainSettings,
        train_set: CachedDataset,
        device: Device,
        valid_set: CachedDataset | None = None,
    ) -> None:
        """Plan the memory for all records.

        Raises UsageError for the choice "yes" if the records do not fit, or the device cannot keep records.
        """
        self._memory, self._resident, self._valid, self._keeps_valid = DeviceMemory(device), None, None, True
        ranks, size = device.processes.world_size, settings.part_size
        sizes = dict.fromkeys(settings.sizes.epochs)
        planned = max(table_bytes(in_size(train_set, each), self._memory, size // ranks, 1) for each in sizes)
        if valid_set is not None:
            planned += table_bytes(valid_set, self._memory, size // ranks, ranks)
        is_finished = train_set.is_finished and (valid_set is None or valid_set.is_finished)
        never = _problem(device) if is_finished else "the cache is not built yet"
        self._decision = ResidentDecision(choice, self._memory, planned, never, _problem_of_auto(device))

    _resident: Resident | None
    _valid: Resident | None

    @property
    def is_resident(self) -> bool:
        """Whether records stay on the device; False before the decision."""
        return self._decision.is_resident

    @property
    def planned_bytes(self) -> int:
        """The bytes of validation records, and of training records in their largest size, on this process's cores."""
        return self._decision.planned_bytes

    def decide(self) -> bool:
        """For the choice "auto", decide whether records stay on the device, and return whether they do.

        They stay if they fit the memory that the first steps have left free. Then the batches become row numbers, after
        a few batches of records that may be queued already. Without anything to decide, the result is False.
        """
        return self._decision.decide()

    def describe(self) -> str:
        """Return the decision as text, with the bytes of the records and the reason."""
        return self._decision.describe()

    def begin(self) -> None:
        """Do nothing: records are uploaded when the first batch is read."""

    def end(self) -> None:
        """Free the memory of all records."""
        if self._resident is not None:
            self._resident.end()
        self._resident = self._valid = None  # frees their memory

    def batches(self, loader: CachedLoader, count: int) -> Iterator[Any]:
        """Yield the next batches of a loader, at most `count`: host batches, or pairs (Resident, RecordBatch)."""
        while count:
            is_resident = self._decision.is_resident
            with contextlib.closing(self._of(loader).pairs(loader) if is_resident else loader.iterate_ahead()) as read:
                for batch, confirm in itertools.islice(read, count):
                    confirm()
                    count -= 1
                    yield batch
                    if self._decision.is_resident != is_resident:
                        break
                else:
                    return
            loader.load_state_dict(loader.state_dict())  # drops what was read ahead

    def keep(self, loader: CachedLoader) -> Resident | None:
        """Return the Resident that keeps the records of an evaluation's loader on the device.

        The result is None if each evaluation uploads its records.
        """
        if not self._decision.is_resident or not self._keeps_valid:
            return None
        if self._valid is None:
            self._valid = Resident(loader.dataset, self._memory)
            self._valid.on_no_room = self._leave_valid
        return self._valid

    def _leave_valid(self, error: DeviceFullError) -> None:
        if self._decision.choice == "yes":
            raise error
        self._keeps_valid, self._valid = False, None
        _log.warning("%s. From now on, validation samples are sent to the device in each evaluation", error)

    def _of(self, loader: CachedLoader) -> Resident:
        fields = loader.dataset.record_fields
        if self._resident is None or self._resident.dataset.record_fields != fields:
            # The resident of the earlier size is not ended yet: its last batches are still queued.
            self._resident = Resident(loader.dataset, self._memory)
            self._resident.on_no_room = self._decision.give_up
            self._resident.begin()
        return self._resident


def _problem(device: Device) -> str:
    """Return why a device cannot keep records; "" if it can."""
    if not hasattr(device, "reserve"):
        return f"the backend {device.name!r} cannot keep records"
    if device.name == "xla" and device.processes.world_size > 1:
        return "records cannot stay on the devices of several hosts of XLA"
    return ""


def _problem_of_auto(device: Device) -> str:
    """Return why the choice "auto" keeps no records on the device; "" if its free memory will decide."""
    if device.torch_device.type == "cpu":
        return "the device's memory is the host's"
    if not hasattr(device, "free_bytes") or device.free_bytes() is None:
        return "the device does not report its free memory; --resident yes keeps the records on it"
    return ""
