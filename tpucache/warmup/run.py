"""build_cache: plan, share the work out, gather, and write the manifest last."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tpucache.errors import BuildError, NotACacheError, RecipeError, SampleError, SourceError, UnfinishedError
from tpucache.recipe import EXTENT, Recipe, differences
from tpucache.store.codec import Field
from tpucache.store.files import write_atomically
from tpucache.store.format import MANIFEST_NAME, TABLE_NAME
from tpucache.store.manifest import Manifest
from tpucache.store.samples import Column as TableColumn
from tpucache.store.samples import SampleTable, Strings, encode_columns
from tpucache.warmup import spool
from tpucache.warmup.augment import resolve
from tpucache.warmup.build import WORK_NAME, ChunkDone, Job, build_chunk, seal_shard
from tpucache.warmup.engine import Engine, Task
from tpucache.warmup.estimate import Estimate, check_kaggle, check_room, estimate, kaggle_blocks
from tpucache.warmup.extend import SIZE_COLUMN, number_samples, old_blocks, sample_difference
from tpucache.warmup.fields import record_fields
from tpucache.warmup.finish import finish_cache, sizes_of, versions
from tpucache.warmup.lock import hold
from tpucache.warmup.plan import Block, Chunk, cut_block, listing_sha256, plan_blocks
from tpucache.warmup.receipt import SealedShard, load_receipt
from tpucache.warmup.sources import open_source
from tpucache.warmup.sources.base import Listing, Source

_PLAN_NAME: Final = "plan.json"
_LISTING_NAME: Final = "listing.npz"
_REMOVALS: Final = 10
# What a time limit leaves for the tasks that are running and for the cleaning up after them.
_MARGIN_SHARE: Final = 0.1
_MARGIN_SECONDS: Final = 60.0

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class Standing:
    """How far a warmup is: samples dealt with, all of them, those skipped among them, and bytes made by this run."""

    samples: int
    total: int
    skipped: int
    bytes: int


@dataclass(frozen=True)
class _Plan:
    """What a run is to do: as JSON values to be compared by a rerun, and as blocks."""

    told: Mapping[str, Any]
    listing: Listing
    blocks: Sequence[Block]
    fields: tuple[Field, ...]
    before: Manifest | None


def build_cache(
    source: str | Path | Source,
    cache: str | Path,
    recipe: Recipe | None = None,
    *,
    jobs: int | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    time_limit: float | None = None,
    target: Literal["kaggle"] | None = None,
    engine: Engine | None = None,
    report: Callable[[Standing], None] = lambda standing: None,
    announce: Callable[[Estimate], None] | None = None,
) -> Manifest:
    """Build a cache of every sample of a source, finish one that was interrupted, or add to a finished one.

    The records are the same whatever `jobs` (default: all cores), the order of the workers, or how often the run was
    killed. A finished cache of the same source and recipe is returned as it stands; more samples or more variants are
    added to it, and nothing that stands is built again. `time_limit` is in seconds. `target` "kaggle" keeps within what
    Kaggle keeps. `announce` is told what there is to do, from a few samples tried first, and `report` how far it is.

    Raises SourceError or SampleError for the source, RecipeError for a recipe that cannot be built or is not the one
    the cache was begun with, UnfinishedError when the time is up, BuildError when a worker or the disk fails or the
    estimate does not fit. What stands is kept for the next run.
    """
    began = time.monotonic()
    source = source if not isinstance(source, (str, Path)) else open_source(source)
    recipe, cache = recipe or Recipe(), Path(cache)
    if target == "kaggle":
        recipe = dataclasses.replace(recipe, max_blocks=recipe.max_blocks or kaggle_blocks(recipe.variants))
    listing = source.list()
    if not listing.samples:
        raise SourceError(f"{source!r} has no samples")
    with _cache_folder(cache):
        plan = _plan(source, listing, recipe, cache)
        work = cache / WORK_NAME
        if plan.before is not None and not plan.blocks:
            _clear(cache, work, plan.before)
            return plan.before
        if target == "kaggle":
            shards = sum(len(block.variants) for block in plan.blocks) + (len(plan.before.shards) if plan.before else 0)
            check_kaggle(shards, 0)
        work.mkdir(exist_ok=True)
        with hold(work) as run:
            changed = _begin(work, plan)
            job = Job(
                source, recipe, plan.told["recipe"]["augmentation"], plan.fields, work, cache, on_error == "skip", run
            )
            builder = _Builder(job, plan, report, None if time_limit is None else began + _usable(time_limit))
            builder.check_unchanged(changed)
            _save_listing(work, plan)
            if announce is not None:
                builder.announce(announce, kaggle=target == "kaggle")
            manifest = finish_cache(
                cache, plan.told, plan.listing, builder.build(engine or Engine(jobs=jobs)), plan.before
            )
        _clear(cache, work, manifest)
        return manifest


def _usable(time_limit: float) -> float:
    return time_limit - min(_MARGIN_SECONDS, _MARGIN_SHARE * time_limit)


def _plan(source: Source, listing: Listing, recipe: Recipe, cache: Path) -> _Plan:
    """Find what there is to do, beside what a finished cache has. Raises RecipeError, SourceError."""
    before: Manifest | None = None
    with contextlib.suppress(NotACacheError):
        before = Manifest.load(cache)
    fields = before.fields if before else _fields(source, listing, recipe)
    if recipe.variants and fields[0].name != "image":
        raise RecipeError(f"variants are of images, and {source!r} has none: leave --variants out")
    augmentation = resolve(recipe.augment, recipe.height, recipe.width, fields) if recipe.variants else {}
    if before is not None and not recipe.variants:
        augmentation = dict(before.recipe["augmentation"])
    told = {**recipe.to_dict(), "augmentation": augmentation}
    if before is None:
        blocks = plan_blocks(listing.samples, fields, recipe)
    else:
        _check_recipe(cache, before, told)
        listing = number_samples(listing, cache, before)
        blocks = _missing_blocks(listing, recipe, cache, before)
    description = {
        "recipe": told,
        "source": {"samples": len(listing.samples), "sha256": listing_sha256(listing)},
        "fields": [dataclasses.asdict(field) for field in fields],
        "before": hashlib.sha256(before.to_json().encode()).hexdigest() if before else "",
        "versions": versions(),
    }
    return _Plan(json.loads(json.dumps(description)), listing, blocks, fields, before)


def _check_recipe(cache: Path, before: Manifest, told: Mapping[str, Any]) -> None:
    """Refuse a recipe that makes other records than a finished cache has."""
    old = {**before.recipe}
    if not before.augmented:  # nothing was augmented yet, so any augmentation fits
        old.update(augmentation=told["augmentation"], augment=told["augment"])
    changed = differences(old, told)
    if told["variants"] < before.augmented:
        changed.append(f"variants {before.augmented}, now {told['variants']}")
    if changed:
        raise RecipeError(
            f"{cache} was made with another recipe: {'; '.join(changed)}. "
            "Give the same options, or another folder to build anew."
        )


def _missing_blocks(listing: Listing, recipe: Recipe, cache: Path, before: Manifest) -> list[Block]:
    """Return the new variants of the blocks that stand, and all variants of new samples' blocks."""
    variants = [variant for variant in range(recipe.variants + 1) if variant not in before.variants]
    blocks = old_blocks(listing, cache, before, variants) if variants else []
    known = before.samples + len(before.skipped)
    first = 1 + max((entry.block for entry in before.shards), default=-1)
    return [*blocks, *plan_blocks(listing.samples[known:], before.fields, recipe, first)]


