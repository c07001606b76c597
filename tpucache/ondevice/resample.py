"""Rotation, crops and blur of whole batches, by matrix multiplications and shifts of fixed lengths.

A TPU has no fast gather, so nothing is gathered. A crop and a blur are separable: they multiply by a matrix for rows
and by a matrix for columns. A rotation is three shears (Paeth, "A fast algorithm for general raster rotation", 1986). A
shear is a series of shifts by fixed lengths, each half as long as the one before. Each row takes part in the shifts
that add up to its own distance. On XLA's CPU client, 224x224 pixels of three channels took 3.6 ms to crop and 2.1 ms to
rotate. Gathers, which a CPU does well, took 0.5 and 1.3 ms; shears as multiplications by a matrix for each row took 23
times as long as the shifts.

A TPU rounds the operands of matrix multiplications to bfloat16, and every device adds in another order. So that all
give the same bytes, positions are rounded to 1/256 of a pixel in a crop and to 1/32 in a rotation (as in OpenCV's
warpAffine). Then all operands are exact in bfloat16, and all sums of bytes in float32.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.ondevice.arrays import Array, ArrayLibrary

_CROP_STEPS: Final = 256
_TILT_STEPS: Final = 32
_MIDDLE: Final = 0.5 + 1 / 64


def _split(pixels: Array, count: int) -> list[Array]:
    """Return `count` arrays that add up to `pixels`, float32; all but the last have values of 8 significant bits."""
    parts = []
    for _ in range(count - 1):
        scaled = pixels * (2**16 + 1)
        high = scaled - (scaled - pixels)
        parts.append(high)
        pixels = pixels - high
    return [*parts, pixels]


def crop_weights(library: ArrayLibrary, places: Array, starts: Array, sizes: Array, *, nearest: bool) -> Array:
    """Return matrices float32 (batch, 1, n, n): row i holds the weights of the pixels that make pixel i of a crop.

    Crops begin at `starts` and have `sizes` pixels, whole numbers (batch,).
    """
    # Whole numbers until the division, so that every device rounds to the same result.
    functions, sizes = library.functions, sizes[:, None]
    within = (2 * places + 1) * sizes / (2 * len(places)) - 0.5
    within = functions.minimum(functions.clip(within, 0, None), sizes - 1)
    at = _rounded(library, within + starts[:, None], nearest, _CROP_STEPS)
    distance = abs(at[:, :, None] - places)
    return functions.clip(1 - distance, 0, 1)[:, None]


def blur_weights(library: ArrayLibrary, places: Array, deviations: Array) -> Array:
    """Return matrices float32 (batch, 1, n, n): row i has the Gaussian weights of the pixels around pixel i.

    `places` are the n positions along a side, 0 to n - 1, and `deviations` the standard deviations in pixels, (batch,).
    """
    functions, last = library.functions, len(places) - 1
    rows, columns = places[:, None], places
    scale = deviations.reshape(-1, 1, 1)

    def gaussian(distance: Array) -> Array:
        return functions.exp(-0.5 * (distance / scale) ** 2)

    before = gaussian(rows + columns) * library.cast(columns > 0, "float32")
    behind = gaussian(2 * last - rows - columns) * library.cast(columns < last, "float32")
    weights = gaussian(rows - columns) + before + behind
    weights = weights / functions.amax(weights, -1, keepdims=True)  # at most 1: bfloat16 holds such steps exactly
    return (functions.floor(weights * _CROP_STEPS + 0.5) / _CROP_STEPS)[:, None]


def resampled(pixels: Array, rows: Array, columns: Array, parts: tuple[int, int]) -> Array:
    """Resample images (batch, channels, height, width) along both sides.

    `rows` and `columns` are the weights, as `crop_weights` and `blur_weights` return them. Before each of the two
    products, pixels are split into so many `parts` of 8 significant bits.
    """
    half = _sum([rows @ part for part in _split(pixels, parts[0])]) / rows.sum(3, keepdims=True)
    columns = columns.swapaxes(2, 3)
    return _sum([part @ columns for part in _split(half, parts[1])]) / columns.sum(2, keepdims=True)


def tilt_reach(degrees: float, height: int, width: int) -> tuple[int, int]:
    """Return the largest distance, in columns and in rows, by which one shear of a rotation moves pixels."""
    angle = math.radians(degrees)
    reach = math.ceil(math.tan(angle / 2) * (height - 1) / 2), math.ceil(math.sin(angle) * (width - 1) / 2)
    if reach[0] >= width or reach[1] >= height:
        raise UsageError(
            f"a tilt of {degrees:g} degrees moves rows out of images of {height}x{width} pixels: give a smaller tilt"
        )
    return reach


def tilted(
    library: ArrayLibrary, pixels: Array, along_rows: Array, along_columns: Array, reach: tuple[int, int], nearest: bool
) -> Array:
    """Return float32 images (batch, channels, height, width) rotated around their centre; the border is reflected.

    Row y moves by `along_rows` (batch,) times its distance from the centre, then each column by `along_columns` times
    its distance, then the rows as at first.
    """
    pixels = _sheared(library, pixels, along_rows, reach[0], nearest)
    pixels = _sheared(library, pixels.swapaxes(2, 3), along_columns, reach[1], nearest).swapaxes(2, 3)
    return _sheared(library, pixels, along_rows, reach[0], nearest)


def _sheared(library: ArrayLibrary, pixels: Array, slope: Array, reach: int, nearest: bool) -> Array:
    """Return images whose row y is read `slope` * (y - centre) columns further to the right."""
    if not reach:
        return pixels
    functions, width = library.functions, pixels.shape[3]
    left = functions.flip(pixels[..., 1 : reach + 1], (3,))
    right = functions.flip(pixels[..., width - 1 - reach : width - 1], (3,))
    pixels = functions.concatenate([left, pixels, right], 3)
    move = _rounded(library, _distances(library, pixels, slope), nearest, _TILT_STEPS)
    return _moved(library, pixels, move, reach)


def sheared_bytes(
    library: ArrayLibrary, pixels: Array, slope: Array, start: Array, reach: int, *, nearest: bool
) -> Array:
    """Return uint8 images whose row y is read `start` + `slope` * (y - centre) columns further to the right.

    `slope` and `start` are (batch,).
    """
    if not reach:
        return pixels
    # Numbers are whole again after each shear, so that 1/256 of a pixel is exact, too. A value halfway between two
    # positions moves to the second, whichever way a device has rounded it.
    moves = start.reshape(-1, 1, 1, 1) + _distances(library, pixels, slope)
    moved = _moved(library, pixels, _rounded(library, moves, nearest, _CROP_STEPS, _MIDDLE), reach)
    return library.cast(library.functions.round(moved), "uint8")


def _distances(library: ArrayLibrary, pixels: Array, slope: Array) -> Array:
    rows = pixels.shape[2]
    from_centre = np.arange(rows, dtype=np.float32) - (rows - 1) / 2
    return slope.reshape(-1, 1, 1, 1) * library.constant(from_centre.reshape(-1, 1))


def bordered(library: ArrayLibrary, pixels: Array, border: int, number: int) -> Array:
    """Return images with `border` more columns on either side that are filled with `number`; the dtype stays."""
    if not border:
        return pixels
    functions = library.functions
    edge = functions.broadcast_to(functions.zeros_like(pixels[..., :1]) + number, (*pixels.shape[:3], border))
    return functions.concatenate([edge, pixels, edge], 3)


def _moved(library: ArrayLibrary, pixels: Array, move: Array, reach: int) -> Array:
    """Return float32 pixels, each read `move` (batch, 1, height, 1) columns further to the right, without the border.

    The given images have a border of `reach` columns on either side, so that no move reads beyond it.
    """
    functions = library.functions
    move = functions.clip(move + reach, 0, 2 * reach)
    whole = functions.clip(functions.floor(move), 0, 2 * reach - 1)
    share, rest = move - whole, 2 * reach - 1
    while rest:
        step = (rest + 1) // 2
        is_far = whole >= step
        pixels = functions.where(is_far, pixels[..., step:], pixels[..., :-step])
        whole, rest = functions.where(is_far, whole - step, whole), rest - step
    return pixels[..., :-1] * (1 - share) + pixels[..., 1:] * share


def _sum(parts: list[Array]) -> Array:
    return functools.reduce(operator.add, parts)  # sum() would add 0 to the first part


def _rounded(library: ArrayLibrary, places: Array, nearest: bool, steps: int, middle: float = 0.5) -> Array:
    steps = 1 if nearest else steps
    return library.functions.floor(places * steps + middle) / steps
