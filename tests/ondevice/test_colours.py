"""Changes of colour are what NumPy computes in double precision."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch

from tpucache.ondevice.draws import GREY, HUE, draw
from tpucache.ondevice.modules import Augment
from tpucache.ondevice.settings import AugmentSettings

CPU = torch.device("cpu")
LUMA = np.array([0.299, 0.587, 0.114])


def changed(settings, images, batch=16):
    augment = Augment(settings, [0.0] * 3, [1.0] * 3, 5, 6, CPU)
    draws = draw(settings, 0, 0, batch)
    return augment.images(torch.from_numpy(images), torch.from_numpy(draws)).numpy(), draws


def test_hues_are_turned_as_those_of_hsv():
    images = np.random.default_rng(0).integers(0, 256, (16, 5, 6, 3), np.uint8)
    images[:, 0, 0] = 77  # grey
    images[:, 0, 1] = 0
    images[:, 0, 2] = (0, 90, 90)  # two are the largest
    images[:, 0, 3] = (255, 0, 0)
    found, draws = changed(AugmentSettings(hue=0.5), images)
    for image, result, turn in zip(images, found, draws[:, HUE], strict=True):
        hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in (image / 255).reshape(-1, 3)]
        rgb = [colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value) for hue, saturation, value in hsv]
        expected = 255 * np.array(rgb).reshape(5, 6, 3)
        assert np.moveaxis(result, 0, 2) == pytest.approx(expected, abs=1e-3)
    assert np.ptp(draws[:, HUE]) > 0.5


@pytest.mark.parametrize("dtype", ["<f4", "<u2"])
def test_hues_of_numbers_of_any_depth_are_turned(dtype):
    augment = Augment(AugmentSettings(hue=0.5), [0.0] * 3, [1.0] * 3, 5, 6, CPU, dtype)
    images = np.random.default_rng(0).integers(0, 256, (16, 5, 6, 3)).astype(dtype)
    draws = torch.from_numpy(draw(AugmentSettings(hue=0.5), 0, 0, 16))
    found = augment.images(torch.from_numpy(images), draws)
    scaled = augment.images(torch.from_numpy(images * 8), draws)
    torch.testing.assert_close(scaled, found * 8, atol=0.01, rtol=0)
    assert found.numpy() == pytest.approx(changed(AugmentSettings(hue=0.5), images.astype(np.uint8))[0], abs=1e-3)


def test_some_images_lose_their_colours_and_the_others_stay_as_they_are():
    images = np.random.default_rng(0).integers(0, 256, (16, 5, 6, 3), np.uint8)
    found, draws = changed(AugmentSettings(grey=0.5), images)
    for image, result, is_grey in zip(images, found, draws[:, GREY], strict=True):
        expected = np.repeat((image @ LUMA)[..., None], 3, 2) if is_grey else image
        assert np.moveaxis(result, 0, 2) == pytest.approx(expected, abs=1e-3)
    assert 0 < draws[:, GREY].sum() < 16
