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
from functools import partialmethod
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Loops = TypeVar("Loops")
Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.int64]

_LARGE: Final = 8 << 20  # much of a smaller batch is still in the cache when it is read, so ordinary stores are as fast
_LONG: Final = 1 << 10  # bytes of a row; shorter rows have too few whole cache lines
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, which Python's mmap lacks


_log: Final = logging.getLogger("tpucache")


#: Held while loops are compiled, because llvmlite must not run in several threads at once.
_compiling: Final = threading.Lock()
# Without this, a process that is forked during a compilation would have a lock that no thread of it can release.
os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release)

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

    `descriptors` are those of the files, `offsets` where the records begin, and `lengths` their bytes, with the 4 bytes
    before each record that contain its length; all are int64 (n,).
    """

    descriptors: Numbers
    offsets: Numbers
    lengths: Numbers


class Native(NamedTuple):
    """Compiled loops, of the addresses of arrays."""

    #: copy(targets, sources, count, length): copy `count` rows of `length` bytes past the processor's caches. `targets`
    #: and `sources` are arrays with the address of each row.
    copy: Callable[[int, int, int, int], int]
    #: read(descriptors, offsets, parts, width, lengths, count): read `count` records by `preadv`. `parts` is an array
    #: of C's struct iovec, `width` of them for each record, which say where its bytes go. Returns the number of records
    #: before the first one with a wrong length.
    read: Callable[[int, int, int, int, int, int], int]
    #: Unpack records up to the first one that does not give exactly `size` bytes. Returns the number of records before
    #: that one; the number of all records if there is none.
    unpack: Callable[[LoopWork], int]


@functools.cache
def native() -> Native | None:
    """Return the compiled loops, or None if they cannot be compiled (see `compiled`)."""
    return compiled(compile_loops, "numpy copies and unpacks batches")


def compiled(compile_code: Callable[[], Loops], without: str) -> Loops | None:
    """Return what `compile_code` returns, called once. If it fails, log a warning once and return None.

    If several threads call this function, one thread compiles and the other threads wait. `without` says in the warning
    what happens without compiled code.
    """
    with _compiling:
        return _compiled(compile_code, without)


@functools.cache
def _compiled(compile_code: Callable[[], Loops], without: str) -> Loops | None:
    try:
        return compile_code()
    except Exception as error:  # noqa: BLE001  # whatever llvmlite raises
        _log.warning("%s; compiled loops are faster: `pip install llvmlite` (%s)", without, error)
        return None


def populate(start: int, length: int) -> bool:
    """Read `length` bytes of a memory map, from the address `start` on, and enter their pages in the page table.

    Return False if the kernel has no such call, or if pages cannot be read, so that access would end the process.
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

    Both arrays are int64 (n,) and contiguous. With `past_caches`, a compiled loop writes past the processor's caches.
    Several threads may call this. The caller keeps the memory alive and checks that it is large enough.
    """
    loops = native() if past_caches else None
    if loops is not None:
        loops.copy(address(targets), address(sources), len(targets), length)
        return
    move = ctypes.memmove
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        move(target, source, length)


def gather(source: Array, rows: Numbers, target: Array) -> None:
    """Copy rows: target[i] = source[rows[i]]. The arrays are contiguous and fit; the caller checks `rows`."""
    if not is_large(len(rows), target.nbytes):
        np.take(source, rows, axis=0, out=target, mode="clip")  # with "clip", numpy writes without a buffer
        return
    length = target.nbytes // len(rows)
    targets = address(target) + length * np.arange(len(rows))
    copy_rows(targets, address(source) + length * rows, length, past_caches=True)


def compile_loops(features: Mapping[str, bool] | None = None) -> Native:
    """Compile the loops for this processor.

    `features` replaces the processor's own features, by LLVM's name of each. Raises ImportError without llvmlite,
    OSError and RuntimeError if the loops cannot be compiled.
    """

    def write(ir: Any, module: Any) -> None:
        write_copy(ir, module)
        write_read(ir, module)
        UnpackWriter(ir, module, features).write()

    function = compile_functions(write)
    unpack = function("unpack")
    return Native(function("copy"), function("read"), lambda work: unpack(*work))


def compile_functions(write: Callable[[Any, Any], None]) -> Callable[[str], Callable[..., int]]:
    """Compile the functions that `write` emits, and return a function that looks up a compiled function by name.

    `write` is called with llvmlite's module `ir` and the LLVM module to write into. Raises ImportError without
    llvmlite, RuntimeError if llvmlite cannot compile.
    """
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    written = ir.Module()
    write(ir, written)
    module = binding.parse_assembly(str(written))
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()

    def function(name: str) -> Any:
        numbers = [ctypes.c_int64] * (1 + len(written.get_global(name).args))
        found = ctypes.CFUNCTYPE(*numbers)(engine.get_function_address(name))  # releases the lock
        found.engine = engine  # type: ignore[attr-defined]  # keeps the compiled code's memory alive
        return found

    return function


def write_copy(ir: Any, module: Any) -> None:
    """Emit the function copy(targets, sources, count, length); see `Native`.

    An ordinary store first reads the cache line that it overwrites, and leaves it in the cache in place of another
    line. A non-temporal store does neither, and copies a batch that is larger than the cache nearly twice as fast.
    numpy has no such store.
    """
    code = FunctionWriter(ir, module, "copy", 4)
    byte = code.byte
    line = ir.VectorType(byte, _LINE)
    targets, sources, count, length = code.arguments
    prefetch = code.outside("llvm.prefetch.p0i8", ir.VoidType(), [byte.as_pointer(), *[code.half] * 3])

    def move(kind: Any, at: Any, size: int) -> Any:
        return code.store(code.load(kind, row + at), to + at, size)

    def fetch_ahead(at: Any) -> None:
        """Emit a prefetch of bytes that are copied later: `_AHEAD` bytes after `at`, in this row or in the next one."""
        ahead = at + _AHEAD
        there = next_row + code.smaller(ahead - length, at)
        place = (ahead < length).emit("select", row + ahead, there)
        code.call(prefetch, place.emit("inttoptr", byte.as_pointer()), *map(code.half, _TO_READ_INTO_L2))

    last = count - 1
    with code.counting(0, count) as turn:
        row, to = code.item(sources, turn), code.item(targets, turn)
        next_row = code.item(sources, code.smaller(turn + 1, last))
        head = code.smaller(-to & (_LINE - 1), length)  # bytes before the first whole line
        lines = (length - head) & -_LINE
        tail = head + lines
        with code.counting(0, head) as at:
            move(byte, at, 1)
        with code.counting(head, tail, _LINE) as at:
            fetch_ahead(at)
            move(line, at, _LINE).set_metadata("nontemporal", module.add_metadata([code.half(1)]))
        with code.counting(tail, length) as at:
            move(byte, at, 1)
    code.build.fence("seq_cst")  # orders stores past the cache before later ones
    code.build.ret(count)


def write_read(ir: Any, module: Any) -> None:
    """Emit the function read(descriptors, offsets, parts, width, lengths, count); see `Native`."""
    code = FunctionWriter(ir, module, "read", 6)
    half, word = code.half, code.word
    descriptors, offsets, parts, width, lengths, count = code.arguments
    preadv = code.outside("preadv", word, [half, word, half, word])
    with code.counting(0, count) as turn:
        descriptor = code.item(descriptors, turn).emit("trunc", half)
        part = parts + turn * width * 16  # a struct iovec: address and length
        found = code.call(preadv, descriptor, part, width.emit("trunc", half), code.item(offsets, turn))
        with code.build.if_then(found.compare("!=", code.item(lengths, turn))):
            code.build.ret(turn)
    code.build.ret(count)


class UnpackWriter:
    """Emits the code of the loop that unpacks records, for this processor, into the LLVM module `module`.

    `ir` is llvmlite's module of that name; for `features` see `compile_loops`. Raises RuntimeError for a processor
    without a loop.
    """

    def __init__(self, ir: Any, module: Any, features: Mapping[str, bool] | None) -> None:
        from llvmlite import binding

        processor = binding.get_process_triple().partition("-")[0]
        if processor not in _SHUFFLES:
            raise RuntimeError(f"tpucache has no compiled loops for the processor {processor}")
        self._ir, self._module, self._shuffle = ir, module, _SHUFFLES[processor]
        here = binding.get_host_cpu_features() if features is None else features
        self._has_expand = here.get("avx512vbmi2", False)
        self._step = 64 if self._has_expand else 16  # bytes written by one store

    def write(self) -> None:
        """Emit the function unpack, whose arguments are the fields of `LoopWork`."""
        spread = self._write_spread(self._write_widen())
        code = FunctionWriter(self._ir, self._module, "unpack", len(LoopWork._fields))
        build, half, word = code.build, code.half, code.word
        work: Any = LoopWork(*code.arguments)
        function = self._ir.FunctionType
        lz4 = work.function.emit("inttoptr", function(half, [word, word, half, half]).as_pointer())
        zstd = work.function.emit("inttoptr", function(word, [word] * 5).as_pointer())
        pread = code.outside("pread", word, [half, word, word, word])
        form, most = work.sparse, work.sparse_bytes
        has_context, in_files = work.context.compare("!=", 0), work.descriptors.compare("!=", 0)
        prefix = in_files.emit("select", word(_PREFIX), word(0))
        found = build.alloca(word)

        def stop_if(is_wrong: Any) -> None:
            with build.if_then(is_wrong):
                build.ret(turn)

        with code.counting(0, work.records) as turn:
            place, whole, target = (code.item(each, turn) for each in (work.sources, work.lengths, work.targets))
            length = whole - prefix
            with build.if_then(in_files):
                # This also refuses a record that is shorter than its prefix: `length` is a large unsigned number then.
                stop_if(length > work.record_bytes - prefix)
                file = code.item(work.descriptors, turn).emit("trunc", half)
                stop_if(code.call(pread, file, work.record, whole, place).compare("!=", whole))
                stop_if(code.load(half, work.record).emit("zext", word).compare("!=", length))
            source = in_files.emit("select", work.record + prefix, place)
            with build.if_else(has_context) as (by_zstd, by_lz4):
                with by_zstd:
                    build.store(code.call(zstd, work.context, form, most, source, length), found)
                with by_lz4:
                    stop_if((length | most) > _INT_MAX)  # refuses if either is too large
                    written = code.call(lz4, source, form, *(each.emit("trunc", half) for each in (length, most)))
                    build.store(written.emit("sext", word), found)
            bytes_found = code.value(build.load(found))
            stop_if(bytes_found > most)  # an error is a negative number
            stop_if(code.call(spread, form, bytes_found, target, work.size, work.values).compare("==", 0))
        build.ret(work.records)

    def _write_spread(self, widen: Any) -> Any:
        """Emit the function spread(source, length, target, size, widened), and return it.

        The emitted function decodes a sparse form (`store.codecs.sparse`) at `source` to the `size` bytes of a
        record at `target`. It returns 1 if the sparse form has exactly `length` bytes, otherwise 0. `widened` is memory
        for the values of a sparse form with nibbles, and 0 for other forms.
        """
        code = FunctionWriter(self._ir, self._module, "spread", 5)
        build, byte, word = code.build, code.byte, code.word
        source, length, target, size, widened = code.arguments
        tail = code.value(build.alloca(self._ir.ArrayType(byte, _GROUP))).emit("ptrtoint", word)
        end = build.alloca(word)
        groups, whole = (size + (_GROUP - 1)) >> 6, size >> 6
        masks = source + groups
        values = masks + _count_all(code, source, groups)
        has_nibbles = widened.compare("!=", 0)
        with build.if_then(has_nibbles):
            count = _count_all(code, masks, values - masks)
            build.store(code.call(widen, values, count, widened), end)  # the end of the form, by its nibbles
        carried = [masks, has_nibbles.emit("select", widened, values)]
        with code.counting(0, groups, 1, carried) as group:
            masks, values = carried
            mask = code.load(byte, source + group).emit("zext", word)
            inner = self._expand_eight(code, mask, masks)
            place = target + (group << 6)
            to = (group < whole).emit("select", place, tail)
            for at in range(0, _GROUP, self._step):
                found, values = self._expand(code, inner >> at, values)
                code.store(found, to + at)
            carried[:] = [masks + mask.emit("ctpop"), values]
        ends = whole << 6
        with code.counting(ends, size) as at:
            code.store(code.load(byte, tail + (at - ends)), target + at)
        last = has_nibbles.emit("select", build.load(end), carried[1])
        build.ret((last - source).compare("==", length).emit("zext", word))
        return code.function

    def _write_widen(self) -> Any:
        """Emit the function widen(source, count, target), and return it.

        The emitted function decodes nibbles (`store.codecs.sparse`) at `source` to `count` values at `target`. It
        returns the address at which the encoded values end.
        """
        ir, step = self._ir, self._step
        code = FunctionWriter(ir, self._module, "widen", 3)
        source, count, target = code.arguments
        half_line, line = ir.VectorType(code.byte, step // 2), ir.VectorType(code.byte, step)
        pairs = ir.VectorType(ir.IntType(16), step // 2)
        carried = [source + ((count + 1) >> 1)]
        with code.counting(0, count, step, carried) as at:
            found = code.load(half_line, source + (at >> 1)).emit("zext", pairs)
            nibbles = ((found | (found << 4)) & 0x0F0F).emit("bitcast", line)
            mask = nibbles.compare("==", 0).emit("bitcast", ir.IntType(step)).emit("zext", code.word)
            mask = mask & code.lowest(count - at)
            narrow = (nibbles ^ 8) - 8
            whole, carried[0] = self._expand(code, mask, carried[0])
            code.store(narrow | whole, target + at)
        code.build.ret(carried[0])
        return code.function

    def _expand(self, code: FunctionWriter, mask: Any, values: Any) -> tuple[Any, Any]:
        """Emit code that makes a vector of bytes from the lowest bits of `mask`, one byte for each bit.

        For a set bit the byte is the next value at the address `values`, otherwise 0. Return the vector, and the
        address of the value after the last one used.
        """
        size = self._step
        line = self._ir.VectorType(code.byte, size)
        if self._has_expand:
            flags = self._ir.VectorType(self._ir.IntType(1), size)
            expand = code.outside(_EXPAND, line, [line, line, flags])
            found = code.call(expand, code.load(line, values), line(None), mask.emit("bitcast", flags))
            return found, values + mask.emit("ctpop")
        words = code.value(self._ir.VectorType(code.word, size // 8)(None))
        for turn in range(size // 8):
            each = (mask >> (8 * turn)) & 255
            words = words.emit("insert_element", self._expand_eight(code, each, values), code.half(turn))
            values = values + each.emit("ctpop")
        return words.emit("bitcast", line), values

    def _expand_eight(self, code: FunctionWriter, mask: Any, values: Any) -> Any:
        """Emit code that makes eight bytes from the eight bits of `mask`, and return them as a 64-bit word.

        For a set bit the byte is the next value at the address `values`, otherwise 0.
        """
        words, vector = self._ir.VectorType(code.word, 2), self._ir.VectorType(code.byte, 16)
        shuffle = code.outside(self._shuffle, vector, [vector, vector])
        table, first = code.constant("places", _places()), code.half(0)

        def as_bytes(at: Any) -> Any:
            eight = code.value(words(None)).emit("insert_element", code.load(code.word, at), first)
            return eight.emit("bitcast", vector)

        found = code.call(shuffle, as_bytes(values), as_bytes(table + (mask << 3)))
        return found.emit("bitcast", words).emit("extract_element", first)


def _count_all(code: FunctionWriter, start: Any, length: Any) -> Any:
    """Emit code that counts the set bits of the `length` bytes from `start`, and return the number."""
    counted = [code.value(code.word(0))]
    with code.counting(0, length, 8, counted) as at:
        ours = code.lowest((length - at) << 3)
        bits = code.load(code.word, start + at) & ours
        counted[0] += bits.emit("ctpop")
    return counted[0]


def _places() -> bytes:
    """Return a table of 256 rows of eight bytes, one row for each mask of eight bits.

    Byte k of a row is the index of the value that belongs to bit k of the mask; 128 if this bit is not set.
    """
    masks = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    order = np.cumsum(masks, axis=1) - 1
    return np.where(masks, order, 128).astype(np.uint8).tobytes()


class Value:
    """A number that compiled code computes, or a vector of numbers. Python's operators emit the code of LLVM's.

    Numbers have no sign. A Python number beside a value is a constant of its type. llvmlite takes a Value for its own.
    """

    def __init__(self, build: Any, found: Any) -> None:
        self._build, self._found = build, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def emit(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Emit the operation of llvmlite's builder with this name; this value is its first operand."""
        function = getattr(self._build, operation)
        return Value(self._build, function(self, *map(self.constant, operands), **options))

    __add__ = partialmethod(emit, "add")
    __sub__ = partialmethod(emit, "sub")
    __mul__ = partialmethod(emit, "mul")
    __and__ = partialmethod(emit, "and_")
    __or__ = partialmethod(emit, "or_")
    __xor__ = partialmethod(emit, "xor")
    __lshift__ = partialmethod(emit, "shl")
    __rshift__ = partialmethod(emit, "lshr")
    __neg__ = partialmethod(emit, "neg")
    __invert__ = partialmethod(emit, "not_")

    def compare(self, operator: str, other: Any, *, is_signed: bool = False) -> Any:
        function = self._build.icmp_signed if is_signed else self._build.icmp_unsigned
        return Value(self._build, function(operator, self, self.constant(other)))

    __lt__ = partialmethod(compare, "<")
    __gt__ = partialmethod(compare, ">")

    def constant(self, operand: Any) -> Any:
        """Return a Python number as a constant of this value's type, and anything else unchanged."""
        if not isinstance(operand, int):
            return operand
        count = getattr(self.type, "count", None)
        return self.type(operand if count is None else [operand] * count)


