"""Batches on the device, and copies of tensors on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpucache.ondevice.resident import Resident, SentBatch
from tpucache.store.fields import IMAGE, LABEL
from tpucache.training.device.base import Device


@dataclass(frozen=True)
class ResidentRows:
    """A batch whose records are rows of `resident`, a table in the device's memory.

    `sent` has the numbers of these rows, and the records to write to them first.
    """

    resident: Resident
    sent: SentBatch

    def receive(self, written: Callable[[], None]) -> Any:
        """Write the records in `sent` to their rows; `written` and the result are as in `Resident.receive_or_read`."""
        return self.resident.receive_or_read(self.sent, written)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that were sent: the row numbers, and the chunks of records with their numbers."""
        sent = [self.sent.slots]
        for _, number, fields in self.sent.uploads:
            sent += [number, *fields.values()]
        return sent


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device.

    `fields` are the records' fields: images are uint8 (batch, height, width, channels), or packed (batch, n). `labels`
    is (batch,) or (batch, m). `draws` are the batch's random numbers (batch, n), if there are any.

    If records stay on the device, `fields` is empty, `rows` says which rows they are in, and `labels` are these rows'
    numbers, int32 (batch,). `gathered` returns the batch with its fields and labels.
    """

    fields: Mapping[str, torch.Tensor]
    labels: torch.Tensor
    draws: torch.Tensor | None = None
    rows: ResidentRows | None = None

    def gathered(self) -> DeviceBatch:
        """Return the batch with its fields and labels.

        If the records stay on the device, they are copied from their rows, as a part of the step's graph.
        """
        if self.rows is None:
            return self
        fields = self.rows.resident.take(self.rows.sent.slots)
        labels = fields.pop(LABEL)
        return DeviceBatch(fields, labels, self.draws)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that were sent for the batch."""
        if self.rows is not None:
            return [*self.rows.tensors, *([] if self.draws is None else [self.draws])]
        return [*self.fields.values(), self.labels, *([] if self.draws is None else [self.draws])]

    @property
    def images(self) -> torch.Tensor:
        """The field `image`."""
        return self.fields[IMAGE]


def put_all(device: Device, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send `batches`, which have one shape and dtype, and return them on `device`; see `Device.put`.

    If the device has a method `put_all`, that gets all of them, and may use one transfer. Otherwise they are sent one
    by one.
    """
    send = getattr(device, "put_all", None)
    return [device.put(batch) for batch in batches] if send is None else send(batches)


def to_host(value: Any, *, copy: bool = False) -> Any:
    """Return the same tree of dicts, lists and tuples with every tensor on the host; `copy` copies host tensors, too.

    Tensors on XLA are read in one transfer: one by one, each would cost a round trip.
    """
    return _replace(value, iter(_read([*_tensors(value)], copy)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _replace(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _replace(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, tensors) for item in value)
    return value


def _read(tensors: list[torch.Tensor], copy: bool) -> list[torch.Tensor]:
    if not any(tensor.device.type == "xla" for tensor in tensors):
        return [tensor.to("cpu", copy=copy) for tensor in tensors]
    from tpucache.training.device.xla import read_tensors  # the file is imported already, as XLA tensors exist

    read = iter(read_tensors([tensor for tensor in tensors if tensor.device.type == "xla"]))
    return [next(read) if tensor.device.type == "xla" else tensor.to("cpu", copy=copy) for tensor in tensors]
