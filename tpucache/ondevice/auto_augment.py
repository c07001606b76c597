"""RandAugment and TrivialAugment of whole batches of bytes: each image gets its own operations, in one graph.

A shear consists of shifts by fixed lengths, a translation is a shear without slope, and a rotation is three shears
(resample.py). Brightness, colour, contrast and sharpness mix an image with a second image. Equalize needs a histogram
and a table of 256 numbers. A TPU has no fast gather or scatter. So both are computed by matrix multiplications with
16 + 16 rows of ones and zeros: one row for each value of a pixel's high 4 bits, and one for each value of its low 4
bits. Their operands are exact in bfloat16, and their sums in float32. At most one of eight neighbouring images is
equalized, so that these rows are made for an eighth of the images.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.ondevice import operations as op
from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.ondevice.resample import bordered, sheared_bytes
from tpucache.ondevice.settings import AugmentSettings

_WHITE: Final = 255
_HALF: Final = 16  # values of 4 bits
#: A value that is below an integer by less than this becomes that integer, so that all devices, which compute slightly
#: different values, round down to the same integers.
_NEARLY: Final = 2.0**-10
#: The number in masks that means "no class". Pixels that come in from outside the image get it.
_NO_CLASS: Final = 255
_LUMA: Final = (0.299, 0.587, 0.114)  # ITU-R BT.601


class AutoAugment:
    """Applies the random operations that `draw_operations` chose to images of bytes; masks move with their images."""

    def __init__(
        self, settings: AugmentSettings, height: int, width: int, channels: int, library: ArrayLibrary, dtype: str
    ) -> None:
        """Take the images' size, channels and dtype. Raises UsageError unless images are uint8 with 1 or 3 channels.

        Other dtypes do not have the 8 bits that posterize needs, or the 256 values that equalize counts.
        """
        name = "trivial_augment" if settings.trivial_augment else "rand_augment"
        if np.dtype(dtype) != np.uint8:
            raise UsageError(f"{name} needs images of bytes, not of {np.dtype(dtype)}: leave {name} out")
        if channels not in (1, 3):
            raise UsageError(f"{name} needs images of 1 or 3 channels, not {channels}: leave {name} out")
        self._library, self._functions = library, library.functions
        self._height, self._width = height, width
        self._reach, self._count = op.reach_of(settings, height, width), settings.operations
        self._views = settings.views
        # `_values` has the 16 values of 4 bits, and 16, which is above all of them. `_before` has 1 where a row's
        # number is above the column's.
        self._values = library.constant(np.arange(_HALF + 1, dtype=np.float32).reshape(1, -1, 1))
        self._before = library.constant(np.tri(_HALF, k=-1, dtype=np.float32)[None])
        self._luma = library.constant(np.array(_LUMA, np.float32).reshape(1, 3, 1, 1))

    def images(self, images: Array, draws: Array) -> Array:
        """Return the changed images, float32 (batch, channels, height, width) with integers from 0 to 255.

        The given `images` have integers from 0 to 255, too, in any dtype. `draws` has the numbers that describe each
        image's operations, (batch, operations x COLUMNS); see `draw_operations`.
        """
        for numbers in self._operations(draws):
            images = self._toned(self._float(self._moved(images, numbers, 0, nearest=False)), numbers)
        return images

    def masks(self, masks: Array, draws: Array) -> Array:
        """Return masks (batch, 1, height, width) moved like their images, as uint8.

        Pixels that come from outside the image have class 255.
        """
        for numbers in self._operations(draws):
            masks = self._moved(masks, numbers, _NO_CLASS, nearest=True)
        return masks

    def _operations(self, draws: Array) -> list[Array]:
        return [draws[:, at * op.COLUMNS : (at + 1) * op.COLUMNS] for at in range(self._count)]

    def _moved(self, pixels: Array, numbers: Array, outside: int, *, nearest: bool) -> Array:
        """Return images rotated and sheared, uint8; pixels from outside the image have the value `outside`.

        With `nearest`, a value between pixels is that of the nearest pixel, else it is interpolated.
        """
        library, functions, reach = self._library, self._functions, self._reach
        pixels = library.cast(pixels, "uint8")
        if reach.side:
            pixels = self._squared(pixels, outside)
            pixels = functions.where(_flag(numbers, op.TRANSPOSED), pixels.swapaxes(2, 3), pixels)
            pixels = functions.where(_flag(numbers, op.ROWS_REVERSED), functions.flip(pixels, (2,)), pixels)
            pixels = functions.where(_flag(numbers, op.COLUMNS_REVERSED), functions.flip(pixels, (3,)), pixels)
        # The first two shears also compute the columns that the last shear moves into the image.
        pixels = bordered(library, pixels, reach.rows + reach.last, outside)
        row_moves, column_moves = numbers[:, op.ROW_SLOPE], numbers[:, op.COLUMN_SLOPE]
        pixels = sheared_bytes(library, pixels, row_moves, numbers[:, op.ROW_START], reach.rows, nearest=nearest)
        pixels = bordered(library, pixels.swapaxes(2, 3), reach.columns, outside)
        pixels = sheared_bytes(
            library, pixels, column_moves, numbers[:, op.COLUMN_START], reach.columns, nearest=nearest
        ).swapaxes(2, 3)
        last = numbers[:, op.LAST_SLOPE]
        pixels = sheared_bytes(library, pixels, last, functions.zeros_like(last), reach.last, nearest=nearest)
        if reach.side:
            top, left = (reach.side - self._height) // 2, (reach.side - self._width) // 2
            pixels = pixels[:, :, top : top + self._height, left : left + self._width]
        return pixels

    def _squared(self, pixels: Array, outside: int) -> Array:
        """Return images centred in the square in which they rotate. New pixels have the value `outside`.

        If the number of new rows or columns is odd, the bottom or the right side gets one more than the opposite side.
        """
        rows, columns = self._reach.side - self._height, self._reach.side - self._width
        pixels = bordered(self._library, pixels, (columns + 1) // 2, outside)[..., columns % 2 :]
        pixels = bordered(self._library, pixels.swapaxes(2, 3), (rows + 1) // 2, outside)[..., rows % 2 :]
        return pixels.swapaxes(2, 3)

    def _toned(self, pixels: Array, numbers: Array) -> Array:
        """Return float32 pixels after mixing, posterize, solarize, autocontrast and equalize, in this order."""
        functions = self._functions
        grey = functions.floor((pixels * self._luma).sum(1, keepdims=True) + _NEARLY) if _is_rgb(pixels) else pixels
        mean = grey.mean((1, 2, 3)).reshape(-1, 1, 1, 1)
        # A change of colour mixes an image with its grey version, so that it leaves a grey image unchanged.
        other = grey * _number(numbers, op.GREY) + mean * _number(numbers, op.MEAN)
        other = other + _smoothed(functions, pixels) * _number(numbers, op.SMOOTH)
        pixels = self._cut(pixels + (other - pixels) * (1 - _number(numbers, op.KEPT)))
        quantum = _number(numbers, op.QUANTUM)
        pixels = functions.floor(pixels / quantum) * quantum
        pixels = functions.where(pixels >= _number(numbers, op.THRESHOLD), _WHITE - pixels, pixels)
        least, most = (
            extreme(pixels, (2, 3)).reshape(*pixels.shape[:2], 1, 1) for extreme in (functions.amin, functions.amax)
        )
        stretches = _flag(numbers, op.STRETCHED) & (most > least)
        scale = functions.where(stretches, _WHITE / functions.where(stretches, most - least, 1.0), 1.0)
        pixels = self._cut((pixels - functions.where(stretches, least, 0.0)) * scale)
        return self._equalized_some(pixels, _flag(numbers, op.EQUALIZED))

    def _equalized_some(self, pixels: Array, is_chosen: Array) -> Array:
        """Return pixels with the chosen images equalized. `is_chosen` is bool (batch, 1, 1, 1).

        Of each view, at most one image in a group of neighbours is chosen.
        """
        shape, functions = pixels.shape, self._functions
        size = math.gcd(len(pixels) // self._views, op.GROUP)
        grouped = pixels.reshape(-1, size, self._views, *shape[1:])
        is_chosen = is_chosen.reshape(-1, size, self._views, 1, 1, 1)
        chosen = functions.where(is_chosen, grouped, 0.0).sum(1).reshape(-1, *shape[1:])
        equalized = self._equalized(chosen).reshape(-1, 1, self._views, *shape[1:])
        return functions.where(is_chosen, equalized, grouped).reshape(*shape)

    def _equalized(self, pixels: Array) -> Array:
        """Return pixels in which all values of a channel are about equally frequent, as ImageOps.equalize does."""
        functions = self._functions
        flat = pixels.reshape(-1, 1, pixels.shape[2] * pixels.shape[3])
        high = functions.floor(flat / _HALF)
        low = flat - high * _HALF
        of_high = self._float(high == self._values[:, :_HALF])
        is_low = self._float(low == self._values[:, :_HALF])
        # Count pixels with the same high bits and smaller low bits. The last column counts all with these high bits.
        less = of_high @ self._float(low < self._values).swapaxes(1, 2)
        rows = less[..., _HALF:]
        less = less[..., :_HALF] + (self._before * rows.swapaxes(1, 2)).sum(2, keepdims=True)
        most = functions.amax(flat, (2,)).reshape(-1, 1, 1)
        others = flat.shape[2] - self._float(flat == most).sum(2, keepdims=True)
        step = functions.floor((others + 0.5) / _WHITE)
        changes = step > 0
        step = functions.where(changes, step, 1.0)
        # Adding 1/2 keeps the quotient away from whole numbers, for devices that divide inexactly.
        table = functions.clip(functions.floor((less + functions.floor(step / 2) + 0.5) / step), 0, _WHITE)
        found = ((table.swapaxes(1, 2) @ of_high) * is_low).sum(1, keepdims=True)
        return functions.where(changes, found, flat).reshape(*pixels.shape)

    def _cut(self, pixels: Array) -> Array:
        return self._functions.clip(self._functions.floor(pixels + _NEARLY), 0, _WHITE)

    def _float(self, array: Array) -> Array:
        return self._library.cast(array, "float32")


def _smoothed(functions: Any, pixels: Array) -> Array:
    """Return images in which each inner pixel is the rounded mean of the 3 x 3 pixels around it.

    The pixel itself counts 5 times in this mean. The pixels at the border are kept.
    """
    if min(pixels.shape[2:]) < 3:
        return pixels
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    inner = pixels[:, :, 1:-1, 1:-1]
    means = functions.round((rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner) / 13)
    means = functions.concatenate([pixels[:, :, 1:-1, :1], means, pixels[:, :, 1:-1, -1:]], 3)
    return functions.concatenate([pixels[:, :, :1], means, pixels[:, :, -1:]], 2)


def _is_rgb(pixels: Array) -> bool:
    return bool(pixels.shape[1] == 3)


def _number(numbers: Array, column: int) -> Array:
    return numbers[:, column].reshape(-1, 1, 1, 1)


def _flag(numbers: Array, column: int) -> Array:
    return _number(numbers, column) > 0.5
