"""Fields (image, mask, tokens …) <-> record bytes.

A record is the lengths of its variable fields (u32 little-endian each, in field order), then the bytes of all
fields in order. A field is variable when its codec is not `raw`; so a record of raw fields is nothing but their
arrays, one after the other, and can be read straight into place.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, DependencyError, UsageError

Array = npt.NDArray[Any]

_log: Final = logging.getLogger("tpucache")

#: How a field's array becomes bytes. `bytes` keeps a one-dimensional uint8 array of any length as it is.
CODECS: Final = ("raw", "jpeg", "png", "zstd", "bytes")
IMAGE_CODECS: Final = ("raw", "jpeg", "png", "zstd")
DTYPES: Final = ("|u1", "|i1", "|b1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f2", "<f4", "<f8")


@dataclass(frozen=True)
class Field:
    """One array of every record: its name, how it is encoded, its dtype (little-endian) and its shape.

    An image is (height, width, channels). The shape of a `bytes` field is empty: its length varies.
    """

    name: str
    codec: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def fixed(self) -> bool:
        """Whether every record spends the same number of bytes on it."""
        return self.codec == "raw"


@dataclass(frozen=True)
class RecordLayout:
    """How the fields of one sample lie in its record."""

    fields: tuple[Field, ...]

    @property
    def fixed(self) -> bool:
        """Whether every record has the same length, so that arrays can be read in place."""
        return all(field.fixed for field in self.fields)

    @property
    def nbytes(self) -> int:
        """Bytes of all decoded arrays of a record; the record's own length when the layout is fixed."""
        return sum(field.nbytes for field in self.fields)

    def join(self, parts: Sequence[bytes]) -> bytes:
        """Return the record made of the fields' encoded bytes, in field order."""
        lengths = [len(p) for f, p in zip(self.fields, parts, strict=True) if not f.fixed]
        return struct.pack(self._lengths, *lengths) + b"".join(parts)

    @property
    def header_bytes(self) -> int:
        """Bytes of the lengths that a record begins with."""
        return struct.calcsize(self._lengths)

    def spans(self, header: memoryview, length: int) -> list[tuple[int, int]]:
        """Return where each field's bytes start and end in a record of `length` bytes, by its first `header_bytes`.

        Raises DamageError when the lengths do not add up.
        """
        at = self.header_bytes
        if len(header) < at:
            raise DamageError(f"a record of {len(header)} bytes cannot hold its lengths, {at} bytes")
        lengths = iter(struct.unpack_from(self._lengths, header))
        spans = []
        for field in self.fields:
            size = field.nbytes if field.fixed else next(lengths)
            spans.append((at, at + size))
            at += size
        if at != length:
            raise DamageError(f"a record of {length} bytes should have {at}")
        return spans

    def split(self, record: memoryview) -> list[memoryview]:
        """Return the encoded bytes of each field. Raises DamageError when the lengths do not add up."""
        return [record[start:end] for start, end in self.spans(record, len(record))]

    @functools.cached_property
    def _lengths(self) -> str:
        """The struct format of the lengths that a record begins with."""
        return f"<{sum(not field.fixed for field in self.fields)}I"


def encode(field: Field, array: Array, quality: int | None = None) -> bytes:
    """Return an array's bytes in the field's codec.

    `quality` is JPEG's 1-100 (default 95), PNG's and zstd's compression level (defaults 6 and 3).
    Raises UsageError when the array is not of the field's dtype and shape, DependencyError without zstandard.
    """
    if field.codec == "bytes":
        return np.ascontiguousarray(array, np.uint8).tobytes()
    if array.dtype != np.dtype(field.dtype) or array.shape != field.shape:
        raise UsageError(f"field {field.name!r} takes {field.dtype} {field.shape}, not {array.dtype.str} {array.shape}")
    data = np.ascontiguousarray(array)
    if field.codec == "zstd":
        return bytes(_zstandard().ZstdCompressor(level=quality or 3).compress(data.tobytes()))
    if field.codec in ("jpeg", "png"):
        return _encode_image(data, field.codec, quality)
    return data.tobytes()


def decode_into(field: Field, data: memoryview, out: Array) -> None:
    """Decode a field's bytes into `out`, a contiguous array of its dtype and shape.

    Raises DamageError when the bytes do not decode to exactly that, DependencyError without the decoder.
    """
    if field.codec == "bytes":
        raise UsageError(f"field {field.name!r} is bytes of any length: it has no array to decode into")
    if field.codec == "raw":
        if len(data) != field.nbytes:
            raise DamageError(f"field {field.name!r} has {len(data)} bytes, not {field.nbytes}")
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        return
    try:
        _DECODERS[field.codec](field, data, out)
    except (ValueError, OSError, SyntaxError) as error:
        raise DamageError(f"field {field.name!r} does not decode as {field.codec}: {error}") from error


def _encode_image(data: Array, codec: str, quality: int | None) -> bytes:
    from PIL import Image

    target = io.BytesIO()
    image = Image.fromarray(data[..., 0] if data.shape[-1] == 1 else data)
    if codec == "jpeg":
        # Tables of its own make an image 4 % smaller and 5 % faster to decode, to the same pixels.
        image.save(target, "JPEG", quality=quality or 95, optimize=True)
    else:
        image.save(target, "PNG", compress_level=6 if quality is None else quality)
    return target.getvalue()


def _decode_jpeg(field: Field, data: memoryview, out: Array) -> None:
    simplejpeg = _simplejpeg()
    if simplejpeg is None:
        _decode_image(field, data, out)
        return
    grey = field.shape[2] == 1
    if grey and simplejpeg.decode_jpeg_header(data)[2] != "Gray":  # it would drop the colours without a word
        raise ValueError("an image in colours, not in grey")
    found = simplejpeg.decode_jpeg(data, "GRAY" if grey else "RGB", buffer=out).shape
    if found != field.shape:
        raise ValueError(f"an image of {found}, not of {field.shape}")


@functools.cache
def _simplejpeg() -> Any:
    """Return simplejpeg, or None, after saying so once, where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        _log.warning("JPEG records are decoded by Pillow: `pip install simplejpeg` to read them faster")
        return None
    return simplejpeg


def _decode_image(field: Field, data: memoryview, out: Array) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise DependencyError(
            f"field {field.name!r} is stored as {field.codec}: `pip install pillow` to read it"
        ) from error
    with Image.open(io.BytesIO(data), formats=[field.codec]) as image:
        found = (image.height, image.width, image.mode)
        if found != (*field.shape[:2], "L" if field.shape[2] == 1 else "RGB"):
            raise ValueError(f"an image of {found}, not of {field.shape}")
        out[...] = np.asarray(image).reshape(field.shape)


def _decode_zstd(field: Field, data: memoryview, out: Array) -> None:
    zstandard = _zstandard()
    try:
        size = zstandard.frame_content_size(data)
        if size != field.nbytes:  # believed, it would be allocated
            raise ValueError(f"a frame of {size} bytes, not {field.nbytes}")
        plain = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    out[...] = np.frombuffer(plain, field.dtype).reshape(field.shape)


_DECODERS: Final[dict[str, Callable[[Field, memoryview, Array], None]]] = {
    "jpeg": _decode_jpeg,
    "png": _decode_image,
    "zstd": _decode_zstd,
}


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DependencyError("the zstd codec needs `pip install zstandard`") from error
    return zstandard
