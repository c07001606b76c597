"""delete_samples and undo_delete: make a version of a cache without some samples, or with deleted samples again.

No shard is changed. The new version has tables without the deleted samples, and its manifest lists their records in
the shards. `compact_cache` removes these records.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SourceError, UsageError
from tpucache.recipe import fingerprint
from tpucache.store.cache import Cache, cache_fingerprint, field_batches
from tpucache.store.fields import IMAGE, LABEL
from tpucache.store.files import read_text
from tpucache.store.filter import matching
from tpucache.store.format import INDEX_NAME, SAMPLES_NAME, table_name
from tpucache.store.history import load_earlier
from tpucache.store.index import encode_index
from tpucache.store.manifest import Deleted, Manifest, ShardEntry, Statistics, mean_and_std
from tpucache.store.samples import Column, encode_columns
from tpucache.text import from_cell
from tpucache.warmup.change import changing, keep_table, next_history, save_manifest
from tpucache.warmup.listing import name_some
from tpucache.warmup.records.moments import add_moments, moments
from tpucache.warmup.sources.table import read_table
from tpucache.warmup.tables import class_counts, label_facts, taken, write_table

Positions = npt.NDArray[np.int64]

_COMMAND: Final = "delete"
_UNDO: Final = "delete --undo"
_UNDONE: Final = re.compile(r"delete --undo: as version (\d{1,6})")


def delete_samples(cache: str | Path, *, where: str | None = None, paths: Iterable[str] | None = None) -> Manifest:
    """Make a version of a cache without some of its samples, and return its manifest.

    Either `where` is a condition on the columns of the samples table, such as "fold == 3", or `paths` are the paths of
    the samples to delete. The tables of the new version do not have these samples, so loaders do not read them. Their
    records stay in the shards, and earlier versions still have the samples, until `compact_cache` is called. A later
    warmup does not add the deleted samples again.

    Raises UsageError unless exactly one of `where` and `paths` is given, if no sample or every sample would be deleted,
    and for a cache of images without the clean variant; SourceError for a path that no sample has; BuildError when the
    cache cannot be written or a warmup of it is not finished; and the errors of opening a cache.
    """
    if (where is None) == (paths is None):
        raise UsageError("say which samples to delete: give either a condition (where) or paths, not both")
    folder = Path(cache).absolute()
    with changing(folder, "delete") as opened:
        if where is not None:
            every = np.arange(opened.manifest.samples)
            chosen = np.flatnonzero(matching(where, opened.samples, every, opened.manifest.classes))
            command = f"{_COMMAND} --where {where!r}"
        else:
            chosen, command = _positions(opened, list(paths or ())), f"{_COMMAND} --paths"
        if not len(chosen):
            raise UsageError(f"no sample of {folder} was selected: check the condition or the paths")
        if len(chosen) == opened.manifest.samples:
            raise UsageError(f"all samples of {folder} were selected: to delete the whole cache, remove its folder")
        return _without(opened, chosen, command)


def read_paths(file: str | Path) -> list[str]:
    """Return the paths of samples that a file lists: one path on each line, or the column `path` of a .csv."""
    file = Path(file)
    if file.suffix.lower() == ".csv":
        table = read_table(file)
        cells = table.column("path")
        paths = list(cells) if table.is_own else list(map(from_cell, cells))
    else:
        try:
            paths = [line for line in read_text(file, "utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{file} cannot be read: {error}") from error
    if not paths:
        place = "row of the column path" if file.suffix.lower() == ".csv" else "line"
        raise SourceError(f"{file} lists no paths: write one path in each {place}")
    return paths


def undo_delete(cache: str | Path) -> Manifest:
    """Undo the last deletion: make a new version equal to the version before the deletion, and return its manifest.

    A second call undoes the deletion before the last one. Raises UsageError if there is no deletion left to undo, or if
    another command has changed the cache since, BuildError when the cache cannot be written or a warmup of it is not
    finished, and the errors of opening a cache.
    """
    folder = Path(cache).absolute()
    with changing(folder, "undo") as opened:
        now = opened.manifest
        before = _undone(folder, now)
        generation = now.generation + 1
        tables = (
            keep_table(folder, before.index, INDEX_NAME, generation),
            keep_table(folder, before.table, SAMPLES_NAME, generation),
        )
        history = next_history(folder, now, f"{_UNDO}: as version {before.number}")
        return save_manifest(folder, before.changed(tables=tables, history=history))


def _undone(folder: Path, now: Manifest) -> Manifest:
    version = now
    while version.history is not None and (undone := _UNDONE.fullmatch(version.history.command)):
        version = load_earlier(folder, version, int(undone[1]))
    if version.history is None or not version.history.command.startswith(f"{_COMMAND} "):
        made = f"by `{version.history.command}`" if version.history else "by a warmup alone"
        raise UsageError(
            f"there is no deletion to undo in {folder}: its samples are those of a version that was made {made}. "
            "`tpucache inspect --versions` lists all versions, and which command made each of them"
        )
    return load_earlier(folder, now, version.number - 1)


def _positions(cache: Cache, paths: Sequence[str]) -> Positions:
    places = {path: at for at, path in enumerate(cache.samples.paths)}
    if unknown := [path for path in paths if path not in places]:
        gone = {each.path for each in cache.manifest.deleted}
        was = " (deleted already)" if gone.issuperset(unknown) else ""
        raise SourceError(
            f"{cache.directory} has no samples for {len(unknown):,} of {len(paths):,} paths{was}: "
            f"{name_some(unknown)}. Nothing is deleted: correct the paths"
        )
    return np.array(sorted({places[path] for path in paths}), np.int64)


def _without(cache: Cache, chosen: Positions, command: str) -> Manifest:
    folder, before = cache.directory, cache.manifest
    is_kept = np.ones(before.samples, np.bool_)
    is_kept[chosen] = False
    numbers, paths = cache.samples.numbers, cache.samples.paths
    gone = [Deleted(int(numbers[at]), paths[at]) for at in chosen.tolist()]
    columns = {name: taken(column, np.flatnonzero(is_kept)) for name, column in cache.samples.items()}
    shards = without_numbers(before.shards, numbers, {each.number for each in gone})
    index = cache.index.read_all()[np.tile(is_kept, len(before.variants))]
    generation = before.generation + 1
    manifest = before.changed(
        samples=before.samples - len(chosen),
        shards=shards,
        deleted=tuple(sorted((*before.deleted, *gone), key=lambda each: each.number)),
        statistics=_statistics(cache, chosen, columns),
        fingerprint=cache_fingerprint(fingerprint(before.recipe), shards),
        source=_source(before, columns, {each.number for each in gone}),
    )
    tables = (
        write_table(folder, table_name(INDEX_NAME, generation), encode_index(index)),
        write_table(folder, table_name(SAMPLES_NAME, generation), encode_columns(columns)),
    )
    history = next_history(folder, before, command)
    return save_manifest(folder, manifest.changed(tables=tables, history=history))


def without_numbers(
    shards: Sequence[ShardEntry], numbers: npt.NDArray[np.uint64], gone: set[int]
) -> tuple[ShardEntry, ...]:
    """Return the manifest entries of a cache's shards after the samples with the numbers `gone` are deleted."""
    changed, firsts = [], dict[int, int]()
    for entry in shards:
        own = numbers[entry.first : entry.first + entry.records].tolist()
        deleted = [number for number in own if number in gone]
        first = firsts.get(entry.variant, 0)
        records = entry.records - len(deleted)
        firsts[entry.variant] = first + records
        every = tuple(sorted((*entry.deleted, *deleted)))
        changed.append(dataclasses.replace(entry, first=first, records=records, deleted=every))
    return tuple(changed)


