"""Whether a cache was made by adding to another: only such a cache may replace the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpucache.errors import UsageError
from tpucache.store.cache import Cache
from tpucache.store.fields import LABEL
from tpucache.store.manifest import Manifest
from tpucache.store.samples import SampleTable


def check_descends(old: Cache, new: Cache, where: str) -> None:
    """Raise UsageError unless the new cache begins with the old one's samples: numbers, paths, labels, columns.

    Of each cache only the samples table is read, so its folder may hold nothing else. Shards do not hold labels: two
    caches of the same photographs have the same shards. Raises DamageError or FormatError for a table that cannot be
    read.
    """
    before, after = old.manifest, new.manifest
    if before.identity == after.identity or before.table == after.table:
        return
    first, second = old.samples, new.samples
    count = before.samples
    kept = count <= after.samples and all(
        name in second and _values(first, name, before, count) == _values(second, name, after, count) for name in first
    )
    if not kept:
        raise UsageError(
            f"{where} holds another cache, whose samples, labels or columns differ: remove that one first, or use "
            "another place"
        )


def _values(table: SampleTable, name: str, manifest: Manifest, count: int) -> list[Any] | bytes:
    """Return the first values of a column as what compares, though classes may have been added between the others."""
    column = table[name]
    if not isinstance(column, np.ndarray):
        return list(column[:count])
    if name == LABEL and manifest.classes and column.dtype.kind in "iu":
        classes = dict(enumerate(manifest.classes))
        return [classes.get(label, label) for label in column[:count].tolist()]
    if column.dtype.kind == "f":
        return column[:count].tobytes()  # bytes, as a missing value, NaN, equals none
    return list(column[:count].tolist())
