"""Augmentation of whole batches on the device.

Random numbers are drawn on the host and uploaded with the batch. An augmentation that is off is not part of the graph.
Shapes are static, and nothing is read back.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.ondevice import draws as drawn
from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.ondevice.normalise import BatchNormalise
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import IMAGE, MASK

_LUMA: Final = (0.299, 0.587, 0.114)  # ITU-R BT.601
_BYTES: Final = "|u1"
#: The number that is white, by the images' dtype; others have none that is certain.
_WHITE: Final = {_BYTES: 255, "<u2": 65535}


class BatchAugment:
    """Applies AugmentSettings to whole batches on the device, with the random numbers of `draw`."""

    def __init__(
        self,
        settings: AugmentSettings,
        mean: Sequence[float],
        std: Sequence[float],
        height: int,
        width: int,
        library: ArrayLibrary,
        dtype: str = _BYTES,
    ) -> None:
        """Take the channels' mean and standard deviation, in the numbers of the images, and the images' dtype.

        Raises UsageError when the sides do not fit, or a setting is not of such images.
        """
        if settings.rotate and height != width:
            raise UsageError(f"only square images turn by right angles, not {height}x{width}: leave rotate out")
        if settings.shift >= min(height, width):
            raise UsageError(f"a shift of {settings.shift} pixels leaves nothing of {height}x{width}")
        if settings.saturation and len(mean) != 3:
            raise UsageError(f"saturation is of 3 channels, not of {len(mean)}: leave it out")
        self.settings, self._dtype, self._white = settings, dtype, _WHITE.get(dtype)
        if settings.brightness and self._white is None:
            raise UsageError(f"brightness is of numbers from black to white, not of {np.dtype(dtype)}: leave it out")
        self._library, self._functions = library, library.functions
        self._normalise = BatchNormalise(mean, std, library)
        self._rows, self._columns = (library.constant(np.arange(side, dtype=np.float32)) for side in (height, width))
        self._luma = library.constant(np.array(_LUMA, np.float32).reshape(1, 3, 1, 1))

    def fields(self, fields: Mapping[str, Array], draws: Array | None = None) -> dict[str, Array]:
        """Return a batch's fields with the image normalised and, given `draws`, augmented, and the mask moved with it.

        An image is (batch, height, width, channels), a mask (batch, height, width, 1).
        """
        if draws is None:
            return {**fields, IMAGE: self.plain(fields[IMAGE])}
        changed = {**fields, IMAGE: self.images(fields[IMAGE], draws)}
        if MASK in fields:
            changed[MASK] = self.masks(fields[MASK][..., 0], draws)[..., None]
        return changed

    def plain(self, images: Array) -> Array:
        """Only normalise: (batch, height, width, channels) -> float32 (batch, channels, height, width)."""
        return self._normalise(images)

    def images(self, images: Array, draws: Array) -> Array:
        """Move pixels, change colours, normalise, erase: from NHWC to float32 NCHW.

        An erased rectangle is of the mean colour. Autocast loses nothing of the pixels.
        """
        images = self._functions.moveaxis(images, 3, 1)
        # torch flips few other whole numbers than bytes
        moved = self._move(images if self._dtype == _BYTES else self._float(images), draws, self._dtype)
        pixels = self._normalise.pixels(self._colours(self._float(moved), draws))
        if self.settings.erase:
            pixels = pixels * (1 - self._inside(draws[:, drawn.ERASED]))
        return pixels

    def masks(self, masks: Array, draws: Array) -> Array:
        """Move masks (batch, height, width) of class numbers 0 to 255 as their images are moved; same dtype."""
        moved = self._move(masks[:, None], draws)
        return self._library.cast(moved[:, 0], str(masks.dtype).removeprefix("torch."))

    def mix(self, images: Array, targets: Array, draws: Array) -> tuple[Array, Array]:
        """Mix each image with the one before it in the batch, and its float targets in the same proportion.

        Targets are (batch, outputs), or (batch, outputs, height, width), which are cut where their images are. Mix-up:
        Zhang et al., arXiv:1710.09412; cut-mix: Yun et al., arXiv:1905.04899.
        """
        if not self.settings.mixes:
            return images, targets
        others, other_targets = (self._functions.roll(each, 1, 0) for each in (images, targets))
        # The share of the own image: 1 in a batch that is cut, and outside the cut in every batch.
        share = _number(draws, drawn.SHARE)
        if self.settings.cutmix:
            share = share * (1 - self._inside(draws[:, drawn.CUT]))
        own = share if targets.ndim == 4 else share.mean((1, 2, 3)).reshape(-1, 1)
        return images * share + others * (1 - share), targets * own + other_targets * (1 - own)

    def _move(self, images: Array, draws: Array, dtype: str = _BYTES) -> Array:
        """Transpose, reverse and shift (batch, channels, height, width); every value, of `dtype`, stays what it is."""
        settings, functions = self.settings, self._functions
        if settings.rotate:
            images = functions.where(_flag(draws, drawn.TRANSPOSED), images.swapaxes(2, 3), images)
        by_rows, by_columns = settings.vertical_flip or settings.rotate, settings.flip or settings.rotate
        if by_rows:
            images = functions.where(_flag(draws, drawn.ROWS_REVERSED), functions.flip(images, (2,)), images)
        if by_columns:
            images = functions.where(_flag(draws, drawn.COLUMNS_REVERSED), functions.flip(images, (3,)), images)
        if settings.shift:
            # A product with one 1 in each row moves bytes exactly, also in bfloat16, and is what a TPU does best.
            rows = self._one_hot(self._rows, draws[:, drawn.DOWN])
            columns = self._one_hot(self._columns, draws[:, drawn.RIGHT]).swapaxes(2, 3)
            parts = [rows @ part @ columns for part in self._parts(self._float(images), dtype)]
            images = functools.reduce(operator.add, map(self._float, parts)) if len(parts) > 1 else parts[0]
        return images

    def _parts(self, pixels: Array, dtype: str) -> list[Array]:
        """Return float32 arrays that add up to `pixels`, numbers of `dtype`, and that bfloat16 holds exactly."""
        if dtype == _BYTES:
            return [pixels]
        if np.dtype(dtype).kind in "iu":  # of 16 bits
            high = self._functions.floor(pixels / 256) * 256
            return [high, pixels - high]
        parts = []
        for _ in range(2):  # 8 of 24 bits each: T. J. Dekker, doi:10.1007/BF01397083
            scaled = pixels * (2**16 + 1)
            high = scaled - (scaled - pixels)
            parts.append(high)
            pixels = pixels - high
        return [*parts, pixels]

    def _colours(self, pixels: Array, draws: Array) -> Array:
        """Change brightness, contrast (around the image's mean luma) and saturation, in this order.

        Pixels stay between black and white where their dtype says which number is white.
        """
        settings = self.settings
        if settings.brightness:
            pixels = pixels * _number(draws, drawn.BRIGHTNESS)
        if settings.contrast:
            centre = self._grey(pixels).mean((1, 2, 3), keepdims=True)
            pixels = centre + (pixels - centre) * _number(draws, drawn.CONTRAST)
        if settings.saturation:
            grey = self._grey(pixels)
            pixels = grey + (pixels - grey) * _number(draws, drawn.SATURATION)
        if self._white is not None and (settings.brightness or settings.contrast or settings.saturation):
            pixels = self._functions.clip(pixels, 0, self._white)
        return pixels

    def _grey(self, pixels: Array) -> Array:
        return (pixels * self._luma).sum(1, keepdims=True) if pixels.shape[1] == 3 else pixels

    def _inside(self, boxes: Array) -> Array:
        """Return 1 where a pixel's centre lies in its sample's box, 0 elsewhere: float32 (batch, 1, height, width)."""
        rows = _between(self._rows, boxes[:, 0:1], boxes[:, 1:2])
        columns = _between(self._columns, boxes[:, 2:3], boxes[:, 3:4])
        return self._float((rows[:, :, None] & columns[:, None, :])[:, None])

    def _one_hot(self, places: Array, shift: Array) -> Array:
        """Return float32 (batch, 1, n, n) that moves n rows by `shift`, and reflects them at the border."""
        last = len(places) - 1
        source = abs(places - shift[:, None])
        source = last - abs(last - source)
        return self._float(source[:, :, None] == places)[:, None]

    def _float(self, array: Array) -> Array:
        return self._library.cast(array, "float32")


def _number(draws: Array, column: int) -> Array:
    return draws[:, column].reshape(-1, 1, 1, 1)


def _flag(draws: Array, column: int) -> Array:
    return _number(draws, column) > 0.5


def _between(places: Array, low: Array, high: Array) -> Array:
    centres = (places + 0.5) / len(places)
    return (centres >= low) & (centres < high)
