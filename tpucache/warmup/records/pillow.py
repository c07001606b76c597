"""Opens image files by Pillow.

- frames: an animation, or a file with several pictures, is read as its first frame.
- size: an image with more pixels than the recipe's `max_pixels`, or else Pillow's limit (about 89 million), is refused,
  and so is one that cannot be decoded completely.
- orientation: that of the EXIF tag, or 1 without a readable tag. Pixels always have their stored orientation.
"""

from __future__ import annotations

import functools
import io
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from tpucache.errors import TpucacheError
from tpucache.geometry import TURNS, turn_back
from tpucache.native import Array
from tpucache.warmup.records import refusal
from tpucache.warmup.records.numbers import SEVERAL

JPEGS: Final = ("JPEG", "MPO")
#: JPEG and TIFF are decoded late: a JPEG at a smaller scale, a TIFF after its orientation was read. Other formats are
#: decoded at once, because reading a PNG's metadata decodes it, and some formats state their true size and mode only
#: then. Pillow raises an error only at the first attempt to decode a file. A second attempt returns the part that was
#: decoded before, with black for the rest.
_DECODED_LATER: Final = (*JPEGS, "TIFF")
_OF_FRAMES: Final = ("GIF", "TIFF", "WEBP", "PNG", "AVIF")
_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_EXIF_ORIENTATION: Final = 0x0112
_PNG_BITS_AT: Final = 24
_JPEG2000_SIZE: Final = b"\xff\x4f\xff\x51"  # the marker before the size and the bits of each channel
_TIFF_WIDTH: Final = 256
_TIFF_HEIGHT: Final = 257
_TIFF_BITS: Final = 258
_TIFF_PHOTOMETRIC: Final = 262
_TIFF_PLANES: Final = 284
_TIFF_SAMPLE_FORMAT: Final = 339
_WHITE_IS_ZERO: Final = 0
_SEPARATE: Final = 2  # each channel is a plane of its own
_SIGNED: Final = 2


class PillowImage:
    """A file that Pillow has opened: `image`, its content `data`, and a TIFF's `tags` by number."""

    def __init__(self, image: ImageFile.ImageFile, data: bytes) -> None:
        self.image, self.data = image, data
        self.tags: Any = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}

    @property
    def size(self) -> tuple[int, int]:
        """The (width, height) as stored; Pillow states that of a turned TIFF."""
        width, height = self.image.size
        return int(self.tags.get(_TIFF_WIDTH, width)), int(self.tags.get(_TIFF_HEIGHT, height))

    @functools.cached_property
    def orientation(self) -> int:
        """The EXIF orientation, 1 to 8; 1 if it cannot be read."""
        try:
            with self._copy_of("TIFF") as image:
                value = image.getexif().get(_EXIF_ORIENTATION, 1)
                return int(value) if value in TURNS else 1
        except Exception:  # noqa: BLE001  # Pillow's plugins raise anything for a broken file
            return 1

    @property
    def kind(self) -> str:
        """The file format and mode, such as `JPEG RGB`, and whether there are several frames."""
        return f"{self.image.format} {self.image.mode}" + (SEVERAL if self.has_several_frames else "")

    @property
    def has_several_frames(self) -> bool:
        """Whether the file is an animation or has several pages."""
        if self.image.format not in _OF_FRAMES:
            return False
        try:
            with self._copy_of("GIF") as image:
                return bool(getattr(image, "is_animated", False))
        except Exception:  # noqa: BLE001  # Pillow's plugins raise anything for a broken file
            return False

    @property
    def bits(self) -> int:
        """How many bits a channel has in a PNG or TIFF; 8 for other formats."""
        if self.image.format == "PNG":
            return self.data[_PNG_BITS_AT]
        return int(max(self.tags.get(_TIFF_BITS, (1,)))) if self.tags else 8

    @property
    def is_signed(self) -> bool:
        """Whether a TIFF says that its numbers are signed."""
        return _SIGNED in self.tags.get(_TIFF_SAMPLE_FORMAT, ())

    @property
    def is_white_zero(self) -> bool:
        """Whether 0 is white in a TIFF of grey."""
        return bool(self.tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO)

    def pixels(self, mode: str) -> Array:
        """Return the pixels in one of Pillow's modes and in stored orientation."""
        self.image.load()
        return self.as_stored(np.asarray(self.image.convert(mode)))

    def as_stored(self, pixels: Array) -> Array:
        """Return decoded pixels in stored orientation: Pillow turns a TIFF."""
        if self.image.format != "TIFF":
            return pixels
        return np.ascontiguousarray(turn_back(pixels, TURNS[self.orientation]))

    def _copy_of(self, file_format: str) -> AbstractContextManager[ImageFile.ImageFile]:
        """Return the image, opened anew if it has this format.

        To look for a GIF's second frame, Pillow leaves the first one. Once a TIFF's metadata could not be read, it
        would no longer refuse the file.
        """
        return Image.open(io.BytesIO(self.data)) if self.image.format == file_format else nullcontext(self.image)


