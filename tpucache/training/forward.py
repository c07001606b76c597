"""The forward pass: packed images are decoded, then a model computes its outputs in the chosen precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tpucache.errors import UsageError
from tpucache.loading.dataset import COLUMNS, CachedDataset
from tpucache.ondevice.modules import Augment, decoder
from tpucache.store.fields import IMAGE, LABEL, Field
from tpucache.training.device import Device
from tpucache.training.device.base import DeviceBatch
from tpucache.training.settings import Precision, TrainSettings
from tpucache.training.tasks.task import Task
from tpucache.training.user_code import describe_error, user_code

_HALVES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: If the scale of the loss is below this, training has diverged: about forty updates in a row were not finite.
_LEAST_SCALE: Final = 2.0**-24
_SAME: Final = 0.5  # a smaller difference of means or deviations does not count; in units of 8-bit pixels
#: Resampling filters that give nearly the same pixels as Lanczos' filter, by which warmup resizes.
_LIKE_LANCZOS: Final = ("bicubic", "lanczos")

FinishBatch = Callable[[DeviceBatch], DeviceBatch]

#: Means and standard deviations of channels.
Statistics = tuple[Sequence[float], Sequence[float]]
#: Means and standard deviations of ImageNet's channels, in 0..255: most pretrained weights expect them.
IMAGENET: Final[Statistics] = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


def autocast(device: Device, precision: Precision) -> AbstractContextManager[object]:
    return device.autocast(precision in _HALVES, _HALVES.get(precision, torch.bfloat16))


def make_scaler(device: Device, precision: Precision) -> GradScaler:
    """If a gradient of fp16 overflows, the optimizer does not step, and losses are then scaled by half as much."""
    return GradScaler(device.torch_device.type, enabled=precision == "fp16")


def has_given_up(state: dict[str, Any]) -> bool:
    """Return whether the `state` of a loss scaler shows that gradients stay infinite or NaN at the smallest scale."""
    return "scale" in state and not state["scale"] >= _LEAST_SCALE


def make_finish(dataset: CachedDataset, device: Device) -> FinishBatch:
    if dataset.packed() is dataset:
        return lambda batch: batch
    decode = decoder(dataset).to(device.torch_device)
    device.wait()  # otherwise the first graph would also contain the upload of the constants

    def finish(batch: DeviceBatch) -> DeviceBatch:
        images = decode(batch.images).permute(0, 2, 3, 1)
        return dataclasses.replace(batch, fields={**batch.fields, IMAGE: images})

    return finish


def forward(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what a model computes from its inputs:

    Without an image, all inputs are passed as keyword arguments by their names.
    """
    given = [inputs[name] for name in (IMAGE, COLUMNS) if name in inputs]
    outputs: torch.Tensor = model(*given) if IMAGE in inputs else model(**inputs)
    return outputs


def outputs_of(
    model: nn.Module,
    batch: DeviceBatch,
    device: Device,
    settings: TrainSettings,
    task: Task,
    normalise: Callable[[torch.Tensor], torch.Tensor] | None,
    eval_step: Callable[..., torch.Tensor] | None,
) -> torch.Tensor:
    inputs = {**batch.fields}
    if normalise is not None:
        inputs[IMAGE] = normalise(batch.images)
    name = model_name(settings) if eval_step is None else f"the evaluation step {settings.eval_step!r}"
    with autocast(device, settings.precision), user_code(name, inputs):
        outputs = forward(model, inputs) if eval_step is None else eval_step(model, {**inputs, LABEL: batch.labels})
    task.check_outputs(outputs, len(batch.labels), name)
    return outputs.float()


def check_model(model: nn.Module, settings: TrainSettings, task: Task, dataset: CachedDataset) -> None:
    """A misfit of model, records and labels is a readable error now, not a shape error in a graph later."""
    sample = {
        field.name: dataset.as_tensor(field.name, np.zeros((2, *field.shape), field.dtype))
        for field in dataset.manifest.fields
    }
    if dataset.column_width:
        sample[COLUMNS] = torch.zeros(2, dataset.column_width)
    if IMAGE in sample:
        sample[IMAGE] = sample[IMAGE].float()
    model.eval()
    try:
        with torch.no_grad():
            outputs = forward(model, sample)
    except Exception as error:  # a user's model raises any error
        fields = ", ".join(f"{name} {tuple(tensor.shape[1:])}" for name, tensor in sample.items())
        raise UsageError(
            f"{model_name(settings)} cannot take this cache's {fields}: {describe_error(error)}"
        ) from error
    finally:
        model.train()
    task.check_outputs(outputs, 2, model_name(settings))


