"""Presizing: near a full decode, one policy for every mode, and one error for everything broken."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hostile_bytes import RGB, png_file
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made import encode, jpeg, smooth_image, without
from numpy.testing import assert_array_equal
from PIL import Image, ImageOps
from thorough import examples, thorough

from tpucache.errors import SampleError
from tpucache.geometry import framing_of, placement
from tpucache.recipe import Recipe
from tpucache.warmup.records.presize import presize, slow_parts

Pixels = npt.NDArray[np.uint8]

_FITS = ("crop", "pad", "stretch")
_SHAPES = [(600, 400), (400, 600), (500, 500), (900, 200), (225, 225), (7, 5), (1, 1), (1, 9)]


def _reference(data: bytes, recipe: Recipe) -> Pixels:
    size = (recipe.width, recipe.height)
    with Image.open(io.BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    if recipe.fit == "crop":
        image = ImageOps.fit(image, size, Image.Resampling.LANCZOS)
    elif recipe.fit == "pad":
        image = ImageOps.pad(image, size, Image.Resampling.LANCZOS, color=(0, 0, 0))
    else:
        image = image.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(image)


def _psnr(image: Pixels, reference: Pixels) -> float:
    assert image.shape == reference.shape
    error = np.mean((image.astype(np.float64) - reference) ** 2)
    return float(np.inf if error == 0 else 10 * np.log10(255**2 / error))


@pytest.mark.slow
@pytest.mark.parametrize("fit", _FITS)
@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("size", [64, (97, 31), *thorough(pytest.param((48, 96)))], ids=str)
def test_a_photograph_is_near_a_full_decode_and_lanczos(
    shape: tuple[int, int],
    mode: str,
    fit: Any,
    size: Any,
) -> None:
    data = jpeg(smooth_image(*shape).convert(mode))
    recipe = Recipe(size=size, fit=fit)
    image = presize(data, recipe, "a.jpg")
    assert image.dtype == np.uint8
    assert image.shape == (recipe.height, recipe.width, 3)
    assert _psnr(image, _reference(data, recipe)) >= 40


@pytest.mark.parametrize(
    "options",
    [{"orientation": 0}, {"orientation": 9}, {"exif": b"Exif\x00\x00II*\x00\xff\xff\xff\xffgarbage"}],
    ids=str,
)
def test_an_orientation_that_does_not_exist_changes_nothing(
    options: Any,
) -> None:
    plain, odd = (presize(jpeg(smooth_image(90, 60), **each), Recipe(size=32), "a.jpg") for each in ({}, options))
    assert_array_equal(odd, plain)


@pytest.mark.slow
@pytest.mark.parametrize("fit", _FITS)
def test_exact_is_at_least_as_near_as_the_scaled_decode(
    fit: Any,
) -> None:
    data = jpeg(smooth_image(1200, 800))
    scaled, exact = (Recipe(size=64, fit=fit, exact=exact) for exact in (False, True))
    reference = _reference(data, exact)
    exact_image, scaled_image = presize(data, exact, "a.jpg"), presize(data, scaled, "a.jpg")
    assert _psnr(scaled_image, reference) >= 50
    assert _psnr(exact_image, reference) >= _psnr(scaled_image, reference)
    assert (exact_image != scaled_image).any(), "the scaled decode was not scaled, or exact was ignored"


@pytest.mark.parametrize(("fit", "least"), [("crop", (192, 128)), ("pad", (128, 86)), ("stretch", (128, 128))])
def test_a_scaled_decode_is_of_at_least_twice_the_size(fit: Any, least: tuple[int, int]) -> None:
    found = framing_of((1200, 800), 1, (64, 64), fit).least()
    assert all(side >= wanted for side, wanted in zip(found, least, strict=True)), found


@pytest.mark.slow
@given(
    width=st.integers(1, 6000), height=st.integers(1, 6000), size=st.tuples(st.integers(1, 600), st.integers(1, 600))
)
@settings(max_examples=examples(500))
@example(width=29, height=225, size=(224, 224))  # side / 224 * 224 > side in floating point
def test_the_part_that_is_kept_lies_inside_the_image(width: int, height: int, size: tuple[int, int]) -> None:
    for fit in _FITS:
        place = placement((0.0, 0.0, float(width), float(height)), size, fit)
        left, top, right, bottom = place.box
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        assert all(1 <= side <= limit for side, limit in zip(place.size, size, strict=True))


@pytest.mark.parametrize(("image_size", "size"), [((600, 400), 33), ((400, 600), 33), ((500, 500), (20, 51))], ids=str)
def test_padding_is_black_and_around_the_middle(image_size: Any, size: Any) -> None:
    image = presize(encode(Image.new("RGB", image_size, "white")), Recipe(size=size, fit="pad"), "a.png")
    white = (image == 255).all(axis=2)
    assert ((image == 0).all(axis=2) | white).all()
    for axis in (0, 1):
        filled = np.flatnonzero(white.any(axis=axis))
        assert abs(filled[0] - (white.shape[1 - axis] - 1 - filled[-1])) <= 1


def _flat(mode: str, value: Any) -> Image.Image:
    return Image.new(mode, (24, 16), value)


def _grey(value: float, dtype: Any) -> Image.Image:
    return Image.fromarray(np.full((16, 24), value, dtype))


def _palette() -> Image.Image:
    image = _flat("P", 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    return image


_COLOUR = (10, 200, 30)
#: Pictures of one colour, how they are saved, and what they become.
_MODES: dict[str, tuple[Image.Image, dict[str, Any], Any]] = {
    "RGB": (_flat("RGB", _COLOUR), {}, _COLOUR),
    "RGB with another colour transparent": (_flat("RGB", _COLOUR), {"transparency": (1, 2, 3)}, _COLOUR),
    "RGB with its colour transparent": (_flat("RGB", _COLOUR), {"transparency": _COLOUR}, 255),
    "L": (_flat("L", 77), {}, 77),
    "L with its grey transparent": (_flat("L", 77), {"transparency": 77}, 255),
    "LA half transparent": (_flat("LA", (0, 128)), {}, 127),
    "LA opaque": (_flat("LA", (40, 255)), {}, 40),
    "RGBA transparent": (_flat("RGBA", (*_COLOUR, 0)), {}, 255),
    "RGBA half transparent": (_flat("RGBA", (255, 0, 55, 128)), {}, (255, 127, 155)),
    "P": (_palette(), {}, _COLOUR),
    "P with its colour transparent": (_palette(), {"transparency": 1}, 255),
    "P with another colour transparent": (_palette(), {"transparency": 0}, _COLOUR),
    "P in a GIF": (_palette(), {"transparency": 1, "kind": "GIF"}, 255),
    "CMYK": (_flat("CMYK", (0, 255, 255, 0)), {"kind": "TIFF"}, (255, 0, 0)),
    "I;16": (_grey(100 * 257, np.uint16), {}, 100),
    "I;16 white": (_grey(65535, np.uint16), {}, 255),
    "I": (_grey(200 * 257, np.int32), {"kind": "TIFF"}, 200),
    "F": (_grey(0.2, np.float32), {"kind": "TIFF"}, 51),
    "1 white": (_flat("1", 1), {}, 255),
    "1 black": (_flat("1", 0), {}, 0),
}


@pytest.mark.parametrize(("image", "options", "expected"), _MODES.values(), ids=_MODES)
def test_every_mode_becomes_rgb_by_the_policy(image: Image.Image, options: dict[str, Any], expected: Any) -> None:
    result = presize(encode(image, **options), Recipe(size=8), "a")
    assert result.shape == (8, 8, 3)
    assert np.abs(result.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation_is_taken(file_format: str) -> None:
    frames = [Image.new("RGB", (24, 16), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert_array_equal(presize(data, Recipe(size=4), "a"), np.full((4, 4, 3), (255, 0, 0), np.uint8))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0", "identify"),
        (bytes(4096), "identify"),
        (b"id,label\n1,cat\n" * 50, "identify"),
        (b"<html><body>404 not found</body></html>", "identify"),
        (b"\xff\xd8\xff", "identify"),
        (png_file(10_000, 9_500, 8, RGB, rows=1), "too many pixels"),
        (png_file(60_000, 60_000, 8, RGB, rows=1), "too many pixels"),
        (png_file(64, 64, 8, RGB, rows=0), "does not decode"),
    ],
    ids=["empty", "zero", "zeros", "text", "html", "jpeg start", "bomb warning", "bomb", "lying header"],
)
def test_what_is_no_image_is_a_sample_error_naming_the_path(data: bytes, reason: str) -> None:
    with pytest.raises(SampleError, match=reason) as caught:
        presize(data, Recipe(size=8), "class/some file.jpg")
    assert caught.value.path == "class/some file.jpg"
    assert "class/some file.jpg" in str(caught.value)


@pytest.mark.slow
def test_a_broken_chunk_amid_the_pixels_is_a_sample_error() -> None:
    data = bytearray(encode(smooth_image(400, 300)))
    second = data.index(b"IDAT", data.index(b"IDAT") + 4)
    data[second : second + 4] = b"\0\1\2\3"
    with pytest.raises(SampleError, match="does not decode: SyntaxError"):
        presize(bytes(data), Recipe(size=16), "broken.png")


@pytest.mark.parametrize("fit", _FITS)
def test_an_array_is_presized_as_the_file_of_it_is(
    fit: Any,
) -> None:
    image, recipe = smooth_image(61, 43), Recipe(size=(20, 28), fit=fit)
    for mode in ("RGB", "L"):
        data = encode(image.convert(mode))
        pixels = np.asarray(image.convert(mode))
        assert_array_equal(presize(pixels, recipe, "a"), presize(data, recipe, "a.png"))


def test_what_pillow_does_more_slowly_is_reported_with_its_remedy() -> None:
    with without("simplejpeg", "cykooz_resizer"):
        decoding, resizing = slow_parts()
    assert "pip install simplejpeg" in decoding
    assert "pip install cykooz-resizer" in resizing


def test_with_both_libraries_nothing_is_slow() -> None:
    for name in ("simplejpeg", "cykooz_resizer"):
        pytest.importorskip(name)
    assert slow_parts() == []
