"""The random numbers of device augmentation: a few for each sample, drawn on the host.

The numbers depend only on the settings, the seed and the step. So they are the same on every backend, on any number of
cores, and in a resumed run.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.ondevice import auto_augment as operations
from tpucache.ondevice.settings import AugmentSettings

# The columns of the random numbers of one view. Where a setting is off, its columns have a value that changes nothing.
TRANSPOSED, ROWS_REVERSED, COLUMNS_REVERSED, DOWN, RIGHT, BRIGHTNESS, CONTRAST, SATURATION = range(8)
ERASED: Final = slice(8, 12)  # top, bottom, left, right as shares of the side
SHARE: Final = 12  # the weight of the sample's own image in a mix-up
CUT: Final = slice(13, 17)  # the rectangle that CutMix pastes, in the form of ERASED
CROPPED: Final = slice(17, 21)  # top, height, left, width in pixels; only where crop is on
TILT_ROWS, TILT_COLUMNS = 21, 22  # slopes: a row moves by this many columns for each row below the centre
HUE, BLUR, GREY = 23, 24, 25  # HUE: in whole turns
COLUMNS: Final = 26  # the columns of RandAugment's and TrivialAugment's operations follow

_ERASED_AREA: Final = (0.02, 1 / 3)  # Zhong et al., arXiv:1708.04896
_ERASED_ASPECT: Final = (0.3, 1 / 0.3)
_CROPPED_ASPECT: Final = (3 / 4, 4 / 3)  # torchvision's defaults
_CROP_TRIES: Final = 10
#: The standard deviation, in pixels, of a Gaussian that changes no pixel.
_LEAST_BLUR: Final = 0.1
# Streams of random numbers. Each setting uses fixed positions in one of the streams, so that turning a setting on or
# off never changes the numbers of another setting.
_FIRST, _SECOND, _THIRD = range(3)


def draw(
    settings: AugmentSettings, seed: int, step: int, batch_size: int, size: tuple[int, int] | None = None
) -> npt.NDArray[np.float32]:
    """Return the random numbers of one step, float32 (batch, views x columns): a pure function of the arguments.

    `size` is the images' height and width, which random crops and operations need. Turning a setting on or off does not
    change the numbers of the other settings, and the first view's numbers do not depend on the number of views. Raises
    UsageError for a crop or operations without a size.
    """
    if (settings.operations or settings.crop) and size is None:
        raise UsageError(
            "random crops and operations depend on the images' height and width: give them to `draw` as `size`"
        )
    drawn = [_draw_view(settings, (seed, step), view, batch_size, size) for view in range(settings.views)]
    return np.ascontiguousarray(np.concatenate(drawn, 1), np.float32)


def _draw_view(
    settings: AugmentSettings, source: tuple[int, int], view: int, batch_size: int, size: tuple[int, int] | None
) -> Array:
    columns = np.zeros((COLUMNS, batch_size), np.float32)
    columns[[BRIGHTNESS, CONTRAST, SATURATION, SHARE]], columns[BLUR] = 1, _LEAST_BLUR
    draws = columns.T
    _draw_first(draws, settings, _stream(source, view, _FIRST))
    if settings.tilt or settings.hue or settings.blur or settings.grey or settings.crop:
        uniform = _stream(source, view, _SECOND).random_sample((batch_size, 6 + 2 * _CROP_TRIES))
        _draw_second(draws, settings, uniform, size)
    if settings.operations and size is not None:
        uniform = _stream(source, view, _THIRD).random_sample((batch_size, settings.operations, 4))
        draws = np.concatenate([draws, operations.draw_operations(settings, uniform, size)], 1)
    return draws


def _draw_first(draws: Array, settings: AugmentSettings, rng: np.random.RandomState) -> None:
    batch_size = len(draws)
    uniform = rng.random_sample((batch_size, 16))
    coin = rng.random_sample()
    turns = (uniform[:, 0] * 4).astype(int) if settings.rotate else np.zeros(batch_size, int)
    # A quarter turn to the left is a transposition and then a reversal of the rows.
    if settings.rotate or settings.vertical_flip:
        draws[:, TRANSPOSED] = turns % 2
        draws[:, ROWS_REVERSED] = ((turns == 1) | (turns == 2)) ^ (settings.vertical_flip & (uniform[:, 1] < 0.5))
    if settings.rotate or settings.flip:
        draws[:, COLUMNS_REVERSED] = ((turns == 2) | (turns == 3)) ^ (settings.flip & (uniform[:, 2] < 0.5))
    if settings.shift:
        draws[:, DOWN : RIGHT + 1] = np.floor(uniform[:, 3:5] * (2 * settings.shift + 1)) - settings.shift
    strengths = np.array([settings.brightness, settings.contrast, settings.saturation])
    if strengths.any():
        draws[:, BRIGHTNESS : SATURATION + 1] = 1 + (2 * uniform[:, 5:8] - 1) * strengths
    if settings.erase:
        draws[:, ERASED] = _erased(uniform[:, 8:13], settings.erase)
    cuts = settings.cutmix and not (settings.mixup and coin < 0.5)
    if settings.mixes:
        alpha = settings.cutmix if cuts else settings.mixup
        share = rng.beta(alpha, alpha, batch_size)
        if cuts:
            draws[:, CUT] = _boxes_around(uniform[:, 13:15], np.sqrt(1 - share))
        else:
            draws[:, SHARE] = share


def _draw_second(draws: Array, settings: AugmentSettings, uniform: Array, size: tuple[int, int] | None) -> None:
    if settings.tilt:
        angle = np.radians((2 * uniform[:, 0] - 1) * settings.tilt)
        draws[:, TILT_ROWS], draws[:, TILT_COLUMNS] = np.tan(angle / 2), -np.sin(angle)
    if settings.hue:
        draws[:, HUE] = (2 * uniform[:, 1] - 1) * settings.hue
    if settings.blur:
        draws[:, BLUR] = np.maximum(uniform[:, 2] * settings.blur, _LEAST_BLUR)
    if settings.grey:
        draws[:, GREY] = uniform[:, 3] < settings.grey
    if settings.crop and size is not None:
        draws[:, CROPPED] = _cropped(uniform[:, 4:], settings.zoom, *size)


def _stream(source: tuple[int, int], view: int, number: int) -> np.random.RandomState:
    """Return a random generator seeded with `source`, the (seed, step), and with the view and the stream's number."""
    key = (view, number) if view or number else ()
    # RandomState's distributions never change between releases of NumPy; a Generator's may.
    return np.random.RandomState(np.random.Philox(np.random.SeedSequence(source, spawn_key=key)))


