"""JPEG files decoded by simplejpeg, at the smallest scale that is large enough."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

SCALES: Final = 8  # of libjpeg: an eighth of the size, two eighths, ...


def decode_jpeg(
    data: bytes, size: tuple[int, int], least: tuple[int, int] | None, is_grey: bool
) -> tuple[npt.NDArray[np.uint8], float] | None:
    """Return a JPEG's pixels, (height, width) if `is_grey`, else RGB (height, width, 3), and their scale.

    `size` is the file's (width, height), `least` the one that it must at least be decoded at; None is in full. Returns
    None where simplejpeg is not installed or finds anything odd, on which Pillow has to decide.
    """
    simplejpeg = find_simplejpeg()
    if simplejpeg is None:
        return None
    eighths = _eighths(size, least)
    width, height = (math.ceil(side * eighths / SCALES) for side in size)
    try:
        pixels = simplejpeg.decode_jpeg(data, "GRAY" if is_grey else "RGB", min_height=height, min_width=width)
    except ValueError:
        return None
    if pixels.shape[:2] != (height, width):
        return None
    return pixels[..., 0] if is_grey else pixels, eighths / SCALES


def _eighths(size: tuple[int, int], least: tuple[int, int] | None) -> int:
    """Return the smallest of libjpeg's scales, in eighths, at which an image has at least `least` (width, height)."""
    if least is None or max(size) < SCALES:  # so small that two scales can have the same size
        return SCALES
    fitting = (
        eighths
        for eighths in range(1, SCALES)
        if all(side * eighths >= wanted * SCALES for side, wanted in zip(size, least, strict=True))
    )
    return next(fitting, SCALES)


@functools.cache
def find_simplejpeg() -> Any:
    """Return simplejpeg, or None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
