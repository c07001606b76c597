"""Where steps run: one small interface, one file a backend. Importing this does not import torch.

Other packages add backends by entry points of the group `tpucache.devices`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import UsageError
from tpucache.plugins import Table
from tpucache.store import earlier
from tpucache.training.device.base import Counters, Device
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

#: The functions `(cores, device, compile) -> Device` that open backends, by name.
BACKENDS: Final = Table[Callable[[int, str, bool], Device]](
    "tpucache.devices",
    {
        "xla": "tpucache.training.device.xla:open_device",
        "torch": "tpucache.training.device.torch_device:open_device",
    },
)
BACKENDS_HELP: Final = "xla: PyTorch/XLA; torch: plain PyTorch"

#: What the backend torch runs on; auto is the fastest of these that is there.
DEVICES: Final = ("auto", "cuda", "tpu", "cpu")


def open_device(backend: str, cores: int = 1, device: str = "auto", *, compile: bool = False) -> Device:
    """Return the device of one of BACKENDS; on xla, `cores` is 1 or all that the machine has.

    For the backend torch, `device` is one of DEVICES, and `compile` is whether torch.compile compiles the models placed
    there. Raises UsageError for another backend, number of cores or device than there is, DependencyError without
    torch_xla.
    """
    name = earlier.backend(backend)
    if name not in BACKENDS:
        raise UsageError(f"there is no backend {backend!r}: use {' or '.join(BACKENDS)}")
    return BACKENDS[name](cores, device, compile)


def __getattr__(name: str) -> Any:
    if name == "CpuDevice":
        from tpucache.training.device.torch_device import CpuDevice

        return CpuDevice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
