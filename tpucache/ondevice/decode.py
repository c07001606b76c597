"""Decoders for packed batches, written once for torch and JAX.

The code is made for a TPU. A TPU works on tiles of 8x128 numbers, so no tensor ends in a dimension of 8, and nothing is
transposed or shuffled. A TPU's matrix multiplication rounds operands to bfloat16 and adds in float32, so each operand
is passed as two numbers that bfloat16 holds nearly exactly. On any device, the result is within one level of that of
float32 matrix multiplications.

An image of another size needs no further step: the constant matrices already include Lanczos' weights for its rows and
columns. From coefficients, a smaller image needs only the low frequencies.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.geometry import Fit, lanczos, margins, placement
from tpucache.ondevice.arrays import Array, ArrayLibrary
from tpucache.store.codecs import CODECS
from tpucache.store.codecs.codec import PackedCodec
from tpucache.store.codecs.coefficients import BLOCK, CoefficientLayout, Plane, Submatrix, basis
from tpucache.store.codecs.dct import packed_layout
from tpucache.store.codecs.yuv420 import plane_shapes
from tpucache.store.fields import Field

# A number is split into a rest and a multiple of one of these units; the multiple needs 8 bits and a sign. Coefficients
# are integers within 2048, so both parts are exact. After the first of two multiplications, numbers are within 1024.
_OF_COEFFICIENTS: Final = 8.0
_OF_HALF_DONE: Final = 4.0

_LEAST_SIDE: Final = 8
_MOST_TIMES: Final = 2

Constants = Mapping[str, Array]
#: Two arrays that add up to a matrix, its coarse part and the rest: a tuple, or an array with one more dimension.
Parts = Any
Matrix = npt.NDArray[np.float32]

#: (height, width) in pixels, or one number for both.
Size = int | tuple[int, int]


class Resize(NamedTuple):
    """The size of the images to make, in pixels, and how an image of another shape gets it (see `Recipe.fit`)."""

    height: int
    width: int
    fit: Fit = "crop"


def to_resize(field: Field, size: Size, fit: Fit) -> Resize:
    sides = size if isinstance(size, tuple) else (size, size)
    if fit not in get_args(Fit):
        raise UsageError(f"fit is one of {', '.join(get_args(Fit))}, not {fit!r}")
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
        raise UsageError(f"size is (height, width) in pixels, or one number for both, not {size!r}")
    shape = field.shape if field.view is None else field.view.shape
    for side, stored in zip(sides, shape[:2], strict=True):
        if not min(_LEAST_SIDE, stored) <= side <= _MOST_TIMES * stored:
            raise UsageError(
                f"images of {shape[0]}x{shape[1]} can be resized to sides from {_LEAST_SIDE} pixels to twice their "
                f"own, not {sides[0]}x{sides[1]}: choose another size, or warm up a cache of larger images"
            )
    return Resize(*sides, fit)


class Axis(NamedTuple):
    """One side of a stored plane of an image: how the plane's numbers along this side give the image's pixels.

    Along this side, the image has `pixels` pixels, and the plane has `samples` samples, each covering `step` pixels.
    The plane's numbers are the samples themselves if `frequencies` is None, else the lowest `frequencies` frequencies
    of each block of eight samples.
    """

    pixels: int
    samples: int
    step: int = 1
    frequencies: int | None = None

    def matrix(self) -> npt.NDArray[Any]:
        """Return the float64 matrix (pixels, numbers) that turns the plane's numbers along this side into pixels."""
        if self.frequencies is None:
            made = np.eye(self.samples)
        else:
            blocks = self.samples // BLOCK
            # The matrix (8 * blocks, 8 * blocks) that computes the pixels of a row of blocks from its coefficients.
            whole = np.einsum("uy,ij->iyuj", basis(), np.eye(blocks)).reshape(self.samples, -1)
            made = whole[:, : self.frequencies * blocks]
        made = doubling(self.samples) @ made if self.step == 2 else made
        return np.asarray(made[: self.pixels])


