"""Converts arrays of numbers to the pixels of an image in the recipe's mode, and reads .npy files.

- depth: whole numbers of 16 and 32 bits are scaled from 0..65535 to 0..255, and floats from 0..1; with a stated white
  level, both from 0 to this level. An image is refused if its numbers do not show which range they use: cameras often
  use only 12 or 14 of 16 bits, and an image scaled by a wrong range turns black or white.
- mode: `grey` is the luma of the colours (ITU-R BT.601). `keep` leaves channels and numbers unchanged: alpha is a
  channel, numbers are uint8, uint16, int16 or float32.
- alpha: the second of 2 channels and the fourth of 4 are alpha only if they are opaque; otherwise the image is refused,
  because they may be anything, such as infrared.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from tpucache.native import Array
from tpucache.recipe import Mode
from tpucache.warmup.records import refusal
from tpucache.warmup.sources.source import load_npy

#: The dtypes of images in the mode `keep`.
KEPT_DTYPES: Final = ("|u1", "<u2", "<i2", "<f4")
MOST_CHANNELS: Final = 16
#: The end of the `kind` of an image file with several frames or pages. The first one is used.
SEVERAL: Final = " of several frames"
#: The first bytes of an .npy file.
NPY: Final = b"\x93NUMPY"
#: The usual numbers of channels. If two dimensions may be the channels, the one with such a length is.
_USUAL: Final = (1, 2, 3, 4)
WHITE_16: Final = 65535
#: Whole numbers that are all below this use at most 14 bits.
LEAST_16: Final = 1 << 14
#: A float image whose maximum is below this would turn nearly black.
_LEAST_FLOAT: Final = 1 / 16
_ADVICE: Final = "state which number is white, such as --white-level 4095 for 12 bits, or save the image with 8 bits"


class Decoded(NamedTuple):
    """Pixels in stored orientation, (height, width) or (height, width, channels), and their scale, up to 1.0."""

    pixels: Array
    scale: float = 1.0


def with_channels_last(array: Array) -> Array:
    """Return an image as (height, width, channels)."""
    if array.ndim == 2 and array.size:
        return array[..., None]
    if array.ndim == 3 and array.size:
        for lengths in (_USUAL, range(1, MOST_CHANNELS + 1)):
            if array.shape[2] in lengths:
                return array
            if array.shape[0] in lengths:
                return np.moveaxis(array, 0, 2)
    raise refusal(
        "an image is (height, width), (height, width, channels) or (channels, height, width) with 1 to "
        f"{MOST_CHANNELS} channels, not {array.dtype} {array.shape}"
    )


def to_pixels(array: Array, mode: Mode, white: int | None) -> Array:
    """Convert an array of pixels, of any dtype and order of axes, to a recipe's `mode`."""
    pixels = with_channels_last(array)
    channels = pixels.shape[2]
    if mode == "keep":
        if pixels.dtype.str not in KEPT_DTYPES:
            allowed = ", ".join(np.dtype(name).name for name in KEPT_DTYPES)
            raise refusal(f"its pixels are {pixels.dtype}: --mode keep takes {allowed}; convert the image")
        return np.ascontiguousarray(pixels)
    if channels not in _USUAL:
        raise refusal(f"has {channels} channels: use --mode keep, which takes up to {MOST_CHANNELS}")
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype != np.uint8:
        pixels = to_8_bits(pixels, white)
    if channels in (2, 4):
        check_opaque(pixels[..., -1], channels)
        pixels = pixels[..., :-1]
    pixels = np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    return np.asarray(Image.fromarray(pixels).convert("L")) if mode == "grey" else pixels


def to_8_bits(values: Array, white: int | None) -> npt.NDArray[np.uint8]:
    """Return whole numbers or floats as uint8, in the same shape: 0 stays 0, `white` becomes 255."""
    low, high = values.min().item(), values.max().item()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise refusal("some of its pixels are not finite numbers: save the image with 8 bits")
    floats = values.dtype.kind == "f"
    most = white if white is not None else 1 if floats else WHITE_16
    if low < 0 or high > most:
        raise refusal(f"its pixels are {low:.6g} to {high:.6g}, not within 0 to {most}: {_ADVICE}")
    if white is None and 0 < high < (_LEAST_FLOAT if floats else LEAST_16):
        raise refusal(f"its pixels are at most {high:.6g}, which is nearly black if {most} is white: {_ADVICE}")
    if white is None and high > 0 and values.dtype == np.int16:  # 65535 is more than they can hold
        raise refusal(f"its pixels are signed and have 16 bits, which do not show what is white: {_ADVICE}")
    grey = np.empty(values.shape, np.uint8)
    for row, levels in enumerate(values):  # row by row, because float64 takes eight times the memory of uint8
        exact = levels.astype(np.float64)  # numpy 1 would compute in float32, and round some pixels differently
        grey[row] = np.rint(exact * 255 if most == 1 else exact / (most / 255))
    return grey


def check_opaque(last: Array, count: int) -> None:
    """Raise SampleError if the last of `count` channels, of 8 bits, is not opaque everywhere."""
    if (last != 255).any():
        raise refusal(
            f"has {count} channels, and nothing says whether the last is transparency or other numbers, such as "
            "infrared: give --mode keep, leave this channel out, or save the image as PNG if it is transparency"
        )


def read_npy(data: bytes) -> Array:
    try:
        array = load_npy(data)
    except ValueError as error:
        raise refusal(f"does not decode as .npy: {error}") from error
    if array.dtype.kind not in "biuf":
        raise refusal(f"holds {array.dtype}: an .npy file of an image must hold numbers")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)
