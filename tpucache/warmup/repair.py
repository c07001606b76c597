"""repair_cache: what is damaged is built again, proven to be what it was, and only then put in its place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, FormatError, RecipeError, SampleError, SourceError
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.files.atomic import rename_durably, write_atomically
from tpucache.store.files.reading import sha256_file
from tpucache.store.format import WORK_NAME
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.verify import Damage, is_whole, verify_cache
from tpucache.warmup.code_digest import code_changes, code_digests
from tpucache.warmup.planning.blocks import Block, listing_sha256
from tpucache.warmup.planning.numbering import named, number_samples, put_in_order
from tpucache.warmup.planning.plan import PLAN_NAME, version_differences
from tpucache.warmup.records.labels import labels_asked
from tpucache.warmup.repair_tables import remake_index, remake_samples
from tpucache.warmup.running.context import Job
from tpucache.warmup.running.executor import Engine
from tpucache.warmup.running.scheduler import Builder, Standing
from tpucache.warmup.sources import label_source, open_source
from tpucache.warmup.sources.base import Listing, Source
from tpucache.warmup.work.folder import cache_folder, remove_folder, remove_leftovers
from tpucache.warmup.work.lock import hold
from tpucache.warmup.work.receipts import SealedShard

#: Where a repair works: inside the cache's work folder, so that what an unfinished addition has there stays.
REPAIR_NAME: Final = "repair"

Rows = npt.NDArray[Any]


def repair_cache(
    source: str | Path | Source,
    cache: str | Path,
    *,
    jobs: int | None = None,
    engine: Engine | None = None,
    report: Callable[[Standing], None] = lambda standing: None,
    progress: Callable[[ShardEntry], None] = lambda entry: None,
) -> list[Damage]:
    """Build again exactly what is damaged in a cache, from the source it was made of, and return what was damaged.

    The manifest says how. A file is put in its place once it has the manifest's SHA-256, and all others stay
    untouched; an interrupted repair is finished by the next one. `progress` is called after each shard that is looked
    at, and `report` told how far the building is.

    Raises FormatError when the manifest itself is damaged, SourceError or SampleError for a source that is not the
    cache's, RecipeError for an augmentation that changed, DamageError when something else comes out than there was,
    BuildError when a worker or the disk fails. Until all is proven, nothing is replaced.
    """
    source = source if not isinstance(source, (str, Path)) else open_source(source)
    cache, engine = Path(cache).absolute(), engine or Engine(jobs=jobs)
    manifest = load_manifest(cache)
    source = label_source(source, labels_asked(manifest.source))
    damages = verify_cache(cache, progress)
    folder = cache / WORK_NAME
    work = folder / REPAIR_NAME
    if not damages and not work.exists():
        return []
    case = _examine(source, cache, manifest, damages) if damages else None
    with cache_folder(cache):
        work.mkdir(parents=True, exist_ok=True)
        with hold(folder), hold(work) as run:
            begun = (folder / PLAN_NAME).exists()
            try:
                if case is not None:
                    _repair(case, source, work, run, engine, report)
            except DamageError:  # or the next repair would find the same shards standing
                remove_folder(work if begun else folder)
                raise
        remove_folder(work if begun else folder)
    return damages


@dataclass(frozen=True)
class _Case:
    """A damaged cache beside its source: `listing` is numbered as in the cache, `numbers` (samples,) are the kept."""

    cache: Path
    manifest: Manifest
    damaged: frozenset[str]
    listing: Listing
    numbers: Rows

    @property
    def blocks(self) -> list[Block]:
        """The blocks of damaged shards, with their kept samples and the variants that are to be built again."""
        entries: dict[int, list[ShardEntry]] = {}
        for entry in sorted(self.manifest.shards, key=lambda entry: (entry.block, entry.variant)):
            if entry.name in self.damaged:
                entries.setdefault(entry.block, []).append(entry)
        return [
            Block(
                block,
                tuple(self.listing.samples[number] for number in self.numbers_of(damaged[0])),
                tuple(entry.variant for entry in damaged),
            )
            for block, damaged in entries.items()
        ]

    def numbers_of(self, entry: ShardEntry) -> list[int]:
        """Return the numbers of a shard's samples."""
        return [int(number) for number in self.numbers[entry.first : entry.first + entry.records]]


def load_manifest(cache: Path) -> Manifest:
    """Load the manifest that a repair goes by. Raises NotACacheError, or FormatError when it is damaged itself."""
    try:
        return Manifest.load(cache)
    except FormatError as error:
        raise FormatError(f"{error}. A manifest cannot be repaired: copy it again, or build the cache anew") from error


def _examine(source: Source, cache: Path, manifest: Manifest, damages: Sequence[Damage]) -> _Case:
    """Find what there is to do, and refuse what cannot end in the bytes there were. Nothing is written."""
    entries = {entry.name: entry for entry in (*manifest.tables, *manifest.shards)}
    for damage in damages:
        if is_whole(cache, entries[damage.name]):
            raise DamageError(
                f"{damage.name} has the manifest's SHA-256, and yet {damage.reason}: it was written so, and building "
                "it again would not change that. Build the cache anew in another folder."
            )
    damaged = frozenset(damage.name for damage in damages)
    case = _Case(cache, manifest, damaged, _listing(source, cache, manifest, damaged), _numbers(manifest))
    if any(variant for block in case.blocks for variant in block.variants):
        _check_callable(manifest)
    return case


