"""Whether a cache was made by adding to another or by relabelling it: only such a cache may replace the other."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.store.cache import Cache
from tpucache.store.fields import LABEL
from tpucache.store.manifest import Manifest
from tpucache.store.samples import SampleTable

#: What relabelling leaves as it is.
_KEPT: Final = ("number", "path", "source_bytes")


def earlier_tables(manifest: Manifest) -> tuple[str, ...]:
    """Return the SHA-256 of each samples table that a cache had before it was relabelled, the oldest first."""
    found = manifest.source.get("relabelled")
    return tuple(digest for digest in found if isinstance(digest, str)) if isinstance(found, list) else ()


def has_same_table(before: Manifest, after: Manifest) -> bool:
    """Return whether two caches have one samples table, and the labels in it mean the same classes."""
    return before.table == after.table and before.classes == after.classes


def check_descends(old: Cache, new: Cache, where: str) -> None:
    """Raise UsageError unless the new cache begins with the old one's samples: numbers, paths, labels, columns.

    Where the new one is the old one relabelled, labels and columns may differ. Of each cache only the samples table is
    read, so its folder may hold nothing else, or nothing at all where `has_same_table`. Shards do not hold labels: two
    caches of the same photographs have the same shards. Raises DamageError or FormatError for a table that cannot be
    read.
    """
    before, after = old.manifest, new.manifest
    if has_same_table(before, after):
        return
    first, second = old.samples, new.samples
    count = before.samples
    names = _KEPT if before.table.sha256 in earlier_tables(after) else tuple(first)
    kept = count <= after.samples and all(
        name in second and _values(first, name, before, count) == _values(second, name, after, count)
        for name in names
        if name in first
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
