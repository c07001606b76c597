"""Masks, boxes and keypoints follow their image through any augmentation; other fields are left alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tpucache.errors import RecipeError
from tpucache.store.fields import Field
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.augment import PRESETS, augment, augment_fields


def _fields(record: dict[str, Any]) -> list[Field]:
    return [Field(name, "raw", array.dtype.str, array.shape) for name, array in record.items()]


def _decided(albumentations: Any, tmp_path: Path, *transforms: Any) -> dict[str, Any]:
    path = tmp_path / "decided.json"
    path.write_text(json.dumps(albumentations.to_dict(albumentations.Compose(list(transforms)))))
    return resolve(str(path), 40, 56)


@pytest.fixture
def record() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    boxes = np.full((4, 5), -1, np.float32)
    boxes[:3] = [[2, 3, 20, 18, 0], [30, 10, 56, 40, 1], [26, 22, 29, 25, 2]]
    return {
        "image": rng.integers(0, 256, (40, 56, 3), np.uint8),
        "mask": rng.integers(0, 5, (40, 56, 1), np.uint8),
        "boxes": boxes,
        "keypoints": np.array([[2.5, 3.5, 1], [50, 30, 1], [70, -4, 0]], np.float32),
        "tokens": np.arange(7),
    }


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("names", [["mask"], ["boxes"], ["keypoints"], ["mask", "boxes", "keypoints"]], ids="-".join)
def test_an_image_is_augmented_the_same_whatever_comes_with_it_and_what_is_given_stays(
    preset: str, names: list[str], record: dict[str, Any]
) -> None:
    definition = resolve(preset, 40, 56)
    given = {name: record[name] for name in ("image", *names, "tokens")}
    before = {name: array.copy() for name, array in given.items()}
    for number in range(12):
        result = augment_fields(given, definition, 0, number, 1)
        assert_array_equal(result["image"], augment(record["image"], definition, 0, number, 1))
        assert list(result) == list(given)
        for name, array in given.items():
            assert (result[name].dtype, result[name].shape) == (array.dtype, array.shape)
            assert result[name].flags.c_contiguous
            assert_array_equal(array, before[name])
        assert result["tokens"] is given["tokens"]
    if "boxes" in names:
        given["boxes"][:] = -1
        assert_array_equal(augment_fields(given, definition, 0, 1, 1)["boxes"], given["boxes"])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_mask_follows_its_image_and_is_never_mixed(preset: str, record: dict[str, Any]) -> None:
    numbers = np.kron(np.random.default_rng(1).integers(0, 2, (5, 7)), np.ones((8, 8), int)).astype(np.uint8) * 3
    given = {"image": np.repeat(numbers[..., None] * 50 + 50, 3, axis=2), "mask": numbers[..., None]}
    definition = resolve(preset, 40, 56)
    for number in range(12):
        result = augment_fields(given, definition, 0, number, 1)
        mask = result["mask"][..., 0]
        assert set(np.unique(mask)) <= {0, 3}
        grey = result["image"].mean(axis=2)
        erased = grey < 15  # by `strong`, whose holes are black
        light = grey > (grey[~erased].min() + grey.max()) / 2
        assert np.mean((mask > 0)[~erased] == light[~erased]) > 0.9


@pytest.mark.parametrize("flip", ["HorizontalFlip", "VerticalFlip", "Transpose", "RandomRotate90"])
@pytest.mark.parametrize("alone", [False, True])
def test_points_and_boxes_stay_on_their_pixels_when_they_are_flipped(
    flip: str, alone: bool, albumentations: Any, tmp_path: Path
) -> None:
    transform = getattr(albumentations, flip)(p=1)
    places = np.array([[3, 7], [0, 0], [0, 9], [13, 0]])
    mask = np.zeros((24, 24, 1), np.uint8)
    mask[tuple(places.T)] = np.arange(1, 5)[:, None]
    corners = places[:, ::-1]
    points = corners + np.where(corners == 0, 0, 0.5)  # some are on an edge
    given = {
        "image": np.repeat(mask, 3, axis=2),
        "mask": mask,
        "boxes": np.array([*([*at, *(at + 1), 5] for at in corners), [-1] * 5], np.float32),
        "keypoints": np.array([(*point, 1) for point in points], np.float32),
    }
    path = tmp_path / "flip.json"
    path.write_text(json.dumps(albumentations.to_dict(transform if alone else albumentations.Compose([transform]))))
    for number in range(4):
        result = augment_fields(given, resolve(str(path), 24, 24), 0, number, 1)
        found = np.array([np.argwhere(result["mask"][..., 0] == value)[0, ::-1] for value in range(1, 5)])
        assert_allclose(result["boxes"][:4], [[*at, *(at + 1), 5] for at in found], atol=1e-4)
        assert_array_equal(result["boxes"][4], [-1] * 5)
        assert_array_equal(np.floor(result["keypoints"][:, :2]), found)
        assert_allclose(result["keypoints"][0, :2], found[0] + 0.5, atol=1e-4)
        assert (result["keypoints"][:, 2] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_boxes_and_points_lie_on_what_they_mark(preset: str) -> None:
    """Two squares of a mask, well inside so that no border is in play, against their boxes and middles."""
    mask = np.zeros((80, 96, 1), np.uint8)
    squares = {1: (34, 26, 46, 40), 2: (52, 40, 62, 54)}
    for value, (left, top, right, bottom) in squares.items():
        mask[top:bottom, left:right] = value
    boxes = np.array([[*square, value] for value, square in squares.items()], np.float32)
    middles = np.array([[(s[0] + s[2]) / 2, (s[1] + s[3]) / 2, 1] for s in squares.values()], np.float32)
    given = {"image": np.repeat(mask, 3, axis=2), "mask": mask, "boxes": boxes, "keypoints": middles}
    definition = resolve(preset, 80, 96)
    offsets = []
    for number in range(40):
        result = augment_fields(given, definition, 0, number, 1)
        for index, value in enumerate(squares):
            rows, columns = np.nonzero(result["mask"][..., 0] == value)
            whole = rows.size and rows.min() > 0 and rows.max() < 79 and columns.min() > 0 and columns.max() < 95
            box = result["boxes"][result["boxes"][:, 4] == value]
            if not whole or not len(box):
                continue
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            if preset != "strong":  # whose holes take a part of a box away, not of the mask
                assert_allclose(box[0, :4], found, atol=1.1)
            middle = [columns.mean() + 0.5, rows.mean() + 0.5]
            offsets.append(result["keypoints"][index, :2] - middle)
            assert result["keypoints"][index, 2] == 1
    assert len(offsets) >= 40
    assert np.abs(offsets).max() < 1.2  # a small square of nearest pixels is a rough measure of its middle
    assert_allclose(np.mean(offsets, axis=0), 0, atol=0.3)


def test_boxes_that_leave_the_view_are_left_out_and_points_lose_sight(
    albumentations: Any, tmp_path: Path, record: dict[str, Any]
) -> None:
    A = albumentations
    definition = _decided(A, tmp_path, A.Crop(28, 0, 56, 40), A.Resize(40, 56))
    result = augment_fields(record, definition, 0, 0, 1)
    expected = [[4, 10, 56, 40, 1], [0, 22, 2, 25, 2], [-1] * 5, [-1] * 5]
    assert_allclose(result["boxes"], expected, atol=1e-3)
    assert_array_equal(result["keypoints"][:, 2], [0, 1, 0])


def test_a_point_that_comes_into_view_stays_unseen(albumentations: Any, tmp_path: Path, record: dict[str, Any]) -> None:
    shrink = albumentations.Affine(scale=(0.3, 0.3), p=1)
    points = augment_fields(record, _decided(albumentations, tmp_path, shrink), 0, 0, 1)["keypoints"]
    assert (points[2, :2] > 0).all()
    assert (points[2, :2] < (56, 40)).all()
    assert_array_equal(points[:, 2], [1, 1, 0])


def test_a_border_that_reflects_makes_no_more_boxes_and_points(
    albumentations: Any, tmp_path: Path, record: dict[str, Any]
) -> None:
    shrink = albumentations.Affine(scale=(0.4, 0.4), border_mode=4, p=1)
    result = augment_fields(record, _decided(albumentations, tmp_path, shrink), 0, 0, 1)
    assert_array_equal(result["boxes"][:, 4], [0, 1, 2, -1])
    assert_array_equal(result["keypoints"][:, 2], [1, 1, 0])


def test_what_a_pipeline_says_of_its_boxes_holds(albumentations: Any, tmp_path: Path, record: dict[str, Any]) -> None:
    A = albumentations
    params = A.BboxParams("coco", label_fields=["anything"], min_area=50)
    path = tmp_path / "limits.json"
    path.write_text(json.dumps(A.to_dict(A.Compose([A.HorizontalFlip(p=1)], bbox_params=params))))
    definition = resolve(str(path), 40, 56, _fields(record))
    assert_array_equal(augment_fields(record, definition, 0, 0, 1)["boxes"][:, 4], [0, 1, -1, -1])


def test_without_an_image_nothing_changes() -> None:
    record = {"mask": np.zeros((3, 3)), "tokens": np.arange(4)}
    result = augment_fields(record, resolve("flip", 8, 8), 0, 0, 1)
    assert all(result[name] is array for name, array in record.items())


_FLIP_ALL = """
def flip(parts, generator):
    parts["image"] = parts["image"][:, ::-1]
    parts["mask"] = parts["mask"][:, ::-1]
    parts["keypoints"][:, 0] = parts["image"].shape[1] - parts["keypoints"][:, 0]
    return parts
