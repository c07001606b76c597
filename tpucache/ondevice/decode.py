"""Decoders for packed batches, written once for torch and for JAX.

They are written for a TPU. It works on tiles of 8x128 numbers, so no tensor ends in a dimension of 8 and nothing is
transposed or shuffled. Its matrix product rounds operands to bfloat16, so each operand is sent as two numbers that
bfloat16 holds nearly exactly; sums are float32 there. The result is within one level of float32's on any device.

An image of another size takes no further step: its rows and columns are products of the stored ones' with Lanczos'
weights, so they are in the constants. Of coefficients, a smaller image needs the low frequencies alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.geometry import Fit, lanczos, margins, placement
from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.store.codecs import CODECS
from tpucache.store.codecs.codec import PackedCodec
from tpucache.store.codecs.dct.coefficients import BLOCK, CoefficientLayout, Part, Plane, basis, layout_of
from tpucache.store.codecs.yuv420 import plane_shapes
from tpucache.store.fields import Field

# Numbers are split into a multiple of these, which takes 8 bits and a sign, and a rest. Dequantised coefficients are
# whole and within 2048, so both parts are exact; after one of the two products numbers are within 1024.
_OF_COEFFICIENTS: Final = 8.0
_OF_HALF_DONE: Final = 4.0

_LEAST_SIDE: Final = 8
_MOST_TIMES: Final = 2

Constants = Mapping[str, Array]


class PackedDecoder(Protocol):
    """What makes images of packed batches, with static shapes."""

    constants: dict[str, Matrix]  # by name, float32; they are to be on the device

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return uint8 (B, channels, height, width) for uint8 (B, N)."""
        ...


class Resize(NamedTuple):
    """The size of the images to be made, in pixels, and how one of another shape comes to it, as `Recipe.fit`."""

    height: int
    width: int
    fit: Fit = "crop"


#: (height, width) in pixels, or one number for both.
Size = int | tuple[int, int]


def to_resize(field: Field, size: Size, fit: Fit) -> Resize:
    """Return what makes images of a size out of a field's. Raises UsageError for a size that cannot be made of them."""
    sides = size if isinstance(size, tuple) else (size, size)
    if fit not in get_args(Fit):
        raise UsageError(f"fit is one of {', '.join(get_args(Fit))}, not {fit!r}")
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
        raise UsageError(f"size is (height, width) in pixels, or one number for both, not {size!r}")
    for side, stored in zip(sides, field.shape[:2], strict=True):
        if not min(_LEAST_SIDE, stored) <= side <= _MOST_TIMES * stored:
            raise UsageError(
                f"images of {field.shape[0]}x{field.shape[1]} become from {_LEAST_SIDE} pixels to twice as large, and "
                f"not {sides[0]}x{sides[1]}: warm up a cache of larger images"
            )
    return Resize(*sides, fit)


class CoefficientDecoder:
    """Decodes quantised coefficients (see PackedDecoder), to the stored size or another one."""

    def __init__(self, layout: CoefficientLayout, resize: Resize | None = None, frequencies: int | None = None) -> None:
        """Take the layout of the packed bytes, and how many frequencies of each block are used (default: all)."""
        self.layout = layout
        self.constants: dict[str, Matrix] = {}
        sides = _sides((layout.height, layout.width), resize)
        self.frequencies = min(frequencies or BLOCK, layout.bands[-1])
        for number, plane in enumerate(layout.planes):
            matrices = coefficient_matrices(plane, *sides, self.frequencies)
            self.constants.update(_constants_of(matrices, number))
            self.constants[f"ones{number}"] = np.triu(np.ones((plane.block_columns, plane.block_columns), np.float32))
        self.constants.update(_white_of(sides))

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return the images of a batch."""
        matrices = _matrices(library, library.cast(packed, "float32"), self.layout)
        planes = []
        for number, (plane, parts) in enumerate(zip(self.layout.planes, matrices, strict=True)):
            rows, columns = plane.shape(self.frequencies)
            low, high = (part[:, :rows, :columns] for part in parts)
            matrix = _with_means(library, low, high, plane, constants[f"ones{number}"])
            planes.append(_transform(library, matrix, constants, number))
        return _to_colours(library, planes, constants.get("white", 128))


class Yuv420Decoder:
    """Decodes raw 4:2:0 planes (see PackedDecoder), to the stored size or another one."""

    def __init__(self, height: int, width: int, resize: Resize | None = None) -> None:
        self.luma, self.chroma = plane_shapes(height, width)
        sides = _sides((height, width), resize)
        self.constants = _constants_of(sample_matrices(*self.chroma, *sides), 0)
        self.resizes = resize is not None
        if self.resizes:
            rows, columns = (_float32(side.weights) for side in sides)
            luma = PlaneMatrices(rows, np.ascontiguousarray(columns.T), np.ones((1, 1), np.float32))
            self.constants.update({**_constants_of(luma, 1), **_white_of(sides)})

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return the images of a batch."""
        values = library.cast(packed, "float32") - 128
        first = self.luma[0] * self.luma[1]
        second = first + self.chroma[0] * self.chroma[1]
        luma = values[:, :first].reshape(-1, *self.luma)
        planes = [_transform(library, luma, constants, 1) if self.resizes else luma]
        for samples in (values[:, first:second], values[:, second:]):
            planes.append(_transform(library, samples.reshape(-1, *self.chroma), constants, 0))
        return _to_colours(library, planes, constants.get("white", 128))


