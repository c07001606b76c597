"""The random operations of RandAugment and TrivialAugment, as numbers that are drawn on the host for each image.

An operation is a row of numbers; each number that it does not use has a value that changes nothing. So one graph does
all operations, and the device never chooses between them. Operations and magnitudes are those of torchvision's
`RandAugment` (arXiv:1909.13719) and `TrivialAugmentWide` (arXiv:2103.10158).
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache.native import Array
from tpucache.ondevice.settings import MOST_MAGNITUDE, AugmentSettings

# The columns of the numbers that describe one operation.
TRANSPOSED, ROWS_REVERSED, COLUMNS_REVERSED = range(3)
ROW_SLOPE, ROW_START = 3, 4  # row y is read ROW_START + ROW_SLOPE * (y - centre) columns to the right
COLUMN_SLOPE, COLUMN_START = 5, 6  # then each column in the same way, downwards
LAST_SLOPE: Final = 7  # then the rows again
KEPT: Final = 8  # the weight of the image, which is mixed with black, or with one of the next three:
GREY, MEAN, SMOOTH = 9, 10, 11
QUANTUM: Final = 12  # for posterize: pixels become multiples of this value
THRESHOLD: Final = 13  # for solarize: pixels from this value on are inverted
STRETCHED, EQUALIZED = 14, 15
COLUMNS: Final = 16

OPERATIONS: Final = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
_SIGNED: Final = OPERATIONS[1:10]
_LAST: Final = OPERATIONS.index("Equalize")
#: Of this many neighbouring images, at most one is equalized.
GROUP: Final = 8
_NEUTRAL: Final = {KEPT: 1, QUANTUM: 1, THRESHOLD: 256}
#: An image that turns by more than this angle is first turned by a right angle.
_MOST_TILT: Final = 45.0


class LargestMagnitudes(NamedTuple):
    """The largest magnitude of each kind of operation, for RandAugment or for TrivialAugment.

    `shear` is a slope, `across` and `down` are translations in pixels, and `rotation` is in degrees. `blend` is how far
    brightness, colour, contrast and sharpness change an image: 1 would be completely. `bits` is how many of 8 bits
    posterize clears.
    """

    shear: float
    across: float
    down: float
    rotation: float
    blend: float
    bits: int

    def of(self, operation: str) -> Array:
        """Return an operation's magnitudes at the strengths 0 to MOST_MAGNITUDE: torchvision's 31 bins."""
        if operation == "Posterize":
            return np.rint(8 - np.arange(MOST_MAGNITUDE + 1) * self.bits / MOST_MAGNITUDE)
        if operation == "Solarize":
            return _even(1.0, 0.0)
        largest = {
            "ShearX": self.shear, "ShearY": self.shear, "TranslateX": self.across, "TranslateY": self.down,
            "Rotate": self.rotation,
        }  # fmt: skip
        return _even(0.0, largest.get(operation, self.blend))


class Reach(NamedTuple):
    """The largest distances, in pixels, by which the three shears of an image move its pixels.

    The first shear moves rows by up to `rows`, the second moves columns by up to `columns`, and the third moves rows
    again, by up to `last`. `side` is the side of the square in which images rotate; it is 0 if they rotate within their
    own size.
    """

    rows: int
    columns: int
    last: int
    side: int


def largest_magnitudes(settings: AugmentSettings, height: int, width: int) -> LargestMagnitudes:
    """Return the largest magnitudes of RandAugment or TrivialAugment for images of this size in pixels."""
    if settings.trivial_augment:
        return LargestMagnitudes(0.99, 32.0, 32.0, 135.0, 0.99, 6)
    return LargestMagnitudes(0.3, 150.0 / 331.0 * width, 150.0 / 331.0 * height, 30.0, 0.9, 4)


def reach_of(settings: AugmentSettings, height: int, width: int) -> Reach:
    """Return the largest distances by which the operations of these settings move pixels in images of this size."""
    largest = largest_magnitudes(settings, height, width)
    number = MOST_MAGNITUDE if settings.trivial_augment else settings.magnitude
    shear, across, down, rotation = (
        largest.of(name)[number] for name in ("ShearX", "TranslateX", "TranslateY", "Rotate")
    )
    side = max(height, width) if rotation > _MOST_TILT else 0
    angle = math.radians(min(rotation, _MOST_TILT))
    rows, columns = (side, side) if side else (height, width)
    last = math.ceil(math.tan(angle / 2) * rows / 2)
    return Reach(
        math.ceil(max(shear * height, across, last + 2)) if number else 0,
        math.ceil(max(shear * width, down, math.sin(angle) * (columns / 2 + last) + 2)) if number else 0,
        last,
        side,
    )


def draw_operations(settings: AugmentSettings, uniform: Array, size: tuple[int, int]) -> Array:
    """Return the numbers that describe each image's operations, float64 (batch, operations x COLUMNS).

    `uniform` are random numbers between 0 and 1, (batch, operations, 4). All operations are equally likely. But of
    GROUP neighbouring images at most one is equalized, because that costs a device as much as all other operations.
    """
    batch, count, _ = uniform.shape
    chosen = (uniform[..., 0] * _LAST).astype(int)
    # In each group, the last number of the first image says which image is equalized, or that none is.
    equalized = (uniform[::GROUP, :, 3] * len(OPERATIONS)).astype(int)
    places = np.arange(batch)
    chosen = np.where(equalized[places // GROUP] == (places % GROUP)[:, None], _LAST, chosen)
    number = np.full((batch, count), settings.magnitude)
    if settings.trivial_augment:
        number = (uniform[..., 1] * (MOST_MAGNITUDE + 1)).astype(int)
    sign = np.where(uniform[..., 2] < 0.5, -1, 1)
    return numbers_of(settings, chosen, number, sign, size).reshape(batch, count * COLUMNS)


def numbers_of(settings: AugmentSettings, chosen: Array, number: Array, sign: Array, size: tuple[int, int]) -> Array:
    """Return the numbers (..., COLUMNS) that describe operations.

    `chosen` has the index of each operation in OPERATIONS, `number` its strength, from 0 to MOST_MAGNITUDE, and `sign`
    its sign, 1 or -1; all three have the shape (...). `size` is the images' height and width.
    """
    largest, reach = largest_magnitudes(settings, *size), reach_of(settings, *size)
    found = np.zeros((*chosen.shape, COLUMNS))
    for column, neutral in _NEUTRAL.items():
        found[..., column] = neutral
    for at, operation in enumerate(OPERATIONS):
        here = chosen == at
        magnitude = largest.of(operation)[number[here]]
        if operation in _SIGNED:
            magnitude = magnitude * sign[here]
        for column, values in _numbers(operation, magnitude, size, reach.side).items():
            found[here, column] = values
    return found


def _numbers(operation: str, magnitude: Array, size: tuple[int, int], side: int) -> dict[int, Any]:
    """Return the numbers that describe an operation, by column: for each column, one number or one per magnitude.

    `magnitude` is (n,), `size` the images' height and width, and `side` that of the square in which images rotate, or
    0. Columns that the operation does not use are left out.
    """
    height, width = size
    # The distance between the centres of the image and of the square in which it turns.
    down, across = ((side - each) // 2 - (side - each) / 2 if side else 0.0 for each in size)
    if operation == "Rotate":
        return _rotation(magnitude, down, across)
    found: dict[str, dict[int, Any]] = {
        # Shears keep the upper left corner in place, as Pillow's do.
        "ShearX": {ROW_SLOPE: magnitude, ROW_START: magnitude * (height / 2 - down)},
        "ShearY": {COLUMN_SLOPE: magnitude, COLUMN_START: magnitude * (width / 2 - across)},
        "TranslateX": {ROW_START: -np.trunc(magnitude)},
        "TranslateY": {COLUMN_START: -np.trunc(magnitude)},
        "Brightness": {KEPT: 1 + magnitude},
        "Color": {KEPT: 1 + magnitude, GREY: 1},
        "Contrast": {KEPT: 1 + magnitude, MEAN: 1},
        "Sharpness": {KEPT: 1 + magnitude, SMOOTH: 1},
        "Posterize": {QUANTUM: 2.0 ** (8 - np.rint(magnitude))},
        "Solarize": {THRESHOLD: np.ceil(np.round(255 * magnitude, 6))},
        "AutoContrast": {STRETCHED: 1},
        "Equalize": {EQUALIZED: 1},
    }
    return found.get(operation, {})


def _rotation(degrees: Array, down: float, across: float) -> dict[int, Array]:
    """Return the numbers, by column, that describe rotations by `degrees` (n,): one number for each rotation.

    An image rotates around a point that is `down` and `across` pixels off its centre. If `degrees` are beyond 45 or
    -45, the image turns by a right angle first. Three shears turn it by the rest.
    """
    turn = np.where(np.abs(degrees) > _MOST_TILT, np.sign(degrees), 0)
    tilt = np.radians(degrees - 90 * turn)
    slope, sine, cosine = np.tan(tilt / 2), np.sin(tilt), np.cos(tilt)
    # The position to which the turn moves the point, minus the position to which the shears would move it.
    x, y = np.where(turn, turn * down, across), np.where(turn, -turn * across, down)
    x, y = x - cosine * across + sine * down, y - sine * across - cosine * down
    return {
        TRANSPOSED: np.abs(turn), ROWS_REVERSED: turn > 0, COLUMNS_REVERSED: turn < 0,
        ROW_SLOPE: -slope, ROW_START: x + slope * y, COLUMN_SLOPE: sine, COLUMN_START: y, LAST_SLOPE: -slope,
    }  # fmt: skip


def _even(first: float, last: float) -> Array:
    """Return MOST_MAGNITUDE + 1 evenly spaced magnitudes from `first` to `last`, rounded so that integers are exact.

    Torchvision's magnitudes are float32: there a translation of 16 pixels is 15.99, and moves pixels only by 15.
    """
    return np.round(np.linspace(first, last, MOST_MAGNITUDE + 1), 9)
