"""Pixels of an image -> as many as are wanted, by Lanczos.

cykooz_resizer does it where it is installed, with the same result on whatever instructions a processor has; Pillow
elsewhere, which takes several times as long and differs by a level here and there.
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

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]

LOBES: Final = 3  # of the filter, to either side
_threads: Final = threading.local()


def resize(pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    """Return what lies in `box` at `size`, uint8 (height, width) or (height, width, 3) as `pixels` are.

    `box` is (left, top, right, bottom), continuous and inside the image; `size` is (width, height).
    """
    library = find_cykooz_resizer()
    return _by_pillow(pixels, box, size) if library is None else _by_cykooz(library, pixels, box, size)


def resizer_versions() -> dict[str, str]:
    """Return the version of cykooz_resizer, which pixels depend on; "" where it is not installed."""
    return {"cykooz_resizer": version("cykooz-resizer") if find_cykooz_resizer() else ""}


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
