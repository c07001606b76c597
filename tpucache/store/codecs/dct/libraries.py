"""The system's libraries libzstd and liblz4, which decompress straight into a batch.

The Python packages zstandard and lz4 return new objects, whose memory is allocated and then copied. The C libraries
write to any address, and ctypes calls them without the interpreter's lock. A compiled loop calls them without Python.
The libraries' file names contain the version of their binary interface. Nearly every Linux system has both libraries,
because dpkg, apt and systemd need them.

The package zstandard bundles its own libzstd, possibly of another version, whose functions cannot be called by ctypes.
Both versions decompress an intact frame to the same bytes. A corrupt frame may give different bytes, so a process uses
only one of them for all records of a codec.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache.native import Array, FileRecords, LoopWork, Native, native
from tpucache.store.codecs.codec import Numbers
from tpucache.store.codecs.dct.sparse import scratch_for, spread

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
        return found >= 0 and _spreads(scratch.memory[:found], out, packing)

    def unpack_all(self, sources: Numbers, lengths: Numbers, out: Array, rows: Numbers, packing: str) -> int:
        """Unpack n records into rows of `out`. Returns the number of records before the first damaged one, or n.

        `sources` are the records' addresses, `lengths` their sizes in bytes; both are (n,) like `rows`. `out` is uint8
        (m, size) with contiguous rows.
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
        """Read n records from open files and unpack them into rows of `out`, uint8 (m, size) with contiguous rows."""
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


def _spreads(found: Array, out: Array, packing: str) -> bool:
    """Write to `out` the bytes that the sparse form `found` stands for; return False if it is damaged."""
    try:
        spread(found, out, packing)
    except ValueError:
        return False
    return True


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
    """Return the function that decompresses LZ4 blocks. Without the library, return None and log that once."""
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
    """One decompression context per thread.

    When a thread ends, `threading.local` drops the thread's attributes, which frees its context.
    """

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
