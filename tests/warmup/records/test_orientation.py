"""Orientation: every format is turned once; masks, boxes and keypoints lie where they were drawn, or are refused."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from made import encode
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.records.arrays import clean_and_count, record_fields
from tpucache.warmup.records.pillow import opened
from tpucache.warmup.records.pillow_modes import decode
from tpucache.warmup.records.presize import presize
from tpucache.warmup.sources.source import Item

Array = npt.NDArray[Any]

_TURNS = range(1, 9)
#: What each orientation does to the stored pixels, written down from the EXIF standard and not from the package.
_DISPLAYED = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: p.swapaxes(0, 1)[:, ::-1],
    7: lambda p: p.swapaxes(0, 1)[::-1, ::-1],
    8: lambda p: p.swapaxes(0, 1)[::-1],
}
_FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "MPO": {"quality": 100, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True, "quality": 100},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    "TIFF": {},
    "TIFF lzw": {"compression": "tiff_lzw"},
    "TIFF jpeg": {"compression": "tiff_jpeg", "quality": 100},
    "TIFF deflate": {"compression": "tiff_deflate"},
}
_XMP = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'><rdf:Description tiff:Orientation=\"%d\"/></x:xmpmeta>"


def _quarters(height: int, width: int) -> npt.NDArray[np.uint8]:
    """Draw four areas of different colours, so that no turn looks like another."""
    colours = np.array([[[250, 10, 10], [10, 250, 10]], [[10, 10, 250], [240, 240, 240]]], np.uint8)
    return np.kron(colours, np.ones((height // 2, width // 2, 1), np.uint8))


@pytest.mark.parametrize("turn", _TURNS)
@pytest.mark.parametrize("name", _FORMATS)
def test_every_format_is_turned_once(name: str, turn: int) -> None:
    file_format = name.split(maxsplit=1)[0]
    Image.init()
    if file_format not in Image.SAVE:
        pytest.skip(f"this Pillow has no {file_format}")
    stored = _quarters(32, 48)
    data = encode(stored, file_format, turn, **_FORMATS[name])
    expected = _DISPLAYED[turn](stored)
    got = presize(data, Recipe(size=expected.shape[:2]), "a")
    assert np.abs(got.astype(int) - expected)[4:-4, 4:-4].mean() < 6
    with opened(data) as file:
        assert (file.size, file.orientation) == ((48, 32), turn)
        assert np.abs(decode(file, Recipe()).pixels.astype(int) - stored).mean() < 6


@pytest.mark.parametrize("turn", _TURNS)
@pytest.mark.parametrize("name", ["TIFF", "TIFF lzw"])
def test_an_orientation_of_xmp_turns_a_tiff_once(name: str, turn: int) -> None:
    stored = _quarters(32, 48)
    target = io.BytesIO()
    options = {**_FORMATS[name], "tiffinfo": {700: _XMP % turn}}
    Image.fromarray(stored).save(target, "TIFF", **options)
    with Image.open(target) as image:
        is_read = image.getexif().get(0x0112) is not None
    expected = _DISPLAYED[turn if is_read else 1](stored)
    assert_array_equal(presize(target.getvalue(), Recipe(size=expected.shape[:2]), "a"), expected)


def test_an_orientation_that_is_no_whole_number_turns_nothing() -> None:
    data = bytearray(encode(_quarters(32, 48), "TIFF", 6))
    at = data.index(struct.pack("<HHI", 0x0112, 3, 1))
    data += struct.pack("<II", 13, 2)
    data[at : at + 12] = struct.pack("<HHII", 0x0112, 5, 1, len(data) - 8)
    assert_array_equal(presize(bytes(data), Recipe(size=(32, 48)), "a"), _quarters(32, 48))


def _clean(item: Item, recipe: Recipe) -> dict[str, Array]:
    return clean_and_count(item, record_fields(item, recipe), recipe, "some/path")[0]


def _object(height: int, width: int) -> tuple[Array, Array, Array]:
    mask = np.zeros((height, width), np.uint8)
    mask[4:14, 6:22] = 1
    return mask, np.array([[6.0, 4, 22, 14, 3]]), np.array([[14.0, 9]])


@pytest.mark.parametrize("coordinates", ["displayed", "stored"])
@pytest.mark.parametrize("shape", [(32, 48), (48, 48), (48, 32)])
@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
@pytest.mark.parametrize("turn", _TURNS)
def test_what_is_drawn_on_the_stored_image_turns_with_it_and_on_the_displayed_does_not(
    turn: int, file_format: str, shape: tuple[int, int], coordinates: Any
) -> None:
    displayed = shape[::-1] if turn >= 5 else shape
    mask, boxes, points = _object(*(displayed if coordinates == "displayed" else shape))
    shown = mask if coordinates == "displayed" else _DISPLAYED[turn](mask)
    rows, columns = np.flatnonzero(shown.any(axis=1)), np.flatnonzero(shown.any(axis=0))
    left, top, right, bottom = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    image = encode(_quarters(*shape), file_format, turn)
    clean = _clean(
        Item({"image": image, "mask": mask, "boxes": boxes, "keypoints": points}),
        Recipe(size=displayed, coordinates=coordinates, max_boxes=1),
    )
    assert_array_equal(clean["mask"][..., 0], shown)
    assert_allclose(clean["boxes"], [[left, top, right, bottom, 3]], atol=1e-5)
    assert_allclose(clean["keypoints"], [[(left + right) / 2, (top + bottom) / 2, 1]], atol=1e-5)


@pytest.mark.parametrize("shape", [(32, 48), (48, 48)])
@pytest.mark.parametrize("turn", range(2, 9))
def test_a_mask_whose_size_cannot_tell_is_refused(turn: int, shape: tuple[int, int]) -> None:
    data = encode(_quarters(*shape), orientation=turn)
    stored = _object(*shape)[0]
    displayed = _DISPLAYED[turn](stored)
    for mask in (stored, displayed):
        if turn >= 5 and shape[0] != shape[1]:
            clean = _clean(Item({"image": data, "mask": mask}), Recipe(size=displayed.shape))
            assert_array_equal(clean["mask"][..., 0], displayed)
        else:
            with pytest.raises(SampleError, match="--coordinates displayed"):
                _clean(Item({"image": data, "mask": mask}), Recipe(size=8))


@pytest.mark.parametrize("field", [{"boxes": np.ones((1, 4))}, {"keypoints": np.ones((1, 2))}], ids=str)
@pytest.mark.parametrize("turn", range(2, 9))
def test_boxes_and_points_on_a_turned_image_are_refused_where_nothing_is_stated(turn: int, field: Any) -> None:
    item = Item({"image": encode(_quarters(32, 48), orientation=turn), **field})
    with pytest.raises(SampleError, match="--coordinates displayed") as caught:
        _clean(item, Recipe(size=8))
    assert caught.value.path == "some/path"


@pytest.mark.parametrize("turn", _TURNS)
def test_where_both_readings_are_the_same_nothing_is_refused(turn: int) -> None:
    image = encode(_quarters(48, 48), orientation=turn)
    item = Item({"image": image, "mask": np.full((48, 48), 7, np.uint8), "boxes": np.empty((0, 4))})
    clean = _clean(item, Recipe(size=8))
    assert (clean["mask"] == 7).all()
    assert (clean["boxes"] == -1).all()


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
@pytest.mark.parametrize(("turn", "own"), [*((turn, turn) for turn in _TURNS), *((1, turn) for turn in range(2, 9))])
def test_the_orientation_of_a_mask_itself_counts_for_what_is_displayed(turn: int, own: int, file_format: str) -> None:
    stored = _object(48, 48)[0]
    image, mask = encode(_quarters(48, 48), orientation=turn), encode(stored, file_format, own)
    shown: dict[Any, Array] = {"displayed": _DISPLAYED[own](stored), "stored": _DISPLAYED[turn](stored)}
    if turn == own:
        shown[None] = shown["stored"]
    for coordinates, expected in shown.items():
        clean = _clean(Item({"image": image, "mask": mask}), Recipe(size=48, coordinates=coordinates))
        assert_array_equal(clean["mask"][..., 0], expected)
    if turn != own:
        with pytest.raises(SampleError, match="--coordinates"):
            _clean(Item({"image": image, "mask": mask}), Recipe(size=48))


@pytest.mark.parametrize(("coordinates", "size"), [("displayed", "32 x 48"), ("stored", "48 x 32")])
def test_a_mask_of_the_other_reading_s_size_is_refused(coordinates: Any, size: str) -> None:
    mask = np.zeros((32, 48) if coordinates == "displayed" else (48, 32), np.uint8)
    item = Item({"image": encode(_quarters(32, 48), orientation=6), "mask": mask})
    with pytest.raises(SampleError, match=f"the image {size}"):
        _clean(item, Recipe(size=8, coordinates=coordinates))


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("coordinates", ["displayed", "stored"])
@pytest.mark.parametrize("turn", _TURNS)
def test_a_point_on_an_edge_stays_in_its_pixel_when_the_image_is_turned(turn: int, coordinates: Any, fit: Any) -> None:
    drawn = (37, 61) if coordinates == "stored" or turn < 5 else (61, 37)
    inside = [(0, 0), (drawn[1] - 0.5, 0), (0, drawn[0] - 0.5), (drawn[1] - 0.5, drawn[0] - 0.5), (5.5, 9.5)]
    outside = [(drawn[1], 3), (3, drawn[0]), (-1, 3)]
    displayed = (61, 37) if turn >= 5 else (37, 61)
    recipe = Recipe(size=displayed, fit=fit, coordinates=coordinates)
    image = encode(np.zeros((37, 61), np.uint8), orientation=turn)
    item = Item({"image": image, "keypoints": np.array([*inside, *outside], float)})
    rows = _clean(item, recipe)["keypoints"]
    assert_array_equal(rows[:, 2], [1] * len(inside) + [0] * len(outside))
    marks = np.zeros(drawn, int)
    for number, (x, y) in enumerate(inside):
        marks[int(y), int(x)] = number + 1
    shown = _DISPLAYED[turn](marks) if coordinates == "stored" else marks
    found = np.floor(rows[: len(inside), :2]).astype(int)
    assert [shown[y, x] for x, y in found] == list(range(1, len(inside) + 1))


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("turn", _TURNS)
def test_a_turned_image_becomes_what_it_becomes_when_it_was_saved_upright(turn: int, fit: Any) -> None:
    rng = np.random.default_rng(turn)
    stored = rng.integers(0, 256, (49, 81, 3), np.uint8)
    upright = np.ascontiguousarray(_DISPLAYED[turn](stored))
    height, width = upright.shape[:2]
    fields = {
        "mask": rng.integers(0, 256, (height, width), np.uint8),
        "boxes": np.sort(rng.uniform(-20, 100, (9, 2, 2)), axis=1).reshape(9, 4),  # some of them outside
        "keypoints": np.array([[0, 0], [width, height], [width / 2, height / 2], *rng.uniform(-9, 90, (9, 2))]),
    }
    recipe = Recipe(size=(23, 31), fit=fit, coordinates="displayed")
    turned = _clean(Item({"image": encode(stored, orientation=turn), **fields}), recipe)
    expected = _clean(Item({"image": upright, **fields}), recipe)
    assert np.abs(turned.pop("image").astype(int) - expected.pop("image")).mean() < 0.7
    for name, array in expected.items():
        assert_allclose(turned[name], array, atol=1e-4)
