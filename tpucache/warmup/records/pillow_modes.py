"""Decodes an image file that Pillow has opened, and converts it from any of Pillow's modes to the recipe's mode.

- JPEG: simplejpeg decodes it if it is installed and accepts the file, else Pillow.
- colours: transparent pixels are blended with white; palette, grey and CMYK become RGB; embedded colour profiles are
  not applied.
- depth: 16-bit colours must use their whole range; `numbers.py` describes grey.
- mode: `keep` leaves channels and numbers as in the file: alpha is a channel, and a palette becomes RGB. Grey of 1, 2
  or 4 bits is scaled to 0..255, as the PNG standard says.
"""

from __future__ import annotations

import functools
import io
import math
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from tpucache.errors import DependencyError
from tpucache.native import Array
from tpucache.recipe import Recipe
from tpucache.warmup.records import refusal
from tpucache.warmup.records.numbers import LEAST_16, WHITE_16, Decoded, check_opaque, to_8_bits
from tpucache.warmup.records.pillow import JPEGS, PillowImage

SCALES: Final = 8  # libjpeg decodes at 1/8, 2/8, ... 8/8 of the size
#: The modes into which Pillow reads 16-bit colours, reduced to 8 bits.
COLOUR_MODES: Final = ("RGB", "RGBA", "RGBX", "RGBa", "CMYK", "LA", "La")
_ALPHA_MODES: Final = ("RGBA", "LA", "PA", "La", "RGBa")
#: The modes with plain channels to which other modes are converted.
_PLAIN_MODES: Final = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB"}
#: Pillow's raw modes for 16-bit colours in a PNG, which keep the high byte, and raw modes that keep the low byte.
_LOW_BYTE_MODES: Final = {"RGB;16B": "RGB;16L", "RGBA;16B": "RGBA;16L"}
_TIFF_CHANNELS: Final = 277
_TIFF_EXTRA: Final = 338  # ExtraSamples, which says whether further channels are alpha
#: The head of a PGM or PPM: width, height and the number for white.
_PPM_HEAD: Final = re.compile(rb"P[2356](?:(?:\s|#[^\n]*\n)+(\d+)){3}")


def decode(file: PillowImage, recipe: Recipe, least: tuple[int, int] | None = None) -> Decoded:
    """Return the pixels of a file in a recipe's mode: of a JPEG, at the smallest scale of at least `least` pixels.

    rgb: uint8 (height, width, 3), or (height, width) for grey without transparency. grey: uint8 (height, width). keep:
    the file's channels, (height, width) for one.
    """
    image, drafted = file.image, None
    is_grey = image.mode == "L" or recipe.mode == "grey"
    if image.format in JPEGS:
        if image.mode in ("L", "RGB") and (decoded := _decode_jpeg(file, least, is_grey)):
            return decoded
        width = image.width
        # For grey, take the luma that a JPEG stores, as simplejpeg does. A HEIF's draft would be its thumbnail, which
        # may be another picture.
        drafted = image.draft("L" if is_grey and image.mode == "RGB" else None, least)
    image.load()
    _check_channels(file)
    pixels = file.as_stored(_kept(file) if recipe.mode == "keep" else _shown(file, recipe))
    return Decoded(pixels, 1.0 if drafted is None else drafted[1][2] / width)


def _decode_jpeg(file: PillowImage, least: tuple[int, int] | None, is_grey: bool) -> Decoded | None:
    library = find_simplejpeg()
    if library is None:
        return None
    width, height = file.image.size
    eighths = SCALES
    if least and max(width, height) >= SCALES:  # in tiny images, two scales may have the same size
        share = max(least[0] / width, least[1] / height)
        eighths = min(SCALES, math.ceil(share * SCALES))
    wide, high = math.ceil(width * eighths / SCALES), math.ceil(height * eighths / SCALES)
    try:
        pixels = library.decode_jpeg(file.data, "GRAY" if is_grey else "RGB", min_height=high, min_width=wide)
    except ValueError:
        return None
    if pixels.shape[:2] != (high, wide):
        return None
    return Decoded(pixels[..., 0] if is_grey else pixels, eighths / SCALES)


