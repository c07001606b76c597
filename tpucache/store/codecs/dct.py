"""dct-zstd and dct-lz4: JPEG's coefficients, compressed so that they unpack fast. The device computes the pixels.

Packed coefficients have the same length for all images of a size, so a device takes batches of them. Four in five of
these bytes are 0, so they are first brought into a sparse form without zeros (`sparse.py`), which is then compressed.
The codec's `packing` names its sparse form.

The Python packages zstandard and lz4 return new objects, whose memory is allocated and then copied. The system's
libzstd and liblz4, which nearly every Linux has for dpkg, apt and systemd, write to any address, and ctypes calls them
without the interpreter's lock, a compiled loop without Python. Their file names contain the version of their binary
interface. Both ways unpack an intact frame to the same bytes, but perhaps not a corrupt one, so a process uses one for
all records.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from tpucache.errors import FormatError
from tpucache.native import Array, FileRecords, LoopWork, Native, native
from tpucache.store.codecs import coefficients, sparse
from tpucache.store.codecs.codec import (
    Numbers,
    PackedCodec,
    check_picture,
    load_zstandard,
    missing_package,
    unpack_frame,
)
from tpucache.store.codecs.coefficients import BLOCK, CHROMA, CoefficientLayout, layout_of, repack
from tpucache.store.codecs.sparse import Sparse, scratch_for, spread

if TYPE_CHECKING:
    from tpucache.store.fields import Field

_ZSTD: Final = "libzstd.so.1"
_LZ4: Final = "liblz4.so.1"
_SHORT: Final = 64  # bytes that compression may add to a short record
_INT_MAX: Final = (1 << 31) - 1

_log: Final = logging.getLogger("tpucache")


class Unpacker(NamedTuple):
    """A C library's function that decompresses a record, for calls from Python and from compiled code."""

    #: (source, length, target, room): addresses, and sizes in bytes. Returns the bytes written, -1 for damaged input.
    unpack: Callable[[int, int, int, int], int]
    #: The address of the C function.
    function: int
    #: Returns the address of the calling thread's decompression context; 0 if the function needs none.
    context: Callable[[], int]

    def unpack_one(self, source: int, length: int, out: Array, packing: str) -> bool:
        """Unpack one record into `out`, uint8 (size,). Returns whether it unpacks to exactly `size` bytes."""
        scratch = scratch_for(len(out), packing)
        found = self.unpack(source, length, scratch.memory.ctypes.data, scratch.room)
        if found >= 0:
            with contextlib.suppress(ValueError):
                spread(scratch.memory[:found], out, packing)
                return True
        return False

    def unpack_all(self, sources: Numbers, lengths: Numbers, out: Array, rows: Numbers, packing: str) -> int:
        """Unpack n records, given by addresses and lengths, into rows of `out`, uint8 (m, size) with contiguous rows.

        Returns the number of records before the first damaged one, or n.
        """
        loops = native()
        if loops is not None:
            return self._run(loops, None, sources, lengths, out, rows, packing)
        records = zip(sources.tolist(), lengths.tolist(), rows.tolist(), strict=True)
        for done, (source, length, row) in enumerate(records):
            if not self.unpack_one(source, length, out[row], packing):
                return done
        return len(sources)

    def unpack_files(self, records: FileRecords, out: Array, rows: Numbers, packing: str) -> int:
        loops = native()
        if loops is None:
            return 0
        return self._run(loops, records.descriptors, records.offsets, records.lengths, out, rows, packing)

    def _run(
        self,
        loops: Native,
        descriptors: Numbers | None,
        sources: Numbers,
        lengths: Numbers,
        out: Array,
        rows: Numbers,
        packing: str,
    ) -> int:
        size = out.shape[1]
        numbers = [descriptors, sources, lengths, out.ctypes.data + out.strides[0] * rows]
        arrays = [None if each is None else np.ascontiguousarray(each, np.int64) for each in numbers]
        scratch = scratch_for(size, packing)
        record = np.empty(0 if descriptors is None else longest_record(size, scratch.room), np.uint8)
        files, first, second, third = (0 if each is None else each.ctypes.data for each in arrays)
        start = scratch.memory.ctypes.data
        work = LoopWork(
            function=self.function,
            context=self.context(),
            descriptors=files,
            sources=first,
            lengths=second,
            targets=third,
            records=len(rows),
            size=size,
            sparse=start,
            sparse_bytes=scratch.room,
            values=scratch.values and start + scratch.values,
            record=record.ctypes.data,
            record_bytes=len(record),
        )
        return loops.unpack(work)


def longest_record(size: int, sparse_bytes: int) -> int:
    """Return an upper limit for the length of a compressed record: compression never makes its input much longer."""
    return 2 * max(size, sparse_bytes) + _SHORT


