"""Decoding: the same pixels and the same refusals whichever library decodes, and masks as numbers."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import encode, jpeg, smooth_image, without
from numpy.testing import assert_array_equal
from PIL import Image, features
from thorough import examples

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.records.masks import decode_mask
from tpucache.warmup.records.numbers import Decoded
from tpucache.warmup.records.pillow import opened
from tpucache.warmup.records.pillow_modes import decode
from tpucache.warmup.records.presize import image_versions, presize

_JPEGS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "progressive": {"progressive": True},
    "full chroma": {"subsampling": 0},
    "restarts": {"restart_marker_blocks": 2},
    "RGB inside": {"keep_rgb": True},
    "grey": {},
    "CMYK": {},
}


@pytest.fixture
def without_simplejpeg() -> Iterator[None]:
    with without("simplejpeg"):
        yield


def _jpeg(kind: str, image: Image.Image) -> bytes:
    return jpeg(image.convert({"grey": "L", "CMYK": "CMYK"}.get(kind, "RGB")), **_JPEGS[kind])


def _decoded(data: bytes, least: tuple[int, int] | None = None) -> Decoded:
    with opened(data) as file:
        return decode(file, Recipe(), least)


def _pillow_decodes(data: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except (OSError, SyntaxError):
        return False
    return True


@pytest.mark.parametrize("kind", _JPEGS)
def test_a_full_decode_is_what_pillow_makes_of_it(kind: str) -> None:
    data = _jpeg(kind, smooth_image(99, 71))
    pixels, scale = _decoded(data)
    with Image.open(io.BytesIO(data)) as expected:
        assert_array_equal(pixels, np.asarray(expected.convert("L" if kind == "grey" else "RGB")))
    assert scale == 1


@pytest.mark.parametrize("kind", _JPEGS)
def test_a_jpeg_cut_anywhere_is_refused_where_pillow_refuses_it_in_full(kind: str) -> None:
    data = _jpeg(kind, smooth_image(72, 56))
    for cut in (*range(0, len(data) - 12, 37), *range(len(data) - 12, len(data) + 1)):
        accepted = _pillow_decodes(data[:cut])
        for exact in (False, True):
            try:
                presize(data[:cut], Recipe(size=8, exact=exact), "cut.jpg")
            except SampleError:
                assert not accepted, cut
            else:
                assert accepted, cut


def test_what_only_pillow_takes_is_decoded_by_pillow() -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    plain = jpeg(smooth_image(99, 71))
    at = plain.index(b"\xff\xc4")
    odd = plain[:at] + b"\0\0" + plain[at:]
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(odd)
    assert_array_equal(_decoded(odd).pixels, _decoded(plain).pixels)


@pytest.mark.slow
@given(size=st.tuples(st.integers(1, 200), st.integers(1, 200)), share=st.tuples(st.floats(0, 1.2), st.floats(0, 1.2)))
@settings(max_examples=examples(150))
def test_a_jpeg_is_decoded_at_the_smallest_scale_of_at_least_what_is_wanted(
    size: tuple[int, int], share: tuple[float, float]
) -> None:
    pytest.importorskip("simplejpeg")
    least = tuple(max(1, math.ceil(side * part)) for side, part in zip(size, share, strict=True))
    target = io.BytesIO()
    Image.new("RGB", size, "teal").save(target, "JPEG")
    pixels, scale = _decoded(target.getvalue(), (least[0], least[1]))
    eighths = round(8 * scale)
    assert 8 * scale == eighths
    assert pixels.shape[1::-1] == tuple(math.ceil(side * eighths / 8) for side in size)
    assert eighths == 8 or all(side * scale >= wanted for side, wanted in zip(size, least, strict=True))
    if eighths > 1 and max(size) >= 8:
        assert any(side * (eighths - 1) < wanted * 8 for side, wanted in zip(size, least, strict=True))


@pytest.mark.usefixtures("without_simplejpeg")
@pytest.mark.parametrize("kind", _JPEGS)
def test_pillow_alone_scales_too(kind: str) -> None:
    data = _jpeg(kind, smooth_image(400, 300))
    pixels, scale = _decoded(data, (90, 60))
    assert (pixels.shape[:2], scale) == ((75, 100), 0.25)


@pytest.mark.parametrize("kind", [kind for kind in _JPEGS if kind != "CMYK"])
def test_both_libraries_make_the_same_of_a_scale_that_both_have(kind: str, request: pytest.FixtureRequest) -> None:
    data = _jpeg(kind, smooth_image(400, 300))
    first = _decoded(data, (200, 150)).pixels.astype(int)
    request.getfixturevalue("without_simplejpeg")
    assert np.abs(first - _decoded(data, (200, 150)).pixels).max() <= 1


def test_a_mask_of_16_bits_is_numbers_up_to_255() -> None:
    numbers = np.array([[0, 7], [255, 1]], np.uint16)
    mask = decode_mask(encode(numbers), "a")
    assert mask.dtype == np.uint8
    assert_array_equal(mask, numbers)
    with pytest.raises(SampleError, match="the mask holds 1 to 256"):
        decode_mask(encode(numbers + np.uint16(1)), "a")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_what_is_not_a_number_a_pixel_is_no_mask(mode: str) -> None:
    with pytest.raises(SampleError, match=f"the mask is an image of mode {mode}") as caught:
        decode_mask(encode(Image.new(mode, (2, 2))), "some/mask")
    assert caught.value.path == "some/mask"


@pytest.mark.parametrize("data", [b"", b"no mask", np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2), bool)])
def test_a_broken_mask_is_called_a_mask(data: Any) -> None:
    with pytest.raises(SampleError, match="the mask"):
        decode_mask(data, "a")


def test_versions_are_of_what_decodes() -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    versions = image_versions()
    assert set(versions) == {"pillow", "libjpeg", "simplejpeg", "cykooz_resizer"}
    assert versions["simplejpeg"] == simplejpeg.__version__
    assert versions["libjpeg"] in (features.version("libjpeg_turbo"), features.version("jpg"))


@pytest.mark.usefixtures("without_simplejpeg")
def test_the_version_of_what_is_missing_is_empty() -> None:
    assert image_versions()["simplejpeg"] == ""
