"""Where steps run: one small interface, one file a backend. Importing this does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import UsageError
from tpucache.training.device.base import Counters, Device

if TYPE_CHECKING:
    from tpucache.training.device.eager import EagerDevice

__all__ = ["BACKENDS", "Counters", "Device", "EagerDevice", "open_device"]

#: The module, the class and the description of each backend. A class takes a number of cores, and raises UsageError for
#: another one.
_BACKENDS: Final = {
    "xla": ("xla", "XlaDevice", "PyTorch/XLA"),
    "eager": ("eager", "EagerDevice", "plain PyTorch on the processor"),
}
BACKENDS: Final = tuple(_BACKENDS)
BACKENDS_HELP: Final = "; ".join(f"{name}: {text}" for name, (_, _, text) in _BACKENDS.items())


def open_device(backend: str, cores: int = 1) -> Device:
    """Return the device of one of BACKENDS; on xla, `cores` is 1 or all that the machine has.

    Raises UsageError for another backend or number, DependencyError without torch_xla.
    """
    if backend not in _BACKENDS:
        raise UsageError(f"there is no backend {backend!r}: use {' or '.join(BACKENDS)}")
    module, kind, _ = _BACKENDS[backend]
    device: Device = getattr(importlib.import_module(f"{__name__}.{module}"), kind)(cores)
    return device


def __getattr__(name: str) -> Any:
    if name == "EagerDevice":
        return importlib.import_module(f"{__name__}.eager").EagerDevice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
