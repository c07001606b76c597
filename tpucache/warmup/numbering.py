"""The numbers of a source's samples: in a finished cache old ones keep theirs, new ones follow."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SourceError
from tpucache.store.cache import Cache
from tpucache.store.copying import earlier_tables
from tpucache.store.fields import LABEL
from tpucache.store.manifest import Manifest
from tpucache.store.samples import SampleTable, Strings
from tpucache.warmup.sources import label_source, pad_source, select_source
from tpucache.warmup.sources.source import Column, Listing, Sample, Source

#: The column of the samples table with each sample's size in its source.
SIZE_COLUMN: Final = "source_bytes"
#: The columns of the samples table that every cache may have; all others came from its source.
OWN_COLUMNS: Final = ("number", "path", LABEL, SIZE_COLUMN)
_NAMED: Final = 3

_log: Final = logging.getLogger("tpucache")


def sizes_of(samples: Sequence[Sample]) -> npt.NDArray[np.uint64]:
    """Return how many bytes samples have in their source: uint64 (n,)."""
    return np.array([sample.bytes for sample in samples], np.uint64)


def number_samples(listing: Listing, cache: Cache) -> Listing:
    """Return a listing in which every sample of the cache, kept or skipped, has its old number, and new ones follow.

    To a cache that was relabelled since belong its own labels and columns, not the source's, unless samples are added.
    Raises SourceError when one of the cache's samples is missing, or has another size or label now, or boxes only then
    or now.
    """
    check_boxes(cache.manifest, listing, cache.directory)
    table = cache.samples
    numbers = dict(zip(table.paths, table.numbers.tolist(), strict=True))
    skipped = {skip.path: skip.number for skip in cache.manifest.skipped}
    places = {sample.path: at for at, sample in enumerate(listing.samples)}
    missing = [path for path in (*numbers, *skipped) if path not in places]
    if missing:
        raise SourceError(
            f"the source lacks {len(missing):,} of the samples that {cache.directory} was made of: "
            f"{name_some(missing)}. Bring them back, or give another folder to build anew"
        )
    old = {**numbers, **skipped}
    if earlier_tables(cache.manifest) and len(old) == len(places):
        listing = _relabelled(listing, cache, places)
    _check_sizes_and_labels(listing, cache, places)
    order = sorted(old, key=old.__getitem__)
    order += [sample.path for sample in listing.samples if sample.path not in old]
    return _reordered(listing, [places[path] for path in order])


def _relabelled(listing: Listing, cache: Cache, places: Mapping[str, int]) -> Listing:
    """Return a listing with the labels, classes and columns that relabelling gave a cache of the same samples."""
    _log.warning("%s was relabelled: its own labels and columns are used, not those of the source", cache.directory)
    table = cache.samples
    samples = [dataclasses.replace(sample, label=None) for sample in listing.samples]
    rows = np.zeros(len(samples), np.int64)  # a sample that was skipped has no row; it is not built either
    rows[[places[path] for path in table.paths]] = np.arange(len(table.paths))
    if table.labels is not None:
        labels = [tuple(label) if isinstance(label, list) else label for label in table.labels.tolist()]
        samples = [
            dataclasses.replace(sample, label=labels[row]) for sample, row in zip(samples, rows.tolist(), strict=True)
        ]
    columns = {name: _taken(table[name], rows) for name in table if name not in OWN_COLUMNS}
    return dataclasses.replace(listing, samples=samples, classes=cache.manifest.classes, columns=columns)


def order_of(numbered: Listing, listing: Listing) -> str:
    """Return where the samples of a numbered listing are in the source's own, as slices such as `5:155 0:5`."""
    places = {sample.path: at for at, sample in enumerate(listing.samples)}
    slices: list[list[int]] = []
    for sample in numbered.samples:
        at = places[sample.path]
        if slices and slices[-1][1] == at:
            slices[-1][1] += 1
        else:
            slices.append([at, at + 1])
    return " ".join(f"{start}:{stop}" for start, stop in slices)


def put_in_order(listing: Listing, order: str) -> Listing:
    """Return a source's own listing, numbered by what `order_of` returned.

    Raises ValueError when it has other samples.
    """
    slices = [tuple(map(int, part.split(":"))) for part in order.split()]
    count = sum(stop - start for start, stop in slices)
    if count != len(listing.samples):
        raise ValueError(f"it has {len(listing.samples):,} samples, and had {count:,}")
    places = [at for start, stop in slices for at in range(start, stop)]
    if sorted(places) != list(range(count)):
        raise ValueError(f"{order!r} is no order of its samples")
    return _reordered(listing, places)


