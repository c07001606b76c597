"""dct-zstd, dct-lz4: JPEG's coefficients in a byte code that unpacks fast; the device makes pixels of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

import numpy as np

from tpucache.errors import DependencyError, FormatError
from tpucache.store.codecs import coefficients
from tpucache.store.codecs.base import Array, FieldSpec, PackedCodec
from tpucache.store.codecs.coefficients import CHROMA, CoefficientLayout, layout_of
from tpucache.store.codecs.pictures import check_picture
from tpucache.store.codecs.zstd import load_zstandard

# Few long matches: slower to write, and with half the matches of the library's own levels faster to read.
_ZSTD_SEARCH_LOG: Final = 6
_ZSTD_MIN_MATCH: Final = 6
_ZSTD_TARGET_LENGTH: Final = 256
_ZSTD_WINDOW_LOG: Final = 17
_LZ4_LEVEL: Final = 9


class DctCodec(PackedCodec):
    """Packed coefficients (`store.codecs.coefficients`), compressed; the field says their quality and chroma."""

    is_for_images = True
    quality_range = (1, 100)
    default_quality = 90
    chromas = CHROMA
    mask_codec = "png"

    def check(self, field: FieldSpec) -> None:
        """Raise FormatError for anything but uint8 (height, width, 1 or 3) of a quality and a chroma."""
        check_picture(self.name, field)
        if field.quality is None or not 1 <= field.quality <= 100 or field.chroma not in CHROMA:
            raise FormatError(f"{self.name} has no quality {field.quality!r} with chroma {field.chroma!r}")

    def packed_bytes(self, field: FieldSpec) -> int:
        """Return the length of the packed coefficients."""
        return _layout(field).nbytes

    def _encode(self, field: FieldSpec, array: Array, quality: int | None) -> bytes:
        return self._compress(coefficients.pack(array, _layout(field)))

    def _decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        layout = _layout(field)
        packed = np.empty(layout.nbytes, np.uint8)
        self._unpack_into(field, data, packed)
        out[...] = coefficients.unpack(packed.data, layout)

    @abstractmethod
    def _compress(self, packed: bytes) -> bytes:
        """Return packed coefficients in the codec's byte code."""


class DctZstd(DctCodec):
    """Coefficients in a Zstandard frame: as small as a JPEG file."""

    name = "dct-zstd"
    typical_ratio = 0.12

    def _compress(self, packed: bytes) -> bytes:
        zstandard = load_zstandard(self.name)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            16,
            strategy=zstandard.STRATEGY_BTOPT,
            min_match=_ZSTD_MIN_MATCH,
            search_log=_ZSTD_SEARCH_LOG,
            target_length=_ZSTD_TARGET_LENGTH,
            window_log=_ZSTD_WINDOW_LOG,
        )
        return bytes(zstandard.ZstdCompressor(compression_params=parameters).compress(packed))

    def _unpack_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        zstandard = load_zstandard(self.name)
        try:
            if zstandard.frame_content_size(data) != len(out):
                raise ValueError(f"a frame of {zstandard.frame_content_size(data)} bytes, not {len(out)}")
            # Straight into place: `decompress` would allocate and copy.
            with zstandard.ZstdDecompressor().stream_reader(data) as reader:
                found = reader.readinto(out.data)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        if found != len(out):
            raise ValueError(f"{found} bytes, not {len(out)}")


class DctLz4(DctCodec):
    """Coefficients in an LZ4 block: half as large again as a JPEG file, and fastest to unpack."""

    name = "dct-lz4"
    typical_ratio = 0.16

    def _compress(self, packed: bytes) -> bytes:
        block = _lz4()
        options = {"mode": "high_compression", "compression": _LZ4_LEVEL, "store_size": False}
        return bytes(block.compress(packed, **options))

    def _unpack_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        block = _lz4()
        try:
            plain = block.decompress(data, uncompressed_size=len(out))
        except block.LZ4BlockError as error:
            raise ValueError(str(error)) from error
        if len(plain) != len(out):
            raise ValueError(f"{len(plain)} bytes, not {len(out)}")
        out.data[:] = plain


def _layout(field: FieldSpec) -> CoefficientLayout:
    return layout_of(field.shape, field.quality or 0, field.chroma)


def _lz4() -> Any:
    try:
        import lz4.block
    except ImportError as error:
        raise DependencyError("the codec dct-lz4 needs `pip install lz4`") from error
    return lz4.block
