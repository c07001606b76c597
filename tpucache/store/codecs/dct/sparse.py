"""Bytes without their zeros: what is compressed in place of packed coefficients, of which four in five bytes are 0.

A mask has a bit for each byte, set where the byte is not 0. The mask is mostly 0 itself, so it has a mask, too. The
sparse form is the mask of the mask, the mask's bytes that are not 0, then the bytes that are not 0. A byte code has
a quarter of the bytes left to go through, and a processor that shuffles bytes puts eight in place at once.

docs/format.md describes it exactly.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_GROUP: Final = 64  # bytes that one byte of the mask's mask is for
_READ_AHEAD: Final = 64  # bytes: compiled code loads so many at once, also where only one is left


class Sparse(NamedTuple):
    """A sparse form in two parts, one after the other; their bytes are unlike each other."""

    masks: bytes
    values: bytes


def squeeze(plain: bytes) -> Sparse:
    """Return the sparse form of bytes."""
    values = np.frombuffer(plain, np.uint8)
    values = np.pad(values, (0, -len(values) % _GROUP))
    mask = np.packbits(values != 0, bitorder="little")
    first = np.packbits(mask != 0, bitorder="little")
    return Sparse(first.tobytes() + mask[mask != 0].tobytes(), values[values != 0].tobytes())


def spread(sparse: Array, out: Array) -> None:
    """Write the bytes of a sparse form to `out`; both are uint8 (n,). Raises ValueError where they do not fit."""
    groups = -(-len(out) // _GROUP)
    if len(sparse) < groups:
        raise ValueError(f"{len(sparse):,} bytes, at least {groups:,}")
    first, rest = sparse[:groups], sparse[groups:]
    mask, rest = _expand(first, rest)
    values, rest = _expand(mask, rest)
    if len(rest):
        raise ValueError(f"{len(rest):,} bytes more than the masks have bits")
    out[:] = values[: len(out)]


def most_bytes(size: int) -> int:
    """Return how many bytes the sparse form of `size` bytes has at most: no masks lead further, whatever they are."""
    return -(-size // _GROUP) * (1 + _GROUP // 8 + _GROUP)


def scratch_for(size: int) -> tuple[Array, int]:
    """Return memory for the sparse form of `size` bytes, and how many of its own bytes are for that."""
    room = most_bytes(size)
    return np.zeros(room + _READ_AHEAD, np.uint8), room


def _expand(mask: Array, values: Array) -> tuple[Array, Array]:
    """Return a byte for each bit of a mask, the next value or 0, and the values that are left."""
    is_value = np.unpackbits(mask, bitorder="little").view(bool)
    count = np.count_nonzero(is_value)
    if count > len(values):
        raise ValueError(f"{count:,} bits in a mask, but {len(values):,} bytes")
    out = np.zeros(len(is_value), np.uint8)
    out[is_value] = values[:count]
    return out, values[count:]
