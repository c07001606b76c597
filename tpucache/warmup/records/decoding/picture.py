"""Picture: one image of any kind, its size known and its pixels not decoded yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from tpucache.recipe import Recipe
from tpucache.warmup.records.decoding.arrays import is_npy, read_npy, to_pixels, with_channels_last
from tpucache.warmup.records.decoding.decode import Decoded, check_size, decode, opened, orientation, stored_size
from tpucache.warmup.records.decoding.dicom import DicomPicture, is_dicom

Array = npt.NDArray[Any]


class Picture(Protocol):
    """An image whose pixels may still be undecoded."""

    @property
    def size(self) -> tuple[int, int]:
        """The (width, height) that it is stored with."""
        ...

    @property
    def kind(self) -> str:
        """What it is stored as, such as `JPEG RGB` or `array uint8`."""
        ...

    @property
    def orientation(self) -> int:
        """The EXIF orientation, 1 to 8."""
        ...

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        """Return its pixels, as they are stored, in the recipe's mode: at least `least` (width, height) of them."""
        ...


@contextmanager
def open_picture(data: bytes | Array, recipe: Recipe, path: str) -> Iterator[Picture]:
    """Yield the picture that an encoded image, an .npy or DICOM file, or an array is.

    `path` names the sample in errors. Raises SampleError, also for what is found while it is decoded within.
    """
    if isinstance(data, np.ndarray):
        yield _ArrayPicture(data, path)
    elif is_npy(data):
        yield _ArrayPicture(read_npy(data, path), path)
    elif is_dicom(data):
        picture = DicomPicture(data, path)
        check_size(picture.size, path, "", recipe.max_pixels or Image.MAX_IMAGE_PIXELS)
        yield picture
    else:
        with opened(data, path, max_pixels=recipe.max_pixels) as image:
            yield _FilePicture(image, data)


class _FilePicture:
    """A file that Pillow opened."""

    def __init__(self, image: Image.Image, data: bytes) -> None:
        self._image, self._data = image, data
        self.size, self.orientation = stored_size(image), orientation(image)
        self.kind = f"{image.format} {image.mode}"

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        return decode(self._image, self._data, least, recipe.white_level, recipe.mode)


class _ArrayPicture:
    """An array, which is as it is displayed."""

    orientation = 1

    def __init__(self, array: Array, path: str) -> None:
        self._array, self._path = array, path
        self.size = with_channels_last(array, path).shape[1::-1]
        self.kind = f"array {array.dtype}"

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        return Decoded(to_pixels(self._array, recipe.mode, recipe.white_level, self._path), 1.0)
