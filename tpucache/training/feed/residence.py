"""Whether the training records of a run stay in the device's memory, and the batches of a loader either way."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.ondevice.resident import Resident, Table, bytes_a_record
from tpucache.training.device import Device
from tpucache.training.settings import ResidentChoice, TrainSettings
from tpucache.training.sizes import in_size

#: The share of what the device has left after the first steps that records may take: fragments take some of it, too.
MOST_OF_FREE: Final = 0.8


@dataclass(frozen=True)
class DeviceMemory:
    """A device of training as the memory of a Resident."""

    device: Device

    @property
    def cores(self) -> int:
        """The cores that divide each batch."""
        return self.device.cores

    def put(self, array: Any) -> torch.Tensor:
        """Send an array or tensor."""
        return self.device.put(torch.from_numpy(array) if isinstance(array, np.ndarray) else array)

    def reserve(self, chunks: int, chunk: torch.Tensor) -> Table:
        """Return memory for this number of chunks."""
        return self.device.reserve(chunks, chunk)


class Residence:
    """Decides whether records stay in the device's memory, and gives batches of a loader as rows there if they do.

    With "auto" that is not known before the first steps have shown how much memory they take: until `decide`, and
    where there is no room, batches are those of the loader. Where images grow, the records of each size are uploaded in
    its first epoch, in place of those of the size before.
    """

    def __init__(
        self, choice: ResidentChoice, settings: TrainSettings, train_set: CachedDataset, device: Device
    ) -> None:
        """Raises UsageError for "yes" where the records do not fit, or the device cannot keep any."""
        sizes = dict.fromkeys(settings.sizes.epochs)
        shown = [in_size(train_set, size).packed() for size in sizes]
        self.planned_bytes = max(each.records * bytes_a_record(each) for each in shown)
        self._device, self._resident, self._has_begun = device, None, False
        self._is_resident, self._is_decided, self.reason = False, True, "asked for"
        if choice == "no":
            return
        problem = _problem(device) if train_set.is_finished else "the cache is not built yet"
        if choice == "yes":
            if not problem and (free := device.free_bytes()) is not None and self.planned_bytes > free:
                problem = f"the device has {free / 1e9:,.2f} GB left"
            if problem:
                raise UsageError(f"--resident yes keeps {self._gigabytes} of records on the device, and {problem}")
            self._is_resident = True
        elif problem := problem or _problem_of_auto(device):
            self.reason = problem
        else:
            self._is_decided, self.reason = False, "the first steps were not over"

    _resident: Resident | None

    def decide(self) -> None:
        """Decide what is left to be decided, now that the steps have the memory that they need."""
        if not self._is_decided:
            free = self._device.free_bytes() or 0
            self._is_resident, self._is_decided = self.planned_bytes <= MOST_OF_FREE * free, True
            relation = "fit into" if self._is_resident else "are more than"
            self.reason = f"they {relation} {MOST_OF_FREE:.0%} of the {free / 1e9:,.2f} GB that steps leave"

    def describe(self) -> str:
        """Return in words what was decided, how much memory it takes, and why."""
        if self._is_resident:
            return f"yes, {self._gigabytes} of records in the device's memory: {self.reason}"
        return f"no, {self._gigabytes} of records are sent as they are needed: {self.reason}"

    def begin(self) -> None:
        """Begin to give batches to one loop."""
        self._has_begun = True

    def end(self) -> None:
        """End what `begin` began."""
        self._has_begun = False
        if self._resident is not None:
            self._resident.end()
            self._resident = None  # with its memory

    def batches(self, loader: CachedLoader, count: int) -> Iterator[Any]:
        """Yield so many batches of a loader from its place on: host batches, or `(resident, RecordBatch)`."""
        if not self._is_resident:
            with contextlib.closing(loader.iterate_ahead()) as streaming:
                while count and not self._is_resident:
                    batch, confirm = next(streaming)
                    confirm()
                    yield batch
                    count -= 1
            if not count:
                return
            loader.load_state_dict(loader.state_dict())  # the iteration above has read ahead, and is left
        resident = self._of(loader)
        with contextlib.closing(resident.iterate(loader)) as rows:
            for batch, confirm in itertools.islice(rows, count):
                confirm()
                yield resident, batch

    def _of(self, loader: CachedLoader) -> Resident:
        fields = loader.dataset.record_fields
        if self._resident is None or self._resident.dataset.record_fields != fields:
            # The one of another size is not ended: its last batches are still on their way.
            self._resident = Resident(loader.dataset, DeviceMemory(self._device))
            self._resident.begin()
        return self._resident

    @property
    def _gigabytes(self) -> str:
        return f"{self.planned_bytes / 1e9:,.2f} GB"


def _problem(device: Device) -> str:
    """Return why a device keeps no records, "" where it does."""
    if not hasattr(device, "reserve"):
        return f"the backend {device.name!r} cannot keep any"
    if device.name == "xla" and device.processes.world_size > 1:
        return "that is not possible on several hosts of XLA"
    return ""


def _problem_of_auto(device: Device) -> str:
    """Return why records are not kept unless that is asked for, "" where it depends on the memory that steps leave."""
    if device.torch_device.type == "cpu":
        return "the device's memory is the host's"
    if device.free_bytes() is None:
        return "the device does not say how much memory it has left; --resident yes keeps them there"
    return ""
