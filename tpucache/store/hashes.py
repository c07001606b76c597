"""The file in a cache's folder that keeps the perceptual hashes of its images."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import StoreError
from tpucache.store.cache import Cache
from tpucache.store.files import write_atomically
from tpucache.store.manifest import Manifest
from tpucache.store.samples import SampleTable, encode_columns
from tpucache.types import Array

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

#: Bits of a hash.
BITS: Final = 256

_PREFIX: Final = "hashes-"
#: The columns of the file: dtype, and shape of a sample's value, of each. Another hash would have another name.
_COLUMNS: Final[Mapping[str, tuple[type, tuple[int, ...]]]] = {
    "number": (np.uint64, ()),
    "phash256": (np.uint64, (BITS // 64,)),
    "phash256_mirrored": (np.uint64, (BITS // 64,)),
    "is_blank": (np.bool_, ()),
    "thumbnail": (np.uint8, (8, 8)),
}

#: What such a file may be called.
HASHES_NAME: Final = re.compile(rf"{_PREFIX}[0-9a-f]{{64}}\.npz")
_MOST_BYTES: Final = 512  # of a sample in the file, and more than it takes
_MOST_HEADERS: Final = 64 << 10


_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class Hashes:
    """Perceptual hashes of n images, of 256 bits each.

    `words` are those of the images and `mirrored` those of the images with left and right exchanged: uint64 (n, 4).
    `is_blank`, bool (n,), marks images with next to no contrast: they all look alike, and `pairs` leaves them out.
    `numbers` are the samples' numbers, uint64 (n,). `thumbnails`, uint8 (n, 8, 8), are the images in grey, 0 to 255; of
    other depths than 8 bits, the mean of the cache is 128 and its standard deviation 64.
    """

    numbers: Words
    words: Words
    mirrored: Words
    is_blank: npt.NDArray[np.bool_]
    thumbnails: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, positions: Positions) -> Hashes:
        """Return the hashes of these of the images, by their positions, in this order."""
        return Hashes(**{name: column[positions] for name, column in vars(self).items()})


def hashes_name(manifest: Manifest) -> str:
    """Return the name of the file of a cache's hashes. It has the fingerprint of the records that are hashed."""
    return f"{_PREFIX}{manifest.fingerprint}.npz"


def hashes_file(cache: Cache, make: Callable[[Cache], Hashes]) -> tuple[str, bytes]:
    """Return the name of the file of a cache's hashes, and its bytes; `make` makes hashes where none are kept."""
    found = kept_hashes(cache)
    return hashes_name(cache.manifest), _file_bytes(make(cache) if found is None else found)


def most_hashes_bytes(samples: int) -> int:
    """Return a number of bytes that no file of hashes exceeds, for a number of samples."""
    return samples * _MOST_BYTES + _MOST_HEADERS


def kept_hashes(cache: Cache) -> Hashes | None:
    """Return the hashes of all samples that are kept in a cache's folder; None where there are none that can be used.

    A file that is damaged or of other samples is not used, which a warning says.
    """
    path = cache.directory / hashes_name(cache.manifest)
    if not path.exists():
        return None
    try:
        table = SampleTable(path, cache.manifest.samples)
        found = Hashes(*(_column(table, name) for name in _COLUMNS))
        if not np.array_equal(found.numbers, cache.samples.numbers):
            raise StoreError("it has the hashes of other samples")
    except StoreError as error:
        _log.warning("%s is not used, and its hashes are computed again: %s", path, error)
        return None
    return found


def _column(table: SampleTable, name: str) -> Array:
    dtype, shape = _COLUMNS[name]
    column = table.get(name)
    if not isinstance(column, np.ndarray) or column.dtype != dtype or column.shape[1:] != shape:
        raise StoreError(f"it has no column {name!r} of hashes")
    return column


def _file_bytes(found: Hashes) -> bytes:
    columns = (found.numbers, found.words, found.mirrored, found.is_blank, found.thumbnails)
    return encode_columns(dict(zip(_COLUMNS, columns, strict=True)))


def keep_hashes(cache: Cache, found: Hashes) -> None:
    """Write hashes into the folder of a cache, in place of those of other records; not where it cannot be written."""
    path = cache.directory / hashes_name(cache.manifest)
    try:
        if not os.access(path.parent, os.W_OK):
            return
        write_atomically(path, _file_bytes(found))
        for other in path.parent.glob(f"{_PREFIX}*.npz"):
            if other != path:
                other.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s cannot be written, so its hashes are computed again next time: %s", path, error)