@contextmanager
def opened(data: bytes, max_pixels: int | None = None) -> Iterator[PillowImage]:
    """Open an image and yield it, decoded unless it is a JPEG or TIFF."""
    if not data:
        raise refusal("the file is empty")
    if is_heif(data):
        _register_heif()
    try:
        with warnings.catch_warnings(), nullcontext() if max_pixels is None else _PILLOW_LIMIT:
            warnings.simplefilter("ignore")  # Pillow warns of odd but readable files
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                check_size(image.size, max_pixels)
                file = PillowImage(image, data)
                _refuse_misread(file)
                if image.format not in _DECODED_LATER:
                    image.load()
                yield file
    except TpucacheError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise refusal(f"too many pixels: {error}; --max-pixels sets another limit") from error
    except UnidentifiedImageError as error:
        raise refusal("not an image Pillow can identify") from error
    except Exception as error:  # Pillow's plugins raise anything for a broken file
        raise refusal(f"does not decode: {type(error).__name__}: {error}") from error


def check_size(size: tuple[int, int], max_pixels: int | None) -> None:
    """Raise SampleError if an image has more pixels than `max_pixels`; None: no limit."""
    if max_pixels is not None and size[0] * size[1] > max_pixels:
        raise refusal(f"too many pixels: {size[0]} x {size[1]} are more than --max-pixels {max_pixels}")


def _refuse_misread(file: PillowImage) -> None:
    image = file.image
    if image.format in ("BMP", "DIB"):
        bits = _bits_of_bmp(file.data, image.format)
        if image.mode == "1" and bits != 1:
            raise refusal("Pillow reads a black and white BMP of 4 or 8 bits as 1 bit: save it as a PNG")
        if image.mode == "L" and bits != 8 and image.tile[0][0] == "raw":  # Pillow reads RLE right
            raise refusal("Pillow reads a BMP of 4 bits with a palette of greys as 8 bits: save it as a PNG")
    if image.format == "JPEG2000" and image.mode not in ("L", "I;16") and _bits_of_jpeg2000(file.data) > 8:
        raise refusal("Pillow reads white as black in a JPEG 2000 with colours of more than 8 bits: save it as a PNG")
    if file.is_signed and file.bits == 8:
        raise refusal("Pillow reads its signed numbers of 8 bits as unsigned: save them as 16 bits")
    if file.tags.get(_TIFF_PLANES) == _SEPARATE and file.bits == 16 and image.tile[0][0] == "raw":
        raise refusal("Pillow misreads colours of 16 bits that are stored plane by plane: save it as a PNG")


def _bits_of_jpeg2000(data: bytes) -> int:
    start = data.find(_JPEG2000_SIZE)
    count = int.from_bytes(data[start + 40 : start + 42], "big")
    channels = data[start + 42 : start + 42 + 3 * count : 3]
    if start < 0 or not channels:
        raise refusal("this JPEG 2000 has no marker SIZ, which states its bits: the file is damaged. Copy it again")
    return max((bits & 0x7F) + 1 for bits in channels)


def _bits_of_bmp(data: bytes, file_format: str) -> int:
    start = 0 if file_format == "DIB" else 14  # a DIB lacks the header of the file
    (length,) = struct.unpack_from("<I", data, start)
    (bits,) = struct.unpack_from("<H", data, start + (10 if length == 12 else 14))
    return int(bits)


def is_heif(data: bytes) -> bool:
    """Return whether a file is a HEIF with HEVC images; Pillow reads AVIF itself."""
    return data[4:8] == b"ftyp" and data[8:12] in _BRANDS and b"avif" not in data[8:48]


def _register_heif() -> None:
    try:
        import pillow_heif

        pillow_heif.register_heif_opener()
    except Exception as error:
        raise refusal(f"is a HEIC file: `pip install pillow-heif` to read it ({error})") from error


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