@functools.cache
def find_simplejpeg() -> Any:
    """Return the module simplejpeg, or None if it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _check_channels(file: PillowImage) -> None:
    count, stored = len(file.image.getbands()), file.tags.get(_TIFF_CHANNELS, 1)
    if stored > count:
        raise refusal(
            f"Pillow reads {count} of its {stored} channels: save those that you need as a TIFF of their own, or all "
            "of them as .npy for --mode keep"
        )


def _shown(file: PillowImage, recipe: Recipe) -> Array:
    colours = _colours(file, recipe.white_level)
    return np.asarray(colours.convert("L") if recipe.mode == "grey" else colours)


def _colours(file: PillowImage, white: int | None) -> Image.Image:
    """Return an image as L if it is grey without transparency, else as RGB."""
    image, info = file.image, file.image.info
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_deep_grey(file, white))
    if image.mode in COLOUR_MODES and file.bits == 16:
        _check_range(file, white)
    if image.format == "BMP" and image.mode == "RGBA" and not image.getchannel("A").getbbox():
        return image.convert("RGB")  # the bytes for alpha are unused, as viewers understand them, too
    if "transparency" not in info and image.mode not in _ALPHA_MODES:
        return image.convert("L" if image.mode == "L" else "RGB")
    if image.mode == "L" and file.bits < 8 and isinstance(info["transparency"], int):
        # Pillow scales the pixels to 0..255, but not this value.
        info["transparency"] = info["transparency"] * 255 // (2**file.bits - 1)
    if file.tags and not file.tags.get(_TIFF_EXTRA):
        check_opaque(np.asarray(image)[..., -1], len(image.getbands()))
    return _over_white(image.convert("RGBA"))


def _over_white(rgba: Image.Image) -> Image.Image:
    if not rgba.getchannel("A").getbbox() and rgba.getcolors(1) is None:  # None: more than one colour
        raise refusal(
            "its alpha is 0 everywhere, so that its picture would become white: save it without alpha, "
            "or use --mode keep"
        )
    canvas = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(canvas, rgba).convert("RGB")


def _deep_grey(file: PillowImage, white: int | None) -> npt.NDArray[np.uint8]:
    image, values = file.image, np.asarray(file.image)
    if image.mode == "I" and image.format == "PPM":  # a PGM states its white level
        white = WHITE_16
    elif image.mode == "I" and file.tags and file.bits == 16:
        values = _whole_numbers(file)  # int16 if the file's numbers are signed
    grey = to_8_bits(values, white)
    if file.is_white_zero:
        np.subtract(255, grey, out=grey)  # Pillow inverts only 8-bit images
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return grey


def _check_range(file: PillowImage, white: int | None) -> None:
    """Raise SampleError if 16-bit colours cannot be reduced to their high bytes, which Pillow keeps."""
    if "transparency" in file.image.info:
        raise refusal("one of its 16-bit colours is transparent: save the image with 8 bits or with alpha")
    if white not in (None, WHITE_16):
        raise refusal(
            f"its colours have 16 bits, and --white-level {white} can scale only grey: save the image with 8 bits"
        )
    highest = _without_alpha(file, np.asarray(file.image)).max()
    if white is None and highest < LEAST_16 >> 8 and (highest or not _is_black(file)):
        raise refusal(
            "its colours have 16 bits but use at most 14 of them, which is nearly black if 65535 is white: "
            "save the image with 8 bits, or state --white-level 65535 if it really is that dark"
        )


def _is_black(file: PillowImage) -> bool:
    """Return whether the low bytes of a PNG's 16-bit colours are 0, too."""
    with Image.open(io.BytesIO(file.data)) as image:
        tiles: Any = image.tile  # tuples of four, whose class differs between releases of Pillow
        if image.format != "PNG" or any(rawmode not in _LOW_BYTE_MODES for *_, rawmode in tiles):
            return False
        tiles[:] = [(*place, _LOW_BYTE_MODES[rawmode]) for *place, rawmode in tiles]
        return not _without_alpha(file, np.asarray(image)).any()


def _without_alpha(file: PillowImage, pixels: Array) -> Array:
    return pixels[..., :3] if file.image.mode.startswith("RGB") else pixels


def _kept(file: PillowImage) -> Array:
    image, bits = file.image, file.bits
    if bits > 8 and file.is_white_zero:
        raise refusal("0 is white in this TIFF: save it so that 0 is black, or as .npy")
    if image.mode == "RGB" and image.format == "PPM" and white_of_ppm(file) > 255:
        raise refusal("Pillow reads its colours of more than 8 bits as 8 bits: save the image as PNG or .npy")
    if image.mode in COLOUR_MODES and bits == 16:
        return deep_colours(file)
    if image.mode.startswith("I"):
        return _whole_numbers(file)
    if image.mode == "F" and bits == 64:
        raise refusal("its pixels are floats of 64 bits: save them as 32 bits")
    if image.mode == "P" and "transparency" in image.info:
        return np.asarray(image.convert("RGBA"))
    return np.asarray(image.convert(_PLAIN_MODES.get(image.mode, image.mode)))


def _whole_numbers(file: PillowImage) -> Array:
    values = np.asarray(file.image)
    if file.image.mode.startswith("I;16") or file.image.format == "PPM":
        return values.astype("<u2")
    if file.tags and file.bits == 16:
        return values.astype("<i2" if file.is_signed else "<u2")
    raise refusal("its pixels are whole numbers of 32 bits: save them as 16 bits, or as floats of 32 bits")


def white_of_ppm(file: PillowImage) -> int:
    """Return the number for white that a PGM or PPM states, or 255."""
    head = _PPM_HEAD.match(file.data)
    return int(head[1]) if head else 255


def deep_colours(file: PillowImage) -> Array:
    """Return 16-bit colours, read by OpenCV: Pillow keeps only high bytes."""
    try:
        import cv2
    except ImportError as error:
        raise DependencyError(
            f"OpenCV, which reads 16-bit colours, cannot be imported: {error}. `pip install opencv-python-headless`"
        ) from error
    high = np.asarray(file.image)
    found: Any = cv2.imdecode(np.frombuffer(file.data, np.uint8), cv2.IMREAD_UNCHANGED)
    if found is not None and found.dtype == np.uint16 and found.ndim == 3:
        order = {2: [0, 3], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[high.shape[2]]  # OpenCV returns blue first
        if max(order) < found.shape[2]:
            pixels: Array = found[..., order]
            if pixels.shape == high.shape and np.array_equal(pixels >> 8, high):
                return pixels
    raise refusal("the 16-bit colours of this file cannot be read: save the image as PNG or .npy")
