"""Decoders for packed batches, written once for torch and JAX.

They are made for a TPU. A TPU works on tiles of 8x128 numbers, so no tensor ends in a dimension of 8, and nothing is
transposed or shuffled. Its matrix product rounds operands to bfloat16 and adds in float32, so each operand is passed as
two numbers that bfloat16 holds nearly exactly. On any device, the result is within one level of that of products in
float32.

An image of another size needs no further step: the constants already include Lanczos' weights for its rows and columns.
From coefficients, a smaller image needs only the low frequencies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.geometry import Fit, lanczos, margins, placement
from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.store.codecs import CODECS
from tpucache.store.codecs.codec import PackedCodec
from tpucache.store.codecs.dct.codec import packed_layout
from tpucache.store.codecs.dct.coefficients import BLOCK, CoefficientLayout, Plane, Submatrix, basis
from tpucache.store.codecs.yuv420 import plane_shapes
from tpucache.store.fields import Field

# Numbers are split into a multiple of one of these, which needs 8 bits and a sign, and a rest. Coefficients are
# integers within 2048, so both parts are exact; after the first of two products, numbers are within 1024.
_OF_COEFFICIENTS: Final = 8.0
_OF_HALF_DONE: Final = 4.0

_LEAST_SIDE: Final = 8
_MOST_TIMES: Final = 2

Constants = Mapping[str, Array]
Matrix = npt.NDArray[np.float32]

#: (height, width) in pixels, or one number for both.
Size = int | tuple[int, int]


class Resize(NamedTuple):
    """The size of the images to make, in pixels, and how an image of another shape gets it (see `Recipe.fit`)."""

    height: int
    width: int
    fit: Fit = "crop"


def to_resize(field: Field, size: Size, fit: Fit) -> Resize:
    """Return the Resize that makes images of this size from a field. Raises UsageError for an impossible size."""
    sides = size if isinstance(size, tuple) else (size, size)
    if fit not in get_args(Fit):
        raise UsageError(f"fit is one of {', '.join(get_args(Fit))}, not {fit!r}")
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
        raise UsageError(f"size is (height, width) in pixels, or one number for both, not {size!r}")
    shape = field.shape if field.view is None else field.view.shape
    for side, stored in zip(sides, shape[:2], strict=True):
        if not min(_LEAST_SIDE, stored) <= side <= _MOST_TIMES * stored:
            raise UsageError(
                f"images of {shape[0]}x{shape[1]} can get sides from {_LEAST_SIDE} pixels to twice their own, and "
                f"not {sides[0]}x{sides[1]}: warm up a cache of larger images"
            )
    return Resize(*sides, fit)


class Axis(NamedTuple):
    """How the numbers along a side of a plane give the pixels of the image.

    Along this side, the image has `pixels`, and the plane has `samples`, each covering `step` pixels. The plane's
    numbers are the samples themselves, or the lowest `frequencies` of each block of eight.
    """

    pixels: int
    samples: int
    step: int = 1
    frequencies: int | None = None

    def matrix(self) -> npt.NDArray[Any]:
        """Return float64 (pixels, numbers): the weight of each number in each pixel."""
        if self.frequencies is None:
            made = np.eye(self.samples)
        else:
            blocks = self.samples // BLOCK
            made = _inverse_transform(blocks)[:, : self.frequencies * blocks]
        made = doubling(self.samples) @ made if self.step == 2 else made
        return np.asarray(made[: self.pixels])


class PackedDecoder(ABC):
    """Makes images from packed batches, with static shapes, in the stored size or in another one."""

    def __init__(self, stored: tuple[int, int], resize: Resize | None) -> None:
        #: The stored size of an image in pixels, (height, width).
        self.stored = stored
        #: float32 constants by name; the caller moves them to the device.
        self.constants: dict[str, Matrix] = {}
        sides = _sides(stored, resize)
        for number, (rows, columns) in enumerate(self.axes):
            if rows.frequencies is not None or rows.step > 1 or resize is not None:  # otherwise they are pixels already
                down, across = (side.weights @ axis.matrix() for side, axis in zip(sides, (rows, columns), strict=True))
                self.constants.update(_constants_of(_float32(down), _float32(across.T), number))
        above, beside = (side.is_inside for side in sides)
        if not (above.all() and beside.all()):
            self.constants["white"] = _float32(128 * np.outer(above, beside))

    @property
    @abstractmethod
    def axes(self) -> list[tuple[Axis, Axis]]:
        """How the numbers of each plane give the image's pixels: down the rows, and across the columns (see `Axis`)."""

    @abstractmethod
    def planes(self, library: ArrayLibrary, packed: Array, constants: Constants) -> list[Array]:
        """Return a batch's planes, as the numbers of their axes: float32 (B, rows, columns), integers within 2048."""

    def colours(self, library: ArrayLibrary, planes: list[Array], middle: Array | int) -> Array:
        """Return float32 (B, channels, height, width) from the pixels of the planes, centred at 0, by JFIF's matrix.

        `middle` is the level that 0 stands for: 128, or 0 in pixels of black padding.
        """
        luma = planes[0] + middle
        if len(planes) == 1:
            return luma[:, None]
        blue, red = planes[1:]
        green = luma - 0.344136 * blue - 0.714136 * red
        colours: Array = library.functions.stack([luma + 1.402 * red, green, luma + 1.772 * blue], 1)
        return colours

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return uint8 (B, channels, height, width) for a packed batch."""
        planes = [
            transformed(library, plane, *(_parts_of(constants, f"{side}{number}") for side in ("rows", "columns")))
            if f"rows{number}" in constants
            else plane
            for number, plane in enumerate(self.planes(library, packed, constants))
        ]
        return to_bytes(library, self.colours(library, planes, constants.get("white", 128)))

    def decode_here(self, packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return uint8 (B, height, width, channels) for a packed batch, computed on the host by numpy."""
        library = ArrayLibrary(np, lambda constant: constant)
        planes = []
        for number, plane in enumerate(self.planes(library, packed, self.constants)):
            rows, columns = (sum(_parts_of(self.constants, f"{side}{number}")) for side in ("rows", "columns"))
            planes.append(rows @ (plane @ columns))
        images = to_bytes(library, self.colours(library, planes, self.constants.get("white", 128)))
        return np.ascontiguousarray(np.moveaxis(images, 1, 3))


