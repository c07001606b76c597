"""Codecs encode the array of a field as bytes, and decode it. CODECS lists all of them.

To add one, write a subclass of Codec and add an instance to CODECS. Another package adds one by an entry point of the
group `tpucache.codecs`: see docs/extending.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.native import Array, FileRecords
from tpucache.plugins import Names, PartTable
from tpucache.store.codecs.codec import Codec, Numbers, PackedCodec
from tpucache.store.codecs.dct import DctLz4, DctZstd
from tpucache.store.codecs.pictures import Jpeg, Png
from tpucache.store.codecs.plain import Bytes, Raw, Zstd
from tpucache.store.codecs.yuv420 import Yuv420

if TYPE_CHECKING:
    from tpucache.store.fields import Field

__all__ = [
    "ARRAY_CODECS",
    "CODECS",
    "FREQUENCY_CODECS",
    "IMAGE_CODECS",
    "Codec",
    "PackedCodec",
    "decode_rows",
    "encode",
    "unpack_files",
    "unpack_rows",
]


def _make_codec(name: str, part: Any) -> Codec:
    if not (isinstance(part, type) and issubclass(part, Codec)):
        raise TypeError(f"{part!r} is no subclass of tpucache.store.codecs.Codec")
    codec = part()
    if codec.name != name:
        raise TypeError(f"the entry point {name!r} leads to a codec named {codec.name!r}: give both the same name")
    return codec


#: All codecs by name. Image codecs are offered to users in this order.
CODECS: Final = PartTable[Codec](
    "tpucache.codecs",
    {codec.name: codec for codec in (Raw(), Yuv420(), DctZstd(), DctLz4(), Jpeg(), Png(), Zstd(), Bytes())},
    _make_codec,
)

#: The codecs for images: the choices of `--codec`.
IMAGE_CODECS: Final[Names] = CODECS.names(where=lambda codec: codec.is_for_images)
#: The codecs that store arrays of any dtype and shape without loss.
ARRAY_CODECS: Final[Names] = CODECS.names(where=lambda codec: codec.holds_any_array)
#: The codecs that store images as frequencies, so that they can be decoded at any size.
FREQUENCY_CODECS: Final[Names] = CODECS.names(where=lambda codec: codec.has_frequencies)


def encode(field: Field, array: npt.NDArray[Any], quality: int | None = None) -> bytes:
    return CODECS[field.codec].encode(field, array, quality)


def decode_rows(field: Field, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
    """Decode a field of n records from a block of bytes into rows of `out`.

    Record i has the field in block[start:end] with (start, end) = spans[i]; it is decoded into out[rows[i]]. `block` is
    uint8, `spans` int64 (n, 2), `out` (m, *shape), `rows` int64 (n,).
    """
    codec, data = CODECS[field.codec], block.data
    for (start, end), row in zip(spans.tolist(), rows.tolist(), strict=True):
        codec.decode_into(field, data[start:end], out[row])


def unpack_rows(field: Field, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
    codec = CODECS[field.codec]
    if not isinstance(codec, PackedCodec):
        raise UsageError(f"field {field.name!r} is stored as {field.codec}, which has no packed form")
    codec.unpack_rows(field, block, spans, out, rows)


def unpack_files(field: Field, records: FileRecords, out: Array, rows: Numbers) -> int:
    """See `PackedCodec.unpack_files`. Returns 0 for a codec without a packed form."""
    codec = CODECS[field.codec]
    return codec.unpack_files(field, records, out, rows) if isinstance(codec, PackedCodec) else 0
