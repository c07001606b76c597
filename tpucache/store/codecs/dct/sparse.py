"""Bytes without their zeros: what is compressed in place of packed coefficients, of which four in five bytes are 0.

A mask has a bit for each byte, set where the byte is not 0. The mask is mostly 0 itself, so it has a mask, too. The
sparse form is the mask of the mask, the mask's bytes that are not 0, then the bytes that are not 0. A byte code has
a quarter of the bytes left to go through, and a processor that shuffles bytes puts eight in place at once. In packing
"nibbles" the bytes that are not 0 are narrowed (`store.codecs.dct.nibbles`), in packing "sparse" they are not.

docs/format.md describes it exactly.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.store.codecs.dct.nibbles import narrow, widen

Array = npt.NDArray[Any]

SPARSE: Final = "sparse"
NIBBLES: Final = "nibbles"

_GROUP: Final = 64  # bytes that one byte of the mask's mask is for
_AHEAD: Final = 64  # bytes: compiled code loads and stores so many at once, also where only one is left


class Sparse(NamedTuple):
    """A sparse form in two parts, one after the other; their bytes are unlike each other."""

    masks: bytes
    values: bytes


class Scratch(NamedTuple):
    """Memory to unpack a sparse form in: one array for the form, and for its values once they are widened."""

    memory: Array
    #: How many bytes there are for the form, from the first on.
    room: int
    #: Where the bytes for the widened values begin, 0 where the packing has no nibbles.
    values: int


def squeeze(plain: bytes, packing: str) -> Sparse:
    """Return the sparse form of bytes."""
    values = np.frombuffer(plain, np.uint8)
    values = np.pad(values, (0, -len(values) % _GROUP))
    mask = np.packbits(values != 0, bitorder="little")
    first = np.packbits(mask != 0, bitorder="little")
    values = values[values != 0]
    narrowed = narrow(values) if packing == NIBBLES else values.tobytes()
    return Sparse(first.tobytes() + mask[mask != 0].tobytes(), narrowed)


def spread(sparse: Array, out: Array, packing: str) -> None:
    """Write the bytes of a sparse form to `out`; both are uint8 (n,). Raises ValueError where they do not fit."""
    groups = -(-len(out) // _GROUP)
    if len(sparse) < groups:
        raise ValueError(f"{len(sparse):,} bytes, at least {groups:,}")
    first, rest = sparse[:groups], sparse[groups:]
    mask, rest = _expand(_bits(first), rest)
    is_value = _bits(mask)
    if packing == NIBBLES:
        rest = widen(rest, int(np.count_nonzero(is_value)))
    values, rest = _expand(is_value, rest)
    if len(rest):
        raise ValueError(f"{len(rest):,} bytes more than the masks have bits")
    out[:] = values[: len(out)]


def most_bytes(size: int, packing: str) -> int:
    """Return how many bytes the sparse form of `size` bytes has at most: no masks and nibbles lead further."""
    values = _GROUP + _GROUP // 2 if packing == NIBBLES else _GROUP
    return -(-size // _GROUP) * (1 + _GROUP // 8 + values)


def scratch_for(size: int, packing: str) -> Scratch:
    """Return memory to unpack the sparse form of `size` bytes in."""
    room = most_bytes(size, packing)
    if packing != NIBBLES:
        return Scratch(np.zeros(room + _AHEAD, np.uint8), room, 0)
    memory = np.zeros(room + _AHEAD + -(-size // _GROUP) * _GROUP + _AHEAD, np.uint8)
    return Scratch(memory, room, room + _AHEAD)


def _bits(mask: Array) -> Array:
    return np.unpackbits(mask, bitorder="little").view(bool)


def _expand(is_value: Array, values: Array) -> tuple[Array, Array]:
    """Return the next value where there is one, else 0, and the values that are left."""
    at = np.flatnonzero(is_value)  # numpy puts values at numbers faster than at a mask
    if len(at) > len(values):
        raise ValueError(f"{len(at):,} bits in a mask, but {len(values):,} bytes")
    out = np.zeros(len(is_value), np.uint8)
    out[at] = values[: len(at)]
    return out, values[len(at) :]
