"""FunctionWriter: a function in the language of LLVM, while it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class FunctionWriter:
    """Writes one function of a module, whose arguments are all 64-bit numbers; addresses are such numbers, too.

    `build` is llvmlite's builder, for what has no method here. `ir` is llvmlite's module of that name.
    """

    def __init__(self, ir: Any, module: Any, name: str, arguments: int, *, returns: bool = True) -> None:
        self.ir, self._module = ir, module
        self.byte, self.half, self.word = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        kind = ir.FunctionType(self.word if returns else ir.VoidType(), [self.word] * arguments)
        self.function = ir.Function(module, kind, name)
        self.arguments = self.function.args
        self.build = ir.IRBuilder(self.function.append_basic_block())

    def instruction(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """Return an instruction of LLVM's by its name, to be called."""
        if name not in self._module.globals:
            self.ir.Function(self._module, self.ir.FunctionType(result, arguments), name)
        return self._module.globals[name]

    def constant(self, name: str, content: bytes, align: int) -> Any:
        """Return the address of constant bytes."""
        if name not in self._module.globals:
            kind = self.ir.ArrayType(self.byte, len(content))
            made = self.ir.GlobalVariable(self._module, kind, name)
            made.global_constant, made.align, made.initializer = True, align, self.ir.Constant(kind, bytearray(content))
        return self._module.globals[name].ptrtoint(self.word)

    def pointer(self, address: Any, result: Any, arguments: list[Any]) -> Any:
        """Return a function at an address, to be called."""
        return self.build.inttoptr(address, self.ir.FunctionType(result, arguments).as_pointer())

    def load(self, kind: Any, at: Any) -> Any:
        """Write a load from any address."""
        return self.build.load(self.build.inttoptr(at, kind.as_pointer()), align=1)

    def store(self, value: Any, at: Any, align: int = 1) -> Any:
        """Write a store to an address, which may be any."""
        return self.build.store(value, self.build.inttoptr(at, value.type.as_pointer()), align=align)

    def item(self, array: Any, at: Any) -> Any:
        """Write the load of one item of an array of 64-bit numbers."""
        return self.load(self.word, self.build.add(array, self.build.shl(at, self.word(3))))

    def smaller(self, one: Any, other: Any) -> Any:
        """Write the choice of the smaller of two numbers."""
        return self.build.select(self.build.icmp_unsigned("<", one, other), one, other)

    def count_bits(self, bits: Any) -> Any:
        """Write the count of the bits of a word that are set."""
        return self.build.call(self.instruction("llvm.ctpop.i64", self.word, [self.word]), [bits])

    def lowest(self, count: Any) -> Any:
        """Write a word whose lowest bits are set: so many, or all."""
        some = self.build.not_(self.build.shl(self.word(-1), count))
        return self.build.select(self.build.icmp_unsigned("<", count, self.word(64)), some, self.word(-1))

    @contextlib.contextmanager
    def counting(self, start: Any, stop: Any, step: int, carried: list[Any] | None = None) -> Iterator[Any]:
        """Write a loop around what is written inside, whose counter it gives.

        `carried` holds values before the loop; inside it, those of a turn, which are replaced by those of the next
        turn; after it, those after the last.
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
