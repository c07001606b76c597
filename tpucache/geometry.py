"""Geometry of images that are resized or turned: the positions of pixels, boxes and points, and the weights of pixels.

Coordinates are continuous: pixel i covers [i, i + 1). A box is (left, top, right, bottom).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.native import Array

Fit = Literal["crop", "pad", "stretch"]
Coordinates = Literal["displayed", "stored"]
Box = tuple[float, float, float, float]

_SCALED_DECODE_FACTOR: Final = 2
_LOBES: Final = 3  # of Lanczos' filter, to either side


class Placement(NamedTuple):
    """How an image is resized: its part `box` (left, top, right, bottom) becomes `size` (width, height) pixels."""

    box: Box
    size: tuple[int, int]


def placement(box: Box, target: tuple[int, int], fit: Fit) -> Placement:
    """Return which part of an image is resized, and to which size, so that it fits `target` (width, height).

    `box` (left, top, right, bottom) is the area of the image that may be used. The geometry is that of Pillow's
    `ImageOps.fit` (crop) and `ImageOps.pad`, so a crop may begin within a pixel.
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
    (left, right), (top, bottom) = (_middle(box[axis], box[axis + 2], kept * target[axis]) for axis in (0, 1))
    return Placement((left, top, right, bottom), target)


def _middle(start: float, stop: float, length: float) -> tuple[float, float]:
    first = max(start, start + (stop - start - length) / 2)  # the length may be rounded to slightly more than the side
    return first, min(stop, first + length)


