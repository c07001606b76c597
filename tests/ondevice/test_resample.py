"""Rotations, crops and blurs are what NumPy computes one pixel at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from augmenting import BATCH, HEIGHT, WIDTH, augment, draws_of, images_of, rounded_products

from tpucache.ondevice.draws import BLUR, CROPPED, TILT_COLUMNS, TILT_ROWS
from tpucache.ondevice.settings import AugmentSettings

MASKS = images_of(1, seed=3)[..., 0]


@pytest.fixture
def images():
    return images_of()


def sheared(image, slope, nearest):
    """Row y of a (height, width) array as it is `slope` times (y - the middle) to the right, reflected."""
    height, width = image.shape
    wide = np.pad(image, [(0, 0), (width - 1, width - 1)], "reflect")
    found = np.empty_like(image)
    for y in range(height):
        steps = 1 if nearest else 32
        move = math.floor(slope * (y - (height - 1) / 2) * steps + 0.5) / steps
        found[y] = np.interp(np.arange(width) + move, np.arange(1 - width, 2 * width - 1), wide[y])
    return found


def tilted(image, row, nearest=False):
    once = sheared(image, row[TILT_ROWS], nearest)
    twice = sheared(once.T, row[TILT_COLUMNS], nearest).T
    return sheared(twice, row[TILT_ROWS], nearest)


def cropped(image, row, nearest=False):
    for top, size in (row[CROPPED][2:], row[CROPPED][:2]):  # columns, then rows
        steps, length = 1 if nearest else 256, len(image.T)
        places = top + np.clip((np.arange(length) + 0.5) * size / length - 0.5, 0, size - 1)
        places = np.floor(places * steps + 0.5) / steps
        image = np.stack([np.interp(places, np.arange(length), line) for line in image]).T
    return image


def blurred(image, row):
    for _ in range(2):
        last = len(image) - 1
        weights = np.zeros((len(image), len(image)))
        for place in range(-last, 2 * last + 1):  # the image and its reflections on both sides
            source = abs(place) if place <= last else 2 * last - place
            weights[:, source] += np.exp(-0.5 * ((np.arange(len(image)) - place) / row[BLUR]) ** 2)
        weights = np.floor(weights / weights.max(1, keepdims=True) * 256 + 0.5) / 256
        image = (weights / weights.sum(1, keepdims=True) @ image).T
    return image


def by_plane(change, images, draws):
    """Return (batch, channels, height, width): `change` of each plane of NHWC images, in double precision."""
    rows = draws.numpy().astype(np.float64)
    planes = np.moveaxis(images.numpy().astype(np.float64), 3, 1)
    return np.stack(
        [np.stack([change(plane, row) for plane in image]) for image, row in zip(planes, rows, strict=True)]
    )


@pytest.mark.parametrize(
    ("settings", "change"),
    [(AugmentSettings(tilt=30), tilted), (AugmentSettings(crop=True, zoom=0.2), cropped)],
    ids=["tilt", "crop"],
)
def test_bytes_and_masks_move_as_numpy_moves_them_also_under_autocast(images, settings, change):
    aug, draws = augment(settings), draws_of(settings)
    expected = np.rint(by_plane(change, images, draws))
    masks = by_plane(lambda plane, row: change(plane, row, nearest=True), MASKS[..., None], draws)[:, 0]
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert np.array_equal(aug.images(images, draws).numpy(), expected)
            assert np.array_equal(aug.masks(MASKS, draws).numpy(), masks)
    assert not np.array_equal(expected, images.permute(0, 3, 1, 2).numpy())
    assert {*masks.ravel()} <= {*MASKS.numpy().ravel()}


@pytest.mark.parametrize("dtype", ["<u2", "<i2", "<f4"])
def test_numbers_of_any_depth_are_interpolated(dtype):
    settings = AugmentSettings(tilt=20, crop=True)
    images = np.random.default_rng(0).integers(0, 32768, (BATCH, HEIGHT, WIDTH, 2)).astype(dtype)
    draws = draws_of(settings)
    given = torch.from_numpy(images)

    def change(plane, row):
        return cropped(tilted(plane, row), row)

    found = augment(settings, channels=2, dtype=dtype).images(given, draws).numpy()
    assert found == pytest.approx(by_plane(change, given, draws), abs=0.05 if dtype == "<f4" else 1.01)
    assert dtype == "<f4" or np.array_equal(found, np.round(found))


def test_a_tilt_is_a_rotation_around_the_centre():
    settings, side = AugmentSettings(tilt=40), 41
    places = np.arange(side) - side // 2

    def picture(rows, columns):
        return 128 + 100 * np.sin(rows / 9) * np.cos(columns / 11)

    image = torch.from_numpy(picture(*np.meshgrid(places, places, indexing="ij"))).float()
    draws = draws_of(settings, 4, (side, side))
    found = augment(settings, side, side, 1, "<f4").images(image.expand(4, 1, side, side).permute(0, 2, 3, 1), draws)
    inner = slice(13, -13)
    rows, columns = (each[inner, inner] for each in np.meshgrid(places, places, indexing="ij"))
    for one, row in zip(found.numpy(), draws.double(), strict=True):
        angle = 2 * math.atan(row[TILT_ROWS])
        assert row[TILT_COLUMNS] == pytest.approx(-math.sin(angle), abs=1e-6)
        turned = picture(
            math.cos(angle) * rows - math.sin(angle) * columns, math.sin(angle) * rows + math.cos(angle) * columns
        )
        assert one[0, inner, inner] == pytest.approx(turned, abs=2)


def test_a_blur_is_a_gaussian_whose_weights_add_up_to_one(images):
    settings = AugmentSettings(blur=3.0)
    aug, draws = augment(settings), draws_of(settings)
    expected = by_plane(blurred, images, draws)
    assert aug.images(images, draws).numpy() == pytest.approx(expected, abs=1e-3)
    assert expected.std() < 0.7 * images.numpy().std()
    even = torch.full_like(images, 200)
    assert aug.images(even, draws).numpy() == pytest.approx(np.full((BATCH, 3, HEIGHT, WIDTH), 200.0), abs=1e-3)
    assert torch.equal(aug.masks(MASKS, draws), MASKS)


def test_products_are_the_same_when_a_device_rounds_their_operands_to_bfloat16(images):
    exact, smooth = AugmentSettings(tilt=20, crop=True), AugmentSettings(blur=3.0)
    expected, blurred = (augment(settings).images(images, draws_of(settings)) for settings in (exact, smooth))
    with rounded_products() as used:
        assert torch.equal(augment(exact).images(images, draws_of(exact)), expected)
        assert len(used) == 3
        torch.testing.assert_close(augment(smooth).images(images, draws_of(smooth)), blurred, atol=0.01, rtol=0)


def test_an_image_of_one_pixel_may_be_tilted():
    assert augment(AugmentSettings(tilt=45), height=1, width=1)
