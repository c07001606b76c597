"""Random resized crops of packed images: each sample's own part is resized before there are any pixels.

A crop is a matrix of rows and one of columns for each sample: Lanczos' weights of the pixels of its part, as Pillow has
them, so that nothing aliases, times what makes these pixels of a plane's numbers. No pixel is made that is not in the
result.

The weights are made on the device, for one of a block's eight pixels at a time, so that no tensor ends in a dimension
of 8: the transform is a sum of eight arrays.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.ondevice import draws as drawn
from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.ondevice.decode import Axis, Constants, Matrix, PackedDecoder, Resize, split_parts, to_bytes
from tpucache.store.codecs.dct.coefficients import BLOCK, basis

_LOBES: Final = 3  # of Lanczos' filter, to either side
_WEIGHT_UNIT: Final = 1 / 256  # weights are at most about 1: multiples of this take 8 bits and a sign
#: How near 0 the sine of a number is the number.
_SMALL: Final = 1e-4


class CropDecoder:
    """Decodes a part of each packed image to the size of `resize`, turned left to right where it is drawn so."""

    def __init__(self, decoder: PackedDecoder, resize: Resize) -> None:
        """Take the decoder of whole images; `resize.fit` is of no meaning here."""
        self._decoder, self._sizes = decoder, (resize.height, resize.width)
        names = ("quantisers", "ones")
        self.constants: dict[str, Matrix] = {
            **{name: value for name, value in decoder.constants.items() if name.startswith(names)},
            **{f"{name}_places": _count(size) for name, size in zip(("row", "column"), self._sizes, strict=True)},
        }

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants, draws: Array) -> Array:
        """Return uint8 (B, channels, height, width) for a packed batch and the random numbers of `draw`, one view.

        A crop is of whole pixels of the stored image; CROPPED of the draws says which, COLUMNS_REVERSED which turn.
        """
        top, height, left, width = (draws[:, drawn.CROPPED.start + at] for at in range(4))
        row_places, column_places = constants["row_places"], constants["column_places"]
        reversed_places = len(column_places) - 1 - column_places
        is_reversed = draws[:, drawn.COLUMNS_REVERSED : drawn.COLUMNS_REVERSED + 1] > 0
        turned = library.functions.where(is_reversed, reversed_places, column_places)
        made: dict[tuple[Axis, bool], Array] = {}  # both planes of chroma have the same
        planes = []
        for (down, across), plane in zip(
            self._decoder.axes, self._decoder.planes(library, packed, constants), strict=True
        ):
            if (down, True) not in made:
                made[down, True] = _weights(library, down, row_places, top, height)
            if (across, False) not in made:
                made[across, False] = _weights(library, across, turned, left, width)
            planes.append(_product(library, made[down, True], plane, made[across, False]))
        return to_bytes(library, self._decoder.colours(library, planes, 128))


def _weights(library: ArrayLibrary, axis: Axis, places: Array, starts: Array, sizes: Array) -> Array:
    """Return float32 (B, n, numbers): the weights of a plane's numbers in each of n pixels made.

    `places` count these pixels, (n,) or (B, n); their part of the side begins at `starts` and has `sizes` pixels, (B,).
    """
    scale = sizes[:, None] / places.shape[-1]
    centres = starts[:, None] + (places + 0.5) * scale - 0.5
    wide = library.functions.clip(scale, 1, None)

    def of(pixels: npt.NDArray[np.float32]) -> Array:
        """Return (B, n, pixels): the weights of some pixels, none outside of the part."""
        at = library.constant(pixels)
        distances = (at - centres[:, :, None]) / wide[:, :, None]
        weights = _sinc(library, distances) * _sinc(library, distances / _LOBES)
        is_inside = (at >= starts[:, None]) & (at < starts[:, None] + sizes[:, None])
        return library.functions.where(
            (abs(distances) < _LOBES) & is_inside[:, None], weights, library.functions.zeros_like(weights)
        )

    def of_samples(samples: npt.NDArray[np.float32]) -> Array:
        """Return (B, n, samples): those of some samples of the plane, in which a doubled one is in four pixels."""
        if axis.step == 1:
            return of(samples)
        last = 2 * axis.samples - 1
        near = of(2 * samples) + of(2 * samples + 1)
        far = of(np.maximum(2 * samples - 1, 0)) + of(np.minimum(2 * samples + 2, last))
        return 0.75 * near + 0.25 * far

    total = of(_count(axis.pixels)).sum(2)[:, :, None]
    if axis.frequencies is None:
        return of_samples(_count(axis.samples)) / total
    blocks = _count(axis.samples // BLOCK)
    eighths = [of_samples(BLOCK * blocks + pixel) for pixel in range(BLOCK)]
    waves = [
        functools.reduce(operator.add, (float(wave) * eighth for wave, eighth in zip(row, eighths, strict=True)))
        for row in basis()[: axis.frequencies]
    ]
    return library.functions.concatenate(waves, 2) / total


def _product(library: ArrayLibrary, rows: Array, plane: Array, columns: Array) -> Array:
    """Return rows @ plane @ columns' transpose, (B, n, m), each operand in three parts, as a TPU rounds them."""
    functions = library.functions
    wide = functions.concatenate(split_parts(library, plane, of_coefficients=True), 2)
    half = functions.matmul(wide, functions.concatenate(_fine(library, columns), 2).swapaxes(1, 2))
    high = functions.concatenate(split_parts(library, half, of_coefficients=False), 1)
    return functions.matmul(functions.concatenate(_fine(library, rows), 2), high)


def _fine(library: ArrayLibrary, weights: Array) -> list[Array]:
    """Return weights as coarse, coarse and fine parts, to meet those of `split_parts`."""
    coarse = library.functions.round(weights / _WEIGHT_UNIT) * _WEIGHT_UNIT
    return [coarse, coarse, weights - coarse]


def _sinc(library: ArrayLibrary, values: Array) -> Array:
    """Return sin(pi x) / (pi x), 1 at 0."""
    functions = library.functions
    angles = values * math.pi
    is_small = abs(angles) < _SMALL
    ones = functions.ones_like(angles)
    return functions.where(is_small, ones, functions.sin(angles) / functions.where(is_small, ones, angles))


def _count(length: int) -> npt.NDArray[np.float32]:
    return np.arange(length, dtype=np.float32)
