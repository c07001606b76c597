"""Makes a cache from finished shards: writes the index, the samples table and, last, the manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SourceError
from tpucache.native import Array
from tpucache.recipe import fingerprint
from tpucache.store.cache import Cache, annotation_counts, cache_fingerprint
from tpucache.store.fields import LABEL, Field
from tpucache.store.files import link_or_copy, write_atomically
from tpucache.store.format import (
    INDEX_DTYPE,
    INDEX_NAME,
    MANIFEST_NAME,
    SAMPLES_NAME,
    TIMES_NAME,
    VERSION,
    WORK_NAME,
    shard_name,
    table_name,
    version_name,
)
from tpucache.store.growing import Prospect
from tpucache.store.history import note_time
from tpucache.store.index import encode_index
from tpucache.store.manifest import FileEntry, History, Manifest, ShardEntry, Statistics, mean_and_std, version_of
from tpucache.store.samples import IMAGE_COLUMNS, Column, Strings, encode_columns
from tpucache.warmup.library_versions import versions
from tpucache.warmup.listing import SIZE_COLUMN, content_digests, sizes_of
from tpucache.warmup.plan import BuildPlan
from tpucache.warmup.records.arrays import SEVERAL_FRAMES
from tpucache.warmup.records.encode import add_moments
from tpucache.warmup.run.spool import BuiltShard, ChunkInfo, add_annotations
from tpucache.warmup.sources.source import Listing

_log: Final = logging.getLogger("tpucache")


def finish_tables(cache: Path, plan: BuildPlan, shards: Sequence[BuiltShard]) -> Manifest:
    """Write a cache's tables, and return its manifest, which is not written yet."""
    existing = plan.existing
    before = existing.manifest if existing else None
    old = _old_blocks(shards, before)
    infos = {shard.entry.block: shard.info for shard in shards if shard.entry.block not in old}
    new = ChunkInfo.join([infos[block] for block in sorted(infos)])
    _warn_of_frames(plan.listing, new)
    kept = set(new.numbers)
    skips = {skip.number: skip for skip in (*(before.skipped if before else ()), *new.skipped)}
    skipped = tuple(skips[number] for number in sorted(skips) if number not in kept)
    if before is not None:
        old = _old_blocks(shards, before)
        shards = [shard for shard in shards if shard.entry.records or shard.entry.block in old]
        if not shards and skipped == before.skipped:
            return before
    table = existing.samples if existing else None
    old_numbers = table.numbers.tolist() if table is not None else []
    numbers = np.array([*old_numbers, *new.numbers], np.uint64)
    if not len(numbers):
        raise SourceError(f"none of the {len(skipped)} samples could be used; {skipped[0].path!r}: {skipped[0].reason}")
    columns, classes, counts = sample_columns(plan.listing, new, numbers, table)
    entries, index = join_shards(shards, existing)
    generation = before.generation + 1 if before else 0
    old_sums = (list(before.statistics.sums), list(before.statistics.squares)) if before else ([], [])
    return Manifest(
        samples=len(numbers),
        variants=tuple(sorted({entry.variant for entry in entries})),
        fields=plan.fields,
        classes=classes,
        value_names=value_names(plan.listing.value_names, columns.get(LABEL), classes),
        mask_names=plan.listing.mask_names,
        shards=entries,
        tables=(
            write_table(cache, table_name(INDEX_NAME, generation), encode_index(index)),
            write_table(cache, table_name(SAMPLES_NAME, generation), encode_columns(columns)),
        ),
        skipped=skipped,
        statistics=statistics(plan.fields, len(numbers), *add_moments(old_sums, (new.sums, new.squares)), counts),
        fingerprint=cache_fingerprint(fingerprint(plan.full_recipe), entries),
        recipe=plan.full_recipe,
        source={
            **_source(plan, columns.get(LABEL), bool(classes)),
            "annotations": _annotations(new, shards, before),
            "digests": _digests(new, before),
        },
        created_by=versions(),
        version=version_of(before.deleted if before else ()),
        deleted=before.deleted if before else (),
        history=next_history(cache, plan.existing.manifest, "warmup") if plan.existing else None,
    )


def _warn_of_frames(listing: Listing, new: ChunkInfo) -> None:
    several = [
        number
        for number, mark in zip(new.numbers, new.columns.get(SEVERAL_FRAMES, ()), strict=False)
        if mark is not None
    ]
    if several:
        _log.warning(
            "of files with several frames or pages, only the first one is used: %d files, such as %r",
            len(several),
            listing.samples[several[0]].path,
        )


def make_prospect(plan: BuildPlan, build: str) -> Prospect:
    """Return what is known of a cache before its records are built: parts of its manifest, and its samples table."""
    blocks, listing = plan.blocks, plan.listing
    numbers = np.arange(len(listing.samples), dtype=np.uint64)
    columns, classes, _ = sample_columns(listing, ChunkInfo(), numbers)
    variants = sorted(blocks[0].variants)
    return Prospect(
        build=build,
        source=plan.source,
        samples=len(listing.samples),
        variants=tuple(variants),
        fields=plan.fields,
        classes=classes,
        value_names=value_names(listing.value_names, columns.get(LABEL), classes),
        mask_names=listing.mask_names,
        recipe=plan.full_recipe,
        version=VERSION,
        shards=tuple(shard_name(variant, block.number) for variant in variants for block in blocks),
        table=columns,
    )


