"""The sparse form of bytes: masks and the non-zero bytes. Four in five bytes of packed coefficients are 0.

The mask has one bit per byte of the data, set if the byte is not 0. Most of its bytes are 0, too, so a second mask has
one bit per byte of the first. The sparse form is the second mask, then the non-zero bytes of the first mask, then those
of the data. So zstd or lz4 has to process only a quarter of the bytes, and a processor with a byte shuffle writes eight
bytes at once.

The packing "sparse" stores the non-zero bytes as they are; "nibbles" stores each in 4 bits if it is from -8 to 7, which
four in five are. The nibble 0 means that the value is larger; larger values follow as whole bytes, in order.
docs/format.md describes both exactly.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tpucache.native import Array

SPARSE: Final = "sparse"
NIBBLES: Final = "nibbles"

_GROUP: Final = 64  # bytes of data per byte of the second mask
_AHEAD: Final = 64  # compiled code loads and stores this many bytes at once, even at the end

_SIGN: Final = 8
_VALUES: Final = ((np.arange(16) ^ _SIGN) - _SIGN).astype(np.uint8)  # the value of each nibble
#: The two values in each byte, as one uint16: a single lookup decodes two nibbles.
_PAIRS: Final = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1).view(np.uint16)[:, 0]


class Sparse(NamedTuple):
    """The masks, and the non-zero bytes, which are stored one after the other.

    Their bytes are distributed so differently that dct-zstd puts them into separate zstd blocks.
    """

    masks: bytes
    values: bytes


class Scratch(NamedTuple):
    """Working memory for unpacking: space for the sparse form, then, with nibbles, for the values as whole bytes."""

    memory: Array
    #: The number of bytes for the sparse form, at the start of `memory`.
    room: int
    #: The offset of the values as whole bytes in `memory`; 0 if the packing has no nibbles.
    values: int


def squeeze(plain: bytes, packing: str) -> Sparse:
    values = np.frombuffer(plain, np.uint8)
    values = np.pad(values, (0, -len(values) % _GROUP))
    mask = np.packbits(values != 0, bitorder="little")
    first = np.packbits(mask != 0, bitorder="little")
    values = values[values != 0]
    narrowed = narrow(values) if packing == NIBBLES else values.tobytes()
    return Sparse(first.tobytes() + mask[mask != 0].tobytes(), narrowed)


def spread(sparse: Array, out: Array, packing: str) -> None:
    """Write to `out` the bytes that the sparse form `sparse` stands for; both are uint8 (any length,)."""
    groups = -(-len(out) // _GROUP)
    if len(sparse) < groups:
        raise ValueError(f"the sparse form has {len(sparse):,} bytes, but its first mask alone takes {groups:,}")
    first, rest = sparse[:groups], sparse[groups:]
    mask, rest = _expand(_bits(first), rest)
    is_value = _bits(mask)
    if packing == NIBBLES:
        rest = widen(rest, int(np.count_nonzero(is_value)))
    values, rest = _expand(is_value, rest)
    if len(rest):
        raise ValueError(f"{len(rest):,} more non-zero bytes than bits that are set in the mask")
    out[:] = values[: len(out)]


def most_bytes(size: int, packing: str) -> int:
    values = _GROUP + _GROUP // 2 if packing == NIBBLES else _GROUP
    return -(-size // _GROUP) * (1 + _GROUP // 8 + values)


def scratch_for(size: int, packing: str) -> Scratch:
    room = most_bytes(size, packing)
    if packing != NIBBLES:
        return Scratch(np.zeros(room + _AHEAD, np.uint8), room, 0)
    memory = np.zeros(room + _AHEAD + -(-size // _GROUP) * _GROUP + _AHEAD, np.uint8)
    return Scratch(memory, room, room + _AHEAD)


def _bits(mask: Array) -> Array:
    return np.unpackbits(mask, bitorder="little").view(bool)


def _expand(is_value: Array, values: Array) -> tuple[Array, Array]:
    """Return an array with the next of `values` where `is_value` is true, else 0; and the values that are left over."""
    at = np.flatnonzero(is_value)  # numpy assigns by positions faster than by a mask
    if len(at) > len(values):
        raise ValueError(f"a mask has {len(at):,} bits set, but only {len(values):,} bytes follow")
    out = np.zeros(len(is_value), np.uint8)
    out[at] = values[: len(at)]
    return out, values[len(at) :]


def narrow(values: Array) -> bytes:
    """Return `values`, uint8 (n,) without zeros, as nibbles (two's complement), followed by those that need 8 bits."""
    signed = values.view(np.int8)
    is_whole = (signed < -_SIGN) | (signed >= _SIGN)
    nibbles = np.pad(np.where(is_whole, 0, values & 15).astype(np.uint8), (0, len(values) % 2))
    return (nibbles[::2] | nibbles[1::2] << 4).tobytes() + values[is_whole].tobytes()


def widen(form: Array, count: int) -> Array:
    """Return the `count` values, uint8 (count,), that `narrow` converted to these bytes."""
    pairs = -(-count // 2)
    values: Array = _PAIRS[form[:pairs]].view(np.uint8)[:count]
    whole, at = form[pairs:], np.flatnonzero(values == 0)
    if len(values) != count or len(at) != len(whole):
        raise ValueError(f"{len(form):,} bytes do not hold {count:,} values")
    values[at] = whole
    return values
