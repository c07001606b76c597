"""The devices that steps run on: one small interface, and one file for each backend.

Importing this package does not import torch. Other packages add backends by entry points of the group
`tpucache.devices`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tpucache.errors import UsageError
from tpucache.machine import Tpu, find_tpu
from tpucache.plugins import PartTable
from tpucache.training.device.base import Counters, Device, Processes, is_launched

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


#: The name that stands for the best backend of this machine.
AUTO: Final = "auto"
#: Another name of plain torch.
_EAGER: Final = "eager"


class Choice(NamedTuple):
    """The name of a backend, and why it was chosen; the reason is "" if the user named the backend."""

    backend: str
    why: str = ""

    def line(self) -> str:
        return f"backend {self.backend}, as {self.why}" if self.why else f"backend {self.backend}"


def backend_of(name: str) -> str:
    """Return `name`; for `eager`, another name of plain torch, return "torch"."""
    return "torch" if name == _EAGER else name


def choose_backend(
    backend: str = AUTO,
    device: str = AUTO,
    *,
    compile: bool = False,
    processes: int | None = None,
    tpu: Callable[[], Tpu | None] = find_tpu,
) -> Choice:
    """Return the named backend, or else the best one for this machine: xla on a TPU, otherwise torch.

    Only the backend torch takes `device`, `compile` and `processes` and runs under torchrun, so torch is chosen in
    these cases. `tpu` is the function that looks for a TPU, by default on the PCI bus and among the device files: XLA
    is not started, because a process that has started it cannot fork.
    """
    if backend != AUTO:
        return Choice(backend_of(backend))
    asked = [
        *([f"--device {device}"] if device != AUTO else []),
        *(["--compile"] if compile else []),
        *(["--processes"] if processes is not None else []),
        *(["torchrun"] if is_launched() else []),
    ]
    if asked:
        return Choice("torch", f"{asked[0]} is for the backend torch")
    if not _is_installed("torch_xla"):
        return Choice("torch", "torch_xla is not installed")
    wanted = os.environ.get("PJRT_DEVICE")
    if wanted is not None:
        return Choice("xla" if wanted == "TPU" else "torch", f"PJRT_DEVICE is {wanted}")
    found = tpu()
    if found is None:
        return Choice("torch", "there is no TPU here")
    return Choice("xla", f"there is a TPU {found.generation} here, with {found.chips} chip{'s' * (found.chips != 1)}")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # something blocks its import
        return False


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
