"""Values in 4 bits: four in five of the bytes of packed coefficients that are not 0 are from -8 to 7.

None of these values is 0. So a nibble of 0 says that the value is one of the others, which follow whole, in their
order. docs/format.md describes it exactly.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_SIGN: Final = 8
_VALUES: Final = ((np.arange(16) ^ _SIGN) - _SIGN).astype(np.uint8)  # by nibble
#: The two values of each byte, as one number: one lookup is for both.
_PAIRS: Final = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1).view(np.uint16)[:, 0]


def narrow(values: Array) -> bytes:
    """Return values, uint8 (n,) without 0, as nibbles of two's complement and the whole values."""
    signed = values.view(np.int8)
    is_whole = (signed < -_SIGN) | (signed >= _SIGN)
    nibbles = np.pad(np.where(is_whole, 0, values & 15).astype(np.uint8), (0, len(values) % 2))
    return (nibbles[::2] | nibbles[1::2] << 4).tobytes() + values[is_whole].tobytes()


def widen(form: Array, count: int) -> Array:
    """Return so many values of the bytes that `narrow` made of them. Raises ValueError where these are not as many."""
    pairs = -(-count // 2)
    values: Array = _PAIRS[form[:pairs]].view(np.uint8)[:count]
    whole, at = form[pairs:], np.flatnonzero(values == 0)
    if len(values) != count or len(at) != len(whole):
        raise ValueError(f"{len(form):,} bytes, not those of {count:,} values")
    values[at] = whole
    return values
