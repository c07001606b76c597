"""build_cache: lists the source, plans the shards, lets workers build them, and writes the manifest last."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import SampleError, SourceError, TpucacheError, UsageError
from tpucache.progress import BuildProgress
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.fields import IMAGE
from tpucache.store.files import as_url, check_is_local, is_kaggle, is_url
from tpucache.store.format import MANIFEST_NAME, WORK_NAME
from tpucache.store.growing import Prospect
from tpucache.store.manifest import Manifest
from tpucache.warmup.build_options import BuildOptions, Deadline, Target, ignore, options_by_name
from tpucache.warmup.estimate import (
    Estimate,
    Trials,
    check_kaggle_bytes,
    check_kaggle_files,
    check_room,
    estimate,
    meant_recipe,
)
from tpucache.warmup.library_versions import version_differences
from tpucache.warmup.listing import check_sizes, compared_numbers, content_digests
from tpucache.warmup.plan import BuildPlan, make_encoder, meant_source, plan_build
from tpucache.warmup.records.encode import SampleEncoder
from tpucache.warmup.records.presize import slow_parts
from tpucache.warmup.run.executors import Executor
from tpucache.warmup.run.folder import (
    HeldError,
    begin_or_continue,
    cache_folder,
    check_source,
    compare_plan,
    finished_cache,
    has_plan,
    hold,
    is_adding_to,
    is_held,
    remove_folder,
    remove_leftovers,
    remove_old_files,
    save_listing,
)
from tpucache.warmup.run.scheduler import Scheduler
from tpucache.warmup.run.spool import Log
from tpucache.warmup.run.tasks import BuildContext, check_records, check_rewritten, compare_newest, known_records
from tpucache.warmup.run.upload import CacheUpload, Companions, local_folder, open_place
from tpucache.warmup.sources import to_source
from tpucache.warmup.sources.kept import KeptListings, keeping_listings
from tpucache.warmup.sources.source import Items, Source, loads_in_threads, source_name
from tpucache.warmup.tables import finish_tables, make_prospect, save_manifest

_ADVICE: Final = "make room, or use another folder, --codec dct-zstd, a smaller --size or fewer --variants"
_ADVICE_ADDING: Final = "make room, or add fewer variants or samples"
_ADVICE_RESUMING: Final = "make room, then run the same command again; finished work is kept"

_WAIT_SECONDS: Final = 0.1
_QUICK_TRIALS: Final = Trials(samples=4, seconds=0.25)

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True, kw_only=True)
class BuildArguments(BuildOptions):
    """The keyword arguments of `build_cache`, whose docstring describes them."""

    engine: Executor | None = None
    on_progress: Callable[[BuildProgress], None] = ignore
    announce: Callable[[Estimate], None] | None = None
    local: str | Path | None = None
    keep_local: bool = True
    on_prospect: Callable[[Prospect], None] | None = None
    companions: Companions | None = None
    check: Callable[[], None] | None = None


@options_by_name(BuildArguments)
def build_cache(
    source: str | Path | Source | Items, cache: str | Path, recipe: Recipe | None = None, *, options: BuildArguments
) -> Manifest:
    """Build a cache of all samples of a source, continue an interrupted build, or add to a finished cache.

    The records do not depend on the number of workers, on the order in which workers finish, or on interruptions. If
    the cache is finished, and source and recipe are the same, nothing is built. If there are more samples or more
    variants now, they are added, and no finished shard is built again. `source` may also be a dataset object, such as a
    `datasets.Dataset`; it is pickled for the workers.

    Options are given by name, as in `build_cache(source, cache, jobs=4)`:

    - `engine`: an Executor, which replaces the `jobs` local processes.
    - `labels`, `classes`, `missing_label`, `pad`, `truncate`, `on_error`, `retry`, `time_limit` (in seconds), `target`:
      as the options of the command `warmup`.
    - `on_progress`: is called with a BuildProgress after each task.
    - `announce`: is called with an Estimate before the work starts. Without `announce` and `on_prospect`,
      nothing is estimated, and neither the room on the disk nor Kaggle's limit of bytes is checked.
    - `check`: is called when all shards are built, before the manifest is written. If it raises a TpucacheError, this
      error is raised, and a new cache is removed.
    - `local`, `keep_local`, `companions`: see below.
    - `on_prospect`: lets other processes read a new cache while it is built. It is called with a Prospect, if the
      manifest's main parts are known before the build. Samples are built in the order in which readers ask for them
      (see `tpucache.store.growing`). If another process is building the cache already, this call waits until that
      process has ended, and then raises a BuildError.

    If `cache` is a URL (`gs://`, `s3://`, `hf://`), the cache is built in the folder `local` (default: one in
    `TPUCACHE_DIR`). Each shard is sent while the next ones are built, and the manifest is sent last. If the run is
    killed, this machine or another one can continue it. Without `keep_local`, each shard is removed from this machine
    after it was sent, so that the cache may be larger than the disk.

    If `cache` is "kaggle:owner/slug", shards are sent to Kaggle in the same way, with `target` "kaggle". At the end
    they become one private dataset without a stated licence. Files that the next run needs stay in the folder `local`.
    `companions` is a function that receives the manifest, and returns the content of further files to send, by their
    names, such as the dataset's card.

    Raises UsageError, SourceError or SampleError for the source, RecipeError for a recipe that cannot be built or
    differs from that of the cache, UnfinishedError when the time is up, BuildError when a worker or the disk fails or
    the estimate exceeds a limit, DamageError when a file of a finished cache is missing or cut short, StoreError or
    PublishError when sending fails, DependencyError. Finished work is kept for the next run.
    """
    deadline = Deadline.of(options.time_limit)
    recipe = recipe or Recipe()
    upload = _open_upload(cache, options)
    if upload and upload.place.needs_work:
        options = dataclasses.replace(options, target="kaggle")
    cache = upload.folder if upload else Path(cache).absolute()  # reused workers may have another working directory
    if isinstance(source, (str, Path)):
        check_source(source, cache)
    source = meant_source(to_source(source), cache, options)
    executor = options.engine or Executor(jobs=options.jobs)
    recipe = meant_recipe(recipe, options)
    with deadline.interrupting("the source was listed"), keeping_listings(cache / WORK_NAME) as kept:
        listing = source.list()
    if not listing.samples:
        raise SourceError(f"{source_name(source)} has no samples")
    with cache_folder(cache), upload or contextlib.nullcontext():
        with deadline.interrupting("the first samples were tried"):
            existing = upload.existing() if upload else finished_cache(cache)
            plan = plan_build(source, listing, recipe, options, existing)
            if upload and existing and plan.blocks:
                upload.check_addition(existing)
        work = cache / WORK_NAME
        is_needed = upload is not None and upload.place.needs_work
        is_left = existing is not None and (plan.is_retry or not plan.blocks) and not is_needed and work.exists()
        if existing is not None and is_left and not is_adding_to(work, existing.manifest):
            _clean_up(cache, existing.manifest)  # an earlier run has finished the cache and left its work folder
        encoder = make_encoder(source, recipe, plan)
        skip = options.retry or options.on_error == "skip"
        _check_listed(encoder, plan, skip)
        compared = compared_numbers(plan.listing)
        context = BuildContext(
            encoder, work, cache, skip, run="", deadline=deadline, compared=compared, latency=plan.latency
        )
        if existing is not None:
            context = _compared_with_cache(context, plan, existing, upload is None)
            if not plan.blocks:
                _send_existing(existing, cache, upload, options.target)
                kept.discard()
                return existing.manifest
        manifest = _Build(plan, context, executor, options, upload, kept).run()
        _warn_of_random(source, plan, manifest)
        if upload:
            upload.finish(manifest)
        if cache.exists():
            _clean_up(cache, manifest)
        kept.discard()
        return manifest


def _compared_with_cache(context: BuildContext, plan: BuildPlan, existing: Cache, is_local: bool) -> BuildContext:
    other = tuple(version_differences(existing.manifest.created_by))
    context = dataclasses.replace(context, other_versions=other)
    with context.deadline.interrupting("records of the cache were compared with the source"):
        if plan.blocks:
            check_records(context, plan.listing.samples, known_records(existing))
        if is_local and not other:
            check_rewritten(context, plan.listing.samples, existing)
    return context


def _warn_of_random(source: Source, plan: BuildPlan, manifest: Manifest) -> None:
    if plan.first is None or loads_in_threads(source):
        return
    number, digest = plan.first
    is_kept = all(skip.number != number for skip in manifest.skipped)
    if is_kept and content_digests(manifest).get(number, digest) != digest:
        _log.warning(
            "sample %s of %s had another content when it was read again. If the data set changes its items at random, "
            "the cache keeps what it has read once: leave random changes out of the data set, and give --variants, or "
            "augment while you train",
            plan.listing.samples[number].path, source_name(source),
        )  # fmt: skip


def _send_existing(existing: Cache, cache: Path, upload: CacheUpload | None, target: Target) -> None:
    if target == "kaggle":
        check_kaggle_files(len(existing.manifest.shards))
    if upload:
        upload.finish(existing.manifest)
        if upload.place.needs_work and cache.exists():
            _clean_up(cache, existing.manifest)


def _check_listed(encoder: SampleEncoder, plan: BuildPlan, skip: bool) -> None:
    for block in () if skip else plan.blocks:
        for sample in block.samples:
            if reason := encoder.listed_fault(sample):
                raise SampleError(sample.path, reason)


def _open_upload(cache: str | Path, options: BuildArguments) -> CacheUpload | None:
    local = options.local
    if not is_url(cache) and not is_kaggle(cache):
        if local is not None or not options.keep_local:
            raise UsageError(f"{cache} is a local folder: leave local and keep_local out, which need a URL")
        return None
    url = os.fspath(cache) if is_kaggle(cache) else as_url(cache)
    if url.startswith("file://"):
        check_is_local(cache)
    folder = (Path(local) if local is not None else local_folder(url)).expanduser().absolute()
    return CacheUpload(open_place(url, folder, options.companions), folder, keeps_local=options.keep_local)


class _RefusedError(Exception):
    """The option `check` of `build_cache` has raised the TpucacheError `error`."""

    def __init__(self, error: TpucacheError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class _Build:
    """One run of a plan that has at least one block. `context.run` is "" until `run` has locked the work folder."""

    plan: BuildPlan
    context: BuildContext
    executor: Executor
    options: BuildArguments
    upload: CacheUpload | None
    kept: KeptListings

    def run(self) -> Manifest:
        try:
            return self._build()
        except HeldError:
            if self.options.on_prospect is not None:
                self._wait(self.options.on_prospect)
            raise
        except _RefusedError as refused:
            if self.plan.existing is None:
                remove_folder(self.context.shards)
            raise refused.error from None

    def _wait(self, on_prospect: Callable[[Prospect], None]) -> None:
        plan, work = self.plan, self.context.work
        is_done = not self._can_be_followed()
        while is_held(work):
            with contextlib.suppress(FileNotFoundError):  # the process has just begun or ended
                if not is_done and has_plan(work):
                    begun = compare_plan(work, plan)
                    check_sizes(begun.resized)
                    on_prospect(make_prospect(plan, begun.build))
                    is_done = True
            time.sleep(_WAIT_SECONDS)

    def _can_be_followed(self) -> bool:
        plan, work = self.plan, self.context.work
        is_known = plan.existing is None and not self.context.skip_errors and plan.label_place != "inside"
        has_log, has_other = (Log(work, "", is_followed).path.exists() for is_followed in (True, False))
        is_asked = self.options.on_prospect is not None and self.upload is None and not has_other
        return is_known and (is_asked or has_log)

    def _build(self) -> Manifest:
        plan, context, work = self.plan, self.context, self.context.work
        if self.options.target == "kaggle":
            existing = len(plan.existing.manifest.shards) if plan.existing else 0
            check_kaggle_files(existing + sum(len(block.variants) for block in plan.blocks))
        resumed = has_plan(work)
        if not resumed:  # before the work folder is made, so that an error here leaves no files behind
            first = dataclasses.replace(context, is_followed=self._can_be_followed())
            self._announce(self._scheduler(first), _ADVICE_ADDING if plan.existing else _ADVICE)
        if self.options.on_prospect is not None and is_held(work):
            raise HeldError(f"another process builds {self.context.shards}: run the same command again later")
        work.mkdir(exist_ok=True)
        with hold(work) as run:
            if plan.existing is None and (self.context.shards / MANIFEST_NAME).exists():
                raise HeldError(f"another process has just finished {self.context.shards}: run the same command again")
            begun = begin_or_continue(work, plan, is_sent=self.upload is not None)
            remove_leftovers(work)
            for line in slow_parts() if plan.fields[0].name == IMAGE else ():
                _log.warning("%s", line)
            other_versions = tuple(sorted({*context.other_versions, *begun.other_versions}))
            context = dataclasses.replace(
                context,
                run=run,
                build=begun.build,
                other_versions=other_versions,
                is_followed=self._can_be_followed(),
            )
            self.kept.save()
            if self.upload:
                self.upload.start()
            scheduler = self._scheduler(context)
            if begun.resized:
                check_sizes(scheduler.made_of(begun.resized))
                save_listing(work, plan)
            with context.deadline.interrupting("records of the interrupted run were compared with the source"):
                check_records(context, plan.listing.samples, scheduler.known)
                compare_newest(context, plan.listing.samples, {} if other_versions else scheduler.rewritten)
            if resumed:
                self._announce(scheduler, _ADVICE_RESUMING)
            scheduler.prepare()
            if self.options.on_prospect is not None and context.is_followed:
                self.options.on_prospect(make_prospect(plan, begun.build))
            shards = scheduler.build(self.executor)
            try:
                if self.options.check is not None:
                    self.options.check()
            except TpucacheError as error:
                raise _RefusedError(error) from error
            manifest = finish_tables(context.shards, plan, shards)
            if plan.existing is not None and manifest is plan.existing.manifest:
                return manifest
            context.log.end(manifest.identity)
            return save_manifest(context.shards, manifest)

    def _scheduler(self, context: BuildContext) -> Scheduler:
        on_shard = self.upload.add if self.upload else ignore
        return Scheduler(context, self.plan.blocks, self.options.on_progress, on_shard)

    def _announce(self, scheduler: Scheduler, advice: str) -> None:
        announce, is_followed = self.options.announce, self.options.on_prospect is not None
        if announce is None and not is_followed:
            return
        context, cache, remaining = self.context, self.context.shards, scheduler.remaining()

        def try_samples(trials: Trials) -> Estimate:
            return estimate(context.encoder, remaining, cache, self.executor.jobs, context.deadline, trials)

        if not is_followed:
            expected = try_samples(Trials())
        else:  # a reader waits: encode samples only to announce sizes, or if the largest records might not fit on disk
            expected = try_samples(Trials(samples=0))
            is_known = all(field.is_plain for field in context.encoder.fields)
            if not is_known and (announce is not None or expected.bytes + expected.spooled > expected.free):
                expected = try_samples(_QUICK_TRIALS)
        if announce is not None:
            announce(expected)
        is_kept = self.upload is None or self.upload.keeps_local
        if is_kept:
            check_room(expected, cache, advice)
        if self.options.target == "kaggle":
            sent = self.upload.place.sent_bytes if self.upload else 0
            check_kaggle_bytes(expected, cache, sent, is_kept=is_kept)


def _clean_up(cache: Path, manifest: Manifest) -> None:
    """The work folder is removed last, so that a later run can go on."""
    remove_old_files(cache, manifest)
    remove_folder(cache / WORK_NAME)
