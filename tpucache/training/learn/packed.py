"""Packed images of a batch, finished on the device as the first part of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tpucache.loading.dataset import CachedDataset
from tpucache.ondevice.modules import decoder
from tpucache.store.fields import IMAGE
from tpucache.training.device import Device
from tpucache.training.device.tensors import DeviceBatch

Finish = Callable[[DeviceBatch], DeviceBatch]


def make_finish(dataset: CachedDataset, device: Device) -> Finish:
    """Return what gives a packed batch of this dataset its images, uint8 (batch, height, width, channels)."""
    if dataset.packed() is dataset:
        return lambda batch: batch
    decode = decoder(dataset).to(device.torch_device)
    device.wait()  # or the first graph would also hold the upload of its constants

    def finish(batch: DeviceBatch) -> DeviceBatch:
        images = decode(batch.images).permute(0, 2, 3, 1)
        return dataclasses.replace(batch, fields={**batch.fields, IMAGE: images})

    return finish
