"""Codecs for image files: png (lossless, a third smaller than raw, slow) and jpeg (smaller, lossy)."""

from __future__ import annotations

import functools
import io
import logging
import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.errors import DependencyError
from tpucache.native import Array
from tpucache.store.codecs.codec import Codec, check_picture

if TYPE_CHECKING:
    from tpucache.store.fields import Field

_MODES: Final = {1: "L", 3: "RGB"}  # Pillow's names by channels

_DEFAULT_LEVEL: Final = 6
_PNG_BEGINNING: Final = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_HEADER: Final = struct.Struct(">IIBBBBB")  # width, height, depth, colours, compression, filter, interlace
_CHUNK: Final = struct.Struct(">I4s")  # length, name
_CHECKSUM: Final = 4
_FIRST_CHUNK: Final = len(_PNG_BEGINNING) + _HEADER.size + _CHECKSUM
_CHANNELS: Final = {0: 1, 2: 3}
_PARTS: Final = (b"IDAT", b"IEND")

_DEFAULT_QUALITY: Final = 95
_JPEG_BEGINNING: Final = b"\xff\xd8"
_JPEG_SEGMENT: Final = struct.Struct(">BBH")  # 0xff, the kind, the length from here on
_JPEG_SIZE: Final = struct.Struct(">BHHB")  # depth, height, width, channels
_MARK, _FRAME, _SCAN = 0xFF, 0xC0, 0xDA
#: The allowed segments: JFIF, Adobe, comments, tables, a baseline frame and its scans. No profile, Exif, progression.
_SEGMENTS: Final = frozenset((0xE0, 0xEE, 0xFE, 0xDB, 0xC4, 0xDD, _FRAME, _SCAN))

_log: Final = logging.getLogger("tpucache")


class PictureCodec(Codec):
    """Stores an image, uint8 (height, width, 1 or 3), as an image file. Pillow writes the file, and can read it."""

    is_for_images = True
    mask_codec = "png"

    def check(self, field: Field) -> None:
        check_picture(self.name, field)

    def _encode(self, field: Field, array: Array, quality: int | None) -> bytes:
        from PIL import Image

        target = io.BytesIO()
        with self._calling_library():
            image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
            image.save(target, self.name.upper(), **self._save_options(quality))
        return target.getvalue()

    @abstractmethod
    def _save_options(self, quality: int | None) -> dict[str, Any]:
        pass

    def _decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        self._check_file(field, data)
        out[...] = self._opened(field, data, _MODES[field.shape[2]]).reshape(field.shape)

    def _opened(self, field: Field, data: memoryview, mode: str) -> Array:
        """Decode a file, which `_check_file` has accepted, by Pillow, and return pixels in Pillow's `mode`, such as
        "RGB".
        """
        try:
            from PIL import Image
        except ImportError as error:
            raise DependencyError(
                f"field {field.name!r} is stored as {field.codec}: `pip install pillow` to read it"
            ) from error
        Image.preinit()
        try:
            # Not Image.open, which warns of large images and tries several formats.
            with Image.OPEN[self.name.upper()][0](io.BytesIO(data), "") as image:
                image.draft(mode, None)
                if image.mode != mode:
                    raise ValueError(f"pixels of the mode {image.mode}, not {mode}")
                return np.asarray(image)
        except Exception as error:  # Pillow raises whatever it raises for a broken file
            raise ValueError(str(error) or type(error).__name__) from error

    @abstractmethod
    def _check_file(self, field: Field, data: memoryview) -> None:
        """Raise ValueError unless the file's header has the field's shape, and the file has no unexpected metadata."""


def check_header(field: Field, height: int, width: int, channels: int) -> None:
    if (height, width, channels) != field.shape:
        raise ValueError(f"an image of {(height, width, channels)}, not of {field.shape}")


