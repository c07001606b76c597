"""The loops that copy rows and read records, in the language of LLVM.

An ordinary store reads from memory the line it is about to overwrite, and leaves it in the cache, where it displaces
another: of a batch larger than the cache, the first rows are gone when the last are written. A non-temporal store does
neither, and copies such a batch nearly twice as fast. numpy has none.
"""

from __future__ import annotations

from typing import Any, Final

from tpucache.loading.records.compiled.function import FunctionWriter

_LINE: Final = 64  # bytes of a cache line; shorter stores past the cache would each write a line
_AHEAD: Final = 4096  # bytes; by itself a processor looks ahead within a page only
_TO_READ_INTO_L2: Final = (0, 2, 1)  # LLVM's arguments of a prefetch: to read; 2 is L2, 3 would be L1; data


def write_copy(ir: Any, module: Any) -> None:
    """Write copy(targets, sources, count, length), as `Native` has it."""
    code = FunctionWriter(ir, module, "copy", 4, returns=False)
    build, byte, word = code.build, code.byte, code.word
    line = ir.VectorType(byte, _LINE)
    targets, sources, count, length = code.arguments
    prefetch = code.instruction("llvm.prefetch.p0i8", ir.VoidType(), [byte.as_pointer(), *[code.half] * 3])

    def move(kind: Any, at: Any, size: int) -> Any:
        return code.store(code.load(kind, build.add(row, at)), build.add(to, at), size)

    def fetch_ahead(at: Any) -> None:
        """Ask for what is copied so many bytes later, or, in a shorter row, for the same place of the next row."""
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
    build.fence("seq_cst")  # stores past the cache are not in order with others
    build.ret_void()


def write_read(ir: Any, module: Any) -> None:
    """Write read(descriptors, offsets, parts, width, lengths, count, preadv): as `Native` has it, by libc's preadv."""
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
