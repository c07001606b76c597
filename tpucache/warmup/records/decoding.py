"""Encoded bytes, or numbers as they are stored, -> the pixels of an image in the recipe's mode.

This is the whole policy on what files mean:

- first frame: of an animation, or of several pictures in a file, the first is taken.
- size: more pixels than the recipe's `max_pixels`, or else Pillow's limit (about 89 million), are refused; so is
  whatever Pillow would not decode in full, such as a file cut short.
- colours: alpha is laid over white; palette, grey and CMYK become RGB; embedded colour profiles are not applied.
- depth: grey of 16 and 32 bits is scaled by 1/257 from 0..65535, float grey from 0..1, or either from 0 to a stated
  white level. Refused where the numbers do not show that this is their range: a file says how many bits its numbers
  have, but not how many of them are in use. Cameras and scanners write 12 or 14 bits into 16, and scaled by a wrong
  range such an image turns black or white.
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
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, TiffImagePlugin, UnidentifiedImageError, features

from tpucache.errors import DependencyError, SampleError
from tpucache.recipe import Mode, Recipe
from tpucache.types import Array

#: What the numbers of an image may be that is kept as it is.
KEPT_DTYPES: Final = ("|u1", "<u2", "<i2", "<f4")
MOST_CHANNELS: Final = 16
_NPY: Final = b"\x93NUMPY"
#: How many channels pictures usually have: of two dimensions that could be the channels, the one of such a length is.
_USUAL: Final = (1, 2, 3, 4)

#: Modes of Pillow with an alpha channel.
ALPHA_MODES: Final = ("RGBA", "LA", "PA", "La", "RGBa")
#: What modes become that are no plain channels.
_PLAIN_MODES: Final = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB"}
_TIFF_PHOTOMETRIC: Final = 262
_TIFF_SAMPLE_FORMAT: Final = 339
_WHITE_IS_ZERO: Final = 0
_SIGNED: Final = 2

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

_JPEGS: Final = ("JPEG", "MPO")
#: JPEGs may be decoded at a smaller scale, and a TIFF is turned once it is decoded. Others are decoded first, because
#: asking a PNG for its metadata decodes it, and some formats state their true size and mode only then. Pillow raises an
#: error once: a second attempt returns what was decoded until then, with black for the rest.
_DECODED_LATER: Final = (*_JPEGS, "TIFF")

SCALES: Final = 8  # of libjpeg: an eighth of the size, two eighths, ...

_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

_MAGIC_AT: Final = 128
_INVERTED: Final = "MONOCHROME1"
_RGB: Final = "RGB"


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
    """Return colours of 16 bits, of which Pillow has the high bytes: OpenCV reads all of them.

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


def _bits_of_bmp(data: bytes) -> int:
    """Return the bits of a pixel by a BMP's header, which has one of two forms."""
    (length,) = struct.unpack_from("<I", data, 14)
    (bits,) = struct.unpack_from("<H", data, 24 if length == 12 else 28)
    return int(bits)


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


class Decoded(NamedTuple):
    """Pixels as stored, (height, width) or (height, width, channels), and how many there are for one stored."""

    pixels: Array
    scale: float


