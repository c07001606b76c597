"""The numbers of later settings are independent of those of earlier ones, and spread as their settings say."""

from __future__ import annotations

import hashlib
import math
import random

import numpy as np
import pytest

from tpucache.ondevice.draws import BLUR, COLUMNS, CROPPED, DOWN, GREY, HUE, RIGHT, TILT_COLUMNS, TILT_ROWS, draw
from tpucache.ondevice.settings import AugmentSettings

EARLIER = {
    "flip": True, "vertical_flip": True, "shift": 3, "rotate": True, "brightness": 0.4, "contrast": 0.3,
    "saturation": 0.2, "erase": 0.5, "mixup": 0.4, "cutmix": 1.0,
}  # fmt: skip
LATER = {"crop": True, "zoom": 0.3, "tilt": 20.0, "hue": 0.4, "blur": 2.0, "grey": 0.3}
COUNT = 4000


def test_earlier_settings_draw_what_they_drew_before_there_were_later_ones():
    for settings in (AugmentSettings(**EARLIER), AugmentSettings(**EARLIER, **LATER, views=2)):
        numbers = np.stack([draw(settings, 5, step, 8, (9, 12))[:, :17] for step in range(6)])
        assert hashlib.sha256(np.round(numbers, 5).astype("<f4").tobytes()).hexdigest()[:16] == "8a918b7db80c6cf6"


@pytest.mark.parametrize("name", sorted({*LATER, "shift"} - {"zoom"}))
def test_no_setting_changes_what_another_draws(name):
    given = {name: {**EARLIER, **LATER}[name], **({"zoom": LATER["zoom"]} if name == "crop" else {})}
    alone, together = (draw(AugmentSettings(**each), 3, 4, 50, (9, 12)) for each in (given, {**EARLIER, **LATER}))
    columns = {"crop": CROPPED, "tilt": [TILT_ROWS, TILT_COLUMNS], "hue": HUE, "blur": BLUR, "grey": GREY}
    own = columns.get(name, [DOWN, RIGHT])
    assert np.array_equal(alone[:, own], together[:, own])
    assert np.unique(alone[:, own]).size > 1


def test_views_draw_apart_and_the_first_one_as_if_it_were_alone():
    one, three = (draw(AugmentSettings(**EARLIER, **LATER, views=n), 1, 2, 40, (9, 12)) for n in (1, 3))
    assert three.shape == (40, 3 * COLUMNS)
    views = three.reshape(40, 3, COLUMNS)
    assert np.array_equal(views[:, 0], one)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for column in (2, 3, 5, TILT_ROWS, BLUR):
            assert abs(np.corrcoef(views[:, first, column], views[:, second, column])[0, 1]) < 0.6


def test_later_settings_are_spread_evenly():
    draws = draw(AugmentSettings(tilt=30, hue=0.25, blur=2.0, grey=0.2), 0, 0, COUNT).astype(np.float64)
    fifths = pytest.approx([0.2] * 5, abs=0.03)
    tilts = np.degrees(2 * np.arctan(draws[:, TILT_ROWS]))
    assert np.histogram(tilts, 5, (-30, 30))[0] / COUNT == fifths
    assert -np.sin(np.radians(tilts)) == pytest.approx(draws[:, TILT_COLUMNS], abs=1e-6)
    turns = draws[:, HUE]
    assert np.histogram(turns, 5, (-0.25, 0.25))[0] / COUNT == fifths
    assert np.histogram(draws[:, BLUR], 5, (0, 2))[0] / COUNT == fifths
    assert draws[:, GREY].mean() == pytest.approx(0.2, abs=0.03)
    assert abs(np.corrcoef(tilts, turns)[0, 1]) < 0.05


@pytest.mark.slow
def test_later_settings_are_independent_of_earlier_ones():
    settings = AugmentSettings(**EARLIER, **LATER, views=2)
    # One sample a step: streams with the same beginning would agree there.
    draws = np.concatenate([draw(settings, 0, step, 1, (64, 64)) for step in range(600)]).astype(np.float64)
    for view in (draws[:, :COLUMNS], draws[:, COLUMNS:]):
        varied = view[:, view.std(0) > 0]
        earlier = int((view[:, :17].std(0) > 0).sum())
        assert np.abs(np.corrcoef(varied.T)[:earlier, earlier:]).max() < 0.2


def crops(height, width, zoom):
    """Crops as torchvision's RandomResizedCrop.get_params makes them, with its default aspects."""
    rng = random.Random(0)
    for _ in range(COUNT):
        for _ in range(10):
            area = height * width * rng.uniform(zoom, 1)
            aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                yield rng.randint(0, height - h), h, rng.randint(0, width - w), w
                break
        else:
            w, h = width, height
            if width / height < 3 / 4:
                h = round(w / (3 / 4))
            elif width / height > 4 / 3:
                w = round(h * (4 / 3))
            yield (height - h) // 2, h, (width - w) // 2, w


@pytest.mark.parametrize(("size", "zoom"), [((64, 64), 0.08), ((48, 64), 0.5), ((20, 90), 0.3), ((90, 20), 1.0)])
def test_crops_are_spread_as_those_of_torchvision(size, zoom):
    expected = np.array([*crops(size[0], size[1], zoom)])
    found = draw(AugmentSettings(crop=True, zoom=zoom), 0, 0, COUNT, size)[:, CROPPED]
    for column in range(4):
        edges = np.unique(np.quantile(expected[:, column], np.linspace(0, 1, 9)))
        edges = np.append(edges, edges[-1] + 1)
        shares = [np.histogram(each[:, column], edges)[0] / COUNT for each in (found, expected)]
        assert shares[0] == pytest.approx(shares[1], abs=0.035)
        assert found[:, column].max() <= expected[:, column].max() + 2
        assert found[:, column].min() >= expected[:, column].min() - 2
