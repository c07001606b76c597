"""The size of the images in each epoch of a run. Importing this module does not import torch."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tpucache.errors import UsageError

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

_STEP: Final = 32  # sizes are multiples of this, in pixels: most networks halve an image five times
_MOST: Final = 4  # sizes, at most: XLA compiles a graph for each size
_GROWING: Final = re.compile(r"(\d+)(?::([\d.]+))?")


@dataclass(frozen=True)
class ImageSizes:
    """The side of the images in pixels, in each epoch (`epochs`) and in evaluations (`valid`).

    None stands for the size of the dataset's images.
    """

    epochs: tuple[int | None, ...]
    valid: int | None

    def at(self, epoch: int) -> int | None:
        """Return the size in an epoch, counted from 0; later epochs have the size of the last planned epoch."""
        return self.epochs[min(epoch, len(self.epochs) - 1)]

    @property
    def is_one(self) -> bool:
        return {*self.epochs} == {self.valid}


@functools.lru_cache(maxsize=16)  # called in each step
def plan_sizes(
    epochs: int, size: int | None = None, grow: str | None = None, valid_size: int | None = None
) -> ImageSizes:
    """Return the image sizes of a run of `epochs` epochs.

    `grow` is a text such as "128:0.4,176:0.7,224": 128 pixels in the first 40 % of the epochs, then 176 until 70 %, and
    224 until the end.
    """
    if size is not None and grow is not None:
        raise UsageError("--size and --grow both say how large images are: leave one of them out")
    steps = [(size, 1.0)] if grow is None else _steps(grow)
    planned = [
        next(each for each, share in steps if epoch < round(share * epochs) or share == 1.0) for epoch in range(epochs)
    ]
    valid = valid_size if valid_size is not None else steps[-1][0]
    return ImageSizes(tuple(planned), valid)


def _steps(grow: str) -> list[tuple[int | None, float]]:
    wrong = f"--grow is such as 128:0.4,176:0.7,224, not {grow!r:.60}: "
    parts = [_GROWING.fullmatch(part.strip()) for part in grow.split(",")]
    if not all(parts):
        raise UsageError(f"{wrong}write SIZE:SHARE for each size but the last; it ends after this share of the epochs")
    found = [(int(part[1]), part[2]) for part in parts if part]
    if found[-1][1] is not None or any(share is None for _, share in found[:-1]):
        raise UsageError(f"{wrong}each size but the last has a share, and the last has none")
    try:
        shares = [float(share) for _, share in found[:-1] if share is not None]
    except ValueError:
        raise UsageError(f"{wrong}a share is a number from 0 to 1") from None
    if shares != sorted(set(shares)) or any(not 0 < share < 1 for share in shares):
        raise UsageError(f"{wrong}shares ascend, and each is above 0 and below 1")
    if len(found) > _MOST:
        raise UsageError(f"{wrong}at most {_MOST} sizes, as XLA compiles a graph for each")
    if odd := [side for side, _ in found if side % _STEP or not side]:
        raise UsageError(f"{wrong}sizes are multiples of {_STEP}, and {odd[0]} is not")
    return [(side, share) for (side, _), share in zip(found, [*shares, 1.0], strict=True)]


def own_size(dataset: CachedDataset) -> int:
    from tpucache.store.fields import IMAGE

    image = next(field for field in dataset.manifest.fields if field.name == IMAGE)
    height, width = image.shape[:2]
    if height != width:
        raise UsageError(
            f"--valid-size makes square images, and the images of {dataset.directory} are {width}x{height} pixels: say "
            "by --size how large training images are"
        )
    return int(height)


def in_size(dataset: CachedDataset, size: int | None) -> CachedDataset:
    """Return a dataset whose images have `size` pixels a side; for None return `dataset` itself."""
    if size is None:
        return dataset
    from tpucache.store.codecs import CODECS, FREQUENCY_CODECS
    from tpucache.store.fields import IMAGE

    image = next((field for field in dataset.manifest.fields if field.name == IMAGE), None)
    if image is not None and not CODECS[image.codec].has_frequencies:
        raise UsageError(
            f"images of {image.codec} have one size, here {image.shape[1]}x{image.shape[0]} pixels; only "
            f"{' and '.join(FREQUENCY_CODECS)} give any size: to train at {size} pixels, warm up with "
            f"`--codec dct-lz4`, or with `--size {size}`"
        )
    return dataset.in_resolution(size)