def _erased(uniform: Array, probability: float) -> Array:
    """Return top, bottom, left, right, (batch, 4), of boxes of random area, aspect and place in the unit square.

    An image that is not erased has a box without area.
    """
    chosen = uniform[:, 0] < probability
    area = _ERASED_AREA[0] + uniform[:, 1] * (_ERASED_AREA[1] - _ERASED_AREA[0])
    low, high = np.log(_ERASED_ASPECT)
    aspect = np.exp(low + uniform[:, 2] * (high - low))
    height, width = (np.minimum(1, np.sqrt(area * ratio)) for ratio in (aspect, 1 / aspect))
    height, width = height * chosen, width * chosen
    top, left = uniform[:, 3] * (1 - height), uniform[:, 4] * (1 - width)
    return np.stack([top, top + height, left, left + width], 1)


def _boxes_around(centres: Array, sides: Array) -> Array:
    """Return top, bottom, left and right of squares around `centres`, (batch, 4), cut at the unit square's border.

    So the area that is cut out is at most the share drawn from Beta, as in the code of CutMix's authors (Yun et al.,
    arXiv:1905.04899).
    """
    low, high = (np.clip(centres + half[:, None], 0, 1) for half in (-sides / 2, sides / 2))
    return np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], 1)


def _cropped(uniform: Array, zoom: float, height: int, width: int) -> Array:
    crops, found = _tried(uniform, 1, zoom, height, width)
    if len(left := np.flatnonzero(~found)):  # few samples need more than one try
        crops[left], found = _tried(uniform[left], _CROP_TRIES, zoom, height, width)
        rows = min(height, max(1, round(width / _CROPPED_ASPECT[0])))
        columns = min(width, max(1, round(height * _CROPPED_ASPECT[1])))
        crops[left[~found]] = (height - rows) // 2, rows, (width - columns) // 2, columns
    return crops


def _tried(uniform: Array, tries: int, zoom: float, height: int, width: int) -> tuple[Array, Array]:
    """Return crops as `_cropped` does, (batch, 4), and whether they fit into the image, bool (batch,)."""
    low, high = np.log(_CROPPED_ASPECT)
    areas = height * width * (zoom + uniform[:, 2 : 2 + tries] * (1 - zoom))
    aspects = np.exp(low + uniform[:, 2 + _CROP_TRIES : 2 + _CROP_TRIES + tries] * (high - low))
    heights, widths = np.round(np.sqrt(areas / aspects)), np.round(np.sqrt(areas * aspects))
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first = np.arange(len(fits)), fits.argmax(1)
    heights, widths = heights[first], widths[first]
    tops, lefts = (
        np.floor(uniform[:, n] * (whole - sides + 1))
        for n, (whole, sides) in enumerate(((height, heights), (width, widths)))
    )
    return np.stack([tops, heights, lefts, widths], 1), fits.any(1)
