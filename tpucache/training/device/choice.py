"""Chooses a backend if none is named. It opens no device, and imports neither torch nor torch_xla."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Final, NamedTuple

from tpucache.machine import Tpu, find_tpu
from tpucache.training.device.processes import is_launched

#: The name that stands for the best backend of this machine.
AUTO: Final = "auto"
#: Another name of plain torch.
_EAGER: Final = "eager"


class Choice(NamedTuple):
    """The name of a backend, and why it was chosen; the reason is "" if the user named the backend."""

    backend: str
    why: str = ""

    def line(self) -> str:
        """Return the choice and its reason as a line of text."""
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
    these cases. Otherwise PJRT_DEVICE decides, if it is set. `tpu` is the function that looks for a TPU, by default on
    the PCI bus and among the device files: XLA is not started, because a process that has started it cannot fork.
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
