"""Loops that run without the interpreter's lock: copying rows, reading and unpacking records, filling page tables.

Python's own loop holds the lock for a microsecond or two a record, in which no other thread gets on. llvmlite compiles
these where it is installed, as it is wherever numba is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tpucache.loading.records.compiled.loops import write_copy, write_read
from tpucache.loading.records.compiled.unpacking import UnpackWriter
from tpucache.store.codecs.base import Loop, LoopWork

_log: Final = logging.getLogger("tpucache")

_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, which Python's mmap does not name

libc: Final = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p


class Native(NamedTuple):
    """Compiled loops; all arrays are given by their addresses."""

    #: (targets, sources, count, length): copy rows past the processor's caches, each to and from an address of its own.
    copy: Callable[[int, int, int, int], None]
    #: (descriptors, offsets, parts, parts of a record, lengths, count): read records by `preadv`, each into its parts;
    #: returns how many were read before the first that is not as long as it should be.
    read: Callable[[int, int, int, int, int, int], int]
    #: A `Loop` of `store.codecs.base`.
    unpack: Loop


@functools.cache
def native() -> Native | None:
    """Return the compiled loops, or None where they cannot be compiled; that is logged once."""
    try:
        return compile_loops()
    except (ImportError, OSError, RuntimeError) as error:
        _log.warning("batches are copied and unpacked by numpy: with `pip install llvmlite` it is faster (%s)", error)
        return None


def populate(start: int, length: int) -> bool:
    """Read pages of a map and enter them in the page table; return whether that is possible.

    Pages that cannot be read are an answer here, and end the process when they are first touched otherwise.
    """
    done: int = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_READ)
    return done == 0


@functools.cache
def can_populate() -> bool:
    """Return whether the kernel has such a call: Linux has since 5.14."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    return populate(ctypes.addressof(ctypes.c_ubyte.from_buffer(page)), mmap.PAGESIZE)


def compile_loops(features: Mapping[str, bool] | None = None) -> Native:
    """Compile the loops for this processor, or for one that can do less, by LLVM's names of what it can do.

    Raises ImportError without llvmlite, OSError and RuntimeError where it cannot compile.
    """
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    here = binding.get_host_cpu_features()
    processor = binding.get_process_triple().partition("-")[0]
    written = ir.Module()
    write_copy(ir, written)
    write_read(ir, written)
    UnpackWriter(ir, written, processor, here if features is None else features).write()
    module = binding.parse_assembly(str(written))
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=here.flatten(), opt=2
    )
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()

    def function(name: str, result: Any, arguments: int) -> Any:
        prototype = ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * arguments)  # releases the lock
        found = prototype(engine.get_function_address(name))
        found.engine = engine  # type: ignore[attr-defined]  # it owns the memory of the compiled code
        return found

    read = function("read", ctypes.c_int64, 7)
    preadv = ctypes.cast(libc.preadv, ctypes.c_void_p).value
    unpack = function("unpack", ctypes.c_int64, len(LoopWork._fields) + 1)
    pread = ctypes.cast(libc.pread, ctypes.c_void_p).value
    copy = function("copy", None, 4)
    return Native(copy, lambda *arguments: read(*arguments, preadv), lambda work: unpack(*work, pread))
