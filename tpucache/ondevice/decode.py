"""Decoders for packed batches, written once for torch and for JAX.

They are written for a TPU. It works on tiles of 8x128 numbers, so no tensor ends in a dimension of 8 and nothing is
transposed or shuffled. Its matrix product rounds operands to bfloat16, so each operand is sent as two numbers that
bfloat16 holds nearly exactly; sums are float32 there. The result is within one level of float32's on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.store.codecs import CODECS
from tpucache.store.codecs.codec import PackedCodec
from tpucache.store.codecs.dct.coefficients import BLOCK, CoefficientLayout, Plane, basis, layout_of
from tpucache.store.codecs.yuv420 import plane_shapes
from tpucache.store.fields import Field

# Numbers are split into a multiple of these, which takes 8 bits and a sign, and a rest. Dequantised coefficients are
# whole and within 2048, so both parts are exact; after one of the two products numbers are within 1024.
_OF_COEFFICIENTS: Final = 8.0
_OF_HALF_DONE: Final = 4.0

Constants = Mapping[str, Array]


class PackedDecoder(Protocol):
    """What makes images of packed batches, with static shapes."""

    constants: dict[str, Matrix]  # by name, float32; they are to be on the device

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return uint8 (B, channels, height, width) for uint8 (B, N)."""
        ...


class CoefficientDecoder:
    """Decodes quantised coefficients (see PackedDecoder)."""

    def __init__(self, layout: CoefficientLayout) -> None:
        self.layout = layout
        self.constants: dict[str, Matrix] = {}
        for number, plane in enumerate(layout.planes):
            matrices = coefficient_matrices(plane, layout.height, layout.width)
            self.constants.update(_constants_of(matrices, number))
            self.constants[f"ones{number}"] = np.triu(np.ones((plane.block_columns, plane.block_columns), np.float32))

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return the images of a batch."""
        values = library.cast(packed, "float32")
        low, high = values[:, : self.layout.low], values[:, self.layout.low :]
        low = _signed(library, low, 256)
        second = library.functions.floor(high / 16)
        nibbles = _signed(library, library.functions.concatenate([high - 16 * second, second], 1), 16)
        planes, at, place = [], 0, 0
        for number, plane in enumerate(self.layout.planes):
            matrix = low[:, at : at + plane.size].reshape(-1, *plane.shape)
            upper = _spread(library, nibbles[:, place : place + plane.wide], matrix, plane)
            matrix = _with_means(library, matrix, upper, plane, constants[f"ones{number}"])
            planes.append(_transform(library, matrix, constants, number))
            at, place = at + plane.size, place + plane.wide
        return _to_colours(library, planes)


class Yuv420Decoder:
    """Decodes raw 4:2:0 planes (see PackedDecoder)."""

    def __init__(self, height: int, width: int) -> None:
        self.luma, self.chroma = plane_shapes(height, width)
        self.constants = _constants_of(sample_matrices(*self.chroma, height, width), 0)

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return the images of a batch."""
        values = library.cast(packed, "float32") - 128
        first = self.luma[0] * self.luma[1]
        second = first + self.chroma[0] * self.chroma[1]
        planes = [values[:, :first].reshape(-1, *self.luma)]
        for samples in (values[:, first:second], values[:, second:]):
            planes.append(_transform(library, samples.reshape(-1, *self.chroma), constants, 0))
        return _to_colours(library, planes)


def field_decoder(field: Field) -> PackedDecoder | None:
    """Return the decoder of a field's packed form; None where its codec has no such form."""
    if not isinstance(CODECS[field.codec], PackedCodec):
        return None
    if field.quality is None:
        return Yuv420Decoder(*field.shape[:2])
    return CoefficientDecoder(layout_of(field.shape, field.quality, field.chroma))


def _constants_of(matrices: PlaneMatrices, number: int) -> dict[str, Matrix]:
    """Return a plane's constants by name: the matrices as coarse, coarse and fine parts, to meet those of `_parts`."""
    coarse_rows, coarse_columns = to_bfloat16(matrices.rows), to_bfloat16(matrices.columns)
    return {
        f"quantisers{number}": matrices.quantisers,
        f"rows{number}": np.concatenate([coarse_rows, coarse_rows, matrices.rows - coarse_rows], 1),
        f"columns{number}": np.concatenate([coarse_columns, coarse_columns, matrices.columns - coarse_columns], 0),
    }


def _transform(library: ArrayLibrary, matrix: Array, constants: Constants, number: int) -> Array:
    """Return `rows @ (matrix * quantisers) @ columns`, each operand in two parts."""
    functions = library.functions
    values = matrix * constants[f"quantisers{number}"]
    wide = functions.concatenate(_parts(library, values, _OF_COEFFICIENTS), 2)
    half = functions.matmul(wide, constants[f"columns{number}"])
    high = functions.concatenate(_parts(library, half, _OF_HALF_DONE), 1)
    return functions.matmul(constants[f"rows{number}"], high)


