"""yuv420: raw planes, Y at full resolution, Cb and Cr at half of it, JFIF's full range. Half the bytes of RGB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, FormatError
from tpucache.store.codecs.codec import FieldSpec, Numbers, PackedCodec, check_picture, doubled, to_rgb
from tpucache.types import Array

# JFIF's matrices times 2^16: RGB -> Y, Cb, Cr (a column a plane), in whole numbers so that every processor agrees.
_FORWARD: Final = np.array([[19595, -11059, 32768], [38470, -21709, -27439], [7471, 32768, -5329]], np.int32)
_HALF: Final = 1 << 15


class Yuv420(PackedCodec):
    """The planes of an image one after the other; the packed form is the stored one."""

    name = "yuv420"
    is_for_images = True
    is_compared = True
    typical_ratio = 0.5
    packed_form = "planes"
    has_luma = True

    def check(self, field: FieldSpec) -> None:
        """Raise FormatError for anything but uint8 (height, width, 3)."""
        check_picture(self.name, field)
        if field.shape[2] != 3:
            raise FormatError("yuv420 holds colours; a grey image is as small in raw")

    def stored_bytes(self, field: FieldSpec) -> int:
        """Return the bytes of the planes."""
        return nbytes(*field.shape[:2])

    def packed_bytes(self, field: FieldSpec) -> int:
        """Return the bytes of the planes."""
        return nbytes(*field.shape[:2])

    def _encode(self, field: FieldSpec, array: Array, quality: int | None) -> bytes:
        return pack(array)

    def _decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        out[...] = unpack(data, *field.shape[:2])

    def _decode_luma(self, field: FieldSpec, records: Sequence[Sequence[memoryview]], out: Array) -> None:
        for (data,), luma in zip(records, out, strict=True):
            if len(data) != self.packed_bytes(field):
                raise ValueError(f"{len(data):,} bytes, not {self.packed_bytes(field):,}")
            luma[...] = np.frombuffer(data, np.uint8, luma.size).reshape(luma.shape)

    def _unpack_rows(self, field: FieldSpec, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
        for (start, end), row in zip(spans.tolist(), rows.tolist(), strict=True):
            if end - start != out.shape[1]:
                raise ValueError(f"{end - start} bytes, not {out.shape[1]}")
            out[row] = block[start:end]


def plane_shapes(height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of Y and of Cb, Cr."""
    return (height, width), (-(-height // 2), -(-width // 2))


def nbytes(height: int, width: int) -> int:
    """Return the bytes of an image's planes."""
    luma, chroma = plane_shapes(height, width)
    return luma[0] * luma[1] + 2 * chroma[0] * chroma[1]


def pack(image: npt.NDArray[np.uint8]) -> bytes:
    """Return an image (height, width, 3) as its planes: the same bytes on every processor."""
    height, width, _ = image.shape
    pixels = np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), "edge").astype(np.int32)
    luma = (pixels @ _FORWARD[:, 0] + _HALF) >> 16
    # The mean of four, rounded once: 2^18 is four pixels of 2^16.
    means = pixels[0::2, 0::2] + pixels[0::2, 1::2] + pixels[1::2, 0::2] + pixels[1::2, 1::2]
    chroma = [((means @ _FORWARD[:, at] + (1 << 17)) >> 18) + 128 for at in (1, 2)]
    planes = [luma[:height, :width], *(np.minimum(plane, 255) for plane in chroma)]
    return b"".join(plane.astype(np.uint8).tobytes() for plane in planes)


def unpack(packed: bytes | memoryview, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return the image (height, width, 3) of its planes. Raises DamageError for another length."""
    if len(packed) != nbytes(height, width):
        raise DamageError(f"4:2:0 planes have {len(packed):,} bytes, not {nbytes(height, width):,}")
    data: npt.NDArray[Any] = np.frombuffer(packed, np.uint8).astype(np.float32)
    shape, half = plane_shapes(height, width)
    first, count = shape[0] * shape[1], half[0] * half[1]
    luma = data[:first].reshape(shape)
    blue, red = (
        doubled(doubled(data[start : start + count].reshape(half) - 128).T).T[:height, :width]
        for start in (first, first + count)
    )
    return to_rgb(luma, blue, red)
