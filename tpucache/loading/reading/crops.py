"""Random resized crops and flips of 8-bit images, straight from their records: raw pixels, or the planes of yuv420.

A side that grows is interpolated linearly, with the same result as `tpucache.ondevice`. A side that shrinks is filtered
with a wider triangle, as in Pillow and torchvision, to avoid aliasing. llvmlite, if installed, compiles the loop, which
reads only the rows and columns that a crop needs; otherwise numpy makes the same bytes, more slowly. Both use integers,
so every processor makes the same bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.native import Addresses, Array, FunctionWriter, address, compile_functions, compiled

Numbers = npt.NDArray[np.int64]

_PLACE_STEPS: Final = 256  # positions are rounded to 1/256 of a pixel, as in `tpucache.ondevice.resample`
_UNIT_BITS: Final = 11  # weights sum to 1 << 11: with 8 bits of colour and two directions, products fit into 32 bits
_UNIT: Final = 1 << _UNIT_BITS
_NEAR, _FAR = 3, 1  # the weights of the nearest and the second nearest chroma sample, as yuv420 is decoded
_COLOUR_BITS: Final = 16
_SIDE_BITS: Final = 2  # _NEAR + _FAR = 1 << _SIDE_BITS
# JFIF's matrix: the amounts that Cb, then Cr, add to red, green and blue.
_COLOURS: Final = tuple(
    tuple(round(share * (1 << _COLOUR_BITS)) for share in row) for row in ((0, -0.344136, 1.772), (1.402, -0.714136, 0))
)
#: The compiled loop takes at most this many channels; numpy crops images with more.
MOST_CHANNELS: Final = 4
_LANES: Final = 16  # bytes that are blended at once


class Boxes(NamedTuple):
    """The crop box of each image, in whole pixels of the mirrored image, and whether the result is mirrored (1, else
    0).

    All arrays are float32 (n,).
    """

    top: Array
    height: Array
    left: Array
    width: Array
    rows_reversed: Array
    columns_reversed: Array

    def at(self, images: Numbers | slice) -> Boxes:
        return Boxes(*(each[images] for each in self))


class Taps(NamedTuple):
    """The filter along one side of n images: the source pixels of each result pixel, and their weights.

    `firsts` is the first source pixel of each result pixel, int64 (n, size), `counts` the number of source pixels per
    result pixel in each image, int64 (n,). `weights` is int32 (n, size, largest count), 0 beyond an image's count.
    """

    firsts: Numbers
    counts: Numbers
    weights: npt.NDArray[np.int32]


class Form(NamedTuple):
    """How an image is stored in its record: height, width and channels; as three planes (yuv420) or pixel by pixel."""

    height: int
    width: int
    channels: int
    is_planar: bool

    @property
    def half(self) -> tuple[int, int]:
        return -(-self.height // 2), -(-self.width // 2)


class Normal(NamedTuple):
    """How crops are normalised: each channel's values times `scale`, plus `shift`, both float32 (channels,)."""

    scale: npt.NDArray[np.float32]
    shift: npt.NDArray[np.float32]


class CropWork(NamedTuple):
    """The arguments of the compiled loop. Arrays are passed by their addresses."""

    images: int
    sources: int  # the addresses of records, int64 (images,)
    targets: int  # the addresses of results, int64 (images,)
    scale: int  # this and the next: the addresses of a `Normal`, float32 (MOST_CHANNELS,); 0: results stay bytes
    shift: int
    height: int  # of a result
    width: int  # of a result
    channels: int
    row_bytes: int  # of a row of pixels, or of luma, in the record
    starts: int  # the number of bytes in a row before the crop, int64 (images,)
    widths: int  # of crops, in pixels, int64 (images,)
    row_firsts: int  # this and the next three: the addresses of the arrays of `Taps`, and the last size of `weights`
    row_counts: int
    row_weights: int
    row_most: int
    column_firsts: int
    column_counts: int
    column_weights: int
    column_most: int
    row: int  # memory for a blended row of colours, int32
    blue: int  # the offset of Cb in a record, 0 without planes; the fields below are only used with planes
    red: int  # the offset of Cr
    half_bytes: int  # of a row of chroma
    half_starts: int  # like `starts`, for chroma
    half_widths: int  # like `widths`, for chroma
    half_firsts: int
    half_counts: int
    half_weights: int
    half_most: int
    luma_row: int  # memory for a blended row of each plane, int32
    blue_row: int
    red_row: int


