"""The random numbers of device augmentation, drawn on the host, a few for each sample.

They depend only on (seed, step): they are the same on every backend and number of cores, and in a resumed run.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.ondevice.settings import AugmentSettings

# Columns of the draws. Neutral where a setting is off.
TRANSPOSED, ROWS_REVERSED, COLUMNS_REVERSED, DOWN, RIGHT, BRIGHTNESS, CONTRAST, SATURATION = range(8)
ERASED: Final = slice(8, 12)  # top, bottom, left, right as shares of the side
SHARE: Final = 12  # of the own image in a mix-up
CUT: Final = slice(13, 17)  # as ERASED
COLUMNS: Final = 17

_ERASED_AREA: Final = (0.02, 1 / 3)  # Zhong et al., arXiv:1708.04896
_ERASED_ASPECT: Final = (0.3, 1 / 0.3)


def draw(settings: AugmentSettings, seed: int, step: int, batch_size: int) -> npt.NDArray[np.float32]:
    """Return the random numbers of one step, float32 (batch, COLUMNS): a pure function of the arguments.

    Turning one setting on or off does not change what the others draw.
    """
    # RandomState's distributions never change from one NumPy to the next, which a Generator's may.
    rng = np.random.RandomState(np.random.Philox(np.random.SeedSequence((seed, step))))
    uniform = rng.random_sample((batch_size, 16))
    coin = rng.random_sample()
    draws = np.zeros((batch_size, COLUMNS))
    turns = (uniform[:, 0] * 4).astype(int) if settings.rotate else np.zeros(batch_size, int)
    # A quarter turn to the left is a transposition, then the rows reversed.
    draws[:, TRANSPOSED] = turns % 2
    draws[:, ROWS_REVERSED] = ((turns == 1) | (turns == 2)) ^ (settings.vertical_flip & (uniform[:, 1] < 0.5))
    draws[:, COLUMNS_REVERSED] = ((turns == 2) | (turns == 3)) ^ (settings.flip & (uniform[:, 2] < 0.5))
    draws[:, DOWN : RIGHT + 1] = np.floor(uniform[:, 3:5] * (2 * settings.shift + 1)) - settings.shift
    strengths = np.array([settings.brightness, settings.contrast, settings.saturation])
    draws[:, BRIGHTNESS : SATURATION + 1] = 1 + (2 * uniform[:, 5:8] - 1) * strengths
    draws[:, ERASED] = _erased(uniform[:, 8:13], settings.erase)
    draws[:, SHARE] = 1
    cuts = settings.cutmix and not (settings.mixup and coin < 0.5)
    if settings.mixes:
        alpha = settings.cutmix if cuts else settings.mixup
        share = rng.beta(alpha, alpha, batch_size)
        if cuts:
            draws[:, CUT] = _boxes(np.sqrt(1 - share), np.sqrt(1 - share), uniform[:, 13:15])
        else:
            draws[:, SHARE] = share
    return draws.astype(np.float32)


def _erased(uniform: npt.NDArray[Any], probability: float) -> npt.NDArray[Any]:
    """Return boxes (batch, 4) of random area and aspect, none for those that are not erased."""
    chosen = uniform[:, 0] < probability
    area = _ERASED_AREA[0] + uniform[:, 1] * (_ERASED_AREA[1] - _ERASED_AREA[0])
    low, high = np.log(_ERASED_ASPECT)
    aspect = np.exp(low + uniform[:, 2] * (high - low))
    height, width = (np.minimum(1, np.sqrt(area * ratio)) for ratio in (aspect, 1 / aspect))
    return _boxes(height * chosen, width * chosen, uniform[:, 3:5])


def _boxes(heights: npt.NDArray[Any], widths: npt.NDArray[Any], uniform: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return top, bottom, left and right of boxes with these sides at random places in the unit square."""
    top, left = uniform[:, 0] * (1 - heights), uniform[:, 1] * (1 - widths)
    return np.stack([top, top + heights, left, left + widths], 1)
