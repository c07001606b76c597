"""Encoded bytes -> the pixels of the image that they hold.

This is the whole policy on what files mean:

- first frame: of an animation, or of several pictures in a file, the first is taken.
- size: more pixels than the recipe's `max_pixels`, or else Pillow's limit (about 89 million), are refused; so is
  whatever Pillow would not decode in full, such as a file cut short.
- colours: alpha is laid over white; palette, grey and CMYK become RGB; embedded colour profiles are not applied.
- depth: grey of 16 and 32 bits is scaled by 1/257 from 0..65535, float grey from 0..1, or either from 0 to a stated
  white level. Refused where the numbers do not show that this is their range (`pixels.py`).
- mode: `grey` is the luma of the colours (ITU-R BT.601). `keep` leaves channels and numbers as the file has them: alpha
  is a channel, a palette is RGB, numbers are uint8, uint16, int16 or float32.
- orientation: the EXIF tag says how the image is turned; one whose EXIF cannot be read is as it is stored. Pixels are
  always returned as they are stored.

JPEGs are decoded by simplejpeg where it is installed, and by Pillow where it is not or refuses.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError, features

from tpucache.errors import SampleError
from tpucache.recipe import Mode
from tpucache.warmup.records.pixels import PixelsError, to_mode

Array = npt.NDArray[Any]

_EXIF_ORIENTATION: Final = 0x0112
_TIFF_WIDTH: Final = 256
_TIFF_HEIGHT: Final = 257

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
    """Pixels as stored, (height, width) or (height, width, channels), and how many there are for one stored."""

    pixels: Array
    scale: float


@contextmanager
def opened(data: bytes, path: str, what: str = "", max_pixels: int | None = None) -> Iterator[Image.Image]:
    """Yield an image whose pixels may still be undecoded; whatever Pillow raises on it becomes a SampleError.

    `path` names the sample in errors, and `what`, such as "the mask: ", the part of it. `max_pixels` replaces Pillow's
    own limit.
    """
    if not data:
        raise SampleError(path, f"{what}the file is empty")
    if is_heif(data):
        register_heif(path, what)
    try:
        with warnings.catch_warnings(), nullcontext() if max_pixels is None else _PILLOW_LIMIT:
            warnings.simplefilter("ignore")  # Pillow warns of odd but readable files
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                check_size(image.size, path, what, max_pixels)
                yield image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise SampleError(path, f"{what}too many pixels: {error}; --max-pixels sets another limit") from error
    except PixelsError as error:
        raise SampleError(path, f"{what}{error}") from error
    except UnidentifiedImageError as error:
        raise SampleError(path, f"{what}not an image Pillow can identify") from error
    except _BROKEN as error:
        raise SampleError(path, f"{what}does not decode: {type(error).__name__}: {error}") from error


def check_size(size: tuple[int, int], path: str, what: str, max_pixels: int | None) -> None:
    """Raise SampleError when an image of this (width, height) has more pixels than a stated limit."""
    if max_pixels is not None and size[0] * size[1] > max_pixels:
        raise SampleError(path, f"{what}too many pixels: {size[0]} x {size[1]} are more than --max-pixels {max_pixels}")


def decode(
    image: Image.Image,
    data: bytes,
    least: tuple[int, int] | None = None,
    white: int | None = None,
    mode: Mode = "rgb",
) -> Decoded:
    """Return the pixels of what `opened` yielded for `data`, by the policy in the module's docstring.

    A JPEG is decoded at the smallest of its scales that gives at least `least` (width, height); None is in full.
    `white` is the number that is white in images of more than 8 bits, None where the numbers have to show it.
    """
    if image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB"):
        decoded = decode_jpeg(data, image.size, least, is_grey=image.mode == "L" or mode == "grey")
        if decoded is not None:
            return Decoded(*decoded)
    width = image.width
    # A JPEG's own luma, as simplejpeg gives it.
    luma = "L" if mode == "grey" and image.mode == "RGB" else None
    drafted = image.draft(luma, least) if (least or luma) and isinstance(image, ImageFile.ImageFile) else None
    as_stored = _undo(image)
    pixels = to_mode(image, data, mode, white)
    return Decoded(as_stored(pixels), 1.0 if drafted is None else drafted[1][2] / width)


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


def stored_pixels(image: Image.Image) -> Array:
    """Return the pixels of an image as they are stored, in its own mode."""
    as_stored = _undo(image)
    return as_stored(np.asarray(image))


def decoder_versions() -> dict[str, str]:
    """Return the versions of the decoders that pixels depend on; "" for one that is not installed."""
    simplejpeg = find_simplejpeg()
    return {
        "pillow": PIL.__version__,
        "libjpeg": features.version("libjpeg_turbo") or features.version("jpg") or "",
        "simplejpeg": simplejpeg.__version__ if simplejpeg else "",
    }


def _undo(image: Image.Image) -> Callable[[Array], Array]:
    """Return what makes pixels that Pillow decodes the stored ones: it turns a TIFF, and nothing else, on its own."""
    if image.format != "TIFF":
        return lambda pixels: pixels
    turned = TURNS[orientation(image)]
    return lambda pixels: np.ascontiguousarray(turn_back(pixels, turned))


class _PillowLimit:
    """Lifts Pillow's limit of pixels, which is one for the process, while any thread is within."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._limit: int | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                Image.MAX_IMAGE_PIXELS = self._limit


