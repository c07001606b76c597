"""Resizing: the same filter over the same box by either library, and the same bits on any processor."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import smooth_image, without
from numpy.testing import assert_array_equal
from PIL import Image, ImageDraw
from thorough import examples

from tpucache.warmup.records import presize as resizing
from tpucache.warmup.records.presize import resize, resizer_versions

Pixels = npt.NDArray[np.uint8]

cykooz_resizer = pytest.importorskip("cykooz_resizer")


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Pixels, tuple[float, float, float, float], tuple[int, int]]:
    width, height = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    x, y = np.linspace(0, 3, width), np.linspace(0, 4, height)[:, None]
    pixels = np.stack([128 + 90 * np.sin(x * k + y + k) for k in (1, 2, 3)], axis=2).astype(np.uint8)
    share = st.one_of(st.sampled_from([0.0, 1 / 3, 0.1]), st.floats(0, 0.45))
    left, right = draw(share) * width, width - draw(share) * width
    top, bottom = draw(share) * height, height - draw(share) * height
    size = draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    return pixels if draw(st.booleans()) else np.ascontiguousarray(pixels[..., 0]), (left, top, right, bottom), size


def _by_pillow(pixels: Pixels, box: Any, size: Any) -> Pixels:
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS, box))


@pytest.mark.slow
@given(_cases())
@settings(max_examples=examples(150))
def test_both_libraries_make_nearly_the_same(case: Any) -> None:
    pixels, _, size = case
    resized, expected = resize(*case), _by_pillow(*case)
    assert resized.dtype == expected.dtype == np.uint8
    assert resized.shape == expected.shape == (*size[::-1], *pixels.shape[2:])
    assert np.abs(resized.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("source", [(96, 96), (46, 80), (88, 16), (333, 200)], ids=str)
@pytest.mark.parametrize("size", [(224, 224), (64, 64), (101, 197)], ids=str)
def test_of_a_line_drawing_it_makes_what_pillow_makes_of_one_axis_after_the_other(source: Any, size: Any) -> None:
    drawing = Image.new("RGB", source, "white")
    lines = random.Random(f"{source} {size}")
    for _ in range(40):
        ends = [lines.randrange(side) for side in (*source, *source)]
        ImageDraw.Draw(drawing).line(ends, lines.choice(["black", "red", "blue"]), lines.randint(1, 4))
    pixels, box = np.asarray(drawing), (0.0, 0.0, *map(float, source))
    resized = resize(pixels, box, size).astype(int)
    (width, height), (wide, high) = source, size
    by_rows = _by_pillow(_by_pillow(pixels, box, (wide, height)), (0.0, 0.0, wide, height), size)
    by_columns = _by_pillow(_by_pillow(pixels, box, (width, high)), (0.0, 0.0, width, high), size)
    assert min(np.abs(resized - each).max() for each in (by_rows, by_columns)) <= 2
    assert np.abs(resized - _by_pillow(pixels, box, size)).max() <= 61


@pytest.mark.slow
@given(_cases())
def test_no_pixel_that_the_filter_sees_is_left_out(case: Any) -> None:
    whole = resize(*case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "LOBES", 1000)
        assert_array_equal(resize(*case), whole)


@pytest.mark.parametrize("shape", [(37, 61), (37, 61, 3)], ids=str)
def test_any_instructions_make_the_same_bits(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    box, size = (1.25, 0.0, 60.5, 36.75), (23, 29)
    expected = resize(pixels, box, size)
    plain = cykooz_resizer.Resizer()
    plain.cpu_extensions = cykooz_resizer.CpuExtensions.none
    monkeypatch.setattr(cykooz_resizer, "Resizer", lambda: plain)
    with ThreadPoolExecutor() as pool:  # each thread has a resizer of its own
        assert_array_equal(pool.submit(resize, pixels, box, size).result(), expected)


@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 3)], ids=str)
def test_the_same_size_changes_nothing(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert_array_equal(resize(pixels, (0.0, 0.0, 5.0, 8.0), (5, 8)), pixels)


def test_pixels_of_any_strides_are_read_as_they_are() -> None:
    turned = np.asarray(smooth_image(40, 30)).swapaxes(0, 1)[:, ::-1]
    expected = resize(np.ascontiguousarray(turned), (0, 0, 30, 40), (12, 9))
    assert_array_equal(resize(turned, (0, 0, 30, 40), (12, 9)), expected)


def test_the_version_is_of_what_resizes() -> None:
    from importlib.metadata import version

    assert resizer_versions() == {"cykooz_resizer": version("cykooz-resizer")}
    with without("cykooz_resizer"):
        assert resizer_versions() == {"cykooz_resizer": ""}
