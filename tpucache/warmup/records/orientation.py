"""Turn: an EXIF orientation as what is done to pixels and points."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Turn(NamedTuple):
    """An EXIF orientation as what is done to the stored pixels: axes swapped first, then each perhaps flipped."""

    swap: bool = False
    flip_x: bool = False
    flip_y: bool = False


#: The turn from the stored to the displayed image by EXIF orientation.
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
    """Return pixels (height, width, …) turned: a view of them, not a copy."""
    turned = pixels.swapaxes(0, 1) if by.swap else pixels
    return turned[:: -1 if by.flip_y else 1, :: -1 if by.flip_x else 1]


def turn_back(pixels: Array, by: Turn) -> Array:
    """Return turned pixels (height, width, …) as they were stored: a view of them, not a copy."""
    flipped = turn(pixels, by._replace(swap=False))
    return flipped.swapaxes(0, 1) if by.swap else flipped


def turn_points(points: Array, by: Turn, stored: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Return where points x, y (n, 2) of a stored image (width, height) lie once it is turned: float64 (n, 2)."""
    swapped, size = (points[:, ::-1], stored[::-1]) if by.swap else (points, stored)
    return np.where(by[1:], np.subtract(size, swapped), swapped).astype(np.float64)