class PixelDecoder:
    """Resizes pixels, uint8 (B, channels, height, width) (see PackedDecoder)."""

    def __init__(self, height: int, width: int, resize: Resize) -> None:
        rows, columns = sides = _sides((height, width), resize)
        matrices = PlaneMatrices(_float32(rows.weights), _float32(columns.weights.T), np.ones((1, 1), np.float32))
        self.constants = {**_constants_of(matrices, 0), **_white_of(sides)}
        self.shape = resize.height, resize.width

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return the images of a batch."""
        images, channels = packed.shape[:2]
        planes = library.cast(packed, "float32").reshape(-1, *packed.shape[2:]) - 128
        resized = _transform(library, planes, constants, 0) + constants.get("white", 128)
        functions = library.functions
        pixels = library.cast(functions.round(functions.clip(resized, 0, 255)), "uint8")
        return pixels.reshape(images, channels, *self.shape)


def field_decoder(field: Field, resize: Resize | None = None) -> PackedDecoder | None:
    """Return the decoder of a field's packed form, or what resizes its pixels; None where there is nothing to do."""
    height, width = field.shape[:2]
    if not isinstance(CODECS[field.codec], PackedCodec):
        return None if resize is None else PixelDecoder(height, width, resize)
    if field.quality is None:
        return Yuv420Decoder(height, width, resize)
    return CoefficientDecoder(layout_of(field.shape, field.quality, field.chroma), resize)


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


def _matrices(library: ArrayLibrary, values: Array, layout: CoefficientLayout) -> list[list[Array]]:
    """Return low and high bits of each plane's coefficients, (B, rows, columns), by the bands' packed bytes."""
    found: list[list[Array]] = []
    at = 0
    for band in layout.parts:
        low = _signed(library, values[:, at : at + band.low_bytes], 256)
        pairs = values[:, at + band.low_bytes : at + band.low_bytes + band.high_bytes]
        second = library.functions.floor(pairs / 16)
        nibbles = _signed(library, library.functions.concatenate([pairs - 16 * second, second], 1), 16)
        at += band.low_bytes + band.high_bytes
        place = filled = 0
        for number, (plane, parts, wide) in enumerate(zip(layout.planes, band.low, band.high, strict=True)):
            blocks = []
            for part in parts:
                blocks.append(low[:, place : place + part.size].reshape(-1, *part.shape))
                place += part.size
            count = sum(part.size for part in wide)
            high = _spread(library, nibbles[:, filled : filled + count], blocks, parts, plane, wide)
            filled += count
            if band.first:
                below = [_beside(library, *pair) for pair in zip(found[number], (blocks, high), strict=True)]
                found[number] = below
            else:
                found.append([blocks[0], high[0]])
    return found


def _beside(library: ArrayLibrary, matrix: Array, blocks: list[Array]) -> Array:
    """Return a matrix with the next band's two blocks: one to its right, and one below both."""
    functions = library.functions
    return functions.concatenate([functions.concatenate([matrix, blocks[0]], 2), blocks[1]], 1)


