"""Exact sums of an image's pixels and of their squares. They do not depend on the order of addition.

Integers are added exactly. A float32 is an integer times 2^-149, and its square is an integer times 2^-298. These
integers are added, so that sums of floats are exact, too.
"""

from __future__ import annotations

import operator
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.native import Array
from tpucache.store.format import FLOAT_BITS

#: The sum and the sum of squares of each channel.
Moments = tuple[list[int], list[int]]

_FRACTION_BITS: Final = 24
_HALF: Final = 1 << 12
#: Rows of bytes whose squares a float32 adds up exactly: whole numbers below 2^24.
_EXACT_ROWS: Final = 256


def moments(image: Array) -> Moments:
    """Return each channel's sum and sum of squares of an image (height, width, channels).

    For float32 images, the sums are in units of 2^-149, and the sums of squares in units of 2^-298.
    """
    if image.dtype == np.uint8:
        return _of_bytes(image)
    pixels = image.reshape(-1, image.shape[2])
    if image.dtype.kind in "iu":
        whole = pixels.astype(np.int64)
        return whole.sum(0).tolist(), np.square(whole).sum(0).tolist()
    totals = [_of_floats(pixels[:, channel]) for channel in range(image.shape[2])]
    return [total for total, _ in totals], [square for _, square in totals]


def add_moments(first: Moments, second: Moments) -> Moments:
    if not first[0] or not second[0]:
        return first if first[0] else second
    sums, squares = ([a + b for a, b in zip(one, other, strict=True)] for one, other in zip(first, second, strict=True))
    return sums, squares


def mean_and_std(channels_moments: Moments, image: Array) -> tuple[float, float]:
    """Return the mean of all numbers of an image, and their standard deviation around the mean of their channel."""
    scale = 1 << (FLOAT_BITS if image.dtype.kind == "f" else 0)
    channels, pixels = image.shape[2], image.size // image.shape[2]
    sums, squares = channels_moments
    variance = pixels * sum(squares) - sum(map(operator.mul, sums, sums))
    mean, spread = sum(sums) / (image.size * scale), variance / (channels * (pixels * scale) ** 2)
    return float(mean), float(spread**0.5)


def _of_bytes(image: npt.NDArray[np.uint8]) -> Moments:
    height, width, channels = image.shape
    columns = np.zeros((2, width * channels), np.uint64)
    for start in range(0, height, _EXACT_ROWS):
        rows = image[start : start + _EXACT_ROWS].reshape(-1, width * channels).astype(np.float32)
        # Sums along the first axis use the processor's vector instructions.
        columns += np.stack([rows.sum(0), np.einsum("ij,ij->j", rows, rows)]).astype(np.uint64)
    sums, squares = columns.reshape(2, width, channels).sum(1).tolist()
    return sums, squares


def _of_floats(values: npt.NDArray[np.float32]) -> tuple[int, int]:
    """Return the exact sum and sum of squares of finite floats, in units of 2^-149 and 2^-298."""
    fractions, exponents = np.frexp(values.astype(np.float64))
    whole = np.ldexp(fractions, _FRACTION_BITS)  # for each exponent, integers below 2^53 are added
    lowest = int(exponents.min())
    places = exponents - lowest
    high = np.floor(whole / _HALF)
    low = whole - high * _HALF
    # (high * 2^12 + low)^2 is computed in three parts, whose sums are exact.

    def total(weights: Array, step: int) -> int:
        return sum(int(part) << (step * place) for place, part in enumerate(np.bincount(places, weights).tolist()))

    squares = (total(high * high, 2) << 24) + (total(high * low, 2) << 13) + total(low * low, 2)
    unit = lowest - _FRACTION_BITS + FLOAT_BITS
    return _shifted(total(whole, 1), unit), _shifted(squares, 2 * unit)


def _shifted(value: int, by: int) -> int:
    """For a negative `by`, the bits that are shifted out must be 0."""
    return value << by if by >= 0 else value >> -by
