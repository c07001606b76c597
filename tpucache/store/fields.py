"""The fields of a record (image, mask, tokens …): their names, dtypes, shapes and codecs, and their bytes in a record.

A record starts with the lengths of its variable fields (a little-endian u32 each, in field order), whose encoded length
differs from record to record. Then come the bytes of all fields, in the same order. So a record of raw fields is just
their arrays, and can be read straight into a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, FormatError, UnknownCodecError
from tpucache.geometry import Fit
from tpucache.native import Array
from tpucache.store.codecs import CODECS
from tpucache.store.codecs.codec import PackedCodec, check_image
from tpucache.store.format import MAX_DIMENSIONS, MAX_RECORD_BYTES
from tpucache.text import GIVEN, Stored, between

Numbers = npt.NDArray[np.int64]

# Code treats the fields with these names in a special way. All other fields are plain arrays.
IMAGE: Final = "image"
MASK: Final = "mask"
BOXES: Final = "boxes"
KEYPOINTS: Final = "keypoints"
#: The name of a sample's label, a column of the samples table that batches have next to the fields.
LABEL: Final = "label"
#: Columns of the samples table. `soft_label` has class probabilities that replace the label as the target: float32
#: (samples, classes), rows that sum to 1, or to 0 for samples without a target. `soft_weight` has the weight of each
#: sample in the loss: float32 (samples,).
SOFT_LABEL: Final = "soft_label"
SOFT_WEIGHT: Final = "soft_weight"

FIELD_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
DTYPES: Final = ("|u1", "|i1", "|b1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f2", "<f4", "<f8")


@dataclass(frozen=True)
class ResizedView:
    """How to decode a field at another image size than the stored one.

    `shape` is the stored shape of the field, `image` that of the image, and `canvas` the new height and width. `fit` is
    as in `Recipe.fit`. Decoding uses the lowest `frequencies`, 1 to 8, of each 8x8 block of coefficients.
    """

    shape: tuple[int, ...]
    fit: Fit
    frequencies: int
    image: tuple[int, ...]
    canvas: tuple[int, int]


@dataclass(frozen=True)
class Field:
    """One array of every record: its name, codec, dtype (little-endian) and shape.

    An image has the shape (height, width, channels); a `bytes` field an empty one, because its length varies.
    `quality`, `chroma` and `packing` are set if the codec needs them for decoding; `view`, which no manifest has, if
    the field is decoded at another size than the stored one.
    """

    name: str
    codec: str
    dtype: str
    shape: tuple[Annotated[int, between(0, MAX_RECORD_BYTES)], ...]
    quality: Annotated[int | None, between(0, 100)] = None
    chroma: Annotated[str | None, GIVEN] = None
    packing: Annotated[str | None, GIVEN] = None
    view: Annotated[ResizedView | None, Stored.NEVER] = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the encoded array, None if they differ from record to record."""
        return CODECS[self.codec].stored_bytes(self)

    @property
    def largest_bytes(self) -> int:
        return CODECS[self.codec].largest_bytes(self)

    @property
    def is_deep(self) -> bool:
        """Whether the field is an image that is neither 8-bit grey nor 8-bit RGB."""
        return self.name == IMAGE and (self.dtype != "|u1" or self.shape[2:] not in ((1,), (3,)))

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes are the bytes of the array itself."""
        return self.view is None and CODECS[self.codec].is_plain

    @property
    def packed(self) -> Field:
        """The field as it is sent to a device: packed bytes, uint8 (n,), or the field itself if its codec has no packed
        form.
        """
        codec = CODECS[self.codec]
        if not isinstance(codec, PackedCodec):
            return self
        return Field(self.name, "raw", "|u1", (codec.packed_bytes(self),))


#: A block order keeps this many bytes of samples together.
CHUNK_BYTES: Final = 8 << 20


def usual_bytes(fields: Sequence[Field]) -> int:
    """Return the expected bytes of a record: exact for raw fields, typical for other codecs."""
    return max(1, round(sum(field.nbytes * CODECS[field.codec].typical_ratio for field in fields)))


def check_field(field: Field) -> None:
    """Raise FormatError if no cache can have the field, UnknownCodecError if no installed package has its codec."""
    if FIELD_NAME.fullmatch(field.name) and re.fullmatch(r"[\w.-]{1,64}", field.codec) and field.codec not in CODECS:
        raise UnknownCodecError(
            f"the field {field.name!r} needs the codec {field.codec!r}, and neither tpucache nor an installed package "
            "has it: install the package that brings it"
        )
    if not FIELD_NAME.fullmatch(field.name) or field.codec not in CODECS or field.dtype not in DTYPES:
        raise FormatError(
            f"a field has an invalid name ({field.name!r}), codec ({field.codec!r}) or dtype ({field.dtype!r})"
        )
    if len(field.shape) > MAX_DIMENSIONS or field.nbytes > MAX_RECORD_BYTES:
        raise FormatError(
            f"a field cannot have shape {field.shape}: at most {MAX_DIMENSIONS} dimensions and "
            f"{MAX_RECORD_BYTES:,} bytes are allowed"
        )
    CODECS[field.codec].check(field)
    if field.packing != (own := CODECS[field.codec].packing):
        expected = f"{field.codec} has no packing" if own is None else f"the packing of {field.codec} is {own!r}"
        raise FormatError(f"{expected}, and no release wrote {field.packing!r} as the packing of {field.codec}")
    if field.name == IMAGE:
        check_image(field)


@dataclass(frozen=True)
class RecordLayout:
    fields: tuple[Field, ...]

    @property
    def is_plain(self) -> bool:
        return all(field.is_plain for field in self.fields)

    @property
    def nbytes(self) -> int:
        """Bytes of all decoded arrays of a record. A plain record has the same length."""
        return sum(field.nbytes for field in self.fields)

    @property
    def largest_bytes(self) -> int:
        return min(MAX_RECORD_BYTES, self.header_bytes + sum(field.largest_bytes for field in self.fields))

    def join(self, parts: Sequence[bytes]) -> bytes:
        lengths = [len(part) for field, part in zip(self.fields, parts, strict=True) if field.stored_bytes is None]
        return struct.pack(self._lengths, *lengths) + b"".join(parts)

    @property
    def header_bytes(self) -> int:
        return struct.calcsize(self._lengths)

    def spans(self, header: memoryview, length: int) -> list[tuple[int, int]]:
        at = self.header_bytes
        if len(header) < at:
            raise DamageError(f"a record of {len(header)} bytes is shorter than its header of {at} bytes")
        lengths = iter(struct.unpack_from(self._lengths, header))
        spans = []
        for field in self.fields:
            stored = field.stored_bytes
            size = next(lengths) if stored is None else stored
            spans.append((at, at + size))
            at += size
        if at != length:
            raise DamageError(f"a record of {length} bytes should have {at} bytes by the lengths of its fields")
        return spans

    def split(self, record: memoryview) -> list[memoryview]:
        return [record[start:end] for start, end in self.spans(record, len(record))]

    def spans_of(self, block: Array, starts: Numbers, lengths: Numbers) -> Numbers:
        """Return where each field of n records starts and ends in `block`, uint8: int64 (n, fields, 2).

        Record i starts at starts[i] and has lengths[i] bytes.
        """
        at = self.header_bytes
        if len(lengths) and lengths.min() < at:
            raise DamageError(f"a record of {lengths.min()} bytes is shorter than its header of {at} bytes")
        sizes = np.empty((len(starts), len(self.fields)), np.int64)
        stored = [field.stored_bytes for field in self.fields]
        sizes[:] = [-1 if size is None else size for size in stored]
        is_variable = np.array([size is None for size in stored])
        header = block[starts[:, None] + np.arange(at)]
        sizes[:, is_variable] = header.view("<u4").reshape(len(starts), at // 4)
        ends = starts[:, None] + at + np.cumsum(sizes, 1)
        wrong = np.flatnonzero(ends[:, -1] != starts + lengths)
        if len(wrong):
            found, expected = lengths[wrong[0]], ends[wrong[0], -1] - starts[wrong[0]]
            raise DamageError(f"a record of {found} bytes should have {expected} bytes by the lengths of its fields")
        return np.stack([ends - sizes, ends], -1)

    @functools.cached_property
    def _lengths(self) -> str:
        return f"<{sum(field.stored_bytes is None for field in self.fields)}I"
