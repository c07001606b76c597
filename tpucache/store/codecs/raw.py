"""raw: the array's own bytes, which are read straight into place."""

from __future__ import annotations

import numpy as np

from tpucache.errors import DamageError
from tpucache.store.codecs.base import Array, Codec, FieldSpec


class Raw(Codec):
    """The array in C order."""

    name = "raw"
    is_for_images = True
    is_plain = True

    def _encode(self, field: FieldSpec, array: Array, quality: int | None) -> bytes:
        return array.tobytes()

    def _decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        if len(data) != field.nbytes:
            raise DamageError(f"field {field.name!r} has {len(data)} bytes, not {field.nbytes}")
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
