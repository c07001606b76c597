"""Copies of tensors on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

#: Functions that read tensors of a device type in one transfer: a backend adds its own.
READERS: Final[dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]]] = {}


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
    known = {kind: iter(read([each for each in tensors if each.device.type == kind])) for kind, read in READERS.items()}
    return [
        next(known[each.device.type]) if each.device.type in known else each.to("cpu", copy=copy) for each in tensors
    ]
