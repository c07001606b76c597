"""Augmentation of whole uint8 batches on the device.

Random numbers are drawn on the host, a few for each sample, and uploaded with the batch. They depend only on (seed,
step): they are the same on every backend and number of cores, and in a resumed run. An augmentation that is off is not
part of the graph. Shapes are static, and nothing is read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tpucache.errors import UsageError
from tpucache.ondevice.normalise import Normalise
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import IMAGE, MASK

# Columns of the draws. Neutral where a setting is off.
_TRANSPOSED, _ROWS_REVERSED, _COLUMNS_REVERSED, _DOWN, _RIGHT, _BRIGHTNESS, _CONTRAST, _SATURATION = range(8)
_ERASED: Final = slice(8, 12)  # top, bottom, left, right as shares of the side
_SHARE: Final = 12  # of the own image in a mix-up
_CUT: Final = slice(13, 17)  # as _ERASED
COLUMNS: Final = 17

_ERASED_AREA: Final = (0.02, 1 / 3)  # Zhong et al., arXiv:1708.04896
_ERASED_ASPECT: Final = (0.3, 1 / 0.3)
_LUMA: Final = (0.299, 0.587, 0.114)  # ITU-R BT.601


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
    draws[:, _TRANSPOSED] = turns % 2
    draws[:, _ROWS_REVERSED] = ((turns == 1) | (turns == 2)) ^ (settings.vertical_flip & (uniform[:, 1] < 0.5))
    draws[:, _COLUMNS_REVERSED] = ((turns == 2) | (turns == 3)) ^ (settings.flip & (uniform[:, 2] < 0.5))
    draws[:, _DOWN : _RIGHT + 1] = np.floor(uniform[:, 3:5] * (2 * settings.shift + 1)) - settings.shift
    strengths = np.array([settings.brightness, settings.contrast, settings.saturation])
    draws[:, _BRIGHTNESS : _SATURATION + 1] = 1 + (2 * uniform[:, 5:8] - 1) * strengths
    draws[:, _ERASED] = _erased(uniform[:, 8:13], settings.erase)
    draws[:, _SHARE] = 1
    cuts = settings.cutmix and not (settings.mixup and coin < 0.5)
    if settings.mixes:
        alpha = settings.cutmix if cuts else settings.mixup
        share = rng.beta(alpha, alpha, batch_size)
        if cuts:
            draws[:, _CUT] = _boxes(np.sqrt(1 - share), np.sqrt(1 - share), uniform[:, 13:15])
        else:
            draws[:, _SHARE] = share
    return draws.astype(np.float32)


class Augment:
    """Applies AugmentSettings to whole batches on the device, with the random numbers of `draw`."""

    def __init__(
        self,
        settings: AugmentSettings,
        mean: Sequence[float],
        std: Sequence[float],
        height: int,
        width: int,
        device: torch.device,
    ) -> None:
        """Take the channels' mean and standard deviation in 0..255. Raises UsageError when the sides do not fit."""
        if settings.rotate and height != width:
            raise UsageError(f"only square images turn by right angles, not {height}x{width}: leave rotate out")
        if settings.shift >= min(height, width):
            raise UsageError(f"a shift of {settings.shift} pixels leaves nothing of {height}x{width}")
        if settings.saturation and len(mean) != 3:
            raise UsageError(f"saturation is of 3 channels, not of {len(mean)}: leave it out")
        self.settings = settings
        self._normalise = Normalise(mean, std, device)
        self._rows = torch.arange(height, dtype=torch.float32).to(device)
        self._columns = torch.arange(width, dtype=torch.float32).to(device)
        self._luma = torch.tensor(_LUMA).view(1, 3, 1, 1).to(device)

    def fields(self, fields: Mapping[str, torch.Tensor], draws: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return a batch's fields with the image normalised and, given `draws`, augmented, and the mask moved with it.

        An image is uint8 (batch, height, width, channels), a mask (batch, height, width, 1).
        """
        if draws is None:
            return {**fields, IMAGE: self.plain(fields[IMAGE])}
        changed = {**fields, IMAGE: self.images(fields[IMAGE], draws)}
        if MASK in fields:
            changed[MASK] = self.masks(fields[MASK][..., 0], draws)[..., None]
        return changed

    def plain(self, images: torch.Tensor) -> torch.Tensor:
        """Only normalise: uint8 (batch, height, width, channels) -> float32 (batch, channels, height, width)."""
        return self._normalise(images)

    def images(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Move pixels, change colours, normalise, erase: from uint8 NHWC to float32 NCHW.

        An erased rectangle is of the mean colour. Autocast loses nothing of the pixels.
        """
        pixels = self._colours(self._move(images.permute(0, 3, 1, 2), draws).float(), draws)
        pixels = self._normalise.pixels(pixels)
        if self.settings.erase:
            pixels = pixels * (1 - self._inside(draws[:, _ERASED]))
        return pixels

    def masks(self, masks: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Move masks (batch, height, width) of class numbers 0 to 255 as their images are moved; same dtype."""
        return self._move(masks[:, None], draws)[:, 0].to(masks.dtype)

    def mix(
        self, images: torch.Tensor, targets: torch.Tensor, draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix each image with the one before it in the batch, and its float targets in the same proportion.

        Targets are (batch, outputs), or (batch, outputs, height, width), which are cut where their images are. Mix-up:
        Zhang et al., arXiv:1710.09412; cut-mix: Yun et al., arXiv:1905.04899.
        """
        if not self.settings.mixes:
            return images, targets
        others, other_targets = images.roll(1, 0), targets.roll(1, 0)
        # The share of the own image: 1 in a batch that is cut, and outside the cut in every batch.
        share = draws[:, _SHARE].view(-1, 1, 1, 1)
        if self.settings.cutmix:
            share = share * (1 - self._inside(draws[:, _CUT]))
        own = share if targets.dim() == 4 else share.mean((1, 2, 3)).view(-1, 1)
        return images * share + others * (1 - share), targets * own + other_targets * (1 - own)

    def _move(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Transpose, reverse and shift (batch, channels, height, width); every value stays what it is."""
        settings = self.settings
        if settings.rotate:
            images = torch.where(_flag(draws, _TRANSPOSED), images.transpose(2, 3), images)
        by_rows, by_columns = settings.vertical_flip or settings.rotate, settings.flip or settings.rotate
        if by_rows:
            images = torch.where(_flag(draws, _ROWS_REVERSED), images.flip(2), images)
        if by_columns:
            images = torch.where(_flag(draws, _COLUMNS_REVERSED), images.flip(3), images)
        if settings.shift:
            # A product with one 1 in each row moves values exactly, also in bfloat16, and is what a TPU does best.
            images = _one_hot(self._rows, draws[:, _DOWN]) @ images.float()
            images = images @ _one_hot(self._columns, draws[:, _RIGHT]).transpose(2, 3)
        return images

    def _colours(self, pixels: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Change brightness, contrast (around the image's mean luma) and saturation, in this order, within 0..255."""
        settings = self.settings
        if settings.brightness:
            pixels = pixels * _number(draws, _BRIGHTNESS)
        if settings.contrast:
            centre = self._grey(pixels).mean((1, 2, 3), keepdim=True)
            pixels = centre + (pixels - centre) * _number(draws, _CONTRAST)
        if settings.saturation:
            grey = self._grey(pixels)
            pixels = grey + (pixels - grey) * _number(draws, _SATURATION)
        if settings.brightness or settings.contrast or settings.saturation:
            pixels = pixels.clamp(0, 255)
        return pixels

    def _grey(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels * self._luma).sum(1, keepdim=True) if pixels.shape[1] == 3 else pixels

    def _inside(self, boxes: torch.Tensor) -> torch.Tensor:
        """Return 1 where a pixel's centre lies in its sample's box, 0 elsewhere: float32 (batch, 1, height, width)."""
        rows = _between(self._rows, boxes[:, 0:1], boxes[:, 1:2])
        columns = _between(self._columns, boxes[:, 2:3], boxes[:, 3:4])
        return (rows[:, :, None] & columns[:, None, :])[:, None].float()


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


def _number(draws: torch.Tensor, column: int) -> torch.Tensor:
    return draws[:, column].view(-1, 1, 1, 1)


def _flag(draws: torch.Tensor, column: int) -> torch.Tensor:
    return _number(draws, column) > 0.5


def _between(places: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    centres = (places + 0.5) / len(places)
    return (centres >= low) & (centres < high)


def _one_hot(places: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return float32 (batch, 1, n, n) that moves n rows by `shift`, and reflects them at the border."""
    last = len(places) - 1
    source = (places - shift[:, None]).abs()
    source = last - (last - source).abs()
    return (source[:, :, None] == places).float()[:, None]
