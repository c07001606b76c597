"""Unique names, and names that a samples table or a record can have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tpucache.store.fields import BOXES, FIELD_NAME, IMAGE, KEYPOINTS, LABEL, MASK

#: Columns of the samples table that have a meaning.
_RESERVED: Final = frozenset({"number", "path", LABEL, "source_bytes", "fold"})
_LONGEST: Final = 56
#: Fields that have a meaning.
_OF_IMAGES: Final = frozenset({IMAGE, MASK, BOXES, KEYPOINTS})


def column_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name that each column has in the samples table: plain, not a reserved one, and no two alike."""
    given: dict[str, str] = {}
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_"
        while safe in _RESERVED or safe in given.values():
            safe += "_"
        given[name] = safe
    return given


def field_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name that each array has in a record: plain, none that means an image's own, and no two alike."""
    names = list(names)
    given = {name: name for name in names if FIELD_NAME.fullmatch(name)}
    for name in names:
        if name not in given:
            safe = re.sub(r"[^a-z0-9_]", "_", name.lower())
            safe = (safe if safe[:1].isalpha() else f"f_{safe}")[:_LONGEST]
            while safe in _OF_IMAGES or safe in given.values():
                safe += "_"
            given[name] = safe
    return given


def unique(names: Iterable[str]) -> list[str]:
    """Return unique names: the second of one name has `#2` after it, and so on."""
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