class CoefficientDecoder(PackedDecoder):
    """Decodes quantised coefficients, uint8 (B, N)."""

    def __init__(self, layout: CoefficientLayout, resize: Resize | None = None, frequencies: int | None = None) -> None:
        """Take the layout of the packed bytes, and the number of frequencies of each block to use (default: all)."""
        self.layout = layout
        self.frequencies = min(frequencies or BLOCK, layout.bands[-1])
        super().__init__((layout.height, layout.width), resize)
        for number, plane in enumerate(layout.planes):
            table = plane.table[: self.frequencies, : self.frequencies]
            quantisers = np.repeat(np.repeat(table, plane.block_rows, 0), plane.block_columns, 1)
            self.constants[f"quantisers{number}"] = _float32(quantisers)
            self.constants[f"ones{number}"] = np.triu(np.ones((plane.block_columns, plane.block_columns), np.float32))

    @property
    def axes(self) -> list[tuple[Axis, Axis]]:
        """How the numbers of each plane give the image's pixels: down the rows, and across the columns (see `Axis`)."""
        return [
            (
                Axis(self.layout.height, BLOCK * plane.block_rows, plane.step, self.frequencies),
                Axis(self.layout.width, BLOCK * plane.block_columns, plane.step, self.frequencies),
            )
            for plane in self.layout.planes
        ]

    def planes(self, library: ArrayLibrary, packed: Array, constants: Constants) -> list[Array]:
        """Return a batch's dequantised coefficients. Raises UsageError for packed images of another length."""
        if packed.shape[1] != self.layout.nbytes:
            raise UsageError(
                f"packed images have {packed.shape[1]:,} bytes, and this decoder takes {self.layout.nbytes:,}: "
                "make the decoder from the batch's own dataset, in its resolution"
            )
        matrices = _matrices(library, packed, self.layout)
        planes = []
        for number, (plane, parts) in enumerate(zip(self.layout.planes, matrices, strict=True)):
            rows, columns = plane.shape(self.frequencies)
            low, high = (part[:, :rows, :columns] for part in parts)
            matrix = _with_means(library, low, high, plane, constants[f"ones{number}"])
            planes.append(matrix * constants[f"quantisers{number}"])
        return planes


