"""JPEG's quantised coefficients, laid out so that an accelerator decodes a plane by two matrix multiplications.

An image becomes one plane (grey) or three (Y, Cb, Cr). The coefficients of a plane are one matrix: row `(u, i)`, column
`(v, j)` holds the coefficient of vertical frequency `u` and horizontal frequency `v` in block `(i, j)`. So the pixels
are `F @ (C * Q) @ E` with two constant matrices, and nothing is transposed or shuffled.

The packed bytes are the low 8 bits of all coefficients, then bits 8 to 11 of those that can be that large;
docs/format.md describes them exactly. Transform and quantisation follow JPEG (ITU-T T.81). All sums are integers below
2^53, which float64 holds exactly, so every processor makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError
from tpucache.native import Array
from tpucache.store.codecs.codec import doubled, to_rgb, to_uint8

Floats = npt.NDArray[np.float64]
Chroma = Literal["420", "444"]

#: Chroma at half resolution in both directions ("420"), or at full resolution ("444"), for drawings and text.
CHROMA: Final = get_args(Chroma)

BLOCK: Final = 8

# ITU-T T.81, Annex K.1, row by row.
_LUMA_TABLE: Final = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA_TABLE: Final = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)

# Coefficients of 8-bit pixels are at most 1024, differences of two at most 2048. With a quantiser above these values,
# the quotient fits into 8 bits.
_WIDE: Final = 8
_WIDE_DIFFERENCE: Final = 16

# JFIF's RGB -> Y, Cb, Cr, times 2^16; one column per plane.
_COLOURS: Final = np.array([[19595, -11059, 32768], [38470, -21709, -27439], [7471, 32768, -5329]], np.float64)
_COLOUR_BITS: Final = 10  # the number of fractional bits that are kept, of 16
_DCT_BITS: Final = 15

Matrices = list[tuple[Array, Array]]


class Plane(NamedTuple):
    """One plane's matrix of coefficients, (8 * block_rows, 8 * block_columns), and how it is quantised.

    `step` is the image's size divided by the plane's: 1, or 2 for halved chroma. `table` has the quantisers (8, 8).
    `widths` has, for each vertical frequency, the number of horizontal frequencies stored with more than 8 bits.
    """

    block_rows: int
    block_columns: int
    step: int
    table: Array
    widths: tuple[int, ...]

    def shape(self, frequencies: int = BLOCK) -> tuple[int, int]:
        return frequencies * self.block_rows, frequencies * self.block_columns

    def high(self, frequencies: int) -> list[Submatrix]:
        """Return where the matrix of the lowest `frequencies` has coefficients stored with more than 8 bits.

        There is at most one submatrix for each vertical frequency, the lowest frequency first.
        """
        return [
            Submatrix(u * self.block_rows, self.block_rows, min(width, frequencies) * self.block_columns)
            for u, width in enumerate(self.widths[:frequencies])
            if width
        ]


class Submatrix(NamedTuple):
    """Some rows, from `first` on, and the first columns of a matrix."""

    first: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """The index of the submatrix in an array (n, rows, columns)."""
        return slice(None), slice(self.first, self.first + self.rows), slice(self.columns)


@dataclass(frozen=True)
class CoefficientLayout:
    """How an image (height, width, channels) of a JPEG quality, 1 to 100, is stored in packed bytes.

    Of each block, the lowest `frequencies` vertical and horizontal frequencies are stored.
    """

    height: int
    width: int
    channels: int
    quality: int
    chroma: str = "420"
    frequencies: int = BLOCK

    @functools.cached_property
    def planes(self) -> tuple[Plane, ...]:
        step = 2 if self.channels == 3 and self.chroma == "420" else 1
        rows, columns = (-(-side // (BLOCK * step)) for side in (self.height, self.width))
        luma, chroma = (quantisers(table, self.quality) for table in (_LUMA_TABLE, _CHROMA_TABLE))
        first = Plane(rows * step, columns * step, 1, luma, _widths(luma))
        return (first,) if self.channels == 1 else (first, *(Plane(rows, columns, step, chroma, _widths(chroma)),) * 2)

    @functools.cached_property
    def low(self) -> tuple[tuple[int, int], ...]:
        """The shape of each plane's matrix of coefficients."""
        return tuple(plane.shape(self.frequencies) for plane in self.planes)

    @functools.cached_property
    def high(self) -> tuple[list[Submatrix], ...]:
        """Where each plane's matrix has coefficients that are stored with more than 8 bits."""
        return tuple(plane.high(self.frequencies) for plane in self.planes)

    @functools.cached_property
    def low_bytes(self) -> int:
        return sum(rows * columns for rows, columns in self.low)

    @functools.cached_property
    def high_bytes(self) -> int:
        return (sum(part.size for parts in self.high for part in parts) + 1) // 2

    @property
    def nbytes(self) -> int:
        return self.low_bytes + self.high_bytes


