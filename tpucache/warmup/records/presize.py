"""Brings images of any size to the recipe's size and mode.

- decode: `pillow_modes.py`, `dicom.py` and `numbers.py` describe it. A JPEG is decoded at the smallest of libjpeg's
  scales (1/8 to 8/8) that is at least twice the wanted size; with `exact`, at full scale.
- fit: the part that the recipe's `fit` keeps is resized once, by Lanczos. With `pad`, black borders are added.
- orient: the image is turned by its EXIF tag.

cykooz_resizer resizes if it is installed, with the same result on all processors; else Pillow does, several times
slower. Both resize one axis after the other, and round in between, but may begin with different axes: results differ by
at most 2 levels where an image is smooth, and by up to 61 near edges of line drawings (measured). Images that are not
uint8 with one or three channels are resized by Pillow as float32, channel by channel. Integers are then rounded and
clipped to their dtype.

Masks, boxes and keypoints use the same `Framing`, in coordinates of the stored image at full scale.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, features

from tpucache.geometry import Box, Framing, framing_of
from tpucache.native import Array
from tpucache.recipe import Recipe
from tpucache.warmup.records import naming, refusal
from tpucache.warmup.records.dicom import DicomImage, is_dicom
from tpucache.warmup.records.numbers import NPY, Decoded, read_npy, to_pixels, with_channels_last
from tpucache.warmup.records.pillow import check_size, opened
from tpucache.warmup.records.pillow_modes import decode, find_simplejpeg

Pixels = npt.NDArray[np.uint8]

LOBES: Final = 3  # the reach of the Lanczos filter to either side, in pixels of the result
_threads: Final = threading.local()


def presize(data: bytes | Array, recipe: Recipe, path: str) -> Array:
    """Return an image (height, width, channels) of the recipe's size and mode. Raises SampleError."""
    with naming(path):
        return presize_framed(data, recipe).pixels


class Presized(NamedTuple):
    """An image of the recipe's size, (height, width, channels), and how it was cropped, resized and turned.

    `kind` is as in SourceImage.
    """

    pixels: Array
    framing: Framing
    kind: str


def presize_framed(data: bytes | Array, recipe: Recipe) -> Presized:
    """Bring an image to the recipe's size. Raises SampleError without a path."""
    with open_image(data, recipe) as image:
        framing = framing_of(image.size, image.orientation, (recipe.width, recipe.height), recipe.fit)
        pixels, scale = image.decode(None if recipe.exact else framing.least())
        left, top, right, bottom = framing.box
        resized = resize(pixels, (left * scale, top * scale, right * scale, bottom * scale), framing.size)
    if resized.dtype.kind == "f" and not np.isfinite(resized).all():
        raise refusal("some of its pixels are not finite numbers")
    if resized.ndim == 2:
        resized = np.repeat(resized[..., None], 3 if recipe.mode == "rgb" else 1, axis=2)
    return Presized(framing.place(resized), framing, image.kind)


class SourceImage(NamedTuple):
    """An image whose pixels may still be undecoded.

    `size` is the (width, height) as stored, `kind` the file format and mode, such as `JPEG RGB` or `array uint8`.
    `decode` returns the stored pixels in the recipe's mode, of at least a given (width, height).
    """

    size: tuple[int, int]
    kind: str
    decode: Callable[[tuple[int, int] | None], Decoded]
    orientation: int = 1


@contextmanager
def open_image(data: bytes | Array, recipe: Recipe) -> Iterator[SourceImage]:
    """Yield the image in an encoded file, an .npy or DICOM file, or an array."""
    if isinstance(data, bytes) and data.startswith(NPY):
        data = read_npy(data)
    if isinstance(data, np.ndarray):
        yield _image_of_array(data, recipe)
    elif is_dicom(data):
        dicom = DicomImage(data)
        check_size(dicom.size, recipe.max_pixels or Image.MAX_IMAGE_PIXELS)
        yield SourceImage(dicom.size, dicom.kind, functools.partial(dicom.decode, recipe))
    else:
        with opened(data, recipe.max_pixels) as file:
            yield SourceImage(file.size, file.kind, functools.partial(decode, file, recipe), file.orientation)


