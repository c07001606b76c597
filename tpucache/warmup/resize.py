"""Pixels of an image -> as many as are wanted, by Lanczos.

cykooz_resizer does it where it is installed, with the same result on whatever instructions a processor has; Pillow
elsewhere, which takes several times as long and differs by a level here and there.
"""

from __future__ import annotations

import functools
import threading
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]

_threads: Final = threading.local()


def resize(pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    """Return what lies in `box` at `size`, uint8 (height, width) or (height, width, 3) as `pixels` are.

    `box` is (left, top, right, bottom), continuous and inside the image; `size` is (width, height).
    """
    library = _cykooz_resizer()
    return _by_pillow(pixels, box, size) if library is None else _by_cykooz(library, pixels, box, size)


def resizer_versions() -> dict[str, str]:
    """Return the version of what resizes images beside Pillow, on which pixels depend; "" where it is not there."""
    return {"cykooz_resizer": version("cykooz-resizer") if _cykooz_resizer() else ""}


def _by_pillow(pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS, box))


def _by_cykooz(library: Any, pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    height, width = pixels.shape[:2]
    left, top, right, bottom = box
    kind = library.PixelType.U8 if pixels.ndim == 2 else library.PixelType.U8x3
    target = library.ImageData(*size, kind)
    _kept(library).resize(
        library.ImageData(width, height, kind, pixels.tobytes()),
        target,
        library.ResizeOptions(
            resize_alg=library.ResizeAlg.convolution(library.FilterType.lanczos3),
            # Not a rounding error wider than what there is, which would be refused.
            crop_box=library.CropBox(left, top, min(right - left, width - left), min(bottom - top, height - top)),
        ),
    )
    return np.frombuffer(target.get_buffer(), np.uint8).reshape(*size[::-1], *pixels.shape[2:])


def _kept(library: Any) -> Any:
    """Return this thread's resizer, which keeps its memory from one image to the next."""
    if not hasattr(_threads, "resizer"):
        _threads.resizer = library.Resizer()
    return _threads.resizer


@functools.cache
def _cykooz_resizer() -> Any:
    """Return cykooz_resizer, or None where it is not installed."""
    try:
        import cykooz_resizer
    except ImportError:
        return None
    return cykooz_resizer
