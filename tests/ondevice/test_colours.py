"""Changes of colour are what NumPy computes in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tpucache import UsageError
from tpucache.ondevice.draws import GREY, HUE, draw
from tpucache.ondevice.modules import Augment
from tpucache.ondevice.settings import AugmentSettings

CPU = torch.device("cpu")
LUMA = np.array([0.299, 0.587, 0.114])
TO_YUV = np.stack([LUMA, 0.492 * (np.eye(3)[2] - LUMA), 0.877 * (np.eye(3)[0] - LUMA)])


def changed(settings, images, batch=16):
    augment = Augment(settings, [0.0] * 3, [1.0] * 3, 5, 6, CPU)
    draws = draw(settings, 0, 0, batch)
    return augment.images(torch.from_numpy(images), torch.from_numpy(draws)).numpy(), draws


def test_hues_are_turned_around_grey_and_luma_stays():
    images = np.random.default_rng(0).integers(80, 170, (16, 5, 6, 3), np.uint8)
    found, draws = changed(AugmentSettings(hue=0.5), images)
    for image, result, (cosine, sine) in zip(images, found, draws[:, HUE], strict=True):
        yuv = image @ TO_YUV.T
        turned = np.stack(
            [yuv[..., 0], cosine * yuv[..., 1] - sine * yuv[..., 2], sine * yuv[..., 1] + cosine * yuv[..., 2]], -1
        )
        expected = (turned @ np.linalg.inv(TO_YUV).T).clip(0, 255)
        assert np.moveaxis(result, 0, 2) == pytest.approx(expected, abs=1e-3)
    kept = found.min((1, 2, 3)) > 0
    assert kept.any()
    assert np.einsum("c,bchw->bhw", LUMA, found)[kept] == pytest.approx((images @ LUMA)[kept], abs=1e-3)


def test_some_images_lose_their_colours_and_the_others_stay_as_they_are():
    images = np.random.default_rng(0).integers(0, 256, (16, 5, 6, 3), np.uint8)
    found, draws = changed(AugmentSettings(grey=0.5), images)
    for image, result, is_grey in zip(images, found, draws[:, GREY], strict=True):
        expected = np.repeat((image @ LUMA)[..., None], 3, 2) if is_grey else image
        assert np.moveaxis(result, 0, 2) == pytest.approx(expected, abs=1e-3)
    assert 0 < draws[:, GREY].sum() < 16


@pytest.mark.parametrize("name", ["saturation", "hue", "grey"])
def test_colours_of_other_than_three_channels_are_refused(name):
    with pytest.raises(UsageError, match=f"{name} is of 3 channels, not of 1"):
        Augment(AugmentSettings(**{name: 0.1}), [0.0], [1.0], 8, 8, CPU)
