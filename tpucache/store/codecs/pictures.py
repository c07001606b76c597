"""What the codecs of image files, JPEG and PNG, have in common: their shapes, and Pillow."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import Any

import numpy as np

from tpucache.errors import DependencyError, FormatError
from tpucache.store.codecs.base import Array, Codec, FieldSpec
from tpucache.store.format import MAX_IMAGE_BYTES


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
        try:
            from PIL import Image
        except ImportError as error:
            raise DependencyError(
                f"field {field.name!r} is stored as {field.codec}: `pip install pillow` to read it"
            ) from error
        with Image.open(io.BytesIO(data), formats=[field.codec]) as image:
            found = (image.height, image.width, image.mode)
            if found != (*field.shape[:2], "L" if field.shape[2] == 1 else "RGB"):
                raise ValueError(f"an image of {found}, not of {field.shape}")
            out[...] = np.asarray(image).reshape(field.shape)


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
