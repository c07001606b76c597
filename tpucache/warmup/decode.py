"""Encoded bytes -> the pixels of the image, or mask, that they hold.

This is the whole policy on what files mean:

- first frame: of an animation, or of several pictures in a file, the first is taken.
- size: more pixels than Pillow's limit (about 89 million) are refused; so is whatever Pillow would not decode in full,
  such as a file cut short.
- colours: alpha is laid over white; palette, grey and CMYK become RGB; 16 and 32 bit grey is scaled by 1/257 from
  0..65535, float grey from 0..1; embedded colour profiles are not applied.
- orientation: the EXIF tag says how the image is turned; one whose EXIF cannot be read is as it is stored.
- masks are numbers, not colours: 8-bit grey is kept, a palette image gives its indices whatever their colours, grey of
  1, 2 or 4 bits is spread over 0..255 (1 bit: 0 and 255), 16-bit grey is kept where no number is above 255. Alpha,
  RGB and anything else are refused. A mask's own EXIF and transparency count for nothing.

JPEGs are decoded by simplejpeg where it is installed, and by Pillow where it is not or refuses.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, ImageFile, UnidentifiedImageError, features

from tpucache.errors import SampleError

Array = npt.NDArray[Any]

_EXIF_ORIENTATION: Final = 0x0112
_JPEG_SCALES: Final = 8

# What Pillow's decoders raise for broken files, gathered from its plugins; MemoryError is a header that lies.
_BROKEN: Final = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    IndexError,
    KeyError,
    EOFError,
    OverflowError,
    ZeroDivisionError,
    NotImplementedError,
    MemoryError,
    AttributeError,
    AssertionError,
    RuntimeError,
    struct.error,
    Image.DecompressionBombError,
)


class Decoded(NamedTuple):
    """Pixels, uint8 (height, width) of grey or (height, width, 3), and their scale: how many for one as stored."""

    pixels: npt.NDArray[np.uint8]
    scale: float


@contextmanager
def opened(data: bytes | Array, path: str, what: str = "") -> Iterator[Image.Image]:
    """Yield an image whose pixels may still be undecoded; whatever Pillow raises on it becomes a SampleError.

    `data` is an encoded image or uint8 (height, width, 3) or (height, width). `path` names the sample in errors, and
    `what`, such as "the mask: ", the part of it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd but readable files
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with (
                _from_array(data, path, what)
                if isinstance(data, np.ndarray)
                else _from_bytes(data, path, what) as image
            ):
                yield image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise SampleError(path, f"{what}too many pixels: {error}") from error
    except UnidentifiedImageError as error:
        raise SampleError(path, f"{what}not an image Pillow can identify") from error
    except _BROKEN as error:
        raise SampleError(path, f"{what}does not decode: {type(error).__name__}: {error}") from error


def decode(image: Image.Image, data: bytes | Array, least: tuple[int, int] | None = None) -> Decoded:
    """Return the pixels of what `opened` yielded for `data`, by the policy in the module's docstring.

    A JPEG is decoded at the smallest of its scales that gives at least `least` (width, height); None is in full.
    """
    if image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB") and isinstance(data, bytes):
        decoded = _decode_jpeg(image, data, least)
        if decoded is not None:
            return decoded
    width = image.width
    drafted = image.draft(None, least) if least and isinstance(image, ImageFile.ImageFile) else None
    return Decoded(np.asarray(_to_colours(image)), 1.0 if drafted is None else drafted[1][2] / width)


def decode_mask(data: bytes | Array, path: str) -> npt.NDArray[np.uint8]:
    """Return a mask as uint8 (height, width). Raises SampleError when it cannot be one."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 2:
            raise SampleError(path, f"the mask is uint8 (height, width), not {data.dtype} {data.shape}")
        return data
    with opened(data, path, "the mask: ") as image:
        if image.mode in ("L", "P"):
            return np.asarray(image)
        if image.mode == "1":
            return np.asarray(image.convert("L"))
        if not image.mode.startswith("I"):
            raise SampleError(path, f"the mask is a {image.mode} image: save it as grey or palette, a number a pixel")
        numbers = np.asarray(image)
    if numbers.min() < 0 or numbers.max() > 255:
        raise SampleError(
            path, f"the mask holds {numbers.min()} to {numbers.max()}, but numbers are kept from 0 to 255"
        )
    return numbers.astype(np.uint8)


def orientation(image: Image.Image) -> int:
    """Return an image's EXIF orientation, 1 to 8; 1 where it has none that can be read."""
    try:
        value = int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except _BROKEN:
        return 1
    return value if 1 <= value <= 8 else 1


def decoder_versions() -> dict[str, str]:
    """Return the versions of what decodes images, on which pixels depend; "" for what is not there."""
    simplejpeg = _simplejpeg()
    return {
        "pillow": PIL.__version__,
        "libjpeg": features.version("libjpeg_turbo") or features.version("jpg") or "",
        "simplejpeg": simplejpeg.__version__ if simplejpeg else "",
    }


def _from_bytes(data: bytes, path: str, what: str) -> Image.Image:
    if not data:
        raise SampleError(path, f"{what}the file is empty")
    return Image.open(io.BytesIO(data))


def _from_array(data: Array, path: str, what: str) -> Image.Image:
    if data.dtype != np.uint8 or data.ndim not in (2, 3) or data.shape[2:] not in ((), (3,)) or not data.size:
        raise SampleError(
            path, f"{what}an image is uint8 (height, width, 3) or (height, width), not {data.dtype} {data.shape}"
        )
    return Image.fromarray(data)


def _decode_jpeg(image: Image.Image, data: bytes, least: tuple[int, int] | None) -> Decoded | None:
    """Decode with simplejpeg; None where it is not installed or finds anything odd, on which Pillow has to decide."""
    simplejpeg = _simplejpeg()
    if simplejpeg is None:
        return None
    eighths = _eighths(image.size, least)
    width, height = (_scaled(side, eighths) for side in image.size)
    colours = "GRAY" if image.mode == "L" else "RGB"
    try:
        pixels = simplejpeg.decode_jpeg(data, colours, min_height=height, min_width=width)
    except ValueError:
        return None
    if pixels.shape[:2] != (height, width):
        return None
    return Decoded(pixels[..., 0] if image.mode == "L" else pixels, eighths / _JPEG_SCALES)


def _eighths(size: tuple[int, int], least: tuple[int, int] | None) -> int:
    """Return the smallest of libjpeg's scales, in eighths, at which an image has at least `least` (width, height)."""
    if least is None or max(size) < _JPEG_SCALES:  # so small that two scales can have the same size
        return _JPEG_SCALES
    fitting = (
        eighths
        for eighths in range(1, _JPEG_SCALES)
        if all(side * eighths >= wanted * _JPEG_SCALES for side, wanted in zip(size, least, strict=True))
    )
    return next(fitting, _JPEG_SCALES)


def _scaled(side: int, eighths: int) -> int:
    return math.ceil(side * eighths / _JPEG_SCALES)


def _to_colours(image: Image.Image) -> Image.Image:
    """Return an image of any Pillow mode as RGB, or as L where it is no more than grey."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        grey = np.empty(values.shape, np.uint8)
        for row, levels in enumerate(values):  # at once, a large image would take eight times its size, more than once
            scaled = levels * np.float64(255) if image.mode == "F" else levels / np.float64(257)
            grey[row] = np.clip(np.rint(scaled), 0, 255)
        return Image.fromarray(grey)
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(canvas, rgba).convert("RGB")
    return image.convert("RGB")


@functools.cache
def _simplejpeg() -> Any:
    """Return simplejpeg, or None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