class FunctionWriter:
    """Emits the code of one function of an LLVM module. All arguments and the result are 64-bit numbers or addresses.

    `build` is llvmlite's builder, for operations without a method here. `ir` is llvmlite's module. Methods emit code,
    and return its result as a `Value`.
    """

    def __init__(self, ir: Any, module: Any, name: str, arguments: int) -> None:
        self.ir, self._module = ir, module
        self.byte, self.half, self.word = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        self.function = ir.Function(module, ir.FunctionType(self.word, [self.word] * arguments), name)
        self.build = ir.IRBuilder(self.function.append_basic_block())
        self.arguments = [*map(self.value, self.function.args)]

    def value(self, found: Any) -> Any:
        """Return a value of llvmlite as a `Value`."""
        return Value(self.build, found)

    def call(self, function: Any, *arguments: Any) -> Any:
        return self.value(self.build.call(function, arguments))

    def outside(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """Return a function of the C library or an intrinsic one of LLVM, by its name and types."""
        return self._module.declare_intrinsic(name, (), self.ir.FunctionType(result, arguments))

    def constant(self, name: str, content: bytes) -> Any:
        """Return the address of bytes that become a constant of the module."""
        if name not in self._module.globals:
            kind = self.ir.ArrayType(self.byte, len(content))
            made = self.ir.GlobalVariable(self._module, kind, name)
            made.global_constant, made.align, made.initializer = True, _LINE, kind(bytearray(content))
        return self.value(self._module.globals[name].ptrtoint(self.word))

    def load(self, kind: Any, at: Any) -> Any:
        """Load a value of type `kind` from the address `at`, aligned or not."""
        return at.emit("inttoptr", kind.as_pointer()).emit("load", align=1)

    def store(self, value: Any, at: Any, align: int = 1) -> Any:
        """Store `value` at the address `at`, a multiple of `align`; return that instruction."""
        return value.emit("store", at.emit("inttoptr", value.type.as_pointer()), align=align)

    def item(self, array: Any, at: Any) -> Any:
        """Load item number `at` of an array of 64-bit numbers."""
        return self.load(self.word, array + (at << 3))

    def smaller(self, one: Any, other: Any) -> Any:
        return (one < other).emit("select", one, other)

    def between(self, value: Any, low: Any, high: Any) -> Any:
        """Return signed numbers, limited to the range from `low` to `high`."""
        low, high = map(value.constant, (low, high))
        value = value.compare("<", low, is_signed=True).emit("select", low, value)
        return value.compare(">", high, is_signed=True).emit("select", high, value)

    def lowest(self, count: Any) -> Any:
        """Return a word whose lowest `count` bits are set, at most 64."""
        every = self.value(self.word(-1))
        return (count < 64).emit("select", ~(every << count), every)

    @contextlib.contextmanager
    def counting(self, start: Any, stop: Any, step: int = 1, carried: list[Any] | None = None) -> Iterator[Any]:
        """Emit a loop whose body is the code that the `with` block emits. Yield the loop's counter.

        The counter goes from `start` in steps of `step` while it is below `stop`. `carried` is a list of values that
        each iteration hands to the next: the caller fills it, and the `with` block replaces its values. After the block
        it has those of the last iteration.
        """
        build = self.build
        carried = [] if carried is None else carried
        first = [self.word(start) if isinstance(start, int) else start, *carried]
        before, check = build.block, build.append_basic_block()
        body, after = build.append_basic_block(), build.append_basic_block()
        build.branch(check)
        build.position_at_end(check)
        nodes = [self.value(build.phi(value.type)) for value in first]
        for node, value in zip(nodes, first, strict=True):
            node.add_incoming(value, before)
        counter, *carried[:] = nodes
        build.cbranch(counter < stop, body, after)
        build.position_at_end(body)
        yield counter
        for node, value in zip(nodes, (counter + step, *carried), strict=True):
            node.add_incoming(value, build.block)
        build.branch(check)
        build.position_at_end(after)
        carried[:] = nodes[1:]
