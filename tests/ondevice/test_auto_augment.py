"""RandAugment's and TrivialAugment's operations are Pillow's and NumPy's.

`tests/integrations/test_torchvision.py` compares them with torchvision itself.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from augmenting import augment, rounded_products
from PIL import Image, ImageEnhance, ImageOps
from thorough import thorough

from tpucache.ondevice import auto_augment as op
from tpucache.ondevice.draws import COLUMNS, draw
from tpucache.ondevice.settings import AugmentSettings

RAND, TRIVIAL = AugmentSettings(rand_augment=1, magnitude=20), AugmentSettings(trivial_augment=True)
SIZES = ((40, 40), (23, 36), (36, 23))
COUNT = 6000


def pictures(height, width, channels=3, smooth=True, count=3):
    """Images with an edge or, if smooth, without one; numbers lie between 20 and 230."""
    rng = np.random.default_rng(height * width)
    if smooth:
        rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        waves = [np.sin(rows / a + columns / b) for a, b in rng.uniform(5, 12, (count * channels, 2))]
        images = np.stack(waves).reshape(count, channels, height, width).transpose(0, 2, 3, 1)
        return np.rint(125 + 100 * images).astype(np.uint8)
    images = rng.integers(20, 230, (count, height, width, channels))
    images[:, : height // 2, :, :1] //= 2
    return images.astype(np.uint8)


def changed(images, settings, operation, number, sign=1, masks=None):
    """Return what one operation with a magnitude makes of images, and its magnitude."""
    height, width = images.shape[1:3]
    numbers = op.operation_numbers(settings, (height, width))[op.OPERATIONS.index(operation), number, int(sign < 0)]
    plain = draw(AugmentSettings(), 0, 0, len(images))
    draws = torch.from_numpy(np.concatenate([plain, [numbers] * len(images)], 1)).float()
    augmented = augment(settings, height, width, images.shape[3])
    magnitude = op.magnitudes(settings, (height, width))[operation][number] * sign
    if masks is not None:
        return augmented.masks(torch.from_numpy(masks), draws).numpy(), magnitude
    found = augmented.images(torch.from_numpy(images), draws).numpy()
    assert np.array_equal(found, np.rint(found))
    return found.transpose(0, 2, 3, 1), magnitude


def warped(image, source, outside=0, nearest=False):
    """Return an image read at `source` of places (x, y) from its centre, between pixels linearly."""
    height, width = image.shape[:2]
    y, x = np.meshgrid(*(np.arange(n) - (n - 1) / 2 for n in (height, width)), indexing="ij")
    x, y = source(x, y)
    x, y = x + (width - 1) / 2 + 1, y + (height - 1) / 2 + 1
    wide = np.full((height + 2, width + 2, image.shape[2]), float(outside))
    wide[1:-1, 1:-1] = image
    if nearest:
        x, y = np.rint(x), np.rint(y)
    x, y = np.clip(x, 0, width + 1), np.clip(y, 0, height + 1)
    left, top = np.minimum(np.floor(x), width).astype(int), np.minimum(np.floor(y), height).astype(int)
    across, down = (x - left)[..., None], (y - top)[..., None]
    upper, lower = (wide[top + n, left] * (1 - across) + wide[top + n, left + 1] * across for n in (0, 1))
    return upper * (1 - down) + lower * down


def moves(operation, magnitude, height, width):
    """Return where torchvision reads a pixel of an operation that moves them."""
    angle = math.radians(magnitude)
    return {
        "ShearX": lambda x, y: (x + magnitude * (y + height / 2), y),
        "ShearY": lambda x, y: (x, y + magnitude * (x + width / 2)),
        "TranslateX": lambda x, y: (x - int(magnitude), y),
        "TranslateY": lambda x, y: (x, y - int(magnitude)),
        "Rotate": lambda x, y: (
            math.cos(angle) * x - math.sin(angle) * y, math.sin(angle) * x + math.cos(angle) * y
        ),
    }[operation]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("settings", [RAND, TRIVIAL], ids=["rand", "trivial"])
@pytest.mark.parametrize("operation", op.OPERATIONS[1:5])
def test_shears_and_translations_differ_by_a_level_at_most(operation, settings, size):
    images = pictures(*size, smooth=False)
    for number in (0, 20) if settings.rand_augment else (4, 15, 30):
        for sign in (1, -1):
            found, magnitude = changed(images, settings, operation, number, sign)
            expected = np.stack([warped(image, moves(operation, magnitude, *size)) for image in images])
            # Places are rounded to 1/256 of a pixel, and then pixels to whole levels.
            assert np.abs(found - expected).max() <= (0 if operation.startswith("T") or not number else 1)
            assert (np.abs(found - images).mean() > 5) == (number > 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("settings", "number"), [(RAND, 20), (TRIVIAL, 9), (TRIVIAL, 17), (TRIVIAL, 20), (TRIVIAL, 30)]
)
def test_rotations_differ_by_what_three_interpolations_blur(settings, number, size):
    images = pictures(*size)
    for sign in (1, -1):
        found, magnitude = changed(images, settings, "Rotate", number, sign)
        expected = np.stack([warped(image, moves("Rotate", magnitude, *size)) for image in images])
        whole = np.zeros((*size, 1))
        whole[3:-3, 3:-3] = 1  # nearer to the border, black comes in
        inside = warped(whole, moves("Rotate", magnitude, *size))[..., 0] == 1
        difference = np.abs(found - expected)
        assert difference[:, inside].max() <= 2  # of 200 levels from the darkest to the brightest
        assert difference[:, inside].mean() < 0.5
        assert difference.mean() < 1.6  # at the border, where black begins, too
        assert (found[:, expected.max((0, 3)) == 0] < 60).all()
        if abs(magnitude) == 90 and size[0] == size[1]:
            assert np.array_equal(found, np.rot90(images, sign, (1, 2)))


def by_pillow(operation, image, magnitude):
    if hasattr(ImageEnhance, operation):
        return getattr(ImageEnhance, operation)(image).enhance(1 + magnitude)
    if operation == "Identity":
        return image
    arguments = {"Posterize": [int(magnitude)], "Solarize": [255 * magnitude]}
    return getattr(ImageOps, operation.lower())(image, *arguments.get(operation, []))


#: Pillow rounds a grey level and the mean of them, which torchvision and this cut off; fractions are cut off by all.
LEVELS = {"Brightness": 1, "Color": 2, "Contrast": 2, "Sharpness": 1, "AutoContrast": 1}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", ["Identity", *op.OPERATIONS[6:]])
def test_tones_are_those_of_pillow(operation, channels):
    images = pictures(23, 36, channels, smooth=False)
    for number in (0, 7, 18, 30):
        for sign in (1, -1) if operation in op.OPERATIONS[6:10] else (1,):
            found, magnitude = changed(images, TRIVIAL, operation, number, sign)
            given = [Image.fromarray(image[..., 0] if channels == 1 else image) for image in images]
            expected = np.stack([np.asarray(by_pillow(operation, one, magnitude), float) for one in given])
            assert np.abs(found - expected.reshape(found.shape)).max() <= LEVELS.get(operation, 0)


def test_images_of_one_colour_and_tiny_ones_stay_as_pillow_leaves_them():
    for image in (np.full((1, 9, 9, 3), 77, np.uint8), np.arange(3, dtype=np.uint8).reshape(1, 1, 1, 3) * 80):
        for operation in ("AutoContrast", "Equalize", "Sharpness", "Contrast"):
            found, _ = changed(image, TRIVIAL, operation, 12)
            assert np.abs(found - image).max() <= (0 if operation != "Contrast" else 40)
        for operation in op.OPERATIONS[1:6]:
            assert changed(image, TRIVIAL, operation, 30)[0].shape == image.shape


def test_operations_follow_one_another_each_image_by_its_own():
    settings = AugmentSettings(rand_augment=3, magnitude=13)
    images = np.concatenate([pictures(24, 24, smooth=False)] * 8)
    draws = draw(settings, 5, 6, len(images), (24, 24))
    step = torch.from_numpy(images)
    found = augment(settings, 24, 24).images(step, torch.from_numpy(draws))
    augmented = augment(AugmentSettings(rand_augment=1, magnitude=13), 24, 24)
    for at in range(3):
        numbers = draws[:, COLUMNS + at * op.COLUMNS : COLUMNS + (at + 1) * op.COLUMNS]
        row = torch.from_numpy(np.concatenate([draws[:, :COLUMNS], numbers], 1))
        step = augmented.images(step, row).permute(0, 2, 3, 1).byte()
    assert torch.equal(step, found.permute(0, 2, 3, 1).byte())
    assert len({image.numpy().tobytes() for image in found}) > 12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation", op.OPERATIONS)
def test_masks_move_with_their_images_and_are_of_no_class_outside(operation, size):
    height, width = size
    masks = np.repeat(np.repeat(np.arange(20, dtype=np.uint8).reshape(1, 4, 5), 10, 1), 8, 2)[:, :height, :width]
    masks = np.concatenate([masks, masks])
    for number in (9, 30):
        images = np.repeat(masks[..., None], 3, 3)
        found, magnitude = changed(images, TRIVIAL, operation, number, masks=masks)
        if operation not in op.OPERATIONS[1:6]:
            assert np.array_equal(found, masks)
            continue
        source = moves(operation, magnitude, height, width)
        expected = np.stack([warped(mask[..., None], source, 255, nearest=True)[..., 0] for mask in masks])
        # The nearest of each of three shears is within a pixel of the nearest of all.
        assert (found != expected).mean() < (0.2 if operation == "Rotate" else 0.03)
        assert {*np.unique(found)} <= {*np.unique(masks), 255}
        assert (found == 255).any()


def test_products_are_the_same_when_a_device_rounds_their_operands_to_bfloat16():
    images = pictures(40, 40, smooth=False)
    expected, _ = changed(images, TRIVIAL, "Equalize", 3)
    with rounded_products() as used:
        assert np.array_equal(changed(images, TRIVIAL, "Equalize", 3)[0], expected)
    assert len(used) == 2


@pytest.mark.parametrize("chosen", [{"trivial_augment": True}, {"rand_augment": 1, "magnitude": 30}])
def test_operations_strengths_and_signs_are_drawn_evenly_and_apart_from_all_else(chosen):
    settings, size = AugmentSettings(flip=True, **chosen), (100, 200)
    draws = draw(settings, 3, 4, COUNT, size)
    assert np.array_equal(draws[:, :COLUMNS], draw(AugmentSettings(flip=True), 3, 4, COUNT))
    strengths = range(31) if settings.trivial_augment else [30]
    possible = np.array([*itertools.product(range(14), strengths, (0, 1))])
    rows = op.operation_numbers(settings, size).astype(np.float32)[tuple(possible.T)]
    # What changes nothing, such as a shear by 0, counts as what is the first to do so.
    names = {row.tobytes(): at for at, row in reversed([*enumerate(rows)])}
    expected, found = (
        np.bincount([names[row.tobytes()] for row in each], minlength=len(rows)) / len(each)
        for each in (rows, draws[:, COLUMNS:])
    )
    for column in possible.T:
        for value in np.unique(column):
            share = expected[column == value].sum()
            assert found[column == value].sum() == pytest.approx(share, abs=3.5 * (share / COUNT) ** 0.5)


def test_the_largest_magnitudes_are_those_of_torchvision():
    for settings, largest in (
        (RAND, (0.3, 0.3, 300, 150, 30, 0.9, 0.9, 0.9, 0.9, 4, 0)),
        (TRIVIAL, (0.99, 0.99, 32, 32, 135, 0.99, 0.99, 0.99, 0.99, 2, 0)),
    ):
        found = op.magnitudes(settings, (331, 662))
        assert tuple(found[name][30] for name in op.OPERATIONS[1:12]) == pytest.approx(largest)
        for name in op.OPERATIONS[1:12]:
            assert found[name][::10] == pytest.approx(np.linspace(*found[name][[0, 30]], 4), abs=0.5)
    assert {*op.magnitudes(TRIVIAL, (9, 9))["Posterize"]} == {*range(2, 9)}


def test_at_most_one_of_eight_images_in_a_row_is_equalized_and_any_of_them_may_be():
    settings = AugmentSettings(rand_augment=2, views=2)
    draws = draw(settings, 1, 1, 1203, (30, 30)).reshape(1203, 2, -1)[:, :, COLUMNS:].reshape(1203, 4, op.COLUMNS)
    chosen = draws[:1200, :, op.EQUALIZED].reshape(150, 8, 4)
    assert chosen.sum(1).max() == 1
    assert chosen.mean((0, 2)) == pytest.approx([1 / 14] * 8, abs=0.04)
    assert np.abs(np.corrcoef(chosen.sum(1).T) - np.eye(4)).max() < 0.3


@pytest.mark.parametrize("batch", [1, 5, 8, *thorough(12, 16)])
@pytest.mark.parametrize("views", [1, 2])
def test_batches_of_any_size_are_equalized_alike(batch, views):
    settings = AugmentSettings(rand_augment=1, views=views)
    images = torch.from_numpy(pictures(12, 10, smooth=False, count=batch))
    alone, together = (augment(each, 12, 10) for each in (AugmentSettings(rand_augment=1), settings))
    for step in range(6):
        draws = torch.from_numpy(draw(settings, 0, step, batch, (12, 10)))
        found = together.fields({"image": images}, draws)["image"].reshape(batch, views, 3, 12, 10)
        for row in range(batch):
            for view, each in enumerate(draws[row].reshape(views, 1, -1)):
                assert torch.equal(alone.images(images[row : row + 1], each)[0], found[row, view])
