"""Compiled loops that run without the interpreter's lock: they copy rows, read records and unpack them.

A loop in Python would hold the lock for one or two microseconds for each record, and stop all other threads. llvmlite
compiles these loops if it is installed (numba installs it); without it numpy does the same more slowly. Compiled loops
receive the addresses of arrays.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.int64]

_LARGE: Final = 8 << 20  # much of a smaller batch is still in the cache when it is read, so ordinary stores are as fast
_LONG: Final = 1 << 10  # bytes of a row; shorter rows have too few whole cache lines
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, which Python's mmap lacks


_log: Final = logging.getLogger("tpucache")


#: Held while loops are compiled, because llvmlite must not run in several threads at once.
compiling: Final = threading.Lock()
# Without this, a process that is forked during a compilation would have a lock that no thread of it can release.
os.register_at_fork(before=compiling.acquire, after_in_parent=compiling.release, after_in_child=compiling.release)

_FAILED: Final = ctypes.c_void_p(-1).value

_LINE: Final = 64  # bytes of a cache line; each shorter store past the cache would write a whole line
_AHEAD: Final = 4096  # bytes to prefetch ahead; a processor's own prefetch stops at the end of a page
_TO_READ_INTO_L2: Final = (0, 2, 1)  # LLVM's arguments of a prefetch: read; into L2 (3 would be L1); data

_GROUP: Final = 64  # bytes of a record that one byte of a sparse form's second mask describes
_INT_MAX: Final = (1 << 31) - 1  # the largest C int, and so the longest record
_PREFIX: Final = 4  # bytes of the length that a file has before each record
# Instructions that shuffle the bytes of a vector by index; an index of 128 or more gives 0. Eight of 16 bytes are used.
_SHUFFLES: Final = {"x86_64": "llvm.x86.ssse3.pshuf.b.128", "aarch64": "llvm.aarch64.neon.tbl1.v16i8"}
# The instruction of AVX-512 VBMI2 that expands 64 bytes at once: it unpacks dct-lz4 in half of the time.
_EXPAND: Final = "llvm.x86.avx512.mask.expand.v64i8"


libc: Final = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p


class LoopWork(NamedTuple):
    """The arguments of the compiled loop that unpacks records, each to exactly `size` bytes. Arrays are addresses.

    Records are in memory or, with `descriptors`, in files. In a file, 4 bytes with the record's length, a u32, come
    before the record.
    """

    #: The function that decompresses. With a context it is Zstandard's, (context, target, room, source, length);
    #: without one LZ4's, (source, target, length, room), which counts bytes in C ints: longer records are refused.
    function: int
    #: The function's context, 0 without one.
    context: int
    #: The records' file descriptors: int64 (records,), or 0 for records in memory.
    descriptors: int
    #: The records' addresses, or their positions in the files: int64 (records,).
    sources: int
    #: The bytes of each record; for a record in a file, the length before it counts, too: int64 (records,).
    lengths: int
    #: The addresses to unpack to: int64 (records,).
    targets: int
    #: The number of records.
    records: int
    #: The bytes of an unpacked record.
    size: int
    #: Memory for a decompressed record, its sparse form (`store.codecs.sparse`), and the size of this memory.
    sparse: int
    sparse_bytes: int
    #: Memory for the values of a sparse form with nibbles (`store.codecs.sparse`); 0 for other forms.
    values: int
    #: Memory for a record from a file, and the size of this memory; longer records are refused.
    record: int
    record_bytes: int


class FileRecords(NamedTuple):
    """Where n records are in open files.

    `descriptors` are the descriptors of the records' files, `offsets` the records' offsets in the files, and `lengths`
    their lengths in bytes; all are int64 (n,). The lengths include the 4 bytes before each record, which contain its
    length.
    """

    descriptors: Numbers
    offsets: Numbers
    lengths: Numbers


class Native(NamedTuple):
    """Compiled loops. All arrays are passed by address."""

    #: copy(targets, sources, count, length): copy `count` rows of `length` bytes past the processor's caches. `targets`
    #: and `sources` are arrays with the address of each row.
    copy: Callable[[int, int, int, int], None]
    #: read(descriptors, offsets, parts, width, lengths, count): read `count` records by `preadv`. `parts` is an array
    #: of C's struct iovec, `width` of them for each record, which say where its bytes go. Returns the number of records
    #: before the first one with a wrong length.
    read: Callable[[int, int, int, int, int, int], int]
    #: Unpack records up to the first one that does not give exactly `size` bytes. Returns the number of records before
    #: that one; the number of all records if there is none.
    unpack: Callable[[LoopWork], int]


@functools.cache
def native() -> Native | None:
    """Return the compiled loops. If they cannot be compiled, log a warning once and return None.

    If several threads call this function, one thread compiles and the other threads wait.
    """
    with compiling:
        return _compiled()


@functools.cache
def _compiled() -> Native | None:
    try:
        return compile_loops()
    except Exception as error:  # noqa: BLE001  # whatever llvmlite raises
        _log.warning("numpy copies and unpacks batches; compiled loops are faster: `pip install llvmlite` (%s)", error)
        return None


def populate(start: int, length: int) -> bool:
    """Read `length` bytes of a memory map, from the address `start` on, and enter their pages in the page table.

    Return False if the kernel has no such call, or if pages cannot be read: an access to such pages would end the
    process. Otherwise return True.
    """
    done: int = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_READ)
    return done == 0


@functools.cache
def can_populate() -> bool:
    """Return whether the kernel has the call that `populate` uses: Linux has it since 5.14."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    return populate(ctypes.addressof(ctypes.c_ubyte.from_buffer(page)), mmap.PAGESIZE)


