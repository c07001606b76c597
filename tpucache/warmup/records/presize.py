"""Images of any size -> pixels of the recipe's size and mode, and where they end up.

What happens to an image, in this order:

- decode: as `decoding.py` describes for every kind of file. A JPEG is decoded at the smallest of libjpeg's scales
  (1/8 to 8/8) that is still at least twice the wanted size; `exact` decodes it whole.
- fit: one Lanczos resize of the part that the recipe's `fit` keeps; with `pad`, black is put around it.
- orient: by the EXIF tag.

cykooz_resizer resizes where it is installed, with the same result on whatever instructions a processor has; Pillow
elsewhere, which takes several times as long. Both resize one axis after the other, with whole numbers from 0 to 255 in
between, but not always the same axis first. So they differ by at most 2 levels where an image is smooth, and near edges
between black and white, as in line drawings, by up to 61 (measured; in theory by more). What is not uint8 of one or
three channels is resized by Pillow, one channel after the other, as floats of 32 bits, which hold 16 bits exactly;
whole numbers are rounded, and limited to what their dtype holds.

Coordinates are continuous: pixel i covers [i, i + 1). Masks, boxes and keypoints go through the same `View`, in
coordinates of the image as stored, at whatever scale it is decoded.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from tpucache.errors import SampleError
from tpucache.geometry import Box, margins, nearest, placement
from tpucache.recipe import Coordinates, Recipe
from tpucache.types import Array
from tpucache.warmup.records.decoding import TURNS, Turn, decoder_versions, open_picture, turn, turn_points

_SCALED_DECODE_FACTOR: Final = 2

Pixels = npt.NDArray[np.uint8]

LOBES: Final = 3  # of the filter, to either side
_threads: Final = threading.local()


@dataclass(frozen=True)
class View:
    """How an image gets into its record: `box` of the image as stored is resized to `size`, turned, put on a canvas.

    `stored` is the image's (width, height), `box` is (left, top, right, bottom) in it, `size` and `canvas` are
    (width, height). `kind` is what the image is stored as, such as `JPEG RGB`.
    """

    stored: tuple[int, int]
    box: tuple[float, float, float, float]
    size: tuple[int, int]
    turn: Turn
    canvas: tuple[int, int]
    kind: str = ""

    @property
    def area(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the image on the canvas: all of it, but for padding."""
        width, height = self.size[::-1] if self.turn.swap else self.size
        left, top = margins((width, height), self.canvas)
        return left, top, left + width, top + height

    def stored_as(self, coordinates: Coordinates) -> tuple[int, int]:
        """Return the (width, height) of the source's image, as stored or as displayed."""
        return self.stored[::-1] if self.turn.swap and coordinates == "displayed" else self.stored

    def is_of(self, size: tuple[int, int], coordinates: Coordinates) -> bool:
        """Return whether the source's image has this (width, height), but for a pixel."""
        own = self.stored_as(coordinates)
        return max(abs(size[0] - own[0]), abs(size[1] - own[1])) <= 1

    def least(self) -> tuple[int, int]:
        """Return the (width, height) that the whole image must at least be decoded at."""
        shares = self.size[0] / (self.box[2] - self.box[0]), self.size[1] / (self.box[3] - self.box[1])
        width, height = (
            math.ceil(s * share * _SCALED_DECODE_FACTOR) for s, share in zip(self.stored, shares, strict=True)
        )
        return width, height

    def place(self, resized: Array) -> Array:
        """Return pixels of `size`, (height, width, …), turned and on a canvas of zeros."""
        turned = turn(resized, self.turn)
        if turned.shape[:2] == self.canvas[::-1]:
            return np.ascontiguousarray(turned)
        canvas = np.zeros((*self.canvas[::-1], *resized.shape[2:]), resized.dtype)
        left, top, right, bottom = self.area
        canvas[top:bottom, left:right] = turned
        return canvas

    def nearest(self, pixels: Array) -> Array:
        """Return pixels of the image as stored, (height, width, …), on the canvas: the nearest, never a mixture."""
        columns = nearest(self.box[0], self.box[2], self.size[0], self.stored[0])
        rows = nearest(self.box[1], self.box[3], self.size[1], self.stored[1])
        return self.place(pixels[rows[:, None], columns])

    def points(self, points: Array, coordinates: Coordinates = "stored") -> npt.NDArray[np.float64]:
        """Return where points x, y (n, 2) of the image as stored or as displayed lie on the canvas: float64 (n, 2)."""
        if coordinates == "displayed":
            return self._displayed().points(points)
        left, top, right, bottom = self.box
        scale = np.array([self.size[0] / (right - left), self.size[1] / (bottom - top)])
        moved = (np.asarray(points, np.float64) - (left, top)) * scale
        return np.asarray(turn_points(moved, self.turn, self.size) + self.area[:2])

    def _displayed(self) -> View:
        """Return the view of the displayed image that is the same as this one of the stored image."""
        corners = turn_points(np.reshape(self.box, (2, 2)), self.turn, self.stored)
        (left, top), (right, bottom) = corners.min(axis=0).tolist(), corners.max(axis=0).tolist()
        stored, size = (self.stored[::-1], self.size[::-1]) if self.turn.swap else (self.stored, self.size)
        return View(stored, (left, top, right, bottom), size, Turn(), self.canvas)