def sample_difference(before: SampleTable, samples: Sequence[Sample]) -> str:
    """Return how a source differs from the listing that a run started with, by its samples' paths and sizes."""
    sizes: Any = before[SIZE_COLUMN]
    old = dict(zip(before.paths, np.asarray(sizes).tolist(), strict=True))
    new = {sample.path: sample.bytes for sample in samples}
    differences = [
        f"{len(paths):,} {what}: {name_some(paths)}"
        for what, paths in (
            ("gone", [path for path in old if path not in new]),
            ("new", [path for path in new if path not in old]),
            ("of another size", [path for path, size in new.items() if old.get(path, size) != size]),
        )
        if paths
    ]
    return "; ".join(differences) or "their order, labels or columns differ"


def name_some(paths: Sequence[str]) -> str:
    """Return the first few of many paths as text."""
    more = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
    return ", ".join(repr(path) for path in paths[:_NAMED]) + more


def _reordered(listing: Listing, places: Sequence[int]) -> Listing:
    samples = [dataclasses.replace(listing.samples[at], number=number) for number, at in enumerate(places)]
    columns = {name: _taken(column, np.array(places, np.int64)) for name, column in listing.columns.items()}
    return dataclasses.replace(listing, samples=samples, columns=columns)


def _taken(column: Column | Strings, places: Any) -> Column:
    return column[places] if isinstance(column, np.ndarray) else [column[at] for at in places.tolist()]


def _check_sizes_and_labels(listing: Listing, cache: Cache, places: Mapping[str, int]) -> None:
    table = cache.samples
    samples = [listing.samples[places[path]] for path in table.paths]
    sizes: Any = table.get(SIZE_COLUMN, [0] * len(samples))
    resized = [s.path for s, size in zip(samples, np.asarray(sizes).tolist(), strict=True) if 0 < size != s.bytes > 0]
    if resized:
        raise SourceError(
            f"{len(resized):,} samples have another size than when {cache.directory} was made of them: "
            f"{name_some(resized)}. Bring them back as they were, or give another folder to build anew"
        )
    if table.labels is None or all(sample.label is None for sample in samples):
        return
    before = [_comparable(label, cache.manifest.classes) for label in table.labels.tolist()]
    now = [_comparable(sample.label, listing.classes) for sample in samples]
    changed = [sample.path for sample, old, new in zip(samples, before, now, strict=True) if old != new]
    if changed:
        raise SourceError(
            f"{len(changed):,} samples have another label than when {cache.directory} was made of them: "
            f"{name_some(changed)}. Bring the labels back as they were, change the cache's with `tpucache relabel`, or "
            "give another folder to build anew"
        )


def _comparable(label: Any, classes: Sequence[str]) -> Any:
    """Return a label as something that compares equal whatever classes are added."""
    if isinstance(label, int):
        return classes[label] if label < len(classes) else str(label)  # as classes without names are called
    return None if label is None else [float(np.float32(value)) for value in label]


def as_asked(source: Source, manifest: Manifest) -> Source:
    """Return a source of the samples, labels and classes that were asked for when a finished cache was made."""
    asked, read = _saved(manifest.source.get("asked")), _saved(manifest.source.get("labels"))
    part = select_source(
        source,
        limit=asked.get("limit"),
        include=asked.get("include", ()),
        exclude=asked.get("exclude", ()),
    )
    part = pad_source(part, asked.get("pad"), asked.get("truncate", False))
    if earlier_tables(manifest):  # its labels are no longer those of the source
        return part
    return label_source(part, read.get("asked", "auto"), manifest.classes if "classes" in asked else ())


def check_asked(cache: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SourceError when an unfinished build was started with another limit or other patterns or classes."""
    changed = [
        f"--{name} {before.get(name, 'not given')}, now {now.get(name, 'not given')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise SourceError(f"{cache} was started with {'; '.join(changed)}: give the same options to continue")


def check_given_classes(manifest: Manifest, listing: Listing, cache: Path) -> None:
    """Raise SourceError when the classes of a finished cache were given, and a source now has others."""
    if manifest.classes and "classes" in _saved(manifest.source.get("asked")) and listing.classes != manifest.classes:
        raise SourceError(
            f"{cache} was made with --classes, and the classes now are others or have another order: give "
            f"--classes {cache}"
        )


def check_boxes(manifest: Manifest, listing: Listing, cache: Path) -> None:
    """Raise SourceError when a finished cache has boxes that lie beside its source, and a source now has none of these,
    or the other way round."""
    before, now = _saved(manifest.source.get("asked")).get("boxes"), listing.asked.get("boxes")
    if before is not None and now is None:
        raise SourceError(f"{cache} was made with --boxes {before}: give --boxes again, or another folder")
    if before is None and now is not None:
        raise SourceError(f"{cache} was made without --boxes: leave --boxes out, or give another folder")


def _saved(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, dict) else {}
