"""JPEG's quantised coefficients, laid out so that an accelerator finishes decoding with two matrix products a plane.

An image becomes one plane (grey) or three (Y, Cb, Cr). The coefficients of a plane are one matrix: row `(u, i)`,
column `(v, j)` holds the coefficient of vertical frequency `u` and horizontal frequency `v` in block `(i, j)`. So the
pixels of the plane are `F @ (C * Q) @ E` with two constant matrices, and nothing is transposed or shuffled.

The packed bytes are the low 8 bits of all coefficients, then bits 8 to 11 of those that can need them. docs/format.md
describes them exactly. Transform and quantisation follow JPEG (ITU-T T.81); all sums are of whole numbers below 2^53,
so float64 holds them exactly and every processor makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError
from tpucache.store.codecs.yuv420 import doubled, to_rgb, to_uint8

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Chroma = Literal["420", "444"]

#: What chroma may be: at half resolution in both directions, or at full resolution, for drawings and text.
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

# Coefficients of 8-bit pixels lie within 1024, differences of two within 2048: larger quantisers keep them in 8 bits.
_WIDE: Final = 8
_WIDE_DIFFERENCE: Final = 16

# JFIF's RGB -> Y, Cb, Cr, times 2^16; a column a plane.
_COLOURS: Final = np.array([[19595, -11059, 32768], [38470, -21709, -27439], [7471, 32768, -5329]], np.float64)
_COLOUR_BITS: Final = 10  # what is kept of the 16 fractional bits
_DCT_BITS: Final = 15


class Plane(NamedTuple):
    """One plane's matrix of coefficients, (K * block_rows, K * block_columns), and how it is quantised.

    K are the `frequencies`: all 8 of a block, or the lowest. `step` is how many pixels of the image one of the plane
    covers in each direction: 1, or 2 for halved chroma. `table` holds the quantisers (8, 8), and `widths` for each
    vertical frequency how many horizontal ones have high bits.
    """

    block_rows: int
    block_columns: int
    step: int
    table: Array
    widths: tuple[int, ...]
    frequencies: int = BLOCK

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.frequencies * self.block_rows, self.frequencies * self.block_columns

    @property
    def size(self) -> int:
        """Coefficients in the plane: bytes of its low part."""
        return self.frequencies**2 * self.block_rows * self.block_columns

    @property
    def wide(self) -> int:
        """Coefficients that have high bits."""
        return self.block_rows * self.block_columns * sum(self.widths)


@dataclass(frozen=True)
class CoefficientLayout:
    """How an image (height, width, channels) lies in packed bytes; `quality` is JPEG's, 1 to 100.

    With fewer `frequencies` than 8, the packed bytes are those of the lowest of each block: see `keep_low`.
    """

    height: int
    width: int
    channels: int
    quality: int
    chroma: str = "420"
    frequencies: int = BLOCK

    @functools.cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes in order: Y, or Y, Cb, Cr."""
        step = 2 if self.channels == 3 and self.chroma == "420" else 1
        rows, columns = (-(-side // (BLOCK * step)) for side in (self.height, self.width))
        luma, chroma = (quantisers(table, self.quality) for table in (_LUMA_TABLE, _CHROMA_TABLE))
        first = self._plane(rows * step, columns * step, 1, luma)
        return (first,) if self.channels == 1 else (first, *(self._plane(rows, columns, step, chroma),) * 2)

    def _plane(self, rows: int, columns: int, step: int, table: Array) -> Plane:
        most = self.frequencies
        widths = tuple(min(width, most) for width in _widths(table)[:most])
        return Plane(rows, columns, step, table, widths, most)

    @property
    def low(self) -> int:
        """Bytes of the low parts of all planes."""
        return sum(plane.size for plane in self.planes)

    @property
    def high(self) -> int:
        """Bytes of the high parts of all planes: two coefficients a byte."""
        return (sum(plane.wide for plane in self.planes) + 1) // 2

    @property
    def nbytes(self) -> int:
        """Packed bytes of an image."""
        return self.low + self.high


@functools.lru_cache(64)
def layout_of(shape: tuple[int, ...], quality: int, chroma: str | None, frequencies: int = BLOCK) -> CoefficientLayout:
    """Return the layout of images (height, width, channels), made once."""
    height, width, channels = shape
    return CoefficientLayout(height, width, channels, quality, chroma or "420", frequencies)


def pack(image: npt.NDArray[np.uint8], layout: CoefficientLayout) -> bytes:
    """Return an image (height, width, channels) as packed coefficients: the same bytes on every processor."""
    low, high = [], []
    for pixels, plane in zip(_image_planes(image, layout), layout.planes, strict=True):
        coefficients = _quantise(_transform(pixels), plane)
        coefficients[:, 0, 1:, 0] -= coefficients[:, 0, :-1, 0].copy()
        matrix = coefficients.transpose(1, 0, 3, 2)  # (u, i, v, j)
        small = matrix.astype(np.int8)  # wraps around
        low.append(small.ravel())
        rest = (matrix - small) >> 8
        high += [rest[u, :, :width].ravel() for u, width in enumerate(plane.widths)]
    nibbles = np.concatenate(high) & 15
    first, second = np.split(np.pad(nibbles, (0, len(nibbles) % 2)), 2)
    return b"".join(part.tobytes() for part in (*low, (first | second << 4).astype(np.uint8)))


def keep_low(packed: npt.NDArray[np.uint8], layout: CoefficientLayout, frequencies: int) -> npt.NDArray[np.uint8]:
    """Return the packed bytes (n, M) of the lowest frequencies of images packed in whole, uint8 (n, N).

    They are those of `layout_of(..., frequencies)`: low bytes of the coefficients that are kept, then their high bits,
    paired anew.
    """
    kept = dataclasses.replace(layout, frequencies=frequencies)
    images = len(packed)
    target = np.empty((images, kept.nbytes), np.uint8)
    high = packed[:, layout.low :]
    nibbles = np.concatenate([high & 15, high >> 4], 1)
    chosen = np.zeros((images, 2 * kept.high), np.uint8)
    at = to = place = filled = 0
    for whole, part in zip(layout.planes, kept.planes, strict=True):
        matrix = packed[:, at : at + whole.size].reshape(images, *whole.shape)
        rows, columns = part.shape
        target[:, to : to + part.size].reshape(images, rows, columns)[...] = matrix[:, :rows, :columns]
        at, to = at + whole.size, to + part.size
        for u, width in enumerate(whole.widths):
            row = nibbles[:, place : place + whole.block_rows * width * whole.block_columns]
            place += row.shape[1]
            if u < frequencies:
                row = row.reshape(images, whole.block_rows, -1)[:, :, : part.widths[u] * whole.block_columns]
                count = row.shape[1] * row.shape[2]
                chosen[:, filled : filled + count] = row.reshape(images, count)
                filled += count
    target[:, kept.low :] = chosen[:, : kept.high] | chosen[:, kept.high :] << 4
    return target


def unpack(packed: bytes | memoryview, layout: CoefficientLayout) -> npt.NDArray[np.uint8]:
    """Return the image (height, width, channels) of packed coefficients. Raises DamageError for another length."""
    if len(packed) != layout.nbytes:
        raise DamageError(f"packed coefficients have {len(packed):,} bytes, not {layout.nbytes:,}")
    planes = [_pixels(matrix, plane) for matrix, plane in zip(_matrices(packed, layout), layout.planes, strict=True)]
    luma = planes[0][: layout.height, : layout.width] + np.float32(128)
    if layout.channels == 1:
        return to_uint8(luma)[..., None]
    blue, red = (
        (pixels if plane.step == 1 else doubled(doubled(pixels).T).T)[: layout.height, : layout.width]
        for pixels, plane in zip(planes[1:], layout.planes[1:], strict=True)
    )
    return to_rgb(luma, blue, red)


def quantisers(table: tuple[tuple[int, ...], ...], quality: int) -> Array:
    """Return a table scaled to a quality, 1 to 100, as the Independent JPEG Group's software does: int64 (8, 8).

    Only the mean's quantiser differs: it is at least 2, so that differences of means fit into 12 bits.
    """
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    scaled: Array = np.clip((np.array(table) * scale + 50) // 100, 1, 255)
    scaled[0, 0] = max(2, int(scaled[0, 0]))
    return scaled


@functools.cache
def basis() -> Floats:
    """Return the orthonormal 8-point DCT: row u holds frequency u's values at the 8 pixels."""
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
    """Yield the planes' pixels, padded to whole blocks by repeating the edge, times 2^10 and the square of the step."""
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
    """Return the DCT of each block, times 2^30: (i, u, j, v)."""
    rows, columns = (side // BLOCK for side in pixels.shape)
    waves = _whole_basis()
    vertical = waves @ pixels.reshape(rows, BLOCK, columns * BLOCK)
    both: Floats = vertical.reshape(-1, BLOCK) @ waves.T
    return both.reshape(rows, BLOCK, columns, BLOCK)


@functools.cache
def _whole_basis() -> Floats:
    waves: Floats = np.rint(basis() * 2.0**_DCT_BITS)
    return waves


def _quantise(transformed: Floats, plane: Plane) -> npt.NDArray[np.int32]:
    unit = 2.0 ** (_COLOUR_BITS + 2 * _DCT_BITS) * plane.step**2
    return np.rint(transformed / (plane.table[None, :, None, :] * unit)).astype(np.int32)


def _matrices(packed: bytes | memoryview, layout: CoefficientLayout) -> Iterator[npt.NDArray[np.int32]]:
    """Yield each plane's coefficients (u, i, v, j), the differences along the blocks undone."""
    data = np.frombuffer(packed, np.uint8)
    low, high = data[: layout.low].view(np.int8), data[layout.low :]
    nibbles = np.concatenate([high & 15, high >> 4]).astype(np.int32)
    nibbles -= (nibbles & 8) << 1
    at = place = 0
    for plane in layout.planes:
        shape = (plane.frequencies, plane.block_rows, plane.frequencies, plane.block_columns)
        matrix = low[at : at + plane.size].reshape(shape).astype(np.int32)
        at += plane.size
        for u, width in enumerate(plane.widths):
            count = plane.block_rows * width * plane.block_columns
            part = nibbles[place : place + count].reshape(plane.block_rows, width, plane.block_columns)
            matrix[u, :, :width] += part << 8
            place += count
        matrix[0, :, 0] = np.cumsum(matrix[0, :, 0], -1)
        yield matrix


def _pixels(matrix: npt.NDArray[np.int32], plane: Plane) -> npt.NDArray[np.float32]:
    """Return a plane's pixels, centred at 0."""
    count, rows, columns = plane.frequencies, plane.block_rows, plane.block_columns
    values = (matrix * plane.table[:count, None, :count, None]).astype(np.float32)
    waves = basis().astype(np.float32)[:count]
    vertical = (waves.T @ values.reshape(count, -1)).reshape(BLOCK, rows, count, columns)
    blocks = vertical.transpose(1, 0, 3, 2).reshape(-1, count) @ waves
    return np.asarray(blocks.reshape(BLOCK * rows, BLOCK * columns), np.float32)
