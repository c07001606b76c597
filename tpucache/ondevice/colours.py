"""Changes of colour of whole batches on the device."""

from __future__ import annotations

from typing import Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.ondevice import draws as drawn
from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.ondevice.settings import AugmentSettings

_LUMA: Final = (0.299, 0.587, 0.114)  # ITU-R BT.601
#: A channel is smallest where its hue, in sixths of a turn, and this are between 1 and 3; then it rises to the largest.
_SIXTHS: Final = (5, 3, 1)
#: The number that is white, by the images' dtype; others have none that is certain.
_WHITE: Final = {"|u1": 255, "<u2": 65535}


class BatchColours:
    """Brightness, contrast (around the image's mean luma), saturation, hue and grey, in this order.

    Hue is that of HSV, as in torchvision: the largest and the smallest of a pixel's numbers stay as they are. Pixels
    stay between black and white where their dtype says which number is white.
    """

    def __init__(self, settings: AugmentSettings, channels: int, library: ArrayLibrary, dtype: str) -> None:
        """Take the number of channels and the images' dtype. Raises UsageError for settings that need others."""
        for name in ("saturation", "hue", "grey"):
            if getattr(settings, name) and channels != 3:
                raise UsageError(f"{name} is of 3 channels, not of {channels}: leave it out")
        self._settings, self._functions, self._white = settings, library.functions, _WHITE.get(dtype)
        if settings.brightness and self._white is None:
            raise UsageError(f"brightness is of numbers from black to white, not of {np.dtype(dtype)}: leave it out")
        self._luma = library.constant(np.array(_LUMA, np.float32).reshape(1, 3, 1, 1))
        self._sixths = library.constant(np.array(_SIXTHS, np.float32).reshape(1, 3, 1, 1))

    def __call__(self, pixels: Array, draws: Array) -> Array:
        """Return the changed pixels, float32 (batch, channels, height, width)."""
        settings = self._settings
        if settings.brightness:
            pixels = pixels * number(draws, drawn.BRIGHTNESS)
        if settings.contrast:
            centre = self._grey(pixels).mean((1, 2, 3), keepdims=True)
            pixels = centre + (pixels - centre) * number(draws, drawn.CONTRAST)
        if settings.saturation:
            grey = self._grey(pixels)
            pixels = grey + (pixels - grey) * number(draws, drawn.SATURATION)
        if settings.hue:
            pixels = self._turned(pixels, 6 * number(draws, drawn.HUE))
        if settings.grey:
            pixels = self._functions.where(flag(draws, drawn.GREY), self._grey(pixels), pixels)
        changes = settings.brightness or settings.contrast or settings.saturation or settings.hue
        return self._functions.clip(pixels, 0, self._white) if changes and self._white is not None else pixels

    def _turned(self, pixels: Array, turn: Array) -> Array:
        """Return pixels whose hue is moved by sixths of a whole turn, 0 to 6 from red over green and blue to red."""
        functions = self._functions
        red, green, blue = (pixels[:, channel : channel + 1] for channel in range(3))
        largest = functions.maximum(functions.maximum(red, green), blue)
        chroma = largest - functions.minimum(functions.minimum(red, green), blue)
        divisor = functions.where(chroma > 0, chroma, 1.0)
        of_green, of_blue = 2 + (blue - red) / divisor, 4 + (red - green) / divisor
        hue = functions.where(green == largest, of_green, of_blue)
        hue = functions.where(red == largest, (green - blue) / divisor, hue)
        place = self._sixths + (hue + turn)
        place = place - 6 * functions.floor(place / 6)
        return largest - chroma * functions.clip(functions.minimum(place, 4 - place), 0, 1)

    def _grey(self, pixels: Array) -> Array:
        return (pixels * self._luma).sum(1, keepdims=True) if pixels.shape[1] == 3 else pixels


def number(draws: Array, column: int) -> Array:
    """Return a column of the draws as (batch, 1, 1, 1)."""
    return draws[:, column].reshape(-1, 1, 1, 1)


def flag(draws: Array, column: int) -> Array:
    """Return a column of the draws as bool (batch, 1, 1, 1)."""
    return number(draws, column) > 0.5
