"""The interface of a codec, and what several codecs share: checks of images, Zstandard frames, JFIF's colours."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tpucache.errors import BuildError, DamageError, DependencyError, FormatError, UsageError, calling
from tpucache.native import FileRecords
from tpucache.store.format import MAX_IMAGE_BYTES
from tpucache.types import Array

Numbers = npt.NDArray[np.int64]
#: What a device makes pixels of: planes of luma and colours, or JPEG's coefficients. `ondevice/decode.py` has both.
PackedForm = Literal["planes", "coefficients"]

_HEADERS: Final = 64 << 10
_LEAST_WINDOW: Final = 1 << 10  # of a Zstandard frame


class FieldSpec(Protocol):
    """What a codec knows of the field whose arrays it encodes."""

    @property
    def name(self) -> str:
        """The field's name, for messages."""
        ...

    @property
    def codec(self) -> str:
        """The codec's name."""
        ...

    @property
    def dtype(self) -> str:
        """The arrays' dtype as numpy's string, little-endian."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The arrays' shape."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of a decoded array."""
        ...

    @property
    def quality(self) -> int | None:
        """The quality that the bytes are decoded by, where the codec needs it."""
        ...

    @property
    def chroma(self) -> str | None:
        """The resolution of the colours that the bytes are decoded by, where the codec needs it."""
        ...

    @property
    def bands(self) -> tuple[int, ...] | None:
        """The frequencies below which each band of an image's coefficients is, where these are apart."""
        ...

    @property
    def view(self) -> ViewSpec | None:
        """How the field is shown in another size, if it is."""
        ...

    @property
    def band(self) -> int | None:
        """The band of frequencies that the field holds alone; None where it holds all."""
        ...


class ViewSpec(Protocol):
    """How a field is shown in another size: its stored shape, and how many frequencies of each block are used."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as it is stored."""
        ...

    @property
    def frequencies(self) -> int:
        """The lowest frequencies that are used."""
        ...


