"""Opens and decodes image files by Pillow. JPEGs are decoded by simplejpeg if it is installed and accepts them.

- frames: an animation, or a file with several pictures, is read as its first frame.
- size: an image with more pixels than the recipe's `max_pixels`, or else Pillow's limit (about 89 million), is refused.
  An image that Pillow cannot decode completely is refused, too, such as a file that was cut short.
- orientation: the EXIF tag has the orientation; without a readable tag, it is 1. Pixels are always returned in their
  stored orientation.
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
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import PIL
from PIL import BmpImagePlugin, Image, TiffImagePlugin, UnidentifiedImageError, features

from tpucache.errors import SampleError, TpucacheError
from tpucache.geometry import TURNS, turn_back
from tpucache.native import Array
from tpucache.recipe import Mode, Recipe
from tpucache.warmup.records.numbers import SEVERAL, Decoded, PixelsError
from tpucache.warmup.records.pillow_modes import bits_of, to_mode

_EXIF_ORIENTATION: Final = 0x0112
_TIFF_WIDTH: Final = 256
_TIFF_HEIGHT: Final = 257
_TIFF_PLANES: Final = 284
_TIFF_SAMPLE_FORMAT: Final = 339
_SEPARATE: Final = 2  # each channel is a plane of its own
_SIGNED: Final = 2
_JPEG2000_SIZE: Final = b"\xff\x4f\xff\x51"  # the marker before the size and the bits of each channel

_JPEGS: Final = ("JPEG", "MPO")
#: JPEG and TIFF are decoded late: a JPEG at a smaller scale, a TIFF after its orientation was read. Other formats are
#: decoded at once, because reading a PNG's metadata decodes it, and some formats state their true size and mode only
#: then. Pillow raises an error only at the first attempt to decode a file. A second attempt returns the part that was
#: decoded before, with black for the rest.
_DECODED_LATER: Final = (*_JPEGS, "TIFF")
_OF_FRAMES: Final = ("GIF", "TIFF", "WEBP", "PNG", "AVIF")
SCALES: Final = 8  # libjpeg decodes at 1/8, 2/8, ... 8/8 of the size
_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


@contextmanager
def opened(data: bytes, path: str, what: str = "", max_pixels: int | None = None) -> Iterator[Image.Image]:
    """Open an image and yield it, decoded unless it is a JPEG or TIFF."""
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
                _refuse_misread(image, data)
                if image.format not in _DECODED_LATER:
                    image.load()
                yield image
    except TpucacheError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise SampleError(path, f"{what}too many pixels: {error}; --max-pixels sets another limit") from error
    except PixelsError as error:
        raise SampleError(path, f"{what}{error}") from error
    except UnidentifiedImageError as error:
        raise SampleError(path, f"{what}not an image Pillow can identify") from error
    except Exception as error:  # Pillow's plugins raise anything for a broken file
        raise SampleError(path, f"{what}does not decode: {type(error).__name__}: {error}") from error


class PillowImage:
    """An image file that `opened` yielded."""

    def __init__(self, image: Image.Image, data: bytes) -> None:
        self._image, self._data = image, data
        self.size, self.orientation = stored_size(image), orientation(image, data)
        self.kind = f"{image.format} {image.mode}" + (SEVERAL if has_several_frames(image, data) else "")

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        return decode(self._image, self._data, least, recipe.white_level, recipe.mode)


def has_several_frames(image: Image.Image, data: bytes) -> bool:
    """Return whether a file is an animation or has several pages, which is known without decoding them."""
    if image.format not in _OF_FRAMES:
        return False
    if image.format != "GIF":
        return bool(getattr(image, "is_animated", False))
    try:  # Pillow looks for the second frame, and would have to decode the first one again
        with Image.open(io.BytesIO(data)) as copy:
            return bool(getattr(copy, "is_animated", False))
    except Exception:  # noqa: BLE001  # Pillow's plugins raise anything for a broken file
        return False


def stored_size(image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) of an image in stored orientation."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # its `size` is that of the turned image
        return int(image.tag_v2[_TIFF_WIDTH]), int(image.tag_v2[_TIFF_HEIGHT])
    return image.size


def orientation(image: Image.Image, data: bytes) -> int:
    """Return the EXIF orientation, 1 to 8, of an image that `opened` yielded for `data`; 1 if it cannot be read."""
    try:
        with Image.open(io.BytesIO(data)) if image.format == "TIFF" else nullcontext(image) as found:
            value = found.getexif().get(_EXIF_ORIENTATION, 1)
            return int(value) if value in TURNS else 1
    except Exception:  # noqa: BLE001  # Pillow's plugins raise anything for a broken file
        return 1


def decode(
    image: Image.Image,
    data: bytes,
    least: tuple[int, int] | None = None,
    white: int | None = None,
    mode: Mode = "rgb",
) -> Decoded:
    """Return the pixels of `image`, which `opened` yielded for the file content `data`, in a recipe's `mode`."""
    if image.format in _JPEGS and image.mode in ("L", "RGB"):
        decoded = decode_jpeg(data, image.size, least, is_grey=image.mode == "L" or mode == "grey")
        if decoded is not None:
            return Decoded(*decoded)
    width = image.width
    # For grey, take the luma that a JPEG stores, as simplejpeg does.
    luma = "L" if mode == "grey" and image.mode == "RGB" else None
    # Use `draft` only for JPEGs: for a HEIF it returns the thumbnail, which may be another picture.
    drafted = image.draft(luma, least) if (least or luma) and image.format in _JPEGS else None
    as_stored = _undo(image, data)
    image.load()
    pixels = to_mode(image, data, mode, white)
    return Decoded(as_stored(pixels), 1.0 if drafted is None else drafted[1][2] / width)


