"""Numbers as they are stored -> the pixels of a recipe's mode: RGB, grey, or the channels and numbers of the file.

A file says how many bits its numbers have, but not how many of them are in use: cameras and scanners write 12 or 14
bits into 16. Scaled by a wrong range such an image turns black or white, so what is uncertain is refused.
"""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, TiffImagePlugin

from tpucache.errors import SampleError
from tpucache.recipe import Mode

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


#: Modes of Pillow with an alpha channel.
ALPHA_MODES: Final = ("RGBA", "LA", "PA", "La", "RGBa")
#: What modes become that are no plain channels.
_PLAIN_MODES: Final = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB"}
_TIFF_PHOTOMETRIC: Final = 262
_TIFF_SAMPLE_FORMAT: Final = 339
_WHITE_IS_ZERO: Final = 0
_SIGNED: Final = 2


def to_mode(image: Image.Image, data: bytes, mode: Mode, white: int | None) -> Array:
    """Return an image of any Pillow mode, read from `data`, as a recipe's `mode` has it.

    rgb: uint8 (height, width, 3), or (height, width) where it is no more than grey. grey: uint8 (height, width). keep:
    the file's channels, (height, width) for one. Raises PixelsError.
    """
    if mode == "keep":
        return _as_they_are(image, data)
    bits = bits_of(image, data)
    if image.mode in COLOUR_MODES and bits == 16:
        check_colours(image, data, white)
    elif image.mode == "L" and bits < 8 and isinstance(clear := image.info.get("transparency"), int):
        image.info["transparency"] = clear * 255 // (2**bits - 1)  # Pillow spreads the pixels over 0..255 alone
    colours = _to_colours(image, white)
    return np.asarray(colours.convert("L") if mode == "grey" and colours.mode != "L" else colours)


def over_white(image: Image.Image) -> Image.Image:
    """Return an image with transparency as RGB, over white."""
    rgba = image.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(canvas, rgba).convert("RGB")


def _to_colours(image: Image.Image, white: int | None) -> Image.Image:
    """Return an image of any Pillow mode as RGB, or as L where it is no more than grey."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_deep_grey(image, white))
    if "transparency" in image.info or image.mode in ALPHA_MODES:
        return over_white(image)
    return image.convert("RGB")


def _deep_grey(image: Image.Image, white: int | None) -> npt.NDArray[np.uint8]:
    """Return grey of more than 8 bits as uint8. Raises UncertainRangeError."""
    scaled_by_pillow = image.format == "PPM" and image.mode == "I"  # a PGM states what is white
    values = np.asarray(image)
    grey = to_8_bits(values, WHITE_16 if scaled_by_pillow else white)
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
        np.subtract(255, grey, out=grey)  # Pillow does so with 8 bits alone
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return grey


def _as_they_are(image: Image.Image, data: bytes) -> Array:
    """Return the numbers of a file: uint8, uint16, int16 or float32. Raises PixelsError for others."""
    bits = bits_of(image, data)
    if image.mode in COLOUR_MODES and bits == 16:
        return _deep_colours(image, data)
    if image.mode.startswith("I;16"):
        return np.asarray(image).astype("<u2")
    if image.mode == "I":
        return _whole_numbers(image, bits)
    if image.mode == "F":
        if bits == 64:
            raise PixelsError("its pixels are floats of 64 bits: save them as 32 bits")
        return np.asarray(image)
    if image.mode == "P" and "transparency" in image.info:
        return np.asarray(image.convert("RGBA"))
    return np.asarray(image.convert(_PLAIN_MODES.get(image.mode, image.mode)))


def _whole_numbers(image: Image.Image, bits: int) -> Array:
    """Return what Pillow has as whole numbers of 32 bits in the depth of its file."""
    if image.format == "PPM":
        return np.asarray(image).astype("<u2")
    if isinstance(image, TiffImagePlugin.TiffImageFile) and bits == 16:
        signed = _SIGNED in image.tag_v2.get(_TIFF_SAMPLE_FORMAT, (1,))
        return np.asarray(image).astype("<i2" if signed else "<u2")
    raise PixelsError("its pixels are whole numbers of 32 bits: save them as 16 bits, or as floats of 32 bits")


def _deep_colours(image: Image.Image, data: bytes) -> Array:
    """Return colours of 16 bits, of which Pillow has the high bytes: OpenCV reads all of them."""
    import cv2

    high = np.asarray(image)
    found: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if found is not None and found.dtype == np.uint16 and found.ndim == 3:
        order = {2: [0, 3], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[high.shape[2]]  # OpenCV has blue first
        if max(order) < found.shape[2]:
            pixels: Array = found[..., order]
            if pixels.shape == high.shape and np.array_equal(pixels >> 8, high):
                return pixels
    raise PixelsError("colours of 16 bits in such a file cannot be read: save it as PNG, or as .npy")


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
