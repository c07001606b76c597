"""Codecs for arrays that need not be images: raw (their own bytes), zstd (compressed), bytes (uint8 of any length)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tpucache.errors import DamageError, FormatError, UsageError
from tpucache.native import Array
from tpucache.store.codecs.codec import Codec, load_zstandard, unpack_frame
from tpucache.store.format import MAX_RECORD_BYTES

if TYPE_CHECKING:
    from tpucache.store.fields import Field

_DEFAULT_LEVEL: Final = 3


class Raw(Codec):
    """Stores the array's bytes in C order."""

    name = "raw"
    is_for_images = True
    holds_any_array = True
    is_plain = True

    def _encode(self, field: Field, array: Array, quality: int | None) -> bytes:
        return array.tobytes()

    def _decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        if len(data) != field.nbytes:
            raise DamageError(f"field {field.name!r} has {len(data)} bytes, not {field.nbytes}: copy the cache again")
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)


class Bytes(Codec):
    """Stores one-dimensional uint8 arrays whose length differs from record to record. The field's shape is empty."""

    name = "bytes"
    has_any_length = True

    def check(self, field: Field) -> None:
        if field.dtype != "|u1" or field.shape:
            raise FormatError(f"the codec bytes is for uint8 with the shape (), not {field.dtype} {field.shape}")

    def largest_bytes(self, field: Field) -> int:
        return MAX_RECORD_BYTES

    def encode(self, field: Field, array: Array, quality: int | None = None) -> bytes:
        return self._encode(field, array, quality)

    def _encode(self, field: Field, array: Array, quality: int | None) -> bytes:
        return np.ascontiguousarray(array, np.uint8).tobytes()

    def decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        self._decode_into(field, data, out)

    def _decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        raise UsageError(f"field {field.name!r} is bytes of any length: it has no array to decode into")


class Zstd(Codec):
    """Compresses the array's bytes without loss, by the optional library zstandard."""

    name = "zstd"
    is_for_images = True
    holds_any_array = True
    quality_range = (1, 22)
    typical_ratio = 0.85
    package = "zstandard"
    mask_codec = "zstd"

    def _encode(self, field: Field, array: Array, quality: int | None) -> bytes:
        with self._calling_library():
            compressor = load_zstandard(self.name).ZstdCompressor(level=quality or _DEFAULT_LEVEL)
            return bytes(compressor.compress(array.tobytes()))

    def _decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        plain = unpack_frame(self.name, data, field.nbytes, field.nbytes)
        out[...] = np.frombuffer(plain, field.dtype).reshape(field.shape)
