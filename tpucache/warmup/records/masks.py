"""Decodes masks, from encoded bytes or arrays, into one class number for each pixel.

The recipe decides how to read the pixels of a mask's file:

- with `mask_colours`, the class is the position of the pixel's colour in the table, also in grey and palette images.
- with `mask_values` "scale", black is class 0 and white (255, or 65535 in 16 bits) is class 1, also in a palette.
- otherwise, the class is the stored number, up to 255; in a palette image it is the index, not the colour, as in VOC,
  mmsegmentation and torchvision. 1 bit is 0 and 255. RGB, and grey with alpha, are refused.

Transparency is ignored.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError
from tpucache.native import Array
from tpucache.recipe import Recipe
from tpucache.warmup.records import naming, refusal
from tpucache.warmup.records.pillow import JPEGS, PillowImage, opened
from tpucache.warmup.records.pillow_modes import COLOUR_MODES, deep_colours, white_of_ppm
from tpucache.warmup.sources.source import RunsOrder

Mask = npt.NDArray[np.uint8]

_PALETTES: Final = ("P", "PA")
#: Pillow's modes whose pixels can be black and white.
_BLACK_AND_WHITE: Final = ("1", "L", "LA", *_PALETTES, "RGB", "RGBA")
#: The mode in which class numbers are read, by the mode of the file.
_NUMBERS: Final = {"1": "L", "L": "L", "P": "P", "PA": "P"}
#: A mask of fewer run lengths is too small to tell in which order they were counted.
_LEAST_RUNS: Final = 16


class DecodedMask(NamedTuple):
    """The class numbers of a mask's first frame as stored, uint8 (height, width), and its EXIF orientation, 1 to 8."""

    classes: Mask
    orientation: int = 1
    has_several_frames: bool = False


def decode_mask(data: bytes | Array, path: str, recipe: Recipe | None = None) -> Mask:
    """Return a mask's class numbers in its stored orientation, uint8 (height, width)."""
    with naming(path):
        return decode_turned_mask(data, recipe or Recipe()).classes


def decode_turned_mask(data: bytes | Array, recipe: Recipe) -> DecodedMask:
    """Return a mask with what is known of its file."""
    if isinstance(data, np.ndarray):
        return DecodedMask(_of_array(data, recipe))
    try:
        with opened(data, recipe.max_pixels) as file:
            _check_depth(file, is_scaled=recipe.mask_values == "scale")
            read_as = _mode_to_read(file.image.mode, recipe)
            pixels = file.pixels(read_as or file.image.mode)
            facts = file.orientation, file.has_several_frames
    except SampleError as error:
        raise refusal(f"the mask: {error.reason}") from error
    if not read_as:
        advice = "save it as grey or palette, with one class number for each pixel"
        if file.image.mode == "RGB":
            advice += ", or give --mask-colours, the colour of each class"
        raise refusal(f"the mask is an image of mode {file.image.mode}: {advice}")
    if read_as == "L" and file.image.mode == "L" and file.bits < 8:
        pixels = pixels // np.uint8(255 // (2**file.bits - 1))
    white = 65535 if read_as.startswith("I") else 255
    return DecodedMask(_to_classes(pixels, white, recipe, is_lossy=file.image.format in JPEGS), *facts)


def _mode_to_read(mode: str, recipe: Recipe) -> str:
    """Return Pillow's mode in which a mask with the mode `mode` is read, or ""."""
    if mode.startswith("I"):
        return mode
    if recipe.mask_colours and mode != "F":
        return "RGB"
    if recipe.mask_values == "scale":
        return "RGB" if mode in _BLACK_AND_WHITE else ""
    return _NUMBERS.get(mode, "")


def _check_depth(file: PillowImage, *, is_scaled: bool) -> None:
    mode, bits = file.image.mode, file.bits
    white = white_of_ppm(file) if file.image.format == "PPM" and mode != "1" else 255
    if not is_scaled and white not in (255, 65535):
        raise refusal(f"the file says that {white} is white, so Pillow scales the pixels' numbers: save it as a PNG")
    if mode != "1" and file.is_white_zero and (not is_scaled or bits > 8):
        raise refusal("0 is white in this TIFF, and Pillow inverts its numbers of 8 bits: save it as a PNG")
    if mode in COLOUR_MODES and bits == 16:
        colours = deep_colours(file)[..., : 1 if mode == "LA" else 3]
        if not np.array_equal(colours >> 8, colours & 255):
            raise refusal("its colours have 16 bits, and 8 of them are not enough: save the mask with 8 bits")


def has_grey_palette(data: bytes | Array, max_pixels: int | None = None) -> bool:
    """Return whether a mask is a palette image of greys that differ from their indices."""
    if isinstance(data, np.ndarray):
        return False
    with opened(data, max_pixels) as file:
        if file.image.mode not in _PALETTES:
            return False
        colours, indices = file.pixels("RGB"), file.pixels("P")
    greys = colours[..., 0]
    is_binary = indices.max() <= 1 and np.array_equal(greys, indices * np.uint8(255))
    return not (is_binary or np.array_equal(greys, indices)) and _is_grey(colours)


