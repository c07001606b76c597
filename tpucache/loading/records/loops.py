"""LoopWriter: the loops of `loading.records.native` in the language of LLVM.

An ordinary store reads from memory the line it is about to overwrite, and leaves it in the cache, where it displaces
another: of a batch larger than the cache, the first rows are gone when the last are written. A non-temporal store does
neither, and copies such a batch nearly twice as fast. numpy has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tpucache.store.codecs.base import LoopWork

_LINE: Final = 64  # bytes of a cache line; shorter stores past the cache would each write a line
_AHEAD: Final = 4096  # bytes; by itself a processor looks ahead within a page only
_TO_READ_INTO_L2: Final = (0, 2, 1)  # LLVM's arguments of a prefetch: to read; 2 is L2, 3 would be L1; data
_INT_MAX: Final = (1 << 31) - 1  # the longest record whose length a C int holds
# What moves the bytes of a vector to places, by their numbers: 128 or more gives 0. Of 16 bytes, eight are used.
_SHUFFLES: Final = {"x86_64": "llvm.x86.ssse3.pshuf.b.128", "aarch64": "llvm.aarch64.neon.tbl1.v16i8"}
# What puts 64 bytes in place at once, where a processor has AVX-512 VBMI2: dct-lz4 is unpacked in half of the time.
_EXPAND: Final = "llvm.x86.avx512.mask.expand.v64i8"


class LoopWriter:
    """Writes the loops for a processor, given by LLVM's names of it and of what it can do; addresses are integers.

    `ir` is llvmlite's module of that name. Raises RuntimeError for a processor that there are no loops for.
    """

    def __init__(self, ir: Any, processor: str, features: Mapping[str, bool]) -> None:
        if processor not in _SHUFFLES:
            raise RuntimeError(f"there are no loops for {processor}")
        self._ir, self._shuffle = ir, _SHUFFLES[processor]
        self._has_expand = features.get("avx512vbmi2", False)
        self._step = 64 if self._has_expand else 16  # bytes put in place by one store
        self._byte, self._half, self._word = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        self.module = ir.Module()
        self._count_bits = self._declare("llvm.ctpop.i64", self._word, [self._word])
        self._places = self._constant("places", _places())
        self._write_copy()
        self._write_read()
        self._write_unpack(self._write_spread(self._write_widen()))

    def _write_copy(self) -> None:
        ir, byte, word = self._ir, self._byte, self._word
        line = ir.VectorType(byte, _LINE)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [word] * 4), "copy")
        targets, sources, count, length = function.args
        build = ir.IRBuilder(function.append_basic_block())
        prefetch = self._declare("llvm.prefetch.p0i8", ir.VoidType(), [byte.as_pointer(), *[self._half] * 3])

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

    def _write_widen(self) -> Any:
        """Write the decoder of nibbles, `store.codecs.dct.nibbles`: it returns where those of so many values end."""
        ir, word, step = self._ir, self._word, self._step
        function = ir.Function(self.module, ir.FunctionType(word, [word] * 3), "widen")
        source, count, target = function.args
        build = ir.IRBuilder(function.append_basic_block())
        half_line, line = ir.VectorType(self._byte, step // 2), ir.VectorType(self._byte, step)
        pairs = ir.VectorType(ir.IntType(16), step // 2)
        four, low = (ir.Constant(pairs, [value] * pairs.count) for value in (4, 0x0F0F))
        zero, sign = (ir.Constant(line, [value] * step) for value in (0, 8))
        carried = [build.add(source, build.lshr(build.add(count, word(1)), word(1)))]
        with self._counting(build, word(0), count, step, carried) as at:
            found = build.zext(self._load(build, half_line, build.add(source, build.lshr(at, word(1)))), pairs)
            found = build.and_(build.or_(found, build.shl(found, four)), low)
            nibbles = build.bitcast(found, line)
            mask = build.zext(build.bitcast(build.icmp_unsigned("==", nibbles, zero), ir.IntType(step)), word)
            mask = build.and_(mask, self._lowest(build, build.sub(count, at)))
            narrow = build.sub(build.xor(nibbles, sign), sign)
            whole, carried[0] = self._expand(build, mask, carried[0])
            self._store(build, build.or_(narrow, whole), build.add(target, at))
        build.ret(carried[0])
        return function

    def _write_spread(self, widen: Any) -> Any:
        """Write the decoder of a sparse form, `store.codecs.dct.sparse`: 1 where its length is right, else 0."""
        ir, byte, word = self._ir, self._byte, self._word
        function = ir.Function(self.module, ir.FunctionType(word, [word] * 5), "spread")
        source, length, target, size, widened = function.args
        build = ir.IRBuilder(function.append_basic_block())
        tail = build.ptrtoint(build.alloca(ir.ArrayType(byte, _LINE)), word)
        end = build.alloca(word)
        groups, whole = (build.lshr(each, word(6)) for each in (build.add(size, word(_LINE - 1)), size))
        masks = build.add(source, groups)
        values = build.add(masks, self._count_all(build, source, groups))
        has_nibbles = build.icmp_unsigned("!=", widened, word(0))
        with build.if_then(has_nibbles):
            count = self._count_all(build, masks, build.sub(values, masks))
            build.store(build.call(widen, [values, count, widened]), end)  # where the form ends, by its nibbles
        carried = [masks, build.select(has_nibbles, widened, values)]
        with self._counting(build, word(0), groups, 1, carried) as group:
            masks, values = carried
            mask = build.zext(self._load(build, byte, build.add(source, group)), word)
            inner = self._expand_eight(build, mask, masks)
            place = build.add(target, build.shl(group, word(6)))
            to = build.select(build.icmp_unsigned("<", group, whole), place, tail)
            values = self._expand_group(build, inner, values, to)
            carried[:] = [build.add(masks, build.call(self._count_bits, [mask])), values]
        ends = build.shl(whole, word(6))
        with self._counting(build, ends, size, 1) as at:
            self._store(build, self._load(build, byte, build.add(tail, build.sub(at, ends))), build.add(target, at))
        last = build.select(has_nibbles, build.load(end), carried[1])
        build.ret(build.zext(build.icmp_unsigned("==", build.sub(last, source), length), word))
        return function

    def _count_all(self, build: Any, start: Any, length: Any) -> Any:
        """Write the count of the bits of so many bytes, eight at a time."""
        word = self._word
        counted = [word(0)]
        with self._counting(build, word(0), length, 8, counted) as at:
            ours = self._lowest(build, build.shl(build.sub(length, at), word(3)))
            bits = build.and_(self._load(build, word, build.add(start, at)), ours)
            counted[0] = build.add(counted[0], build.call(self._count_bits, [bits]))
        return counted[0]

    def _lowest(self, build: Any, count: Any) -> Any:
        """Write a word whose lowest bits are set: so many, or all."""
        some = build.not_(build.shl(self._word(-1), count))
        return build.select(build.icmp_unsigned("<", count, self._word(64)), some, self._word(-1))

    def _expand(self, build: Any, mask: Any, values: Any) -> tuple[Any, Any]:
        """Write the next value for each lowest bit of a mask that is set, else 0; return where the others are, too."""
        size = self._step
        line = self._ir.VectorType(self._byte, size)
        if self._has_expand:
            flags = self._ir.VectorType(self._ir.IntType(1), size)
            expand = self._declare(_EXPAND, line, [line, line, flags])
            zero = self._ir.Constant(line, None)
            found = build.call(expand, [self._load(build, line, values), zero, build.bitcast(mask, flags)])
            return found, build.add(values, build.call(self._count_bits, [mask]))
        words: Any = self._ir.Constant(self._ir.VectorType(self._word, size // 8), None)
        for turn in range(size // 8):
            each = build.and_(build.lshr(mask, self._word(8 * turn)), self._word(255))
            words = build.insert_element(words, self._expand_eight(build, each, values), self._half(turn))
            values = build.add(values, build.call(self._count_bits, [each]))
        return build.bitcast(words, line), values

    def _expand_group(self, build: Any, mask: Any, values: Any, to: Any) -> Any:
        """Write 64 bytes: the next value for each bit of a mask that is set, else 0; return where the others are."""
        for at in range(0, _LINE, self._step):
            found, values = self._expand(build, build.lshr(mask, self._word(at)), values)
            self._store(build, found, build.add(to, self._word(at)))
        return values

    def _expand_eight(self, build: Any, mask: Any, values: Any) -> Any:
        """Write eight bytes as a word: the next value for each bit of a mask that is set, else 0."""
        half, word = self._half, self._word
        words, vector = self._ir.VectorType(word, 2), self._ir.VectorType(self._byte, 16)
        shuffle = self._declare(self._shuffle, vector, [vector, vector])
        table = self._places.ptrtoint(word)

        def as_bytes(at: Any) -> Any:
            eight = build.insert_element(self._ir.Constant(words, None), self._load(build, word, at), half(0))
            return build.bitcast(eight, vector)

        found = build.call(shuffle, [as_bytes(values), as_bytes(build.add(table, build.shl(mask, word(3))))])
        return build.extract_element(build.bitcast(found, words), half(0))

    def _write_unpack(self, spread: Any) -> None:
        """Write a `Loop` of `store.codecs.base`: the arguments are those of its work, and libc's `pread`."""
        ir, half, word = self._ir, self._half, self._word
        names = (*LoopWork._fields, "pread")
        function = ir.Function(self.module, ir.FunctionType(word, [word] * len(names)), "unpack")
        work = dict(zip(names, function.args, strict=True))
        build = ir.IRBuilder(function.append_basic_block())
        lz4 = build.inttoptr(work["function"], ir.FunctionType(half, [word, word, half, half]).as_pointer())
        zstd = build.inttoptr(work["function"], ir.FunctionType(word, [word] * 5).as_pointer())
        pread = build.inttoptr(work["pread"], ir.FunctionType(word, [half, word, word, word]).as_pointer())
        given = (work[name] for name in ("context", "sparse", "descriptors"))
        has_context, is_sparse, in_files = (build.icmp_unsigned("!=", each, word(0)) for each in given)
        most = build.select(is_sparse, work["sparse_bytes"], work["size"])
        prefix = build.select(in_files, word(4), word(0))
        found = build.alloca(word)

        def stop_if(is_wrong: Any) -> None:
            with build.if_then(is_wrong):
                build.ret(turn)

        with self._counting(build, word(0), work["count"], 1) as turn:
            source, whole, target = (self._item(build, work[name], turn, word) for name in ("sources", "lengths", "targets"))
            length = build.sub(whole, prefix)
            with build.if_then(in_files):
                stop_if(build.icmp_unsigned(">", length, build.sub(work["record_bytes"], prefix)))
                file = build.trunc(self._item(build, work["descriptors"], turn, word), half)
                stop_if(build.icmp_unsigned("!=", build.call(pread, [file, work["record"], whole, source]), whole))
                noted = build.zext(self._load(build, half, work["record"]), word)
                stop_if(build.icmp_unsigned("!=", noted, length))
            source = build.select(in_files, build.add(work["record"], prefix), source)
            to = build.select(is_sparse, work["sparse"], target)
            with build.if_else(has_context) as (by_zstd, by_lz4):
                with by_zstd:
                    build.store(build.call(zstd, [work["context"], to, most, source, length]), found)
                with by_lz4:
                    stop_if(build.icmp_unsigned(">", build.or_(length, most), word(_INT_MAX)))  # either of them
                    written = build.call(lz4, [source, to, *(build.trunc(each, half) for each in (length, most))])
                    build.store(build.sext(written, word), found)
            plain = build.load(found)
            stop_if(build.icmp_unsigned(">", plain, most))  # an error is a negative number
            with build.if_else(is_sparse) as (to_spread, in_place):
                with to_spread:
                    fits = build.call(spread, [work["sparse"], plain, target, work["size"], work["values"]])
                    stop_if(build.icmp_unsigned("==", fits, word(0)))
                with in_place:
                    stop_if(build.icmp_unsigned("!=", plain, work["size"]))
        build.ret(work["count"])

    def _declare(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """Return an instruction of LLVM's, by its name."""
        if name not in self.module.globals:
            self._ir.Function(self.module, self._ir.FunctionType(result, arguments), name)
        return self.module.globals[name]

    def _constant(self, name: str, content: bytes) -> Any:
        kind = self._ir.ArrayType(self._byte, len(content))
        found = self._ir.GlobalVariable(self.module, kind, name)
        found.global_constant, found.align = True, _LINE
        found.initializer = self._ir.Constant(kind, bytearray(content))
        return found

    def _load(self, build: Any, kind: Any, at: Any) -> Any:
        return build.load(build.inttoptr(at, kind.as_pointer()), align=1)

    def _store(self, build: Any, value: Any, at: Any) -> None:
        build.store(value, build.inttoptr(at, value.type.as_pointer()), align=1)

    def _item(self, build: Any, array: Any, at: Any, kind: Any) -> Any:
        """Write the load of one item of an array of 64-bit numbers."""
        return build.load(build.inttoptr(build.add(array, build.mul(at, kind(8))), kind.as_pointer()), align=8)

    @contextlib.contextmanager
    def _counting(
        self, build: Any, start: Any, stop: Any, step: int, carried: list[Any] | None = None
    ) -> Iterator[Any]:
        """Write a loop around what is written inside, whose counter it gives.

        `carried` holds values before the loop; inside it, those of a turn, which are replaced by those of the next
        turn; after it, those after the last.
        """
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


def _places() -> bytes:
    """Return for each mask of eight bits which of the next values is the first to the eighth byte; 128 is none."""
    masks = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    order = np.cumsum(masks, axis=1) - 1
    return np.where(masks, order, 128).astype(np.uint8).tobytes()
