"""Images of other sizes on the device: Pillow's Lanczos of the decoded image, of coefficients, planes and pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from augmenting import dataset_of, rounded_products, scene
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from thorough import thorough

from tpucache.errors import UsageError
from tpucache.geometry import lanczos
from tpucache.ondevice import decoder
from tpucache.ondevice.decode import CoefficientDecoder, PackedDecoder, Resize, Yuv420Decoder, field_decoder
from tpucache.ondevice.modules import Decoder
from tpucache.store.codecs import coefficients, yuv420
from tpucache.store.codecs.coefficients import CoefficientLayout, layout_of, repack
from tpucache.store.fields import Field

Array = np.ndarray[Any, Any]


def resized(image: Array, resize: Resize) -> Array:
    """Return what Pillow makes of an image: (height, width, channels)."""
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    size = resize.width, resize.height
    ways: dict[str, Callable[[], Image.Image]] = {
        "stretch": lambda: picture.resize(size, Image.Resampling.LANCZOS),
        "crop": lambda: ImageOps.fit(picture, size, Image.Resampling.LANCZOS),
        "pad": lambda: ImageOps.pad(picture, size, Image.Resampling.LANCZOS),
    }
    return np.asarray(ways[resize.fit]()).reshape(resize.height, resize.width, -1)


def made(packed: PackedDecoder, batch: Array) -> Array:
    """Return what a decoder makes of one image: (height, width, channels)."""
    return Decoder(packed)(torch.from_numpy(np.array(batch))[None])[0].permute(1, 2, 0).numpy()


def psnr(image: Array, other: Array) -> float:
    error = np.mean((image.astype(float) - other) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-3)))


LAYOUTS = [
    CoefficientLayout(128, 128, 3, 90, "420"),
    CoefficientLayout(128, 96, 3, 95, "444"),
    CoefficientLayout(101, 117, 3, 90, "420"),
    CoefficientLayout(64, 72, 1, 90),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize(
    "size", [(16, 16), (32, 24), (64, 90), *thorough(pytest.param((56, 56)), pytest.param((128, 140)))]
)
def test_coefficients_become_what_pillow_makes_of_the_decoded_image(
    layout: CoefficientLayout, fit: Any, size: tuple[int, int]
) -> None:
    packed = coefficients.pack(scene(layout.height, layout.width, layout.channels), layout)
    expected = resized(coefficients.unpack(packed, layout), Resize(*size, fit))
    found = made(CoefficientDecoder(layout, Resize(*size, fit)), np.frombuffer(packed, np.uint8))
    assert psnr(found, expected) > 45
    if fit == "pad":
        white = resized(np.full((layout.height, layout.width, layout.channels), 255, np.uint8), Resize(*size, fit))
        assert np.array_equal(found.any(2) | (white.max(2) == 255), white.max(2) == 255)


@pytest.mark.parametrize("size", [(8, 8), (20, 33), (64, 64), (100, 128)])
def test_planes_and_pixels_become_what_pillow_makes_of_them(size: tuple[int, int]) -> None:
    image = scene(64, 64, 3)
    packed = yuv420.pack(image)
    expected = resized(yuv420.unpack(packed, 64, 64), Resize(*size))
    assert psnr(made(Yuv420Decoder(64, 64, Resize(*size)), np.frombuffer(packed, np.uint8)), expected) > 45
    raw = field_decoder(Field("image", "raw", "|u1", (64, 64, 3)), Resize(*size))
    assert raw is not None
    found = made(raw, image.transpose(2, 0, 1))
    assert abs(found.astype(int) - resized(image, Resize(*size))).max() <= 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [(16, 16), (56, 48), (96, 96)])
def test_products_of_rounded_numbers_change_no_pixel_by_more_than_a_level(
    layout: CoefficientLayout, size: tuple[int, int]
) -> None:
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (layout.height, layout.width, layout.channels), np.uint8)
    for image in (noise, scene(*noise.shape)):
        packed = np.frombuffer(coefficients.pack(image, layout), np.uint8)
        expected = made(CoefficientDecoder(layout, Resize(*size)), packed)
        with rounded_products():
            found = made(CoefficientDecoder(layout, Resize(*size)), packed)
        assert abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("frequencies", range(1, 9))
def test_low_frequencies_alone_are_packed_as_those_of_the_whole(layout: CoefficientLayout, frequencies: int) -> None:
    random = np.random.default_rng(1)
    shape = layout.height, layout.width, layout.channels
    images = [random.integers(0, 256, shape, np.uint8), scene(*shape)]
    whole = np.stack([np.frombuffer(coefficients.pack(image, layout), np.uint8) for image in images])
    low = repack(whole, layout, frequencies)
    kept = layout_of(shape, layout.quality, layout.chroma, frequencies)
    assert low.shape == (2, kept.nbytes)
    for row, part in zip(whole, low, strict=True):
        expected = made(CoefficientDecoder(layout, frequencies=frequencies), row)
        assert np.array_equal(made(CoefficientDecoder(kept), part), expected)
        assert abs(coefficients.unpack(part.tobytes(), kept).astype(int) - expected).max() <= 1
    assert frequencies < 8 or np.array_equal(low, whole)


@pytest.mark.parametrize(
    ("size", "fit", "said"),
    [
        (7, "crop", "from 8 pixels to twice their own"),
        (129, "crop", "not 129x129"),
        ((16, 129), "crop", "not 16x129"),
        ((16,), "crop", r"not \(16,\)"),
        (16.0, "crop", "not 16.0"),
        (True, "crop", "not True"),
        (16, "cover", "fit is one of crop, pad, stretch, not 'cover'"),
    ],
)
def test_sizes_that_cannot_be_made_are_refused(size: Any, fit: Any, said: str) -> None:
    field = Field("image", "raw", "|u1", (64, 64, 3))
    with pytest.raises(UsageError, match=said):
        decoder(dataset_of(field), size, fit=fit)


@given(st.integers(1, 60), st.floats(0, 0.4), st.floats(0.6, 1), st.integers(1, 70))
def test_weights_are_those_of_pillow(length: int, start: float, stop: float, size: int) -> None:
    box = start * length, stop * length
    impulses = Image.fromarray(np.eye(length, dtype=np.float32))
    expected = impulses.resize((size, length), Image.Resampling.LANCZOS, box=(box[0], 0, box[1], length))
    assert np.allclose(lanczos(length, *box, size), np.asarray(expected).T, atol=2e-6)
