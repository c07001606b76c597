"""Masks of black and white, and of colours, become class numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from made import encode, jpeg
from numpy.testing import assert_array_equal
from PIL import Image

from tpucache.cli.parser import colours
from tpucache.errors import RecipeError, SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.records.masks import decode_mask, has_grey_palette

SCALE = Recipe(mask_values="scale")
CLASSES = np.array([[0, 1, 1], [1, 0, 0]], np.uint8)
COLOURS = Recipe(mask_colours=("000000", "ff8000", "0000ff"))


@pytest.mark.parametrize(
    "data",
    [
        encode(CLASSES * np.uint8(255)),
        encode(CLASSES.astype(np.uint16) * np.uint16(65535)),
        encode(CLASSES.astype(np.uint16) * np.uint16(65535), "TIFF"),
        encode(CLASSES.astype(bool)),
        CLASSES * np.uint8(255),
        CLASSES.astype(bool),
        CLASSES[..., None].astype(np.uint16) * np.uint16(65535),
    ],
    ids=["8 bit", "16 bit", "TIFF", "1 bit", "array", "bool array", "deep array"],
)
def test_black_and_white_are_0_and_1(data: Any) -> None:
    mask = decode_mask(data, "a", SCALE)
    assert mask.dtype == np.uint8
    assert_array_equal(mask, CLASSES)


def test_a_jpeg_that_is_nearly_black_and_white_is_scaled() -> None:
    disc = (np.add.outer((np.arange(40) - 20) ** 2, (np.arange(40) - 20) ** 2) < 150).astype(np.uint8)
    data = jpeg(Image.fromarray(disc * np.uint8(255)))
    assert len(np.unique(np.asarray(Image.open(io.BytesIO(data))))) > 2
    assert (decode_mask(data, "a", SCALE) != disc).mean() < 0.01


@pytest.mark.parametrize("value", [1, 127, 254])
def test_a_third_value_is_not_scaled_away(value: int) -> None:
    with pytest.raises(SampleError, match=f"holds {value}, and --mask-values scale takes only 0 and 255"):
        decode_mask(encode(np.array([[0, 255, value]], np.uint8)), "a", SCALE)


def test_without_the_option_numbers_are_kept_and_65535_is_refused_with_it() -> None:
    assert decode_mask(encode(CLASSES * np.uint8(255)), "a").max() == 255
    with pytest.raises(SampleError, match="--mask-values scale makes 0 and 65535 into 0 and 1"):
        decode_mask(encode(CLASSES.astype(np.uint16) * np.uint16(65535)), "a")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "array"])
def test_colours_are_numbers_in_the_order_of_the_table(mode: str) -> None:
    numbers = np.array([[0, 1, 2], [2, 2, 1]])
    pixels = np.array([[0, 0, 0], [255, 128, 0], [0, 0, 255]], np.uint8)[numbers]
    data = pixels if mode == "array" else encode(Image.fromarray(pixels).convert(mode))
    assert_array_equal(decode_mask(data, "a", COLOURS), numbers)


def test_a_colour_that_is_not_in_the_table_is_named() -> None:
    with pytest.raises(SampleError, match="the colour 1, 2, 3, which --mask-colours does not list"):
        decode_mask(encode(Image.new("RGB", (2, 2), (1, 2, 3))), "a", COLOURS)


def palette_of(colours: Any) -> Image.Image:
    image = Image.frombytes("P", CLASSES.shape[::-1], CLASSES.tobytes())
    image.putpalette(np.array(colours, np.uint8).tobytes())
    return image


@pytest.mark.parametrize(
    ("colours", "expected"),
    [([[0] * 3, [255] * 3], CLASSES), ([[255] * 3, [0] * 3], 1 - CLASSES)],
    ids=["black first", "white first"],
)
@pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF", "BMP"])
def test_a_palette_of_black_and_white_is_scaled_by_its_colours(colours: Any, expected: Any, kind: str) -> None:
    data = encode(palette_of(colours), kind)
    if kind == "BMP" and colours[0] == [0] * 3:
        with pytest.raises(SampleError, match="Pillow reads a black and white BMP of 4 or 8 bits as 1 bit"):
            decode_mask(data, "a", SCALE)
    else:
        assert_array_equal(decode_mask(data, "a", SCALE), expected)


def test_a_bmp_of_one_bit_is_read() -> None:
    assert_array_equal(decode_mask(encode(CLASSES.astype(bool), "BMP"), "a", SCALE), CLASSES)


@pytest.mark.parametrize("mode", ["P", "PA", "L", "LA", "1", "RGB", "RGBA"])
def test_a_mask_means_the_same_however_its_file_stores_it(mode: str) -> None:
    image = palette_of([[255] * 3, [0] * 3]).convert("L").convert(mode)
    kind = "TIFF" if mode == "PA" else "PNG"
    assert_array_equal(decode_mask(encode(image, kind), "a", SCALE), 1 - CLASSES)
    table = Recipe(mask_colours=("000000", "ff0000", "ffffff"))
    assert_array_equal(decode_mask(encode(image, kind), "a", table), (1 - CLASSES) * 2)


def test_the_colours_of_a_palette_are_looked_up() -> None:
    data = encode(palette_of([[0, 0, 255], [255, 128, 0]]))
    assert_array_equal(decode_mask(data, "a", COLOURS), 2 - CLASSES)
    assert_array_equal(decode_mask(data, "a"), CLASSES)  # without the table: the indices
    with pytest.raises(SampleError, match="has colours, and --mask-values scale takes only black and white"):
        decode_mask(data, "a", SCALE)


def test_an_array_has_the_colours_that_a_file_with_its_pixels_has() -> None:
    table = Recipe(mask_colours=("000000", "ffffff"))
    assert_array_equal(decode_mask(CLASSES * np.uint8(255), "a", table), CLASSES)
    assert_array_equal(decode_mask((CLASSES * np.uint8(255))[..., None], "a", table), CLASSES)


@pytest.mark.parametrize(
    ("greys", "is_unclear"), [([0, 255], False), ([0, 1], False), ([255, 0], True), ([0, 127], True), ([7, 7], True)]
)
def test_a_palette_of_greys_is_unclear_unless_they_are_its_indices(greys: list[int], is_unclear: bool) -> None:
    assert has_grey_palette(encode(palette_of([[grey] * 3 for grey in greys]))) is is_unclear
    assert not has_grey_palette(encode(palette_of([[grey, 9, grey] for grey in greys])))
    assert not has_grey_palette(encode(CLASSES))


def test_only_a_palette_of_two_colours_may_have_white_at_1() -> None:
    image = Image.fromarray(np.arange(4, dtype=np.uint8)[None], "P")
    image.putpalette([grey for grey in (0, 255, 254, 253) for _ in range(3)])
    assert has_grey_palette(encode(image))


@pytest.mark.parametrize("heading", ["", "name,r,g,b\n", "\ufeffname, red, green, blue\r\n"])
def test_a_table_of_colours_is_read(heading: str, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(heading + "void,0,0,0\n\nroad,255, 128,0\nsky,0,0,255\n", encoding="utf-8")
    assert colours(str(tmp_path / "c.csv")) == COLOURS.mask_colours


@pytest.mark.parametrize(
    "given", [(), ("000000",), ("000000", "000000"), ("000000", "red"), "000000", ("000000", "FFFFFF")]
)
def test_a_recipe_refuses_what_are_no_colours(given: Any) -> None:
    with pytest.raises(RecipeError, match="recipe: 'mask_colours"):
        Recipe(mask_colours=given)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("recipe", [SCALE, COLOURS], ids=["scale", "colours"])
def test_colours_of_16_bits_are_not_cut_to_black(recipe: Recipe, channels: int) -> None:
    white = 65535 if recipe is SCALE else 0
    for value, is_refused in ((1, True), (255, True), (white, False)):
        pixels = np.dstack([CLASSES.astype(np.uint16) * np.uint16(value)] * channels)
        data = cv2.imencode(".png", pixels)[1].tobytes()
        if is_refused:
            with pytest.raises(SampleError, match="the mask: its colours have 16 bits"):
                decode_mask(data, "a", recipe)
        else:
            assert_array_equal(decode_mask(data, "a", recipe), CLASSES * bool(value))


def test_colours_are_looked_up_in_grey_of_16_bits_too() -> None:
    recipe = Recipe(mask_colours=("000000", "404040"))
    data = encode(CLASSES.astype(np.uint16) * np.uint16(64))
    assert_array_equal(decode_mask(data, "a", recipe), CLASSES)
    with pytest.raises(SampleError, match="the colour 1, 1, 1, which --mask-colours does not list"):
        decode_mask(encode(CLASSES.astype(np.uint16)), "a", recipe)


@pytest.mark.parametrize("white", [1, 20, 1000])
def test_a_pgm_whose_numbers_pillow_scales_is_refused(white: int) -> None:
    data = f"P5\n3 2\n{white}\n".encode() + CLASSES.astype(">u2" if white > 255 else "u1").tobytes()
    with pytest.raises(
        SampleError, match=f"the mask: the file says that {white} is white, so Pillow scales the pixels' numbers"
    ):
        decode_mask(data, "a")
    plain = b"P5\n3 2\n255\n" + CLASSES.tobytes()
    assert_array_equal(decode_mask(plain, "a"), CLASSES)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_tiff_whose_zero_is_white_is_no_mask(dtype: Any) -> None:
    target = io.BytesIO()
    Image.fromarray(CLASSES.astype(dtype)).save(target, "TIFF", tiffinfo={262: 0})
    with Image.open(io.BytesIO(target.getvalue())) as image:
        assert image.tag_v2[262] == 0  # type: ignore[attr-defined]  # it is a TIFF
    with pytest.raises(SampleError, match="0 is white in this TIFF"):
        decode_mask(target.getvalue(), "a")
    if dtype == np.uint16:
        with pytest.raises(SampleError, match="0 is white in this TIFF"):
            decode_mask(target.getvalue(), "a", SCALE)
