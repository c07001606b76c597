"""Changes of a finished cache: each locks it and makes a version. Deletion, its undoing, and compacting.

Deleting changes no shard: tables and manifest leave the samples out. Compacting writes the others as a fresh warmup
would. Readers may have the folder open, and the process may be killed at any moment. So new files first get names that
no version has, and a manifest lists these; then they get the names of a fresh warmup.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import BuildError, DamageError, FormatError, SourceError, StoreError, UsageError
from tpucache.recipe import Recipe, fingerprint
from tpucache.store.cache import Cache, cache_fingerprint, field_batches
from tpucache.store.copying import check_room, earlier_tables
from tpucache.store.fields import IMAGE, LABEL
from tpucache.store.files import link_or_copy, read_text, sync_directory, write_atomically
from tpucache.store.filter import matching
from tpucache.store.format import (
    INDEX_NAME,
    SAMPLES_NAME,
    WORK_NAME,
    hashes_name,
    shard_name,
    table_name,
)
from tpucache.store.history import load_earlier, refuse_version
from tpucache.store.index import encode_index
from tpucache.store.manifest import Deleted, FileEntry, Manifest, ShardEntry, Skipped, Statistics
from tpucache.store.samples import HEIGHT, TURNED, WIDTH, Column, encode_columns
from tpucache.store.verify import is_whole
from tpucache.store.writer import ShardWriter
from tpucache.text import from_cell
from tpucache.warmup.blocks import listing_sha256, plan_blocks
from tpucache.warmup.listing import OWN_COLUMNS, content_digests, places_in_source, to_slices
from tpucache.warmup.records.encode import add_moments, moments
from tpucache.warmup.run.folder import finished_cache, hold, is_adding_to, remove_folder, remove_old_files
from tpucache.warmup.run.spool import BuiltShard, ChunkInfo
from tpucache.warmup.sources.source import Listing, Sample, name_some
from tpucache.warmup.sources.table import read_table
from tpucache.warmup.tables import (
    class_counts,
    join_shards,
    label_facts,
    save_manifest,
    save_version,
    statistics,
    taken,
    write_table,
)


@contextlib.contextmanager
def changing(cache: Path, doing: str) -> Iterator[Cache]:
    """Lock a finished cache against other writers, and yield its newest version."""
    refuse_version(cache)
    manifest = Manifest.load(cache)
    finished_cache(cache)  # raises an error if files are missing
    work = cache / WORK_NAME
    try:
        if work.exists() and is_adding_to(work, manifest):
            raise BuildError(
                f"a warmup is adding to {cache} and is not finished: run that warmup again to its end, or remove "
                f"{work} to give it up, then {doing}"
            )
        work.mkdir(exist_ok=True)
        with hold(work):
            try:
                yield Cache.open(cache)
            finally:
                with contextlib.suppress(StoreError):  # a damaged cache is not cleaned up
                    remove_old_files(cache, Manifest.load(cache), is_thorough=False)
                remove_folder(work)
    except OSError as error:
        raise BuildError(
            f"{cache} cannot be written: {error}. The cache is intact: it has either the whole change or none of it. "
            "Make room, or copy the cache to a folder that can be written, then run the same command again"
        ) from error


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
        for entry in before.tables:
            if not is_whole(folder, entry):
                raise DamageError(
                    f"{folder / entry.name} is not the file of version {before.number}, so nothing is undone: copy it "
                    "from another copy of the cache"
                )
        tables = before.index, before.table
        return save_version(folder, now, before, tables, f"{_UNDO}: as version {before.number}")


def _undone(folder: Path, now: Manifest) -> Manifest:
    version = now
    while version.history is not None and (undone := _UNDONE.fullmatch(version.history.command)):
        if int(undone[1]) >= version.number:
            raise FormatError(
                f"version {version.number} of {folder} says that it undoes a later one: copy the cache again"
            )
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
    manifest = before.changed(
        samples=before.samples - len(chosen),
        shards=shards,
        deleted=tuple(sorted((*before.deleted, *gone), key=lambda each: each.number)),
        statistics=_statistics(cache, chosen, columns),
        fingerprint=cache_fingerprint(fingerprint(before.recipe), shards),
        source=_source(before, columns, {each.number for each in gone}),
    )
    return save_version(folder, before, manifest, (encode_index(index), encode_columns(columns)), command)


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
    left = list(before.sums), list(before.squares)
    if before.sums and 0 not in manifest.variants:
        raise UsageError(
            f"{cache.directory} has no clean images, which are needed to update the mean and the standard deviation: "
            "delete the samples in a copy that has all variants"
        )
    for images in field_batches(cache, cache.rows(0, chosen), IMAGE) if before.sums else ():
        for image in images:
            found = moments(image)
            left = add_moments(left, ([-value for value in found[0]], [-value for value in found[1]]))
    return statistics(manifest.fields, manifest.samples - len(chosen), *left, counts)


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


#: Columns about images that are whole numbers if no sample lacks a value.
_INTEGER_COLUMNS: Final = (WIDTH, HEIGHT, TURNED)


def compact_cache(cache: str | Path) -> Manifest:
    """Rewrite a cache without its deleted samples, like a fresh warmup of the other samples, and return its manifest.

    This needs no source. Afterwards the folder has no earlier versions, and no records, paths or labels of deleted
    samples. A cache without augmented variants gets new sample numbers, in the order of the source. In a cache with
    augmented variants, samples keep their numbers, because random numbers of the augmentation depend on them; the
    manifest then lists the numbers without a sample. docs/format.md lists other differences from a fresh warmup.

    At any moment the folder holds the old or the new cache. A process that reads the cache meanwhile continues with its
    open files, or gets one StoreError. Raises BuildError when the cache cannot be written or a warmup of it is not
    finished, StoreError when the disk has no room for the new shards, DamageError for a damaged record.
    """
    folder = Path(cache).absolute()
    with changing(folder, "compact") as opened:
        before = opened.manifest
        if not opened.index.is_right():
            raise DamageError(
                f"{folder / before.index.name} is not the file that the manifest lists: run `tpucache verify` with "
                "--repair SOURCE, then compact again"
            )
        layout = _Compaction.of(opened)
        check_room(folder, sum(entry.bytes for entry in before.shards))
        shards = [
            _shard(opened, layout, block, variant)
            for variant in opened.manifest.variants
            for block in range(len(layout.blocks))
        ]
        manifest, tables = _manifest(opened, layout, shards)
        if manifest.identity == before.identity:
            return before
        first = 1 + max(entry.block for entry in (*before.shards, *manifest.shards))
        _place_aside(folder, manifest, tables, first, before.generation + 1)
        for entry in manifest.shards:
            aside = shard_name(entry.variant, first + entry.block)
            link_or_copy(folder / aside, folder / entry.name, folder / WORK_NAME / f"{aside}.tmp")
        sync_directory(folder)
        for name, data in tables.items():
            write_atomically(folder / name, data, folder / WORK_NAME / f"{name}.tmp")
        save_manifest(folder, manifest)
        for path in folder.glob(hashes_name("*")):  # other files have hashes of deleted pictures
            if path.name != hashes_name(manifest.fingerprint):
                path.unlink()
        return manifest


def _place_aside(folder: Path, manifest: Manifest, tables: Mapping[str, bytes], first: int, generation: int) -> None:
    """Move the new files into the cache's folder under unused names, save a manifest of them, and remove the old
    files.
    """
    work, shards = folder / WORK_NAME, []
    for entry in manifest.shards:
        block = first + entry.block
        name = shard_name(entry.variant, block)
        (work / entry.name).replace(folder / name)
        shards.append(dataclasses.replace(entry, name=name, block=block))
    sync_directory(folder)
    entries = tuple(write_table(folder, table_name(name, generation), tables[name]) for name in tables)
    aside = manifest.changed(shards=tuple(shards), tables=entries)
    save_manifest(folder, aside)
    remove_old_files(folder, aside)


@dataclasses.dataclass(frozen=True)
class _Compaction:
    """The new numbers of samples, and their new blocks.

    `numbers` maps old numbers of kept and skipped samples to new ones; `blocks` has the old numbers of the kept samples
    of each block; `places` the position of each new number in a source without the deleted samples, or None;
    `positions` maps old numbers to positions in the samples table.
    """

    numbers: Mapping[int, int]
    blocks: Sequence[Sequence[int]]
    places: Sequence[int | None]
    positions: Mapping[int, int]

    @classmethod
    def of(cls, cache: Cache) -> _Compaction:
        """Give the remaining samples of a cache their new numbers, and divide them into blocks as a warmup would."""
        manifest = cache.manifest
        kept = cache.samples.numbers.tolist()
        total = len(kept) + len(manifest.skipped) + len(manifest.deleted)
        there = places_in_source(manifest, total)
        alive = sorted(
            {*kept, *(each.number for each in manifest.skipped)}, key=lambda number: (there.get(number, total), number)
        )
        ranks = {number: rank for rank, number in enumerate(alive)}
        is_same = alive == list(range(len(alive)))
        if manifest.augmented and not is_same:
            count, numbers = total, {number: number for number in alive}
        else:
            count, numbers = len(alive), ranks
        places: list[int | None] = [None] * count
        for old, new in numbers.items():
            places[new] = ranks[old]
        positions = {number: at for at, number in enumerate(kept)}
        olds = {new: old for old, new in numbers.items()}
        recipe = Recipe.from_dict(manifest.recipe)
        plan = plan_blocks([Sample(number, "") for number in range(count)], manifest.fields, recipe)
        blocks = [[olds[each.number] for each in block.samples if olds.get(each.number) in positions] for block in plan]
        return cls(numbers, blocks, places, positions)


def _shard(cache: Cache, layout: _Compaction, block: int, variant: int) -> BuiltShard:
    """Write one shard into the work folder: for each sample of the new block `block`, its record in `variant`."""
    name = shard_name(variant, block)
    path = cache.directory / WORK_NAME / name
    olds = layout.blocks[block]
    rows = cache.index[cache.rows(variant, [layout.positions[old] for old in olds])]
    with ShardWriter(path.with_name(f"{name}.tmp")) as writer:
        for old, row in zip(olds, rows, strict=True):
            record, crc = cache.reader.read(row), int(row["crc32"])
            if zlib.crc32(record) != crc:
                raise DamageError(
                    f"the record of sample {old} in {cache.directory} does not have the checksum that the index lists: "
                    "run `tpucache verify` with --repair SOURCE, then compact again"
                )
            writer.append(layout.numbers[old], bytes(record), crc)
        sealed = writer.seal(path)
    entry = ShardEntry(name, sealed.bytes, sealed.sha256, variant, block, 0, len(olds), sealed.records_sha256)
    return BuiltShard(entry, sealed.rows, ChunkInfo())


def _manifest(cache: Cache, layout: _Compaction, shards: Sequence[BuiltShard]) -> tuple[Manifest, dict[str, bytes]]:
    before = cache.manifest
    entries, index = join_shards(shards)
    olds = [old for block in layout.blocks for old in block]
    order = np.array([layout.positions[old] for old in olds], np.int64)
    columns = {name: _as_built(name, taken(column, order)) for name, column in cache.samples.items()}
    columns["number"] = np.array([layout.numbers[old] for old in olds], np.uint64)
    tables = {INDEX_NAME: encode_index(index), SAMPLES_NAME: encode_columns(columns)}
    left = {*layout.numbers.values()}
    skipped = [Skipped(layout.numbers[each.number], each.path, each.reason) for each in before.skipped]
    manifest = before.changed(
        shards=entries,
        tables=tuple(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in tables.items()),
        skipped=tuple(sorted(skipped, key=lambda each: each.number)),
        deleted=tuple(Deleted(number, "") for number in range(len(layout.places)) if number not in left),
        fingerprint=cache_fingerprint(fingerprint(before.recipe), entries),
        source=_compacted_source(cache, layout, columns),
        history=None,
    )
    return manifest, tables


def _as_built(name: str, column: Column) -> Column:
    """Return a column with the dtype of a fresh warmup: int64 for sizes and turns of images if no value is missing."""
    is_integer = name in _INTEGER_COLUMNS and isinstance(column, np.ndarray) and column.dtype.kind == "f"
    return np.asarray(column).astype(np.int64) if is_integer and np.isfinite(column).all() else column


def _compacted_source(cache: Cache, layout: _Compaction, columns: Mapping[str, Column]) -> dict[str, Any]:
    before = cache.manifest
    source = dict(before.source)
    digests = content_digests(before)
    renumbered = {layout.numbers[old]: text for old, text in digests.items() if old in layout.numbers}
    source["digests"] = {str(number): renumbered[number] for number in sorted(renumbered)}
    source["samples"], source["order"] = len(layout.places), to_slices(layout.places)
    if not earlier_tables(before):
        source["sha256"] = listing_sha256(_listing(before, layout, columns))
    return source


def _listing(before: Manifest, layout: _Compaction, columns: Mapping[str, Column]) -> Listing:
    numbers: list[int] = np.asarray(columns["number"]).tolist()
    paths, labels = list(columns["path"]), columns.get(LABEL)
    read = {} if labels is None else dict(zip(numbers, np.asarray(labels).tolist(), strict=True))
    names = dict(zip(numbers, paths, strict=True))
    names |= {layout.numbers[each.number]: each.path for each in before.skipped}
    rows = {number: at for at, number in enumerate(numbers)}
    places = np.array([rows.get(number, 0) for number in range(len(layout.places))])
    samples = [
        Sample(number, names.get(number, ""), tuple(label) if isinstance(label := read.get(number), list) else label)
        for number in range(len(layout.places))
    ]
    others = {name: taken(column, places) for name, column in columns.items() if name not in OWN_COLUMNS}
    return Listing(samples, before.classes, others)
