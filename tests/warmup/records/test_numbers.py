"""Arrays of pixels in any order of axes and depth are taken as files of the same pixels are."""

from __future__ import annotations

import io

import numpy as np
import pytest
from made import encode
from numpy.testing import assert_array_equal
from PIL import Image

from tpucache.errors import SampleError
from tpucache.recipe import Mode, Recipe
from tpucache.warmup.records.numbers import to_pixels
from tpucache.warmup.records.presize import presize

RNG = np.random.default_rng(0)
PIXELS = {
    "1": RNG.integers(0, 2, (9, 7)).astype(bool),
    "L": RNG.integers(0, 256, (9, 7), np.uint8),
    "LA": RNG.integers(0, 256, (9, 7, 2), np.uint8),
    "RGB": RNG.integers(0, 256, (9, 7, 3), np.uint8),
    "RGBA": RNG.integers(0, 256, (9, 7, 4), np.uint8),
    "I;16": RNG.integers(0, 65536, (9, 7)).astype(np.uint16),
}


@pytest.mark.parametrize("mode", ["rgb", "grey"])
@pytest.mark.parametrize("kind", PIXELS)
def test_an_array_is_what_a_file_of_it_is(kind: str, mode: Mode) -> None:
    pixels = PIXELS[kind]
    recipe = Recipe(size=(9, 7), mode=mode)
    expected = presize(encode(pixels), recipe, "a")
    channels = pixels.reshape(9, 7, -1)
    if kind in ("LA", "RGBA"):
        with pytest.raises(SampleError, match="nothing says whether the last is transparency"):
            presize(channels, recipe, "a")
        channels = pixels = np.dstack([channels[..., :-1], np.full((9, 7), 255, np.uint8)])
        expected = presize(encode(pixels), recipe, "a")
    for array in (pixels, channels, np.moveaxis(channels, 2, 0)):
        assert_array_equal(presize(array, recipe, "a"), expected)


@pytest.mark.parametrize("mode", ["rgb", "grey"])
def test_a_fourth_channel_of_a_tiff_is_transparency_only_if_the_file_says_so(mode: Mode) -> None:
    def tiff(last: int, extra: int | None = None) -> bytes:
        target = io.BytesIO()
        Image.fromarray(np.dstack([PIXELS["RGB"], np.full((9, 7), last, np.uint8)])).save(target, "TIFF")
        tag, value = b"\x52\x01\x03\0\1\0\0\0", b"\2\0"  # ExtraSamples as Pillow writes it
        assert tag + value in target.getvalue()
        new = tag + bytes([extra, 0]) if extra is not None else b"\x50\xfd" + tag[2:] + value  # another tag
        return target.getvalue().replace(tag + value, new)

    recipe = Recipe(size=(9, 7), mode=mode)
    assert_array_equal(presize(tiff(255), recipe, "a"), presize(encode(PIXELS["RGB"]), recipe, "a"))
    expected = presize(encode(np.dstack([PIXELS["RGB"], np.full((9, 7), 77, np.uint8)])), recipe, "a")
    assert_array_equal(presize(tiff(77, 2), recipe, "a"), expected)
    with pytest.raises(SampleError, match="has 4 channels, and nothing says"):
        presize(tiff(77), recipe, "a")
    with pytest.raises(SampleError, match="Pillow reads 3 of its 4 channels"):
        presize(tiff(77, 0), recipe, "a")


def test_floats_from_0_to_1_are_scaled_in_each_channel() -> None:
    pixels = PIXELS["RGB"]
    floats = (pixels / 255).astype(np.float32)
    assert_array_equal(presize(floats.transpose(2, 0, 1), Recipe(size=(9, 7)), "a"), pixels)
    with pytest.raises(SampleError, match="not within 0 to 1"):
        presize(pixels.astype(np.float32), Recipe(size=(9, 7)), "a")


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((8, 8), 1),
        ((1, 8, 8), 1),
        ((8, 8, 1), 1),
        ((3, 16, 16), 3),
        ((3, 10, 3), 3),
        ((12, 64, 64), 12),
        ((8, 8, 9), 9),
    ],
)
def test_the_axis_of_the_channels_is_the_one_that_is_as_short_as_channels_are(
    shape: tuple[int, ...], channels: int
) -> None:
    assert to_pixels(np.zeros(shape, np.uint8), "keep", None).shape[2] == channels
