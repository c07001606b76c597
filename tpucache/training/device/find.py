"""Which devices torch has here. Looking for them starts none."""

from __future__ import annotations

import torch

from tpucache.errors import UsageError


def find_devices() -> list[str]:
    """Return the kinds of devices that are there, the one to prefer first; "cpu" always is."""
    found = ["cuda"] if torch.cuda.is_available() else []
    accelerator = getattr(torch, "accelerator", None)  # torch has it since 2.6
    if accelerator is not None and accelerator.is_available():
        # TorchTPU has registered itself when torch was imported. It looks at the PCI bus; a program that only asks must
        # not take the TPU from the one that uses it.
        found += [kind for kind in [accelerator.current_accelerator().type] if kind == "tpu"]
    return [*found, "cpu"]


def choose_device(name: str) -> str:
    """Return the kind of device that `name`, one of DEVICES, stands for here. Raises UsageError for one that is not."""
    found = find_devices()
    if name == "auto":
        return found[0]
    if name not in found:
        raise UsageError(
            f"there is no device {name!r} here: torch {torch.__version__} finds {' and '.join(found)}. Use one of "
            "these, or auto; `python -m tpucache doctor` says what this machine has"
        )
    return name
