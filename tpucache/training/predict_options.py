"""The options of prediction: the views of images, and how predictions are averaged.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tpucache.errors import UsageError
from tpucache.options import check_options, option

Crops = Literal["none", "five"]
Average = Literal["probability", "rank"]
RunWeights = Literal["equal", "score"]

#: The side of a crop is this share of the image's side: 224 of 256 pixels (Krizhevsky et al., 2012).
CROP_SHARE: Final = 7 / 8
#: The largest number of sizes. All views of an image are in one XLA graph, which should not become too large.
_MOST_SIZES: Final = 8
_LEAST_SIZE: Final = 8


@dataclass(frozen=True)
class PredictOptions:
    """The views in which images are predicted, and how predictions of several runs are averaged.

    `sizes` are lengths of an image's shorter side in pixels; without them an image has the size of the run's
    evaluation. `average="rank"` concerns only the average over runs: the views of one run are averaged by value, and so
    are `logits` and `features`. Raises UsageError for values that are not possible.
    """

    flip_tta: bool = option(False, "average with the predictions of images that are mirrored left to right")
    crops: Crops = option(
        "none", "five: average over crops in the corners and the middle, each 7/8 as high and wide as the image"
    )
    sizes: Sequence[int] = ()
    average: Average = option(
        "probability", "rank: average the ranks that each run gives to the samples, class by class"
    )
    run_weights: RunWeights = option(
        "equal", "score: weight each run, and each fold of a run of folds, by its validation score"
    )
    logits: bool = option(
        False, "also write each run's outputs before they become probabilities: out_logits.npy for out.csv"
    )
    features: bool = option(False, "also write the input of each run's last layer: out_features.npy for out.csv")

    def __post_init__(self) -> None:
        check_options(self)
        sizes = tuple(self.sizes)
        if odd := [size for size in sizes if not _is_size(size)]:
            raise UsageError(f"sizes are whole numbers of pixels, at least {_LEAST_SIZE}, not {odd[0]!r:.40}")
        if len(sizes) > _MOST_SIZES or len({*sizes}) < len(sizes):
            raise UsageError(f"sizes are at most {_MOST_SIZES} different numbers, not {', '.join(map(str, sizes)):.80}")
        object.__setattr__(self, "sizes", sizes)

    @property
    def resamples(self) -> bool:
        """Whether some views are cropped or resized, and not only mirrored."""
        return self.crops != "none" or bool(self.sizes)

    @property
    def views(self) -> int:
        """The number of views of each image."""
        return (5 if self.crops == "five" else 1) * max(1, len(self.sizes)) * (2 if self.flip_tta else 1)

    @property
    def view_names(self) -> list[str]:
        """The names of the command-line options by which views were chosen."""
        asked = {"--flip-tta": self.flip_tta, "--crops": self.crops != "none", "--sizes": bool(self.sizes)}
        return [name for name, is_asked in asked.items() if is_asked]

    def largest(self, learned: tuple[int, int]) -> int:
        """Return how long the shorter side of an image must be, in pixels, so that no view enlarges the image.

        `learned` has the height and width of the images that the model was evaluated on.
        """
        size = max(self.sizes, default=min(learned))
        return size if self.crops == "none" else math.ceil(size / CROP_SHARE)


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= _LEAST_SIZE
