"""zstd: a Zstandard frame of the array's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpucache.store.codecs.base import Array, Codec, FieldSpec, missing_package

_DEFAULT_LEVEL = 3


class Zstd(Codec):
    """Compressed without loss, by the optional library zstandard."""

    name = "zstd"
    is_for_images = True
    quality_range = (1, 22)
    typical_ratio = 0.85
    package = "zstandard"
    mask_codec = "zstd"

    def _encode(self, field: FieldSpec, array: Array, quality: int | None) -> bytes:
        compressor = load_zstandard(self.name).ZstdCompressor(level=quality or _DEFAULT_LEVEL)
        return bytes(compressor.compress(array.tobytes()))

    def _decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        zstandard = load_zstandard(self.name)
        try:
            size = zstandard.frame_content_size(data)
            if size != field.nbytes:  # a size that is not checked would be allocated
                raise ValueError(f"a frame of {size} bytes, not {field.nbytes}")
            plain = zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        out[...] = np.frombuffer(plain, field.dtype).reshape(field.shape)


def load_zstandard(codec: str) -> Any:
    """Return the library zstandard. Raises DependencyError, naming the codec that needs it."""
    try:
        import zstandard
    except ImportError as error:
        raise missing_package(codec, "zstandard") from error
    return zstandard
