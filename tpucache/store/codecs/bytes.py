"""bytes: any number of bytes as they are, such as a text's tokens."""

from __future__ import annotations

import numpy as np

from tpucache.errors import FormatError, UsageError
from tpucache.store.codecs.base import Array, Codec, FieldSpec
from tpucache.store.format import MAX_RECORD_BYTES


class Bytes(Codec):
    """A one-dimensional uint8 array of any length; the field's shape is empty."""

    name = "bytes"

    def check(self, field: FieldSpec) -> None:
        """Raise FormatError for a field that has a shape, or another dtype than uint8."""
        if field.dtype != "|u1" or field.shape:
            raise FormatError("bytes are uint8 with no shape")

    def largest_bytes(self, field: FieldSpec) -> int:
        """Return the length of the longest record."""
        return MAX_RECORD_BYTES

    def encode(self, field: FieldSpec, array: Array, quality: int | None = None) -> bytes:
        """Return the array's bytes, whatever its length."""
        return self._encode(field, array, quality)

    def _encode(self, field: FieldSpec, array: Array, quality: int | None) -> bytes:
        return np.ascontiguousarray(array, np.uint8).tobytes()

    def decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        """Raise UsageError: there is no array of a fixed shape."""
        self._decode_into(field, data, out)

    def _decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        raise UsageError(f"field {field.name!r} is bytes of any length: it has no array to decode into")
