"""What the device does to a batch is what NumPy does to each image, and comes from (seed, step) alone."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
import torch
from augmenting import BATCH, CPU, HEIGHT, WIDTH, augment, draws_of, images_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache.ondevice.draws import COLUMNS, GREY, HUE, draw
from tpucache.ondevice.modules import Augment, Normalise
from tpucache.ondevice.settings import AugmentSettings

LUMA = np.array([0.299, 0.587, 0.114])
MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)
ALL = AugmentSettings(
    flip=True, vertical_flip=True, shift=3, brightness=0.4, contrast=0.4, saturation=0.4, erase=0.5, mixup=0.4, cutmix=1
)


@pytest.fixture
def images():
    return images_of()


def normalising(settings, dtype="|u1"):
    return Augment(settings, MEAN, STD, HEIGHT, WIDTH, CPU, dtype)


def normalised(pixels):
    return (np.moveaxis(np.asarray(pixels, np.float64), -1, 1) - np.reshape(MEAN, (3, 1, 1))) / np.reshape(
        STD, (3, 1, 1)
    )


def moved(image, row):
    """What a row of the draws does to one (height, width, …) array, in NumPy's words."""
    if row[0]:
        image = image.swapaxes(0, 1)
    if row[1]:
        image = image[::-1]
    if row[2]:
        image = image[:, ::-1]
    down, right = int(row[3]), int(row[4])
    pad = max(abs(down), abs(right))
    wide = np.pad(image, [(pad, pad), (pad, pad), *[(0, 0)] * (image.ndim - 2)], "reflect")
    return wide[pad - down : pad - down + image.shape[0], pad - right : pad - right + image.shape[1]]


chances = st.floats(0, 1)
any_settings = st.builds(
    AugmentSettings,
    flip=st.booleans(), vertical_flip=st.booleans(), shift=st.integers(0, 40), rotate=st.booleans(),
    brightness=chances, contrast=chances, saturation=chances, erase=chances,
    mixup=st.sampled_from([0, 0.1, 1.0, 8.0]), cutmix=st.sampled_from([0, 0.1, 1.0, 8.0]),
    crop=st.just(True), zoom=st.floats(0.01, 1), tilt=st.floats(0, 45), hue=st.floats(0, 0.5), blur=st.floats(0, 9),
    grey=chances,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60)
@given(any_settings, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 40))
def test_draws_follow_from_seed_and_step_and_keep_their_ranges(chosen, seed, step, batch):
    draws = draw(chosen, seed, step, batch, (30, 20))
    assert draws.shape == (batch, COLUMNS)
    assert draws.dtype == np.float32
    np.random.seed(0)  # whatever the global generator is at
    assert np.array_equal(draws, draw(chosen, seed, step, batch, (30, 20)))
    assert np.isfinite(draws).all()
    assert np.isin(draws[:, :3], (0, 1)).all()
    assert np.array_equal(draws[:, 3:5], np.round(draws[:, 3:5]))
    assert (np.abs(draws[:, 3:5]) <= chosen.shift).all()
    strengths = (chosen.brightness, chosen.contrast, chosen.saturation)
    assert (np.abs(draws[:, 5:8] - 1) <= np.array(strengths) + 1e-6).all()
    for box in (draws[:, 8:12], draws[:, 13:17]):
        assert (box >= 0).all()
        assert (box <= 1 + 1e-6).all()
        assert (box[:, 1] >= box[:, 0]).all()
        assert (box[:, 3] >= box[:, 2]).all()
    assert ((draws[:, 12] >= 0) & (draws[:, 12] <= 1)).all()
    assert np.array_equal(draws[:, 17:21], np.round(draws[:, 17:21]))
    for start, size, side in ((draws[:, 17], draws[:, 18], 30), (draws[:, 19], draws[:, 20], 20)):
        assert ((start >= 0) & (size >= 1) & (start + size <= side)).all()
    assert (np.abs(draws[:, 22]) <= math.sin(math.radians(chosen.tilt)) + 1e-6).all()
    assert (np.abs(draws[:, 23]) <= chosen.hue + 1e-6).all()
    assert ((draws[:, 24] > 0) & (draws[:, 24] <= max(0.1, chosen.blur) + 1e-6)).all()
    assert np.isin(draws[:, 25], (0, 1)).all()


