"""The devices that steps run on: one small interface, and one file for each backend.

Importing this package does not import torch. Other packages add backends by entry points of the group
`tpucache.devices`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import UsageError
from tpucache.plugins import PartTable
from tpucache.training.device.base import Counters, Device
from tpucache.training.device.choice import choose_backend
from tpucache.training.device.processes import Processes

if TYPE_CHECKING:
    from tpucache.training.device.torch_device import CpuDevice

__all__ = [
    "BACKENDS",
    "DEVICES",
    "Counters",
    "CpuDevice",
    "Device",
    "Processes",
    "open_device",
]

#: Backends by name: each is a function `(cores, device, compile) -> Device`.
BACKENDS: Final = PartTable[Callable[[int, str, bool], Device]](
    "tpucache.devices",
    {
        "xla": "tpucache.training.device.xla:open_device",
        "torch": "tpucache.training.device.torch_device:open_device",
    },
)
BACKENDS_HELP: Final = "xla: PyTorch/XLA; torch: plain PyTorch; auto: xla on a TPU, otherwise torch"

#: The value of `cores` by which xla is asked for all cores.
_ALL_CORES: Final = 0

#: Devices of the backend torch; auto is the fastest one that this machine has.
DEVICES: Final = ("auto", "cuda", "tpu", "cpu")


def open_device(
    backend: str = "auto", cores: int | None = None, device: str = "auto", *, compile: bool = False
) -> Device:
    """Open a device with a backend; by default, the best device of this machine.

    `backend` is one of BACKENDS or "auto": xla on a TPU, otherwise torch, on a GPU if there is one. `cores` is 1, or
    None for all; only xla has several. For torch, `device` is one of DEVICES, and `compile` asks for torch.compile.
    Raises UsageError if there is no such backend, number of cores or device, and DependencyError for xla without
    torch_xla.
    """
    name = choose_backend(backend, device, compile=compile).backend
    if name not in BACKENDS:
        raise UsageError(f"there is no backend {backend!r}: use {' or '.join(BACKENDS)}")
    if name == "xla":
        return BACKENDS[name](cores or _ALL_CORES, device, compile)
    return BACKENDS[name](1 if cores is None else cores, device, compile)


def __getattr__(name: str) -> Any:
    if name == "CpuDevice":
        from tpucache.training.device.torch_device import CpuDevice

        return CpuDevice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
