"""The format as code: names, limits, the key layout and the index's dtype (prose: docs/format.md)."""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

import numpy as np

FORMAT: Final = "tpucache"
VERSION: Final = 6
#: The version of caches whose images are in bands of frequencies.
BANDED_VERSION: Final = 7
#: The version of caches whose shards hold records of deleted samples.
DELETED_VERSION: Final = 8

MANIFEST_NAME: Final = "manifest.json"
INDEX_NAME: Final = "index.npy"
SAMPLES_NAME: Final = "samples.npz"
SHARD_NAME: Final = re.compile(r"v(\d{2,4})-(\d{5,8})(?:-([1-7]))?\.lmdb")
#: Where warmup keeps unfinished work, inside the cache's folder; nothing of it is part of the cache.
WORK_NAME: Final = ".warmup"
#: A cache that was added to has tables of a later generation: the old ones count until the new manifest does.
TABLE_NAME: Final = re.compile(r"(index|samples)(?:-([1-9]\d{0,5}))?\.(npy|npz)")

#: The manifest that an earlier version of a cache had.
VERSION_NAME: Final = re.compile(r"version-([1-9]\d{0,5})\.json")
#: When each version was made. No part of a cache needs it.
TIMES_NAME: Final = "times.json"

#: One row a record, 20 bytes, little-endian: where its bytes are and their checksum.
INDEX_DTYPE: Final = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4"), ("shard", "<u4")])

# What a reader accepts from a manifest it did not write; far above anything useful, far below what hurts.
MAX_MANIFEST_BYTES: Final = 256 << 20
MAX_HEADER_BYTES: Final = 10 + 0xFFFF  # of a .npy file of version 1.0
MAX_SAMPLES: Final = 1 << 40
MAX_NUMBER: Final = (1 << 64) - 1
MAX_SHARDS: Final = 1 << 20
MAX_VARIANTS: Final = 1 << 12
MAX_FIELDS: Final = 64
MAX_BANDS: Final = 8
MAX_VERSIONS: Final = 999_999
MAX_DIMENSIONS: Final = 8
#: In caches with bands, of the records that one value of a shard holds: a value begins on a page of its own.
VALUE_BYTES: Final = 256 << 10
MAX_RECORD_BYTES: Final = 0x7FFFF000  # what Linux reads in one call
MAX_IMAGE_BYTES: Final = 1 << 30  # decoded: 16,384 x 16,384 pixels of four bytes

_MAX_ROW_BYTES: Final = 1 << 20  # of a sample in the samples table, on average: labels of 262,144 classes
_MAX_COLUMNS_BYTES: Final = 4 << 20  # of the columns' headers

#: The sums of float images count multiples of 2 to the power of minus this, those of their squares of its square.
FLOAT_BITS: Final = 149

_KEY: Final = struct.Struct(">Q")
#: What `records_sha256` hashes before each record: its sample's number, and its length.
RECORD_HEAD: Final = struct.Struct("<QI")


def table_name(first: str, generation: int) -> str:
    """Name a table of a generation: `index.npy` and `index-1.npy`, for the tables that were first `index.npy`."""
    stem, dot, suffix = first.partition(".")
    return f"{stem}-{generation}{dot}{suffix}" if generation else first


def hashes_name(fingerprint: str) -> str:
    """Name the file of hashes of pictures of the caches with a fingerprint. No part of a cache needs it."""
    return f"hashes-{fingerprint}.npz"


def version_name(number: int) -> str:
    """Name the manifest of an earlier version: `version-3.json`."""
    return f"version-{number}.json"


def most_index_bytes(records: int) -> int:
    """Return how many bytes an index of these records can have."""
    return MAX_HEADER_BYTES + records * INDEX_DTYPE.itemsize


def most_table_bytes(samples: int) -> int:
    """Return how large a samples table is taken to be at most; one that is larger is not read."""
    return _MAX_COLUMNS_BYTES + samples * _MAX_ROW_BYTES


class Part(NamedTuple):
    """What one shard holds of a block of samples: a variant, or one band of frequencies of it."""

    variant: int
    band: int = 0

    def __str__(self) -> str:
        return f"{self.variant:04d}-{self.band}" if self.band else f"{self.variant:04d}"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Return the part that was written as text. Raises ValueError."""
        return cls(*map(int, text.split("-")))


def shard_name(part: Part, block: int) -> str:
    """Name the shard that holds one part of one block of samples: `v01-00002.lmdb`, and `v01-00002-1.lmdb`."""
    return f"v{part.variant:02d}-{block:05d}{f'-{part.band}' if part.band else ''}.lmdb"


def encode_key(number: int) -> bytes:
    """Return a sample's number as the eight big-endian bytes that key its record."""
    return _KEY.pack(number)
