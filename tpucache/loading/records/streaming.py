"""Rows of an array, copied past the processor's caches.

An ordinary store reads from memory the line it is about to overwrite, and leaves it in the cache, where it displaces
another: of a batch larger than the cache, the first rows are gone when the last are written. A non-temporal store
does neither, and copies such a batch nearly twice as fast. numpy has none; llvmlite compiles a loop of them where it is
installed, as it is wherever numba is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: (target, source, rows, count, length): addresses, how many rows, and the bytes of a row.
Copy = Callable[[int, int, int, int, int], None]

_log: Final = logging.getLogger("tpucache")

_LINE: Final = 64  # bytes of a cache line; shorter stores past the cache would each write a line
_AHEAD: Final = 4096  # bytes; by itself a processor looks ahead within a page only
_TO_READ_INTO_L2: Final = (0, 2, 1)  # LLVM's arguments of a prefetch: to read; 2 is L2, 3 would be L1; data
_LARGE: Final = 8 << 20  # of a smaller batch much is still in the cache when it is read: ordinary stores are as fast
_LONG: Final = 1 << 10  # bytes of a row; shorter ones have too few whole lines


def gather(source: Array, rows: npt.NDArray[np.int64], target: Array) -> None:
    """Copy rows into `target`: target[i] = source[rows[i]]. Threads may do so at once.

    `source` is (n, *shape), `target` (m, *shape), `rows` (m,). Raises IndexError for a row that is not there,
    ValueError where the target has another shape, TypeError where it has another dtype.
    """
    _check_fit(source, len(rows), target)
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(source)):
        raise IndexError(f"rows reach from {rows.min()} to {rows.max()}, of {len(source)}")
    large = target.nbytes >= max(_LARGE, len(rows) * _LONG)
    copy = _streaming_copy() if large and source.flags.c_contiguous and target.flags.c_contiguous else None
    if copy is None:
        # "clip" is what lets numpy write into the target at once.
        np.take(source, rows, axis=0, out=target, mode="clip")
        return
    rows = np.ascontiguousarray(rows, np.int64)
    copy(target.ctypes.data, source.ctypes.data, rows.ctypes.data, len(rows), target.nbytes // len(rows))


def _check_fit(source: Array, rows: int, target: Array) -> None:
    """Refuse another shape or dtype: the compiled loop looks at addresses alone, and numpy may cast silently."""
    shape = (rows, *source.shape[1:])
    if target.shape != shape:
        raise ValueError(f"the target of {rows} rows should have shape {shape}, not {target.shape}")
    if target.dtype != source.dtype:
        raise TypeError(f"the target should have dtype {source.dtype}, not {target.dtype}")


@functools.cache
def _streaming_copy() -> Copy | None:
    """Return the compiled loop, or None where it cannot be compiled; that is logged once."""
    try:
        return _compile()
    except (ImportError, OSError, RuntimeError) as error:
        _log.warning(
            "records in memory are copied by numpy: `pip install llvmlite` copies large batches faster (%s)", error
        )
        return None


def _compile() -> Copy:
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(str(_write_loop(ir)))
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)  # releases the GIL
    copy = prototype(engine.get_function_address("gather"))
    copy.engine = engine  # type: ignore[attr-defined]  # it owns the memory of the compiled code
    return copy


def _write_loop(ir: Any) -> Any:
    """Return the loop as an LLVM module, written with llvmlite's `ir`; addresses are integers throughout."""
    byte, word, line = ir.IntType(8), ir.IntType(64), ir.VectorType(ir.IntType(8), _LINE)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * 5), "gather")
    target, source, rows, count, length = function.args
    build = ir.IRBuilder(function.append_basic_block())
    prefetch = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [byte.as_pointer(), *[ir.IntType(32)] * 3]), "llvm.prefetch.p0i8"
    )

    def smaller(one: Any, other: Any) -> Any:
        return build.select(build.icmp_unsigned("<", one, other), one, other)

    def row_at(turn: Any) -> Any:
        number = build.load(build.inttoptr(build.add(rows, build.mul(turn, word(8))), word.as_pointer()), align=8)
        return build.add(source, build.mul(number, length))

    def move(kind: Any, at: Any, size: int) -> Any:
        value = build.load(build.inttoptr(build.add(row, at), kind.as_pointer()), align=1)
        return build.store(value, build.inttoptr(build.add(to, at), kind.as_pointer()), align=size)

    def fetch_ahead(at: Any) -> None:
        """Ask for what is copied so many bytes later, or, in a shorter row, for the same place of the next row."""
        ahead = build.add(at, word(_AHEAD))
        there = build.add(next_row, smaller(build.sub(ahead, length), at))
        place = build.select(build.icmp_unsigned("<", ahead, length), build.add(row, ahead), there)
        build.call(prefetch, [build.inttoptr(place, byte.as_pointer()), *map(ir.IntType(32), _TO_READ_INTO_L2)])

    last = build.sub(count, word(1))
    with _counting(ir, build, word(0), count, 1) as turn:
        row, to = row_at(turn), build.add(target, build.mul(turn, length))
        next_row = row_at(smaller(build.add(turn, word(1)), last))
        head = smaller(build.and_(build.neg(to), word(_LINE - 1)), length)  # bytes before the first whole line
        lines = build.and_(build.sub(length, head), word(-_LINE))
        tail = build.add(head, lines)
        with _counting(ir, build, word(0), head, 1) as at:
            move(byte, at, 1)
        with _counting(ir, build, head, tail, _LINE) as at:
            fetch_ahead(at)
            move(line, at, _LINE).set_metadata("nontemporal", module.add_metadata([ir.IntType(32)(1)]))
        with _counting(ir, build, tail, length, 1) as at:
            move(byte, at, 1)
    build.fence("seq_cst")  # stores past the cache are not in order with others
    build.ret_void()
    return module


@contextlib.contextmanager
def _counting(ir: Any, build: Any, start: Any, stop: Any, step: int) -> Iterator[Any]:
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
