"""A source's listing beside the samples table of the cache made of it: what must not have changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tpucache.errors import SampleError, SourceError
from tpucache.store.cache import Cache
from tpucache.warmup.planning.numbering import OWN_COLUMNS
from tpucache.warmup.sources.base import Item, Label, Listing, Source
from tpucache.warmup.sources.cells import to_number

_TRIED: Final = 8
_ADVICE: Final = (
    "Give the same options and the same source (labels, folds and columns are part of a cache, and `tpucache relabel` "
    "changes them), or another folder to build anew"
)


def check_listing(source: Source, listing: Listing, cache: Cache) -> None:
    """Raise SourceError when labels, classes, folds or other columns are not what a finished cache has.

    The listing is numbered as in the cache, by `number_samples`, which compares labels where both have them.
    """
    table, folder = cache.samples, cache.directory
    numbers = table.numbers.tolist()
    position, item = _first_item(source, listing, numbers)
    _check_labels(listing, cache, position, item)
    for name, column in listing.columns.items():
        if name not in table:
            raise SourceError(f"{folder} has no column {name!r}, and the source has one now. {_ADVICE}")
        old, new = table[name], [column[number] for number in numbers]
        changed = [at for at, pair in enumerate(zip(old, new, strict=True)) if not _is_equal(*pair)]
        if changed:
            raise SourceError(
                f"column {name!r} of {folder} has other values in the source now: {len(changed):,} samples differ, "
                f"such as {table.paths[changed[0]]!r}, {old[changed[0]]} before and {new[changed[0]]} now. {_ADVICE}"
            )
    gone = [name for name in table if name not in OWN_COLUMNS and name not in listing.columns]
    if gone and not (item is not None and item.columns):  # samples do not have any of their own
        raise SourceError(f"{folder} has a column {gone[0]!r}, and the source has none now. {_ADVICE}")


def _first_item(source: Source, listing: Listing, numbers: Sequence[int]) -> tuple[int, Item | None]:
    """Return the position and the item of a cache's first sample that can be read, None where none of a few can."""
    for position, number in enumerate(numbers[:_TRIED]):
        with contextlib.suppress(SampleError):
            return position, source.load(listing.samples[number])
    return 0, None


def _check_labels(listing: Listing, cache: Cache, position: int, item: Item | None) -> None:
    table, folder, classes = cache.samples, cache.directory, cache.manifest.classes
    numbers = table.numbers.tolist()
    listed = next((label for number in numbers if (label := listing.samples[number].label) is not None), None)
    now = listed if listed is not None or item is None else item.label
    if table.labels is None and now is not None:
        raise SourceError(f"{folder} was made without labels, and the source has some now. {_ADVICE}")
    if table.labels is None or listed is not None or item is None:
        return
    if now is None:
        raise SourceError(f"{folder} was made with labels, and the source has none now. {_ADVICE}")
    before = table.labels[position].tolist()
    if not _is_label(now, before):
        raise SourceError(f"the label of {table.paths[position]!r} is {now} now, and {before} in {folder}. {_ADVICE}")
    # The samples' own labels are numbers: a class must keep its own.
    known = listing.classes[: len(classes)] or tuple(map(str, range(len(classes))))
    if isinstance(now, int) and known != classes:
        raise SourceError(f"{folder} has the classes {classes}, and the source now has {known}. {_ADVICE}")


def _is_label(label: Label, before: Any) -> bool:
    if isinstance(label, int) or isinstance(before, int):
        return bool(label == before)
    return bool(np.array_equal(np.array(label, np.float32), np.array(before, np.float32), equal_nan=True))


def _is_equal(old: Any, new: Any) -> bool:
    """Return whether two cells hold the same value, whether as a number or as the text of one."""
    if str(old) == str(new) or (isinstance(old, str) and isinstance(new, str)):
        return str(old) == str(new)
    first, second = _number(old), _number(new)
    return first is not None and second is not None and (first == second or (math.isnan(first) and math.isnan(second)))


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        return to_number(value)
    return value.item() if isinstance(value, np.generic) else value  # type: ignore[no-any-return]  # a number