@functools.cache
def unpack_zstd() -> Unpacker | None:
    """Return the function that decompresses Zstandard frames. Without the library, return None and log that once."""
    library = _load(_ZSTD, "zstandard")
    if library is None:
        return None
    library.ZSTD_createDCtx.restype = ctypes.c_void_p
    library.ZSTD_freeDCtx.argtypes = [ctypes.c_void_p]
    decompress = library.ZSTD_decompressDCtx
    decompress.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
    decompress.restype = ctypes.c_size_t  # error codes are close to the largest number
    contexts = _Contexts(library)

    def unpack(source: int, length: int, target: int, room: int) -> int:
        found = int(decompress(contexts.own.address, target, room, source, length))
        return found if found <= room else -1

    return Unpacker(unpack, _address(decompress), lambda: contexts.own.address)


@functools.cache
def unpack_lz4() -> Unpacker | None:
    library = _load(_LZ4, "lz4")
    if library is None:
        return None
    decompress = library.LZ4_decompress_safe
    decompress.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2]

    def unpack(source: int, length: int, target: int, room: int) -> int:
        # ctypes would truncate a larger number to 32 bits.
        return int(decompress(source, target, length, room)) if max(length, room) <= _INT_MAX else -1

    return Unpacker(unpack, _address(decompress), lambda: 0)


class _Context:
    def __init__(self, library: Any) -> None:
        self._free = library.ZSTD_freeDCtx
        self.address: int = library.ZSTD_createDCtx()
        if not self.address:
            raise MemoryError("there is no memory to unpack Zstandard frames")

    def __del__(self) -> None:
        self._free(self.address)


class _Contexts(threading.local):
    """One decompression context per thread, which is freed when the thread ends."""

    def __init__(self, library: Any) -> None:
        self.own = _Context(library)


def _address(function: Any) -> int:
    pointer: Any = ctypes.cast(function, ctypes.c_void_p)
    return int(pointer.value)


def _load(name: str, package: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        _log.warning("records are unpacked by the package %s: the system's library %s would be faster", package, name)
        return None


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

    def check(self, field: Field) -> None:
        check_picture(self.name, field)
        if field.quality is None or not 1 <= field.quality <= 100 or field.chroma not in CHROMA:
            raise FormatError(
                f"{self.name} has qualities from 1 to 100 and the chroma {' or '.join(CHROMA)}, not quality "
                f"{field.quality!r} and chroma {field.chroma!r}"
            )

    def packed_bytes(self, field: Field) -> int:
        return packed_layout(field).nbytes

    def largest_bytes(self, field: Field) -> int:
        size = self.packed_bytes(field)
        return longest_record(size, sparse.most_bytes(size, self.packing))

    def _encode(self, field: Field, array: Array, quality: int | None) -> bytes:
        form = sparse.squeeze(coefficients.pack(array, packed_layout(field)), self.packing)
        with self._calling_library():
            return self._compress(form)

    def decode_packed(self, field: Field, packed: Array, out: Array) -> None:
        out[...] = coefficients.unpack(packed.data, packed_layout(field))

    def _decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        self.decode_packed(field, self._unpacked(field, data), out)

    def _decode_luma(self, field: Field, records: Sequence[memoryview], out: Array) -> None:
        layout = packed_layout(field)
        for first in range(0, len(records), _LUMA_AT_ONCE):
            some = records[first : first + _LUMA_AT_ONCE]
            packed = np.empty((len(some), layout.nbytes), np.uint8)
            ends = np.cumsum([len(data) for data in some])
            spans = np.stack([ends - [len(data) for data in some], ends], 1)
            self._unpack_whole(np.frombuffer(b"".join(some), np.uint8), spans, packed, np.arange(len(some)))
            out[first : first + _LUMA_AT_ONCE] = coefficients.unpack_luma(packed, layout, layout.height // out.shape[1])

    def _unpacked(self, field: Field, data: memoryview) -> Array:
        library, layout = self._library(), packed_layout(field)
        packed = np.empty(layout.nbytes, np.uint8)
        if library is None:
            self._unpack_by_package(data, packed)
        elif not library.unpack_one(np.frombuffer(data, np.uint8).ctypes.data, len(data), packed, self.packing):
            raise ValueError(f"{len(data):,} bytes do not unpack to {layout.nbytes:,} bytes")
        return packed

    def _unpack_rows(self, field: Field, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
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

    def unpack_files(self, field: Field, records: FileRecords, out: Array, rows: Numbers) -> int:
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
        pass

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


def packed_layout(field: Field) -> CoefficientLayout:
    """Return the layout of a field's packed bytes: at another size (`field.view`), only the frequencies that it
    needs.
    """
    shape, most = (field.shape, BLOCK) if field.view is None else (field.view.shape, field.view.frequencies)
    return layout_of(shape, field.quality or 0, field.chroma, most)


def _lz4() -> Any:
    try:
        import lz4.block
    except ImportError as error:
        raise missing_package("dct-lz4", "lz4") from error
    return lz4.block