_PILLOW_LIMIT: Final = _PillowLimit()


SCALES: Final = 8  # of libjpeg: an eighth of the size, two eighths, ...


def decode_jpeg(
    data: bytes, size: tuple[int, int], least: tuple[int, int] | None, is_grey: bool
) -> tuple[npt.NDArray[np.uint8], float] | None:
    """Return a JPEG's pixels, (height, width) if `is_grey`, else RGB (height, width, 3), and their scale.

    `size` is the file's (width, height), `least` the one that it must at least be decoded at; None is in full. Returns
    None where simplejpeg is not installed or finds anything odd, on which Pillow has to decide.
    """
    simplejpeg = find_simplejpeg()
    if simplejpeg is None:
        return None
    eighths = _eighths(size, least)
    width, height = (math.ceil(side * eighths / SCALES) for side in size)
    try:
        pixels = simplejpeg.decode_jpeg(data, "GRAY" if is_grey else "RGB", min_height=height, min_width=width)
    except ValueError:
        return None
    if pixels.shape[:2] != (height, width):
        return None
    return pixels[..., 0] if is_grey else pixels, eighths / SCALES


def _eighths(size: tuple[int, int], least: tuple[int, int] | None) -> int:
    """Return the smallest of libjpeg's scales, in eighths, at which an image has at least `least` (width, height)."""
    if least is None or max(size) < SCALES:  # so small that two scales can have the same size
        return SCALES
    fitting = (
        eighths
        for eighths in range(1, SCALES)
        if all(side * eighths >= wanted * SCALES for side, wanted in zip(size, least, strict=True))
    )
    return next(fitting, SCALES)


@functools.cache
def find_simplejpeg() -> Any:
    """Return simplejpeg, or None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def is_heif(data: bytes) -> bool:
    """Return whether bytes begin as a HEIF file whose images are HEVC does; AVIF, which Pillow reads, is none."""
    return data[4:8] == b"ftyp" and data[8:12] in _BRANDS and b"avif" not in data[8:48]


def register_heif(path: str, what: str = "") -> None:
    """Have Pillow read HEIF files. Raises SampleError, naming the library, where it is not installed."""
    try:
        _register()
    except ImportError as error:
        raise SampleError(path, f"{what}is a HEIC file: `pip install pillow-heif` to read it ({error})") from error


@functools.cache
def _register() -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()


class Turn(NamedTuple):
    """An EXIF orientation as what is done to the stored pixels: axes swapped first, then each perhaps flipped."""

    swap: bool = False
    flip_x: bool = False
    flip_y: bool = False


#: The turn from the stored to the displayed image by EXIF orientation.
TURNS: Final = {
    1: Turn(),
    2: Turn(flip_x=True),
    3: Turn(flip_x=True, flip_y=True),
    4: Turn(flip_y=True),
    5: Turn(swap=True),
    6: Turn(swap=True, flip_x=True),
    7: Turn(swap=True, flip_x=True, flip_y=True),
    8: Turn(swap=True, flip_y=True),
}


def turn(pixels: Array, by: Turn) -> Array:
    """Return pixels (height, width, …) turned: a view of them, not a copy."""
    turned = pixels.swapaxes(0, 1) if by.swap else pixels
    return turned[:: -1 if by.flip_y else 1, :: -1 if by.flip_x else 1]


def turn_back(pixels: Array, by: Turn) -> Array:
    """Return turned pixels (height, width, …) as they were stored: a view of them, not a copy."""
    flipped = turn(pixels, by._replace(swap=False))
    return flipped.swapaxes(0, 1) if by.swap else flipped


def turn_points(points: Array, by: Turn, stored: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Return where points x, y (n, 2) of a stored image (width, height) lie once it is turned: float64 (n, 2)."""
    swapped, size = (points[:, ::-1], stored[::-1]) if by.swap else (points, stored)
    return np.where(by[1:], np.subtract(size, swapped), swapped).astype(np.float64)