def margins(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """Return the columns left of an image, and the rows above it, in a canvas's middle; sizes are (width, height)."""
    return round((canvas[0] - size[0]) / 2), round((canvas[1] - size[1]) / 2)


def lanczos(length: int, start: float, stop: float, size: int) -> Array:
    """Return the weights of Pillow's Lanczos filter for one side of an image: float64 (size, length).

    The part from `start` to `stop` of a side of `length` pixels is resized to `size` pixels. Row i has the weight of
    each input pixel in output pixel i, and adds up to 1. If the image becomes smaller, the filter is wider in
    proportion, so that nothing aliases (Pillow's `precompute_coeffs`, Resample.c).
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
    """Return the pixels, from 0 to `length` - 1, in the middle of `count` equal steps from `start` to `stop`."""
    middles = start + (np.arange(count) + 0.5) * ((stop - start) / count)
    return np.asarray(np.clip(np.floor(middles), 0, length - 1), np.intp)


def fill_boxes(boxes: Array, rows: int) -> npt.NDArray[np.float32]:
    """Return boxes (n, 5) of left, top, right, bottom, class as float32 (rows, 5); rows after the last box are -1."""
    filled = np.full((rows, 5), -1, np.float32)
    filled[: len(boxes)] = boxes
    return filled


def clip_boxes(boxes: Array, area: Box) -> npt.NDArray[np.float32]:
    """Return boxes (n, 5) clipped to `area` (left, top, right, bottom); boxes outside of the area are left out."""
    clipped = boxes.astype(np.float32)
    clipped[:, :4] = clipped[:, :4].clip(area[:2] * 2, area[2:] * 2)
    return clipped[(clipped[:, 2:4] > clipped[:, :2]).all(axis=1)]


def within(points: Array, area: Box, flipped: tuple[bool, ...] = (False, False)) -> npt.NDArray[np.bool_]:
    """Return which points x, y (n, 2) lie in `area` (left, top, right, bottom): bool (n,).

    The left and the top edge belong to the area. Where the image was `flipped` along x or y, the right or the bottom
    edge does instead.
    """
    low, high = np.array(area[:2]), np.array(area[2:])
    inside = np.where(flipped, (points > low) & (points <= high), (points >= low) & (points < high))
    return np.asarray(inside.all(axis=1))


def mark_points(points: Array, visible: npt.NDArray[np.bool_], area: Box) -> npt.NDArray[np.float32]:
    """Return keypoints x, y (n, 2) as a record stores them: float32 (n, 3), with 1 for a visible point, or 0.

    Visible points on the right or bottom edge of `area` (left, top, right, bottom) move just inside it, into an
    existing pixel.
    """
    last = np.nextafter(np.array(area[2:], np.float32), np.float32(0))
    placed = np.where(visible[:, None], np.minimum(points, last), points)
    return np.column_stack([placed, visible]).astype(np.float32)


class Turn(NamedTuple):
    """The operations by which an EXIF orientation turns the stored pixels.

    First `swap` exchanges height and width, then `flip_x` reverses the columns and `flip_y` the rows.
    """

    swap: bool = False
    flip_x: bool = False
    flip_y: bool = False


#: For each EXIF orientation, the turn from the stored to the displayed image.
TURNS: Final = {
    1: Turn(),
    2: Turn(flip_x=True),
    3: Turn(flip_x=True, flip_y=True),
    4: Turn(flip_y=True),
    5: Turn(swap=True),
    6: Turn(swap=True, flip_x=True),
    7: Turn(swap=True, flip_x=True, flip_y=True),
    8: Turn(swap=True, flip_y=True),
}


def turn(pixels: Array, by: Turn) -> Array:
    """Return a view of `pixels` (height, width, …), turned by `by`."""
    turned = pixels.swapaxes(0, 1) if by.swap else pixels
    return turned[:: -1 if by.flip_y else 1, :: -1 if by.flip_x else 1]


def turn_back(pixels: Array, by: Turn) -> Array:
    """Undo `turn`: return a view of the turned `pixels` (height, width, …) that shows them as before the turn."""
    flipped = turn(pixels, by._replace(swap=False))
    return flipped.swapaxes(0, 1) if by.swap else flipped


def turn_points(points: Array, by: Turn, stored: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Return where points x, y (n, 2) of an image of (width, height) `stored` lie after its turn: float64 (n, 2)."""
    swapped, size = (points[:, ::-1], stored[::-1]) if by.swap else (points, stored)
    return np.where(by[1:], np.subtract(size, swapped), swapped).astype(np.float64)


def framing_of(stored: tuple[int, int], orientation: int, canvas: tuple[int, int], fit: Fit) -> Framing:
    """Return the Framing of a source image, with its EXIF orientation from 1 to 8."""
    turned = TURNS[orientation]
    whole = (0.0, 0.0, float(stored[0]), float(stored[1]))
    place = placement(whole, canvas[::-1] if turned.swap else canvas, fit)
    return Framing(stored, place.box, place.size, turned, canvas)


@dataclass(frozen=True)
class Framing:
    """How a source image becomes a record's image: the part `box` is resized to `size`, turned, and put on a canvas.

    `stored` is the (width, height) of the source image as stored, and `box` is (left, top, right, bottom) in it. `size`
    (before the turn) and `canvas` are (width, height). `turn` follows from the EXIF orientation.
    """

    stored: tuple[int, int]
    box: Box
    size: tuple[int, int]
    turn: Turn
    canvas: tuple[int, int]

    @property
    def area(self) -> tuple[int, int, int, int]:
        """The image's left, top, right and bottom on the canvas; the rest of the canvas is padding."""
        width, height = self.size[::-1] if self.turn.swap else self.size
        left, top = margins((width, height), self.canvas)
        return left, top, left + width, top + height

    def stored_as(self, coordinates: Coordinates) -> tuple[int, int]:
        """Return the source image's (width, height): as stored, or as displayed if `coordinates` is "displayed"."""
        return self.stored[::-1] if self.turn.swap and coordinates == "displayed" else self.stored

    def is_of(self, size: tuple[int, int], coordinates: Coordinates) -> bool:
        """Return whether the source image has the size `size` (width, height) in `coordinates`, to within a pixel."""
        own = self.stored_as(coordinates)
        return max(abs(size[0] - own[0]), abs(size[1] - own[1])) <= 1

    def least(self) -> tuple[int, int]:
        """Return the smallest (width, height) at which the whole image may be decoded: twice what the resize needs."""
        shares = self.size[0] / (self.box[2] - self.box[0]), self.size[1] / (self.box[3] - self.box[1])
        width, height = (
            math.ceil(s * share * _SCALED_DECODE_FACTOR) for s, share in zip(self.stored, shares, strict=True)
        )
        return width, height

    def place(self, resized: Array) -> Array:
        """Turn resized pixels (height, width, …), and return them in the middle of a canvas of zeros."""
        turned = turn(resized, self.turn)
        if turned.shape[:2] == self.canvas[::-1]:
            return np.ascontiguousarray(turned)
        canvas = np.zeros((*self.canvas[::-1], *resized.shape[2:]), resized.dtype)
        left, top, right, bottom = self.area
        canvas[top:bottom, left:right] = turned
        return canvas

    def nearest(self, pixels: Array) -> Array:
        """Resize the stored image (height, width, …) to the nearest pixels, and return it on the canvas."""
        columns = nearest(self.box[0], self.box[2], self.size[0], self.stored[0])
        rows = nearest(self.box[1], self.box[3], self.size[1], self.stored[1])
        return self.place(pixels[rows[:, None], columns])

    def points(self, points: Array, coordinates: Coordinates = "stored") -> npt.NDArray[np.float64]:
        """Return where points x, y (n, 2) of the image, as stored or displayed, lie on the canvas: float64 (n, 2)."""
        if coordinates == "displayed":
            return self._displayed().points(points)
        left, top, right, bottom = self.box
        scale = np.array([self.size[0] / (right - left), self.size[1] / (bottom - top)])
        moved = (np.asarray(points, np.float64) - (left, top)) * scale
        return np.asarray(turn_points(moved, self.turn, self.size) + self.area[:2])

    def _displayed(self) -> Framing:
        """Return the framing of the displayed image that gives the same result as this framing of the stored image."""
        corners = turn_points(np.reshape(self.box, (2, 2)), self.turn, self.stored)
        (left, top), (right, bottom) = corners.min(axis=0).tolist(), corners.max(axis=0).tolist()
        stored, size = (self.stored[::-1], self.size[::-1]) if self.turn.swap else (self.stored, self.size)
        return Framing(stored, (left, top, right, bottom), size, Turn(), self.canvas)
