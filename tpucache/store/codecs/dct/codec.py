"""dct-zstd and dct-lz4: JPEG's coefficients, compressed so that they unpack fast. The device computes the pixels.

The packed coefficients have the same length for all images of a size, so a device takes batches of them. Four in five
of these bytes are 0, so they are first brought into a sparse form without zeros (`sparse.py`), which is then
compressed. There are two sparse forms; the codec's `packing` names the one that it uses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np

from tpucache.errors import FormatError
from tpucache.native import Array, FileRecords
from tpucache.store.codecs.codec import (
    FieldSpec,
    Numbers,
    PackedCodec,
    check_picture,
    load_zstandard,
    missing_package,
    unpack_frame,
)
from tpucache.store.codecs.dct import coefficients, sparse
from tpucache.store.codecs.dct.coefficients import BLOCK, CHROMA, CoefficientLayout, layout_of, repack
from tpucache.store.codecs.dct.libraries import Unpacker, longest_record, unpack_lz4, unpack_zstd
from tpucache.store.codecs.dct.sparse import Sparse

# Only long matches: short ones make the frame of a sparse form larger, and slower to unpack.
_ZSTD_PARAMETERS: Final = {
    "min_match": 6,
    "search_log": 3,
    "target_length": 256,
    "window_log": 17,
    "hash_log": 14,
    "chain_log": 14,
}

_LUMA_AT_ONCE: Final = 2  # images per step: larger arrays of floats cost more in page faults
_AT_ONCE: Final = 16  # records per step: they stay in the CPU's cache until their low frequencies are copied


class DctCodec(PackedCodec):
    """Stores packed coefficients (`coefficients.py`), compressed. The field has JPEG's quality and chroma format."""

    is_for_images = True
    quality_range = (1, 100)
    default_quality = 90
    chromas = CHROMA
    has_frequencies = True
    packed_form = "coefficients"
    mask_codec = "png"
    has_luma = True
    has_half_luma = True
    packing: ClassVar[str]

    def check(self, field: FieldSpec) -> None:
        """Raise FormatError unless the field is uint8 (height, width, 1 or 3) with a valid quality and chroma."""
        check_picture(self.name, field)
        if field.quality is None or not 1 <= field.quality <= 100 or field.chroma not in CHROMA:
            raise FormatError(
                f"{self.name} has qualities from 1 to 100 and the chroma {' or '.join(CHROMA)}, not quality "
                f"{field.quality!r} and chroma {field.chroma!r}"
            )

    def packed_bytes(self, field: FieldSpec) -> int:
        return packed_layout(field).nbytes

    def largest_bytes(self, field: FieldSpec) -> int:
        """Return an upper limit for the length of an encoded array of the field."""
        size = self.packed_bytes(field)
        return longest_record(size, sparse.most_bytes(size, self.packing))

    def _encode(self, field: FieldSpec, array: Array, quality: int | None) -> bytes:
        form = sparse.squeeze(coefficients.pack(array, packed_layout(field)), self.packing)
        with self._calling_library():
            return self._compress(form)

    def decode_packed(self, field: FieldSpec, packed: Array, out: Array) -> None:
        out[...] = coefficients.unpack(packed.data, packed_layout(field))

    def _decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        self.decode_packed(field, self._unpacked(field, data), out)

    def _decode_luma(self, field: FieldSpec, records: Sequence[memoryview], out: Array) -> None:
        layout = packed_layout(field)
        for first in range(0, len(records), _LUMA_AT_ONCE):
            some = records[first : first + _LUMA_AT_ONCE]
            packed = np.empty((len(some), layout.nbytes), np.uint8)
            ends = np.cumsum([len(data) for data in some])
            spans = np.stack([ends - [len(data) for data in some], ends], 1)
            self._unpack_whole(np.frombuffer(b"".join(some), np.uint8), spans, packed, np.arange(len(some)))
            out[first : first + _LUMA_AT_ONCE] = coefficients.unpack_luma(packed, layout, layout.height // out.shape[1])

    def _unpacked(self, field: FieldSpec, data: memoryview) -> Array:
        library, layout = self._library(), packed_layout(field)
        packed = np.empty(layout.nbytes, np.uint8)
        if library is None:
            self._unpack_by_package(data, packed)
        elif not library.unpack_one(np.frombuffer(data, np.uint8).ctypes.data, len(data), packed, self.packing):
            raise ValueError(f"{len(data):,} bytes do not unpack to {layout.nbytes:,} bytes")
        return packed

    def _unpack_rows(self, field: FieldSpec, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
        if field.view is None or field.view.frequencies == BLOCK:
            self._unpack_whole(block, spans, out, rows)
            return
        _check_rows(out, rows, len(spans))
        stored = layout_of(field.view.shape, field.quality or 0, field.chroma)
        for first in range(0, len(rows), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            whole = np.empty((len(rows[some]), stored.nbytes), np.uint8)
            self._unpack_whole(block, spans[some], whole, np.arange(len(whole)))
            out[rows[some]] = repack(whole, stored, field.view.frequencies)

    def _unpack_whole(self, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
        library, size = self._library(), out.shape[1]
        _check_places(block, spans, out, rows)
        if library is None:
            for (start, end), row in zip(spans.tolist(), rows.tolist(), strict=True):
                self._unpack_by_package(block.data[start:end], out[row])
            return
        sources, lengths = spans[:, 0] + block.ctypes.data, spans[:, 1] - spans[:, 0]
        done = library.unpack_all(sources, lengths, out, rows, self.packing)
        if done < len(lengths):
            raise ValueError(f"{lengths[done]:,} bytes do not unpack to {size:,} bytes")

    def unpack_files(self, field: FieldSpec, records: FileRecords, out: Array, rows: Numbers) -> int:
        """Read n records from open files, and decode record i into its packed form in out[rows[i]].

        Returns the number of records before the first that failed. Returns 0 without the system's library, and for a
        field that is decoded from fewer frequencies than are stored.
        """
        library = self._library()
        if library is None or (field.view is not None and field.view.frequencies < BLOCK):
            return 0
        _check_rows(out, rows, len(records.offsets))
        return library.unpack_files(records, out, rows, self.packing)

    def _unpack_by_package(self, data: memoryview, out: Array) -> None:
        form = np.frombuffer(self._decompress(data, sparse.most_bytes(len(out), self.packing)), np.uint8)
        sparse.spread(form, out, self.packing)

    @abstractmethod
    def _compress(self, form: Sparse) -> bytes:
        """Compress a sparse form's masks and values, and return both as one piece of bytes."""

    @abstractmethod
    def _decompress(self, data: memoryview, most: int) -> bytes:
        """Decompress by the Python package. The result has at most `most` bytes."""

    @abstractmethod
    def _library(self) -> Unpacker | None:
        """Return the system library that decompresses in place, or None if only the Python package is available."""


class DctZstd(DctCodec):
    """Stores coefficients in a Zstandard frame: as small as a JPEG file."""

    name = "dct-zstd"
    package = "zstandard"
    packing = sparse.SPARSE
    typical_ratio = 0.12

    def _compress(self, form: Sparse) -> bytes:
        zstandard = load_zstandard(self.name)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            16, strategy=zstandard.STRATEGY_BTOPT, **_ZSTD_PARAMETERS
        )
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=sum(map(len, form)))
        masks = compressor.compress(form.masks) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        return bytes(masks + compressor.compress(form.values) + compressor.flush())

    def _decompress(self, data: memoryview, most: int) -> bytes:
        return unpack_frame(self.name, data, 0, most)

    def _library(self) -> Unpacker | None:
        return unpack_zstd()


class DctLz4(DctCodec):
    """Stores coefficients in an LZ4 block: a fifth larger than a JPEG file, but the fastest to unpack."""

    name = "dct-lz4"
    package = "lz4"
    packing = sparse.NIBBLES
    typical_ratio = 0.14

    def _compress(self, form: Sparse) -> bytes:
        return bytes(_lz4().compress(form.masks + form.values, store_size=False))

    def _decompress(self, data: memoryview, most: int) -> bytes:
        block = _lz4()
        try:
            return bytes(block.decompress(data, uncompressed_size=most))
        except block.LZ4BlockError as error:
            raise ValueError(str(error)) from error

    def _library(self) -> Unpacker | None:
        return unpack_lz4()


def _check_places(block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
    """Raise IndexError for byte ranges or rows out of bounds: the C library gets addresses and checks nothing."""
    _check_rows(out, rows, len(spans))
    if not block.flags.c_contiguous:
        raise IndexError("the block of bytes to unpack from is not contiguous memory")
    least = min(spans.min(initial=0), np.min(spans[:, 1] - spans[:, 0], initial=0))
    if least < 0 or spans.max(initial=0) > len(block):
        raise IndexError(f"a record lies outside of the {len(block):,} bytes to unpack from, or ends before it starts")


def _check_rows(out: Array, rows: Numbers, records: int) -> None:
    are_contiguous = out.ndim == 2 and (out.strides[1] == 1 or out.shape[1] < 2 or not out.size)
    if not (are_contiguous and records == len(rows)):
        raise IndexError(f"there must be one row of contiguous memory for each of the {records:,} records")
    if rows.min(initial=0) < 0 or rows.max(initial=-1) >= len(out):
        raise IndexError(f"a row number is negative, or is not below {len(out):,}, the number of rows")


def packed_layout(field: FieldSpec) -> CoefficientLayout:
    """Return the layout of a field's packed bytes.

    If the field is decoded at another size (`field.view`), the layout has only the frequencies that this size needs.
    """
    shape, most = (field.shape, BLOCK) if field.view is None else (field.view.shape, field.view.frequencies)
    return layout_of(shape, field.quality or 0, field.chroma, most)


def _lz4() -> Any:
    try:
        import lz4.block
    except ImportError as error:
        raise missing_package("dct-lz4", "lz4") from error
    return lz4.block
