"""Random resized crops of packed images: a part of each sample is resized while it is decoded.

For each sample, a crop is computed by a matrix for rows and a matrix for columns. Each of the two is the product of two
matrices: Lanczos' weights for the pixels of the crop, as Pillow has them (so that nothing aliases), and the matrix that
computes these pixels from a plane's numbers. No pixel outside the result is computed.

The device computes the weights. The eight pixels of a block lie along the first dimension: a TPU would pad a last
dimension of 8 to 128. So the transform is a sum of arrays.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import Any, Final

import numpy as np

from tpucache.ondevice import draws as drawn
from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.ondevice.decode import (
    Axis,
    Constants,
    Matrix,
    PackedDecoder,
    Parts,
    Resize,
    split_parts,
    to_bytes,
    transformed,
)
from tpucache.store.codecs.coefficients import BLOCK, basis

_LOBES: Final = 3  # of Lanczos' filter, on either side
_WEIGHT_UNIT: Final = 1 / 256  # weights are at most about 1, so multiples of this take 8 bits and a sign
_SMALL: Final = 1e-4  # the sine of a smaller number is the number itself


class CropDecoder:
    """Decodes a random part of each packed image, resizes it, and mirrors it if the random numbers say so."""

    def __init__(self, decoder: PackedDecoder, resize: Resize) -> None:
        """Take the decoder for whole images, and the size of the resized crops; `resize.fit` has no effect on crops."""
        self._decoder = decoder
        #: For each Axis, the name of the constant that has the numbers of its pixels.
        self._names = {
            axis: f"pixels{number}" for number, axis in enumerate(dict.fromkeys(itertools.chain(*decoder.axes)))
        }
        names = ("quantisers", "ones")
        self.constants: dict[str, Matrix] = {
            **{name: value for name, value in decoder.constants.items() if name.startswith(names)},
            "row_places": np.arange(resize.height, dtype=np.float32),
            "column_places": np.arange(resize.width, dtype=np.float32),
            **{name: _pixels(axis) for axis, name in self._names.items()},
        }

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants, draws: Array) -> Array:
        """Return the crops of a packed batch, uint8 (batch, channels, height, width).

        `draws` are the random numbers of `draw`, for one view.
        """
        top, height, left, width = (draws[:, drawn.CROPPED.start + at] for at in range(4))
        row_places, column_places = constants["row_places"], constants["column_places"]
        reversed_places = len(column_places) - 1 - column_places
        is_reversed = draws[:, drawn.COLUMNS_REVERSED : drawn.COLUMNS_REVERSED + 1] > 0
        turned = library.functions.where(is_reversed, reversed_places, column_places)

        @functools.cache  # both chroma planes use the same weights
        def weights(axis: Axis, is_row: bool) -> Parts:
            where = (row_places, top, height) if is_row else (turned, left, width)
            made = _weights(library, axis, constants[self._names[axis]], *where)
            return split_parts(library, made if is_row else made.swapaxes(1, 2), _WEIGHT_UNIT)

        planes = [
            transformed(library, plane, weights(down, True), weights(across, False))
            for (down, across), plane in zip(
                self._decoder.axes, self._decoder.planes(library, packed, constants), strict=True
            )
        ]
        return to_bytes(library, self._decoder.colours(library, planes, 128))


def _pixels(axis: Axis) -> Matrix:
    """Return which pixels along an axis depend on each block, as pixel numbers: float32 (n, 1, 1, blocks)."""
    block = 1 if axis.frequencies is None else BLOCK
    beyond = axis.step - 1
    numbers = np.arange(-beyond, axis.step * block + beyond)[:, None]
    blocks = np.arange(axis.samples // block) * axis.step * block
    return (numbers + blocks).clip(0, axis.step * axis.samples - 1).astype(np.float32)[:, None, None]


def _weights(library: ArrayLibrary, axis: Axis, at: Array, places: Array, starts: Array, sizes: Array) -> Array:
    """Return the weights of a plane's numbers in each of the n output pixels: float32 (batch, n, numbers).

    `places` has the output pixels' positions, (n,) or (batch, n), from 0; they may be in reversed order. Along this
    axis, the crop begins at pixel `starts` and has `sizes` pixels, both (batch,).
    """
    functions, beyond = library.functions, axis.step - 1
    scale = sizes[:, None] / places.shape[-1]
    centres = (starts[:, None] + (places + 0.5) * scale - 0.5)[:, :, None]
    factors = (math.pi / _LOBES / functions.clip(scale, 1, None))[:, :, None]
    weights = _lanczos(functions, abs(at - centres) * factors)
    weights = weights * library.cast((at >= starts[:, None, None]) & (at < (starts + sizes)[:, None, None]), "float32")
    total = weights[beyond : len(at) - beyond].sum((0, 3))[:, :, None]
    if axis.step == 2:
        near, far = weights[1:-1:2] + weights[2:-1:2], weights[:-2:2] + weights[3::2]
        weights = 0.75 * near + 0.25 * far
    if axis.frequencies is None:
        return weights[0] / total
    return functions.concatenate(_waves(functions, weights, axis.frequencies), 2) / total


def _lanczos(functions: Any, angles: Array) -> Array:
    """Return sinc(x) * sinc(x / 3) for `angles`, which are pi * x / 3 and not negative; 0 where x is 3 or more.

    This needs only one sine, because sin(3 a) = 3 sin(a) - 4 sin(a)^3.
    """
    angles = functions.clip(angles, _SMALL, math.pi)
    sines = functions.sin(angles)
    ratios = sines / angles
    return ratios * ratios * (1 - (4 / 3) * sines * sines)


def _waves(functions: Any, pixels: Array, frequencies: int) -> list[Array]:
    """Return the first `frequencies` DCT coefficients of each block of eight pixels, one array for each coefficient.

    Even rows of the DCT's matrix are symmetric and odd rows antisymmetric, so that each coefficient is a sum of four
    terms.
    """
    half = BLOCK // 2
    first, second = pixels[:half], functions.flip(pixels[half:], (0,))
    by_symmetry = (first + second, first - second)
    return [
        functools.reduce(
            operator.add, (float(wave) * by_symmetry[number % 2][at] for at, wave in enumerate(row[:half]))
        )
        for number, row in enumerate(basis()[:frequencies])
    ]
