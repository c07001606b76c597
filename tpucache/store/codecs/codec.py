"""The interface of a codec, and what several codecs share: checks of images, Zstandard frames, JFIF's colours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from tpucache.errors import BuildError, DamageError, DependencyError, FormatError, StoreError, UsageError, calling
from tpucache.native import Array, FileRecords
from tpucache.store.format import MAX_IMAGE_BYTES

if TYPE_CHECKING:
    from tpucache.store.fields import Field

Numbers = npt.NDArray[np.int64]
#: The kinds of packed arrays that a device can decode: planes of luma and chroma, or JPEG's coefficients.
#: `ondevice/decode.py` decodes both.
PackedForm = Literal["planes", "coefficients"]

_HEADERS: Final = 64 << 10
_LEAST_WINDOW: Final = 1 << 10  # the smallest window of a Zstandard frame


class Codec(ABC):
    """Encodes arrays of one dtype and shape as bytes, and decodes them. A codec has no state, so threads share it.

    Every method takes the field, which has all parameters of the encoding. The class attributes say what a codec can
    do: no other code compares a codec's name.
    """

    #: The name in manifests and options.
    name: ClassVar[str]
    #: Whether `--codec` offers the codec for images.
    is_for_images: ClassVar[bool] = False
    #: Whether the codec stores arrays of any dtype and shape without loss, so that `--codec` offers it for arrays, too.
    holds_any_array: ClassVar[bool] = False
    #: Whether the length differs from sample to sample, so that the arrays cannot be stacked into a batch.
    has_any_length: ClassVar[bool] = False
    #: Whether the encoded bytes are the array's own bytes, so that they can be read straight into a batch.
    is_plain: ClassVar[bool] = False
    #: The lowest and the highest quality or compression level; None if the codec has no such setting.
    quality_range: ClassVar[tuple[int, int] | None] = None
    #: The usual size of an encoded photograph divided by the size of its pixels. Only used to estimate shard sizes.
    typical_ratio: ClassVar[float] = 1.0
    #: The quality that is stored in the field by default; None if decoding does not depend on the quality.
    default_quality: ClassVar[int | None] = None
    #: The chroma subsamplings that the codec supports, the default first.
    chromas: ClassVar[tuple[str, ...]] = ()
    #: Whether the luma of colour images is stored separately, so that `decode_luma` is cheaper than a full decode.
    has_luma: ClassVar[bool] = False
    #: Whether `decode_luma` can decode at half the height and width, which is even cheaper.
    has_half_luma: ClassVar[bool] = False
    #: The attribute `packing` of the codec's fields in manifests; None if the codec has only one form of bytes.
    packing: ClassVar[str | None] = None
    #: Whether the codec stores images as frequencies, so that they can be decoded at any size.
    has_frequencies: ClassVar[bool] = False
    #: The optional package that the codec needs; None if it needs none.
    package: ClassVar[str | None] = None
    #: The lossless codec for masks of images that are stored in this codec.
    mask_codec: ClassVar[str] = "raw"

    def check(self, field: Field) -> None:  # noqa: B027  # most codecs hold arrays of every dtype and shape
        """Raise FormatError for a dtype or a shape that this codec cannot hold."""

    def stored_bytes(self, field: Field) -> int | None:
        """Return the length of every encoded array of the field, None if it differs from record to record."""
        return field.nbytes if self.is_plain else None

    def largest_bytes(self, field: Field) -> int:
        """Return an upper limit for the length of an encoded array; longer records are refused unread.

        It need not be tight: apart from file headers, no codec makes an array twice as long, not even noise.
        """
        stored = self.stored_bytes(field)
        return 2 * field.nbytes + _HEADERS if stored is None else stored

    def encode(self, field: Field, array: Array, quality: int | None = None) -> bytes:
        data = self._encode(field, checked(field, array), quality)
        if not isinstance(data, bytes):
            raise TypeError(f"the codec {field.codec} encodes an array as a {type(data).__name__}, not as bytes")
        return data

    def _calling_library(self) -> AbstractContextManager[None]:
        return calling(f"the codec {self.name}", BuildError, "Use another codec, or another version of its library")

    def decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        try:
            self._decode_into(field, data, out)
        except (StoreError, DependencyError, MemoryError):
            raise
        except Exception as error:  # libraries raise anything for broken bytes
            raise _not_decoded(field, error) from error

    def decode_luma(self, field: Field, records: Sequence[memoryview], out: Array) -> None:
        """Decode only the luma (ITU-R BT.601, 0 to 255) of n colour images into `out`, uint8 (n, height, width).

        `out` may be (n, height / 2, width / 2) if `has_half_luma` and both sides are even.
        """
        if not self.has_luma:
            raise UsageError(f"{self.name} does not decode luma alone: decode whole images")
        try:
            self._decode_luma(field, records, out)
        except (StoreError, DependencyError, MemoryError):
            raise
        except Exception as error:  # libraries raise anything for broken bytes
            raise _not_decoded(field, error) from error

    def _decode_luma(self, field: Field, records: Sequence[memoryview], out: Array) -> None:
        raise NotImplementedError

    @abstractmethod
    def _encode(self, field: Field, array: Array, quality: int | None) -> bytes:
        """Encode a contiguous array of the field's dtype and shape."""

    @abstractmethod
    def _decode_into(self, field: Field, data: memoryview, out: Array) -> None:
        """Decode bytes into `out`. For damaged bytes, raise any Exception but tpucache's errors and MemoryError."""


