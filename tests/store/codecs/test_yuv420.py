"""4:2:0 planes: half the bytes, close to the pixels, the same on every processor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache import DamageError
from tpucache.store.codecs import yuv420


@pytest.mark.slow
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 99))
def test_any_size_comes_back_close_where_colours_are_smooth(height: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # From the first corner no colour leaves 0 to 255 within 30 pixels.
    corner, down, right = rng.integers(120, 137, 3), rng.integers(-2, 3, 3), rng.integers(-2, 3, 3)
    rows, columns = np.mgrid[:height, :width]
    image = (corner + rows[..., None] * down + columns[..., None] * right).astype(np.uint8)
    packed = yuv420.pack(image)
    assert len(packed) == yuv420.nbytes(height, width)
    assert np.abs(yuv420.unpack(packed, height, width).astype(int) - image).max() <= 6


def test_planes_are_those_of_jfif() -> None:
    image = np.full((2, 2, 3), (255, 0, 0), np.uint8)
    assert list(yuv420.pack(image)) == [76, 76, 76, 76, 85, 255]


@pytest.mark.parametrize("length", [0, 23, 25])
def test_another_length_is_damage(length: int) -> None:
    with pytest.raises(DamageError, match="bytes"):
        yuv420.unpack(bytes(length), 4, 4)


@pytest.mark.parametrize("bright", range(4))
def test_colours_are_the_mean_of_four_pixels(bright: int) -> None:
    image = np.zeros((4, 3), np.uint8)
    image[bright] = (200, 0, 0)
    assert list(yuv420.pack(image.reshape(2, 2, 3)))[4:] == [120, 153]
