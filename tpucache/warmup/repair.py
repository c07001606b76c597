"""repair_cache: builds damaged files again, checks that they have the old SHA-256, and only then replaces them."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tpucache.errors import DamageError, FormatError, RecipeError, SampleError, SourceError
from tpucache.recipe import Recipe
from tpucache.store import pages
from tpucache.store.cache import Cache
from tpucache.store.copying import earlier_tables
from tpucache.store.fields import IMAGE, Field, RecordLayout
from tpucache.store.files import open_file, rename_durably, sha256_file, write_atomically
from tpucache.store.format import INDEX_DTYPE, MANIFEST_NAME, TIMES_NAME, WORK_NAME
from tpucache.store.hashes import hashes_name
from tpucache.store.history import refuse_version
from tpucache.store.index import encode_index
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry
from tpucache.store.samples import IMAGE_COLUMNS, MEAN, STD, encode_columns
from tpucache.store.verify import Damage, is_whole, verify_cache
from tpucache.types import Array
from tpucache.warmup.blocks import Block, listing_sha256
from tpucache.warmup.code_digest import code_changes, code_digests
from tpucache.warmup.library_versions import version_differences
from tpucache.warmup.listing import as_asked, name_some, number_samples, put_in_order
from tpucache.warmup.records.arrays import Facts, clean_and_count
from tpucache.warmup.records.encode import SampleEncoder
from tpucache.warmup.records.moments import mean_and_std, moments
from tpucache.warmup.run.chunks import BuiltShard, ChunkInfo, KeptSample, join_infos
from tpucache.warmup.run.executors import Executor, Task
from tpucache.warmup.run.folder import cache_folder, hold, remove_folder, remove_leftovers
from tpucache.warmup.run.plan_file import has_plan
from tpucache.warmup.run.scheduler import BuildProgress, Scheduler
from tpucache.warmup.run.tasks import BuildContext
from tpucache.warmup.sources import to_source
from tpucache.warmup.sources.source import Items, Listing, Sample, Source, source_name
from tpucache.warmup.tables import sample_columns

#: A repair has its own folder inside the cache's work folder, because an unfinished addition may use the work folder.
REPAIR_NAME: Final = "repair"
_NO_REPAIR: Final = "A manifest cannot be repaired: copy it again, or build the cache anew"


_READ_AT_ONCE: Final = 256


def repair_cache(
    source: str | Path | Source | Items,
    cache: str | Path,
    *,
    jobs: int | None = None,
    engine: Executor | None = None,
    augment: str | None = None,
    on_progress: Callable[[BuildProgress], None] = lambda progress: None,
    on_verified: Callable[[ShardEntry], None] = lambda entry: None,
) -> list[Damage]:
    """Build the damaged files of a cache again, from its source, and return the damages.

    The recipe comes from the manifest. Damaged files are replaced only after all new files have the SHA-256 that the
    manifest lists. Two kinds of files are removed if they are damaged: the file with the times of versions, and files
    with perceptual hashes. All other files stay untouched. If a repair is interrupted, the next repair finishes it.

    The manifest may come from somebody else. So the code of a custom augmentation, `module:name`, is imported only if
    `augment` names it, too. `engine` replaces the `jobs` local processes. `on_verified` is called after each verified
    shard, `on_progress` during the build.

    Raises FormatError when the manifest itself is damaged, SourceError or SampleError when the source differs from the
    cache's, RecipeError for an augmentation that has changed or that `augment` does not name, DamageError when a new
    file differs from the manifest or a file of an earlier version is damaged, BuildError when a worker or the disk
    fails.
    """
    source = to_source(source)
    folder, executor = Path(cache).absolute(), engine or Executor(jobs=jobs)
    opened = Cache(folder, load_manifest(folder))
    source = as_asked(source, opened.manifest)
    damages, others, lost = _divide(verify_cache(folder, on_verified), opened.manifest)
    outer = folder / WORK_NAME
    work = outer / REPAIR_NAME
    if others:
        with cache_folder(folder):
            for each in others:
                (folder / each.name).unlink(missing_ok=True)
    if not damages and not work.exists():
        _refuse_lost(folder, lost)
        return others
    case = _examine(source, opened, damages, augment) if damages else None
    with cache_folder(folder):
        work.mkdir(parents=True, exist_ok=True)
        with hold(outer), hold(work) as run:
            unfinished = work if has_plan(outer) else outer  # keep the files of an unfinished addition
            try:
                if case is not None:
                    _repair(case, source, work, run, executor, on_progress)
            except DamageError:  # without this, the next repair would use the same wrong shards
                remove_folder(unfinished)
                raise
        remove_folder(unfinished)
    _refuse_lost(folder, lost)
    return damages + others


def _divide(damages: Sequence[Damage], manifest: Manifest) -> tuple[list[Damage], list[Damage], list[Damage]]:
    """Divide damages: those of the newest version's files, of files in no manifest, and of earlier versions' files."""
    own = {MANIFEST_NAME, *(entry.name for entry in manifest.files)}
    unlisted = {TIMES_NAME, hashes_name(manifest)}
    return (
        [each for each in damages if each.name in own],
        [each for each in damages if each.name in unlisted],
        [each for each in damages if each.name not in own | unlisted],
    )


def _refuse_lost(folder: Path, lost: Sequence[Damage]) -> None:
    if lost:
        raise DamageError(
            f"the newest version of {folder} is sound, but files of earlier versions are damaged: "
            f"{name_some([each.name for each in lost])}. Copy them from another copy of the cache, or remove the "
            "earlier versions with `tpucache compact`"
        )


@dataclass(frozen=True)
class _Case:
    """What a repair works on: a damaged cache, the names of its damaged files, and the samples that its source lists.

    `listing.samples[n]` is the sample with the number n in the cache. `numbers`, uint64 (samples,), has the numbers of
    the samples that the cache contains: those that were neither skipped nor deleted.
    """

    cache: Cache
    damaged: frozenset[str]
    listing: Listing
    numbers: Array

    @property
    def blocks(self) -> list[Block]:
        entries: dict[int, list[ShardEntry]] = {}
        for entry in sorted(self.cache.manifest.shards, key=lambda entry: (entry.block, entry.part)):
            if entry.name in self.damaged:
                entries.setdefault(entry.block, []).append(entry)
        return [
            Block(
                block,
                tuple(self.listing.samples[number] for number in self.numbers_of(damaged[0])),
                tuple(entry.part for entry in damaged),
            )
            for block, damaged in entries.items()
        ]

    def numbers_of(self, entry: ShardEntry) -> list[int]:
        """Return the numbers of the samples whose records a shard contains, including deleted samples."""
        kept = self.numbers[entry.first : entry.first + entry.records].tolist()
        return sorted([*kept, *entry.deleted])


def load_manifest(cache: Path) -> Manifest:
    """Load the manifest of a cache to repair. Raises NotACacheError, or FormatError when the manifest is damaged."""
    refuse_version(cache)
    try:
        return Manifest.load(cache)
    except FormatError as error:
        raise FormatError(f"{error}. {_NO_REPAIR}") from error


def _examine(source: Source, cache: Cache, damages: Sequence[Damage], augment: str | None) -> _Case:
    """Raises an error if the files cannot be built again with the same bytes. Writes no file."""
    manifest = cache.manifest
    entries = {entry.name: entry for entry in (*manifest.tables, *manifest.shards)}
    for damage in damages:
        if damage.name == MANIFEST_NAME:
            raise FormatError(f"{cache.directory / damage.name} {damage.reason}. {_NO_REPAIR}")
        if is_whole(cache.directory, entries[damage.name]):
            raise DamageError(
                f"{damage.name} has the manifest's SHA-256, and yet {damage.reason}: it was written so, and building "
                "it again would not change that. Build the cache anew in another folder."
            )
    damaged = frozenset(damage.name for damage in damages)
    case = _Case(cache, damaged, _listing(source, cache, damaged), _numbers(manifest))
    if any(variant for block in case.blocks for variant in block.variants):
        _check_callable(cache, augment)
    return case


def _repair(
    case: _Case, source: Source, work: Path, run: str, executor: Executor, on_progress: Callable[[BuildProgress], None]
) -> None:
    cache, manifest = case.cache.directory, case.cache.manifest
    remove_leftovers(work)
    tables: dict[str, bytes] = {}
    if manifest.table.name in case.damaged:
        tables[manifest.table.name] = rebuild_samples(source, manifest, case.listing, case.numbers, executor)
    recipe, augmentation = Recipe.from_dict(manifest.recipe), manifest.recipe.get("augmentation", {})
    encoder = SampleEncoder(source, recipe, augmentation, manifest.fields)
    context = BuildContext(encoder, work, work, skip_errors=False, run=run)
    try:
        shards = Scheduler(context, case.blocks, on_progress).build(executor)
    except SampleError as error:
        gone = {each.path for each in case.cache.manifest.deleted}
        advice = "bring it back as it was"
        if error.path in gone:
            advice = "it was deleted, but its record is in a damaged shard: bring it back, or copy the shard again"
        reason = f"{error.reason}; the sample is part of {cache}: {advice}"
        raise SampleError(error.path, reason, error.file) from error
    _check_shards(case, shards, work)
    if manifest.index.name in case.damaged:
        places = {e.name: (work if e.name in case.damaged else cache) / e.name for e in manifest.shards}
        tables[manifest.index.name] = rebuild_index(manifest, places)
    for shard in shards:
        rename_durably(work / shard.entry.name, cache / shard.entry.name)
    for name, data in tables.items():
        write_atomically(cache / name, data, work / f"{name}.tmp")


def _numbers(manifest: Manifest) -> Array:
    """Return the numbers of the samples that are neither skipped nor deleted: uint64 (samples,).

    Raises FormatError if skipped or deleted samples have numbers that are out of range.
    """
    gone = [*(each.number for each in manifest.skipped), *(each.number for each in manifest.deleted)]
    every = np.arange(manifest.samples + len(gone), dtype=np.uint64)
    kept = np.setdiff1d(every, np.array(gone, np.uint64), assume_unique=True)
    if len(kept) != manifest.samples:
        raise FormatError(
            f"the manifest lists skipped or deleted samples that are not among its {len(every):,} samples"
        )
    return kept


def _listing(source: Source, cache: Cache, damaged: Collection[str]) -> Listing:
    """Return the source's listing, with the cache's numbers. Raises SourceError if it differs from that of the cache.

    Raises DamageError if the samples table is damaged and cannot be built from the source.
    """
    listing, manifest = source.list(), cache.manifest
    if manifest.table.name not in damaged:
        return number_samples(listing, cache)
    if manifest.deleted:
        raise DamageError(
            f"samples of {cache.directory} were deleted, and the source does not say which: copy {manifest.table.name} "
            "from another copy of the cache"
        )
    if earlier_tables(manifest):
        raise DamageError(
            f"{manifest.table.name} holds labels that relabelling changed, and the source does not have them: copy "
            "this file from another copy of the cache"
        )
    lost = f"{cache.directory} was made of other samples, labels or columns than {source_name(source)} has"
    gone = {skip.path for skip in manifest.skipped} - {sample.path for sample in listing.samples}
    if gone:
        raise SourceError(f"{lost}: the source lacks {name_some(sorted(gone))}. Bring the source back as it was")
    try:
        listing = put_in_order(listing, str(manifest.source.get("order", "")))
    except ValueError as error:
        raise SourceError(f"{lost}: {error}. Bring the source back as it was") from error
    if listing_sha256(listing) != manifest.source.get("sha256"):
        raise SourceError(
            f"{lost}; it is not known which, because {manifest.table.name} is damaged. Bring the source back as it was"
        )
    return listing


def _check_callable(cache: Cache, augment: str | None) -> None:
    """Raise RecipeError for a callable whose code has changed, or that the user did not name by `augment`.

    The name is checked first, so that code that the user did not name is never imported.
    """
    before = cache.manifest.recipe.get("augmentation", {})
    if not isinstance(before, dict):
        raise FormatError(f"the manifest of {cache.directory} has an invalid augmentation: build the cache anew")
    name = before.get("callable")
    if name is None:
        return
    if name != augment:
        raise RecipeError(
            f"the manifest of {cache.directory} names the code {name!r} as its augmentation, which a repair would "
            f"import and call: if you know it, add --augment {name} (in Python augment={name!r})"
        )
    if changed := code_changes(before, {"callable": name, **code_digests(name)}):
        raise RecipeError(
            f"the augmentation {name} has changed since the cache was made: bring its code back as it was "
            f"(changed: {', '.join(changed)})"
        )


def _check_shards(case: _Case, shards: Sequence[BuiltShard], work: Path) -> None:
    manifest = case.cache.manifest
    entries = {entry.name: entry for entry in manifest.shards}
    other = [s for s in shards if sha256_file(work / s.entry.name) != entries[s.entry.name].sha256]
    if not other:
        return
    reasons = version_differences(manifest.created_by)
    if all(shard.entry.records_sha256 == entries[shard.entry.name].records_sha256 for shard in other):
        reasons.append("the records are the same, so the version of LMDB or the machine's page size differs")
    elif manifest.index.name not in case.damaged:
        changed = {number for shard in other for number in _changed(case, shard, entries[shard.entry.name])}
        paths = [case.listing.samples[number].path for number in sorted(changed)]
        reasons.append(f"{len(paths):,} samples differ: {name_some(paths)}")
    raise DamageError(
        f"{other[0].entry.name} comes out differently than before, and nothing is replaced: "
        f"{'; '.join(reasons) or 'the source changed'}. "
        "Use the same versions and the same source, or build the cache anew"
    )


def _changed(case: _Case, shard: BuiltShard, entry: ShardEntry) -> list[int]:
    before, numbers = case.cache.index_of(entry), np.array(case.numbers_of(entry), np.int64)
    is_kept = ~np.isin(numbers, entry.deleted)
    differ = before["crc32"] != shard.rows["crc32"][is_kept]
    return [int(number) for number in numbers[is_kept][differ]]


def rebuild_index(manifest: Manifest, shards: Mapping[str, Path]) -> bytes:
    """Return the index of complete shards, made from the shards themselves. `shards` has their paths by name.

    Raises DamageError if the SHA-256 of the result is not that in the manifest.
    """
    order = {variant: at for at, variant in enumerate(manifest.variants)}
    numbered = sorted(enumerate(manifest.shards), key=lambda one: (one[1].band, order[one[1].variant], one[1].first))
    layouts, kept = manifest.layouts, _numbers(manifest)
    runs = []
    for position, entry in numbered:
        rows = _rows(shards[entry.name], position, layouts[entry.band] if manifest.value_bytes else None)
        own = kept[entry.first : entry.first + entry.records]
        every = np.union1d(own, np.array(entry.deleted, np.uint64))
        if len(every) == len(rows):  # if not, the SHA-256 below will differ
            rows = rows[np.isin(every, own)]
        runs.append(rows)
    data = encode_index(np.concatenate(runs))
    if not _matches(data, manifest.index):
        raise DamageError(
            f"{manifest.index.name} comes out differently than before, though all shards are as in the manifest: build "
            "the cache anew in another folder"
        )
    return data


def rebuild_samples(source: Source, manifest: Manifest, listing: Listing, numbers: Array, executor: Executor) -> bytes:
    """Return the samples table as bytes. `numbers` (samples,) are the numbers of the kept samples.

    The samples in `listing` have the same numbers as in the cache. First the table is made from the listing alone. If
    its SHA-256 differs from the manifest's, samples are read, too. If it still differs, they are also decoded, to
    compute columns such as the mean of the pixels. Raises DamageError if the SHA-256 differs even then, SampleError
    when a sample cannot be read.
    """
    unread = ChunkInfo(numbers=numbers.tolist(), labels=[None] * len(numbers))
    data = _encode(listing, unread, numbers)
    if _matches(data, manifest.table):
        return data
    kept = [listing.samples[number] for number in numbers.tolist()]
    data = _encode(listing, _read(source, kept, executor), numbers)
    if _matches(data, manifest.table):
        return data
    whole = _read(source, kept, executor, manifest)
    # If version 0.2 built the first samples, and a later version added others, only those have columns about images.
    for first in sorted({entry.first for entry in manifest.shards}):
        data = _encode(listing, _without_facts(whole, first), numbers)
        if _matches(data, manifest.table):
            return data
    raise DamageError(
        f"{manifest.table.name} comes out differently than before: the samples have other sizes, labels or "
        "columns now, or other versions of libraries decode them. Bring the source back as it was"
    )


def _without_facts(info: ChunkInfo, count: int) -> ChunkInfo:
    """Return a ChunkInfo whose first `count` samples have None in the columns about images, such as the mean."""
    columns = {
        name: [None] * count + values[count:] if name in IMAGE_COLUMNS else values
        for name, values in info.columns.items()
    }
    return dataclasses.replace(info, columns=columns)


def _rows(path: Path, shard: int, layout: RecordLayout | None) -> Array:
    """Return the index rows of a shard's records, in key order. `shard` is the shard's position in the manifest.

    With a `layout`, an LMDB value contains several records of that layout; without, it is one record.
    """
    rows = []
    with open_file(path) as file:
        for extent in list(pages.walk(file)):
            file.seek(extent.offset)
            value, at = memoryview(file.read(extent.length)), 0
            for length in [extent.length] if layout is None else layout.lengths_in(value):
                rows.append((extent.offset + at, length, zlib.crc32(value[at : at + length]), shard))
                at += length
    return np.array(rows, INDEX_DTYPE)


def _encode(listing: Listing, info: ChunkInfo, numbers: Array) -> bytes:
    return encode_columns(sample_columns(listing, info, numbers)[0])


def _read(source: Source, samples: Sequence[Sample], executor: Executor, manifest: Manifest | None = None) -> ChunkInfo:
    """Return the labels and columns that are stored in the samples.

    With a `manifest`, images are also decoded, to compute the columns about images, such as the mean of the pixels.
    """
    decoding = None if manifest is None else (manifest.fields, Recipe.from_dict(manifest.recipe))

    def tasks() -> Iterator[Task]:
        for start in range(0, len(samples), _READ_AT_ONCE):
            yield _read_part, (source, samples[start : start + _READ_AT_ONCE], decoding)

    infos = sorted(executor.run(tasks()), key=lambda info: info.numbers[0])
    return join_infos(infos)


def _read_part(source: Source, samples: Sequence[Sample], decoding: tuple[Sequence[Field], Recipe] | None) -> ChunkInfo:
    info, kept = ChunkInfo(), list[KeptSample]()
    for sample in samples:
        item, facts = source.load(sample), Facts()
        if decoding is not None:
            clean, _, facts = clean_and_count(item, *decoding, sample.path)
            if IMAGE in clean:
                facts[MEAN], facts[STD] = mean_and_std(moments(clean[IMAGE]), clean[IMAGE])
        kept.append(KeptSample(sample.number, item.label, item.columns, facts))
    info.add(kept)
    return info


def _matches(data: bytes, entry: FileEntry) -> bool:
    return hashlib.sha256(data).hexdigest() == entry.sha256
