"""The sums of an image's bytes are exact, however bright and large it is."""

from __future__ import annotations

import numpy as np
import pytest

from tpucache.warmup.records.moments import moments


@pytest.mark.parametrize("height", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_sums_of_the_brightest_image_are_exact(height: int, channels: int) -> None:
    pixels = height * 5
    assert moments(np.full((height, 5, channels), 255, np.uint8)) == (
        [pixels * 255] * channels,
        [pixels * 255**2] * channels,
    )


def test_the_sums_of_each_channel_are_its_own() -> None:
    image = np.random.default_rng(0).integers(0, 256, (300, 7, 3), np.uint8)
    whole = image.astype(np.int64)
    assert moments(image) == (whole.sum((0, 1)).tolist(), (whole**2).sum((0, 1)).tolist())
