"""yuv420: uncompressed planes, Y at full resolution, Cb and Cr at half, in JFIF's full range. Half the size of RGB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, FormatError
from tpucache.native import Array
from tpucache.store.codecs.codec import Numbers, PackedCodec, check_picture, doubled, to_rgb

if TYPE_CHECKING:
    from tpucache.store.fields import Field

# JFIF's matrix times 2^16: RGB -> Y, Cb, Cr (one column per plane). Integers give equal results on every processor.
_FORWARD: Final = np.array([[19595, -11059, 32768], [38470, -21709, -27439], [7471, 32768, -5329]], np.int32)
_HALF: Final = 1 << 15


class Yuv420(PackedCodec):
    """Stores the planes Y, Cb and Cr of an image one after the other. The packed form is the stored form."""

    name = "yuv420"
    is_for_images = True
    typical_ratio = 0.5
    packed_form = "planes"
    has_luma = True

    def check(self, field: Field) -> None:
        check_picture(self.name, field)
        if field.shape[2] != 3:
            raise FormatError("yuv420 is for colour images: use the codec raw, which is as small for grey images")

    def stored_bytes(self, field: Field) -> int:
        return nbytes(*field.shape[:2])

    def packed_bytes(self, field: Field) -> int:
        return nbytes(*field.shape[:2])

    def _encode(self, field: Field, array: Array, quality: int | None) -> bytes:
        return pack(array)

    def _decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        out[...] = unpack(data, *field.shape[:2])

    def _decode_luma(self, field: Field, records: Sequence[memoryview], out: Array) -> None:
        for data, luma in zip(records, out, strict=True):
            if len(data) != self.packed_bytes(field):
                raise ValueError(f"a record has {len(data):,} bytes, not {self.packed_bytes(field):,}")
            luma[...] = np.frombuffer(data, np.uint8, luma.size).reshape(luma.shape)

    def _unpack_rows(self, field: Field, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
        for (start, end), row in zip(spans.tolist(), rows.tolist(), strict=True):
            if end - start != out.shape[1]:
                raise ValueError(f"a record has {end - start:,} bytes, not {out.shape[1]:,}")
            out[row] = block[start:end]


def plane_shapes(height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (height, width), (-(-height // 2), -(-width // 2))


def nbytes(height: int, width: int) -> int:
    luma, chroma = plane_shapes(height, width)
    return luma[0] * luma[1] + 2 * chroma[0] * chroma[1]


def pack(image: npt.NDArray[np.uint8]) -> bytes:
    """Return the planes Y, Cb and Cr of an image (height, width, 3). The bytes are the same on every processor."""
    height, width, _ = image.shape
    pixels = np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), "edge").astype(np.int32)
    luma = (pixels @ _FORWARD[:, 0] + _HALF) >> 16
    # The sum of four pixels, each times 2^16, is divided by 2^18, so that the mean is rounded only once.
    means = pixels[0::2, 0::2] + pixels[0::2, 1::2] + pixels[1::2, 0::2] + pixels[1::2, 1::2]
    chroma = [((means @ _FORWARD[:, at] + (1 << 17)) >> 18) + 128 for at in (1, 2)]
    planes = [luma[:height, :width], *(np.minimum(plane, 255) for plane in chroma)]
    return b"".join(plane.astype(np.uint8).tobytes() for plane in planes)


def unpack(packed: bytes | memoryview, height: int, width: int) -> npt.NDArray[np.uint8]:
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