@functools.lru_cache(64)
def layout_of(shape: tuple[int, ...], quality: int, chroma: str | None, frequencies: int = BLOCK) -> CoefficientLayout:
    """Return the layout of images with the shape (height, width, channels). A `chroma` of None means "420"."""
    height, width, channels = shape
    return CoefficientLayout(height, width, channels, quality, chroma or "420", frequencies)


def pack(image: npt.NDArray[np.uint8], layout: CoefficientLayout) -> bytes:
    matrices: Matrices = []
    for pixels, plane in zip(_image_planes(image, layout), layout.planes, strict=True):
        unit = 2.0 ** (_COLOUR_BITS + 2 * _DCT_BITS) * plane.step**2
        coefficients = np.rint(_transform(pixels) / (plane.table[None, :, None, :] * unit)).astype(np.int32)
        coefficients[:, 0, 1:, 0] -= coefficients[:, 0, :-1, 0].copy()
        matrix = coefficients.transpose(1, 0, 3, 2).reshape(1, *plane.shape())  # (u, i), (v, j)
        low = matrix.astype(np.int8)  # wraps around
        matrices.append((low.view(np.uint8), ((matrix - low) >> 8 & 15).astype(np.uint8)))
    return _joined(matrices, layout).tobytes()


def unpack(packed: bytes | memoryview, layout: CoefficientLayout) -> npt.NDArray[np.uint8]:
    """Return the image (height, width, channels) of packed coefficients."""
    if len(packed) != layout.nbytes:
        raise DamageError(f"packed coefficients have {len(packed):,} bytes, not {layout.nbytes:,}")
    rows = np.frombuffer(packed, np.uint8)[None]
    planes = [
        _pixels(_coefficients(*parts, plane), plane)[0]
        for parts, plane in zip(_split(rows, layout), layout.planes, strict=True)
    ]
    luma = planes[0][: layout.height, : layout.width] + np.float32(128)
    if layout.channels == 1:
        return to_uint8(luma)[..., None]
    blue, red = (
        (pixels if plane.step == 1 else doubled(doubled(pixels).T).T)[: layout.height, : layout.width]
        for pixels, plane in zip(planes[1:], layout.planes[1:], strict=True)
    )
    return to_rgb(luma, blue, red)


