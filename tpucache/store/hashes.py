"""Read, write and check the file in a cache's folder that has the perceptual hashes of its images."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, StoreError
from tpucache.native import Array
from tpucache.store.cache import Cache
from tpucache.store.files import read_file, write_atomically
from tpucache.store.manifest import Manifest
from tpucache.store.samples import SampleTable, encode_columns

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

#: Bits per hash.
BITS: Final = 256

_PREFIX: Final = "hashes-"
#: The dtype of each column of the file, and the shape of one sample's value. If the hash function is ever changed, the
#: new hashes need a new column name.
_COLUMNS: Final[Mapping[str, tuple[type, tuple[int, ...]]]] = {
    "number": (np.uint64, ()),
    "phash256": (np.uint64, (BITS // 64,)),
    "phash256_mirrored": (np.uint64, (BITS // 64,)),
    "is_blank": (np.bool_, ()),
}

_MOST_BYTES: Final = 512  # a generous limit per sample
_MOST_HEADERS: Final = 64 << 10

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class Hashes:
    """Perceptual hashes of n images, 256 bits each.

    `words` has the hashes of the images, `mirrored` those of the mirrored images: both are uint64 (n, 4). `is_blank`,
    bool (n,), is True for images with almost no contrast, which all look alike and are not compared. `numbers` has the
    samples' numbers, uint64 (n,).
    """

    numbers: Words
    words: Words
    mirrored: Words
    is_blank: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, positions: Positions) -> Hashes:
        """Return the hashes of the images at these positions, in this order."""
        return Hashes(**{name: column[positions] for name, column in vars(self).items()})


def hashes_name(manifest: Manifest) -> str:
    return f"{_PREFIX}{manifest.fingerprint}.npz"


def hashes_file(cache: Cache, make: Callable[[Cache], Hashes]) -> tuple[str, bytes]:
    """Return the name and the bytes of the file with a cache's hashes. If none are stored, `make` computes them."""
    found = kept_hashes(cache)
    return hashes_name(cache.manifest), _file_bytes(make(cache) if found is None else found)


def most_hashes_bytes(samples: int) -> int:
    return samples * _MOST_BYTES + _MOST_HEADERS


def kept_hashes(cache: Cache) -> Hashes | None:
    path = cache.directory / hashes_name(cache.manifest)
    try:
        return _read_hashes(path, cache) if path.exists() else None
    except StoreError as error:
        _log.warning("%s is not used, and its hashes are computed again: %s", path, error)
        return None


def check_hashes(cache: Cache) -> None:
    path = cache.directory / hashes_name(cache.manifest)
    if not path.exists():
        return
    found = _read_hashes(path, cache)
    try:
        is_same = read_file(path) == _file_bytes(found)
    except OSError as error:
        raise DamageError(f"it cannot be read: {error.strerror}") from error
    if not is_same:
        raise DamageError("it was changed after it was written")


def _read_hashes(path: Path, cache: Cache) -> Hashes:
    table = SampleTable(path, cache.manifest.samples)
    found = Hashes(*(_column(table, name) for name in _COLUMNS))
    if not np.array_equal(found.numbers, cache.samples.numbers):
        raise StoreError("it has the hashes of other samples")
    return found


def _column(table: SampleTable, name: str) -> Array:
    dtype, shape = _COLUMNS[name]
    column = table.get(name)
    if not isinstance(column, np.ndarray) or column.dtype != dtype or column.shape[1:] != shape:
        raise StoreError(f"its column {name!r} is missing, or has another dtype or shape than hashes have")
    return column


def _file_bytes(found: Hashes) -> bytes:
    columns = (found.numbers, found.words, found.mirrored, found.is_blank)
    return encode_columns(dict(zip(_COLUMNS, columns, strict=True)))


def keep_hashes(cache: Cache, found: Hashes) -> None:
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