def _repair(
    case: _Case, source: Source, work: Path, run: str, engine: Engine, report: Callable[[Standing], None]
) -> None:
    cache, manifest = case.cache, case.manifest
    remove_leftovers(work)
    tables: dict[str, bytes] = {}
    if manifest.table.name in case.damaged:
        tables[manifest.table.name] = remake_samples(source, manifest, case.listing, case.numbers, engine)
    recipe, augmentation = Recipe.from_dict(manifest.recipe), manifest.recipe.get("augmentation", {})
    job = Job(source, recipe, augmentation, manifest.fields, work, work, skip_errors=False, run=run)
    try:
        shards = Builder(job, case.blocks, report).build(engine)
    except SampleError as error:
        raise SampleError(error.path, f"{error.reason}; it is part of {cache}: bring it back as it was") from error
    _check_shards(case, shards, work)
    if manifest.index.name in case.damaged:
        places = {e.name: (work if e.name in case.damaged else cache) / e.name for e in manifest.shards}
        tables[manifest.index.name] = remake_index(manifest, places)
    for shard in shards:
        rename_durably(work / shard.entry.name, cache / shard.entry.name)
    for name, data in tables.items():
        write_atomically(cache / name, data, work / f"{name}.tmp")


def _numbers(manifest: Manifest) -> Rows:
    """Return the kept samples' numbers, which have no holes but where one was skipped: uint64 (samples,)."""
    every = np.arange(manifest.samples + len(manifest.skipped), dtype=np.uint64)
    kept = np.setdiff1d(every, np.array([skip.number for skip in manifest.skipped], np.uint64), assume_unique=True)
    if len(kept) != manifest.samples:
        raise FormatError(f"the manifest skips samples that there cannot be among {len(every):,}")
    return kept


def _listing(source: Source, cache: Path, manifest: Manifest, damaged: Collection[str]) -> Listing:
    """Return the source's listing, numbered as in the cache. Raises SourceError when it is not the cache's source."""
    listing = source.list()
    if manifest.table.name not in damaged:
        return number_samples(listing, cache, manifest)
    lost = f"{cache} was made of other samples, labels or columns than {source!r} has"
    gone = {skip.path for skip in manifest.skipped} - {sample.path for sample in listing.samples}
    if gone:
        raise SourceError(f"{lost}: it lacks {named(sorted(gone))}. Bring the source back as it was")
    try:
        listing = put_in_order(listing, str(manifest.source.get("order", "")))
    except ValueError as error:
        raise SourceError(f"{lost}: {error}. Bring the source back as it was") from error
    if listing_sha256(listing) != manifest.source.get("sha256"):
        raise SourceError(
            f"{lost}; which ones, the damaged {manifest.table.name} cannot tell any more. "
            "Bring the source back as it was"
        )
    return listing


def _check_callable(manifest: Manifest) -> None:
    """Refuse a callable of somebody's that changed: what it would make is not what there was."""
    recipe, before = Recipe.from_dict(manifest.recipe), manifest.recipe.get("augmentation", {})
    if "callable" not in before:
        return
    if changed := code_changes(before, {"callable": recipe.augment, **code_digests(recipe.augment)}):
        raise RecipeError(
            f"the augmentation {recipe.augment} is another one than when the cache was made: bring it back as it was "
            f"(changed: {', '.join(changed)})"
        )


def _check_shards(case: _Case, shards: Sequence[SealedShard], work: Path) -> None:
    """Raise DamageError, saying what differs, when a shard that was built again is not what it was."""
    entries = {entry.name: entry for entry in case.manifest.shards}
    other = [s for s in shards if sha256_file(work / s.entry.name) != entries[s.entry.name].sha256]
    if not other:
        return
    told = version_differences(case.manifest.created_by)
    if all(shard.entry.records_sha256 == entries[shard.entry.name].records_sha256 for shard in other):
        told.append("the records are the same, so LMDB or the machine's page size is another")
    elif case.manifest.index.name not in case.damaged:
        changed = {number for shard in other for number in _changed(case, shard, entries[shard.entry.name])}
        paths = [case.listing.samples[number].path for number in sorted(changed)]
        told.append(f"{len(paths):,} samples differ: {named(paths)}")
    raise DamageError(
        f"{other[0].entry.name} comes out as something else than it was, and nothing is replaced: "
        f"{'; '.join(told) or 'the source changed'}. "
        "Use the same versions and the same source, or build the cache anew"
    )


def _changed(case: _Case, shard: SealedShard, entry: ShardEntry) -> list[int]:
    """Return the numbers of the samples whose records are not what the index says."""
    before = Cache(case.cache, case.manifest).index_of(entry)
    differ = (before["crc32"] != shard.rows["crc32"]).tolist()
    return [number for number, other in zip(case.numbers_of(entry), differ, strict=True) if other]