class Codec(ABC):
    """How arrays of one dtype and shape become bytes, and back. It has no state, so threads share it.

    What the bytes depend on is in the field: every method is given it. What a codec can do, it says by these
    attributes: no other code compares its name.
    """

    #: The name in manifests and options.
    name: ClassVar[str]
    #: Whether `--codec` offers it for images.
    is_for_images: ClassVar[bool] = False
    #: Whether `plan` compares it where the user names no codecs.
    is_compared: ClassVar[bool] = False
    #: Whether it stores numbers of any dtype and shape without loss, so that `--codec` may ask for it for arrays, too.
    holds_any_array: ClassVar[bool] = False
    #: Whether each sample's array has its own length, so that no batch holds them.
    has_any_length: ClassVar[bool] = False
    #: Whether the bytes are the array's own, so that they are read straight into place.
    is_plain: ClassVar[bool] = False
    #: The lowest and the highest quality or compression level; None where there is nothing to choose.
    quality_range: ClassVar[tuple[int, int] | None] = None
    #: Bytes of an encoded photograph over those of its pixels, near enough to size shards by.
    typical_ratio: ClassVar[float] = 1.0
    #: The quality that the field keeps when none is given; None where decoding does not depend on it.
    default_quality: ClassVar[int | None] = None
    #: The resolutions of colours to choose from, the default first.
    chromas: ClassVar[tuple[str, ...]] = ()
    #: Whether the luma of colour images is stored by itself, so that `decode_luma` is cheaper than decoding all.
    has_luma: ClassVar[bool] = False
    #: Whether `decode_luma` may be asked for the means of 2x2 pixels instead, which is cheaper still.
    has_half_luma: ClassVar[bool] = False
    #: What manifests call the form of its bytes; None where the codec's name says it all.
    packing: ClassVar[str | None] = None
    #: Whether it stores the frequencies of images: they are shown in any size, and may be stored apart, in bands.
    has_frequencies: ClassVar[bool] = False
    #: The optional package that encodes and decodes it, None where none is needed.
    package: ClassVar[str | None] = None
    #: The codec that stores the masks of images in this codec: it keeps every value.
    mask_codec: ClassVar[str] = "raw"

    def check(self, field: FieldSpec) -> None:  # noqa: B027  # most codecs hold arrays of every dtype and shape
        """Raise FormatError for a dtype or a shape that this codec cannot hold."""

    def stored_bytes(self, field: FieldSpec) -> int | None:
        """Return the length of every encoded array of the field, None where it differs from record to record."""
        return field.nbytes if self.is_plain else None

    def largest_bytes(self, field: FieldSpec) -> int:
        """Return a length that no encoded array of the field exceeds; what is longer is refused before it is read.

        It need not be exact: no codec makes noise twice as long, but for the headers of files.
        """
        stored = self.stored_bytes(field)
        return 2 * field.nbytes + _HEADERS if stored is None else stored

    def encode(self, field: FieldSpec, array: Array, quality: int | None = None) -> bytes:
        """Return an array's bytes. Raises UsageError when it is not of the field's dtype and shape."""
        data = self._encode(field, checked(field, array), quality)
        if not isinstance(data, bytes):
            raise TypeError(f"the codec {field.codec} encodes an array as a {type(data).__name__}, not as bytes")
        return data

    def _calling_library(self) -> AbstractContextManager[None]:
        """Raise BuildError for whatever the library that encodes raises within."""
        return calling(f"the codec {self.name}", BuildError, "Use another codec, or another version of its library")

    def decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        """Decode bytes into `out`, a contiguous array of the field's dtype and shape. Raises DamageError."""
        try:
            self._decode_into(field, data, out)
        except (ValueError, OSError, SyntaxError) as error:
            raise DamageError(f"field {field.name!r} does not decode as {field.codec}: {error}") from error

    def encode_bands(self, field: FieldSpec, array: Array, quality: int | None = None) -> list[bytes]:
        """Return an array's bytes of each band; of all in one where the field has no bands. Raises UsageError."""
        return [self.encode(field, array, quality)]

    def decode_bands(self, field: FieldSpec, parts: Sequence[memoryview], out: Array) -> None:
        """Decode the bytes of each band into `out`, or all where the field has no bands. Raises DamageError."""
        (data,) = parts
        self.decode_into(field, data, out)

    def decode_luma(self, field: FieldSpec, records: Sequence[Sequence[memoryview]], out: Array) -> None:
        """Decode the luma of colour images, each of the bytes of each band, into `out`, uint8 (n, height, width).

        It is that of JFIF (ITU-R BT.601, 0 to 255). A codec whose `has_half_luma` is true also fills an `out` of half
        the height and half the width of images that have even ones. Raises DamageError; UsageError for a codec without
        luma.
        """
        if not self.has_luma:
            raise UsageError(f"{self.name} does not decode luma by itself")
        try:
            self._decode_luma(field, records, out)
        except (ValueError, OSError, SyntaxError) as error:
            raise DamageError(f"field {field.name!r} does not decode as {field.codec}: {error}") from error

    def _decode_luma(self, field: FieldSpec, records: Sequence[Sequence[memoryview]], out: Array) -> None:
        """Decode into `out` as `_decode_into` does; a codec whose `has_luma` is true has this method."""
        raise NotImplementedError

    @abstractmethod
    def _encode(self, field: FieldSpec, array: Array, quality: int | None) -> bytes:
        """Return the bytes of a contiguous array of the field's dtype and shape."""

    @abstractmethod
    def _decode_into(self, field: FieldSpec, data: memoryview, out: Array) -> None:
        """Decode bytes into `out`; ValueError, OSError and SyntaxError mean that they are damaged."""


