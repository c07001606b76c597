"""A cache of millions of records of zeros: its tables, without the shards, which would take terabytes."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.store.fields import Field
from tpucache.store.files import sha256_file
from tpucache.store.format import INDEX_DTYPE, INDEX_NAME, SAMPLES_NAME, shard_name
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry, Statistics
from tpucache.store.samples import Strings, encode_columns

_CLASSES: Final = 1000
_PAGE: Final = 4096
_PAGE_HEADER: Final = 16
_PATH_BYTES: Final = 20


def write_huge(directory: Path, records: int, image: Field, shard_bytes: int = 1 << 27) -> None:
    """Write a cache of `records` records into a folder."""
    stride = -(-(image.nbytes + _PAGE_HEADER) // _PAGE) * _PAGE  # LMDB puts a record into pages of its own
    each = (shard_bytes - 2 * _PAGE) // stride
    rows, numbers = np.zeros(records, INDEX_DTYPE), np.arange(records)
    rows["shard"], rows["offset"] = numbers // each, numbers % each * stride + 2 * _PAGE + _PAGE_HEADER
    rows["length"], rows["crc32"] = image.nbytes, zlib.crc32(bytes(image.nbytes))
    np.save(directory / INDEX_NAME, rows)
    ends = np.arange(_PATH_BYTES, (records + 1) * _PATH_BYTES, _PATH_BYTES)
    columns: dict[str, np.ndarray[Any, Any] | Strings] = {
        "number": numbers.astype(np.uint64),
        "path": Strings(np.full(records * _PATH_BYTES, ord("a"), np.uint8), ends),
        "label": (numbers % _CLASSES).astype(np.uint16),
    }
    (directory / SAMPLES_NAME).write_bytes(encode_columns(columns))
    shards = tuple(
        ShardEntry(shard_name(0, block), shard_bytes, "0" * 64, 0, block, first, min(each, records - first), "0" * 64)
        for block, first in enumerate(range(0, records, each))
    )
    paths = [directory / name for name in (INDEX_NAME, SAMPLES_NAME)]
    tables = tuple(FileEntry(path.name, path.stat().st_size, sha256_file(path)) for path in paths)
    classes = tuple(f"class {label}" for label in range(_CLASSES))
    empty = Statistics()
    Manifest(records, (0,), (image,), classes, shards, tables, (), empty, "0" * 64, {}, {}, {}).save(directory)
