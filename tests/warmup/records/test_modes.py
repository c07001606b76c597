"""Files whose channels and numbers are kept come out as they were written."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.records.presize import presize

KEEP = Recipe(size=(9, 7), mode="keep")
RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (9, 7, 3)).astype(np.uint16)


def kept(image: Image.Image, file_format: str = "PNG", **options: Any) -> npt.NDArray[Any]:
    target = io.BytesIO()
    image.save(target, file_format, **options)
    return presize(target.getvalue(), KEEP, "a")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_channels_and_numbers_are_those_of_the_file(mode: str) -> None:
    numbers = RNG.integers(0, 256, (9, 7, 4), np.uint8)
    arrays: dict[str, npt.NDArray[Any]] = {
        "1": numbers[..., 0] > 99,
        "I;16": DEEP[..., 0],
        "F": RNG.normal(0, 9, (9, 7)).astype(np.float32),
    }
    width = {"L": 1, "LA": 2, "RGB": 3}.get(mode, 4)
    pixels = arrays.get(mode, numbers[..., 0] if width == 1 else numbers[..., :width])
    image = Image.frombytes("CMYK", (7, 9), pixels.tobytes()) if mode == "CMYK" else Image.fromarray(pixels)
    found = kept(image, "TIFF" if mode in ("F", "CMYK") else "PNG")
    expected = pixels.astype(np.uint8) * np.uint8(255) if mode == "1" else pixels
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected.reshape(9, 7, -1))


def test_a_palette_is_its_colours_and_its_transparency_a_channel() -> None:
    image = Image.fromarray(RNG.integers(0, 2, (9, 7), np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 200, 100, 0])
    np.testing.assert_array_equal(kept(image), np.asarray(image.convert("RGB")))
    assert kept(image, transparency=0).shape == (9, 7, 4)


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [3, 4])
def test_colours_of_16_bits_are_kept_bit_for_bit(channels: int, suffix: str) -> None:
    pixels = RNG.integers(0, 65536, (9, 7, channels)).astype(np.uint16)
    order = [2, 1, 0, 3][:channels]
    done, data = cv2.imencode(suffix, pixels[..., order])
    assert done
    np.testing.assert_array_equal(presize(data.tobytes(), KEEP, "a"), pixels)


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.float32])
def test_grey_tiffs_are_kept_in_their_depth(dtype: Any) -> None:
    limits = (-9999, 9999) if dtype == np.int16 else (0, 60000)
    pixels = RNG.integers(*limits, (9, 7)).astype(dtype)
    done, data = cv2.imencode(".tiff", pixels)
    assert done
    found = presize(data.tobytes(), KEEP, "a")
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[..., 0], pixels)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (Image.fromarray(RNG.integers(0, 9, (9, 7)).astype(np.int32)), "whole numbers of 32 bits: save them as 16"),
        (Image.fromarray(np.full((9, 7), np.inf, np.float32)), "not finite"),
    ],
)
def test_what_cannot_be_kept_is_refused(image: Image.Image, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        kept(image, "TIFF")


def test_a_png_of_16_bits_cut_anywhere_is_refused() -> None:
    data = cv2.imencode(".png", DEEP)[1].tobytes()
    for cut in range(8, len(data) - 12, 29):
        with pytest.raises(SampleError):
            presize(data[:cut], KEEP, "a")