def _statistics(cache: Cache, chosen: Positions, columns: Mapping[str, Column]) -> Statistics:
    before, manifest = cache.manifest.statistics, cache.manifest
    counts = class_counts(np.asarray(columns[LABEL]), manifest.classes) if before.class_counts else ()
    if not before.sums or manifest.fields[0].name != IMAGE:
        return dataclasses.replace(before, class_counts=counts)
    if 0 not in manifest.variants:
        raise UsageError(
            f"{cache.directory} has no clean images, which are needed to update the mean and the standard deviation: "
            "delete the samples in a copy that has all variants"
        )
    left = list(before.sums), list(before.squares)
    for images in field_batches(cache, cache.rows(0, chosen), IMAGE):
        for image in images:
            found = moments(image)
            left = add_moments(left, ([-value for value in found[0]], [-value for value in found[1]]))
    field = manifest.fields[0]
    pixels = (manifest.samples - len(chosen)) * field.shape[0] * field.shape[1]
    mean, std = mean_and_std(*left, pixels, field.dtype)
    return dataclasses.replace(
        before, mean=mean, std=std, class_counts=counts, sums=tuple(left[0]), squares=tuple(left[1])
    )


def _source(before: Manifest, columns: Mapping[str, Column], gone: set[int]) -> dict[str, Any]:
    """It has no counts of annotations, because nothing says how many of those in the source belong to the deleted
    samples.
    """
    source = dict(before.source)
    digests = source.get("digests")
    if isinstance(digests, dict):
        source["digests"] = {number: text for number, text in digests.items() if number not in set(map(str, gone))}
    source["annotations"] = {}
    read = source.get("labels")
    if LABEL in columns and isinstance(read, dict):
        asked = str(read.get("asked", "auto"))
        source["labels"] = label_facts(asked, np.asarray(columns[LABEL]), bool(before.classes))
    return source