class PackedCodec(Codec):
    """A codec with a packed form of fixed length, uint8 (n,): what a device is given to make pixels of."""

    packed_form: ClassVar[PackedForm]

    @abstractmethod
    def packed_bytes(self, field: FieldSpec) -> int:
        """Return the length of every packed array of the field."""

    def decode_packed(self, field: FieldSpec, packed: Array, out: Array) -> None:
        """Decode the packed form of an array, uint8 (packed_bytes,), into `out`. Raises DamageError."""
        raise UsageError(f"{self.name} does not decode its packed form on the host")

    def unpack_rows(self, field: FieldSpec, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
        """Decode records into their packed form: block[start:end] of each of `spans` into out[row] of each of `rows`.

        `block` is uint8 (any,), `spans` (n, 2), `out` uint8 (m, packed_bytes), `rows` (n,); all are contiguous.
        Raises DamageError, IndexError.
        """
        try:
            self._unpack_rows(field, block, spans, out, rows)
        except (ValueError, OSError) as error:
            raise DamageError(f"field {field.name!r} does not unpack as {field.codec}: {error}") from error

    def unpack_files(self, field: FieldSpec, records: FileRecords, out: Array, rows: Numbers) -> int:
        """Decode records of this field alone into their packed form, read one by one from open files.

        So each is decoded while the processor's cache has it. `out` and `rows` are those of `unpack_rows`. Returns how
        many were decoded before the first that cannot be, or is to be read in another way. Raises IndexError.
        """
        return 0

    @abstractmethod
    def _unpack_rows(self, field: FieldSpec, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
        """Unpack records into rows of `out`; ValueError and OSError mean that they are damaged."""


def checked(field: FieldSpec, array: Array) -> Array:
    """Return an array of the field's dtype and shape, contiguous. Raises UsageError for any other."""
    if array.dtype != np.dtype(field.dtype) or array.shape != field.shape:
        raise UsageError(f"field {field.name!r} takes {field.dtype} {field.shape}, not {array.dtype.str} {array.shape}")
    return np.ascontiguousarray(array)


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


def missing_package(codec: str, package: str) -> DependencyError:
    """Return the error of a codec whose optional package is not installed."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return DependencyError(
        f"the codec {codec} needs `pip install {package}`; for a notebook without a network, `publish --wheels {tag}` "
        "puts it beside the cache"
    )


def unpack_frame(codec: str, data: memoryview, least: int, most: int) -> bytes:
    """Return the content of a frame that states a size from `least` to `most`, and needs no more memory than that.

    Raises ValueError for any other, DependencyError without the library zstandard, naming the codec that needs it.
    """
    zstandard = load_zstandard(codec)
    try:
        frame = zstandard.get_frame_parameters(data)
        if not least <= frame.content_size <= most or frame.window_size > max(most, _LEAST_WINDOW):
            raise ValueError(f"a frame of {frame.content_size} bytes, not of {least} to {most}")
        return bytes(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(str(error)) from error


def load_zstandard(codec: str) -> Any:
    """Return the library zstandard. Raises DependencyError, naming the codec that needs it."""
    try:
        import zstandard
    except ImportError as error:
        raise missing_package(codec, "zstandard") from error
    return zstandard


def doubled(plane: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a plane with twice the rows, interpolated linearly between the centres of the old ones."""
    above, below = np.concatenate([plane[:1], plane[:-1]]), np.concatenate([plane[1:], plane[-1:]])
    near = np.float32(0.75) * plane
    both: npt.NDArray[np.float32] = np.stack([near + np.float32(0.25) * above, near + np.float32(0.25) * below], 1)
    return both.reshape(-1, plane.shape[1])


def to_rgb(
    luma: npt.NDArray[np.float32], blue: npt.NDArray[np.float32], red: npt.NDArray[np.float32]
) -> npt.NDArray[np.uint8]:
    """Return Y in 0..255 and Cb, Cr centred at 0 as RGB, uint8 (height, width, 3), by JFIF's matrix."""
    green = luma - np.float32(0.344136) * blue - np.float32(0.714136) * red
    colours = (luma + np.float32(1.402) * red, green, luma + np.float32(1.772) * blue)
    return np.stack([to_uint8(colour) for colour in colours], -1)


def to_uint8(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return numbers rounded and cut to 0..255."""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)
