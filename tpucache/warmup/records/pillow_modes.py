"""Converts an image in any of Pillow's modes to the recipe's mode.

- colours: transparent pixels are blended with white; palette, grey and CMYK become RGB; embedded colour profiles are
  not applied.
- depth: 16-bit colours must use their whole range; `numbers.py` describes grey.
- mode: `keep` leaves channels and numbers as in the file: alpha is a channel, and a palette becomes RGB. Grey of 1, 2
  or 4 bits is scaled to 0..255, as the PNG standard says: programs that shrink PNG files store grey in fewer bits.
"""

from __future__ import annotations

import io
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, TiffImagePlugin

from tpucache.errors import DependencyError
from tpucache.native import Array
from tpucache.recipe import Mode
from tpucache.warmup.records.numbers import (
    LEAST_16,
    WHITE_16,
    PixelsError,
    UncertainRangeError,
    check_opaque,
    over_white,
    to_8_bits,
)

#: Modes of Pillow with an alpha channel.
ALPHA_MODES: Final = ("RGBA", "LA", "PA", "La", "RGBa")
#: The modes into which Pillow reads 16-bit colours, reduced to 8 bits.
COLOUR_MODES: Final = ("RGB", "RGBA", "RGBX", "RGBa", "CMYK", "LA", "La")
#: The modes with plain channels to which other modes are converted.
_PLAIN_MODES: Final = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB"}
#: Pillow's raw modes for 16-bit colours in a PNG, which keep the high byte, and raw modes that keep the low byte.
_LOW_BYTE_MODES: Final = {"RGB;16B": "RGB;16L", "RGBA;16B": "RGBA;16L"}
_PNG_BITS_AT: Final = 24
_TIFF_BITS: Final = 258
_TIFF_PHOTOMETRIC: Final = 262
_TIFF_CHANNELS: Final = 277
_TIFF_EXTRA: Final = 338  # ExtraSamples, which says whether further channels are alpha
_TIFF_SAMPLE_FORMAT: Final = 339
_WHITE_IS_ZERO: Final = 0
_SIGNED: Final = 2
#: The head of a PGM or PPM: width, height and the number for white.
_PPM_HEAD: Final = re.compile(rb"P[2356](?:(?:\s|#[^\n]*\n)+(\d+)){3}")


def to_mode(image: Image.Image, data: bytes, mode: Mode, white: int | None) -> Array:
    """Return the pixels of an image, read from `data` by Pillow, in a recipe's `mode`.

    rgb: uint8 (height, width, 3), or (height, width) for grey without transparency. grey: uint8 (height, width). keep:
    the file's channels, (height, width) for one.
    """
    count = len(image.getbands())
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(_TIFF_CHANNELS, 1) > count:
        raise PixelsError(
            f"Pillow reads {count} of its {image.tag_v2[_TIFF_CHANNELS]} channels: save those that you need as a TIFF "
            "of their own, or all of them as .npy for --mode keep"
        )
    if mode == "keep":
        return _as_they_are(image, data)
    bits = bits_of(image, data)
    if image.mode in COLOUR_MODES and bits == 16:
        check_colours(image, data, white)
    elif image.mode == "L" and bits < 8 and isinstance(clear := image.info.get("transparency"), int):
        image.info["transparency"] = (
            clear * 255 // (2**bits - 1)
        )  # Pillow scales the pixels to 0..255, but not this value
    colours = _to_colours(image, data, white)
    return np.asarray(colours.convert("L") if mode == "grey" and colours.mode != "L" else colours)