"""


def test_a_callable_of_more_than_an_image_gets_and_returns_a_dictionary(
    write_module: Callable[..., None], record: dict[str, Any]
) -> None:
    write_module("flip_all_by_test", _FLIP_ALL)
    del record["boxes"]
    definition = resolve("flip_all_by_test:flip", 40, 56, _fields(record))
    result = augment_fields(record, definition, 0, 0, 1)
    assert_array_equal(result["mask"], record["mask"][:, ::-1])
    assert_allclose(result["keypoints"][:, 0], 56 - record["keypoints"][:, 0])
    assert result["tokens"] is record["tokens"]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("parts['image']", "must return a dictionary of image, mask, boxes, keypoints, not ndarray"),
        ("{'image': parts['image']}", "not one of image"),
        ("{**parts, 'more': 1}", "not one of image, mask, boxes, keypoints, more"),
        ("{**parts, 'mask': parts['mask'][..., 0]}", r"must return mask uint8 \(40, 56, 1\), not uint8 \(40, 56\)"),
        ("{**parts, 'boxes': parts['boxes'].astype(float)}", r"must return boxes float32 \(4, 5\), not float64"),
        ("{**parts, 'keypoints': None}", "must return keypoints .* not NoneType"),
    ],
)
def test_a_callable_that_does_not_keep_a_field_is_refused(
    write_module: Callable[..., None], expression: str, reason: str, record: dict[str, Any]
) -> None:
    name = "unfit_parts_" + hashlib.sha256(expression.encode()).hexdigest()[:8]
    write_module(name, f"def f(parts, generator):\n    return {expression}\n")
    with pytest.raises(RecipeError, match=reason):
        resolve(f"{name}:f", 40, 56, _fields(record))
