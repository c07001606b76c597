"""What Pillow decodes -> the pixels of a recipe's mode: RGB, grey, or the channels and numbers of the file."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, TiffImagePlugin

from tpucache.recipe import Mode
from tpucache.warmup.records.decoding.depth import (
    COLOUR_MODES,
    WHITE_16,
    PixelsError,
    bits_of,
    check_colours,
    to_8_bits,
)

Array = npt.NDArray[Any]

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
