"""Pixels of more than 8 bits -> 8 bits, where it is certain which number is white.

A file says how many bits its numbers have, but not how many of them are in use: cameras and scanners write 12 or 14
bits into 16. Scaled by a wrong range such an image turns black or white, so what is uncertain is refused.
"""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, TiffImagePlugin

Array = npt.NDArray[Any]

WHITE_16: Final = 65535
#: Whole numbers that are all below this use at most 14 bits.
_LEAST_16: Final = 1 << 14
#: A float image that is nowhere brighter than this would turn nearly black.
_LEAST_FLOAT: Final = 1 / 16

#: Pillow's names of 16-bit colours in a PNG, of which it keeps the first byte, and of those in the other byte order.
_OF_LOW_BYTES: Final = {"RGB;16B": "RGB;16L", "RGBA;16B": "RGBA;16L"}
#: Modes in which Pillow has colours of 16 bits, cut to 8.
COLOUR_MODES: Final = ("RGB", "RGBA", "RGBX", "RGBa", "CMYK", "LA", "La")
_PNG_BITS_AT: Final = 24
_TIFF_BITS: Final = 258

_ADVICE: Final = "state which number is white, such as --white-level 4095 for 12 bits, or save the image with 8 bits"


class PixelsError(Exception):
    """The pixels of an image cannot be taken, for a reason that its user can change."""


class UncertainRangeError(PixelsError):
    """Nothing says which number of an image is white."""


def to_8_bits(values: Array, white: int | None) -> npt.NDArray[np.uint8]:
    """Return grey (height, width) of whole numbers or floats as uint8: 0 stays 0, `white` becomes 255.

    Where `white` is None it is 65535, and 1 for floats, if the numbers show that this is their range. Raises
    UncertainRangeError when they do not, and for numbers out of the range or not finite.
    """
    low, high = values.min().item(), values.max().item()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise UncertainRangeError("some of its pixels are not finite numbers: save it with 8 bits")
    floats = values.dtype.kind == "f"
    most = white if white is not None else 1 if floats else WHITE_16
    if low < 0 or high > most:
        raise UncertainRangeError(f"its pixels are {low:.6g} to {high:.6g}, not within 0 to {most}: {_ADVICE}")
    if white is None and 0 < high < (_LEAST_FLOAT if floats else _LEAST_16):
        raise UncertainRangeError(
            f"its pixels are at most {high:.6g}, which is nearly black if {most} is white: {_ADVICE}"
        )
    grey = np.empty(values.shape, np.uint8)
    for row, levels in enumerate(values):  # at once, a large image would take eight times its size, more than once
        exact = levels.astype(np.float64)  # numpy 1 would keep float32 beside a scalar, and round to other pixels
        grey[row] = np.rint(exact * 255 if most == 1 else exact / (most / 255))
    return grey


def bits_of(image: Image.Image, data: bytes) -> int:
    """Return the bits of a channel as a file has them; 8 for formats of which Pillow knows no more."""
    if image.format == "PNG":
        return data[_PNG_BITS_AT]
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return int(max(image.tag_v2.get(_TIFF_BITS, (1,))))
    return 8


def check_colours(image: Image.Image, data: bytes, white: int | None) -> None:
    """Check an image of `COLOUR_MODES` with 16 bits a channel, of which Pillow keeps the high bytes.

    Raises UncertainRangeError when 65535 may not be what is white, or one colour is transparent, as others may have
    the same high bytes.
    """
    if "transparency" in image.info:
        raise UncertainRangeError("one of its colours of 16 bits is transparent: save it with 8 bits, or with alpha")
    if white is None and _highest_byte(image, data) < _LEAST_16 >> 8:
        raise UncertainRangeError(
            "its colours have 16 bits but use at most 14 of them, which is nearly black if 65535 is white: "
            "save it with 8 bits, or state --white-level 65535 if it is as dark as that"
        )
    if white not in (None, WHITE_16):
        raise UncertainRangeError(
            f"its colours have 16 bits, and --white-level {white} can scale grey only: save it with 8 bits"
        )


def _highest_byte(image: Image.Image, data: bytes) -> int:
    """Return the highest byte of colours of 16 bits, but their transparency, that were cut to their high bytes."""
    pixels = np.asarray(image)
    colours = pixels[..., :3] if image.mode in ("RGBA", "RGBX", "RGBa") else pixels
    highest = int(colours.max())
    return 255 if not highest and _is_black_png(data) else highest  # black whatever is white


def _is_black_png(data: bytes) -> bool:
    """Return whether a PNG has colours of 16 bits whose low bytes are all 0; False where that cannot be read."""
    with Image.open(io.BytesIO(data)) as image:
        tiles: Any = image.tile  # tuples of four, under another name in each Pillow
        if image.format != "PNG" or any(rawmode not in _OF_LOW_BYTES for *_, rawmode in tiles):
            return False
        tiles[:] = [(*place, _OF_LOW_BYTES[rawmode]) for *place, rawmode in tiles]
        return not np.asarray(image)[..., :3].any()