class Yuv420Decoder(PackedDecoder):
    """Decodes raw 4:2:0 planes, uint8 (B, N)."""

    def __init__(self, height: int, width: int, resize: Resize | None = None) -> None:
        self.luma, self.chroma = plane_shapes(height, width)
        super().__init__((height, width), resize)

    @property
    def axes(self) -> list[tuple[Axis, Axis]]:
        """How the numbers of each plane give the image's pixels: down the rows, and across the columns (see `Axis`)."""
        height, width = self.stored
        luma, chroma = (
            (Axis(height, shape[0], step), Axis(width, shape[1], step))
            for shape, step in ((self.luma, 1), (self.chroma, 2))
        )
        return [luma, chroma, chroma]

    def planes(self, library: ArrayLibrary, packed: Array, constants: Constants) -> list[Array]:
        """Return a batch's samples, centred at 0."""
        values = library.cast(packed, "float32") - 128
        first = self.luma[0] * self.luma[1]
        second = first + self.chroma[0] * self.chroma[1]
        blue, red = (part.reshape(-1, *self.chroma) for part in (values[:, first:second], values[:, second:]))
        return [values[:, :first].reshape(-1, *self.luma), blue, red]


class PixelDecoder(PackedDecoder):
    """Resizes pixels, uint8 (B, channels, height, width)."""

    def __init__(self, field: Field, resize: Resize | None = None) -> None:
        height, width, self.channels = field.shape
        super().__init__((height, width), resize)

    @property
    def axes(self) -> list[tuple[Axis, Axis]]:
        """The axes of the rows and of the columns of each channel."""
        height, width = self.stored
        return [(Axis(height, height), Axis(width, width))] * self.channels

    def planes(self, library: ArrayLibrary, packed: Array, constants: Constants) -> list[Array]:
        """Return a batch's channels, centred at 0."""
        values = library.cast(packed, "float32") - 128
        return [values[:, channel] for channel in range(self.channels)]

    def colours(self, library: ArrayLibrary, planes: list[Array], middle: Array | int) -> Array:
        """Return the channels with `middle` added to them."""
        return library.functions.stack([plane + middle for plane in planes], 1)


def field_decoder(field: Field, resize: Resize | None = None) -> PackedDecoder | None:
    """Return the decoder of a field's packed form, or the resizer of its pixels; None if neither is needed."""
    is_packed = isinstance(CODECS[field.codec], PackedCodec)
    return packed_or_pixels(field, resize) if is_packed or resize is not None else None


def packed_or_pixels(field: Field, resize: Resize | None = None) -> PackedDecoder:
    """Return the decoder of a field's packed form, or of its pixels where it has none."""
    codec = CODECS[field.codec]
    if not isinstance(codec, PackedCodec):
        return PixelDecoder(field, resize)
    if codec.packed_form == "planes":
        height, width, _ = field.shape
        return Yuv420Decoder(height, width, resize)
    if (view := field.view) is None:
        return CoefficientDecoder(packed_layout(field), resize)
    return CoefficientDecoder(packed_layout(field), resize or Resize(*view.canvas, view.fit))


def _constants_of(rows: Matrix, columns: Matrix, number: int) -> dict[str, Matrix]:
    """Return a plane's constants by name, each in two parts; see `_parts_of`."""
    made = {}
    for name, matrix in ((f"rows{number}", rows), (f"columns{number}", columns)):
        made[name] = to_bfloat16(matrix)
        made[f"{name}_rest"] = matrix - made[name]
    return made


def _parts_of(constants: Constants, name: str) -> tuple[Array, Array]:
    """Return the coarse part of a constant, and the rest."""
    return constants[name], constants[f"{name}_rest"]


def transformed(library: ArrayLibrary, matrix: Array, rows: tuple[Array, Array], columns: tuple[Array, Array]) -> Array:
    """Return `rows @ matrix @ columns`, with each operand in two parts: a coarse one and the rest."""
    half = _product(library.functions, split_parts(library, matrix, _OF_COEFFICIENTS), columns)
    return _product(library.functions, rows, split_parts(library, half, _OF_HALF_DONE))


