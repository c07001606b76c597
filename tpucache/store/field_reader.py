"""One field of many records, such as all masks, without reading the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, UsageError
from tpucache.store.cache import Cache
from tpucache.store.codecs import decode_into
from tpucache.store.fields import RecordLayout
from tpucache.store.index import Numbers
from tpucache.store.reader import ShardReader

Array = npt.NDArray[Any]

_BATCH_BYTES: Final = 4 << 20


def field_batches(cache: Cache, numbers: Numbers, name: str) -> Iterator[Array]:
    """Yield one field of the records of these rows of the index, in batches of at most 4 MB, or one record.

    Raises what `read_field` raises.
    """
    field_bytes = max([field.nbytes for field in cache.manifest.fields if field.name == name], default=1)
    count = max(1, _BATCH_BYTES // max(1, field_bytes))
    for start in range(0, len(numbers), count):
        yield read_field(cache, numbers[start : start + count], name)


def read_field(cache: Cache, numbers: Numbers, name: str) -> Array:
    """Return one field of the records of these rows of the index: (n, *shape) of the field's dtype.

    Of the other fields nothing is read. Raises UsageError where records have no such field, DamageError or FormatError
    for records that are not as the layout says.
    """
    reader, layout = cache.reader, cache.manifest.layout
    names = [field.name for field in layout.fields]
    if name not in names:
        raise UsageError(f"records have no field {name!r}: they have {', '.join(names)}")
    place = names.index(name)
    field, rows = layout.fields[place], cache.index[numbers]
    spans = _spans(reader, layout, rows, place)
    parts = rows.copy()
    parts["offset"] += spans[:, 0].astype(rows.dtype["offset"])
    parts["length"] = spans[:, 1] - spans[:, 0]
    out = np.empty((len(rows), *field.shape), field.dtype)
    if field.is_plain:
        flat = out.reshape(len(rows), -1).view(np.uint8)
        reader.scatter(parts, [[row.data] for row in flat], are_whole=False)
        return out
    encoded = _read(reader, parts)
    for target, data in zip(out, encoded, strict=True):
        decode_into(field, memoryview(data), target)
    return out


def _spans(reader: ShardReader, layout: RecordLayout, rows: Array, place: int) -> npt.NDArray[np.int64]:
    """Return where in each record a field starts and ends: int64 (rows, 2)."""
    if not layout.is_plain:
        headers = rows.copy()
        headers["length"] = np.minimum(rows["length"], layout.header_bytes)
        lengths = rows["length"].tolist()
        spans = [
            layout.spans(memoryview(header), length)[place]
            for header, length in zip(_read(reader, headers), lengths, strict=True)
        ]
        return np.array(spans, np.int64).reshape(-1, 2)
    if np.any(rows["length"] != layout.nbytes):
        raise DamageError(f"the index has records that are not of {layout.nbytes:,} bytes: copy the cache again")
    start = sum(field.nbytes for field in layout.fields[:place])
    return np.tile(np.array([start, start + layout.fields[place].nbytes], np.int64), (len(rows), 1))


def _read(reader: ShardReader, rows: Array) -> Sequence[bytearray]:
    buffers = [bytearray(length) for length in rows["length"].tolist()]
    reader.scatter(rows, [[memoryview(buffer)] for buffer in buffers], are_whole=False)
    return buffers