def _image_of_array(array: Array, recipe: Recipe) -> SourceImage:
    height, width, _ = with_channels_last(array).shape
    return SourceImage(
        (width, height),
        f"array {array.dtype}",
        lambda _: Decoded(to_pixels(array, recipe.mode, recipe.white_level)),
    )


def image_versions() -> dict[str, str]:
    """Return the versions of the libraries that decide the pixels, or "", by name."""
    simplejpeg = find_simplejpeg()
    return {
        "pillow": PIL.__version__,
        "libjpeg": features.version("libjpeg_turbo") or features.version("jpg") or "",
        "simplejpeg": simplejpeg.__version__ if simplejpeg else "",
        **resizer_versions(),
    }


@functools.cache
def find_cykooz_resizer() -> Any:
    """Return the module cykooz_resizer, or None if it is not installed."""
    try:
        import cykooz_resizer
    except ImportError:
        return None
    return cykooz_resizer


def slow_parts() -> list[str]:
    """Return a line of advice for each missing library that is faster than Pillow."""
    lines = {
        "simplejpeg": "JPEG files are decoded by Pillow: `pip install simplejpeg` decodes them faster",
        "cykooz_resizer": "images are resized by Pillow: `pip install cykooz-resizer` does it several times faster",
    }
    versions = image_versions()
    return [line for name, line in lines.items() if not versions[name]]


def resize(pixels: Array, box: Box, size: tuple[int, int]) -> Array:
    """Return the part of `pixels` inside `box`, resized to `size`; grey of 8 bits stays (height, width)."""
    if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (3,)):
        channels = np.moveaxis(np.atleast_3d(pixels), 2, 0)
        return np.dstack([_one_channel(channel, box, size) for channel in channels])
    library = find_cykooz_resizer()
    if library is not None:
        return _by_cykooz(library, pixels, box, size)
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS, box))


def resizer_versions() -> dict[str, str]:
    """Return the version of cykooz_resizer by name; "" if it is not installed."""
    return {"cykooz_resizer": version("cykooz-resizer") if find_cykooz_resizer() else ""}


def _one_channel(values: Array, box: Box, size: tuple[int, int]) -> Array:
    floats = Image.fromarray(np.ascontiguousarray(values, np.float32))
    resized = np.asarray(floats.resize(size, Image.Resampling.LANCZOS, box))
    if values.dtype.kind == "f":
        return resized
    limits = np.iinfo(values.dtype)
    return np.asarray(np.rint(resized).clip(limits.min, limits.max), values.dtype)


def _by_cykooz(library: Any, pixels: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    columns, left, across = _within_reach(box[0], box[2], size[0], pixels.shape[1])
    rows, top, down = _within_reach(box[1], box[3], size[1], pixels.shape[0])
    pixels = pixels[rows, columns]
    kind = library.PixelType.U8 if pixels.ndim == 2 else library.PixelType.U8x3
    target = library.ImageData(*size, kind)
    if not hasattr(_threads, "resizer"):  # it reuses its memory for the thread's next image
        _threads.resizer = library.Resizer()
    _threads.resizer.resize(
        library.ImageData(pixels.shape[1], pixels.shape[0], kind, pixels.tobytes()),
        target,
        library.ResizeOptions(
            resize_alg=library.ResizeAlg.convolution(library.FilterType.lanczos3),
            crop_box=library.CropBox(left, top, across, down),
        ),
    )
    return np.frombuffer(target.get_buffer(), np.uint8).reshape(*size[::-1], *pixels.shape[2:])


def _within_reach(start: float, stop: float, count: int, length: int) -> tuple[slice, float, float]:
    """Return the slice of an axis that Lanczos reads, and the part's start and length in it."""
    reach = LOBES * max(1.0, (stop - start) / count) + 1
    first, last = max(0, math.floor(start - reach)), min(length, math.ceil(stop + reach))
    return slice(first, last), start - first, (stop - first) - (start - first)