def _fields(source: Source, listing: Listing, recipe: Recipe) -> tuple[Field, ...]:
    """Return what a record holds, by the first sample that can be read."""
    errors: list[SampleError] = []
    for sample in listing.samples:
        try:
            return record_fields(source.load(sample), recipe)
        except SampleError as error:
            errors.append(error)
    raise SourceError(f"none of the {len(errors)} samples could be used; {errors[0]}")


@contextlib.contextmanager
def _cache_folder(cache: Path) -> Iterator[None]:
    """Make the cache's folder, or refuse one that holds something else."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        begun = (cache / MANIFEST_NAME).exists() or (cache / WORK_NAME).exists()
        if not begun and any(cache.iterdir()):
            raise BuildError(
                f"{cache} is neither empty nor a cache: give a new folder, so that nothing of yours is written over"
            )
        yield
    except OSError as error:
        raise BuildError(f"{cache} cannot be written: {error}") from error


def _clear(cache: Path, work: Path, manifest: Manifest) -> None:
    """Remove the work folder, though an orphaned worker may just be putting a last file there, and earlier tables."""
    for _ in range(_REMOVALS):
        shutil.rmtree(work, ignore_errors=True)
    if work.exists():
        shutil.rmtree(work)
    listed = {entry.name for entry in manifest.tables}
    for path in cache.iterdir():
        if TABLE_NAME.fullmatch(path.name) and path.name not in listed:
            path.unlink(missing_ok=True)


def _begin(work: Path, plan: _Plan) -> set[int]:
    """Write the plan down, or compare it with the one an interrupted run wrote; remove what that run left half-done.

    Returns the numbers of the samples that have another size than when it was begun.
    """
    path = work / _PLAN_NAME
    changed: set[int] = set()
    if path.exists():
        _check_plan(work, json.loads(path.read_bytes()), plan)
        sizes: Any = SampleTable(work / _LISTING_NAME, len(plan.listing.samples))[SIZE_COLUMN]
        now = sizes_of(plan.listing.samples)
        changed = set(((sizes != now) & (sizes > 0) & (now > 0)).nonzero()[0].tolist())
    else:
        _save_listing(work, plan)
        write_atomically(path, json.dumps(plan.told).encode())
    for leftover in (*work.glob("*.lmdb.*"), *work.glob("*.tmp"), *work.glob(".*.tmp")):
        leftover.unlink(missing_ok=True)
    return changed


def _save_listing(work: Path, plan: _Plan) -> None:
    """Write down what the source is like, so that a rerun can say how it differs."""
    samples = plan.listing.samples
    paths: TableColumn = Strings.pack([sample.path for sample in samples])
    write_atomically(work / _LISTING_NAME, encode_columns({"path": paths, SIZE_COLUMN: sizes_of(samples)}))


def _check_plan(work: Path, before: Mapping[str, Any], plan: _Plan) -> None:
    """Refuse to go on with another recipe, source or cache; tell of other versions."""
    cache, now = work.parent, plan.told
    changed = differences(before["recipe"], now["recipe"])
    for name in EXTENT:
        if before["recipe"][name] != now["recipe"][name]:
            changed.append(f"{name} {before['recipe'][name]}, now {now['recipe'][name]}")
    if changed:
        raise RecipeError(
            f"{cache} was begun with another recipe: {'; '.join(changed)}. Give the same options to go on, another "
            f"folder to build anew, or remove {work} to give up what was begun."
        )
    if before["source"] != now["source"]:
        count = before["source"]["samples"]
        listed = SampleTable(work / _LISTING_NAME, count)
        raise SourceError(
            f"{cache} was begun from {count} samples, the source now has {now['source']['samples']}; "
            f"{sample_difference(listed, plan.listing.samples)}. "
            "Bring the source back as it was to go on, or give another folder to build anew."
        )
    if (before["before"], before["fields"]) != (now["before"], now["fields"]):
        raise BuildError(f"{cache} is another cache than when this was begun: remove {work} to give up what was begun")
    other = [
        f"{name} {old}, now {now['versions'].get(name)}"
        for name, old in before["versions"].items()
        if old != now["versions"].get(name)
    ]
    if other:
        _log.warning("%s was begun with other versions, whose records may differ: %s", cache, "; ".join(other))


class _Builder:
    """The state of one run: which chunks and shards stand, and how to make the others."""

    def __init__(self, job: Job, plan: _Plan, report: Callable[[Standing], None], deadline: float | None) -> None:
        self._job, self._plan, self._report, self._deadline = job, plan, report, deadline
        samples = len(plan.listing.samples)
        self._chunks = {block.number: cut_block(block, plan.fields, samples) for block in plan.blocks}
        self._sealed: dict[tuple[int, int], SealedShard] = {}
        self._done: dict[tuple[int, int], ChunkDone] = {}
        self._kept: set[int] = set()  # by earlier runs
        self._made = 0
        for block in plan.blocks:
            self._find(block)

    def check_unchanged(self, changed: set[int]) -> None:
        """Raise SourceError when a sample that has records already is another one now."""
        if found := sorted(changed & self._kept):
            path = self._plan.listing.samples[found[0]].path
            raise SourceError(
                f"{len(found):,} samples have another size than when their records were made, such as {path!r}. "
                "Bring them back as they were, or give another folder to build anew."
            )

    def announce(self, announce: Callable[[Estimate], None], kaggle: bool) -> None:
        """Estimate what is left, tell it, and see that there is room. Raises BuildError."""
        left = [c for chunks in self._chunks.values() for c in chunks if (c.block, c.number) not in self._done]
        samples = [sample for chunk in left for sample in chunk.samples]
        variants = max((chunk.variants for chunk in left), key=len, default=())
        job = self._job
        expected = estimate(job.source, samples, variants, job.recipe, job.augmentation, job.fields, job.shards)
        announce(expected)
        check_room(expected, job.shards, (job.recipe.shard_mb << 20) * 2 * len(variants) if samples else 0)
        if kaggle:
            standing = sum(path.stat().st_size for path in job.shards.glob("*.lmdb"))
            check_kaggle(0, standing + expected.bytes)

    def build(self, engine: Engine) -> list[SealedShard]:
        """Return all shards of the plan, built now or before. Raises UnfinishedError when the time is up."""
        self._tell()
        while missing := [block for block in self._plan.blocks if not self._whole(block)]:
            before = len(self._done), len(self._sealed)
            for result in engine.run(self._tasks(missing)):
                self._take(*result)
            if self._late():
                break
            if (len(self._done), len(self._sealed)) == before:
                raise BuildError(f"the shards of {self._job.shards} cannot be sealed: run the same warmup again")
        left = sum(len(block.samples) for block in self._plan.blocks if not self._whole(block))
        if left:
            standing = self._standing()
            raise UnfinishedError(
                f"the time limit is near: {standing.samples:,} of {standing.total:,} samples stand in "
                f"{self._job.shards}. Run the same command again to continue."
            )
        return [self._sealed[block.number, variant] for block in self._plan.blocks for variant in block.variants]

    def _tasks(self, blocks: Sequence[Block]) -> Iterator[Task]:
        """Yield what is missing: the chunks of each block, then, behind those of the next block, its shards."""
        behind: list[Task] = []
        for block in blocks:
            for chunk in self._chunks[block.number]:
                if (block.number, chunk.number) not in self._done:
                    if self._late():
                        return
                    yield _run_chunk, (self._job_for(block), chunk)
            yield from behind
            chunks = len(self._chunks[block.number])
            behind = [
                (_run_seal, (self._job, block, variant, chunks))
                for variant in block.variants
                if (block.number, variant) not in self._sealed
            ]
        yield from behind

    def _job_for(self, block: Block) -> Job:
        """A sample that has records already must have the others, too: it cannot be skipped any more."""
        added = 0 not in block.variants
        return dataclasses.replace(self._job, skip_errors=False) if added else self._job

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _find(self, block: Block) -> None:
        """Take note of what an earlier run left of a block."""
        job = self._job
        receipts = [load_receipt(job.shards, job.work, block.number, variant) for variant in block.variants]
        # What an earlier run was allowed to skip, this one may have to fail at.
        sealed = [shard for shard in receipts if shard and (job.skip_errors or not shard.note.skipped)]
        self._sealed.update({(block.number, shard.entry.variant): shard for shard in sealed})
        for chunk in self._chunks[block.number]:
            standing = spool.load(job.work, block.number, chunk.number, block.variants)
            if standing is None or not (job.skip_errors or not standing.note.skipped):
                continue
            dealt = sorted([*standing.note.numbers, *(skip.number for skip in standing.note.skipped)])
            if dealt == [sample.number for sample in chunk.samples]:
                self._kept.update(standing.note.numbers)
                done = ChunkDone(len(standing.note.numbers), len(standing.note.skipped), 0)
                self._done[block.number, chunk.number] = done
        if self._whole(block):
            note = sealed[0].note
            self._kept.update(note.numbers)
            for chunk in self._chunks[block.number]:
                self._done[block.number, chunk.number] = ChunkDone(0, 0, 0)
            self._done[block.number, 0] = ChunkDone(len(note.numbers), len(note.skipped), 0)
            spool.remove(job.work, block.number)

    def _take(self, block: Block | Chunk, result: Any) -> None:
        if isinstance(block, Chunk):
            self._done[block.block, block.number] = result
            self._made += result.bytes
        elif isinstance(result, SealedShard):
            self._sealed[block.number, result.entry.variant] = result
            if self._whole(block):
                spool.remove(self._job.work, block.number)
        else:  # a chunk was missing: what stands of them is looked for anew
            for chunk in self._chunks[block.number]:
                if spool.load(self._job.work, block.number, chunk.number, block.variants) is None:
                    self._done.pop((block.number, chunk.number), None)
        self._tell()

    def _whole(self, block: Block) -> bool:
        return all((block.number, variant) in self._sealed for variant in block.variants)

    def _standing(self) -> Standing:
        kept = sum(done.kept for done in self._done.values())
        skipped = sum(done.skipped for done in self._done.values())
        total = sum(len(block.samples) for block in self._plan.blocks)
        return Standing(kept + skipped, total, skipped, self._made)

    def _tell(self) -> None:
        self._report(self._standing())


def _run_chunk(job: Job, chunk: Chunk) -> tuple[Chunk, ChunkDone]:
    return dataclasses.replace(chunk, samples=()), build_chunk(job, chunk)


def _run_seal(job: Job, block: Block, variant: int, chunks: int) -> tuple[Block, SealedShard | None]:
    return block, seal_shard(job, block, variant, chunks)