def decode_jpeg(
    data: bytes, size: tuple[int, int], least: tuple[int, int] | None, is_grey: bool
) -> tuple[npt.NDArray[np.uint8], float] | None:
    """Return a JPEG's pixels, (height, width) if `is_grey`, else RGB (height, width, 3), and the scale, 1/8 to 1."""
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
    if least is None or max(size) < SCALES:  # in tiny images, two scales may have the same size
        return SCALES
    fitting = (
        eighths
        for eighths in range(1, SCALES)
        if all(side * eighths >= wanted * SCALES for side, wanted in zip(size, least, strict=True))
    )
    return next(fitting, SCALES)


@functools.cache
def find_simplejpeg() -> Any:
    """Return the module simplejpeg, or None if it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def stored_pixels(image: Image.Image, data: bytes, mode: str | None = None) -> Array:
    """Return the pixels, in stored orientation, of an image that `opened` yielded for `data`."""
    as_stored = _undo(image, data)
    image.load()
    return as_stored(np.asarray(image if mode in (None, image.mode) else image.convert(mode)))


def _undo(image: Image.Image, data: bytes) -> Callable[[Array], Array]:
    if image.format != "TIFF":
        return lambda pixels: pixels
    turned = TURNS[orientation(image, data)]
    return lambda pixels: np.ascontiguousarray(turn_back(pixels, turned))


def check_size(size: tuple[int, int], path: str, what: str, max_pixels: int | None) -> None:
    """Raise SampleError when an image of this (width, height) has more pixels than `max_pixels`; None: no limit."""
    if max_pixels is not None and size[0] * size[1] > max_pixels:
        raise SampleError(path, f"{what}too many pixels: {size[0]} x {size[1]} are more than --max-pixels {max_pixels}")


def _refuse_misread(image: Image.Image, data: bytes) -> None:
    if isinstance(image, BmpImagePlugin.BmpImageFile):
        bits, is_packed = _bits_of_bmp(data, image.format), image.tile[0][0] == "raw"
        if image.mode == "1" and bits != 1:
            raise PixelsError("Pillow reads a black and white BMP of 4 or 8 bits as 1 bit: save it as a PNG")
        if image.mode == "L" and bits != 8 and is_packed:  # Pillow reads RLE right
            raise PixelsError("Pillow reads a BMP of 4 bits with a palette of greys as 8 bits: save it as a PNG")
    if image.format == "JPEG2000" and image.mode not in ("L", "I;16") and _bits_of_jpeg2000(data) > 8:
        raise PixelsError(
            "Pillow reads white as black in a JPEG 2000 with colours of more than 8 bits: save it as a PNG"
        )
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return
    bits = bits_of(image, data)
    if bits == 8 and _SIGNED in image.tag_v2.get(_TIFF_SAMPLE_FORMAT, ()):
        raise PixelsError("Pillow reads its signed numbers of 8 bits as unsigned: save them as 16 bits")
    if bits == 16 and image.tag_v2.get(_TIFF_PLANES, 1) == _SEPARATE and image.tile[0][0] == "raw":
        raise PixelsError("Pillow misreads colours of 16 bits that are stored plane by plane: save it as a PNG")


def _bits_of_jpeg2000(data: bytes) -> int:
    start = data.find(_JPEG2000_SIZE)
    count = int.from_bytes(data[start + 40 : start + 42], "big")
    channels = data[start + 42 : start + 42 + 3 * count : 3]
    if start < 0 or not channels:
        raise PixelsError("this JPEG 2000 has no marker SIZ, which states its bits: the file is damaged. Copy it again")
    return max((bits & 0x7F) + 1 for bits in channels)


def _bits_of_bmp(data: bytes, file_format: str | None) -> int:
    start = 0 if file_format == "DIB" else 14  # a DIB lacks the header of the file
    (length,) = struct.unpack_from("<I", data, start)
    (bits,) = struct.unpack_from("<H", data, start + (10 if length == 12 else 14))
    return int(bits)


def is_heif(data: bytes) -> bool:
    """Return whether `data` begins as a HEIF file with HEVC images; False for AVIF, which Pillow reads itself."""
    return data[4:8] == b"ftyp" and data[8:12] in _BRANDS and b"avif" not in data[8:48]


def register_heif(path: str, what: str = "") -> None:
    try:
        _register()
    except Exception as error:
        raise SampleError(path, f"{what}is a HEIC file: `pip install pillow-heif` to read it ({error})") from error


@functools.cache
def _register() -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()


class _PillowLimit:
    """Lifts Pillow's limit of pixels, a global variable, while any thread is in the `with` block."""

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


def decoder_versions() -> dict[str, str]:
    """Return the versions of the decoders that pixels depend on, by name; "" for one that is not installed."""
    simplejpeg = find_simplejpeg()
    return {
        "pillow": PIL.__version__,
        "libjpeg": features.version("libjpeg_turbo") or features.version("jpg") or "",
        "simplejpeg": simplejpeg.__version__ if simplejpeg else "",
    }