def presize(data: bytes | Array, recipe: Recipe, path: str) -> Array:
    """Return an image as (height, width, channels) of the recipe's size: uint8 RGB or grey, or in its own numbers.

    `data` is an encoded image, or an array (height, width), (height, width, channels) or (channels, height, width).
    `path` names the sample in errors. Raises SampleError when it is no image, a broken one, or cannot be had in the
    recipe's mode.
    """
    return presize_in_view(data, recipe, path)[0]


def presize_in_view(data: bytes | Array, recipe: Recipe, path: str) -> tuple[Array, View]:
    """Return what `presize` does, and the view by which masks and points go the same way. Raises SampleError."""
    with open_picture(data, recipe, path) as picture:
        view = view_of(picture.size, picture.orientation, recipe, picture.kind)
        pixels, scale = picture.decode(recipe, None if recipe.exact else view.least())
        left, top, right, bottom = (side * scale for side in view.box)
        resized = resize(pixels, (left, top, right, bottom), view.size)
    if resized.dtype.kind == "f" and not np.isfinite(resized).all():
        raise SampleError(path, "some of its pixels are not finite numbers")
    if resized.ndim == 2:
        resized = np.repeat(resized[..., None], 3 if recipe.mode == "rgb" else 1, axis=2)
    return view.place(resized), view


def image_versions() -> dict[str, str]:
    """Return the versions of the libraries that pixels depend on; "" for one that is not installed."""
    return {**decoder_versions(), **resizer_versions()}


def slow_parts() -> list[str]:
    """Return a line for each part that is slow because a library is not installed."""
    lines = {
        "simplejpeg": "JPEG files are decoded by Pillow: `pip install simplejpeg` decodes them faster",
        "cykooz_resizer": "images are resized by Pillow: `pip install cykooz-resizer` does it several times faster",
    }
    versions = image_versions()
    return [line for name, line in lines.items() if not versions[name]]


def view_of(stored: tuple[int, int], exif_orientation: int, recipe: Recipe, kind: str = "") -> View:
    """Return the view that a recipe gives of an image stored as (width, height), in a file of a kind."""
    turned = TURNS[exif_orientation]
    canvas = (recipe.width, recipe.height)
    place = placement(
        (0.0, 0.0, float(stored[0]), float(stored[1])), canvas[::-1] if turned.swap else canvas, recipe.fit
    )
    return View(stored, place.box, place.size, turned, canvas, kind)


def resize(pixels: Array, box: Box, size: tuple[int, int]) -> Array:
    """Return what lies in `box` at `size`: (height, width) or (height, width, channels), of the dtype of `pixels`.

    `box` is (left, top, right, bottom), continuous and inside the image; `size` is (width, height).
    """
    if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (3,)):
        channels = pixels[..., None] if pixels.ndim == 2 else pixels
        resized = np.dstack([_one_channel(channels[..., each], box, size) for each in range(channels.shape[2])])
        return resized[..., 0] if pixels.ndim == 2 else resized
    library = find_cykooz_resizer()
    return _by_pillow(pixels, box, size) if library is None else _by_cykooz(library, pixels, box, size)


def resizer_versions() -> dict[str, str]:
    """Return the version of cykooz_resizer, which pixels depend on; "" where it is not installed."""
    return {"cykooz_resizer": _cykooz_version() if find_cykooz_resizer() else ""}


@functools.cache
def _cykooz_version() -> str:
    return version("cykooz-resizer")


def _one_channel(values: Array, box: Box, size: tuple[int, int]) -> Array:
    floats = Image.fromarray(np.ascontiguousarray(values, np.float32))
    resized = np.asarray(floats.resize(size, Image.Resampling.LANCZOS, box))
    if values.dtype.kind == "f":
        return resized
    limits = np.iinfo(values.dtype)
    return np.asarray(np.rint(resized).clip(limits.min, limits.max), values.dtype)


def _by_pillow(pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS, box))


def _by_cykooz(library: Any, pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    columns, left, across = _within_reach(box[0], box[2], size[0], pixels.shape[1])
    rows, top, down = _within_reach(box[1], box[3], size[1], pixels.shape[0])
    pixels = pixels[rows, columns]
    kind = library.PixelType.U8 if pixels.ndim == 2 else library.PixelType.U8x3
    target = library.ImageData(*size, kind)
    thread_resizer(library).resize(
        library.ImageData(pixels.shape[1], pixels.shape[0], kind, pixels.tobytes()),
        target,
        library.ResizeOptions(
            resize_alg=library.ResizeAlg.convolution(library.FilterType.lanczos3),
            crop_box=library.CropBox(left, top, across, down),
        ),
    )
    return np.frombuffer(target.get_buffer(), np.uint8).reshape(*size[::-1], *pixels.shape[2:])


def _within_reach(start: float, stop: float, count: int, length: int) -> tuple[slice, float, float]:
    """Return which of `length` pixels the filter sees when those from start to stop become `count`.

    The others need not be copied. Behind it: where among them it starts, and how many it takes.
    """
    reach = LOBES * max(1.0, (stop - start) / count) + 1
    first, last = max(0, math.floor(start - reach)), min(length, math.ceil(stop + reach))
    return slice(first, last), start - first, (stop - first) - (start - first)


def thread_resizer(library: Any) -> Any:
    """Return this thread's resizer, which keeps its memory from one image to the next."""
    if not hasattr(_threads, "resizer"):
        _threads.resizer = library.Resizer()
    return _threads.resizer


@functools.cache
def find_cykooz_resizer() -> Any:
    """Return cykooz_resizer, or None where it is not installed."""
    try:
        import cykooz_resizer
    except ImportError:
        return None
    return cykooz_resizer