def _is_grey(pixels: Array) -> bool:
    return bool((pixels[..., :1] == pixels).all())


def draw_runs(runs: Array, size: tuple[int, int], order: RunsOrder | None = None) -> Mask:
    """Return the mask of an image of `size` (width, height): uint8 (height, width), 0 outside of all runs."""
    width, height = size
    pixels = np.zeros(width * height, np.uint8)
    ends = runs[:, 1] + runs[:, 2]
    if len(ends) and ends.max() > len(pixels):
        raise refusal(
            f"its run lengths end at pixel {ends.max()}, and the image has {width} x {height} = {len(pixels)} pixels"
        )
    for number, start, end in zip(runs[:, 0].tolist(), runs[:, 1].tolist(), ends.tolist(), strict=True):
        pixels[start:end] = number
    by_columns, by_rows = pixels.reshape(width, height).T, pixels.reshape(height, width)
    # Read in the wrong order, a mask falls into stripes. A square image gives no hint: its mask is only transposed.
    if order is None and width != height and len(runs) >= _LEAST_RUNS and 2 * _edges(by_rows) < _edges(by_columns):
        raise refusal(
            "its run lengths were probably counted along the rows: down the columns, the mask falls into stripes. Give "
            "--rle-order rows, or --rle-order columns if the stripes are right"
        )
    return np.ascontiguousarray(by_rows if order == "rows" else by_columns)


def _edges(mask: Mask) -> int:
    return int(np.count_nonzero(mask[1:] != mask[:-1]) + np.count_nonzero(mask[:, 1:] != mask[:, :-1]))


def _of_array(data: Array, recipe: Recipe) -> Mask:
    plain = data[..., 0] if data.ndim == 3 and data.shape[2] == 1 else data
    dtypes = (np.uint8, np.uint16, np.bool_) if recipe.mask_values == "scale" else (np.uint8,)
    is_colours = recipe.mask_colours and plain.dtype == np.uint8 and plain.shape[2:] == (3,)
    if not is_colours and (plain.ndim != 2 or plain.dtype not in dtypes):
        raise refusal(f"the mask must be uint8 (height, width), not {data.dtype} {data.shape}")
    if plain.dtype == np.bool_:
        return plain.astype(np.uint8)
    return _to_classes(plain, np.iinfo(plain.dtype).max, recipe)


def _to_classes(values: Array, white: int, recipe: Recipe, *, is_lossy: bool = False) -> Mask:
    """Return the class numbers of pixels: RGB (height, width, 3), or numbers (height, width) from 0 to `white`."""
    if recipe.mask_colours and values.dtype == np.uint8:
        return _by_colours(values, recipe)
    if values.ndim == 3:
        if not _is_grey(values):
            raise refusal(
                "the mask has colours, and --mask-values scale takes only black and white: give --mask-colours"
            )
        values = values[..., 0]
    low, high = int(values.min()), int(values.max())
    if recipe.mask_values == "scale":
        if low < 0 or high > white:
            raise refusal(f"the mask holds {low} to {high}, not 0 to {white}")
        between = values[(values != 0) & (values != white)]
        if between.size and not is_lossy:
            raise refusal(
                f"the mask holds {between[0]}, and --mask-values scale takes only 0 and {white}: save the mask with "
                "these two numbers, or leave the option out for class numbers"
            )
        classes = np.asarray(values > white // 2, np.uint8)
    elif low < 0 or high > 255:
        advice = "; --mask-values scale makes 0 and 65535 into 0 and 1" if high == white else ""
        raise refusal(f"the mask holds {low} to {high}, but a mask can hold only 0 to 255{advice}")
    else:
        classes = values.astype(np.uint8)
    return _by_colours(classes, recipe) if recipe.mask_colours else classes


def _by_colours(pixels: Array, recipe: Recipe) -> Mask:
    """Return the position of each pixel's colour in the recipe's table; grey is a colour."""
    rgb = np.broadcast_to(np.atleast_3d(pixels), (*pixels.shape[:2], 3)).astype(np.int32)
    codes = rgb[..., 0] << 16 | rgb[..., 1] << 8 | rgb[..., 2]
    known = np.array([int(colour, 16) for colour in recipe.mask_colours or ()], np.int32)
    order = np.argsort(known)
    places = order[np.searchsorted(known, codes, sorter=order).clip(max=len(known) - 1)]
    others = codes[known[places] != codes]
    if others.size:
        other = ", ".join(map(str, int(others[0]).to_bytes(3, "big")))
        raise refusal(f"the mask has the colour {other}, which --mask-colours does not list: add the colour")
    return np.asarray(places, np.uint8)
