"""What a JAX program does to a batch before its step, as one jitted function: decode, normalise, augment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tpucache.errors import UsageError
from tpucache.ondevice.arrays import ArrayLibrary
from tpucache.ondevice.augment import BatchAugment
from tpucache.ondevice.decode import field_decoder
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import IMAGE, MASK, Field

#: (fields by name, labels, random numbers) -> (fields by name, labels), all on the device.
Finish = Callable[[Mapping[str, Any], Any, Any], tuple[dict[str, Any], Any]]

# Constants stay numpy arrays: a jitted function holds them, and no device is touched before it is called.
_JAX: Final = ArrayLibrary(jnp, lambda constant: constant)


@dataclass(frozen=True)
class FinishOptions:
    """What is done to a batch, as a key for the functions compiled so far.

    `image` is the images' field, None for records without one; `is_packed` whether they come packed. `augment` is None
    where images are neither normalised nor augmented. `classes` is the number of outputs that mixed labels have.
    """

    image: Field | None
    is_packed: bool
    augment: AugmentSettings | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int


@functools.lru_cache(maxsize=16)
def make_finish(options: FinishOptions) -> Finish:
    """Return the jitted function for these options; the same one for the same options, so that it compiles once.

    Images come as uint8 (batch, height, width, channels), or packed (batch, n). They are returned as they are or, with
    `augment`, float32 (batch, height, width, channels), normalised by mean and std. Raises UsageError where the
    augmentations do not fit the images.
    """
    decoder = field_decoder(options.image) if options.image is not None and options.is_packed else None
    augment = _make_augment(options)

    def finish(fields: Mapping[str, Any], labels: Any, draws: Any) -> tuple[dict[str, Any], Any]:
        changed = dict(fields)
        if decoder is not None:
            images = decoder.decode(_JAX, changed[IMAGE], decoder.constants)
            changed[IMAGE] = jnp.moveaxis(images, 1, 3)
        if augment is not None:
            changed = augment.fields(changed, draws)
            labels = labels if draws is None else augment.views(labels)
            if augment.settings.mixes:
                targets = labels if labels.ndim > 1 else jax.nn.one_hot(labels, options.classes)
                changed[IMAGE], labels = augment.mix(changed[IMAGE], targets, draws)
            changed[IMAGE] = jnp.moveaxis(changed[IMAGE], 1, 3)
        return changed, labels

    # On a TPU the default product rounds operands to bfloat16; the decoder splits its operands for that.
    jitted: Finish = jax.jit(finish)
    return jitted


def _make_augment(options: FinishOptions) -> BatchAugment | None:
    if options.augment is None or options.image is None:
        return None
    height, width = options.image.shape[:2]
    return BatchAugment(options.augment, options.mean, options.std, height, width, _JAX)


def check_labels(labels: np.ndarray[Any, Any], settings: AugmentSettings | None, fields: Mapping[str, Any]) -> None:
    """Raise UsageError where the labels, or the masks, cannot be mixed as the settings ask."""
    if settings is None or not settings.mixes:
        return
    if labels.ndim == 1 and labels.dtype.kind != "f" and labels.min(initial=0) < 0:
        raise UsageError("mixup and cutmix mix classes, and samples of this cache have none: leave them out")
    if MASK in fields:
        raise UsageError("mixup and cutmix mix labels, and this cache's targets are masks: leave them out")
    if labels.ndim == 1 and labels.dtype.kind == "f":
        raise UsageError("mixup and cutmix mix classes, and this cache's labels are numbers: leave them out")