def _to_colours(image: Image.Image, data: bytes, white: int | None) -> Image.Image:
    """Return an image of any Pillow mode as RGB; as L for the modes I and F, and for L without transparency."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_deep_grey(image, data, white))
    if image.format == "BMP" and image.mode == "RGBA" and not image.getchannel("A").getbbox():
        return image.convert("RGB")  # the bytes for alpha are unused, as viewers understand them, too
    if "transparency" in image.info or image.mode in ALPHA_MODES:
        if isinstance(image, TiffImagePlugin.TiffImageFile) and not image.tag_v2.get(_TIFF_EXTRA):
            check_opaque(np.asarray(image)[..., -1], len(image.getbands()))
        return over_white(image)
    return image.convert("RGB")


def _deep_grey(image: Image.Image, data: bytes, white: int | None) -> npt.NDArray[np.uint8]:
    scaled_by_pillow = image.format == "PPM" and image.mode == "I"  # a PGM states its white level
    values = np.asarray(image)
    if image.mode == "I" and isinstance(image, TiffImagePlugin.TiffImageFile) and bits_of(image, data) == 16:
        values = _whole_numbers(image, 16)  # int16 if the file's numbers are signed
    grey = to_8_bits(values, WHITE_16 if scaled_by_pillow else white)
    if is_white_zero(image):
        np.subtract(255, grey, out=grey)  # Pillow inverts only 8-bit images
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return grey


def check_colours(image: Image.Image, data: bytes, white: int | None) -> None:
    """Raise UncertainRangeError if 16-bit colours cannot be reduced to their high bytes, which Pillow keeps."""
    if "transparency" in image.info:
        raise UncertainRangeError("one of its 16-bit colours is transparent: save the image with 8 bits or with alpha")
    if white is None and _highest_byte(image, data) < LEAST_16 >> 8:
        raise UncertainRangeError(
            "its colours have 16 bits but use at most 14 of them, which is nearly black if 65535 is white: "
            "save the image with 8 bits, or state --white-level 65535 if it really is that dark"
        )
    if white not in (None, WHITE_16):
        raise UncertainRangeError(
            f"its colours have 16 bits, and --white-level {white} can scale only grey: save the image with 8 bits"
        )


def _highest_byte(image: Image.Image, data: bytes) -> int:
    """Returns 255 for a black PNG, so that it is not refused: it is black with any white level."""
    pixels = np.asarray(image)
    colours = pixels[..., :3] if image.mode in ("RGBA", "RGBX", "RGBa") else pixels
    highest = int(colours.max())
    return 255 if not highest and _is_black_png(data) else highest  # a black image is black with any white level


def _is_black_png(data: bytes) -> bool:
    """Return whether the low bytes of a PNG's 16-bit colours are all 0; False if they cannot be read."""
    with Image.open(io.BytesIO(data)) as image:
        tiles: Any = image.tile  # tuples of four, whose class differs between releases of Pillow
        if image.format != "PNG" or any(rawmode not in _LOW_BYTE_MODES for *_, rawmode in tiles):
            return False
        tiles[:] = [(*place, _LOW_BYTE_MODES[rawmode]) for *place, rawmode in tiles]
        return not np.asarray(image)[..., :3].any()


def _as_they_are(image: Image.Image, data: bytes) -> Array:
    bits = bits_of(image, data)
    if bits > 8 and is_white_zero(image):
        raise PixelsError("0 is white in this TIFF: save it so that 0 is black, or as .npy")
    if image.mode == "RGB" and image.format == "PPM" and white_of_ppm(data) > 255:
        raise PixelsError("Pillow reads its colours of more than 8 bits as 8 bits: save the image as PNG or .npy")
    if image.mode in COLOUR_MODES and bits == 16:
        return deep_colours(image, data)
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
    if image.format == "PPM":
        return np.asarray(image).astype("<u2")
    if isinstance(image, TiffImagePlugin.TiffImageFile) and bits == 16:
        signed = _SIGNED in image.tag_v2.get(_TIFF_SAMPLE_FORMAT, (1,))
        return np.asarray(image).astype("<i2" if signed else "<u2")
    raise PixelsError("its pixels are whole numbers of 32 bits: save them as 16 bits, or as floats of 32 bits")


def is_white_zero(image: Image.Image) -> bool:
    """Return whether 0 is white in a TIFF of grey."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    return bool(image.tag_v2.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO)


def white_of_ppm(data: bytes) -> int:
    """Return the number for white that a PGM or PPM file states; 255 if it states none."""
    head = _PPM_HEAD.match(data)
    return int(head[1]) if head else 255


def deep_colours(image: Image.Image, data: bytes) -> Array:
    """Return 16-bit colours, read by OpenCV: Pillow keeps only high bytes."""
    try:
        import cv2
    except ImportError as error:
        raise DependencyError(
            f"OpenCV, which reads 16-bit colours, cannot be imported: {error}. `pip install opencv-python-headless`"
        ) from error
    high = np.asarray(image)
    found: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if found is not None and found.dtype == np.uint16 and found.ndim == 3:
        order = {2: [0, 3], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[high.shape[2]]  # OpenCV returns blue first
        if max(order) < found.shape[2]:
            pixels: Array = found[..., order]
            if pixels.shape == high.shape and np.array_equal(pixels >> 8, high):
                return pixels
    raise PixelsError("the 16-bit colours of this file cannot be read: save the image as PNG or .npy")


def bits_of(image: Image.Image, data: bytes) -> int:
    """Return how many bits a channel has in a PNG or TIFF file; 8 for other formats."""
    if image.format == "PNG":
        return data[_PNG_BITS_AT]
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return int(max(image.tag_v2.get(_TIFF_BITS, (1,))))
    return 8
