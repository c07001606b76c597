"""What the codecs of image files, JPEG and PNG, have in common: their shapes, and Pillow."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import Any, Final

import numpy as np

from tpucache.errors import DependencyError, FormatError
from tpucache.store.codecs.base import Array, Codec, FieldSpec
from tpucache.store.format import MAX_IMAGE_BYTES

_MODES: Final = {1: "L", 3: "RGB"}  # Pillow's names by channels


class PictureCodec(Codec):
    """A file of an image: uint8 (height, width, 1 or 3), grey or RGB, which Pillow writes and reads."""

    is_for_images = True
    mask_codec = "png"

    def check(self, field: FieldSpec) -> None:
        """Raise FormatError for anything but uint8 (height, width, 1 or 3)."""
        check_picture(self.name, field)

    def _encode(self, field: FieldSpec, array: Array, quality: int | None) -> bytes:
        from PIL import Image

        target = io.BytesIO()
        image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
        image.save(target, self.name.upper(), **self._save_options(quality))
        return target.getvalue()

    @abstractmethod
    def _save_options(self, quality: int | None) -> dict[str, Any]:
        """Return Pillow's options for writing a file."""

    def _decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        self._check_file(field, data)
        try:
            from PIL import Image
        except ImportError as error:
            raise DependencyError(
                f"field {field.name!r} is stored as {field.codec}: `pip install pillow` to read it"
            ) from error
        Image.preinit()
        try:
            # Image.open warns of large images and tries several formats; the header was compared with the field's.
            with Image.OPEN[self.name.upper()][0](io.BytesIO(data), "") as image:
                if image.mode != _MODES[field.shape[2]]:
                    raise ValueError(f"pixels of the mode {image.mode}, not {_MODES[field.shape[2]]}")
                out[...] = np.asarray(image).reshape(field.shape)
        except Exception as error:  # Pillow raises whatever it raises for a broken file
            raise ValueError(str(error) or type(error).__name__) from error

    @abstractmethod
    def _check_file(self, field: FieldSpec, data: memoryview) -> None:
        """Raise ValueError unless a file has a header of the field's shape, and no parts but those that are written.

        So nothing larger than the field is ever decoded, and no profile, text or other metadata is looked at.
        """


def check_header(field: FieldSpec, height: int, width: int, channels: int) -> None:
    """Raise ValueError for a file whose image is not of the field's shape."""
    if (height, width, channels) != field.shape:
        raise ValueError(f"an image of {(height, width, _MODES.get(channels, channels))}, not of {field.shape}")


def check_picture(codec: str, field: FieldSpec) -> None:
    """Raise FormatError unless a field is uint8 (height, width, 1 or 3), of a size that can be held."""
    shape = field.shape
    if field.dtype != "|u1" or len(shape) != 3 or not all(shape) or shape[2] not in (1, 3):
        raise FormatError(f"{codec} cannot hold {field.dtype} {shape}")
    check_image(field)


def check_image(field: FieldSpec) -> None:
    """Raise FormatError unless a field's shape is that of an image, and not too large."""
    shape = field.shape
    if len(shape) != 3 or not all(shape) or field.nbytes > MAX_IMAGE_BYTES:
        raise FormatError(
            f"no image has shape {shape}: it has height, width and channels, each at least 1, and at most "
            f"{MAX_IMAGE_BYTES:,} bytes"
        )