def _product(functions: Any, left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
    """Return the product of two operands, each given as a coarse part and a rest.

    The product of the two rests is left out: it is below bfloat16's rounding.
    """
    coarse, rest = left
    wide: Array = functions.matmul(coarse, right[0])
    return wide + functions.matmul(rest, right[0]) + functions.matmul(coarse, right[1])


def _with_means(library: ArrayLibrary, low: Array, high: Array, plane: Plane, ones: Array) -> Array:
    """Return coefficients from their low and high bits.

    The means of blocks are stored as differences along a row of blocks; `ones` is the triangular matrix that adds them
    up.
    """
    functions, rows, columns = library.functions, plane.block_rows, plane.block_columns
    # Separately, both parts are integers that bfloat16 holds exactly.
    first, second = (functions.matmul(part[:, :rows, :columns], ones) for part in (low, high))
    matrix = low + 256 * high
    top = functions.concatenate([first + 256 * second, matrix[:, :rows, columns:]], 2)
    return functions.concatenate([top, matrix[:, rows:]], 1)


def _signed_nibbles(library: ArrayLibrary, nibbles: Array) -> Array:
    """Return the signed values of 4-bit two's complement numbers, given as 0 to 15."""
    return nibbles - 16 * library.cast(nibbles >= 8, "float32")


def _matrices(library: ArrayLibrary, packed: Array, layout: CoefficientLayout) -> list[list[Array]]:
    """Return the low and high bits of each plane's coefficients, (B, rows, columns), from the bands' packed bytes."""
    found: list[list[Array]] = []
    at = 0
    for band in layout.parts:
        # int8 keeps the bits of uint8 unchanged.
        low = library.cast(library.cast(packed[:, at : at + band.low_bytes], "int8"), "float32")
        pairs = library.cast(packed[:, at + band.low_bytes : at + band.low_bytes + band.high_bytes], "float32")
        second = library.functions.floor(pairs / 16)
        nibbles = _signed_nibbles(library, library.functions.concatenate([pairs - 16 * second, second], 1))
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
    """Return a matrix extended by the next band's two blocks: one to its right, and one below both."""
    functions = library.functions
    return functions.concatenate([functions.concatenate([matrix, blocks[0]], 2), blocks[1]], 1)


def _spread(
    library: ArrayLibrary, nibbles: Array, low: list[Array], parts: list[Submatrix], plane: Plane, wide: list[Submatrix]
) -> list[Array]:
    """Return blocks like those of `low` with high bits at the places of their coefficients, and 0 at others."""
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


def split_parts(library: ArrayLibrary, values: Array, unit: float) -> tuple[Array, Array]:
    """Return numbers in two parts: multiples of `unit`, which is a power of two, and the rest."""
    # Round by arithmetic, because XLA may optimise away a conversion to bfloat16 and back.
    coarse = library.functions.round(values * (1 / unit)) * unit
    return coarse, values - coarse


def to_bytes(library: ArrayLibrary, colours: Array) -> Array:
    """Return float32 numbers rounded to the nearest uint8."""
    functions = library.functions
    return library.cast(functions.round(functions.clip(colours, 0, 255)), "uint8")


class Side(NamedTuple):
    """The weights (output pixels, stored pixels) along a side; `is_inside` is False for pixels of padding."""

    weights: npt.NDArray[Any]
    is_inside: npt.NDArray[np.bool_]


def _sides(stored: tuple[int, int], resize: Resize | None) -> tuple[Side, Side]:
    """Return the weights of rows and of columns for images stored as (height, width)."""
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


def doubling(size: int) -> npt.NDArray[Any]:
    """Return (2 * size, size): linear interpolation between the centres of samples, with repeated edges."""
    near, far = np.eye(size), np.zeros((2 * size, size))
    far[0::2] = near[np.maximum(np.arange(size) - 1, 0)]
    far[1::2] = near[np.minimum(np.arange(size) + 1, size - 1)]
    return np.asarray(0.75 * np.repeat(near, 2, 0) + 0.25 * far)


def to_bfloat16(matrix: Matrix) -> Matrix:
    """Return finite float32 numbers rounded to bfloat16, with ties to even, as float32."""
    bits = matrix.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _inverse_transform(blocks: int) -> npt.NDArray[Any]:
    """Return the matrix (8 * blocks, 8 * blocks) that computes the pixels of a row of blocks from its coefficients.

    Row (i, y) is for pixel y of block i, and column (u, j) for frequency u of block j.
    """
    whole: npt.NDArray[Any] = np.einsum("uy,ij->iyuj", basis(), np.eye(blocks))
    return whole.reshape(BLOCK * blocks, BLOCK * blocks)


def _float32(matrix: npt.NDArray[Any]) -> Matrix:
    return np.ascontiguousarray(matrix, np.float32)
