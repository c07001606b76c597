"""Codecs: how the array of a field becomes bytes, and back. One file each, and the table of all.

To add a codec, write a subclass of Codec in a file of its own, whose attributes say what it can do, and add it to
CODECS. Another package adds one by an entry point of the group `tpucache.codecs`: docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.native import FileRecords
from tpucache.plugins import Names, Table
from tpucache.store.codecs.codec import Codec, FieldSpec, Numbers, PackedCodec
from tpucache.store.codecs.dct.codec import DctLz4, DctZstd
from tpucache.store.codecs.pictures import Jpeg, Png
from tpucache.store.codecs.plain import Bytes, Raw, Zstd
from tpucache.store.codecs.yuv420 import Yuv420
from tpucache.types import Array

__all__ = [
    "ARRAY_CODECS",
    "CODECS",
    "FREQUENCY_CODECS",
    "IMAGE_CODECS",
    "Codec",
    "FieldSpec",
    "PackedCodec",
    "decode_bands",
    "decode_into",
    "decode_luma",
    "decode_rows",
    "encode",
    "encode_bands",
    "unpack_files",
    "unpack_rows",
]


def _make_codec(name: str, part: Any) -> Codec:
    """Return the codec of this name out of another package's class. Raises TypeError where it is none."""
    if not (isinstance(part, type) and issubclass(part, Codec)):
        raise TypeError(f"{part!r} is no subclass of tpucache.store.codecs.Codec")
    codec = part()
    if codec.name != name:
        raise TypeError(f"its entry point is called {name!r}, and the codec {codec.name!r}")
    return codec


#: All codecs by name, those for images in the order in which they are offered.
CODECS: Final = Table[Codec](
    "tpucache.codecs",
    {codec.name: codec for codec in (Raw(), Yuv420(), DctZstd(), DctLz4(), Jpeg(), Png(), Zstd(), Bytes())},
    _make_codec,
)

#: The codecs that an image may be stored in: `--codec`.
IMAGE_CODECS: Final[Names] = CODECS.names(where=lambda codec: codec.is_for_images)
#: Those that hold arrays of any dtype and shape without loss.
ARRAY_CODECS: Final[Names] = CODECS.names(where=lambda codec: codec.holds_any_array)
#: Those whose images are shown in any size, by their frequencies.
FREQUENCY_CODECS: Final[Names] = CODECS.names(where=lambda codec: codec.has_frequencies)


def encode(field: FieldSpec, array: npt.NDArray[Any], quality: int | None = None) -> bytes:
    """Return an array's bytes in the codec of a field.

    `quality` lies in the codec's `quality_range`; None means its default. Raises UsageError when the array is not of
    the field's dtype and shape, DependencyError without the library that encodes it, BuildError where that fails.
    """
    return CODECS[field.codec].encode(field, array, quality)


def encode_bands(field: FieldSpec, array: npt.NDArray[Any], quality: int | None = None) -> list[bytes]:
    """Return an array's bytes of each band of its frequencies, all in one where the field has no bands.

    The arguments, and what is raised, are those of `encode`.
    """
    return CODECS[field.codec].encode_bands(field, array, quality)


def decode_into(field: FieldSpec, data: memoryview, out: npt.NDArray[Any]) -> None:
    """Decode a field's bytes into `out`, a contiguous array of its dtype and shape.

    Raises DamageError when the bytes do not decode to exactly that, DependencyError without the decoder, UsageError
    for a field whose length varies, which has no array.
    """
    CODECS[field.codec].decode_into(field, data, out)


def decode_bands(field: FieldSpec, parts: Sequence[memoryview], out: npt.NDArray[Any]) -> None:
    """Decode a field's bytes, of one band after the other where it has bands, into `out`; see `decode_into`."""
    CODECS[field.codec].decode_bands(field, parts, out)


def decode_luma(field: FieldSpec, records: Sequence[Sequence[memoryview]], out: npt.NDArray[Any]) -> None:
    """Decode the luma of colour images, each of its bytes of each band, into `out`, uint8 (n, height, width).

    Raises what `decode_into` does; UsageError for a codec without `has_luma`.
    """
    CODECS[field.codec].decode_luma(field, records, out)


def decode_rows(field: FieldSpec, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
    """Decode a field of many records: block[start:end] of each of `spans` into out[row] of each of `rows`.

    `block` is uint8 (any,), `spans` int64 (n, 2), `out` (m, *shape), `rows` int64 (n,). Raises what `decode_into` does.
    """
    codec, data = CODECS[field.codec], block.data
    for (start, end), row in zip(spans.tolist(), rows.tolist(), strict=True):
        codec.decode_into(field, data[start:end], out[row])


def unpack_rows(field: FieldSpec, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
    """Decode a field of many records into its packed form, uint8 (m, n), which a device can finish.

    The arguments are those of `decode_rows`. Raises DamageError when bytes do not decode to exactly that,
    DependencyError without the library, UsageError for a codec without a packed form.
    """
    codec = CODECS[field.codec]
    if not isinstance(codec, PackedCodec):
        raise UsageError(f"field {field.name!r} is stored as {field.codec}, which has no packed form")
    codec.unpack_rows(field, block, spans, out, rows)


def unpack_files(field: FieldSpec, records: FileRecords, out: Array, rows: Numbers) -> int:
    """Decode records of one field into its packed form, read one by one from open files, each with its length in front.

    `out` and `rows` are those of `unpack_rows`. Returns how many were decoded before the first that cannot be, or is to
    be read in another way.
    """
    codec = CODECS[field.codec]
    return codec.unpack_files(field, records, out, rows) if isinstance(codec, PackedCodec) else 0
