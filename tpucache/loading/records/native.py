"""Loops that run without the interpreter's lock: copying rows, reading and unpacking records, filling page tables.

Python's own loop holds the lock for a microsecond or two a record, in which no other thread gets on. llvmlite compiles
these where it is installed, as it is wherever numba is.

An ordinary store reads from memory the line it is about to overwrite, and leaves it in the cache, where it displaces
another: of a batch larger than the cache, the first rows are gone when the last are written. A non-temporal store does
neither, and copies such a batch nearly twice as fast. numpy has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

_log: Final = logging.getLogger("tpucache")

_LINE: Final = 64  # bytes of a cache line; shorter stores past the cache would each write a line
_AHEAD: Final = 4096  # bytes; by itself a processor looks ahead within a page only
_TO_READ_INTO_L2: Final = (0, 2, 1)  # LLVM's arguments of a prefetch: to read; 2 is L2, 3 would be L1; data
_INT_MAX: Final = (1 << 31) - 1  # the longest record whose length a C int holds
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
    #: A `Loop` of `store.codecs.libraries`.
    unpack: Callable[[int, int, int, int, int, int, int], int]


@functools.cache
def native() -> Native | None:
    """Return the compiled loops, or None where they cannot be compiled; that is logged once."""
    try:
        return _compile()
    except (ImportError, OSError, RuntimeError) as error:
        _log.warning("batches are copied by numpy: `pip install llvmlite` copies large ones faster (%s)", error)
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


def _compile() -> Native:
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    text = str(_Writer(ir).module)
    module = binding.parse_assembly(text)
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
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
    unpack = function("unpack", ctypes.c_int64, 7)
    return Native(function("copy", None, 4), lambda *arguments: read(*arguments, preadv), unpack)


class _Writer:
    """Writes the loops as an LLVM module, by llvmlite's `ir`; addresses are integers throughout."""

    def __init__(self, ir: Any) -> None:
        self._ir = ir
        self._byte, self._half, self._word = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        self.module = ir.Module()
        self._write_copy()
        self._write_read()
        self._write_unpack()

    def _write_copy(self) -> None:
        ir, byte, word = self._ir, self._byte, self._word
        line = ir.VectorType(byte, _LINE)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [word] * 4), "copy")
        targets, sources, count, length = function.args
        build = ir.IRBuilder(function.append_basic_block())
        fetch = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), *[self._half] * 3])
        prefetch = ir.Function(self.module, fetch, "llvm.prefetch.p0i8")

        def smaller(one: Any, other: Any) -> Any:
            return build.select(build.icmp_unsigned("<", one, other), one, other)

        def move(kind: Any, at: Any, size: int) -> Any:
            value = build.load(build.inttoptr(build.add(row, at), kind.as_pointer()), align=1)
            return build.store(value, build.inttoptr(build.add(to, at), kind.as_pointer()), align=size)

        def fetch_ahead(at: Any) -> None:
            """Ask for what is copied so many bytes later, or, in a shorter row, for the same place of the next row."""
            ahead = build.add(at, word(_AHEAD))
            there = build.add(next_row, smaller(build.sub(ahead, length), at))
            place = build.select(build.icmp_unsigned("<", ahead, length), build.add(row, ahead), there)
            build.call(prefetch, [build.inttoptr(place, byte.as_pointer()), *map(self._half, _TO_READ_INTO_L2)])

        last = build.sub(count, word(1))
        with self._counting(build, word(0), count, 1) as turn:
            row, to = self._item(build, sources, turn, word), self._item(build, targets, turn, word)
            next_row = self._item(build, sources, smaller(build.add(turn, word(1)), last), word)
            head = smaller(build.and_(build.neg(to), word(_LINE - 1)), length)  # bytes before the first whole line
            lines = build.and_(build.sub(length, head), word(-_LINE))
            tail = build.add(head, lines)
            with self._counting(build, word(0), head, 1) as at:
                move(byte, at, 1)
            with self._counting(build, head, tail, _LINE) as at:
                fetch_ahead(at)
                move(line, at, _LINE).set_metadata("nontemporal", self.module.add_metadata([self._half(1)]))
            with self._counting(build, tail, length, 1) as at:
                move(byte, at, 1)
        build.fence("seq_cst")  # stores past the cache are not in order with others
        build.ret_void()

    def _write_read(self) -> None:
        ir, word = self._ir, self._word
        function = ir.Function(self.module, ir.FunctionType(word, [word] * 7), "read")
        descriptors, offsets, parts, width, lengths, count, preadv = function.args
        build = ir.IRBuilder(function.append_basic_block())
        kind = ir.FunctionType(word, [self._half, word, self._half, word])
        call = build.inttoptr(preadv, kind.as_pointer())
        with self._counting(build, word(0), count, 1) as turn:
            descriptor = build.trunc(self._item(build, descriptors, turn, word), self._half)
            part = build.add(parts, build.mul(build.mul(turn, width), word(16)))  # a struct iovec: address and length
            offset = self._item(build, offsets, turn, word)
            found = build.call(call, [descriptor, part, build.trunc(width, self._half), offset])
            is_short = build.icmp_signed("!=", found, self._item(build, lengths, turn, word))
            with build.if_then(is_short):
                build.ret(turn)
        build.ret(count)

    def _write_unpack(self) -> None:
        ir, half, word = self._ir, self._half, self._word
        function = ir.Function(self.module, ir.FunctionType(word, [word] * 7), "unpack")
        library, context, sources, lengths, targets, count, size = function.args
        build = ir.IRBuilder(function.append_basic_block())
        lz4 = build.inttoptr(library, ir.FunctionType(half, [word, word, half, half]).as_pointer())
        zstd = build.inttoptr(library, ir.FunctionType(word, [word] * 5).as_pointer())
        has_context = build.icmp_unsigned("!=", context, word(0))

        def stop_if(is_wrong: Any) -> None:
            with build.if_then(is_wrong):
                build.ret(turn)

        with self._counting(build, word(0), count, 1) as turn:
            source, length, target = (self._item(build, array, turn, word) for array in (sources, lengths, targets))
            with build.if_else(has_context) as (by_zstd, by_lz4):
                with by_zstd:
                    found = build.call(zstd, [context, target, size, source, length])
                    stop_if(build.icmp_unsigned("!=", found, size))
                with by_lz4:
                    stop_if(build.icmp_unsigned(">", build.or_(length, size), word(_INT_MAX)))  # either of them
                    whole = build.trunc(size, half)
                    found = build.call(lz4, [source, target, build.trunc(length, half), whole])
                    stop_if(build.icmp_signed("!=", found, whole))
        build.ret(count)

    def _item(self, build: Any, array: Any, at: Any, kind: Any) -> Any:
        """Write the load of one item of an array of 64-bit numbers."""
        return build.load(build.inttoptr(build.add(array, build.mul(at, kind(8))), kind.as_pointer()), align=8)

    @contextlib.contextmanager
    def _counting(self, build: Any, start: Any, stop: Any, step: int) -> Iterator[Any]:
        """Write a loop around what is written inside, whose counter it gives."""
        before, check = build.block, build.append_basic_block()
        body, after = build.append_basic_block(), build.append_basic_block()
        build.branch(check)
        build.position_at_end(check)
        counter = build.phi(start.type)
        counter.add_incoming(start, before)
        build.cbranch(build.icmp_unsigned("<", counter, stop), body, after)
        build.position_at_end(body)
        yield counter
        counter.add_incoming(build.add(counter, counter.type(step)), build.block)
        build.branch(check)
        build.position_at_end(after)