class Png(PictureCodec):
    name = "png"
    quality_range = (0, 9)
    typical_ratio = 0.65

    def _check_file(self, field: Field, data: memoryview) -> None:
        if bytes(data[:16]) != _PNG_BEGINNING or len(data) < _FIRST_CHUNK:
            raise ValueError("no header of a PNG file")
        width, height, depth, colours, *ways = _HEADER.unpack_from(data, len(_PNG_BEGINNING))
        if depth != 8 or colours not in _CHANNELS or any(ways):
            raise ValueError(f"{depth} bits a channel with PNG settings {colours, *ways} that tpucache does not write")
        check_header(field, height, width, _CHANNELS[colours])
        at = _FIRST_CHUNK
        while at < len(data):
            length, name = _CHUNK.unpack_from(data, at) if at + _CHUNK.size <= len(data) else (0, b"")
            if name not in _PARTS:
                raise ValueError(f"a chunk {name!r} that tpucache does not write")
            at += length + _CHUNK.size + _CHECKSUM

    def _save_options(self, quality: int | None) -> dict[str, Any]:
        return {"compress_level": _DEFAULT_LEVEL if quality is None else quality}


class Jpeg(PictureCodec):
    """A JPEG file, written by Pillow and read by simplejpeg, or by Pillow if simplejpeg is not installed."""

    name = "jpeg"
    quality_range = (1, 100)
    typical_ratio = 0.25
    has_luma = True

    def largest_bytes(self, field: Field) -> int:
        blocks = math.prod(-(-side // 16) * 16 for side in field.shape[:2]) * field.shape[2]
        return 4 * blocks + super().largest_bytes(field)

    def _save_options(self, quality: int | None) -> dict[str, Any]:
        # Huffman tables for the one image make it 4 % smaller and 5 % faster to decode, with the same pixels.
        return {"quality": quality or _DEFAULT_QUALITY, "optimize": True}

    def _check_file(self, field: Field, data: memoryview) -> None:
        check_header(field, *_header_of(data))

    def _decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        self._decode(field, data, out, _MODES[field.shape[2]])

    def _decode_luma(self, field: Field, records: Sequence[memoryview], out: Array) -> None:
        for data, luma in zip(records, out, strict=True):
            self._decode(field, data, luma[..., None], "L")

    def _decode(self, field: Field, data: memoryview, out: Array, mode: str) -> None:
        simplejpeg = _simplejpeg()
        self._check_file(field, data)
        if simplejpeg is None:
            out[...] = self._opened(field, data, mode).reshape(out.shape)
            return
        found = simplejpeg.decode_jpeg(data, "GRAY" if mode == "L" else mode, buffer=out).shape
        if found != out.shape:
            raise ValueError(f"an image of {found}, not of {out.shape}")


def _header_of(data: memoryview) -> tuple[int, int, int]:
    """Return height, width and channels of a JPEG file."""
    if bytes(data[:2]) != _JPEG_BEGINNING:
        raise ValueError("no header of a JPEG file")
    at, shape = len(_JPEG_BEGINNING), None
    while at + _JPEG_SEGMENT.size <= len(data):
        mark, kind, length = _JPEG_SEGMENT.unpack_from(data, at)
        if mark != _MARK or kind not in _SEGMENTS:
            raise ValueError(f"a segment {mark:02x}{kind:02x} that tpucache does not write")
        if kind == _SCAN and shape is not None:
            return shape
        if kind == _FRAME:
            if shape is not None or at + _JPEG_SEGMENT.size + _JPEG_SIZE.size > len(data):
                raise ValueError("a second frame header, or one that is cut off")
            depth, height, width, channels = _JPEG_SIZE.unpack_from(data, at + _JPEG_SEGMENT.size)
            if depth != 8:
                raise ValueError(f"pixels of {depth} bits")
            shape = height, width, channels
        at += length + len(_JPEG_BEGINNING)
    raise ValueError("the file ends before its first pixel")


@functools.cache
def _simplejpeg() -> Any:
    """Return the library simplejpeg. If it is not installed, return None and log that once."""
    try:
        import simplejpeg
    except ImportError:
        _log.warning("JPEG records are decoded by Pillow: `pip install simplejpeg` to read them faster")
        return None
    return simplejpeg
