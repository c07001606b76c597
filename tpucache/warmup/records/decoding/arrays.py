"""Arrays of pixels, in memory or in an .npy file -> the pixels of a recipe's mode."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from tpucache.errors import SampleError
from tpucache.recipe import Mode
from tpucache.warmup.records.decoding.depth import UncertainRangeError, to_8_bits
from tpucache.warmup.records.decoding.modes import over_white

Array = npt.NDArray[Any]

#: What the numbers of an image may be that is kept as it is.
KEPT_DTYPES: Final = ("|u1", "<u2", "<i2", "<f4")
MOST_CHANNELS: Final = 16
_NPY: Final = b"\x93NUMPY"
#: How many channels pictures usually have: of two dimensions that could be the channels, the one of such a length is.
_USUAL: Final = (1, 2, 3, 4)


def is_npy(data: bytes) -> bool:
    """Return whether bytes begin as an .npy file does."""
    return data.startswith(_NPY)


def read_npy(data: bytes, path: str) -> Array:
    """Return the array of an .npy file. Raises SampleError for a broken one, and for pickled objects."""
    try:
        array: Array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, TypeError, SyntaxError, OverflowError) as error:
        raise SampleError(path, f"does not decode as .npy: {error}") from error
    if array.dtype.kind not in "biuf":
        raise SampleError(path, f"holds {array.dtype}: an .npy file of an image holds numbers")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def with_channels_last(array: Array, path: str) -> Array:
    """Return pixels (height, width, channels) of an array (height, width), (height, width, channels) or (channels, …).

    Raises SampleError for what is no image.
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
    """Return an array of pixels, of any dtype and order of axes, as a recipe's `mode` has it.

    rgb and grey: uint8 (height, width), or (height, width, 3) for rgb; alpha is laid over white. keep: the array as it
    is, (height, width, channels). Raises SampleError.
    """
    pixels = with_channels_last(array, path)
    if mode == "keep":
        if pixels.dtype.str not in KEPT_DTYPES:
            allowed = ", ".join(np.dtype(name).name for name in KEPT_DTYPES)
            raise SampleError(path, f"its pixels are {pixels.dtype}: --mode keep keeps {allowed}; convert it")
        return np.ascontiguousarray(pixels)
    if pixels.shape[2] not in _USUAL:
        raise SampleError(path, f"has {pixels.shape[2]} channels: --mode keep keeps up to {MOST_CHANNELS}")
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype != np.uint8:
        try:
            pixels = to_8_bits(pixels, white)
        except UncertainRangeError as error:
            raise SampleError(path, str(error)) from error
    if pixels.shape[2] == 1:
        return np.ascontiguousarray(pixels[..., 0])
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if pixels.shape[2] in (2, 4):
        image = over_white(image)
    return np.asarray(image.convert("L") if mode == "grey" else image)