def crop(
    form: Form, boxes: Boxes, sources: Addresses, targets: Addresses, height: int, width: int,
    normal: Normal | None = None,
) -> None:  # fmt: skip
    """Write the crop of each image to its target, (height, width, channels): uint8, or, given `normal`, float32.

    `sources` and `targets` are addresses, int64 (n,), contiguous, of memory that the caller keeps alive and has found
    large enough.
    """
    if not len(sources):
        return
    rows = side_taps(boxes.top, boxes.height, boxes.rows_reversed, form.height, height)
    columns = side_taps(boxes.left, boxes.width, boxes.columns_reversed, form.width, width)
    loop = crop_loop() if form.channels <= MOST_CHANNELS else None
    if loop is None:
        _crop_by_numpy(form, rows, columns, sources, targets, normal)
    else:
        _crop_by_loop(loop, form, boxes, rows, columns, sources, targets, normal)


def needed_bytes(form: Form, boxes: Boxes) -> Numbers:
    """Return the byte ranges of each record that its crop needs: int64 (n, parts, 2), offsets and lengths."""
    top, height = boxes.top.astype(np.int64), boxes.height.astype(np.int64)
    top = np.where(boxes.rows_reversed > 0, form.height - top - height, top)
    row_bytes = form.width * (1 if form.is_planar else form.channels)
    parts = [np.stack([top * row_bytes, height * row_bytes], -1)]
    if form.is_planar:
        rows, columns = form.half
        first = np.maximum(top // 2 - 1, 0)
        length = np.minimum((top + height - 1) // 2 + 2, rows) - first
        for plane in range(2):
            begin = form.height * form.width + plane * rows * columns
            parts.append(np.stack([begin + first * columns, length * columns], -1))
    return np.stack(parts, 1)


def side_taps(starts: Array, sizes: Array, reversed_: Array, side: int, size: int) -> Taps:
    """Return the filter that resizes a part of a side of `side` pixels to `size` pixels, for each of n images.

    `starts` and `sizes`, float32 (n,), say where each part is in the image, which was mirrored before if `reversed_`
    (n,) is 1.
    """
    first, length = starts.astype(np.int64)[:, None], sizes.astype(np.int64)[:, None]
    is_reversed = reversed_[:, None] > 0
    # The same float32 arithmetic as `ondevice.resample.crop_weights`. Sides that shrink are replaced below.
    places = np.arange(size, dtype=np.float32)
    starts, sizes = first.astype(np.float32), length.astype(np.float32)
    within = (2 * places + 1) * sizes / np.float32(2 * size) - np.float32(0.5)
    within = np.minimum(np.maximum(within, 0), sizes - 1)
    at = np.floor((within + starts) * _PLACE_STEPS + np.float32(0.5)).astype(np.int32)
    counts = np.minimum(length, 2)
    firsts = np.minimum(at // _PLACE_STEPS, first + length - counts)  # the last pixel is the second of two
    share = (at - _PLACE_STEPS * firsts).astype(np.int32) * (_UNIT // _PLACE_STEPS)
    weights = np.stack([_UNIT - share, share], 2)
    weights = np.where(is_reversed[:, :, None] & (counts == 2)[:, :, None], weights[:, :, ::-1], weights)
    reduced = np.flatnonzero(length > size)
    if len(reduced):
        few = first[reduced], length[reduced], is_reversed[reduced]
        counts[reduced], firsts[reduced], filtered = _reducing_taps(*few, size)
        weights = np.pad(weights, ((0, 0), (0, 0), (0, max(0, filtered.shape[2] - 2))))
        weights[reduced, :, : filtered.shape[2]] = filtered
    stored = np.where(is_reversed, side - firsts - counts, firsts)
    return Taps(np.ascontiguousarray(stored), np.ascontiguousarray(counts[:, 0]), np.ascontiguousarray(weights))


def _reducing_taps(
    first: Numbers, length: Numbers, is_reversed: Array, size: int
) -> tuple[Numbers, Numbers, npt.NDArray[np.int32]]:
    """Return the arrays of `Taps` for sides that shrink: counts (n, 1), firsts and weights.

    The filter is a triangle that reaches from each result pixel to the next one on either side.
    """
    scale = length / size
    centres = first + (np.arange(size) + 0.5) * scale - 0.5
    counts = np.minimum(np.ceil(2 * scale).astype(np.int64), length)
    firsts = np.clip(np.floor(centres - scale).astype(np.int64) + 1, first, first + length - counts)
    turn = np.arange(counts.max())
    offsets = np.where(is_reversed, counts - 1 - turn, turn)[:, None, :]
    distances = np.abs(firsts[:, :, None] + offsets - centres[:, :, None]) / scale[:, :, None]
    shares = np.where(turn < counts[:, :, None], np.maximum(1 - distances, 0), 0)
    weights = np.rint(shares / shares.sum(2, keepdims=True) * _UNIT).astype(np.int32)
    # The rounding error goes to the nearest pixel, so that weights sum to _UNIT.
    nearest = np.argmax(weights, 2)[:, :, None]
    rest = _UNIT - weights.sum(2, keepdims=True, dtype=np.int32)
    np.put_along_axis(weights, nearest, np.take_along_axis(weights, nearest, 2) + rest, 2)
    return counts, firsts, weights


def half_taps(taps: Taps, half: int) -> Taps:
    """Return the filter for a side of a chroma plane, which has `half` samples; its weights sum to 4 times those in
    `taps`.
    """
    most = taps.weights.shape[2]
    counts = np.minimum(taps.counts // 2 + 3, half)
    firsts = np.clip(taps.firsts // 2 - 1, 0, (half - counts)[:, None])
    weights = np.zeros((*taps.firsts.shape, int(counts.max())), np.int32)
    for turn in range(most):
        pixels = taps.firsts + turn
        near = np.minimum(pixels // 2, half - 1)
        far = np.clip(near + np.where(pixels % 2, 1, -1), 0, half - 1)
        for sample, share in ((near, _NEAR), (far, _FAR)):
            # Taps beyond an image's count have weight 0, so their position does not matter.
            at = np.clip(sample - firsts, 0, weights.shape[2] - 1)[:, :, None]
            added = np.take_along_axis(weights, at, 2) + share * taps.weights[:, :, turn : turn + 1]
            np.put_along_axis(weights, at, added, 2)
    return Taps(firsts, counts, weights)


def _crop_by_loop(
    loop: Callable[..., int], form: Form, boxes: Boxes, rows: Taps, columns: Taps, sources: Addresses,
    targets: Addresses, normal: Normal | None,
) -> None:  # fmt: skip
    left, widths = boxes.left.astype(np.int64), boxes.width.astype(np.int64)
    left = np.where(boxes.columns_reversed > 0, form.width - left - widths, left)
    pixel = 1 if form.is_planar else form.channels
    row = np.empty(form.width * MOST_CHANNELS + _LANES, np.int32)
    inside = np.ascontiguousarray(columns.firsts - left[:, None])
    starts = left * pixel
    # The loop computes with vectors of MOST_CHANNELS numbers.
    normals = [np.resize(each, MOST_CHANNELS) for each in normal or ()]
    kept: list[Array] = [row, inside, starts, widths, *normals]
    scale, shift = map(address, normals) if normals else (0, 0)
    work = CropWork(
        len(sources), address(sources), address(targets), scale, shift, rows.firsts.shape[1], inside.shape[1],
        form.channels, form.width * pixel, address(starts), address(widths),
        *_addresses(rows), address(inside), *_addresses(columns)[1:], address(row),
        *[0] * 12,
    )  # fmt: skip
    if form.is_planar:
        halves = half_taps(rows, form.half[0])
        first = np.maximum(left // 2 - 1, 0)
        length = np.minimum((left + widths - 1) // 2 + 2, form.half[1]) - first
        planes = np.empty((3, form.width * MOST_CHANNELS + _LANES), np.int32)
        blue = form.height * form.width
        kept += [*halves, first, length, planes]
        work = work._replace(
            blue=blue, red=blue + form.half[0] * form.half[1], half_bytes=form.half[1], half_starts=address(first),
            half_widths=address(length), luma_row=address(planes[0]), blue_row=address(planes[1]),
            red_row=address(planes[2]),
            **dict(zip(("half_firsts", "half_counts", "half_weights", "half_most"), _addresses(halves), strict=True)),
        )  # fmt: skip
    loop(*work)
    del kept  # kept alive while the loop reads it


def _addresses(taps: Taps) -> tuple[int, int, int, int]:
    return address(taps.firsts), address(taps.counts), address(taps.weights), taps.weights.shape[2]


def _crop_by_numpy(
    form: Form, rows: Taps, columns: Taps, sources: Addresses, targets: Addresses, normal: Normal | None
) -> None:
    size = rows.firsts.shape[1], columns.firsts.shape[1], form.channels
    halves = half_taps(rows, form.half[0]) if form.is_planar else None
    for at, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        down, across = (_matrix(taps, at, side) for taps, side in ((rows, form.height), (columns, form.width)))
        pixels = form.height * form.width
        if halves is None:
            image = _memory(source, pixels * form.channels).reshape(form.height, -1)
            colours = (down @ image).reshape(size[0], form.width, form.channels)
        else:
            luma = down @ _memory(source, pixels).reshape(form.height, -1)
            count = form.half[0] * form.half[1]
            tall = _matrix(halves, at, form.half[0])
            blue, red = (
                tall @ _memory(source + pixels + plane * count, count).reshape(form.half) for plane in range(2)
            )
            colours = _to_colours(luma, blue, red)
        made = np.einsum("xw,ywc->yxc", across, colours)
        bits = 2 * _UNIT_BITS
        made = (made + (1 << (bits - 1)) - 1 + ((made >> bits) & 1)) >> bits  # round half to even
        pixels_made: Array = np.clip(made, 0, 255).astype(np.uint8)
        if normal is not None:
            pixels_made = pixels_made.astype(np.float32) * normal.scale + normal.shift
        _memory(target, pixels_made.nbytes)[:] = pixels_made.reshape(-1).view(np.uint8)


def _matrix(taps: Taps, at: int, side: int) -> Numbers:
    count = int(taps.counts[at])
    matrix = np.zeros((taps.firsts.shape[1], side), np.int64)
    np.put_along_axis(matrix, taps.firsts[at][:, None] + np.arange(count), taps.weights[at, :, :count], 1)
    return matrix


def _memory(start: int, length: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(start))


def _to_colours(luma: Numbers, blue: Numbers, red: Numbers) -> Numbers:
    grey = 128 << (_UNIT_BITS + _SIDE_BITS)
    shift = _COLOUR_BITS + _SIDE_BITS
    changes = np.stack([blue - grey, red - grey], -1) @ np.array(_COLOURS)
    changes = (changes + (1 << (shift - 1))) >> shift
    pixels = np.arange(luma.shape[1])
    near = pixels // 2
    far = np.clip(near + np.where(pixels % 2, 1, -1), 0, changes.shape[1] - 1)
    wide = (_NEAR * changes[:, near] + _FAR * changes[:, far] + (1 << (_SIDE_BITS - 1))) >> _SIDE_BITS
    colours: Numbers = luma[:, :, None] + wide
    return colours


def crop_loop() -> Callable[..., int] | None:
    """Return the compiled loop; its arguments are the items of a CropWork."""
    return compiled(compile_crop, "numpy crops images")


def compile_crop() -> Callable[..., int]:
    return compile_functions(write_crop)("crop")


def write_crop(ir: Any, module: Any) -> None:
    """Emit the function crop, whose arguments are the fields of CropWork, as LLVM's intermediate representation."""
    blend, colour = _write_blend(ir, module), _write_colour(ir, module)
    resize, normalised = (_write_resize(ir, module, is_normalised) for is_normalised in (False, True))
    code = FunctionWriter(ir, module, "crop", len(CropWork._fields))
    build, word = code.build, code.word
    work: Any = CropWork(*code.arguments)

    def taps(name: str, image: Any, size: Any) -> tuple[Any, Any, Any, Any]:
        """Emit the code that finds the filter along one side of an image (see `Taps`) for `size` result pixels.

        `name` is "row", "column" or "half". Returns the addresses of the image's `firsts` and `weights`, its number of
        source pixels per result pixel, and the bytes of weights per result pixel.
        """
        firsts, counts, weights, most = (
            getattr(work, f"{name}_{field}") for field in ("firsts", "counts", "weights", "most")
        )
        before, step = image * size, most << 2
        return firsts + (before << 3), weights + before * step, code.item(counts, image), step

    with code.counting(0, work.images) as image:
        source, start, width = (code.item(array, image) for array in (work.sources, work.starts, work.widths))
        row_firsts, row_weights, row_count, row_step = taps("row", image, work.height)
        column_firsts, column_weights, column_count, column_step = taps("column", image, work.width)
        target = code.item(work.targets, image)
        has_scale = work.scale.compare("!=", 0)
        target_bytes = work.width * work.channels * has_scale.emit("select", word(4), word(1))
        has_planes = work.blue.compare("!=", 0)
        with code.counting(0, work.height) as y:
            first = source + code.item(row_firsts, y) * work.row_bytes + start
            weights = row_weights + y * row_step
            with build.if_else(has_planes) as (planar, plain):
                with planar:
                    code.call(blend, first, work.row_bytes, width, weights, row_count, work.luma_row)
                    half_firsts, half_weights, half_count, half_step = taps("half", image, work.height)
                    half_start, half_width = (code.item(each, image) for each in (work.half_starts, work.half_widths))
                    half_first = code.item(half_firsts, y) * work.half_bytes + half_start
                    of_half = half_weights + y * half_step
                    for plane, row in ((work.blue, work.blue_row), (work.red, work.red_row)):
                        at = source + plane + half_first
                        code.call(blend, at, work.half_bytes, half_width, of_half, half_count, row)
                    last = work.half_bytes - 1
                    rows = [work.luma_row, work.blue_row, work.red_row]
                    code.call(colour, *rows, start, width, half_start, half_width, last, work.row)
                with plain:
                    code.call(blend, first, work.row_bytes, width * work.channels, weights, row_count, work.row)
            to = target + y * target_bytes
            columns = [column_firsts, column_weights, column_step, column_count]
            arguments = [work.row, *columns, work.width, work.channels, to, work.scale, work.shift]
            with build.if_else(has_scale) as (to_floats, to_bytes):
                with to_floats:
                    code.call(normalised, *arguments)
                with to_bytes:
                    code.call(resize, *arguments)
    build.ret(word(0))


def _splat(code: FunctionWriter, value: Any, lanes: int) -> Any:
    kind, places = (code.ir.VectorType(each, lanes) for each in (value.type, code.half))
    single = code.value(kind(code.ir.Undefined)).emit("insert_element", value, code.half(0))
    return single.emit("shuffle_vector", single, places([0] * lanes))


def _write_blend(ir: Any, module: Any) -> Any:
    """Emit the function blend(first, row_bytes, length, weights, count, target), and return it.

    It writes the weighted sum of `count` rows, of `length` bytes each, as int32 to the address `target`.
    """
    code = FunctionWriter(ir, module, "blend", 6)
    first, row_bytes, length, weights, count, target = code.arguments

    def blend(start: Any, stop: Any, lanes: int) -> None:
        of_bytes, numbers = (ir.VectorType(kind, lanes) for kind in (code.byte, code.half))
        with code.counting(start, stop, lanes) as at:
            source = first + at

            def weighted(turn: Any) -> Any:
                pixels = code.load(of_bytes, source + turn * row_bytes).emit("zext", numbers)
                return pixels * _splat(code, code.load(code.half, weights + (turn << 2)), lanes)

            total = [weighted(code.value(code.word(0)))]
            with code.counting(1, count, 1, total) as turn:
                total[0] += weighted(turn)
            code.store(total[0], target + (at << 2))

    whole = length & -_LANES  # vectors must not reach beyond the row, where there may be no memory
    blend(0, whole, _LANES)
    blend(whole, length, 1)
    code.build.ret(code.word(0))
    return code.function


def _write_colour(ir: Any, module: Any) -> Any:
    """Emit the function colour(luma, blue, red, left, width, half_left, half_width, last, target), and return it.

    It converts a row of luma and chroma to RGB, int32 each.
    """
    code = FunctionWriter(ir, module, "colour", 9)
    luma, blue, red, left, width, half_left, half_width, last, target = code.arguments
    numbers = ir.VectorType(code.half, MOST_CHANNELS)
    shift = _COLOUR_BITS + _SIDE_BITS

    def number(row: Any, at: Any) -> Any:
        return code.load(code.half, row + (at << 2)).emit("sext", code.word) - (128 << (_UNIT_BITS + _SIDE_BITS))

    # From the last sample to the first, because four numbers overwrite one.
    with code.counting(0, half_width) as turn:
        sample = half_width - 1 - turn
        of_blue, of_red = number(blue, sample), number(red, sample)
        change = code.value(numbers(None))
        for channel, (by_blue, by_red) in enumerate(zip(*_COLOURS, strict=True)):
            added = of_blue * by_blue + of_red * by_red + (1 << (shift - 1))
            change = change.emit(
                "insert_element", added.emit("ashr", shift).emit("trunc", code.half), code.half(channel)
            )
        code.store(change, blue + (sample << 4))

    def within(sample: Any) -> Any:
        return code.load(numbers, blue + ((code.between(sample, 0, last) - half_left) << 4))

    with code.counting(0, width) as at:
        pixel = left + at
        near = pixel >> 1
        far = near + (((pixel & 1) << 1) - 1)
        wide = (within(near) * _NEAR + within(far) + (1 << (_SIDE_BITS - 1))).emit("ashr", _SIDE_BITS)
        grey = code.load(code.half, luma + (at << 2))
        # The next pixel overwrites the fourth number.
        code.store(wide + _splat(code, grey, MOST_CHANNELS), target + at * (3 * 4))
    code.build.ret(code.word(0))
    return code.function


def _write_resize(ir: Any, module: Any, is_normalised: bool) -> Any:
    """Emit the function resize(row, firsts, weights, step, count, width, channels, target, scale, shift); return it.

    It resizes the int32 row at the address `row`, which `blend` wrote, to `width` pixels, and writes them to `target`:
    as bytes, or, if `is_normalised`, as float32, times the numbers at `scale`, plus those at `shift`.
    """
    code = FunctionWriter(ir, module, "normalised" if is_normalised else "resize", 10)
    build, half = code.build, code.half
    row, firsts, weights, step, count, width, channels, target, scale, shift = code.arguments
    numbers, floats = (ir.VectorType(kind, MOST_CHANNELS) for kind in (half, ir.FloatType()))
    bits = 2 * _UNIT_BITS
    factors = [code.load(floats, each) for each in (scale, shift)] if is_normalised else []
    pixel_bytes = channels << 2
    result_bytes = pixel_bytes if is_normalised else channels

    def pixel(x: Any) -> tuple[Any, Any]:
        """Emit the code that computes a pixel of the result; return its values, and the address that they belong to."""
        first = row + code.item(firsts, x) * pixel_bytes
        own = weights + x * step

        def weighted(turn: Any) -> Any:
            colours = code.load(numbers, first + turn * pixel_bytes)
            return colours * _splat(code, code.load(half, own + (turn << 2)), MOST_CHANNELS)

        total = [weighted(code.value(code.word(0)))]
        with code.counting(1, count, 1, total) as turn:
            total[0] += weighted(turn)
        odd = total[0].emit("ashr", bits) & 1
        made = code.between((total[0] + ((1 << (bits - 1)) - 1) + odd).emit("ashr", bits), 0, 255)
        if is_normalised:
            # A product and a sum, which are both rounded, as in `ondevice.BatchNormalise`.
            made = made.emit("sitofp", floats).emit("fmul", factors[0]).emit("fadd", factors[1])
        else:
            made = made.emit("trunc", ir.VectorType(code.byte, MOST_CHANNELS))
        return made, target + x * result_bytes

    few = code.word(MOST_CHANNELS - 1)  # pixels at a row's end, beyond which a store of MOST_CHANNELS values may reach
    last = width - code.smaller(width, few)
    with code.counting(0, last) as x:
        code.store(*pixel(x))  # the next pixels overwrite what is beyond the pixel's channels
    with code.counting(last, width) as x:
        made, to = pixel(x)
        for channel in range(MOST_CHANNELS):
            with build.if_then(channels > channel):
                part = made.emit("extract_element", half(channel))
                code.store(part, to + channel * (4 if is_normalised else 1))
    build.ret(code.word(0))
    return code.function
