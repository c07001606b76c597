"""Sums of pixels are exact, whatever their dtype."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tpucache.warmup.records.encode import FLOAT_BITS, add_moments, moments

SHAPES = arrays.array_shapes(min_dims=3, max_dims=3, max_side=6)


@pytest.mark.slow
@given(arrays.arrays(np.float32, SHAPES, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
@settings(max_examples=80)
def test_sums_of_floats_are_exact(image: npt.NDArray[np.float32]) -> None:
    sums, squares = moments(image)
    for channel, (total, square) in enumerate(zip(sums, squares, strict=True)):
        values = [Fraction(value) for value in image[..., channel].astype(float).ravel().tolist()]
        assert Fraction(total, 1 << FLOAT_BITS) == sum(values)
        assert Fraction(square, 1 << 2 * FLOAT_BITS) == sum(value * value for value in values)


@given(st.sampled_from([np.uint8, np.uint16, np.int16]).flatmap(lambda dtype: arrays.arrays(dtype, SHAPES)))
@settings(max_examples=60)
def test_sums_of_whole_numbers_are_exact_and_add_up(image: npt.NDArray[np.uint8]) -> None:
    sums, squares = moments(image)
    channels = [[int(value) for value in image[..., channel].ravel()] for channel in range(image.shape[2])]
    assert sums == [sum(values) for values in channels]
    assert squares == [sum(value * value for value in values) for values in channels]
    assert add_moments(([], []), (sums, squares)) == (sums, squares)
    assert add_moments((sums, squares), (sums, squares)) == ([2 * s for s in sums], [2 * s for s in squares])
