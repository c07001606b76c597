"""repair_cache: builds damaged files again, checks that they have the old SHA-256, and only then replaces them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tpucache.errors import DamageError, FormatError, RecipeError, SampleError
from tpucache.native import Array
from tpucache.progress import BuildProgress
from tpucache.recipe import Recipe
from tpucache.store import pages
from tpucache.store.cache import Cache
from tpucache.store.files import open_file, rename_durably, sha256_file, write_atomically
from tpucache.store.format import INDEX_DTYPE, TIMES_NAME, WORK_NAME
from tpucache.store.hashes import hashes_name
from tpucache.store.history import refuse_version
from tpucache.store.index import encode_index
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.verify import Damage, is_whole, verify_cache
from tpucache.warmup.blocks import Block
from tpucache.warmup.code_digest import code_changes, code_digests
from tpucache.warmup.library_versions import version_differences
from tpucache.warmup.listing import as_asked, number_samples
from tpucache.warmup.records.encode import SampleEncoder
from tpucache.warmup.run.executors import Executor
from tpucache.warmup.run.folder import cache_folder, has_plan, hold, remove_folder, remove_leftovers
from tpucache.warmup.run.scheduler import Scheduler
from tpucache.warmup.run.spool import BuiltShard
from tpucache.warmup.run.tasks import BuildContext
from tpucache.warmup.sources import to_source
from tpucache.warmup.sources.source import Items, Listing, Source, name_some

#: A repair has its own folder inside the cache's work folder, because an unfinished addition may use the work folder.
REPAIR_NAME: Final = "repair"
_NO_REPAIR: Final = "A manifest cannot be repaired: copy it again, or build the cache anew"


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
    manifest lists. Damaged files of the times of versions and of perceptual hashes are removed. All other files stay
    untouched. If a repair is interrupted, the next repair finishes it.

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
    damages, manifest = verify_cache(folder, on_verified), opened.manifest
    listed = {entry.name for entry in manifest.files}
    own = [each for each in damages if each.name in listed]
    others = [each for each in damages if each.name in (TIMES_NAME, hashes_name(manifest))]
    case = _examine(source, opened, own, augment) if own else None
    outer = folder / WORK_NAME
    work = outer / REPAIR_NAME
    with cache_folder(folder):
        for each in others:
            (folder / each.name).unlink(missing_ok=True)
        if case is not None or work.exists():
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
    if lost := [each.name for each in damages if each not in own + others]:
        raise DamageError(
            f"the newest version of {folder} is sound, but files of earlier versions are damaged: {name_some(lost)}. "
            "Copy them from another copy of the cache, or remove the earlier versions with `tpucache compact`"
        )
    return own + others


@dataclass(frozen=True)
class _Case:
    """What a repair works on: a damaged cache, the names of its damaged files, and the samples that its source lists.

    `listing.samples[n]` is the sample with the number n in the cache.
    """

    cache: Cache
    damaged: frozenset[str]
    listing: Listing

    @property
    def blocks(self) -> list[Block]:
        entries: dict[int, list[ShardEntry]] = {}
        for entry in self.cache.manifest.shards:
            if entry.name in self.damaged:
                entries.setdefault(entry.block, []).append(entry)
        return [
            Block(
                block,
                tuple(self.listing.samples[number] for number in self.numbers_of(entries[block][0]).tolist()),
                tuple(sorted(entry.variant for entry in entries[block])),
            )
            for block in sorted(entries)
        ]

    def numbers_of(self, entry: ShardEntry) -> Array:
        """Return the sorted numbers of a shard's samples, with deleted ones."""
        kept = self.cache.samples.numbers[entry.first : entry.first + entry.records]
        return np.union1d(kept, np.array(entry.deleted, np.uint64))


def load_manifest(cache: Path) -> Manifest:
    refuse_version(cache)
    try:
        return Manifest.load(cache)
    except FormatError as error:
        raise FormatError(f"{error}. {_NO_REPAIR}") from error


