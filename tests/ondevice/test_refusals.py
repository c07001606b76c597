"""Settings, and images that cannot have them, are refused in words that name the setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpucache import UsageError
from tpucache.ondevice.draws import draw
from tpucache.ondevice.modules import Augment
from tpucache.ondevice.settings import AugmentSettings

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [{"shift": -1}, {"brightness": 1.5}, {"contrast": -0.1}, {"erase": NAN}, {"mixup": -1.0}, {"cutmix": INFINITE},
     {"grey": 2.0}, {"hue": 0.6}, {"tilt": 46.0}, {"blur": NAN}, {"blur": -1.0}, {"zoom": 0.0, "crop": True},
     {"zoom": 0.5}, {"views": 0}, {"rand_augment": -1}, {"rand_augment": 99}, {"magnitude": 31, "rand_augment": 1},
     {"magnitude": -1, "rand_augment": 1}, {"magnitude": 3}, {"trivial_augment": True, "rand_augment": 1}],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        AugmentSettings(**wrong)


@pytest.mark.parametrize(
    ("settings", "height", "width", "channels", "dtype", "text"),
    [
        ({"rotate": True}, 9, 12, 3, "|u1", "square"),
        ({"shift": 9}, 9, 12, 3, "|u1", "shift of 9"),
        ({"tilt": 45}, 200, 9, 3, "|u1", "tilt of 45 degrees.*200x9"),
        ({"saturation": 0.1}, 8, 8, 1, "|u1", "saturation needs 3 channels, not 1"),
        ({"hue": 0.1}, 8, 8, 1, "|u1", "hue needs 3 channels, not 1"),
        ({"grey": 0.1}, 8, 8, 1, "|u1", "grey needs 3 channels, not 1"),
        ({"brightness": 0.1}, 8, 8, 1, "<f4", "not float32"),
        ({"rand_augment": 1}, 8, 8, 3, "<f4", "rand_augment needs images of bytes"),
        ({"rand_augment": 1}, 8, 8, 3, "<i2", "rand_augment needs images of bytes"),
        ({"trivial_augment": True}, 8, 8, 4, "|u1", "trivial_augment needs images of 1 or 3 channels, not 4"),
    ],
)
def test_settings_that_images_cannot_have_are_refused(
    settings: dict[str, Any], height: int, width: int, channels: int, dtype: str, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        Augment(
            AugmentSettings(**settings), [0.0] * channels, [1.0] * channels, height, width, torch.device("cpu"), dtype
        )


@pytest.mark.parametrize("settings", [{"crop": True}, {"trivial_augment": True}])
def test_what_is_drawn_by_the_images_size_needs_it(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give them to `draw` as `size`"):
        draw(AugmentSettings(**settings), 0, 0, 4)
