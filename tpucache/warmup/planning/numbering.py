"""A source beside the cache that was made of it: what stands keeps its numbers, what is new comes after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import SourceError
from tpucache.store.cache import Cache
from tpucache.store.manifest import Manifest
from tpucache.store.samples import SampleTable, Strings
from tpucache.warmup.planning.blocks import Block
from tpucache.warmup.sources.base import Column, Listing, Sample

#: The column of the samples table that tells how large a sample was in its source.
SIZE_COLUMN: Final = "source_bytes"
_NAMED: Final = 3


def number_samples(listing: Listing, cache: Path, manifest: Manifest) -> Listing:
    """Return a listing in which every sample of the cache, kept or skipped, has its old number, and new ones follow.

    Raises SourceError when one of the cache's samples is gone, or has another size or label now.
    """
    table = Cache(cache, manifest).samples
    numbers = dict(zip(table.paths, table.numbers.tolist(), strict=True))
    skipped = {skip.path: skip.number for skip in manifest.skipped}
    places = {sample.path: at for at, sample in enumerate(listing.samples)}
    gone = [path for path in (*numbers, *skipped) if path not in places]
    if gone:
        raise SourceError(
            f"the source lacks {len(gone):,} of the samples that {cache} was made of: {named(gone)}. "
            "Bring them back, or give another folder to build anew"
        )
    _check_same(listing, cache, manifest, table, places)
    old = {**numbers, **skipped}
    order = sorted(old, key=old.__getitem__)
    order += [sample.path for sample in listing.samples if sample.path not in old]
    return _in_order(listing, [places[path] for path in order])


def order_of(numbered: Listing, listing: Listing) -> str:
    """Return where the samples of a numbered listing stand in the source's own, as slices such as `5:155 0:5`."""
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
    """Return a source's own listing, numbered by what `order_of` told. Raises ValueError when it has other samples."""
    slices = [tuple(map(int, part.split(":"))) for part in order.split()]
    told = sum(stop - start for start, stop in slices)
    if told != len(listing.samples):
        raise ValueError(f"it has {len(listing.samples):,} samples, and had {told:,}")
    places = [at for start, stop in slices for at in range(start, stop)]
    if sorted(places) != list(range(told)):
        raise ValueError(f"{order!r} is no order of its samples")
    return _in_order(listing, places)


def _in_order(listing: Listing, places: Sequence[int]) -> Listing:
    samples = [dataclasses.replace(listing.samples[at], number=number) for number, at in enumerate(places)]
    taken = np.array(places, np.int64)
    return Listing(samples, listing.classes, {name: _taken(c, taken) for name, c in listing.columns.items()})


def old_blocks(listing: Listing, cache: Path, manifest: Manifest, variants: Sequence[int]) -> list[Block]:
    """Return a cache's blocks with their kept samples, as blocks of some variants to be built."""
    opened = Cache(cache, manifest)
    numbers = opened.samples.numbers.tolist()
    blocks = []
    for entry in sorted(manifest.shards, key=lambda entry: entry.block):
        if entry.variant == manifest.variants[0]:
            part = slice(entry.first, entry.first + entry.records)
            samples = tuple(listing.samples[number] for number in numbers[part])
            checksums = [] if entry.variant else opened.index_of(entry)["crc32"].tolist()
            blocks.append(
                Block(entry.block, samples, tuple(variants), dict(zip(numbers[part], checksums, strict=False)))
            )
    return blocks


def _check_same(
    listing: Listing, cache: Path, manifest: Manifest, table: SampleTable, places: Mapping[str, int]
) -> None:
    samples = [listing.samples[places[path]] for path in table.paths]
    sizes: Any = table.get(SIZE_COLUMN, [0] * len(samples))
    resized = [s.path for s, size in zip(samples, np.asarray(sizes).tolist(), strict=True) if 0 < size != s.bytes > 0]
    if resized:
        raise SourceError(
            f"{len(resized):,} samples have another size than when {cache} was made of them: {named(resized)}. "
            "Bring them back as they were, or give another folder to build anew"
        )
    if table.labels is None or all(sample.label is None for sample in samples):
        return
    before = [_told(label, manifest.classes) for label in table.labels.tolist()]
    now = [_told(sample.label, listing.classes) for sample in samples]
    changed = [sample.path for sample, old, new in zip(samples, before, now, strict=True) if old != new]
    if changed:
        raise SourceError(
            f"{len(changed):,} samples have another label than when {cache} was made of them: {named(changed)}. "
            "Bring the labels back as they were, or give another folder to build anew"
        )


def _told(label: Any, classes: Sequence[str]) -> Any:
    """Return a label as something that compares whatever classes are added beside it."""
    if isinstance(label, int):
        return classes[label] if label < len(classes) else label
    return None if label is None else [float(np.float32(value)) for value in label]


def _taken(column: Column, places: Any) -> Column:
    if isinstance(column, (np.ndarray, Strings)):
        return column[places] if isinstance(column, np.ndarray) else [column[at] for at in places.tolist()]
    return [column[at] for at in places.tolist()]


def sample_difference(before: SampleTable, samples: Sequence[Sample]) -> str:
    """Say how a source differs from what a run was begun with, by its samples' paths and sizes."""
    sizes: Any = before[SIZE_COLUMN]
    old = dict(zip(before.paths, np.asarray(sizes).tolist(), strict=True))
    new = {sample.path: sample.bytes for sample in samples}
    told = [
        f"{len(paths):,} {what}: {named(paths)}"
        for what, paths in (
            ("gone", [path for path in old if path not in new]),
            ("new", [path for path in new if path not in old]),
            ("of another size", [path for path, size in new.items() if old.get(path, size) != size]),
        )
        if paths
    ]
    return "; ".join(told) or "their order, labels or columns differ"


def named(paths: Sequence[str]) -> str:
    """Name the first few of many paths."""
    more = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
    return ", ".join(repr(path) for path in paths[:_NAMED]) + more
