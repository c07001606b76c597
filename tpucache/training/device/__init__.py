"""Where steps run: one small interface, one file a backend."""

from __future__ import annotations

from typing import Final, Literal, get_args

from tpucache.errors import UsageError
from tpucache.training.device.base import Counters, Device
from tpucache.training.device.eager import EagerDevice

__all__ = ["BACKENDS", "Backend", "Counters", "Device", "EagerDevice", "open_device"]

Backend = Literal["eager", "xla"]
BACKENDS: Final = get_args(Backend)


def open_device(backend: Backend, cores: int = 1) -> Device:
    """Return the device of a backend; on xla, `cores` is 1 or all that the machine has.

    Raises UsageError for another number, DependencyError without torch_xla.
    """
    if backend == "eager":
        if cores != 1:
            raise UsageError(f"the eager backend runs on 1 core, not {cores}: use --backend xla")
        return EagerDevice()
    from tpucache.training.device.xla import XlaDevice

    return XlaDevice(cores)
