"""The system's own libraries of byte codes, which unpack straight into a batch.

The Python packages of the same name return new objects: memory that is allocated and then copied. The libraries that
they wrap write to any address, and ctypes calls them without the interpreter's lock. Their names carry the version of
their binary interface. Nearly every Linux system has them, as dpkg, apt and systemd need both.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

#: (source, length, target, size): addresses and bytes; True where exactly `size` bytes were unpacked.
Unpack = Callable[[int, int, int, int], bool]

_ZSTD: Final = "libzstd.so.1"
_LZ4: Final = "liblz4.so.1"

_log: Final = logging.getLogger("tpucache")


@functools.cache
def unpack_zstd() -> Unpack | None:
    """Return what unpacks a Zstandard frame, or None where the system has no such library; that is logged once."""
    library = _load(_ZSTD, "zstandard")
    if library is None:
        return None
    library.ZSTD_createDCtx.restype = ctypes.c_void_p
    library.ZSTD_freeDCtx.argtypes = [ctypes.c_void_p]
    decompress = library.ZSTD_decompressDCtx
    decompress.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
    decompress.restype = ctypes.c_size_t  # of an error, nearly the largest number
    contexts = _Contexts(library)

    def unpack(source: int, length: int, target: int, size: int) -> bool:
        return bool(decompress(contexts.own, target, size, source, length) == size)

    return unpack


@functools.cache
def unpack_lz4() -> Unpack | None:
    """Return what unpacks an LZ4 block, or None where the system has no such library; that is logged once."""
    library = _load(_LZ4, "lz4")
    if library is None:
        return None
    decompress = library.LZ4_decompress_safe
    decompress.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2]

    def unpack(source: int, length: int, target: int, size: int) -> bool:
        return bool(decompress(source, target, length, size) == size)

    return unpack


class _Contexts(threading.local):
    """A context of Zstandard's for each thread, freed with it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.own: int = library.ZSTD_createDCtx()

    def __del__(self) -> None:
        self._library.ZSTD_freeDCtx(self.own)


def _load(name: str, package: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        _log.warning("records are unpacked by the package %s: with the system's %s it is faster", package, name)
        return None
