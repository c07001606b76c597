"""Fields of a record: masks, boxes and keypoints lie where their pixels do; whatever does not fit is named."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import encode, jpeg
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image, ImageOps
from thorough import examples, thorough

from tpucache.errors import SampleError, SourceError
from tpucache.geometry import framing_of
from tpucache.recipe import Recipe
from tpucache.store.fields import Field
from tpucache.warmup.records.arrays import clean_and_count, record_fields
from tpucache.warmup.sources.source import Item

Array = npt.NDArray[Any]

_FITS = ("crop", "pad", "stretch")
_TURNS = range(1, 9)


def _clean(item: Item, recipe: Recipe) -> dict[str, Array]:
    fields = record_fields(item, recipe)
    clean = clean_and_count(item, fields, recipe, "a.jpg")[0]
    assert list(clean) == [field.name for field in fields]
    for field in fields:
        assert (clean[field.name].dtype.str, clean[field.name].shape) == (field.dtype, field.shape)
        assert clean[field.name].flags.c_contiguous
    return clean


def _blocks(width: int, height: int, cell: int = 40, seed: int = 0) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, 2, (-(-height // cell), -(-width // cell)), np.uint8) * 255
    return np.kron(cells, np.ones((cell, cell), np.uint8))[:height, :width]


def test_fields_come_in_the_order_of_the_record() -> None:
    item = Item(
        {
            "tokens": np.zeros(5, ">i4"),
            "keypoints": np.zeros((7, 2)),
            "flag": np.array(True),
            "boxes": np.zeros((0, 4)),
            "mask": b"",
            "image": b"",
        }
    )
    assert record_fields(item, Recipe(size=(4, 6), codec="jpeg", max_boxes=9)) == (
        Field("image", "jpeg", "|u1", (4, 6, 3)),
        Field("mask", "png", "|u1", (4, 6, 1)),
        Field("boxes", "raw", "<f4", (9, 5)),
        Field("keypoints", "raw", "<f4", (7, 3)),
        Field("tokens", "raw", "<i4", (5,)),
        Field("flag", "raw", "|b1", ()),
    )


@pytest.mark.parametrize(("codec", "lossless"), [("raw", "raw"), ("zstd", "zstd"), ("jpeg", "png"), ("png", "png")])
def test_a_mask_is_stored_without_loss(codec: Any, lossless: str) -> None:
    assert record_fields(Item({"image": b"", "mask": b""}), Recipe(codec=codec))[1].codec == lossless


def test_without_an_image_every_array_is_one_like_any_other() -> None:
    arrays = {"boxes": np.ones((2, 2)), "mask": np.ones(3, np.float32), "keypoints": np.ones((1, 3), np.int64)}
    item = Item(arrays)
    assert [field.name for field in record_fields(item, Recipe())] == list(arrays)
    clean = _clean(item, Recipe())
    for name, array in arrays.items():
        assert_array_equal(clean[name], array)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no fields"),
        ({"Tokens": np.zeros(1)}, "cannot be called 'Tokens'"),
        ({"a b": np.zeros(1)}, "cannot be called 'a b'"),
        ({"a" * 65: np.zeros(1)}, "cannot be called"),
        ({"a\n": np.zeros(1)}, "cannot be called"),
        ({"x": np.zeros(1, complex)}, "'x' is complex128"),
        ({"x": np.zeros(1, np.uint64)}, "'x' is uint64"),
        ({"x": np.array(["a"])}, "'x' is <U1"),
        ({"x": b"1"}, "'x' is encoded bytes"),
        ({"mask": b"1"}, "'mask' is encoded bytes"),
        ({"x": np.zeros((0, 3))}, "'x' is empty"),
        ({"image": b"", "keypoints": np.zeros((4, 3))}, "keypoints must be an array"),
        ({"image": b"", "keypoints": np.zeros((0, 2))}, "keypoints must be an array"),
    ],
)
def test_what_a_record_cannot_hold_is_refused(fields: Any, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        record_fields(Item(fields), Recipe())


@pytest.mark.parametrize("dtype", [">i2", ">f8", "<u4", "|b1", "<f2"])
def test_arrays_are_kept_as_they_are_but_for_the_order_of_bytes(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)[:, ::-1]
    clean = _clean(Item({"x": array}), Recipe())
    assert_array_equal(clean["x"], array)


def _item(fields: dict[str, Any]) -> Item:
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Item({name: value for name, value in arrays.items() if value is not None})


_GOOD: dict[str, Any] = {
    "image": np.zeros((8, 8, 3), np.uint8),
    "mask": np.zeros((8, 8), np.uint8),
    "boxes": [[1.0, 1, 5, 5]],
    "keypoints": [[1.0, 2.0]],
    "tokens": np.zeros(3, np.int32),
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tokens": None}, "no field 'tokens'"),
        ({"image": None}, "no field 'image'"),
        ({"more": np.zeros(1)}, "a field 'more', unlike other samples"),
        ({"tokens": np.zeros(4, np.int32)}, r"'tokens' is int32 \(4,\), in other samples int32 \(3,\)"),
        ({"tokens": np.zeros(3, np.int64)}, "'tokens' is int64"),
        ({"tokens": b"abc"}, "'tokens' is bytes"),
        ({"image": np.zeros((20, 20, 20), np.uint8)}, r"an image is \(height, width\)"),
        ({"image": np.zeros((20, 20, 6), np.uint8)}, "has 6 channels: use --mode keep"),
        ({"image": np.full((8, 8), 0.01)}, "nearly black"),
        ({"image": np.zeros((0, 8), np.uint8)}, "an image is"),
        ({"image": b"text"}, "not an image"),
        ({"mask": np.zeros((8, 9), np.uint8)}, "the mask is 9 x 8 pixels, the image 8 x 8"),
        ({"mask": b"text"}, "the mask: not an image"),
        ({"boxes": [[1, 1, np.nan, 5]]}, "boxes hold numbers that are not finite"),
        ({"boxes": [[1, 1, 5, 5, np.inf]]}, "boxes hold numbers that are not finite"),
        ({"boxes": [[1, 1, 1e300, 5]]}, "boxes hold numbers that are not finite, or beyond"),
        ({"keypoints": [[-1e300, 1]]}, "keypoints hold numbers that are not finite, or beyond"),
        ({"boxes": [[0, 0, 1, 1], [5, 1, 4, 2]]}, "box 1 has a negative width or height"),
        ({"boxes": [[1, 5, 4, 2]]}, "box 0 has a negative width or height"),
        ({"boxes": np.ones((2, 3))}, r"boxes must have the shape \(n, 4\) or \(n, 5\)"),
        ({"boxes": [[1, 1, 5, 5, 0], [1, 1, 5, 5, -1]]}, "box 1 has the class -1: give whole numbers from 0"),
        ({"boxes": [[1, 1, 5, 5, 1.5]]}, "box 0 has the class 1.5"),
        ({"boxes": [[0.1, 0.1, 0.5, 1]]}, "lie in one pixel: if they are fractions"),
        ({"boxes": ["a"]}, "boxes must be an array of numbers"),
        ({"boxes": b"1"}, "boxes must be an array of numbers"),
        ({"boxes": np.tile([1.0, 1, 5, 5], (4, 1))}, "holds 4 boxes, more than --max-boxes 3"),
        ({"keypoints": np.ones((2, 2))}, r"'keypoints' has the shape \(2, 2\), in other samples \(1, 2\)"),
        ({"keypoints": np.ones((1, 3))}, "'keypoints' has the shape"),
        ({"keypoints": [[np.nan, 1]]}, "keypoints hold numbers that are not finite"),
    ],
)
def test_a_sample_unlike_the_others_is_an_error_naming_the_field(changed: dict[str, Any], reason: str) -> None:
    recipe = Recipe(size=4, max_boxes=3)
    fields = record_fields(_item(_GOOD), recipe)
    with pytest.raises(SampleError, match=reason) as caught:
        clean_and_count(_item({**_GOOD, **changed}), fields, recipe, "some/path")
    assert caught.value.path == "some/path"


@pytest.mark.parametrize("boxes", [np.zeros((0, 4)), np.zeros((0, 5), np.float32), np.array([])], ids=str)
def test_no_boxes_are_rows_of_minus_one(boxes: Array) -> None:
    clean = _clean(_item({**_GOOD, "boxes": boxes}), Recipe(size=4, max_boxes=3))
    assert_array_equal(clean["boxes"], np.full((3, 5), -1))


@pytest.mark.parametrize("fit", _FITS)
@pytest.mark.parametrize("turn", _TURNS)
def test_a_mask_is_what_pillow_makes_of_it_with_the_nearest_pixel(turn: int, fit: Any) -> None:
    mask = np.random.default_rng(turn).integers(0, 256, (49, 81), np.uint8)  # odd: no middle lies between two pixels
    recipe = Recipe(size=(23, 31), fit=fit, coordinates="stored")
    image = encode(Image.new("RGB", (81, 49)), orientation=turn)
    got = _clean(Item({"image": image, "mask": mask}), recipe)["mask"][..., 0]
    with Image.open(io.BytesIO(encode(mask, orientation=turn))) as opened:
        shown = ImageOps.exif_transpose(opened)
    size, nearest = (recipe.width, recipe.height), Image.Resampling.NEAREST
    if fit == "crop":
        expected = ImageOps.fit(shown, size, nearest)
    else:
        expected = ImageOps.pad(shown, size, nearest) if fit == "pad" else shown.resize(size, nearest)
    assert_array_equal(got, np.asarray(expected))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("fit", _FITS)
@pytest.mark.parametrize("turn", [1, 6, *thorough(2, 3, 4, 5, 7, 8)])
def test_a_mask_lies_on_the_pixels_of_its_image(turn: int, fit: Any, exact: bool) -> None:
    drawn = _blocks(637, 403)
    recipe = Recipe(size=(90, 120), fit=fit, exact=exact, coordinates="stored")
    clean = _clean(Item({"image": jpeg(Image.fromarray(drawn), orientation=turn), "mask": drawn}), recipe)
    mask, seen = clean["mask"][..., 0] > 0, clean["image"][..., 1] > 127

    def same(rows: int, columns: int) -> float:
        return float(np.mean(np.roll(mask, (rows, columns), (0, 1))[2:-2, 2:-2] == seen[2:-2, 2:-2]))

    assert same(0, 0) > 0.985
    assert all(same(0, 0) > same(*shift) + 0.02 for shift in ((0, 1), (0, -1), (1, 0), (-1, 0)))


def test_boxes_out_of_view_are_left_out_and_the_rest_keep_their_order() -> None:
    image = np.zeros((100, 200, 3), np.uint8)  # a crop keeps columns 50 to 150
    boxes = np.array(
        [
            [0, 0, 50, 100, 1],  # left of the view
            [40, 10, 70, 20, 2],  # over its left edge
            [80, 30, 80, 40, 3],  # no width
            [100, 50, 120, 70, 4],
            [160, 0, 190, 100, 5],  # right of it
            [-30, -30, 400, 400, 6],  # all of it
        ]
    )
    clean = _clean(Item({"image": image, "boxes": boxes}), Recipe(size=50, max_boxes=4))
    expected = [[0, 5, 10, 10, 2], [25, 25, 35, 35, 4], [0, 0, 50, 50, 6], [-1] * 5]
    assert_allclose(clean["boxes"], expected, atol=1e-5)


def test_a_box_without_a_class_has_class_zero() -> None:
    clean = _clean(Item({"image": np.zeros((10, 10), np.uint8), "boxes": np.array([[1, 2, 3, 4]])}), Recipe(size=10))
    assert_array_equal(clean["boxes"][0], [1, 2, 3, 4, 0])


def test_boxes_are_clipped_to_the_image_not_to_its_padding() -> None:
    item = Item({"image": np.zeros((50, 100, 3), np.uint8), "boxes": np.array([[-9, -9, 999, 999]])})
    clean = _clean(item, Recipe(size=100, fit="pad"))
    assert_array_equal(clean["boxes"][0], [0, 25, 100, 75, 0])


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_points_out_of_view_are_not_visible_and_keep_their_place(fit: Any) -> None:
    points = np.array([[50, 25], [0, 0], [99, 49], [-1, 25], [50, 50], [100, 10]], float)
    item = Item({"image": np.zeros((50, 100, 3), np.uint8), "keypoints": points})
    clean = _clean(item, Recipe(size=100, fit=fit))["keypoints"]
    expected = np.add(points, (0, 25)) if fit == "pad" else (points - (25, 0)) * 2
    assert_allclose(clean[:, :2], expected, atol=1e-4)
    assert_array_equal(clean[:, 2], [1, 1, 1, 0, 0, 0] if fit == "pad" else [1, 0, 0, 0, 0, 0])


@pytest.mark.slow
@given(
    size=st.tuples(st.integers(1, 900), st.integers(1, 900)),
    target=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    fit=st.sampled_from(_FITS),
    turn=st.sampled_from(list(_TURNS)),
)
@settings(max_examples=examples(300))
def test_the_corners_of_what_is_kept_are_the_corners_of_what_is_shown(
    size: tuple[int, int], target: tuple[int, int], fit: Any, turn: int
) -> None:
    framing = framing_of(size, turn, (target[1], target[0]), fit)
    left, top, right, bottom = framing.box
    corners = framing.points(np.array([[left, top], [right, bottom]]))
    got = [*corners.min(axis=0), *corners.max(axis=0)]
    assert_allclose(got, framing.area, atol=1e-6)
    assert 0 <= framing.area[0] < framing.area[2] <= target[1]
    assert 0 <= framing.area[1] < framing.area[3] <= target[0]
