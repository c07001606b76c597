"""Names that tell their bearers apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

#: Columns of the samples table that have a meaning.
_RESERVED: Final = frozenset({"number", "path", "label", "source_bytes", "fold"})


def column_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name that each column has in the samples table: plain, not a reserved one, and no two alike."""
    given: dict[str, str] = {}
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"
        while safe in _RESERVED or safe in given.values():
            safe += "_"
        given[name] = safe
    return given


def unique(names: Iterable[str]) -> list[str]:
    """Return names that tell their bearers apart: the second of one name has `#2` after it, and so on."""
    used: Counter[str] = Counter()
    result = []
    for name in names:
        own = name
        while own in used:
            used[name] += 1
            own = f"{name}#{used[name]}"
        used[own] += 1
        result.append(own)
    return result