@contextmanager
def _as_broken() -> Iterator[None]:
    """Raise OSError, as for a broken image, for what none of Pillow's plugins is known to raise."""
    try:
        yield
    except (*_BROKEN, Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def opened(data: bytes, path: str, what: str = "", max_pixels: int | None = None) -> Iterator[Image.Image]:
    """Yield an image, of which only a JPEG or TIFF is not decoded yet; what Pillow raises on it becomes a SampleError.

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
            with _as_broken():
                image = Image.open(io.BytesIO(data))
            with image:
                check_size(image.size, path, what, max_pixels)
                if image.format == "BMP" and image.mode == "1" and _bits_of_bmp(data) != 1:
                    raise PixelsError("Pillow takes a BMP of 4 or 8 bits in black and white for 1 bit: save it as PNG")
                if image.format not in _DECODED_LATER:
                    with _as_broken():
                        image.load()
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
    if image.format in _JPEGS and image.mode in ("L", "RGB"):
        decoded = decode_jpeg(data, image.size, least, is_grey=image.mode == "L" or mode == "grey")
        if decoded is not None:
            return Decoded(*decoded)
    width = image.width
    # A JPEG's own luma, as simplejpeg gives it.
    luma = "L" if mode == "grey" and image.mode == "RGB" else None
    # No other format is drafted: a HEIF would give its thumbnail, which may be another picture.
    drafted = image.draft(luma, least) if (least or luma) and image.format in _JPEGS else None
    as_stored = _undo(image, data)
    image.load()
    pixels = to_mode(image, data, mode, white)
    return Decoded(as_stored(pixels), 1.0 if drafted is None else drafted[1][2] / width)


def orientation(image: Image.Image, data: bytes) -> int:
    """Return the EXIF orientation, 1 to 8, of what `opened` yielded for `data`; 1 where it has none that can be read.

    A TIFF that was asked for its metadata would no longer be refused for them when it is decoded, so another copy of it
    is asked.
    """
    try:
        if image.format != "TIFF":
            return _asked_orientation(image)
        with Image.open(io.BytesIO(data)) as copy:
            return _asked_orientation(copy)
    except _BROKEN:
        return 1


def _asked_orientation(image: Image.Image) -> int:
    value = image.getexif().get(_EXIF_ORIENTATION, 1)
    return int(value) if value in TURNS else 1


def stored_size(image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) that an image is stored with."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # its `size` is as displayed
        return int(image.tag_v2[_TIFF_WIDTH]), int(image.tag_v2[_TIFF_HEIGHT])
    return image.size


def stored_pixels(image: Image.Image, data: bytes, mode: str | None = None) -> Array:
    """Return the pixels of what `opened` yielded for `data`, as they are stored, in a mode of Pillow or in its own."""
    as_stored = _undo(image, data)
    image.load()
    return as_stored(np.asarray(image if mode in (None, image.mode) else image.convert(mode)))


def decoder_versions() -> dict[str, str]:
    """Return the versions of the decoders that pixels depend on; "" for one that is not installed."""
    simplejpeg = find_simplejpeg()
    return {
        "pillow": PIL.__version__,
        "libjpeg": features.version("libjpeg_turbo") or features.version("jpg") or "",
        "simplejpeg": simplejpeg.__version__ if simplejpeg else "",
    }


def _undo(image: Image.Image, data: bytes) -> Callable[[Array], Array]:
    """Return what makes pixels that Pillow decodes the stored ones: it turns a TIFF, and nothing else, on its own."""
    if image.format != "TIFF":
        return lambda pixels: pixels
    turned = TURNS[orientation(image, data)]
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


class Picture(Protocol):
    """An image whose pixels may still be undecoded."""

    @property
    def size(self) -> tuple[int, int]:
        """The (width, height) that it is stored with."""
        ...

    @property
    def kind(self) -> str:
        """What it is stored as, such as `JPEG RGB` or `array uint8`."""
        ...

    @property
    def orientation(self) -> int:
        """The EXIF orientation, 1 to 8."""
        ...

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        """Return its pixels, as they are stored, in the recipe's mode: at least `least` (width, height) of them."""
        ...


@contextmanager
def open_picture(data: bytes | Array, recipe: Recipe, path: str) -> Iterator[Picture]:
    """Yield the picture that an encoded image, an .npy or DICOM file, or an array is.

    `path` names the sample in errors. Raises SampleError, also for what is found while it is decoded within.
    """
    if isinstance(data, np.ndarray):
        yield _ArrayPicture(data, path)
    elif is_npy(data):
        yield _ArrayPicture(read_npy(data, path), path)
    elif is_dicom(data):
        picture = DicomPicture(data, path)
        check_size(picture.size, path, "", recipe.max_pixels or Image.MAX_IMAGE_PIXELS)
        yield picture
    else:
        with opened(data, path, max_pixels=recipe.max_pixels) as image:
            yield _FilePicture(image, data)


class _FilePicture:
    """A file that Pillow opened."""

    def __init__(self, image: Image.Image, data: bytes) -> None:
        self._image, self._data = image, data
        self.size, self.orientation = stored_size(image), orientation(image, data)
        self.kind = f"{image.format} {image.mode}"

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        return decode(self._image, self._data, least, recipe.white_level, recipe.mode)


class _ArrayPicture:
    """An array, which is as it is displayed."""

    orientation = 1

    def __init__(self, array: Array, path: str) -> None:
        self._array, self._path = array, path
        self.size = with_channels_last(array, path).shape[1::-1]
        self.kind = f"array {array.dtype}"

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        return Decoded(to_pixels(self._array, recipe.mode, recipe.white_level, self._path), 1.0)


def is_dicom(data: bytes) -> bool:
    """Return whether bytes begin as a DICOM file does."""
    return data[_MAGIC_AT : _MAGIC_AT + 4] == b"DICM"


class DicomPicture:
    """A DICOM file whose header is read.

    For rgb and grey, stored numbers are rescaled (slope and intercept), then go through the file's VOI LUT or its first
    window (PS3.3, C.11.2). Without either, the range that its bits can have is shown, where nothing was rescaled. For
    keep, they are the stored numbers, or float32 where the file rescales them. MONOCHROME1 is inverted in both. Of
    several frames the first is taken.
    """

    kind = "DICOM"
    orientation = 1

    def __init__(self, data: bytes, path: str) -> None:
        """Read the header. Raises SampleError for a broken file and, naming the library, where pydicom is missing."""
        self._path = path
        try:
            import pydicom
        except ImportError as error:
            raise SampleError(path, f"is a DICOM file: `pip install pydicom` to read it ({error})") from error
        with _refusing(path):
            self._file: Any = pydicom.dcmread(io.BytesIO(data))
            self.size = (int(self._file.Columns), int(self._file.Rows))

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        """Return the pixels of the first frame in the recipe's mode."""
        with _refusing(self._path):
            numbers = self._numbers()
            if numbers.ndim == 2:
                numbers = self._kept(numbers) if recipe.mode == "keep" else self._shown(numbers, recipe.white_level)
        return Decoded(to_pixels(numbers, recipe.mode, None, self._path), 1.0)

    def _numbers(self) -> Array:
        """Return the stored numbers (height, width), or uint8 RGB (height, width, 3)."""
        from pydicom import pixels

        file = self._file
        numbers: Array = np.asarray(pixels.pixel_array(file, index=0))
        if numbers.ndim == 3 and str(file.PhotometricInterpretation).startswith("YBR"):
            numbers = pixels.convert_color_space(numbers, file.PhotometricInterpretation, _RGB)
        if numbers.shape[:2] != self.size[::-1]:
            raise ValueError(f"{numbers.shape} pixels, and the header says {self.size[1]} x {self.size[0]}")
        return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)

    @property
    def _range(self) -> tuple[int, int]:
        """The least and the largest number that the stored bits can be."""
        bits = int(self._file.BitsStored)
        return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if self._file.PixelRepresentation else (0, (1 << bits) - 1)

    @property
    def _rescaling(self) -> tuple[float, float]:
        return float(self._file.get("RescaleSlope", 1)), float(self._file.get("RescaleIntercept", 0))

    @property
    def _is_inverted(self) -> bool:
        return str(self._file.PhotometricInterpretation) == _INVERTED

    def _kept(self, numbers: Array) -> Array:
        """Return the numbers in their own depth, or rescaled as float32; dark is low."""
        low, high = self._range
        if self._is_inverted:
            numbers = (low + high - numbers.astype(np.int64)).astype(numbers.dtype)
        if self._rescaling == (1, 0):
            return numbers
        slope, intercept = self._rescaling
        return (numbers.astype(np.float64) * slope + intercept).astype(np.float32)

    def _shown(self, numbers: Array, white: int | None) -> npt.NDArray[np.uint8]:
        """Return the numbers as they are displayed: 0 is black, 255 white."""
        shares = self._shares(numbers, white)
        if self._is_inverted:
            shares = 1 - shares
        return np.asarray(np.rint(shares.clip(0, 1) * 255), np.uint8)

    def _shares(self, numbers: Array, white: int | None) -> npt.NDArray[np.float64]:
        """Return how white each number is, 0 to 1."""
        from pydicom import pixels

        slope, intercept = self._rescaling
        file, values = self._file, numbers.astype(np.float64) * slope + intercept
        if white is not None:
            return values / white
        if "VOILUTSequence" in file:
            bits = int(file.VOILUTSequence[0].LUTDescriptor[2])
            looked_up = pixels.apply_voi_lut(np.rint(values).astype(np.int64), file, prefer_lut=True)
            return np.asarray(looked_up, np.float64) / ((1 << bits) - 1)
        if file.get("WindowWidth") is not None and file.get("WindowCenter") is not None:
            function = str(file.get("VOILUTFunction") or "LINEAR").upper()
            return _window(values, _first(file.WindowCenter), _first(file.WindowWidth), function)
        if (slope, intercept) != (1, 0):
            raise ValueError("it has no window: state which number is white by --white-level, or use --mode keep")
        low, high = self._range
        return (values - low) / (high - low)


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Raise SampleError for whatever pydicom and its decoders raise; files that they only warn of are read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SampleError:
        raise
    except Exception as error:  # a decoder that pydicom found raises anything
        reason = " ".join(str(error).split())
        raise SampleError(path, f"does not decode as DICOM: {type(error).__name__}: {reason}") from error


def _first(value: Any) -> float:
    """Return a number, or the first of several windows'."""
    return float(value[0] if isinstance(value, (list, tuple)) or hasattr(value, "insert") else value)


def _window(values: npt.NDArray[np.float64], centre: float, width: float, function: str) -> npt.NDArray[np.float64]:
    """Return numbers through a window, 0 to 1: PS3.3, C.11.2.1.2 and C.11.2.1.3."""
    if function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(-4 * (values - centre) / width)))
    if function == "LINEAR":
        return np.asarray(((values - (centre - 0.5)) / max(width - 1, 1e-6) + 0.5).clip(0, 1))
    return np.asarray(((values - centre) / width + 0.5).clip(0, 1))
