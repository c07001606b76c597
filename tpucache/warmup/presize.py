"""Photograph bytes -> a uint8 RGB image of the recipe's size.

What happens to pixels, in this order:

- decode: the first frame. A JPEG is decoded at the smallest of its scales (1, 1/2, 1/4, 1/8) that is still at least
  twice the wanted size, which keeps about 53 dB PSNR against a full decode; `exact` decodes it whole.
- convert: alpha is laid over white; palette, grey and CMYK become RGB; 16 and 32 bit grey is scaled by 1/257 from
  0..65535, float grey from 0..1; embedded colour profiles are not applied.
- fit: one Lanczos resize of the part that `fit` keeps.
- orient: by the EXIF tag; a photograph whose EXIF cannot be read keeps the orientation it is stored in.
"""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, UnidentifiedImageError

from tpucache.errors import SampleError
from tpucache.recipe import Fit, Recipe

_EXIF_ORIENTATION: Final = 0x0112
_SCALED_DECODE_FACTOR: Final = 2
_TRANSPOSE: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPS_SIDES: Final = (5, 6, 7, 8)

# What Pillow's decoders raise for broken files, gathered from its plugins; MemoryError is a header that lies.
_BROKEN: Final = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    IndexError,
    KeyError,
    EOFError,
    OverflowError,
    ZeroDivisionError,
    NotImplementedError,
    MemoryError,
    AttributeError,
    AssertionError,
    RuntimeError,
    struct.error,
    Image.DecompressionBombError,
)


class Placement(NamedTuple):
    """How an image comes to its size: which box (left, top, right, bottom) is resized, to what (width, height)."""

    box: tuple[float, float, float, float]
    size: tuple[int, int]


def presize(data: bytes, recipe: Recipe, path: str) -> npt.NDArray[np.uint8]:
    """Return an encoded image as uint8 (height, width, 3) of the recipe's size.

    `path` names the sample in errors. Raises SampleError when the bytes are no image or a broken one.
    """
    if not data:
        raise SampleError(path, "the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd but readable files
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                return _presize(image, recipe)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise SampleError(path, f"too many pixels: {error}") from error
    except UnidentifiedImageError as error:
        raise SampleError(path, "not an image Pillow can identify") from error
    except _BROKEN as error:
        raise SampleError(path, f"does not decode: {type(error).__name__}: {error}") from error


def _presize(image: Image.Image, recipe: Recipe) -> npt.NDArray[np.uint8]:
    orientation = _orientation(image)
    target = (recipe.width, recipe.height)
    if orientation in _SWAPS_SIDES:
        target = target[::-1]
    box = (0.0, 0.0, float(image.width), float(image.height))
    if not recipe.exact:
        box = _draft(image, target, recipe.fit) or box
    place = placement(box, target, recipe.fit)
    resized = to_rgb(image).resize(place.size, Image.Resampling.LANCZOS, place.box)
    if orientation in _TRANSPOSE:
        resized = resized.transpose(_TRANSPOSE[orientation])
    return np.asarray(_centre(resized, (recipe.width, recipe.height)))


def placement(box: tuple[float, float, float, float], target: tuple[int, int], fit: Fit) -> Placement:
    """Return how the image area `box` comes to `target` (width, height).

    The geometry is that of Pillow's `ImageOps.fit` (crop) and `ImageOps.pad`, so the crop is to the sub-pixel.
    """
    width, height = box[2] - box[0], box[3] - box[1]
    if fit == "stretch":
        return Placement(box, target)
    if fit == "pad":
        scale = min(target[0] / width, target[1] / height)
        size = (
            min(target[0], max(1, round(width * scale))),
            min(target[1], max(1, round(height * scale))),
        )
        return Placement(box, size)
    kept = min(width / target[0], height / target[1])
    crop = (kept * target[0], kept * target[1])
    # Clamped, because kept * target may round to a little more than the side it came from.
    left, top = max(box[0], box[0] + (width - crop[0]) / 2), max(box[1], box[1] + (height - crop[1]) / 2)
    right, bottom = min(box[2], left + crop[0]), min(box[3], top + crop[1])
    return Placement((left, top, right, bottom), target)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any Pillow mode as RGB, by the policy in the module's docstring."""
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, np.float64)
        scaled = values * 255 if image.mode == "F" else values / 257
        return Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(canvas, rgba).convert("RGB")
    return image.convert("RGB")


def _centre(image: Image.Image, target: tuple[int, int]) -> Image.Image:
    """Return an image on black of the target's size, where `ImageOps.pad` would put it."""
    if image.size == target:
        return image
    canvas = Image.new("RGB", target)
    canvas.paste(image, (round((target[0] - image.width) / 2), round((target[1] - image.height) / 2)))
    return canvas


def _draft(image: Image.Image, target: tuple[int, int], fit: Fit) -> tuple[float, float, float, float] | None:
    """Let a JPEG decode at a smaller scale; return the area of the smaller image that is the whole photograph."""
    if not isinstance(image, ImageFile.ImageFile):
        return None
    place = placement((0.0, 0.0, float(image.width), float(image.height)), target, fit)
    share_x = place.size[0] / (place.box[2] - place.box[0])
    share_y = place.size[1] / (place.box[3] - place.box[1])
    wanted = (
        int(np.ceil(image.width * share_x * _SCALED_DECODE_FACTOR)),
        int(np.ceil(image.height * share_y * _SCALED_DECODE_FACTOR)),
    )
    drafted = image.draft(None, wanted)
    return None if drafted is None else drafted[1]


def _orientation(image: Image.Image) -> int:
    try:
        value: Any = image.getexif().get(_EXIF_ORIENTATION, 1)
        return int(value)
    except _BROKEN:
        return 1
