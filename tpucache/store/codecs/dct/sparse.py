"""Bytes without their zeros. Four in five bytes of packed coefficients are 0, so this form of them is compressed.

A mask has a bit for each byte, set where the byte is not 0. The mask is mostly 0 itself, so it has a mask, too. The
sparse form is the mask of the mask, the mask's bytes that are not 0, then the bytes that are not 0. A byte code has
a quarter of the bytes left to go through, and a processor that shuffles bytes puts eight in place at once.

In packing "nibbles" the bytes that are not 0 are narrowed: four in five of them are from -8 to 7, and take 4 bits. None
of them is 0, so a nibble of 0 says that the value is one of the others, which follow whole, in their order. In packing
"sparse" they are not narrowed. docs/format.md describes both exactly.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tpucache.types import Array

SPARSE: Final = "sparse"
NIBBLES: Final = "nibbles"

_GROUP: Final = 64  # bytes that one byte of the mask's mask is for
_AHEAD: Final = 64  # bytes that compiled code loads and stores at once, also where only one is left

_SIGN: Final = 8
_VALUES: Final = ((np.arange(16) ^ _SIGN) - _SIGN).astype(np.uint8)  # by nibble
#: The two values of each byte, as one number: one lookup is for both.
_PAIRS: Final = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1).view(np.uint16)[:, 0]


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
    """Return the most bytes that the sparse form of `size` bytes can have."""
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


def narrow(values: Array) -> bytes:
    """Return values, uint8 (n,) without 0, as nibbles of two's complement and the whole values."""
    signed = values.view(np.int8)
    is_whole = (signed < -_SIGN) | (signed >= _SIGN)
    nibbles = np.pad(np.where(is_whole, 0, values & 15).astype(np.uint8), (0, len(values) % 2))
    return (nibbles[::2] | nibbles[1::2] << 4).tobytes() + values[is_whole].tobytes()


def widen(form: Array, count: int) -> Array:
    """Return the values that `narrow` made the bytes of. Raises ValueError where there are more or fewer."""
    pairs = -(-count // 2)
    values: Array = _PAIRS[form[:pairs]].view(np.uint8)[:count]
    whole, at = form[pairs:], np.flatnonzero(values == 0)
    if len(values) != count or len(at) != len(whole):
        raise ValueError(f"{len(form):,} bytes, not those of {count:,} values")
    values[at] = whole
    return values
