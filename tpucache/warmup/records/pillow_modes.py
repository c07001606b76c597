"""The pixels of an image in any of Pillow's modes -> those of the recipe's mode.

- colours: alpha is laid over white; palette, grey and CMYK become RGB; embedded colour profiles are not applied.
- depth: 16-bit colours have to use their whole range; grey is as `numbers.py` says.
- mode: `keep` leaves channels and numbers as the file has them: alpha is a channel, a palette is RGB.
"""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, TiffImagePlugin

from tpucache.errors import DependencyError
from tpucache.recipe import Mode
from tpucache.types import Array
from tpucache.warmup.records.numbers import LEAST_16, WHITE_16, PixelsError, UncertainRangeError, over_white, to_8_bits

#: Modes of Pillow with an alpha channel.
ALPHA_MODES: Final = ("RGBA", "LA", "PA", "La", "RGBa")
#: Modes in which Pillow reads colours of 16 bits, cut to 8.
COLOUR_MODES: Final = ("RGB", "RGBA", "RGBX", "RGBa", "CMYK", "LA", "La")
#: What modes become that are no plain channels.
_PLAIN_MODES: Final = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB"}
#: Pillow's names of 16-bit colours in a PNG, whose first byte it keeps; and the names by which it keeps the second.
_OF_LOW_BYTES: Final = {"RGB;16B": "RGB;16L", "RGBA;16B": "RGBA;16L"}
_PNG_BITS_AT: Final = 24
_TIFF_BITS: Final = 258
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


def check_colours(image: Image.Image, data: bytes, white: int | None) -> None:
    """Check an image of `COLOUR_MODES` with 16 bits a channel: Pillow keeps the high bytes alone.

    Raises UncertainRangeError when 65535 may not be what is white, or one colour is transparent, as others may have
    the same high bytes.
    """
    if "transparency" in image.info:
        raise UncertainRangeError("one of its colours of 16 bits is transparent: save it with 8 bits, or with alpha")
    if white is None and _highest_byte(image, data) < LEAST_16 >> 8:
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
    """Return colours of 16 bits as OpenCV reads them: Pillow has the high bytes alone.

    Raises DependencyError without it.
    """
    try:
        import cv2
    except ImportError as error:
        raise DependencyError(
            f"OpenCV, which reads colours of 16 bits, cannot be imported: {error}. `pip install opencv-python-headless`"
        ) from error
    high = np.asarray(image)
    found: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if found is not None and found.dtype == np.uint16 and found.ndim == 3:
        order = {2: [0, 3], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[high.shape[2]]  # OpenCV has blue first
        if max(order) < found.shape[2]:
            pixels: Array = found[..., order]
            if pixels.shape == high.shape and np.array_equal(pixels >> 8, high):
                return pixels
    raise PixelsError("colours of 16 bits in such a file cannot be read: save it as PNG, or as .npy")


def bits_of(image: Image.Image, data: bytes) -> int:
    """Return the bits of a channel in a file; 8 for formats whose bits Pillow does not tell."""
    if image.format == "PNG":
        return data[_PNG_BITS_AT]
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return int(max(image.tag_v2.get(_TIFF_BITS, (1,))))
    return 8