def _with_means(library: ArrayLibrary, low: Array, high: Array, plane: Plane, ones: Array) -> Array:
    """Return coefficients from low and high bits, the mean of each block from differences along its row of blocks."""
    functions, rows, columns = library.functions, plane.block_rows, plane.block_columns
    # Apart, either part is a whole number that bfloat16 holds exactly.
    first, second = (functions.matmul(part[:, :rows, :columns], ones) for part in (low, high))
    matrix = low + 256 * high
    top = functions.concatenate([first + 256 * second, matrix[:, :rows, columns:]], 2)
    return functions.concatenate([top, matrix[:, rows:]], 1)


def _signed(library: ArrayLibrary, values: Array, size: int) -> Array:
    """Return numbers from 0 to size - 1 as the two's complement numbers that their bits are."""
    return values - size * library.cast(values >= size // 2, "float32")


def _spread(library: ArrayLibrary, nibbles: Array, low: Array, plane: Plane) -> Array:
    """Return high bits at the places of their coefficients, 0 elsewhere: as `low`, (B, *plane.shape)."""
    functions, rows, columns, at = library.functions, plane.block_rows, plane.block_columns, 0
    parts = []
    for width in plane.widths:
        filled, count = width * columns, rows * width * columns
        row = [nibbles[:, at : at + count].reshape(-1, rows, filled)] if filled else []
        row += [functions.zeros_like(low[:, :rows, filled:])] if filled < plane.shape[1] else []
        parts.append(functions.concatenate(row, 2))
        at += count
    return functions.concatenate(parts, 1)


def _parts(library: ArrayLibrary, values: Array, unit: float) -> list[Array]:
    """Return multiples of `unit`, the rest, and the first again: for the constant's coarse, coarse and fine part."""
    # Rounded by arithmetic, as XLA may leave out a conversion to bfloat16 and back.
    coarse = library.functions.round(values / unit) * unit
    return [coarse, values - coarse, coarse]


def _to_colours(library: ArrayLibrary, planes: list[Array]) -> Array:
    """Return planes (B, height, width) centred at 0 as uint8 (B, channels, height, width), by JFIF's matrix."""
    functions = library.functions
    luma = planes[0] + 128
    if len(planes) == 1:
        colours = luma[:, None]
    else:
        blue, red = planes[1:]
        green = luma - 0.344136 * blue - 0.714136 * red
        colours = functions.stack([luma + 1.402 * red, green, luma + 1.772 * blue], 1)
    return library.cast(functions.round(functions.clip(colours, 0, 255)), "uint8")


Matrix = npt.NDArray[np.float32]


class PlaneMatrices(NamedTuple):
    """The pixels (height, width) of a plane's matrix C are `rows @ (C * quantisers) @ columns`.

    `rows` is (height, C's rows) and `columns` (C's columns, width). Both cut the padding off and interpolate chroma.
    """

    rows: Matrix
    columns: Matrix
    quantisers: Matrix


def coefficient_matrices(plane: Plane, height: int, width: int) -> PlaneMatrices:
    """Return the matrices for a plane of coefficients, as `store.codecs.dct.coefficients` lays them out."""
    rows = _inverse_transform(plane.block_rows)
    columns = _inverse_transform(plane.block_columns)
    if plane.step == 2:
        rows, columns = doubling(len(rows)) @ rows, doubling(len(columns)) @ columns
    quantisers = np.repeat(np.repeat(plane.table, plane.block_rows, 0), plane.block_columns, 1)
    return PlaneMatrices(_float32(rows[:height]), _float32(columns[:width].T), _float32(quantisers))


def sample_matrices(rows: int, columns: int, height: int, width: int) -> PlaneMatrices:
    """Return the matrices that double a plane of samples (rows, columns) and cut it to (height, width)."""
    return PlaneMatrices(
        _float32(doubling(rows)[:height]), _float32(doubling(columns)[:width].T), np.ones((1, 1), np.float32)
    )


def doubling(size: int) -> npt.NDArray[Any]:
    """Return (2 * size, size): linear interpolation between the centres of samples, the edges repeated."""
    near, far = np.eye(size), np.zeros((2 * size, size))
    far[0::2] = near[np.maximum(np.arange(size) - 1, 0)]
    far[1::2] = near[np.minimum(np.arange(size) + 1, size - 1)]
    return np.asarray(0.75 * np.repeat(near, 2, 0) + 0.25 * far)


def to_bfloat16(matrix: Matrix) -> Matrix:
    """Return float32 numbers rounded to those that bfloat16 holds, halves to even. The numbers are finite."""
    bits = matrix.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _inverse_transform(blocks: int) -> npt.NDArray[Any]:
    """Return (8 * blocks, 8 * blocks): pixel y of block i from the coefficient in row (u, i)."""
    whole: npt.NDArray[Any] = np.einsum("uy,ij->iyuj", basis(), np.eye(blocks))
    return whole.reshape(BLOCK * blocks, BLOCK * blocks)


def _float32(matrix: npt.NDArray[Any]) -> Matrix:
    return np.ascontiguousarray(matrix, np.float32)
