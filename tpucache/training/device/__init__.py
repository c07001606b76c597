"""Where steps run: one small interface, one file a backend. Importing this does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import UsageError
from tpucache.store import earlier
from tpucache.training.device.base import Counters, Device
from tpucache.training.device.processes import Processes, open_processes

if TYPE_CHECKING:
    from tpucache.training.device.torch_device import CpuDevice
    from tpucache.training.device.torch_device import CpuDevice as EagerDevice

__all__ = [
    "BACKENDS",
    "DEVICES",
    "Counters",
    "CpuDevice",
    "Device",
    "EagerDevice",
    "Processes",
    "open_device",
]

_HELP: Final = {"xla": "PyTorch/XLA", "torch": "plain PyTorch"}
BACKENDS: Final = tuple(_HELP)
BACKENDS_HELP: Final = "; ".join(f"{name}: {text}" for name, text in _HELP.items())

#: What the backend torch runs on; auto is the fastest of these that is there.
DEVICES: Final = ("auto", "cuda", "tpu", "cpu")


def open_device(backend: str, cores: int = 1, device: str = "auto", *, compile: bool = False) -> Device:
    """Return the device of one of BACKENDS; on xla, `cores` is 1 or all that the machine has.

    For the backend torch, `device` is one of DEVICES, and `compile` is whether torch.compile compiles the models placed
    there. Raises UsageError for another backend, number of cores or device than there is, DependencyError without
    torch_xla.
    """
    backend = earlier.backend(backend)
    if backend not in BACKENDS:
        raise UsageError(f"there is no backend {backend!r}: use {' or '.join(BACKENDS)}")
    if backend == "xla":
        if device != "auto":
            raise UsageError(f"xla takes the device that PJRT_DEVICE names, not {device!r}: use --backend torch for it")
        if compile:
            raise UsageError("xla compiles whole steps by itself: leave --compile out, or use --backend torch")
        from tpucache.training.device.xla import XlaDevice

        return XlaDevice(cores)
    from tpucache.training.device.torch_device import CpuDevice, choose_device, open_accelerator

    if cores != 1:
        raise UsageError(f"the {backend} backend runs on 1 core, not {cores}: use --backend xla, or torchrun")
    kind = choose_device(device)
    open_processes(kind)  # each takes the device with its own number on the host
    return CpuDevice(compile) if kind == "cpu" else open_accelerator(kind, compile)


def __getattr__(name: str) -> Any:
    if name in ("CpuDevice", "EagerDevice"):  # the second is its earlier name
        from tpucache.training.device.torch_device import CpuDevice

        return CpuDevice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