def unpack_luma(packed: npt.NDArray[np.uint8], layout: CoefficientLayout, step: int = 1) -> npt.NDArray[np.uint8]:
    """Return the luma, uint8 (n, height / step, width / step), of packed images, uint8 (n, bytes).

    With a `step` of 2, each value is the mean of 2x2 pixels, of the lower half of the frequencies: the higher half adds
    little to a mean.
    """
    (parts,), plane = _split(packed, layout, 1), layout.planes[0]
    count = BLOCK // step
    low, high = (part[:, : count * plane.block_rows, : count * plane.block_columns] for part in parts)
    pixels = _pixels(_coefficients(low, high, plane), plane, step)
    return to_uint8(pixels[:, : layout.height // step, : layout.width // step] + np.float32(128))


def repack(packed: npt.NDArray[np.uint8], layout: CoefficientLayout, frequencies: int) -> npt.NDArray[np.uint8]:
    """Return packed images with the lowest `frequencies` only. `packed` and the result are uint8 (n, bytes)."""
    return _joined(_split(packed, layout), dataclasses.replace(layout, frequencies=frequencies))


def _joined(matrices: Matrices, layout: CoefficientLayout) -> npt.NDArray[np.uint8]:
    """Join, for each plane, the low 8 bits and the bits 8 to 11 of its coefficients, both uint8 (n, rows, columns)."""
    images, half = len(matrices[0][0]), layout.high_bytes
    found = [
        low[:, :rows, :columns].reshape(images, -1)
        for (low, _), (rows, columns) in zip(matrices, layout.low, strict=True)
    ]
    nibbles, at = np.zeros((images, 2 * half), np.uint8), 0
    for (_, high), parts in zip(matrices, layout.high, strict=True):
        for part in parts:
            nibbles[:, at : at + part.size] = high[part.place].reshape(images, -1)
            at += part.size
    return np.concatenate([*found, nibbles[:, :half] | nibbles[:, half:] << 4], 1)


def _split(packed: npt.NDArray[np.uint8], layout: CoefficientLayout, planes: int | None = None) -> Matrices:
    """Return what `_joined` joined, for the first `planes` planes (None: all), from packed bytes, uint8 (n, bytes)."""
    images, at, place = len(packed), 0, 0
    pairs = packed[:, layout.low_bytes :]
    nibbles = np.concatenate([pairs & 15, pairs >> 4], 1)
    matrices = []
    for (rows, columns), parts in zip(layout.low[:planes], layout.high[:planes], strict=True):
        low = packed[:, at : at + rows * columns].reshape(images, rows, columns)
        at += rows * columns
        high = np.zeros((images, rows, columns), np.uint8)
        for part in parts:
            high[part.place] = nibbles[:, place : place + part.size].reshape(images, part.rows, part.columns)
            place += part.size
        matrices.append((low, high))
    return matrices


def quantisers(table: tuple[tuple[int, ...], ...], quality: int) -> Array:
    """Return a table of quantisers, int64 (8, 8), scaled to a JPEG quality from 1 to 100.

    The scaling is that of the Independent JPEG Group's software, but the quantiser of frequency 0 is at least 2, so
    that the difference of two coefficients of frequency 0 fits into 12 bits.
    """
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    scaled: Array = np.clip((np.array(table) * scale + 50) // 100, 1, 255)
    scaled[0, 0] = max(2, int(scaled[0, 0]))
    return scaled


@functools.cache
def basis() -> Floats:
    """Return the matrix (8, 8) of the orthonormal 8-point DCT: row u has the values of frequency u at the 8 pixels."""
    places = np.arange(BLOCK)
    waves = np.cos(np.outer(places, 2 * places + 1) * (np.pi / (2 * BLOCK)))
    waves[0] *= np.sqrt(0.5)
    half: Floats = waves / 2
    return half


def _widths(table: Array) -> tuple[int, ...]:
    wide = table <= _WIDE
    wide[0, 0] = table[0, 0] <= _WIDE_DIFFERENCE
    return tuple(int(np.max(np.flatnonzero(row), initial=-1)) + 1 for row in wide)


def _image_planes(image: npt.NDArray[np.uint8], layout: CoefficientLayout) -> Iterator[Floats]:
    """Yield each plane's pixels minus 128, times 2^10, or 2^12 for halved chroma, padded to blocks with edge pixels."""
    side = BLOCK * layout.planes[-1].step
    rows, columns = (-layout.height % side, -layout.width % side)
    if rows or columns:
        image = np.pad(image, ((0, rows), (0, columns), (0, 0)), "edge")
    if layout.channels == 1:
        yield (image[..., 0].astype(np.float64) - 128) * 2.0**_COLOUR_BITS
        return
    colours = image.reshape(-1, 3).astype(np.float64) @ _COLOURS
    half = 2.0 ** (16 - _COLOUR_BITS)
    colours = np.floor(colours / half + 0.5).reshape(image.shape)
    yield colours[..., 0] - 128 * 2.0**_COLOUR_BITS
    for at, plane in enumerate(layout.planes[1:], 1):
        chroma = colours[..., at]
        if plane.step == 2:
            chroma = chroma[0::2] + chroma[1::2]
            chroma = chroma[:, 0::2] + chroma[:, 1::2]
        yield chroma


def _transform(pixels: Floats) -> Floats:
    """Return the DCT of each 8x8 block of a plane, times 2^30: (i, u, j, v) for block (i, j) and frequencies u, v."""
    rows, columns = (side // BLOCK for side in pixels.shape)
    waves = _whole_basis()
    vertical = waves @ pixels.reshape(rows, BLOCK, columns * BLOCK)
    both: Floats = vertical.reshape(-1, BLOCK) @ waves.T
    return both.reshape(rows, BLOCK, columns, BLOCK)


@functools.cache
def _whole_basis() -> Floats:
    waves: Floats = np.rint(basis() * 2.0**_DCT_BITS)
    return waves


def _coefficients(low: Array, high: Array, plane: Plane) -> npt.NDArray[np.int32]:
    """Return the coefficients (n, u, i, v, j) of the frequencies u, v in the blocks i, j, from their low and high bits.

    Those of frequency 0 are stored as differences from the block to the left, which are summed here.
    """
    count = low.shape[1] // plane.block_rows
    matrix = low.view(np.int8).astype(np.int32)
    last = max((u for u, width in enumerate(plane.widths[:count]) if width), default=-1)
    rows = (last + 1) * plane.block_rows  # the coefficients in the rows below are stored with 8 bits
    matrix[:, :rows] += ((high[:, :rows].astype(np.int32) ^ 8) - 8) << 8
    matrix = matrix.reshape(-1, count, plane.block_rows, count, plane.block_columns)
    matrix[:, 0, :, 0] = np.cumsum(matrix[:, 0, :, 0], -1)
    return matrix


def _pixels(matrix: npt.NDArray[np.int32], plane: Plane, step: int = 1) -> npt.NDArray[np.float32]:
    """Return a plane's pixels, centred at 0: float32 (n, rows / step, columns / step), means of step x step pixels."""
    images, count, rows, _, columns = matrix.shape
    values = (matrix * plane.table[:count, None, :count, None]).astype(np.float32)
    side = BLOCK // step
    waves = basis().reshape(BLOCK, side, step).mean(2).astype(np.float32)[:count]
    vertical = (waves.T @ values.reshape(images, count, -1)).reshape(images, side, rows, count, columns)
    blocks = vertical.transpose(0, 2, 1, 4, 3).reshape(-1, count) @ waves
    return np.asarray(blocks.reshape(images, rows * side, columns * side), np.float32)