def _examine(source: Source, cache: Cache, damages: Sequence[Damage], augment: str | None) -> _Case:
    manifest = cache.manifest
    entries = {entry.name: entry for entry in manifest.files}
    for damage in damages:
        if is_whole(cache.directory, entries[damage.name]):
            raise DamageError(
                f"{damage.name} has the manifest's SHA-256, and yet {damage.reason}: it was written so, and building "
                "it again would not change that. Build the cache anew in another folder."
            )
    damaged = frozenset(damage.name for damage in damages)
    if manifest.table.name in damaged:
        raise DamageError(f"{manifest.table.name} cannot be built again: copy it from another copy of the cache")
    case = _Case(cache, damaged, number_samples(source.list(), cache))
    if any(variant for block in case.blocks for variant in block.variants):
        _check_callable(cache, augment)
    return case


def _repair(
    case: _Case, source: Source, work: Path, run: str, executor: Executor, on_progress: Callable[[BuildProgress], None]
) -> None:
    cache, manifest = case.cache.directory, case.cache.manifest
    remove_leftovers(work)
    recipe, augmentation = Recipe.from_dict(manifest.recipe), manifest.recipe.get("augmentation", {})
    encoder = SampleEncoder(source, recipe, augmentation, manifest.fields)
    context = BuildContext(encoder, work, work, skip_errors=False, run=run, build=manifest.identity)
    try:
        scheduler = Scheduler(context, case.blocks, on_progress)
        scheduler.prepare()
        shards = scheduler.build(executor)
    except SampleError as error:
        gone = {each.path for each in case.cache.manifest.deleted}
        advice = "bring it back as it was"
        if error.path in gone:
            advice = "it was deleted, but its record is in a damaged shard: bring it back, or copy the shard again"
        reason = f"{error.reason}; the sample is part of {cache}: {advice}"
        raise SampleError(error.path, reason, error.file) from error
    _check_shards(case, shards, work)
    index = _rebuilt_index(case, work) if manifest.index.name in case.damaged else None
    for shard in shards:
        rename_durably(work / shard.entry.name, cache / shard.entry.name)
    if index is not None:
        write_atomically(cache / manifest.index.name, index, work / f"{manifest.index.name}.tmp")


def _check_callable(cache: Cache, augment: str | None) -> None:
    """The name is checked first, so that code that the user did not name is never imported."""
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
        changed = np.concatenate([_changed(case, shard, entries[shard.entry.name]) for shard in other])
        paths = [case.listing.samples[number].path for number in sorted({*changed.tolist()})]
        reasons.append(f"{len(paths):,} samples differ: {name_some(paths)}")
    raise DamageError(
        f"{other[0].entry.name} comes out differently than before, and nothing is replaced: "
        f"{'; '.join(reasons) or 'the source changed'}. "
        "Use the same versions and the same source, or build the cache anew"
    )


def _changed(case: _Case, shard: BuiltShard, entry: ShardEntry) -> Array:
    numbers = case.numbers_of(entry)
    is_kept = ~np.isin(numbers, entry.deleted)
    found: Array = numbers[is_kept][case.cache.index_of(entry)["crc32"] != shard.rows["crc32"][is_kept]]
    return found


def _rebuilt_index(case: _Case, work: Path) -> bytes:
    """Return the index, made from the shards: the damaged ones were built again in the folder `work`."""
    manifest, runs = case.cache.manifest, []
    for position, entry in enumerate(manifest.shards):
        folder = work if entry.name in case.damaged else case.cache.directory
        rows, numbers = _rows(folder / entry.name, position), case.numbers_of(entry)
        if len(numbers) == len(rows):  # if not, the SHA-256 below will differ
            rows = rows[~np.isin(numbers, entry.deleted)]
        runs.append(rows)
    data = encode_index(np.concatenate(runs))
    if hashlib.sha256(data).hexdigest() != manifest.index.sha256:
        raise DamageError(
            f"{manifest.index.name} comes out differently than before, though all shards are as in the manifest: build "
            "the cache anew in another folder"
        )
    return data


def _rows(path: Path, shard: int) -> Array:
    rows = []
    with open_file(path) as file:
        for extent in list(pages.walk(file)):
            file.seek(extent.offset)
            rows.append((extent.offset, extent.length, zlib.crc32(file.read(extent.length)), shard))
    return np.array(rows, INDEX_DTYPE)
