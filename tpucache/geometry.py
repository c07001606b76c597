"""Where an image goes when it gets another size, and the weights of its pixels there: numbers alone, no pixels.

Coordinates are continuous: pixel i covers [i, i + 1). A box is (left, top, right, bottom).
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Fit = Literal["crop", "pad", "stretch"]
Box = tuple[float, float, float, float]

_LOBES: Final = 3  # of Lanczos' filter, to either side


class Placement(NamedTuple):
    """How an image gets its size: which box (left, top, right, bottom) is resized, to what (width, height)."""

    box: Box
    size: tuple[int, int]


def placement(box: Box, target: tuple[int, int], fit: Fit) -> Placement:
    """Return how the image area `box` is resized to `target` (width, height).

    The geometry is that of Pillow's `ImageOps.fit` (crop) and `ImageOps.pad`, so the crop is to the sub-pixel.
    """
    width, height = box[2] - box[0], box[3] - box[1]
    if fit == "stretch":
        return Placement(box, target)
    if fit == "pad":
        scale = min(target[0] / width, target[1] / height)
        size = (
            min(target[0], max(1, round(width * scale))),
            min(target[1], max(1, round(height * scale))),
        )
        return Placement(box, size)
    kept = min(width / target[0], height / target[1])
    crop = (kept * target[0], kept * target[1])
    # Clamped, because kept * target may round to a little more than the side it came from.
    left, top = max(box[0], box[0] + (width - crop[0]) / 2), max(box[1], box[1] + (height - crop[1]) / 2)
    right, bottom = min(box[2], left + crop[0]), min(box[3], top + crop[1])
    return Placement((left, top, right, bottom), target)


def margins(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """Return the columns to the left and the rows above an image of `size` on a `canvas`, (width, height) both."""
    return round((canvas[0] - size[0]) / 2), round((canvas[1] - size[1]) / 2)


def lanczos(length: int, start: float, stop: float, size: int) -> npt.NDArray[Any]:
    """Return float64 (size, length): the weights by which Pillow's Lanczos resizes [start, stop) of a side.

    Made smaller, the filter is as much wider, so that nothing aliases. Each row adds up to 1. After Pillow's
    `precompute_coeffs` (Resample.c).
    """
    scale = (stop - start) / size
    wide = max(scale, 1.0)
    centres = start + (np.arange(size) + 0.5) * scale
    first = np.maximum(0, np.floor(centres - _LOBES * wide + 0.5))
    last = np.minimum(length, np.floor(centres + _LOBES * wide + 0.5))
    places = np.arange(length)
    distances = (places - centres[:, None] + 0.5) / wide
    weights = np.sinc(distances) * np.sinc(distances / _LOBES) * (abs(distances) < _LOBES)
    weights *= (places >= first[:, None]) & (places < last[:, None])
    return np.asarray(weights / weights.sum(1, keepdims=True))
