"""Converts arrays of numbers to the pixels of an image in the recipe's mode, and reads .npy files.

- depth: whole numbers of 16 and 32 bits are scaled from 0..65535 to 0..255, and floats from 0..1. With a stated white
  level, both are scaled from 0 to this level. An image is refused if its numbers do not show which range they use: a
  file states the number of bits, but cameras and scanners often use only 12 or 14 of 16 bits, and an image scaled by a
  wrong range turns black or white.
- mode: `grey` is the luma of the colours (ITU-R BT.601). `keep` leaves channels and numbers unchanged: alpha is a
  channel, numbers are uint8, uint16, int16 or float32.
- alpha: transparent pixels of a file are blended with white. In an array, the second of 2 channels and the fourth of 4
  are alpha only if they are opaque; otherwise the image is refused, because they may be anything, such as infrared.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from tpucache.errors import SampleError
from tpucache.native import Array
from tpucache.recipe import Mode, Recipe
from tpucache.warmup.sources.source import load_npy

#: The dtypes of images in the mode `keep`.
KEPT_DTYPES: Final = ("|u1", "<u2", "<i2", "<f4")
MOST_CHANNELS: Final = 16
#: The end of the `kind` of an image file with several frames or pages. The first one is used.
SEVERAL: Final = " of several frames"
_NPY: Final = b"\x93NUMPY"
#: The usual numbers of channels. If two dimensions may be the channels, the one with such a length is.
_USUAL: Final = (1, 2, 3, 4)
WHITE_16: Final = 65535
#: Whole numbers that are all below this use at most 14 bits.
LEAST_16: Final = 1 << 14
#: A float image whose maximum is below this would turn nearly black.
_LEAST_FLOAT: Final = 1 / 16
_ADVICE: Final = "state which number is white, such as --white-level 4095 for 12 bits, or save the image with 8 bits"


class PixelsError(Exception):
    """The pixels of an image cannot be used, for a reason that the user can change."""


class UncertainRangeError(PixelsError):
    """The numbers of an image do not fit between black and white, or do not show which number is white."""


class Decoded(NamedTuple):
    """Pixels in stored orientation, (height, width) or (height, width, channels).

    `scale` is the scale at which they were decoded: 1.0 for the full size, less for a smaller one.
    """

    pixels: Array
    scale: float


class ArrayImage:
    """An image that is an array. It has no EXIF orientation."""

    orientation = 1

    def __init__(self, array: Array, path: str) -> None:
        self._array, self._path = array, path
        self.size = with_channels_last(array, path).shape[1::-1]
        self.kind = f"array {array.dtype}"

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        return Decoded(to_pixels(self._array, recipe.mode, recipe.white_level, self._path), 1.0)


def with_channels_last(array: Array, path: str) -> Array:
    """Return pixels (height, width, channels) of an array (height, width), (height, width, channels) or (channels,
    …).
    """
    if array.ndim == 2 and array.size:
        return array[..., None]
    if array.ndim == 3 and array.size:
        for lengths in (_USUAL, range(1, MOST_CHANNELS + 1)):
            if array.shape[2] in lengths:
                return array
            if array.shape[0] in lengths:
                return np.moveaxis(array, 0, 2)
    raise SampleError(
        path,
        "an image is (height, width), (height, width, channels) or (channels, height, width) with 1 to "
        f"{MOST_CHANNELS} channels, not {array.dtype} {array.shape}",
    )


def to_pixels(array: Array, mode: Mode, white: int | None, path: str) -> Array:
    """Convert an array of pixels, of any dtype and order of axes, to a recipe's `mode`."""
    pixels = with_channels_last(array, path)
    if mode == "keep":
        if pixels.dtype.str not in KEPT_DTYPES:
            allowed = ", ".join(np.dtype(name).name for name in KEPT_DTYPES)
            raise SampleError(path, f"its pixels are {pixels.dtype}: --mode keep takes {allowed}; convert the image")
        return np.ascontiguousarray(pixels)
    if pixels.shape[2] not in _USUAL:
        raise SampleError(path, f"has {pixels.shape[2]} channels: use --mode keep, which takes up to {MOST_CHANNELS}")
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype != np.uint8:
        try:
            pixels = to_8_bits(pixels, white)
        except UncertainRangeError as error:
            raise SampleError(path, str(error)) from error
    if pixels.shape[2] == 1:
        return np.ascontiguousarray(pixels[..., 0])
    if pixels.shape[2] in (2, 4):
        try:
            check_opaque(pixels[..., -1], pixels.shape[2])
        except PixelsError as error:
            raise SampleError(path, str(error)) from error
        pixels = pixels[..., :-1]
    image = Image.fromarray(np.ascontiguousarray(pixels if pixels.shape[2] > 1 else pixels[..., 0])).convert("RGB")
    return np.asarray(image.convert("L") if mode == "grey" else image)


def to_8_bits(values: Array, white: int | None) -> npt.NDArray[np.uint8]:
    """Return whole numbers or floats as uint8, in the same shape: 0 stays 0, `white` becomes 255."""
    low, high = values.min().item(), values.max().item()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise UncertainRangeError("some of its pixels are not finite numbers: save the image with 8 bits")
    floats = values.dtype.kind == "f"
    most = white if white is not None else 1 if floats else WHITE_16
    if low < 0 or high > most:
        raise UncertainRangeError(f"its pixels are {low:.6g} to {high:.6g}, not within 0 to {most}: {_ADVICE}")
    if white is None and 0 < high < (_LEAST_FLOAT if floats else LEAST_16):
        raise UncertainRangeError(
            f"its pixels are at most {high:.6g}, which is nearly black if {most} is white: {_ADVICE}"
        )
    if white is None and high > 0 and values.dtype == np.int16:  # 65535 is more than they can hold
        raise UncertainRangeError(f"its pixels are signed and have 16 bits, which do not show what is white: {_ADVICE}")
    grey = np.empty(values.shape, np.uint8)
    for row, levels in enumerate(values):  # row by row, because float64 takes eight times the memory of uint8
        exact = levels.astype(np.float64)  # numpy 1 would compute in float32, and round some pixels differently
        grey[row] = np.rint(exact * 255 if most == 1 else exact / (most / 255))
    return grey


def check_opaque(last: Array, count: int) -> None:
    """Raise PixelsError if the last of `count` channels, of 8 bits, is not opaque everywhere, as alpha would be."""
    if (last != 255).any():
        raise PixelsError(
            f"has {count} channels, and nothing says whether the last is transparency or other numbers, such as "
            "infrared: give --mode keep, leave this channel out, or save the image as PNG if it is transparency"
        )


def over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    if not rgba.getchannel("A").getbbox() and rgba.getcolors(1) is None:  # None: more than one colour
        raise PixelsError(
            "its alpha is 0 everywhere, so that its picture would become white: save it without alpha, "
            "or use --mode keep"
        )
    canvas = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(canvas, rgba).convert("RGB")


def is_npy(data: bytes) -> bool:
    return data.startswith(_NPY)


def read_npy(data: bytes, path: str) -> Array:
    try:
        array = load_npy(data)
    except ValueError as error:
        raise SampleError(path, f"does not decode as .npy: {error}") from error
    if array.dtype.kind not in "biuf":
        raise SampleError(path, f"holds {array.dtype}: an .npy file of an image must hold numbers")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)