def map_file(descriptor: int, size: int) -> int:
    """Return the address of a shared, read-only map of an open file; 0 if it cannot be mapped."""
    start: int | None = libc.mmap(
        None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, descriptor, ctypes.c_long(0)
    )
    return 0 if start == _FAILED or start is None else start


def file_system(descriptor: int) -> int:
    """Return the type of an open file's file system, `f_type` of `man 2 statfs`; 0 if unknown."""
    found = (ctypes.c_long * 64)()  # larger than any system's struct statfs
    return int(found[0]) & 0xFFFFFFFF if libc.fstatfs(descriptor, found) == 0 else 0


def is_large(rows: int, nbytes: int) -> bool:
    """Return whether a batch of `rows` rows with `nbytes` bytes in all is copied faster past the processor's caches."""
    return nbytes >= max(_LARGE, rows * _LONG)


def address(array: Array) -> int:
    """Return the address of an array's memory."""
    found: int = array.__array_interface__["data"][0]
    return found


def copy_rows(targets: Addresses, sources: Addresses, length: int, *, past_caches: bool) -> None:
    """Copy `length` bytes from each address in `sources` to the address in `targets` at the same index.

    Both arrays are int64 (n,) and contiguous. With `past_caches`, a compiled loop writes past the processor's caches
    (see `is_large`). Several threads may call this. The caller keeps the memory alive and checks that it is large
    enough.
    """
    loops = native() if past_caches else None
    if loops is not None:
        loops.copy(address(targets), address(sources), len(targets), length)
        return
    move = ctypes.memmove
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        move(target, source, length)


def gather(source: Array, rows: npt.NDArray[np.int64], target: Array) -> None:
    """Copy rows into `target`: target[i] = source[rows[i]]. Several threads may call this.

    `source` is (n, *shape), `target` (m, *shape), `rows` (m,). Raises IndexError for a row out of range, ValueError
    if the target has another shape, TypeError if its dtype is not that of the source.
    """
    _check_fit(source, len(rows), target)
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(source)):
        raise IndexError(f"rows has indices from {rows.min()} to {rows.max()}, and the source has {len(source)} rows")
    large = is_large(len(rows), target.nbytes) and source.flags.c_contiguous and target.flags.c_contiguous
    if not large or native() is None:
        # With "clip", numpy writes to the target without a buffer.
        np.take(source, rows, axis=0, out=target, mode="clip")
        return
    length = target.nbytes // len(rows)
    targets = address(target) + length * np.arange(len(rows))
    copy_rows(targets, address(source) + length * rows.astype(np.int64), length, past_caches=True)


