"""The format's constants: file names, limits, the layout of keys and the index's dtype. docs/format.md explains it."""

from __future__ import annotations

import re
import struct
from typing import Final

import numpy as np

FORMAT: Final = "tpucache"
VERSION: Final = 6
#: The format version of caches whose images were stored in frequency bands. They are no longer read.
BANDED_VERSION: Final = 7
#: The format version of caches whose shards still hold records of deleted samples.
DELETED_VERSION: Final = 8

MANIFEST_NAME: Final = "manifest.json"
INDEX_NAME: Final = "index.npy"
SAMPLES_NAME: Final = "samples.npz"
SHARD_NAME: Final = re.compile(r"v(\d{2,4})-(\d{5,8})\.lmdb")
#: The folder, inside the cache's folder, for unfinished work of warmup. It is not part of the cache.
WORK_NAME: Final = ".warmup"
#: A change to a cache writes the index and the samples table under names with a higher number, the generation. The old
#: tables stay valid until the new manifest is written.
TABLE_NAME: Final = re.compile(r"(index|samples)(?:-([1-9]\d{0,5}))?\.(npy|npz)")

#: The manifest of an earlier version of the cache.
VERSION_NAME: Final = re.compile(r"version-([1-9]\d{0,5})\.json")
#: The file with the time at which each version was made. Reading a cache does not need it.
TIMES_NAME: Final = "times.json"
#: A file with the perceptual hashes of a cache's pictures, whose name has the cache's fingerprint. Reading a cache does
#: not need it.
HASHES_NAME: Final = re.compile(r"hashes-[0-9a-f]{64}\.npz")
_ASIDE: Final = re.compile(r"\.(.+)\.\d+\.tmp")

#: One row of the index, 20 bytes, little-endian: where a record's bytes are, and their checksum.
INDEX_DTYPE: Final = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4"), ("shard", "<u4")])

# Limits on the values that a reader accepts: larger than any real cache, too small to exhaust memory.
MAX_MANIFEST_BYTES: Final = 256 << 20
MAX_HEADER_BYTES: Final = 10 + 0xFFFF  # of a .npy file of version 1.0
MAX_SAMPLES: Final = 1 << 40
MAX_NUMBER: Final = (1 << 64) - 1
MAX_SHARDS: Final = 1 << 20
MAX_VARIANTS: Final = 1 << 12
MAX_FIELDS: Final = 64
MAX_VERSIONS: Final = 999_999
MAX_DIMENSIONS: Final = 8
MAX_RECORD_BYTES: Final = 0x7FFFF000  # the most that Linux reads in one call
MAX_IMAGE_BYTES: Final = 1 << 30  # decoded: 16,384 x 16,384 pixels of four bytes

_MAX_ROW_BYTES: Final = 1 << 20  # bytes per sample in the samples table, on average: labels of 262,144 classes
_MAX_COLUMNS_BYTES: Final = 4 << 20  # for the headers of all columns

#: Sums of float images are stored as integers in units of 2^-FLOAT_BITS; sums of squares in units of 2^-(2*FLOAT_BITS).
FLOAT_BITS: Final = 149

_KEY: Final = struct.Struct(">Q")
#: `records_sha256` hashes this before each record: the sample's number and the record's length.
RECORD_HEAD: Final = struct.Struct("<QI")


def table_name(first: str, generation: int) -> str:
    """Return the file name of a table: `index.npy` in generation 0, `index-1.npy` in generation 1."""
    stem, dot, suffix = first.partition(".")
    return f"{stem}-{generation}{dot}{suffix}" if generation else first


def hashes_name(fingerprint: str) -> str:
    return f"hashes-{fingerprint}.npz"


def version_name(number: int) -> str:
    return f"version-{number}.json"


def name_behind(name: str) -> str:
    aside = _ASIDE.fullmatch(name)
    return aside[1] if aside else name


def is_cache_file(name: str) -> bool:
    name = name_behind(name)
    patterns = SHARD_NAME, TABLE_NAME, VERSION_NAME, HASHES_NAME
    return name in (MANIFEST_NAME, TIMES_NAME) or any(each.fullmatch(name) for each in patterns)


def most_index_bytes(records: int) -> int:
    return MAX_HEADER_BYTES + records * INDEX_DTYPE.itemsize


def most_table_bytes(samples: int) -> int:
    return _MAX_COLUMNS_BYTES + samples * _MAX_ROW_BYTES


def shard_name(variant: int, block: int) -> str:
    return f"v{variant:02d}-{block:05d}.lmdb"


def encode_key(number: int) -> bytes:
    return _KEY.pack(number)
