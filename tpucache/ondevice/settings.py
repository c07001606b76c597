"""Which augmentations the device makes. Importing this does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpucache.errors import UsageError
from tpucache.option_fields import option


@dataclass(frozen=True)
class AugmentSettings:
    """The random changes to a training batch; all are off unless given. Raises UsageError.

    `shift` is in pixels. The strength x of brightness, contrast and saturation gives a factor between 1 - x and 1 + x.
    `erase` is a probability. `mixup` and `cutmix` are alphas of Beta(alpha, alpha); with both, each batch gets one of
    them, by a coin.
    """

    flip: bool = option(False, "flip images left to right, each with probability 1/2")
    vertical_flip: bool = option(False, "flip images top to bottom, each with probability 1/2")
    shift: int = option(0, "shift images by up to so many pixels each way; the border is reflected", metavar="PIXELS")
    rotate: bool = option(False, "rotate square images by a multiple of 90 degrees")
    brightness: float = option(0.0, "multiply brightness by a factor between 1 - X and 1 + X", metavar="X")
    contrast: float = option(0.0, "multiply contrast by a factor between 1 - X and 1 + X", metavar="X")
    saturation: float = option(0.0, "multiply saturation by a factor between 1 - X and 1 + X", metavar="X")
    erase: float = option(
        0.0, "probability that a random rectangle of an image is replaced by the mean colour", metavar="P"
    )
    mixup: float = option(0.0, "mixup: blend pairs of images, with shares from Beta(ALPHA, ALPHA)", metavar="ALPHA")
    cutmix: float = option(
        0.0, "CutMix: paste a rectangle of one image into another, its area from Beta(ALPHA, ALPHA)", metavar="ALPHA"
    )

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise UsageError(f"shift is in pixels, at least 0, not {self.shift}")
        for name in ("brightness", "contrast", "saturation", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} lies between 0 and 1, not at {getattr(self, name)}")
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is an alpha, at least 0, not {getattr(self, name)}")

    @property
    def mixes(self) -> bool:
        """Whether images, and so their targets, are mixed with others."""
        return bool(self.mixup or self.cutmix)

    @property
    def moves(self) -> bool:
        """Whether pixels change their places."""
        return bool(self.flip or self.vertical_flip or self.shift or self.rotate)
