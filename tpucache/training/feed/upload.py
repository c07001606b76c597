"""Sends host batches to the device, and measures how fast the machine sends them."""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from tpucache.ondevice.resident import as_named, channels_last
from tpucache.store.fields import LABEL
from tpucache.training.device import Device, open_device
from tpucache.training.device.tensors import DeviceBatch

_MEASURED_BYTES: Final = 4 << 20  # for each core: 28 images of 224 pixels
_MEASURED_SECONDS: Final = 0.5


def send(batch: Any, device: Device, draws: torch.Tensor | None = None) -> DeviceBatch:
    """Return a loader's batch on the device, together with `draws`, the batch's random numbers, if they are given.

    The copies may still be under way; see `Device.put`.
    """
    named = as_named(batch)
    return DeviceBatch(
        # The channels-last view is contiguous, so the host does not transpose.
        {name: device.put(channels_last(name, array)) for name, array in named.items() if name != LABEL},
        device.put(named[LABEL]),
        None if draws is None else device.put(draws),
    )


def measure_upload(device: Device, seconds: float = _MEASURED_SECONDS) -> float:
    """Measure how many bytes a second one thread sends to a device, in batches of 4 MB for each core."""
    batch = torch.zeros(device.cores, _MEASURED_BYTES, dtype=torch.uint8)
    if device.pin_memory:
        batch = batch.pin_memory()
    for _ in range(2):  # allocates memory and loads code
        device.put(batch)
    device.wait()
    began, sent = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds or not sent:
        device.put(batch)
        device.wait()
        sent += batch.nbytes
    return sent / passed


def measure_xla() -> float:
    """Open XLA's device, and return the bytes a second that one thread sends to it."""
    return measure_upload(open_device("xla"))
