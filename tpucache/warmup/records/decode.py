"""Encoded bytes -> the pixels of the image, or mask, that they hold.

This is the whole policy on what files mean:

- first frame: of an animation, or of several pictures in a file, the first is taken.
- size: more pixels than Pillow's limit (about 89 million) are refused; so is whatever Pillow would not decode in full,
  such as a file cut short.
- colours: alpha is laid over white; palette, grey and CMYK become RGB; embedded colour profiles are not applied.
- depth: grey of 16 and 32 bits is scaled by 1/257 from 0..65535, float grey from 0..1, or either from 0 to a stated
  white level. Refused where the numbers do not show that this is their range (`depth.py`).
- orientation: the EXIF tag says how the image is turned; one whose EXIF cannot be read is as it is stored. Pixels are
  always returned as they are stored.
- masks are numbers, not colours: 8-bit grey is kept, a palette image gives its indices whatever their colours, grey of
  1, 2 or 4 bits is spread over 0..255 (1 bit: 0 and 255), 16-bit grey is kept where no number is above 255. Alpha,
  RGB and anything else are refused. A mask's transparency counts for nothing.

JPEGs are decoded by simplejpeg where it is installed, and by Pillow where it is not or refuses.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError, features

from tpucache.errors import SampleError
from tpucache.warmup.records.depth import COLOUR_MODES, WHITE_16, UncertainRangeError, bits_of, check_colours, to_8_bits
from tpucache.warmup.records.orientation import TURNS, turn_back

Array = npt.NDArray[Any]

_EXIF_ORIENTATION: Final = 0x0112
_TIFF_WIDTH: Final = 256
_TIFF_HEIGHT: Final = 257
_TIFF_PHOTOMETRIC: Final = 262
_WHITE_IS_ZERO: Final = 0
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
    """Pixels as stored, uint8 (height, width) of grey or (height, width, 3), and how many there are for one stored."""

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
    except UncertainRangeError as error:
        raise SampleError(path, f"{what}{error}") from error
    except UnidentifiedImageError as error:
        raise SampleError(path, f"{what}not an image Pillow can identify") from error
    except _BROKEN as error:
        raise SampleError(path, f"{what}does not decode: {type(error).__name__}: {error}") from error


def decode(
    image: Image.Image, data: bytes | Array, least: tuple[int, int] | None = None, white: int | None = None
) -> Decoded:
    """Return the pixels of what `opened` yielded for `data`, by the policy in the module's docstring.

    A JPEG is decoded at the smallest of its scales that gives at least `least` (width, height); None is in full.
    `white` is the number that is white in images of more than 8 bits, None where the numbers have to show it.
    """
    if image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB") and isinstance(data, bytes):
        decoded = _decode_jpeg(image, data, least)
        if decoded is not None:
            return decoded
    width = image.width
    drafted = image.draft(None, least) if least and isinstance(image, ImageFile.ImageFile) else None
    as_stored = _undo(image)
    if isinstance(data, bytes):
        bits = bits_of(image, data)
        if image.mode in COLOUR_MODES and bits == 16:
            check_colours(image, data, white)
        elif image.mode == "L" and bits < 8 and isinstance(clear := image.info.get("transparency"), int):
            image.info["transparency"] = clear * 255 // (2**bits - 1)  # Pillow spreads the pixels over 0..255 alone
    pixels = np.asarray(_to_colours(image, white))
    return Decoded(as_stored(pixels), 1.0 if drafted is None else drafted[1][2] / width)


def decode_mask(data: bytes | Array, path: str) -> npt.NDArray[np.uint8]:
    """Return a mask as it is stored, uint8 (height, width). Raises SampleError when it cannot be one."""
    return decode_turned_mask(data, path)[0]


def decode_turned_mask(data: bytes | Array, path: str) -> tuple[npt.NDArray[np.uint8], int]:
    """Return a mask as it is stored, uint8 (height, width), and its EXIF orientation, 1 to 8. Raises SampleError."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 2:
            raise SampleError(path, f"the mask is uint8 (height, width), not {data.dtype} {data.shape}")
        return data, 1
    with opened(data, path, "the mask: ") as image:
        turned, as_stored = orientation(image), _undo(image)
        if image.mode in ("L", "P"):
            return as_stored(np.asarray(image)), turned
        if image.mode == "1":
            return as_stored(np.asarray(image.convert("L"))), turned
        if not image.mode.startswith("I"):
            raise SampleError(path, f"the mask is a {image.mode} image: save it as grey or palette, a number a pixel")
        numbers = as_stored(np.asarray(image))
    if numbers.min() < 0 or numbers.max() > 255:
        raise SampleError(
            path, f"the mask holds {numbers.min()} to {numbers.max()}, but numbers are kept from 0 to 255"
        )
    return numbers.astype(np.uint8), turned


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image that is not decoded yet, 1 to 8; 1 where it has none that can be read."""
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
        return int(value) if value in TURNS else 1
    except _BROKEN:
        return 1


def stored_size(image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) that an image is stored with."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # its `size` is as displayed
        return int(image.tag_v2[_TIFF_WIDTH]), int(image.tag_v2[_TIFF_HEIGHT])
    return image.size


def decoder_versions() -> dict[str, str]:
    """Return the versions of the decoders that pixels depend on; "" for one that is not installed."""
    simplejpeg = find_simplejpeg()
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


def _undo(image: Image.Image) -> Callable[[Array], Array]:
    """Return what makes pixels that Pillow decodes the stored ones: it turns a TIFF, and nothing else, on its own."""
    if image.format != "TIFF":
        return lambda pixels: pixels
    turned = TURNS[orientation(image)]
    return lambda pixels: np.ascontiguousarray(turn_back(pixels, turned))


def _decode_jpeg(image: Image.Image, data: bytes, least: tuple[int, int] | None) -> Decoded | None:
    """Decode with simplejpeg; None where it is not installed or finds anything odd, on which Pillow has to decide."""
    simplejpeg = find_simplejpeg()
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


def _to_colours(image: Image.Image, white: int | None) -> Image.Image:
    """Return an image of any Pillow mode as RGB, or as L where it is no more than grey."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_deep_grey(image, white))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(canvas, rgba).convert("RGB")
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


@functools.cache
def find_simplejpeg() -> Any:
    """Return simplejpeg, or None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