def taken(column: Sequence[str] | Array, places: npt.NDArray[np.int64]) -> Column:
    """Return the values of a column at the positions `places`: an array, or Strings for text."""
    if isinstance(column, np.ndarray):
        return column[places]
    every = list(column)
    return Strings.pack([every[at] for at in places.tolist()])


def class_counts(labels: Array, classes: Sequence[str]) -> tuple[int, ...]:
    if labels.ndim > 1:
        return tuple((labels > 0).sum(0).tolist())
    return tuple(np.bincount(labels[labels >= 0].astype(np.int64), minlength=len(classes)).tolist())


def _source(plan: BuildPlan, labels: Any, has_classes: bool) -> dict[str, Any]:
    left_out = {"left_out": dict(plan.listing.left_out)} if plan.listing.left_out else {}
    asked = {"asked": dict(plan.listing.asked)} if plan.listing.asked else {}
    before = plan.existing.manifest.source if plan.existing else {}
    kept = {name: before[name] for name in ("relabelled",) if name in before}
    read = label_facts(plan.labels, labels, has_classes, plan.unused_labels)
    return {**plan.source, **left_out, **asked, **kept, "labels": read}


def _digests(new: ChunkInfo, before: Manifest | None) -> dict[str, str]:
    """Return content hashes by sample number, as text: those of skipped samples, and those of a few other samples."""
    found = {int(number): digest for number, digest in new.digests.items()}
    if before is not None:
        used = {*new.numbers}  # a sample that was skipped and is not any more has another hash, or none
        found = {**{at: each for at, each in content_digests(before).items() if at not in used}, **found}
    return {str(number): found[number] for number in sorted(found) if found[number]}


def _annotations(new: ChunkInfo, shards: Sequence[BuiltShard], before: Manifest | None) -> dict[str, dict[str, int]]:
    parts = [new.annotations] if new.numbers else []
    if before is not None and before.samples:
        added = ChunkInfo.join([shard.info for shard in _old_blocks(shards, before).values()]).annotations
        old = annotation_counts(before)
        parts.append({name: {**added.get(name, {}), **places} for name, places in old.items()})
    return add_annotations(parts)


def label_facts(asked: str, labels: Any, has_classes: bool, unused: Sequence[str] = ()) -> dict[str, Any]:
    """Return the description of labels for a manifest, as JSON values."""
    read: dict[str, Any] = {"asked": asked}
    if labels is None:
        read |= {"kind": "none", "unused": list(unused)}
    elif labels.ndim == 1:
        read["kind"] = "classes"
    elif has_classes:
        read["kind"] = "multilabel"
    else:
        known = labels[np.isfinite(labels)]
        read |= {"kind": "numbers", "columns": labels.shape[1]}
        read |= {"least": float(known.min()), "most": float(known.max())} if known.size else {}
    return read