def _spread(
    library: ArrayLibrary, nibbles: Array, low: list[Array], parts: list[Part], plane: Plane, wide: list[Part]
) -> list[Array]:
    """Return high bits at the places of their coefficients, 0 elsewhere: blocks as those of `low`."""
    functions, at = library.functions, 0
    starts = {part.rows.start: part for part in wide}
    blocks = []
    for block, part in zip(low, parts, strict=True):
        rows = []
        for start in range(part.rows.start, part.rows.stop, plane.block_rows):
            width = starts[start].shape[1] if start in starts else 0
            count = plane.block_rows * width
            row = [nibbles[:, at : at + count].reshape(-1, plane.block_rows, width)] if width else []
            row += [functions.zeros_like(block[:, : plane.block_rows, width:])] if width < part.shape[1] else []
            rows.append(functions.concatenate(row, 2))
            at += count
        blocks.append(functions.concatenate(rows, 1))
    return blocks


def _parts(library: ArrayLibrary, values: Array, unit: float) -> list[Array]:
    """Return multiples of `unit`, the rest, and the first again: for the constant's coarse, coarse and fine part."""
    # Rounded by arithmetic, as XLA may leave out a conversion to bfloat16 and back.
    coarse = library.functions.round(values / unit) * unit
    return [coarse, values - coarse, coarse]


def _to_colours(library: ArrayLibrary, planes: list[Array], middle: Array | int) -> Array:
    """Return planes (B, height, width) centred at 0 as uint8 (B, channels, height, width), by JFIF's matrix.

    `middle` is what 0 becomes: 128, but 0 where an image was padded with black.
    """
    functions = library.functions
    luma = planes[0] + middle
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


class Side(NamedTuple):
    """The weights (pixels made, pixels stored) along a side; `is_inside` is False for pixels that are padding."""

    weights: npt.NDArray[Any]
    is_inside: npt.NDArray[np.bool_]


def _sides(stored: tuple[int, int], resize: Resize | None) -> tuple[Side, Side]:
    """Return the weights of rows and of columns of images stored as (height, width)."""
    height, width = stored
    if resize is None:
        return Side(np.eye(height), np.ones(height, bool)), Side(np.eye(width), np.ones(width, bool))
    place = placement((0.0, 0.0, float(width), float(height)), (resize.width, resize.height), resize.fit)
    left, top = margins(place.size, (resize.width, resize.height))
    return (
        _side(height, place.box[1], place.box[3], place.size[1], top, resize.height),
        _side(width, place.box[0], place.box[2], place.size[0], left, resize.width),
    )


def _side(stored: int, start: float, stop: float, size: int, margin: int, canvas: int) -> Side:
    weights, is_inside = np.zeros((canvas, stored)), np.zeros(canvas, bool)
    weights[margin : margin + size] = lanczos(stored, start, stop, size)
    is_inside[margin : margin + size] = True
    return Side(weights, is_inside)


def _white_of(sides: tuple[Side, Side]) -> dict[str, Matrix]:
    """Return what a plane's 0 becomes at each pixel, by name; nothing where no pixel is padding."""
    rows, columns = (side.is_inside for side in sides)
    return {} if rows.all() and columns.all() else {"white": _float32(128 * np.outer(rows, columns))}


def coefficient_matrices(plane: Plane, rows: Side, columns: Side, frequencies: int = BLOCK) -> PlaneMatrices:
    """Return the matrices for a plane of coefficients, as `store.codecs.dct.coefficients` lays them out.

    Of them, they take the lowest frequencies of each block.
    """
    table = plane.table[:frequencies, :frequencies]
    quantisers = np.repeat(np.repeat(table, plane.block_rows, 0), plane.block_columns, 1)
    down = _half(plane.block_rows, plane.step, rows, frequencies)
    across = _half(plane.block_columns, plane.step, columns, frequencies)
    return PlaneMatrices(_float32(down), _float32(across.T), _float32(quantisers))


def _half(blocks: int, step: int, side: Side, frequencies: int) -> npt.NDArray[Any]:
    """Return (pixels made, frequencies * blocks): the weights of the coefficients along one side of a plane."""
    pixels = _inverse_transform(blocks)[:, : frequencies * blocks]
    pixels = doubling(len(pixels)) @ pixels if step == 2 else pixels
    return np.asarray(side.weights @ pixels[: side.weights.shape[1]])


def sample_matrices(height: int, width: int, rows: Side, columns: Side) -> PlaneMatrices:
    """Return the matrices that double a plane of samples (height, width) and resize it."""
    down = rows.weights @ doubling(height)[: rows.weights.shape[1]]
    across = columns.weights @ doubling(width)[: columns.weights.shape[1]]
    return PlaneMatrices(_float32(down), _float32(across.T), np.ones((1, 1), np.float32))


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
