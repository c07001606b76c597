"""A source's listing beside the samples table of the cache that was made of it: what must not have changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import SampleError, SourceError
from tpucache.store.cache import Cache
from tpucache.store.fields import LABEL
from tpucache.store.manifest import Manifest
from tpucache.store.samples import SampleTable
from tpucache.warmup.planning.numbering import SIZE_COLUMN
from tpucache.warmup.sources.base import Column, Item, Label, Listing, Source
from tpucache.warmup.sources.cells import to_number

_OWN: Final = ("number", "path", LABEL, SIZE_COLUMN)
_TRIED: Final = 8
_ADVICE: Final = (
    "Give the same options and the same source (labels, folds and columns are part of a cache), or another folder to "
    "build anew"
)


def check_listing(source: Source, listing: Listing, cache: Path, manifest: Manifest) -> None:
    """Raise SourceError when labels, classes, folds or other columns are not what a finished cache has.

    The listing is numbered as in the cache, by `number_samples`, which compares labels where both have them.
    """
    table = Cache(cache, manifest).samples
    numbers = table.numbers.tolist()
    position, item = _first_item(source, listing, numbers)
    _check_labels(listing, cache, manifest, table, position, item)
    for name, column in listing.columns.items():
        if name not in table:
            raise SourceError(f"{cache} has no column {name!r}, and the source has one now. {_ADVICE}")
        old, new = table[name], [column[number] for number in numbers]
        changed = [at for at, pair in enumerate(zip(old, new, strict=True)) if not _is_equal(*pair)]
        if changed:
            raise SourceError(
                f"column {name!r} of {cache} has other values in the source now: {len(changed):,} samples differ, such "
                f"as {table.paths[changed[0]]!r}, {old[changed[0]]} before and {new[changed[0]]} now. {_ADVICE}"
            )
    gone = [name for name in table if name not in _OWN and name not in listing.columns]
    if gone and not (item is not None and item.columns):  # samples do not have any of their own
        raise SourceError(f"{cache} has a column {gone[0]!r}, and the source has none now. {_ADVICE}")


def _first_item(source: Source, listing: Listing, numbers: Sequence[int]) -> tuple[int, Item | None]:
    """Return the position and the item of a cache's first sample that can be read, None where none of a few can."""
    for position, number in enumerate(numbers[:_TRIED]):
        with contextlib.suppress(SampleError):
            return position, source.load(listing.samples[number])
    return 0, None


def _check_labels(
    listing: Listing, cache: Path, manifest: Manifest, table: SampleTable, position: int, item: Item | None
) -> None:
    numbers = table.numbers.tolist()
    listed = next((label for number in numbers if (label := listing.samples[number].label) is not None), None)
    now = listed if listed is not None or item is None else item.label
    if table.labels is None and now is not None:
        raise SourceError(f"{cache} was made without labels, and the source has some now. {_ADVICE}")
    if table.labels is None or listed is not None or item is None:
        return
    if now is None:
        raise SourceError(f"{cache} was made with labels, and the source has none now. {_ADVICE}")
    before = table.labels[position].tolist()
    if not _is_label(now, before):
        raise SourceError(f"the label of {table.paths[position]!r} is {now} now, and {before} in {cache}. {_ADVICE}")
    # The samples' own labels are numbers: a class must keep its own.
    known = listing.classes[: len(manifest.classes)] or tuple(map(str, range(len(manifest.classes))))
    if isinstance(now, int) and known != manifest.classes:
        raise SourceError(f"{cache} has the classes {manifest.classes}, and the source now has {known}. {_ADVICE}")


def _is_label(label: Label, before: Any) -> bool:
    if isinstance(label, int) or isinstance(before, int):
        return bool(label == before)
    return bool(np.array_equal(np.array(label, np.float32), np.array(before, np.float32), equal_nan=True))


def _is_equal(old: Any, new: Any) -> bool:
    """Tell whether two cells hold the same, whether as a number or as the text of one."""
    if str(old) == str(new) or (isinstance(old, str) and isinstance(new, str)):
        return str(old) == str(new)
    first, second = _number(old), _number(new)
    return first is not None and second is not None and (first == second or (math.isnan(first) and math.isnan(second)))


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        return to_number(value)
    return value.item() if isinstance(value, np.generic) else value  # type: ignore[no-any-return]  # a number


def label_candidates(columns: dict[str, Column], item: Item | None) -> list[str]:
    """Return the names of columns and keys that could hold labels: those with such names, or else likely columns."""
    own = {**item.columns, **item.fields} if item is not None else {}
    named = [name for name in (*columns, *own) if _sounds_like_label(name)]
    return named or [name for name, column in columns.items() if name != "fold" and _repeats(column)]


_LABEL_NAMES: Final = frozenset(
    ("label", "labels", "target", "targets", "class", "classes", "class_id", "class_name", "category", "diagnosis", "y")
)


def _sounds_like_label(name: str) -> bool:
    name = name.lower()
    return name in _LABEL_NAMES or name.endswith(("_label", "_labels", "_target", "_class"))


def _repeats(column: Column) -> bool:
    """Tell whether a column has few values, each often, or numbers that are not whole."""
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        return True
    values = list(map(str, column))
    return 1 < len(set(values)) <= len(values) / 2
