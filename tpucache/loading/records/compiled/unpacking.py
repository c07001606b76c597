"""The loop that unpacks records, in the language of LLVM: by a byte code's own library, then from their sparse form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpucache.loading.records.compiled.function import FunctionWriter
from tpucache.store.codecs.base import LoopWork

_GROUP: Final = 64  # bytes that a byte of the second mask is for
_INT_MAX: Final = (1 << 31) - 1  # the longest record whose length a C int holds
_PREFIX: Final = 4  # bytes of a record's length in front of it in a file
# What moves the bytes of a vector to places, by their numbers: 128 or more gives 0. Of 16 bytes, eight are used.
_SHUFFLES: Final = {"x86_64": "llvm.x86.ssse3.pshuf.b.128", "aarch64": "llvm.aarch64.neon.tbl1.v16i8"}
# What puts 64 bytes in place at once, where a processor has AVX-512 VBMI2: dct-lz4 is unpacked in half of the time.
_EXPAND: Final = "llvm.x86.avx512.mask.expand.v64i8"


class UnpackWriter:
    """Writes the loop for a processor, given by LLVM's names of it and of what it can do.

    `ir` is llvmlite's module of that name. Raises RuntimeError for a processor that there is no loop for.
    """

    def __init__(self, ir: Any, module: Any, processor: str, features: Mapping[str, bool]) -> None:
        if processor not in _SHUFFLES:
            raise RuntimeError(f"there are no loops for {processor}")
        self._ir, self._module, self._shuffle = ir, module, _SHUFFLES[processor]
        self._has_expand = features.get("avx512vbmi2", False)
        self._step = 64 if self._has_expand else 16  # bytes put in place by one store

    def write(self) -> None:
        """Write a `Loop` of `store.codecs.base`: the arguments are those of its work, and libc's `pread`."""
        spread = self._write_spread(self._write_widen())
        names = (*LoopWork._fields, "pread")
        code = FunctionWriter(self._ir, self._module, "unpack", len(names))
        build, half, word = code.build, code.half, code.word
        work = dict(zip(names, code.arguments, strict=True))
        lz4 = code.pointer(work["function"], half, [word, word, half, half])
        zstd = code.pointer(work["function"], word, [word] * 5)
        pread = code.pointer(work["pread"], word, [half, word, word, word])
        given = (work[name] for name in ("context", "sparse", "descriptors"))
        has_context, is_sparse, in_files = (build.icmp_unsigned("!=", each, word(0)) for each in given)
        most = build.select(is_sparse, work["sparse_bytes"], work["size"])
        prefix = build.select(in_files, word(_PREFIX), word(0))
        found = build.alloca(word)

        def stop_if(comparison: str, one: Any, other: Any) -> None:
            with build.if_then(build.icmp_unsigned(comparison, one, other)):
                build.ret(turn)

        with code.counting(word(0), work["records"], 1) as turn:
            place, whole, target = (code.item(work[name], turn) for name in ("sources", "lengths", "targets"))
            length = build.sub(whole, prefix)
            with build.if_then(in_files):
                stop_if(">", length, build.sub(work["record_bytes"], prefix))  # also where it is too short for one
                file = build.trunc(code.item(work["descriptors"], turn), half)
                stop_if("!=", build.call(pread, [file, work["record"], whole, place]), whole)
                stop_if("!=", build.zext(code.load(half, work["record"]), word), length)
            source = build.select(in_files, build.add(work["record"], prefix), place)
            to = build.select(is_sparse, work["sparse"], target)
            with build.if_else(has_context) as (by_zstd, by_lz4):
                with by_zstd:
                    build.store(build.call(zstd, [work["context"], to, most, source, length]), found)
                with by_lz4:
                    stop_if(">", build.or_(length, most), word(_INT_MAX))  # either of them
                    written = build.call(lz4, [source, to, *(build.trunc(each, half) for each in (length, most))])
                    build.store(build.sext(written, word), found)
            plain = build.load(found)
            stop_if(">", plain, most)  # an error is a negative number
            with build.if_else(is_sparse) as (to_spread, in_place):
                with to_spread:
                    fits = build.call(spread, [work["sparse"], plain, target, work["size"], work["values"]])
                    stop_if("==", fits, word(0))
                with in_place:
                    stop_if("!=", plain, work["size"])
        build.ret(work["records"])

    def _write_spread(self, widen: Any) -> Any:
        """Write the decoder of a sparse form, `store.codecs.dct.sparse`: 1 where its length is right, else 0."""
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
            build.store(build.call(widen, [values, count, widened]), end)  # where the form ends, by its nibbles
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
        """Write the decoder of nibbles, `store.codecs.dct.nibbles`: it returns where those of so many values end."""
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
        """Write the next value for each lowest bit of a mask that is set, else 0; return where the others are, too."""
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
        """Write eight bytes as a word: the next value for each bit of a mask that is set, else 0."""
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
    """Write the count of the bits of so many bytes, eight at a time."""
    build, word = code.build, code.word
    counted = [word(0)]
    with code.counting(word(0), length, 8, counted) as at:
        ours = code.lowest(build.shl(build.sub(length, at), word(3)))
        bits = build.and_(code.load(word, build.add(start, at)), ours)
        counted[0] = build.add(counted[0], code.count_bits(bits))
    return counted[0]


def _places() -> bytes:
    """Return for each mask of eight bits which of the next values is the first to the eighth byte; 128 is none."""
    masks = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    order = np.cumsum(masks, axis=1) - 1
    return np.where(masks, order, 128).astype(np.uint8).tobytes()
