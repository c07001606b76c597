"""Pixels of an image -> as many as are wanted, by Lanczos.

cykooz_resizer does it where it is installed, with the same result on whatever instructions a processor has; Pillow
elsewhere, which takes several times as long and differs by a level here and there. What is not uint8 of one or three
channels is resized by Pillow, one channel after the other, as floats of 32 bits, which hold 16 bits exactly; whole
numbers are rounded, and limited to what their dtype holds.
"""

from __future__ import annotations

import functools
import math
import threading
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]

LOBES: Final = 3  # of the filter, to either side
_threads: Final = threading.local()


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