def test_boxes_of_cutmix_and_turns_are_spread_as_those_of_other_libraries():
    cuts = draw(AugmentSettings(cutmix=1.0), 0, 0, 4000)[:, 13:17]
    areas = (cuts[:, 1] - cuts[:, 0]) * (cuts[:, 3] - cuts[:, 2])
    # torchvision and timm cut boxes around a uniform centre at the border, too: they measure 0.692 and 0.686.
    assert 1 - areas.mean() == pytest.approx(0.69, abs=0.015)
    turns = {tuple(row) for row in draw(AugmentSettings(rotate=True), 0, 0, 100)[:, :3].tolist()}
    assert turns == {(0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1)}


@pytest.mark.slow
def test_off_is_normalising_and_nothing_else(images):
    aug, draws = normalising(AugmentSettings()), draws_of(AugmentSettings())
    expected = Normalise(MEAN, STD, CPU)(images)
    assert torch.equal(aug.images(images, draws), expected)
    assert torch.equal(aug.plain(images), expected)
    assert expected.numpy() == pytest.approx(normalised(images.numpy()), abs=1e-5)
    targets = torch.rand(BATCH, 3)
    assert aug.mix(expected, targets, draws) == (expected, targets)


@pytest.mark.parametrize(
    "chosen",
    [
        {"flip": True},
        {"vertical_flip": True},
        {"shift": 8},
        {"flip": True, "vertical_flip": True, "shift": 5},
        {"rotate": True, "flip": True, "shift": 2},
    ],
)
@pytest.mark.parametrize("dtype", ["|u1", "<u2", "<i2", "<f4"])
def test_numbers_of_any_depth_move_as_numpy_moves_them_also_by_products_in_bfloat16(chosen, dtype):
    width = HEIGHT if "rotate" in chosen else WIDTH  # only squares turn
    rng, shape = np.random.default_rng(0), (BATCH, HEIGHT, width, 3)
    if dtype == "<f4":
        pixels = rng.standard_normal(shape, np.float32) * 1000
    else:
        pixels = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    settings = AugmentSettings(**chosen)
    aug = augment(settings, width=width, dtype=dtype)
    draws = draws_of(settings)
    expected = np.stack([moved(image, row) for image, row in zip(pixels, draws.numpy(), strict=True)])
    assert not np.array_equal(expected, pixels)
    for is_short in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_short):
            found = aug.images(torch.from_numpy(pixels), draws)
        assert np.array_equal(found.numpy(), np.moveaxis(expected, -1, 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_masks_move_with_their_images(images, dtype):
    chosen = AugmentSettings(flip=True, vertical_flip=True, shift=4, brightness=0.5, erase=1.0)
    draws = draws_of(chosen)
    masks = images[..., 0].to(dtype)
    found = augment(chosen).masks(masks, draws)
    expected = np.stack([moved(mask, row) for mask, row in zip(masks.numpy(), draws.numpy(), strict=True)])
    assert found.dtype == dtype
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize(("dtype", "white"), [("|u1", 255), ("<u2", 65535)])
def test_colours_change_by_their_factors_and_stay_within_black_and_white(images, dtype, white):
    chosen = AugmentSettings(brightness=0.5, contrast=0.5, saturation=0.5)
    draws = draws_of(chosen)
    factors = draws.numpy().astype(np.float64)
    images = images.numpy().astype(dtype) * (white // 255)
    pixels = images * factors[:, 5].reshape(-1, 1, 1, 1)
    centre = (pixels @ LUMA).mean((1, 2)).reshape(-1, 1, 1, 1)
    pixels = centre + (pixels - centre) * factors[:, 6].reshape(-1, 1, 1, 1)
    grey = (pixels @ LUMA)[..., None]
    pixels = grey + (pixels - grey) * factors[:, 7].reshape(-1, 1, 1, 1)
    assert pixels.min() < 0
    assert pixels.max() > white
    found = normalising(chosen, dtype).images(torch.from_numpy(images), draws)
    assert found.numpy() == pytest.approx(normalised(np.clip(pixels, 0, white)), abs=white * 1e-6)


def test_hues_are_turned_as_those_of_hsv(images):
    chosen = AugmentSettings(hue=0.5)
    draws, pixels = draws_of(chosen), images.numpy()
    pixels[:, 0, 0] = 77  # grey
    pixels[:, 0, 1] = 0
    pixels[:, 0, 2] = (0, 90, 90)  # two are the largest
    pixels[:, 0, 3] = (255, 0, 0)
    found = augment(chosen).images(images, draws)
    turns = draws.numpy()[:, HUE]
    for image, result, turn in zip(pixels, found.numpy(), turns, strict=True):
        hsv = [colorsys.rgb_to_hsv(*pixel) for pixel in (image / 255).reshape(-1, 3)]
        rgb = [colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value) for hue, saturation, value in hsv]
        assert np.moveaxis(result, 0, 2) == pytest.approx(255 * np.array(rgb).reshape(image.shape), abs=1e-3)
    assert np.ptp(turns) > 0.5
    for dtype in ("<f4", "<u2"):
        for scale in (1, 8):
            scaled = augment(chosen, dtype=dtype).images(torch.from_numpy(pixels.astype(dtype) * scale), draws)
            torch.testing.assert_close(scaled, found * scale, atol=0.01, rtol=0)


def test_some_images_lose_their_colours_and_the_others_stay_as_they_are(images):
    chosen = AugmentSettings(grey=0.5)
    draws = draws_of(chosen)
    found = augment(chosen).images(images, draws)
    for image, result, is_grey in zip(images.numpy(), found.numpy(), draws[:, GREY], strict=True):
        expected = np.repeat((image @ LUMA)[..., None], 3, 2) if is_grey else image
        assert np.moveaxis(result, 0, 2) == pytest.approx(expected, abs=1e-3)
    assert 0 < draws[:, GREY].sum() < BATCH


def test_what_is_erased_is_a_rectangle_of_the_mean_colour(images):
    chosen = AugmentSettings(erase=0.5)
    draws = draws_of(chosen)
    aug = normalising(chosen)
    gone = (aug.images(images, draws) == 0).all(1)
    kept = torch.where(gone[:, None], 0, aug.plain(images))
    assert torch.equal(aug.images(images, draws), kept)
    for mask, row in zip(gone.numpy(), draws.numpy(), strict=True):
        rows = np.flatnonzero(
            ((np.arange(HEIGHT) + 0.5) / HEIGHT >= row[8]) & ((np.arange(HEIGHT) + 0.5) / HEIGHT < row[9])
        )
        columns = np.flatnonzero(
            ((np.arange(WIDTH) + 0.5) / WIDTH >= row[10]) & ((np.arange(WIDTH) + 0.5) / WIDTH < row[11])
        )
        expected = np.zeros((HEIGHT, WIDTH), bool)
        expected[np.ix_(rows, columns)] = True
        assert np.array_equal(mask, expected)
    assert 0 < gone.any(2).any(1).sum() < BATCH


def test_mixup_mixes_neighbours_and_their_targets_alike():
    chosen = AugmentSettings(mixup=0.4)
    draws = draws_of(chosen)
    images, targets = torch.randn(BATCH, 3, HEIGHT, WIDTH, requires_grad=True), torch.rand(BATCH, 5)
    mixed, mixed_targets = augment(chosen).mix(images, targets, draws)
    share = draws[:, 12].double()
    assert 0 < share.min() < share.max() < 1
    for values, found in ((images, mixed), (targets, mixed_targets)):
        shares = share.view(-1, *[1] * (values.dim() - 1))
        expected = values * shares + values[torch.arange(BATCH) - 1] * (1 - shares)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    mixed.sum().backward()
    # Every pixel ends up in its own image or in the next one, in shares that sum to one for the batch.
    assert images.grad.sum().item() == pytest.approx(images.numel(), rel=1e-4)


def test_cutmix_pastes_a_rectangle_and_counts_its_pixels():
    chosen = AugmentSettings(cutmix=1.0)
    draws = draws_of(chosen)
    images = torch.arange(BATCH).float().view(-1, 1, 1, 1).expand(BATCH, 3, HEIGHT, WIDTH)
    targets = torch.eye(BATCH)
    dense = targets[:, :, None, None].expand(BATCH, BATCH, HEIGHT, WIDTH)
    aug = augment(chosen)
    mixed, mixed_targets = aug.mix(images, targets, draws)
    for row in range(BATCH):
        other = (row - 1) % BATCH
        assert set(mixed[row].unique().tolist()) <= {row, other}
        share = (mixed[row] == row).float().mean().item()
        assert mixed_targets[row, row].item() == pytest.approx(share, abs=1e-6)
        assert mixed_targets[row, other].item() == pytest.approx(1 - share, abs=1e-6)
    assert torch.equal(aug.mix(images, dense, draws)[1].argmax(1).float(), mixed[:, 0])


def test_autocast_changes_no_pixel(images):
    aug, draws = augment(ALL), draws_of(ALL)
    expected = aug.images(images, draws)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = aug.images(images, draws)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
