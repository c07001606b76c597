"""dct-zstd, dct-lz4: JPEG's coefficients in a byte code that unpacks fast; the device makes pixels of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

import numpy as np

from tpucache.errors import FormatError
from tpucache.store.codecs import coefficients
from tpucache.store.codecs.base import Array, FieldSpec, Numbers, PackedCodec, missing_package
from tpucache.store.codecs.coefficients import CHROMA, CoefficientLayout, layout_of
from tpucache.store.codecs.libraries import Loop, Unpacker, unpack_lz4, unpack_zstd
from tpucache.store.codecs.pictures import check_picture
from tpucache.store.codecs.zstd import load_zstandard

# Few long matches: half as many as the library's own levels make, and so faster to read. A longer search would save
# 0.8 % of the bytes and take half as long again.
_ZSTD_PARAMETERS: Final = {
    "min_match": 6,
    "search_log": 3,
    "target_length": 256,
    "window_log": 17,
    "hash_log": 14,
    "chain_log": 14,
}
_LZ4_LEVEL: Final = 10


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
        packed = np.empty((1, layout.nbytes), np.uint8)
        block = np.frombuffer(data, np.uint8)
        self._unpack_rows(field, block, np.array([[0, len(block)]], np.int64), packed, np.zeros(1, np.int64), None)
        out[...] = coefficients.unpack(packed[0].data, layout)

    def _unpack_rows(
        self, field: FieldSpec, block: Array, spans: Numbers, out: Array, rows: Numbers, loop: Loop | None
    ) -> None:
        library, size = self._library(), out.shape[1]
        if library is None:
            data = block.data
            for (start, end), row in zip(spans.tolist(), rows.tolist(), strict=True):
                self._unpack_by_package(data[start:end], out[row])
            return
        _check_places(block, spans, out, rows)
        sources, lengths = spans[:, 0] + block.ctypes.data, spans[:, 1] - spans[:, 0]
        targets = rows * size + out.ctypes.data
        done = library.unpack_all(sources, lengths, targets, size, loop)
        if done < len(lengths):
            raise ValueError(f"{lengths[done]:,} bytes that do not become {size:,}")

    @abstractmethod
    def _compress(self, packed: bytes) -> bytes:
        """Return packed coefficients in the codec's byte code."""

    @abstractmethod
    def _library(self) -> Unpacker | None:
        """Return what unpacks the byte code in place, or None where only the package is installed."""

    @abstractmethod
    def _unpack_by_package(self, data: memoryview, out: Array) -> None:
        """Unpack bytes into `out` by the Python package. Raises ValueError, DependencyError."""


class DctZstd(DctCodec):
    """Coefficients in a Zstandard frame: as small as a JPEG file."""

    name = "dct-zstd"
    package = "zstandard"
    typical_ratio = 0.12

    def _compress(self, packed: bytes) -> bytes:
        zstandard = load_zstandard(self.name)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            16, strategy=zstandard.STRATEGY_BTOPT, **_ZSTD_PARAMETERS
        )
        return bytes(zstandard.ZstdCompressor(compression_params=parameters).compress(packed))

    def _library(self) -> Unpacker | None:
        return unpack_zstd()

    def _unpack_by_package(self, data: memoryview, out: Array) -> None:
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
    package = "lz4"
    typical_ratio = 0.16

    def _compress(self, packed: bytes) -> bytes:
        block = _lz4()
        options = {"mode": "high_compression", "compression": _LZ4_LEVEL, "store_size": False}
        return bytes(block.compress(packed, **options))

    def _library(self) -> Unpacker | None:
        return unpack_lz4()

    def _unpack_by_package(self, data: memoryview, out: Array) -> None:
        block = _lz4()
        try:
            plain = block.decompress(data, uncompressed_size=len(out))
        except block.LZ4BlockError as error:
            raise ValueError(str(error)) from error
        if len(plain) != len(out):
            raise ValueError(f"{len(plain)} bytes, not {len(out)}")
        out.data[:] = plain


def _check_places(block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
    """Refuse places that are not there: the library looks at addresses alone."""
    if not (block.flags.c_contiguous and out.flags.c_contiguous and len(spans) == len(rows)):
        raise IndexError("records are unpacked from one block of bytes into rows of contiguous memory")
    ends = np.array([spans.min(initial=0), rows.min(initial=0), np.min(spans[:, 1] - spans[:, 0], initial=0)])
    if ends.min() < 0 or spans.max(initial=0) > len(block) or rows.max(initial=-1) >= len(out):
        raise IndexError(f"records lie outside of {len(block):,} bytes, or of {len(out):,} rows")


def _layout(field: FieldSpec) -> CoefficientLayout:
    return layout_of(field.shape, field.quality or 0, field.chroma)


def _lz4() -> Any:
    try:
        import lz4.block
    except ImportError as error:
        raise missing_package("dct-lz4", "lz4") from error
    return lz4.block