def model_name(settings: TrainSettings) -> str:
    return f"the model {settings.model!r}"


def decide_statistics(settings: TrainSettings, dataset: CachedDataset, model: nn.Module) -> TrainSettings:
    """Return the settings with a mean and a standard deviation for each channel, by which images are normalised.

    Otherwise they are those of the images that timm trained the model on, if the setting `weights` is given and they
    fit the images; ImageNet's for 8-bit colour images of a cache of `open_or_build`, which may have no statistics yet;
    and else the cache's. A constant channel, such as opaque alpha, has a deviation of 0: it counts as 1, so that the
    channel becomes 0.
    """
    if IMAGE not in dataset.names:
        if given := [f"--{name}" for name in ("mean", "std") if getattr(settings, name)]:
            raise UsageError(f"the cache has no images to normalise: leave {given[0]} out")
        return dataclasses.replace(settings, mean=(), std=())
    channels = image_channels(dataset)
    for name, values in (("mean", settings.mean), ("std", settings.std)):
        if values is not None and len(values) != channels:
            raise UsageError(f"--{name} is one number for each of {channels} channels, not {len(values)} numbers")
    if settings.mean and all(0 < value < 1 for value in settings.mean) and _image_field(dataset).dtype == "|u1":
        raise UsageError(f"--mean is {settings.mean}, but pixels are from 0 to 255: multiply it by 255")
    if settings.mean is not None and settings.std is not None:
        return settings
    mean, std = _known_statistics(settings, dataset, model)
    return dataclasses.replace(
        settings, mean=settings.mean or tuple(mean), std=settings.std or tuple(spread or 1.0 for spread in std)
    )


def _known_statistics(settings: TrainSettings, dataset: CachedDataset, model: nn.Module) -> Statistics:
    known = _model_statistics(model)
    if settings.weights is not None and known is not None and _fits(known, dataset):
        return known
    if dataset.cache.may_be_growing and _fits(IMAGENET, dataset):
        return IMAGENET
    return dataset.manifest.statistics.mean, dataset.manifest.statistics.std


def image_channels(dataset: CachedDataset) -> int:
    return _image_field(dataset).shape[2] if IMAGE in dataset.names else 0


def describe_differences(settings: TrainSettings, dataset: CachedDataset, model: nn.Module) -> str:
    """Return how a run prepares images in another way than timm did when it trained the model's weights, as text.

    It is "" if there is no difference, for a model that is not timm's, and for images that are not of 8 bits or have
    another number of channels than timm's.
    """
    known = _model_statistics(model)
    if known is None or IMAGE not in dataset.names or not _fits(known, dataset):
        return ""
    used: Statistics = settings.mean or (), settings.std or ()
    found = []
    if any(not np.allclose(one, other, atol=_SAME) for one, other in zip(used, known, strict=True)):
        texts = [", ".join(f"{value:.1f}" for value in values) for values in (*known, *used)]
        found.append(f"mean {texts[0]} and std {texts[1]}, where the run has {texts[2]} and {texts[3]}")
    if (interpolation := _pretrained(model).get("interpolation", "bicubic")) not in _LIKE_LANCZOS:
        found.append(f"resizing by {interpolation}, where warmup resizes by Lanczos")
    return f"the weights were trained with {'; with '.join(found)}" if found else ""


def _fits(known: Statistics, dataset: CachedDataset) -> bool:
    return len(known[0]) == image_channels(dataset) and not _image_field(dataset).is_deep


def _pretrained(model: nn.Module) -> Mapping[str, Any]:
    is_timms = type(model).__module__.startswith("timm.")
    return dict(getattr(model, "pretrained_cfg", None) or {}) if is_timms else {}


def _model_statistics(model: nn.Module) -> Statistics | None:
    about = _pretrained(model)
    if not about.get("mean") or not about.get("std"):
        return None
    mean, std = (tuple(255 * float(value) for value in about[name]) for name in ("mean", "std"))
    return mean, std


def make_augment(
    settings: TrainSettings, dataset: CachedDataset, mean: Sequence[float], std: Sequence[float], device: Device
) -> Augment | None:
    if IMAGE not in dataset.names:
        if settings.augment != type(settings.augment)():
            raise UsageError("the cache has no images to augment: leave the augmentations out")
        return None
    image = _image_field(dataset)
    height, width = image.shape[:2]
    return Augment(settings.augment, mean, std, height, width, device.torch_device, image.dtype)


def _image_field(dataset: CachedDataset) -> Field:
    return dataset.manifest.fields[dataset.names.index(IMAGE)]
