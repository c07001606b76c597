"""The settings of augmentation on the device. Importing this module does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from tpucache.errors import UsageError
from tpucache.options import check_options, option

#: Whether records stay in the device's memory. "auto": if they fit into the memory that the first steps leave free.
ResidentChoice = Literal["auto", "yes", "no"]

_ZOOM: Final = 0.08  # torchvision's default
_MAGNITUDE: Final = 9  # torchvision's default
#: RandAugment's magnitudes go from 0 to this, and TrivialAugment draws one of them: torchvision's defaults.
MOST_MAGNITUDE: Final = 30
#: The largest allowed values of settings; the smallest is 0.
_MOST: Final = {
    **dict.fromkeys(("brightness", "contrast", "saturation", "erase", "grey"), 1),
    **dict.fromkeys(("shift", "blur", "mixup", "cutmix"), math.inf),
    "hue": 0.5,
    "tilt": 45,
    "magnitude": MOST_MAGNITUDE,
    "rand_augment": 8,
}


@dataclass(frozen=True)
class AugmentSettings:
    """The random changes to a training batch; all are off unless given. Raises UsageError for values out of range.

    `shift` is in pixels. For brightness, contrast and saturation, a strength x gives a factor between 1 - x and 1 + x.
    `erase` and `grey` are probabilities. `mixup` and `cutmix` are the alpha of Beta(alpha, alpha); with both, each view
    of a batch gets one of the two at random. `crop` is RandomResizedCrop with torchvision's distribution, and `zoom` is
    the smallest share of the image's area that it keeps. `tilt` is in degrees, `hue` in whole turns of the colour
    circle, and `blur` is the largest standard deviation of a Gaussian in pixels. With `views` above 1, each sample
    takes `views` neighbouring rows of the batch, each with its own random changes. `rand_augment` is RandAugment's
    number of operations and `magnitude` their strength, 0 to 30; `trivial_augment` is TrivialAugmentWide. Both have
    torchvision's operations and distributions, interpolate bilinearly, and fill with black what comes in from outside
    the image.
    """

    flip: bool = option(False, "flip images left to right, each with probability 1/2")
    vertical_flip: bool = option(False, "flip images top to bottom, each with probability 1/2")
    shift: int = option(0, "shift images by up to PIXELS each way; the border is reflected", metavar="PIXELS")
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

    crop: bool = option(
        False, "cut a random part out of each image and enlarge it to the whole, as torchvision's RandomResizedCrop"
    )
    zoom: float = option(_ZOOM, "the smallest share of an image's area that --crop may keep", metavar="MIN")
    tilt: float = option(0.0, "rotate images by up to DEGREES each way", metavar="DEGREES")
    hue: float = option(0.0, "change the hue of images (as in HSV) by up to X of a whole turn each way", metavar="X")
    blur: float = option(
        0.0, "blur images with a Gaussian whose standard deviation is between 0 and X pixels", metavar="X"
    )
    grey: float = option(0.0, "probability that an image loses its colours", metavar="P")
    views: int = option(
        1, "give the model N views of each sample, neighbours in the batch, for contrastive training", metavar="N",
        minimum=1,
    )  # fmt: skip
    rand_augment: int = option(
        0, "RandAugment: change each image by N random operations, one after another", metavar="N", minimum=0
    )
    magnitude: int = option(_MAGNITUDE, "how strong the operations of rand_augment are, 0 to 30", metavar="M")
    trivial_augment: bool = option(
        False, "TrivialAugment: change each image by one random operation of random strength"
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 0 <= value <= most or value == math.inf:
                limits = "at least 0 and finite" if most == math.inf else f"between 0 and {most}"
                raise UsageError(f"{name} is {limits}, not {value}")
        if not 0 < self.zoom <= 1:
            raise UsageError(f"zoom is a share of the area, above 0 and at most 1, not {self.zoom}")
        if self.zoom != _ZOOM and not self.crop:
            raise UsageError("zoom needs a random crop: add crop")
        if self.magnitude != _MAGNITUDE and not self.rand_augment:
            raise UsageError("magnitude needs rand_augment: set rand_augment to the number of operations")
        if self.rand_augment and self.trivial_augment:
            raise UsageError("rand_augment and trivial_augment both choose operations at random: leave one of them out")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with other images of their batch, and their targets in the same proportion."""
        return bool(self.mixup or self.cutmix)

    @property
    def moves(self) -> bool:
        """Whether pixels change their positions."""
        moves = self.flip or self.vertical_flip or self.shift or self.rotate or self.tilt or self.crop
        return bool(moves or self.operations)

    @property
    def operations(self) -> int:
        """The number of random operations that RandAugment or TrivialAugment applies to each image."""
        return 1 if self.trivial_augment else self.rand_augment
