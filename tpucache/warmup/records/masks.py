"""Decodes masks, from encoded bytes or arrays, into one class number for each pixel.

The recipe decides how to read the pixels of a mask's file:

- with `mask_colours`, the class is the position of the pixel's colour in the table, also in grey, palette and 1-bit
  images.
- with `mask_values` "scale", black is class 0 and white (255, or 65535 in 16 bits) is class 1. Pixels of a palette
  image are its colours.
- otherwise, the class is the stored number. 8-bit grey is used unchanged. In a palette image the class is the index,
  not the colour, as in VOC, mmsegmentation and torchvision. Grey of 2 or 4 bits is used unchanged, too; 1 bit is 0
  and 255. 16-bit grey is used if no number is above 255. RGB, and grey with alpha, are refused.

Transparency is ignored.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from tpucache.errors import SampleError
from tpucache.native import Array
from tpucache.recipe import Recipe
from tpucache.warmup.records.numbers import PixelsError
from tpucache.warmup.records.pillow import has_several_frames, opened, orientation, stored_pixels
from tpucache.warmup.records.pillow_modes import COLOUR_MODES, bits_of, deep_colours, is_white_zero, white_of_ppm
from tpucache.warmup.sources.source import RunsOrder

Mask = npt.NDArray[np.uint8]

_WHAT: Final = "the mask: "
_LOSSY: Final = ("JPEG", "MPO")
_NO_CLASS: Final = -1
_PALETTES: Final = ("P", "PA")
#: A mask of fewer run lengths is too small to tell in which order they were counted.
_LEAST_RUNS: Final = 16


class _Numbers(NamedTuple):
    """A mask's pixels as stored, its EXIF orientation, the number for white, and whether its compression is lossy."""

    values: Array
    orientation: int
    white: int
    is_lossy: bool = False


class DecodedMask(NamedTuple):
    """A mask's class numbers in its stored orientation, its EXIF orientation, and whether the file has several frames.

    `classes` are uint8 (height, width), those of the first frame. `orientation` is 1 to 8.
    """

    classes: Mask
    orientation: int = 1
    has_several_frames: bool = False


def decode_mask(data: bytes | Array, path: str, recipe: Recipe | None = None) -> Mask:
    """Return a mask's class numbers in its stored orientation, uint8 (height, width)."""
    return decode_turned_mask(data, path, recipe or Recipe()).classes


def decode_turned_mask(data: bytes | Array, path: str, recipe: Recipe) -> DecodedMask:
    """Return a mask with what is known of its file."""
    if isinstance(data, np.ndarray):
        return DecodedMask(_from_array(data, path, recipe))
    with opened(data, path, _WHAT, recipe.max_pixels) as image:
        facts = orientation(image, data), has_several_frames(image, data)
        _check_depth(image, data, is_scaled=recipe.mask_values == "scale")
        if recipe.mask_colours and not image.mode.startswith(("I", "F")):
            return DecodedMask(_by_colours(stored_pixels(image, data, "RGB"), recipe, path), *facts)
        if image.mode in _PALETTES and recipe.mask_values != "scale":
            return DecodedMask(stored_pixels(image, data, "P"), *facts)
        numbers = _grey(image, data, facts[0], path, scaled=recipe.mask_values == "scale")
    classes = _to_classes(numbers, recipe, path)
    return DecodedMask(_by_colours(np.dstack([classes] * 3), recipe, path) if recipe.mask_colours else classes, *facts)


def _check_depth(image: Image, data: bytes, *, is_scaled: bool) -> None:
    if image.format == "PPM" and image.mode != "1" and not is_scaled and white_of_ppm(data) not in (255, 65535):
        raise PixelsError(
            f"the file says that {white_of_ppm(data)} is white, so Pillow scales the pixels' numbers: save it as a PNG"
        )
    if image.mode != "1" and is_white_zero(image) and (not is_scaled or bits_of(image, data) > 8):
        raise PixelsError("0 is white in this TIFF, and Pillow inverts its numbers of 8 bits: save it as a PNG")
    if image.mode in COLOUR_MODES and bits_of(image, data) == 16:
        colours = deep_colours(image, data)[..., : 1 if image.mode == "LA" else 3]
        if not np.array_equal(colours >> 8, colours & 255):
            raise PixelsError("its colours have 16 bits, and 8 of them are not enough: save the mask with 8 bits")


def has_grey_palette(data: bytes | Array, max_pixels: int | None = None) -> bool:
    """Return whether a mask is a palette image of greys that differ from their indices."""
    if isinstance(data, np.ndarray):
        return False
    with opened(data, "", _WHAT, max_pixels) as image:
        if image.mode not in _PALETTES:
            return False
        colours, indices = stored_pixels(image, data, "RGB"), stored_pixels(image, data, "P")
    greys = colours[..., 0]
    is_binary = indices.max() <= 1 and np.array_equal(greys, indices * np.uint8(255))
    return not (is_binary or np.array_equal(greys, indices)) and _is_grey(colours)


