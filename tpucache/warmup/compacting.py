"""compact_cache: removes deleted samples from a cache, so that it is like a fresh warmup of the other samples.

Readers may have the folder open, and the process may be killed at any moment. So the new files first get names that no
version has, and a manifest lists these names. Then the files also get the names that a fresh warmup would give them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import DamageError
from tpucache.native import Array
from tpucache.recipe import Recipe, fingerprint
from tpucache.store.cache import Cache, cache_fingerprint
from tpucache.store.copying import check_room, earlier_tables
from tpucache.store.fields import LABEL
from tpucache.store.files import link_or_copy, sync_directory, write_atomically
from tpucache.store.format import (
    INDEX_DTYPE,
    INDEX_NAME,
    SAMPLES_NAME,
    WORK_NAME,
    hashes_name,
    shard_name,
    table_name,
)
from tpucache.store.index import encode_index
from tpucache.store.manifest import Deleted, FileEntry, Manifest, ShardEntry, Skipped
from tpucache.store.samples import HEIGHT, TURNED, WIDTH, Column, encode_columns
from tpucache.store.writer import ShardWriter
from tpucache.warmup.blocks import listing_sha256, plan_blocks
from tpucache.warmup.change import changing, save_manifest
from tpucache.warmup.listing import OWN_COLUMNS, content_digests, places_in_source, to_slices
from tpucache.warmup.run.folder import remove_old_files
from tpucache.warmup.sources.source import Listing, Sample
from tpucache.warmup.tables import taken, write_table

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

    `numbers` maps the old number of each kept and skipped sample to its new number. `blocks` has the old numbers of the
    kept samples of each block. `places` has, for
    each new number, the sample's position in a source without the deleted samples, or None if no sample has this
    number. `positions` maps old numbers to positions in the samples table.
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


def _shard(cache: Cache, layout: _Compaction, block: int, variant: int) -> tuple[ShardEntry, Array]:
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
    return entry, sealed.rows


def _manifest(
    cache: Cache, layout: _Compaction, shards: Sequence[tuple[ShardEntry, Array]]
) -> tuple[Manifest, dict[str, bytes]]:
    before = cache.manifest
    entries, runs, first = list[ShardEntry](), list[Array](), 0
    for entry, rows in shards:
        if entries and entries[-1].variant != entry.variant:
            first = 0
        numbered = rows.copy()
        numbered["shard"] = len(entries)
        entries.append(dataclasses.replace(entry, first=first))
        runs.append(numbered)
        first += entry.records
    olds = [old for block in layout.blocks for old in block]
    order = np.array([layout.positions[old] for old in olds], np.int64)
    columns = {name: _as_built(name, taken(column, order)) for name, column in cache.samples.items()}
    columns["number"] = np.array([layout.numbers[old] for old in olds], np.uint64)
    tables = {INDEX_NAME: encode_index(np.concatenate(runs).astype(INDEX_DTYPE)), SAMPLES_NAME: encode_columns(columns)}
    left = {*layout.numbers.values()}
    skipped = [Skipped(layout.numbers[each.number], each.path, each.reason) for each in before.skipped]
    manifest = before.changed(
        shards=tuple(entries),
        tables=tuple(_entry(name, data) for name, data in tables.items()),
        skipped=tuple(sorted(skipped, key=lambda each: each.number)),
        deleted=tuple(Deleted(number, "") for number in range(len(layout.places)) if number not in left),
        fingerprint=cache_fingerprint(fingerprint(before.recipe), entries),
        source=_source(cache, layout, columns),
        history=None,
    )
    return manifest, tables


def _entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


def _as_built(name: str, column: Column) -> Column:
    """Return a column with the dtype of a fresh warmup: int64 for sizes and turns of images if no value is missing."""
    is_integer = name in _INTEGER_COLUMNS and isinstance(column, np.ndarray) and column.dtype.kind == "f"
    return np.asarray(column).astype(np.int64) if is_integer and np.isfinite(column).all() else column


def _source(cache: Cache, layout: _Compaction, columns: Mapping[str, Column]) -> dict[str, Any]:
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
    places = [rows.get(number, 0) for number in range(len(layout.places))]
    samples = [
        Sample(number, names.get(number, ""), tuple(label) if isinstance(label := read.get(number), list) else label)
        for number in range(len(layout.places))
    ]
    others = {
        name: [column[at] for at in places] if not isinstance(column, np.ndarray) else column[places]
        for name, column in columns.items()
        if name not in OWN_COLUMNS
    }
    return Listing(samples, before.classes, others)