def _check_fit(source: Array, rows: int, target: Array) -> None:
    """Raise ValueError if `target` has the wrong shape, TypeError if it has the wrong dtype.

    The compiled loop sees only addresses, and numpy may cast without a message.
    """
    shape = (rows, *source.shape[1:])
    if target.shape != shape:
        raise ValueError(f"the target of {rows} rows should have shape {shape}, not {target.shape}")
    if target.dtype != source.dtype:
        raise TypeError(f"the target should have dtype {source.dtype}, not {target.dtype}")


def compile_loops(features: Mapping[str, bool] | None = None) -> Native:
    """Compile the loops for this processor.

    `features` replaces the processor's own features: LLVM's name of each, and whether it may be used. Raises
    ImportError without llvmlite, OSError and RuntimeError if the loops cannot be compiled.
    """

    def write(ir: Any, module: Any, processor: str, here: Mapping[str, bool]) -> None:
        write_copy(ir, module)
        write_read(ir, module)
        UnpackWriter(ir, module, processor, here if features is None else features).write()

    function = compile_functions(write)
    read = function("read", 7, ctypes.c_int64)
    preadv = ctypes.cast(libc.preadv, ctypes.c_void_p).value
    unpack = function("unpack", len(LoopWork._fields) + 1, ctypes.c_int64)
    pread = ctypes.cast(libc.pread, ctypes.c_void_p).value
    copy = function("copy", 4)
    return Native(copy, lambda *arguments: read(*arguments, preadv), lambda work: unpack(*work, pread))


def compile_functions(write: Callable[[Any, Any, str, Mapping[str, bool]], None]) -> Callable[..., Any]:
    """Compile the functions that `write` emits, and return a function that looks up a compiled function by name.

    The call is `function(name, arguments, result=None)`: `arguments` is the number of arguments, which are all 64-bit
    numbers, and `result` the ctypes type of the result. `write` is called with llvmlite's module `ir`, the LLVM module
    to write into, and LLVM's names of this processor and of its features. Raises ImportError without llvmlite,
    RuntimeError if llvmlite cannot compile.
    """
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    here = binding.get_host_cpu_features()
    written = ir.Module()
    write(ir, written, binding.get_process_triple().partition("-")[0], here)
    module = binding.parse_assembly(str(written))
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=here.flatten(), opt=2
    )
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()

    def function(name: str, arguments: int, result: Any = None) -> Any:
        prototype = ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * arguments)  # releases the lock
        found = prototype(engine.get_function_address(name))
        found.engine = engine  # type: ignore[attr-defined]  # keeps the compiled code's memory alive
        return found

    return function


def write_copy(ir: Any, module: Any) -> None:
    """Emit the function copy(targets, sources, count, length); see `Native`.

    An ordinary store first reads the cache line that it overwrites, and leaves it in the cache, where it displaces
    another line. If a batch is larger than the cache, its first rows are gone when the last are written. A non-temporal
    store does neither, and copies such a batch nearly twice as fast. numpy has no such store.
    """
    code = FunctionWriter(ir, module, "copy", 4, returns=False)
    build, byte, word = code.build, code.byte, code.word
    line = ir.VectorType(byte, _LINE)
    targets, sources, count, length = code.arguments
    prefetch = code.instruction("llvm.prefetch.p0i8", ir.VoidType(), [byte.as_pointer(), *[code.half] * 3])

    def move(kind: Any, at: Any, size: int) -> Any:
        return code.store(code.load(kind, build.add(row, at)), build.add(to, at), size)

    def fetch_ahead(at: Any) -> None:
        """Emit a prefetch of bytes that are copied later: `_AHEAD` bytes after `at`, in this row or in the next one."""
        ahead = build.add(at, word(_AHEAD))
        there = build.add(next_row, code.smaller(build.sub(ahead, length), at))
        place = build.select(build.icmp_unsigned("<", ahead, length), build.add(row, ahead), there)
        build.call(prefetch, [build.inttoptr(place, byte.as_pointer()), *map(code.half, _TO_READ_INTO_L2)])

    last = build.sub(count, word(1))
    with code.counting(word(0), count, 1) as turn:
        row, to = code.item(sources, turn), code.item(targets, turn)
        next_row = code.item(sources, code.smaller(build.add(turn, word(1)), last))
        head = code.smaller(build.and_(build.neg(to), word(_LINE - 1)), length)  # bytes before the first whole line
        lines = build.and_(build.sub(length, head), word(-_LINE))
        tail = build.add(head, lines)
        with code.counting(word(0), head, 1) as at:
            move(byte, at, 1)
        with code.counting(head, tail, _LINE) as at:
            fetch_ahead(at)
            move(line, at, _LINE).set_metadata("nontemporal", module.add_metadata([code.half(1)]))
        with code.counting(tail, length, 1) as at:
            move(byte, at, 1)
    build.fence("seq_cst")  # orders stores past the cache before later ones
    build.ret_void()