def _grey(image: Image, data: bytes, turned: int, path: str, *, scaled: bool) -> _Numbers:
    if image.mode == "1":
        return _Numbers(stored_pixels(image, data) * np.uint8(255), turned, 255)
    if image.mode.startswith("I"):
        return _Numbers(stored_pixels(image, data), turned, 65535)
    if image.mode == "L" and not scaled and (bits := bits_of(image, data)) < 8:
        return _Numbers(stored_pixels(image, data) // np.uint8(255 // (2**bits - 1)), turned, 255)
    if image.mode == "L" or (scaled and image.mode == "LA"):
        return _Numbers(stored_pixels(image, data, "L"), turned, 255, image.format in _LOSSY)
    if scaled and image.mode in (*_PALETTES, "RGB", "RGBA"):
        pixels = stored_pixels(image, data, "RGB")
        if _is_grey(pixels):
            return _Numbers(pixels[..., 0], turned, 255, image.format in _LOSSY)
        raise SampleError(
            path, "the mask has colours, and --mask-values scale takes only black and white: give --mask-colours"
        )
    advice = "save it as grey or palette, with one class number for each pixel"
    if image.mode == "RGB":
        advice += ", or give --mask-colours, the colour of each class"
    raise SampleError(path, f"the mask is an image of mode {image.mode}: {advice}")


def _is_grey(pixels: Array) -> bool:
    return bool((pixels[..., :1] == pixels).all())


def draw_runs(runs: Array, size: tuple[int, int], path: str, order: RunsOrder | None = None) -> Mask:
    """Return the mask of an image of `size` (width, height): uint8 (height, width), 0 outside of all runs."""
    width, height = size
    pixels = np.zeros(width * height, np.uint8)
    ends = runs[:, 1] + runs[:, 2]
    if len(ends) and ends.max() > len(pixels):
        raise SampleError(
            path,
            f"its run lengths end at pixel {ends.max()}, and the image has {width} x {height} = {len(pixels)} pixels",
        )
    for number, start, end in zip(runs[:, 0].tolist(), runs[:, 1].tolist(), ends.tolist(), strict=True):
        pixels[start:end] = number
    by_columns, by_rows = pixels.reshape(width, height).T, pixels.reshape(height, width)
    # Read in the wrong order, a mask falls into stripes. A square image gives no hint: its mask is only transposed.
    if order is None and width != height and len(runs) >= _LEAST_RUNS and 2 * _edges(by_rows) < _edges(by_columns):
        raise SampleError(
            path,
            "its run lengths were probably counted along the rows: down the columns, the mask falls into stripes. Give "
            "--rle-order rows, or --rle-order columns if the stripes are right",
        )
    return np.ascontiguousarray(by_rows if order == "rows" else by_columns)


def _edges(mask: Mask) -> int:
    return int(np.count_nonzero(mask[1:] != mask[:-1]) + np.count_nonzero(mask[:, 1:] != mask[:, :-1]))


def _from_array(data: Array, path: str, recipe: Recipe) -> Mask:
    plain = data[..., 0] if data.ndim == 3 and data.shape[2] == 1 else data
    if recipe.mask_colours and plain.dtype == np.uint8 and (plain.ndim == 2 or plain.shape[2:] == (3,)):
        return _by_colours(np.broadcast_to(np.atleast_3d(plain), (*plain.shape[:2], 3)), recipe, path)
    scaled = recipe.mask_values == "scale" and plain.dtype in (np.bool_, np.uint16)
    if plain.ndim != 2 or not (plain.dtype == np.uint8 or scaled):
        raise SampleError(path, f"the mask must be uint8 (height, width), not {data.dtype} {data.shape}")
    if plain.dtype == np.bool_:
        return plain.astype(np.uint8)
    return _to_classes(_Numbers(plain, 1, np.iinfo(plain.dtype).max), recipe, path)


def _to_classes(numbers: _Numbers, recipe: Recipe, path: str) -> Mask:
    values, white = numbers.values, numbers.white
    low, high = int(values.min()), int(values.max())
    if recipe.mask_values == "scale":
        if low < 0 or high > white:
            raise SampleError(path, f"the mask holds {low} to {high}, not 0 to {white}")
        if not numbers.is_lossy and not ((values == 0) | (values == white)).all():
            between = int(values[(values != 0) & (values != white)][0])
            raise SampleError(
                path,
                f"the mask holds {between}, and --mask-values scale takes only 0 and {white}: save the mask with these "
                "two numbers, or leave the option out for class numbers",
            )
        return np.asarray(values > white // 2, np.uint8)
    if low < 0 or high > 255:
        advice = "; --mask-values scale makes 0 and 65535 into 0 and 1" if high == white else ""
        raise SampleError(path, f"the mask holds {low} to {high}, but a mask can hold only 0 to 255{advice}")
    return values.astype(np.uint8)


def _by_colours(pixels: Array, recipe: Recipe, path: str) -> Mask:
    codes = (pixels[..., 0].astype(np.int32) << 16) | (pixels[..., 1].astype(np.int32) << 8) | pixels[..., 2]
    known = np.array([int(colour, 16) for colour in recipe.mask_colours or ()], np.int32)
    order = np.argsort(known)
    places = np.minimum(np.searchsorted(known, codes, sorter=order), len(known) - 1)
    numbers = np.where(known[order][places] == codes, order[places], _NO_CLASS)
    if (numbers == _NO_CLASS).any():
        other = int(codes[numbers == _NO_CLASS][0])
        rgb = ", ".join(map(str, other.to_bytes(3, "big")))
        raise SampleError(path, f"the mask has the colour {rgb}, which --mask-colours does not list: add the colour")
    return numbers.astype(np.uint8)
