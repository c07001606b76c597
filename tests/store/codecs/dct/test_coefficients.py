"""Packed coefficients: exact in whole numbers, at least JPEG's quality, and refused when they have another length."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from tpucache import DamageError
from tpucache.store.codecs.coefficients import BLOCK, CoefficientLayout, pack, unpack

Pixels = npt.NDArray[np.uint8]


def drawn_text(side: int = 96) -> Pixels:
    """Return dark words on white."""
    image = Image.new("RGB", (side, side), "white")
    for line in range(0, side, 12):
        ImageDraw.Draw(image).text((2, line), "The quick brown fox", fill=(line, 20, 120 - line))
    return np.asarray(image)


def saturated(side: int = 96) -> Pixels:
    """Return squares of the eight colours whose channels are 0 or 255."""
    colours = np.random.default_rng(3).integers(0, 2, (side // 12, side // 12, 3), np.uint8) * np.uint8(255)
    return colours.repeat(12, 0).repeat(12, 1)


def noise(side: int = 96, channels: int = 3) -> Pixels:
    """Return independent random pixels."""
    return np.random.default_rng(4).integers(0, 256, (side, side, channels), np.uint8)


def smooth(side: int = 96) -> Pixels:
    """Return gradients, as a photograph has them."""
    rows, columns = np.mgrid[:side, :side] / side
    waves = np.stack([rows, columns, (np.sin(9 * rows) * np.cos(7 * columns) + 1) / 2], -1)
    return (waves * 255).astype(np.uint8)


IMAGES = {"text": drawn_text(), "saturated": saturated(), "noise": noise(), "smooth": smooth()}


def psnr(first: Pixels, second: Pixels) -> float:
    error = np.mean((first.astype(float) - second.astype(float)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def of_jpeg(image: Pixels, quality: int, subsampling: int) -> Pixels:
    target = io.BytesIO()
    Image.fromarray(image).save(target, "JPEG", quality=quality, subsampling=subsampling)
    return np.asarray(Image.open(target))


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("quality", [75, 85, 90, 95, 100])
@pytest.mark.parametrize(("chroma", "subsampling"), [("420", 2), ("444", 0)])
def test_images_are_at_least_as_good_as_of_jpeg(name: str, quality: int, chroma: Any, subsampling: int) -> None:
    image = IMAGES[name]
    layout = CoefficientLayout(96, 96, 3, quality, chroma)
    ours = psnr(image, unpack(pack(image, layout), layout))
    assert ours >= psnr(image, of_jpeg(image, quality, subsampling)) - 0.01


@pytest.mark.slow
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    channels=st.sampled_from([1, 3]),
    quality=st.integers(1, 100),
    chroma=st.sampled_from(["420", "444"]),
    seed=st.integers(0, 99),
)
def test_any_size_comes_back_in_its_shape_and_length(
    height: int, width: int, channels: int, quality: int, chroma: Any, seed: int
) -> None:
    image = np.random.default_rng(seed).choice(np.array([0, 128, 255], np.uint8), (height, width, channels))
    layout = CoefficientLayout(height, width, channels, quality, chroma)
    packed = pack(image, layout)
    assert len(packed) == layout.nbytes
    assert unpack(packed, layout).shape == image.shape


@pytest.mark.slow
@given(st.sampled_from([1, 50, 90, 97, 100]), st.integers(0, 999))
def test_coefficients_beyond_8_bits_are_kept_exactly(quality: int, seed: int) -> None:
    """Blocks of black and white have the largest coefficients and differences there are."""
    image = np.random.default_rng(seed).choice(np.array([0, 255], np.uint8), (4, 4, 1)).repeat(8, 0).repeat(8, 1)
    layout = CoefficientLayout(32, 32, 1, quality)
    restored = unpack(pack(image, layout), layout).astype(int)
    half = int(layout.planes[0].table[0, 0]) / 2 / BLOCK
    assert np.abs(restored - image).max() <= np.ceil(half)


@pytest.mark.parametrize("change", [-1, 1])
def test_another_length_is_damage(change: int) -> None:
    layout = CoefficientLayout(16, 16, 3, 90)
    with pytest.raises(DamageError, match="bytes"):
        unpack(bytes(layout.nbytes + change), layout)


@pytest.mark.slow
@given(st.binary(min_size=0, max_size=8), st.integers(0, 2**31))
def test_any_bytes_of_the_right_length_make_an_image(start: bytes, seed: int) -> None:
    layout = CoefficientLayout(9, 17, 3, 95)
    packed = start + np.random.default_rng(seed).bytes(layout.nbytes - len(start))
    assert unpack(packed, layout).dtype == np.uint8


@pytest.mark.parametrize(
    ("quality", "luma", "chroma"),
    [
        (1, (0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0)),
        (70, (3, 3, 2, 1, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0, 0, 0)),
        (90, (6, 5, 5, 4, 3, 2, 0, 0), (3, 3, 2, 0, 0, 0, 0, 0)),
    ],
)
def test_which_frequencies_have_high_bits_stays_as_it_is_in_caches_on_disk(
    quality: int, luma: tuple[int, ...], chroma: tuple[int, ...]
) -> None:
    planes = CoefficientLayout(16, 16, 3, quality, "420").planes
    assert [plane.widths for plane in planes] == [luma, chroma, chroma]


def test_packed_bytes_are_those_of_the_first_release_on_every_processor() -> None:
    digest = hashlib.sha256()
    for height, width, channels, quality, chroma in (
        (16, 16, 3, 90, "420"),
        (33, 18, 3, 50, "444"),
        (40, 24, 1, 97, "420"),
        (9, 31, 3, 100, "420"),
    ):
        rows, columns, planes = np.indices((height, width, channels))
        image = ((37 * rows + 11 * columns * columns + 71 * planes + rows * columns) % 256).astype(np.uint8)
        digest.update(pack(image, CoefficientLayout(height, width, channels, quality, chroma)))
    assert digest.hexdigest() == "de37507976af00fc13dac55e53d8587a0b631cdab3cd4847c7601951c6c28907"