def value_names(names: Sequence[str], labels: Any, classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns of labels for a manifest; () unless labels are several values with these
    names.
    """
    are_values = labels is not None and labels.ndim == 2 and not classes
    return tuple(names) if are_values and labels.shape[1] == len(names) > 1 else ()


def _old_blocks(shards: Sequence[BuiltShard], before: Manifest | None) -> dict[int, BuiltShard]:
    old = {entry.block for entry in before.shards} if before else set()
    return {shard.entry.block: shard for shard in shards if shard.entry.block in old}


def sample_columns(
    listing: Listing, new: ChunkInfo, numbers: Array, table: Mapping[str, Column] | None = None
) -> tuple[dict[str, Column], tuple[str, ...], tuple[int, ...]]:
    """Return the columns of the samples table, the classes, and the number of samples of each class."""
    table = table if table is not None else {}
    places = numbers.astype(np.int64)
    samples = [listing.samples[number] for number in places.tolist()]
    columns: dict[str, Column] = {"number": numbers, "path": Strings.pack([sample.path for sample in samples])}
    columns[SIZE_COLUMN] = sizes_of(samples)
    labels = [sample.label for sample in samples]
    if all(label is None for label in labels):  # labels are stored in the samples, not in the listing
        old: Any = table.get(LABEL, [])
        labels = [*(np.asarray(old).tolist() if len(old) else [None] * (len(samples) - len(new.labels))), *new.labels]
    classes, counts = () if "classes" in listing.asked else listing.classes, tuple[int, ...]()
    if any(label is not None for label in labels):
        columns[LABEL], classes, counts = label_column(labels, [sample.path for sample in samples], listing.classes)
    for name, column in listing.columns.items():
        items = [column[at] for at in places.tolist()]
        columns[name] = np.array(items) if isinstance(column, np.ndarray) else Strings.pack([str(i) for i in items])
    known = [name for name in table if name not in columns]
    for name in sorted({*new.columns, *known} - (columns.keys() & set(IMAGE_COLUMNS)) - {SEVERAL_FRAMES}):
        kept = list(table[name]) if name in table else [None] * (len(samples) - len(new.numbers))
        columns[name] = _plain_column([*kept, *new.columns.get(name, [None] * len(new.numbers))])
    return columns, classes, counts


def label_column(
    labels: Sequence[Any], paths: Sequence[str], classes: tuple[str, ...]
) -> tuple[Array, tuple[str, ...], tuple[int, ...]]:
    """Return the column of labels, the classes, and the number of samples of each class."""
    kinds: set[Any] = set(map(type, labels))
    if kinds <= {tuple, list}:
        kinds = set(map(len, labels))
    if len(kinds) != 1:
        other = next(path for path, label in zip(paths, labels, strict=True) if type(label) is not type(labels[0]))
        raise SourceError(f"labels must be of one kind: those of {paths[0]!r} and {other!r} differ, or one is missing")
    if not isinstance(labels[0], int):
        marked = bool(classes) and len(classes) == len(labels[0])
        column: Array = np.array(labels, np.float32 if marked else np.float64)
        return column, classes if marked else (), class_counts(column, classes) if marked else ()
    classes = classes or tuple(map(str, range(max(labels) + 1)))
    numbers = np.array(labels, np.min_scalar_type(len(classes)))
    return numbers, classes, class_counts(numbers, classes)


def _plain_column(values: Sequence[Any]) -> Column:
    if all(isinstance(value, (int, np.integer)) for value in values):
        return np.array(values, np.int64)
    if all(value is None or isinstance(value, (int, float, np.number)) for value in values):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return Strings.pack(["" if value is None else str(value) for value in values])


def join_shards(shards: Sequence[BuiltShard], existing: Cache | None = None) -> tuple[tuple[ShardEntry, ...], Array]:
    rows = {_order(shard.entry): (shard.entry, shard.rows) for shard in shards}
    if existing is not None:
        for entry in existing.manifest.shards:
            rows[_order(entry)] = (entry, existing.index_of(entry))
    entries: list[ShardEntry] = []
    runs: list[Array] = []
    first = 0
    for place in sorted(rows):
        entry, own = rows[place]
        if entries and entries[-1].variant != entry.variant:
            first = 0
        numbered = own.copy()
        numbered["shard"] = len(entries)
        runs.append(numbered)
        entries.append(dataclasses.replace(entry, first=first))
        first += len(own)
    return tuple(entries), np.concatenate(runs).astype(INDEX_DTYPE)


def _order(entry: ShardEntry) -> tuple[int, int]:
    return entry.variant, entry.block


def write_table(cache: Path, name: str, data: bytes) -> FileEntry:
    """Write a table of a cache atomically, and return its entry in the manifest."""
    write_atomically(cache / name, data, cache / WORK_NAME / f"{name}.tmp")
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


def statistics(
    fields: Sequence[Field], samples: int, sums: Sequence[int], squares: Sequence[int], counts: tuple[int, ...]
) -> Statistics:
    """Return a cache's statistics from the exact sums over its clean images."""
    if not sums:
        return Statistics(class_counts=counts)
    pixels = samples * fields[0].shape[0] * fields[0].shape[1]
    mean, std = mean_and_std(sums, squares, pixels, fields[0].dtype)
    return Statistics(mean, std, counts, tuple(sums), tuple(squares))


def next_history(folder: Path, before: Manifest, command: str) -> History:
    """Save the manifest `before` as the file of an earlier version, and return the history of the next version."""
    name = version_name(before.number)
    write_atomically(folder / name, before.text.encode(), folder / WORK_NAME / f"{name}.tmp")
    return History(before.number + 1, command, (*before.parents, before.identity))


def save_manifest(folder: Path, manifest: Manifest) -> Manifest:
    work = folder / WORK_NAME
    if manifest.history is not None:
        note_time(folder, manifest, work / f"{TIMES_NAME}.tmp")
    manifest.save(folder, work / f"{MANIFEST_NAME}.tmp")
    return manifest


def save_version(
    folder: Path, before: Manifest, manifest: Manifest, tables: Sequence[FileEntry | bytes], command: str
) -> Manifest:
    """Make a cache's next version, and return its manifest.

    `tables` are the index and the samples table: the bytes of a new file, or the entry of an unchanged one.
    """
    generation, entries = before.generation + 1, list[FileEntry]()
    for first, table in zip((INDEX_NAME, SAMPLES_NAME), tables, strict=True):
        name = table_name(first, generation)
        if isinstance(table, bytes):
            entries.append(write_table(folder, name, table))
        else:
            link_or_copy(folder / table.name, folder / name, folder / WORK_NAME / f"{name}.tmp")
            entries.append(FileEntry(name, table.bytes, table.sha256))
    history = next_history(folder, before, command)
    return save_manifest(folder, manifest.changed(tables=tuple(entries), history=history))