def write_read(ir: Any, module: Any) -> None:
    """Emit the function read(descriptors, offsets, parts, width, lengths, count, preadv); see `Native`.

    `preadv` is the address of libc's function.
    """
    code = FunctionWriter(ir, module, "read", 7)
    build, half, word = code.build, code.half, code.word
    descriptors, offsets, parts, width, lengths, count, preadv = code.arguments
    call = code.pointer(preadv, word, [half, word, half, word])
    with code.counting(word(0), count, 1) as turn:
        descriptor = build.trunc(code.item(descriptors, turn), half)
        part = build.add(parts, build.mul(build.mul(turn, width), word(16)))  # a struct iovec: address and length
        found = build.call(call, [descriptor, part, build.trunc(width, half), code.item(offsets, turn)])
        with build.if_then(build.icmp_signed("!=", found, code.item(lengths, turn))):
            build.ret(turn)
    build.ret(count)


class UnpackWriter:
    """Emits the code of the loop that unpacks records, for one kind of processor, into the LLVM module `module`.

    `ir` is llvmlite's module of that name. `processor` is LLVM's name of the processor. `features` has LLVM's names of
    the processor's features, and for each whether it may be used. Raises RuntimeError for a processor without a loop.
    """

    def __init__(self, ir: Any, module: Any, processor: str, features: Mapping[str, bool]) -> None:
        if processor not in _SHUFFLES:
            raise RuntimeError(f"tpucache has no compiled loops for the processor {processor}")
        self._ir, self._module, self._shuffle = ir, module, _SHUFFLES[processor]
        self._has_expand = features.get("avx512vbmi2", False)
        self._step = 64 if self._has_expand else 16  # bytes written by one store

    def write(self) -> None:
        """Emit the function unpack. Its arguments are the fields of `LoopWork` and the address of libc's `pread`."""
        spread = self._write_spread(self._write_widen())
        names = (*LoopWork._fields, "pread")
        code = FunctionWriter(self._ir, self._module, "unpack", len(names))
        build, half, word = code.build, code.half, code.word
        work = dict(zip(names, code.arguments, strict=True))
        lz4 = code.pointer(work["function"], half, [word, word, half, half])
        zstd = code.pointer(work["function"], word, [word] * 5)
        pread = code.pointer(work["pread"], word, [half, word, word, word])
        form, most = work["sparse"], work["sparse_bytes"]
        has_context, in_files = (build.icmp_unsigned("!=", work[name], word(0)) for name in ("context", "descriptors"))
        prefix = build.select(in_files, word(_PREFIX), word(0))
        found = build.alloca(word)

        def stop_if(comparison: str, one: Any, other: Any) -> None:
            with build.if_then(build.icmp_unsigned(comparison, one, other)):
                build.ret(turn)

        with code.counting(word(0), work["records"], 1) as turn:
            place, whole, target = (code.item(work[name], turn) for name in ("sources", "lengths", "targets"))
            length = build.sub(whole, prefix)
            with build.if_then(in_files):
                # This also refuses a record that is shorter than its prefix: `length` is a large unsigned number then.
                stop_if(">", length, build.sub(work["record_bytes"], prefix))
                file = build.trunc(code.item(work["descriptors"], turn), half)
                stop_if("!=", build.call(pread, [file, work["record"], whole, place]), whole)
                stop_if("!=", build.zext(code.load(half, work["record"]), word), length)
            source = build.select(in_files, build.add(work["record"], prefix), place)
            with build.if_else(has_context) as (by_zstd, by_lz4):
                with by_zstd:
                    build.store(build.call(zstd, [work["context"], form, most, source, length]), found)
                with by_lz4:
                    stop_if(">", build.or_(length, most), word(_INT_MAX))  # refuses if either is too large
                    written = build.call(lz4, [source, form, *(build.trunc(each, half) for each in (length, most))])
                    build.store(build.sext(written, word), found)
            bytes_found = build.load(found)
            stop_if(">", bytes_found, most)  # an error is a negative number
            fits = build.call(spread, [form, bytes_found, target, work["size"], work["values"]])
            stop_if("==", fits, word(0))
        build.ret(work["records"])

    def _write_spread(self, widen: Any) -> Any:
        """Emit the function spread(source, length, target, size, widened), and return it.

        The emitted function decodes a sparse form (`store.codecs.sparse`) at `source` to the `size` bytes of a
        record at `target`. It returns 1 if the sparse form has exactly `length` bytes, otherwise 0. `widened` is memory
        for the values of a sparse form with nibbles, and 0 for other forms.
        """
        code = FunctionWriter(self._ir, self._module, "spread", 5)
        build, byte, word = code.build, code.byte, code.word
        source, length, target, size, widened = code.arguments
        tail = build.ptrtoint(build.alloca(self._ir.ArrayType(byte, _GROUP)), word)
        end = build.alloca(word)
        groups, whole = (build.lshr(each, word(6)) for each in (build.add(size, word(_GROUP - 1)), size))
        masks = build.add(source, groups)
        values = build.add(masks, _count_all(code, source, groups))
        has_nibbles = build.icmp_unsigned("!=", widened, word(0))
        with build.if_then(has_nibbles):
            count = _count_all(code, masks, build.sub(values, masks))
            build.store(build.call(widen, [values, count, widened]), end)  # the end of the form, by its nibbles
        carried = [masks, build.select(has_nibbles, widened, values)]
        with code.counting(word(0), groups, 1, carried) as group:
            masks, values = carried
            mask = build.zext(code.load(byte, build.add(source, group)), word)
            inner = self._expand_eight(code, mask, masks)
            place = build.add(target, build.shl(group, word(6)))
            to = build.select(build.icmp_unsigned("<", group, whole), place, tail)
            for at in range(0, _GROUP, self._step):
                found, values = self._expand(code, build.lshr(inner, word(at)), values)
                code.store(found, build.add(to, word(at)))
            carried[:] = [build.add(masks, code.count_bits(mask)), values]
        ends = build.shl(whole, word(6))
        with code.counting(ends, size, 1) as at:
            code.store(code.load(byte, build.add(tail, build.sub(at, ends))), build.add(target, at))
        last = build.select(has_nibbles, build.load(end), carried[1])
        build.ret(build.zext(build.icmp_unsigned("==", build.sub(last, source), length), word))
        return code.function

    def _write_widen(self) -> Any:
        """Emit the function widen(source, count, target), and return it.

        The emitted function decodes nibbles (`store.codecs.sparse`) at `source` to `count` values at `target`. It
        returns the address at which the encoded values end.
        """
        ir, step = self._ir, self._step
        code = FunctionWriter(ir, self._module, "widen", 3)
        build, word = code.build, code.word
        source, count, target = code.arguments
        half_line, line = ir.VectorType(code.byte, step // 2), ir.VectorType(code.byte, step)
        pairs = ir.VectorType(ir.IntType(16), step // 2)
        four, low = (ir.Constant(pairs, [value] * pairs.count) for value in (4, 0x0F0F))
        zero, sign = (ir.Constant(line, [value] * step) for value in (0, 8))
        carried = [build.add(source, build.lshr(build.add(count, word(1)), word(1)))]
        with code.counting(word(0), count, step, carried) as at:
            found = build.zext(code.load(half_line, build.add(source, build.lshr(at, word(1)))), pairs)
            found = build.and_(build.or_(found, build.shl(found, four)), low)
            nibbles = build.bitcast(found, line)
            mask = build.zext(build.bitcast(build.icmp_unsigned("==", nibbles, zero), ir.IntType(step)), word)
            mask = build.and_(mask, code.lowest(build.sub(count, at)))
            narrow = build.sub(build.xor(nibbles, sign), sign)
            whole, carried[0] = self._expand(code, mask, carried[0])
            code.store(build.or_(narrow, whole), build.add(target, at))
        build.ret(carried[0])
        return code.function

    def _expand(self, code: FunctionWriter, mask: Any, values: Any) -> tuple[Any, Any]:
        """Emit code that makes a vector of bytes from the lowest bits of `mask`, one byte for each bit.

        For a set bit the byte is the next value at the address `values`, otherwise 0. Return the vector, and the
        address of the value after the last one used.
        """
        build, word, size = code.build, code.word, self._step
        line = self._ir.VectorType(code.byte, size)
        if self._has_expand:
            flags = self._ir.VectorType(self._ir.IntType(1), size)
            expand = code.instruction(_EXPAND, line, [line, line, flags])
            zero = self._ir.Constant(line, None)
            found = build.call(expand, [code.load(line, values), zero, build.bitcast(mask, flags)])
            return found, build.add(values, code.count_bits(mask))
        words: Any = self._ir.Constant(self._ir.VectorType(word, size // 8), None)
        for turn in range(size // 8):
            each = build.and_(build.lshr(mask, word(8 * turn)), word(255))
            words = build.insert_element(words, self._expand_eight(code, each, values), code.half(turn))
            values = build.add(values, code.count_bits(each))
        return build.bitcast(words, line), values

    def _expand_eight(self, code: FunctionWriter, mask: Any, values: Any) -> Any:
        """Emit code that makes eight bytes from the eight bits of `mask`, and return them as a 64-bit word.

        For a set bit the byte is the next value at the address `values`, otherwise 0.
        """
        build, half, word = code.build, code.half, code.word
        words, vector = self._ir.VectorType(word, 2), self._ir.VectorType(code.byte, 16)
        shuffle = code.instruction(self._shuffle, vector, [vector, vector])
        table = code.constant("places", _places(), align=64)

        def as_bytes(at: Any) -> Any:
            eight = build.insert_element(self._ir.Constant(words, None), code.load(word, at), half(0))
            return build.bitcast(eight, vector)

        found = build.call(shuffle, [as_bytes(values), as_bytes(build.add(table, build.shl(mask, word(3))))])
        return build.extract_element(build.bitcast(found, words), half(0))


def _count_all(code: FunctionWriter, start: Any, length: Any) -> Any:
    """Emit code that counts the set bits of the `length` bytes from `start`, and return the number."""
    build, word = code.build, code.word
    counted = [word(0)]
    with code.counting(word(0), length, 8, counted) as at:
        ours = code.lowest(build.shl(build.sub(length, at), word(3)))
        bits = build.and_(code.load(word, build.add(start, at)), ours)
        counted[0] = build.add(counted[0], code.count_bits(bits))
    return counted[0]


def _places() -> bytes:
    """Return a table of 256 rows of eight bytes, one row for each mask of eight bits.

    Byte k of a row is the index of the value that belongs to bit k of the mask; 128 if this bit is not set.
    """
    masks = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    order = np.cumsum(masks, axis=1) - 1
    return np.where(masks, order, 128).astype(np.uint8).tobytes()


class FunctionWriter:
    """Emits the code of one function of an LLVM module. All arguments are 64-bit numbers or addresses.

    `build` is llvmlite's builder, for operations without a method here. `ir` is llvmlite's module. Methods that compute
    something emit the code for it and return its result, a value of llvmlite.
    """

    def __init__(self, ir: Any, module: Any, name: str, arguments: int, *, returns: bool = True) -> None:
        self.ir, self._module = ir, module
        self.byte, self.half, self.word = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        kind = ir.FunctionType(self.word if returns else ir.VoidType(), [self.word] * arguments)
        self.function = ir.Function(module, kind, name)
        self.arguments = self.function.args
        self.build = ir.IRBuilder(self.function.append_basic_block())

    def instruction(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """Return LLVM's intrinsic function `name`, and declare it in the module if it is missing there.

        `result` and `arguments` are the types of the function's result and arguments.
        """
        if name not in self._module.globals:
            self.ir.Function(self._module, self.ir.FunctionType(result, arguments), name)
        return self._module.globals[name]

    def constant(self, name: str, content: bytes, align: int) -> Any:
        """Return the address of the bytes `content`, which become a constant of the module."""
        if name not in self._module.globals:
            kind = self.ir.ArrayType(self.byte, len(content))
            made = self.ir.GlobalVariable(self._module, kind, name)
            made.global_constant, made.align, made.initializer = True, align, self.ir.Constant(kind, bytearray(content))
        return self._module.globals[name].ptrtoint(self.word)

    def pointer(self, address: Any, result: Any, arguments: list[Any]) -> Any:
        """Return the function at an address; `result` and `arguments` are the types of its result and arguments."""
        return self.build.inttoptr(address, self.ir.FunctionType(result, arguments).as_pointer())

    def load(self, kind: Any, at: Any) -> Any:
        """Emit the code that loads a value of type `kind` from the address `at`, aligned or not; return the value."""
        return self.build.load(self.build.inttoptr(at, kind.as_pointer()), align=1)

    def store(self, value: Any, at: Any, align: int = 1) -> Any:
        """Emit the code that stores `value` at the address `at`, a multiple of `align`; return that instruction."""
        return self.build.store(value, self.build.inttoptr(at, value.type.as_pointer()), align=align)

    def item(self, array: Any, at: Any) -> Any:
        """Emit the code that loads item number `at` of `array`, an array of 64-bit numbers; return the loaded value."""
        return self.load(self.word, self.build.add(array, self.build.shl(at, self.word(3))))

    def smaller(self, one: Any, other: Any) -> Any:
        """Emit the code that computes the smaller of two unsigned numbers; return the smaller number."""
        return self.build.select(self.build.icmp_unsigned("<", one, other), one, other)

    def count_bits(self, bits: Any) -> Any:
        """Emit the code that counts the bits that are set in a word; return their number."""
        return self.build.call(self.instruction("llvm.ctpop.i64", self.word, [self.word]), [bits])

    def lowest(self, count: Any) -> Any:
        """Emit the code that makes a word whose lowest `count` bits are set, at most 64; return the word."""
        some = self.build.not_(self.build.shl(self.word(-1), count))
        return self.build.select(self.build.icmp_unsigned("<", count, self.word(64)), some, self.word(-1))

    @contextlib.contextmanager
    def counting(self, start: Any, stop: Any, step: int, carried: list[Any] | None = None) -> Iterator[Any]:
        """Emit a loop whose body is the code that the `with` block emits. Yield the loop's counter.

        The counter goes from `start` in steps of `step` while it is below `stop`. `carried` is a list of values that
        each iteration hands to the next one. The caller fills it with the initial values. In the `with` block it has
        the values of the current iteration, and the block replaces them by those of the next iteration. After the block
        it has the values after the last iteration.
        """
        build = self.build
        carried = [] if carried is None else carried
        before, check = build.block, build.append_basic_block()
        body, after = build.append_basic_block(), build.append_basic_block()
        build.branch(check)
        build.position_at_end(check)
        nodes = [build.phi(value.type) for value in (start, *carried)]
        for node, value in zip(nodes, (start, *carried), strict=True):
            node.add_incoming(value, before)
        counter, *carried[:] = nodes
        build.cbranch(build.icmp_unsigned("<", counter, stop), body, after)
        build.position_at_end(body)
        yield counter
        following = build.add(counter, counter.type(step))
        for node, value in zip(nodes, (following, *carried), strict=True):
            node.add_incoming(value, build.block)
        build.branch(check)
        build.position_at_end(after)
        carried[:] = nodes[1:]