class PackedDecoder(ABC):
    """Makes images from packed batches, with static shapes, in the stored size or resized."""

    def __init__(self, stored: tuple[int, int], resize: Resize | None) -> None:
        #: The stored size of an image in pixels, (height, width).
        self.stored = stored
        #: float32 constants by name; the caller moves them to the device.
        self.constants: dict[str, Matrix] = {}
        sides = _sides(stored, resize)
        for number, (rows, columns) in enumerate(self.axes):
            if rows.frequencies is not None or rows.step > 1 or resize is not None:  # else the numbers are pixels
                down, across = (side @ axis.matrix() for side, axis in zip(sides, (rows, columns), strict=True))
                self.constants[f"rows{number}"] = _in_parts(_float32(down))
                self.constants[f"columns{number}"] = _in_parts(_float32(across.T))
        above, beside = (side.any(1) for side in sides)  # a pixel of padding has no weights
        if not (above.all() and beside.all()):
            self.constants["white"] = _float32(128 * np.outer(above, beside))

    @property
    @abstractmethod
    def axes(self) -> list[tuple[Axis, Axis]]:
        """How each plane's numbers give the image's pixels: down the rows, and across the columns (see `Axis`)."""

    @abstractmethod
    def planes(self, library: ArrayLibrary, packed: Array, constants: Constants) -> list[Array]:
        """Return each plane's numbers for a batch, float32 (batch, rows, columns), integers from -2048 to 2047."""

    def colours(self, library: ArrayLibrary, planes: list[Array], middle: Array | int) -> Array:
        """Return images, float32 (batch, channels, height, width), from their planes' pixels, by JFIF's matrix."""
        luma = planes[0] + middle
        if len(planes) == 1:
            return luma[:, None]
        blue, red = planes[1:]
        green = luma - 0.344136 * blue - 0.714136 * red
        colours: Array = library.functions.stack([luma + 1.402 * red, green, luma + 1.772 * blue], 1)
        return colours

    def decode(self, library: ArrayLibrary, packed: Array, constants: Constants) -> Array:
        """Return the images of a packed batch, uint8 (batch, channels, height, width)."""
        return self._decoded(library, packed, constants, functools.partial(transformed, library))

    def decode_here(self, packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the images of a packed batch, uint8 (batch, height, width, channels), computed on the host."""
        library = ArrayLibrary(np, lambda constant: constant)
        images = self._decoded(
            library, packed, self.constants, lambda plane, down, across: sum(down) @ (plane @ sum(across))
        )
        return np.ascontiguousarray(np.moveaxis(images, 1, 3))

    def _decoded(
        self,
        library: ArrayLibrary,
        packed: Array,
        constants: Constants,
        product: Callable[[Array, Parts, Parts], Array],
    ) -> Array:
        planes = [
            product(plane, constants[f"rows{number}"], constants[f"columns{number}"])
            if f"rows{number}" in constants
            else plane
            for number, plane in enumerate(self.planes(library, packed, constants))
        ]
        return to_bytes(library, self.colours(library, planes, constants.get("white", 128)))


class CoefficientDecoder(PackedDecoder):
    """Decodes packed images of quantised DCT coefficients, uint8 (batch, bytes)."""

    def __init__(self, layout: CoefficientLayout, resize: Resize | None = None, frequencies: int | None = None) -> None:
        """Take the layout of the packed bytes, and the size of the images to make, by default the stored size.

        `frequencies` is how many frequencies of each block to use in each direction, by default all stored ones.
        """
        self.layout = layout
        self.frequencies = min(frequencies or BLOCK, layout.frequencies)
        super().__init__((layout.height, layout.width), resize)
        for number, plane in enumerate(layout.planes):
            table = plane.table[: self.frequencies, : self.frequencies]
            quantisers = np.repeat(np.repeat(table, plane.block_rows, 0), plane.block_columns, 1)
            self.constants[f"quantisers{number}"] = _float32(quantisers)
            self.constants[f"ones{number}"] = np.triu(np.ones((plane.block_columns, plane.block_columns), np.float32))

    @property
    def axes(self) -> list[tuple[Axis, Axis]]:
        return [
            (
                Axis(self.layout.height, BLOCK * plane.block_rows, plane.step, self.frequencies),
                Axis(self.layout.width, BLOCK * plane.block_columns, plane.step, self.frequencies),
            )
            for plane in self.layout.planes
        ]

    def planes(self, library: ArrayLibrary, packed: Array, constants: Constants) -> list[Array]:
        if packed.shape[1] != self.layout.nbytes:
            raise UsageError(
                f"packed images have {packed.shape[1]:,} bytes, and this decoder takes {self.layout.nbytes:,}: "
                "make the decoder from the dataset that the batch comes from, in the same resolution"
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
    """Decodes packed images of raw 4:2:0 planes, uint8 (batch, bytes)."""

    def __init__(self, height: int, width: int, resize: Resize | None = None) -> None:
        self.luma, self.chroma = plane_shapes(height, width)
        super().__init__((height, width), resize)

    @property
    def axes(self) -> list[tuple[Axis, Axis]]:
        height, width = self.stored
        luma, chroma = (
            (Axis(height, shape[0], step), Axis(width, shape[1], step))
            for shape, step in ((self.luma, 1), (self.chroma, 2))
        )
        return [luma, chroma, chroma]

    def planes(self, library: ArrayLibrary, packed: Array, constants: Constants) -> list[Array]:
        values = library.cast(packed, "float32") - 128
        first = self.luma[0] * self.luma[1]
        second = first + self.chroma[0] * self.chroma[1]
        blue, red = (part.reshape(-1, *self.chroma) for part in (values[:, first:second], values[:, second:]))
        return [values[:, :first].reshape(-1, *self.luma), blue, red]


class PixelDecoder(PackedDecoder):
    """Resizes images that are stored as pixels, uint8 (batch, channels, height, width)."""

    def __init__(self, field: Field, resize: Resize | None = None) -> None:
        height, width, self.channels = field.shape
        super().__init__((height, width), resize)

    @property
    def axes(self) -> list[tuple[Axis, Axis]]:
        height, width = self.stored
        return [(Axis(height, height), Axis(width, width))] * self.channels

    def planes(self, library: ArrayLibrary, packed: Array, constants: Constants) -> list[Array]:
        values = library.cast(packed, "float32") - 128
        return [values[:, channel] for channel in range(self.channels)]

    def colours(self, library: ArrayLibrary, planes: list[Array], middle: Array | int) -> Array:
        return library.functions.stack([plane + middle for plane in planes], 1)


def field_decoder(field: Field, resize: Resize | None = None) -> PackedDecoder | None:
    """Return the decoder of a field's packed form, or a resizer of its pixels; None if neither is needed."""
    is_packed = isinstance(CODECS[field.codec], PackedCodec)
    return packed_or_pixels(field, resize) if is_packed or resize is not None else None


def packed_or_pixels(field: Field, resize: Resize | None = None) -> PackedDecoder:
    """Return the decoder of a field's packed form, or a PixelDecoder if its codec has no packed form."""
    codec = CODECS[field.codec]
    if not isinstance(codec, PackedCodec):
        return PixelDecoder(field, resize)
    if codec.packed_form == "planes":
        height, width, _ = field.shape
        return Yuv420Decoder(height, width, resize)
    if (view := field.view) is None:
        return CoefficientDecoder(packed_layout(field), resize)
    return CoefficientDecoder(packed_layout(field), resize or Resize(*view.canvas, view.fit))


def _in_parts(matrix: Matrix) -> Matrix:
    """Return two matrices that add up to `matrix`, the first rounded to bfloat16: float32 (2, rows, columns)."""
    coarse = to_bfloat16(matrix)
    return np.stack([coarse, matrix - coarse])


def transformed(library: ArrayLibrary, matrix: Array, rows: Parts, columns: Parts) -> Array:
    """Return `rows @ matrix @ columns`. `rows` and `columns` are each given as two matrices, which add up to them."""
    half = _product(library.functions, split_parts(library, matrix, _OF_COEFFICIENTS), columns)
    return _product(library.functions, rows, split_parts(library, half, _OF_HALF_DONE))


def _product(functions: Any, left: Parts, right: Parts) -> Array:
    """Return the matrix product of two operands.

    The product of the two rests is left out: it is smaller than bfloat16's rounding.
    """
    coarse, rest = left
    wide: Array = functions.matmul(coarse, right[0])
    return wide + functions.matmul(rest, right[0]) + functions.matmul(coarse, right[1])


def _with_means(library: ArrayLibrary, low: Array, high: Array, plane: Plane, ones: Array) -> Array:
    """Return a plane's coefficients from their low and high bits."""
    functions, rows, columns = library.functions, plane.block_rows, plane.block_columns
    # Separately, both parts are integers that bfloat16 holds exactly.
    first, second = (functions.matmul(part[:, :rows, :columns], ones) for part in (low, high))
    matrix = low + 256 * high
    top = functions.concatenate([first + 256 * second, matrix[:, :rows, columns:]], 2)
    return functions.concatenate([top, matrix[:, rows:]], 1)


def _matrices(library: ArrayLibrary, packed: Array, layout: CoefficientLayout) -> list[Parts]:
    """Return, for each plane, the low bits and the high bits of its coefficients, (batch, rows, columns) each."""
    # int8 keeps the bits of uint8 unchanged.
    bits = library.cast(library.cast(packed[:, : layout.low_bytes], "int8"), "float32")
    pairs = library.cast(packed[:, layout.low_bytes :], "float32")
    second = library.functions.floor(pairs / 16)
    nibbles = library.functions.concatenate([pairs - 16 * second, second], 1)
    nibbles = nibbles - 16 * library.cast(nibbles >= 8, "float32")  # with their signs
    at = filled = 0
    found = []
    for plane, (rows, columns), wide in zip(layout.planes, layout.low, layout.high, strict=True):
        low = bits[:, at : at + rows * columns].reshape(-1, rows, columns)
        at += rows * columns
        count = sum(part.size for part in wide)
        found.append((low, _spread(library, nibbles[:, filled : filled + count], low, plane, wide)))
        filled += count
    return found


def _spread(library: ArrayLibrary, nibbles: Array, low: Array, plane: Plane, wide: list[Submatrix]) -> Array:
    """Return the high bits of the coefficients whose low bits are `low`, in the same shape."""
    functions, at = library.functions, 0
    widths = {part.first: part.columns for part in wide}
    rows = []
    for start in range(0, low.shape[1], plane.block_rows):
        width = widths.get(start, 0)
        count = plane.block_rows * width
        row = [nibbles[:, at : at + count].reshape(-1, plane.block_rows, width)] if width else []
        row += [functions.zeros_like(low[:, : plane.block_rows, width:])] if width < low.shape[2] else []
        rows.append(functions.concatenate(row, 2))
        at += count
    return functions.concatenate(rows, 1)


def split_parts(library: ArrayLibrary, values: Array, unit: float) -> Parts:
    """Return numbers as two parts that add up to them: multiples of `unit`, a power of two, and the rest."""
    # Round by arithmetic, because XLA may optimise away a conversion to bfloat16 and back.
    coarse = library.functions.round(values * (1 / unit)) * unit
    return coarse, values - coarse


def to_bytes(library: ArrayLibrary, colours: Array) -> Array:
    """Return float32 numbers rounded to integers and limited to 0 to 255, as uint8."""
    functions = library.functions
    return library.cast(functions.round(functions.clip(colours, 0, 255)), "uint8")


def _sides(stored: tuple[int, int], resize: Resize | None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the weights of the stored pixels in each output pixel, (output pixels, stored pixels), for both sides."""
    height, width = stored
    if resize is None:
        return np.eye(height), np.eye(width)
    place = placement((0.0, 0.0, float(width), float(height)), (resize.width, resize.height), resize.fit)
    left, top = margins(place.size, (resize.width, resize.height))
    return (
        _side(height, place.box[1], place.box[3], place.size[1], top, resize.height),
        _side(width, place.box[0], place.box[2], place.size[0], left, resize.width),
    )


def _side(stored: int, start: float, stop: float, size: int, margin: int, canvas: int) -> npt.NDArray[Any]:
    weights = np.zeros((canvas, stored))
    weights[margin : margin + size] = lanczos(stored, start, stop, size)
    return weights


def doubling(size: int) -> npt.NDArray[Any]:
    """Return a matrix (2 * size, size) that doubles a row of samples by linear interpolation."""
    near, far = np.eye(size), np.zeros((2 * size, size))
    far[0::2] = near[np.maximum(np.arange(size) - 1, 0)]
    far[1::2] = near[np.minimum(np.arange(size) + 1, size - 1)]
    return np.asarray(0.75 * np.repeat(near, 2, 0) + 0.25 * far)


def to_bfloat16(matrix: Matrix) -> Matrix:
    """Return finite float32 numbers rounded to bfloat16, with ties to even, as float32."""
    bits = matrix.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _float32(matrix: npt.NDArray[Any]) -> Matrix:
    return np.ascontiguousarray(matrix, np.float32)
