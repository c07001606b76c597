"""A source's listing beside the samples table of the cache made of it: what must not have changed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tpucache.errors import SampleError, SourceError
from tpucache.store.cache import Cache
from tpucache.store.manifest import Manifest
from tpucache.warmup.planning.numbering import OWN_COLUMNS
from tpucache.warmup.sources.base import Item, Label, Listing, Source
from tpucache.warmup.sources.cells import to_number

_TRIED: Final = 8
_LONGEST: Final = 20  # of the decimal digits of a number
#: Seconds after which no other sample is read, as a finished cache is to be found finished at once.
_SECONDS: Final = 0.5
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


def compared_numbers(listing: Listing) -> frozenset[int]:
    """Return the numbers of a few samples, in equal distances: those by which another source is noticed."""
    count = len(listing.samples)
    return frozenset(number * count // _TRIED for number in range(min(count, _TRIED)))


def content_digests(manifest: Manifest) -> dict[int, str]:
    """Return the hashes of content that a cache keeps, by the number of a sample: of skipped ones and of a few others.

    Nothing where the content of a sample is not known.
    """
    saved = manifest.source.get("digests")
    pairs = saved.items() if isinstance(saved, dict) else ()
    return {
        int(number): digest
        for number, digest in pairs
        if isinstance(digest, str) and number.isdecimal() and len(number) < _LONGEST
    }


def check_contents(source: Source, listing: Listing, cache: Cache) -> None:
    """Raise SourceError when a few samples have another content than when a finished cache was made of them.

    Samples that cannot be read do not count. The listing is numbered as in the cache.
    """
    skipped = {skip.number for skip in cache.manifest.skipped}
    began = time.monotonic()
    for number, digest in sorted(content_digests(cache.manifest).items()):
        if number in skipped or number >= len(listing.samples):
            continue
        with contextlib.suppress(SampleError):
            if source.load(listing.samples[number]).sha256() != digest:
                raise SourceError(
                    f"{listing.samples[number].path!r} has another content than when {cache.directory} was made of it, "
                    "though its name and size are the same. Give the source that the cache was made of, or another "
                    "folder to build anew"
                )
        if time.monotonic() - began > _SECONDS:
            break


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
