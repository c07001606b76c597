"""Where an image goes when it gets another size, what of its boxes and points is there, and the weights of its pixels.

Coordinates are continuous: pixel i covers [i, i + 1). A box is (left, top, right, bottom).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.types import Array

Fit = Literal["crop", "pad", "stretch"]
Box = tuple[float, float, float, float]


_LOBES: Final = 3  # of Lanczos' filter, to either side
#: What a row holds that is no box.
_NO_BOX: Final = -1


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


def lanczos(length: int, start: float, stop: float, size: int) -> Array:
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


def nearest(start: float, stop: float, count: int, length: int) -> npt.NDArray[np.intp]:
    """Return which pixel, of `length`, lies under the middle of each of `count` equal steps from start to stop."""
    middles = start + (np.arange(count) + 0.5) * ((stop - start) / count)
    return np.asarray(np.clip(np.floor(middles), 0, length - 1), np.intp)


def fill_boxes(boxes: Array, rows: int) -> npt.NDArray[np.float32]:
    """Return boxes (n, 5) as float32 (rows, 5), rows of -1 after the last."""
    filled = np.full((rows, 5), _NO_BOX, np.float32)
    filled[: len(boxes)] = boxes
    return filled


def clip_boxes(boxes: Array, area: tuple[float, float, float, float]) -> npt.NDArray[np.float32]:
    """Return boxes (n, 5) clipped to left, top, right, bottom, without those of which nothing is left."""
    clipped = boxes.astype(np.float32)
    clipped[:, 0:4:2] = clipped[:, 0:4:2].clip(area[0], area[2])
    clipped[:, 1:4:2] = clipped[:, 1:4:2].clip(area[1], area[3])
    return clipped[(clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])]


def within(
    points: Array, area: tuple[float, float, float, float], flipped: tuple[bool, ...] = (False, False)
) -> npt.NDArray[np.bool_]:
    """Return which points x, y (n, 2) lie in left, top, right, bottom.

    Of two edges the right and bottom ones lie outside, or the others where that axis was `flipped`.
    """
    low, high = np.array(area[:2]), np.array(area[2:])
    inside = np.where(flipped, (points > low) & (points <= high), (points >= low) & (points < high))
    return np.asarray(inside.all(axis=1))


def mark_points(
    points: Array, visible: npt.NDArray[np.bool_], area: tuple[float, float, float, float]
) -> npt.NDArray[np.float32]:
    """Return points x, y (n, 2) as rows of a record: float32 (n, 3) of x, y and 1 or 0.

    Visible ones on the right or bottom edge of left, top, right, bottom come just before it, so that the pixel that a
    visible point lies in is always there.
    """
    last = np.nextafter(np.array(area[2:], np.float32), np.float32(0))
    placed = np.where(visible[:, None], np.minimum(points, last), points)
    return np.column_stack([placed, visible]).astype(np.float32)
