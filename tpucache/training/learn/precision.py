"""What a model computes in: float32, or matrix products and convolutions in half of the bits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.amp.grad_scaler import GradScaler

from tpucache.training.device import Device
from tpucache.training.settings import Precision

_HALVES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: A scale that no gradients need: it is reached when some forty updates in a row were not finite.
_LEAST_SCALE: Final = 2.0**-24


def autocast(device: Device, precision: Precision) -> AbstractContextManager[object]:
    """Return a context in which a model computes in this precision."""
    return device.autocast(precision in _HALVES, _HALVES.get(precision, torch.bfloat16))


def make_scaler(device: Device, precision: Precision) -> GradScaler:
    """Return what scales losses so that fp16 holds their gradients; it changes nothing in another precision.

    Where a gradient overflows, the optimizer does not step, and the next losses are scaled by half as much.
    """
    return GradScaler(device.torch_device.type, enabled=precision == "fp16")


def has_given_up(state: dict[str, Any]) -> bool:
    """Return whether a scaler's state says that no gradient is finite any more, however small the losses are."""
    return "scale" in state and not state["scale"] >= _LEAST_SCALE