class PackedCodec(Codec):
    """A codec whose images also have a packed form: uint8 arrays of one length, which a device decodes to pixels."""

    packed_form: ClassVar[PackedForm]

    @abstractmethod
    def packed_bytes(self, field: Field) -> int:
        """Return the length in bytes of every packed array of the field."""

    def decode_packed(self, field: Field, packed: Array, out: Array) -> None:
        """Decode the packed form of an array, uint8 (packed_bytes,), into `out`, the array of the field."""
        raise UsageError(f"{self.name} does not decode its packed form on the host: a device decodes it")

    def unpack_rows(self, field: Field, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
        """Decode n records from a block of bytes into their packed form, in rows of `out`.

        Record i is block[start:end] with (start, end) = spans[i], and goes to out[rows[i]]. `block` is uint8, `spans`
        (n, 2), `out` uint8 (m, packed_bytes), `rows` (n,); all are contiguous.
        """
        try:
            self._unpack_rows(field, block, spans, out, rows)
        except (ValueError, OSError) as error:
            raise DamageError(
                f"field {field.name!r} does not unpack as {field.codec}: {error}. Run `tpucache verify` on the cache"
            ) from error

    def unpack_files(self, field: Field, records: FileRecords, out: Array, rows: Numbers) -> int:
        """Read n records that have only this field from open files, and decode record i into its packed form in
        out[rows[i]].

        Returns the number of records before the first that failed; the caller reads the others in another way.
        """
        return 0

    @abstractmethod
    def _unpack_rows(self, field: Field, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
        """Implement `unpack_rows`. For damaged bytes, raise ValueError or OSError."""


def _not_decoded(field: Field, error: Exception) -> DamageError:
    text = str(error) or type(error).__name__
    return DamageError(
        f"field {field.name!r} does not decode as {field.codec}: {text}. Run `tpucache verify` on the cache"
    )


def checked(field: Field, array: Array) -> Array:
    if array.dtype != np.dtype(field.dtype) or array.shape != field.shape:
        raise UsageError(f"field {field.name!r} takes {field.dtype} {field.shape}, not {array.dtype.str} {array.shape}")
    return np.ascontiguousarray(array)


def check_picture(codec: str, field: Field) -> None:
    """Raise FormatError unless a field is uint8 (height, width, 1 or 3) and not too large."""
    shape = field.shape
    if field.dtype != "|u1" or len(shape) != 3 or not all(shape) or shape[2] not in (1, 3):
        raise FormatError(f"{codec} cannot hold {field.dtype} {shape}, but only uint8 (height, width, 1 or 3)")
    check_image(field)


def check_image(field: Field) -> None:
    shape = field.shape
    if len(shape) != 3 or not all(shape) or field.nbytes > MAX_IMAGE_BYTES:
        raise FormatError(
            f"no image has shape {shape}: it has height, width and channels, each at least 1, and at most "
            f"{MAX_IMAGE_BYTES:,} bytes"
        )


def missing_package(codec: str, package: str) -> DependencyError:
    return DependencyError(
        f"the codec {codec} needs `pip install {package}`; for a notebook without a network, add a dataset with the "
        f"wheel that `pip download --no-deps {package}` fetches"
    )


def unpack_frame(codec: str, data: memoryview, least: int, most: int) -> bytes:
    zstandard = load_zstandard(codec)
    try:
        frame = zstandard.get_frame_parameters(data)
        if not least <= frame.content_size <= most or frame.window_size > max(most, _LEAST_WINDOW):
            raise ValueError(f"a frame of {frame.content_size} bytes, not of {least} to {most}")
        return bytes(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(str(error)) from error


def load_zstandard(codec: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise missing_package(codec, "zstandard") from error
    return zstandard


def doubled(plane: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a plane (rows, columns) with twice as many rows, interpolated linearly between the old rows' centres."""
    above, below = np.concatenate([plane[:1], plane[:-1]]), np.concatenate([plane[1:], plane[-1:]])
    near = np.float32(0.75) * plane
    both: npt.NDArray[np.float32] = np.stack([near + np.float32(0.25) * above, near + np.float32(0.25) * below], 1)
    return both.reshape(-1, plane.shape[1])


def to_rgb(
    luma: npt.NDArray[np.float32], blue: npt.NDArray[np.float32], red: npt.NDArray[np.float32]
) -> npt.NDArray[np.uint8]:
    """Return the RGB image, uint8 (height, width, 3), of Y (0 to 255), Cb and Cr (both centred at 0), by JFIF's
    matrix.
    """
    green = luma - np.float32(0.344136) * blue - np.float32(0.714136) * red
    colours = (luma + np.float32(1.402) * red, green, luma + np.float32(1.772) * blue)
    return np.stack([to_uint8(colour) for colour in colours], -1)


def to_uint8(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)
