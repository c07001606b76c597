"""RandAugment and TrivialAugment are those of torchvision, operation by operation, in pixels and in what is drawn."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from tpucache.ondevice import auto_augment as op
from tpucache.ondevice.draws import COLUMNS, draw
from tpucache.ondevice.modules import Augment
from tpucache.ondevice.settings import AugmentSettings

RAND, TRIVIAL = AugmentSettings(rand_augment=1, magnitude=20), AugmentSettings(trivial_augment=True)
#: All that torchvision computes is found to a level, but rotations, which are three shears here.
LEVELS = {"Identity": 0, "TranslateX": 0, "TranslateY": 0, "Posterize": 0, "Equalize": 0, "Rotate": 2}
DRAWN = 20_000


@pytest.fixture
def theirs(needs):
    """torchvision's transform for these settings."""
    needs("torchvision")
    from torchvision.transforms import v2

    def make(settings):
        options = {"interpolation": v2.InterpolationMode.BILINEAR}
        if settings.trivial_augment:
            return v2.TrivialAugmentWide(**options)
        return v2.RandAugment(num_ops=1, magnitude=settings.magnitude, **options)

    return make


def pictures(height, width, channels):
    rng = np.random.default_rng(height)
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    waves = [np.sin(rows / a + columns / b) for a, b in rng.uniform(5, 12, (3 * channels, 2))]
    return np.rint(125 + 100 * np.stack(waves)).reshape(3, channels, height, width).astype(np.uint8)


def numbers_of(settings, operation, number, sign, size, count=1):
    """Return the numbers of one operation, a row for each of some images."""
    found = op.operation_numbers(settings, size)[op.OPERATIONS.index(operation), number, int(sign < 0)]
    return np.stack([found] * count)


@pytest.mark.parametrize(("height", "width", "channels"), [(48, 48, 3), (31, 44, 3), (44, 31, 1)])
@pytest.mark.parametrize("settings", [RAND, TRIVIAL], ids=["rand", "trivial"])
@pytest.mark.parametrize("operation", op.OPERATIONS)
def test_pixels_are_those_of_torchvision(theirs, operation, settings, height, width, channels):
    transform, images = theirs(settings), torch.from_numpy(pictures(height, width, channels))
    magnitudes = transform._AUGMENTATION_SPACE[operation][0](31, height, width)
    augment = Augment(settings, [0.0] * channels, [1.0] * channels, height, width, torch.device("cpu"))
    for number in (20,) if settings is RAND else (0, 7, 11, 20, 30):
        for sign in (1, -1) if operation in op._SIGNED else (1,):
            magnitude = 0.0 if magnitudes is None else sign * float(magnitudes[number])
            numbers = numbers_of(settings, operation, number, sign, (height, width), 3)
            draws = torch.from_numpy(np.concatenate([draw(AugmentSettings(), 0, 0, 3), numbers], 1)).float()
            found = augment.images(images.permute(0, 2, 3, 1), draws)
            expected = torch.stack([changed(transform, image, operation, magnitude) for image in images]).float()
            difference = (found - expected).abs()
            if operation == "Rotate":
                whole = torch.zeros(1, height, width)
                whole[:, 3:-3, 3:-3] = 1  # nearer to the border, black comes in
                inside = changed(transform, whole, operation, magnitude)[0] == 1
                assert difference.mean() < 1.6
                difference = difference[:, :, inside]
            assert difference.max() <= LEVELS.get(operation, 1)


#: The method of torchvision's transforms that applies an operation.
APPLIES = "_apply_image_or_video_transform"


def changed(transform, image, operation, magnitude):
    fill = {type(image): None}
    return getattr(transform, APPLIES)(image, operation, magnitude, transform.interpolation, fill)


@pytest.mark.parametrize("settings", [RAND, TRIVIAL], ids=["rand", "trivial"])
def test_operations_and_magnitudes_are_drawn_as_by_torchvision(theirs, settings, monkeypatch):
    transform, image, called = theirs(settings), torch.zeros(1, 30, 60, dtype=torch.uint8), Counter()

    def count(given, operation, magnitude, **_):
        called[operation, round(magnitude, 3)] += 1
        return given

    monkeypatch.setattr(transform, APPLIES, count)
    torch.manual_seed(0)
    for _ in range(DRAWN):
        transform(image)
    numbers = draw(settings, 0, 0, DRAWN, (30, 60))[:, COLUMNS:]
    found, largest = Counter(), op.magnitudes(settings, (30, 60))
    known = {}
    for operation in op.OPERATIONS:
        for number in range(31):
            for sign in (1, -1):
                row = numbers_of(settings, operation, number, sign, (30, 60))[0]
                is_none = operation in ("Identity", "AutoContrast", "Equalize")
                magnitude = 0.0 if is_none else largest[operation][number]
                magnitude *= sign if operation in op._SIGNED else 1
                known.setdefault(tuple(np.float32(row)), (operation, round(float(magnitude), 3)))
    for row in numbers:
        found[known[tuple(row)]] += 1
    # What changes nothing, such as a shear by 0, is drawn as what is the first to do so: the identity.
    expected = Counter()
    for (operation, magnitude), times in called.items():
        number = int(np.abs(largest[operation] - abs(magnitude)).argmin())
        row = numbers_of(settings, operation, number, -1 if magnitude < 0 else 1, (30, 60))[0]
        expected[known[tuple(np.float32(row))]] += times
    assert {*found} == {*expected}
    for key, times in expected.items():
        assert abs(found[key] - times) < 6 * math.sqrt(times) + 6
