"""Tensors on the device, and back on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpucache.store.fields import IMAGE


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device.

    `fields` are the records', images as uint8 (batch, height, width, channels), or packed (batch, n); `labels` is
    (batch,) or (batch, m), and `draws` the random numbers (batch, n) that were sent along for it, where there are any.
    """

    fields: Mapping[str, torch.Tensor]
    labels: torch.Tensor
    draws: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that was sent for it."""
        return [*self.fields.values(), self.labels, *([] if self.draws is None else [self.draws])]

    @property
    def images(self) -> torch.Tensor:
        """The field `image`."""
        return self.fields[IMAGE]


def to_host(value: Any, *, copy: bool = False) -> Any:
    """Return the same tree of dicts, lists and tuples with every tensor on the host, as a `copy` also from there."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, dict):
        return {key: to_host(item, copy=copy) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_host(item, copy=copy) for item in value)
    return value
