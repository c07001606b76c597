"""The commands that write caches: warmup (also as a dry run), relabel, delete, compact, and verify with its repair."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tpucache import process
from tpucache.cli.parser import (
    CACHE,
    Argument,
    CommandParser,
    Report,
    cache,
    cache_place,
    colours,
    command,
    config,
    fields_of,
    flag,
    from_options,
    list_path,
    local_path,
    names,
    natural,
    positive,
    seconds,
    section,
    show,
    size,
    value,
)
from tpucache.errors import SampleError, UsageError
from tpucache.options import options_of
from tpucache.plugins import call
from tpucache.process import PROG
from tpucache.progress import Progress
from tpucache.recipe import SHARED, Recipe
from tpucache.report.inspect import describe, describe_lines, label_text
from tpucache.store.cache import Cache
from tpucache.store.facts import findings
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.verify import verify_cache
from tpucache.text import duration_text, seconds_text, shown, size_text
from tpucache.warmup.build_options import (
    BoxOptions,
    BuildOptions,
    SelectionOptions,
    SoftOptions,
    SourceOptions,
    WorkerOptions,
)
from tpucache.warmup.sources import Source, box_source, open_source, select_source
from tpucache.warmup.sources.columns import TableOptions
from tpucache.warmup.sources.labelled import check_kind, labels_like, like_source

if TYPE_CHECKING:
    from tpucache.warmup.estimate import Estimate

_OF_CLUSTERS: Final = ("backend", "scheduler")
#: Options of a table that relabel lacks: it changes no masks, and finds no files.
_OF_FILES: Final = ("root", "mask_col", "rle_cols", "rle_class_col", "rle_order", "rle_relative")


def _kept_settings(cache: Path) -> dict[str, Any]:
    """Return a cache's recipe and --labels as options of warmup."""
    manifest = Manifest.load(cache)
    recipe, usual = Recipe.from_dict(manifest.recipe), Recipe().to_dict()
    kept = {name: value for name, value in recipe.to_dict().items() if value != usual.get(name)}
    if "mask_colours" in kept:
        raise UsageError(
            "the cache's mask colours came from a file that the cache does not name: leave --config out, give "
            "that file as --mask-colours, and give the other settings as options"
        )
    kept.pop("max_blocks", None)  # not an option: warmup computes it
    labels = manifest.source.get("labels", {}).get("asked", "auto")
    return {**kept, "size": f"{recipe.height}x{recipe.width}", "labels": labels}


def _table(without: Sequence[str] = ()) -> Argument:
    return section(
        "a .csv (what columns mean; all others are kept with the samples)",
        fields_of(TableOptions, without=without),
    )


def _content(without: Sequence[str] = ()) -> list[Argument]:
    """Return the options that decide what a cache holds, and workers."""
    return [
        fields_of(Recipe, size=size, mask_colours=colours),
        value("--like", "CACHE", "use the size, fit, codec, quality, colours and classes of this cache", cache),
        fields_of(BoxOptions),
        fields_of(SelectionOptions),
        config("CACHE", _kept_settings),
        fields_of(WorkerOptions, without=without),
        fields_of(BuildOptions, without=without, time_limit=seconds, classes=names),
        _table(),
    ]


@command(
    "photos/train cache/train --size 224 --variants 2",
    value(
        "source",
        "SOURCE",
        "a folder of images, flat or with a subfolder for each class; a pattern such as 'photos/*.jpg'; a .csv; "
        ".zip, .tar, .parquet, .tfrec; a folder of save_to_disk; module:callable; a URL (gs://, s3://, hf://)",
    ),
    value(
        "cache",
        "CACHE",
        "the folder to write, or a URL (gs://, s3://, hf://) or kaggle:owner/slug, to which each finished shard "
        "is sent; run again to resume",
        cache_place,
    ),
    value("--local", "FOLDER", "with a URL or kaggle:…: the local folder of the build", local_path),
    value(
        "--keep-local",
        None,
        "with a URL or kaggle:…: whether a shard stays on this machine after it was sent; no: the cache may be "
        "larger than the disk (yes)",
        default="yes",
        choices=("yes", "no"),
    ),
    flag(
        "--dry-run",
        "write no cache: build a few samples, compare codecs by size, time and speed, and show the command to use",
    ),
    *_content(),
    basic=(
        "--size",
        "--fit",
        "--variants",
        "--augment",
        "--codec",
        "--quality",
        "--limit",
        "--dry-run",
        "--config",
        "--jobs",
        "--labels",
        "--time-limit",
        "--on-error",
        "--label-col",
    ),
)
def warmup(options: argparse.Namespace) -> Report:
    """Build a cache, or finish a build that was interrupted."""
    from tpucache.warmup.build import build_cache
    from tpucache.warmup.run.executors import Executor
    from tpucache.warmup.run.folder import check_source

    began = time.monotonic()
    recipe, chosen = wanted(options)
    place, executor = options.cache, Executor(options.backend, options.jobs, options.scheduler)
    if isinstance(place, Path):
        check_source(options.source, place)
    source = selected_source(options)
    if options.dry_run:
        from tpucache.cli.comparing import run_dry

        return run_dry(options, source, recipe, chosen)
    try:
        with Progress(None, "warmup") as progress:
            manifest = build_cache(
                source,
                place,
                recipe,
                **vars(chosen),
                engine=executor,
                on_progress=progress.show_build,
                announce=_announce,
                local=options.local,
                keep_local=options.keep_local == "yes",
                companions=_companions(str(place)),
            )
    except SampleError as error:
        if options.on_error == "skip":
            raise
        reason = f"{error.reason}; or leave such samples out with --on-error skip"
        raise SampleError(error.path, reason, error.file) from error
    lines = [
        f"{shown(str(place))}: finished in {duration_text(time.monotonic() - began)}",
        *describe_lines(manifest),
    ]
    report = describe(manifest)
    if isinstance(place, Path):  # a cache at a URL would have to be downloaded
        opened = Cache.open(place)
        if options.truncate:
            lengths: Any = opened.samples.get("length", [])
            cut = sum(length > options.pad for length in lengths)
            lines.append(f"truncated    to {options.pad:,} numbers: {cut:,} samples")
        found = findings(opened)
        lines += [f"look at      {line}" for line in found.lines()]
        report["findings"] = found.to_dict()
    return report, lines


def _announce(expected: Estimate) -> None:
    process.tell(
        f"to do: {expected.records:,} records, about {size_text(expected.bytes)} ({size_text(expected.free)} are "
        f"free), about {seconds_text(max(0.1, expected.process_seconds))} of one core's work"
    )


def _companions(place: str) -> Any:
    """Return a function that makes the files to upload with a cache to Kaggle; None elsewhere."""
    from tpucache.store.files import KAGGLE

    if not place.startswith(KAGGLE):
        return None
    from tpucache.publish.bundle import companions
    from tpucache.report.page import check_jinja

    check_jinja()  # fail now: the card is made only at the end, perhaps hours later
    return partial(companions, place.removeprefix(KAGGLE))


def wanted(options: argparse.Namespace) -> tuple[Recipe, BuildOptions]:
    """Return the recipe and the build options; with --like CACHE, what is shared is that of CACHE."""
    build = from_options(BuildOptions, options, jobs=options.jobs)
    if options.like is None:
        return from_options(Recipe, options), build
    own = {name for name in options_of(Recipe) if name in options.explicit or name not in SHARED}
    labels, classes = labels_like(options.like, options.labels, options.classes, options.label_cols)
    recipe = Recipe.like(options.like, **{name: getattr(options, name) for name in own})
    return recipe, replace(build, labels=labels, classes=classes)


def selected_source(options: argparse.Namespace) -> Source:
    check_kind(options.labels, options.label_sep)
    source = _opened(options.source, options)
    source = source if options.like is None else like_source(source, options.like)
    return select_source(source, limit=options.limit, include=options.include, exclude=options.exclude)


def _opened(source: str, options: argparse.Namespace) -> Source:
    opened = open_source(source, from_options(TableOptions, options))
    return opened if options.boxes is None else box_source(opened, options.boxes)


class _BuildParser(CommandParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"--build: {message}. It takes the options of `{PROG} warmup --help-all` that decide what a cache holds. "
            f"To use other options, run `{PROG} warmup SOURCE CACHE` first, then give CACHE in place of SOURCE"
        )


def parse_build(text: str | None) -> argparse.Namespace:
    parser = _BuildParser(prog=f"{PROG} --build")
    for add in _content((*_OF_CLUSTERS, "time_limit", "target", "retry")):
        add(parser)
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        parser.error(str(error).lower())
    return parser.parse_args(words)


def _table_or_folds(command: CommandParser) -> None:
    """Add the argument TABLE, and the options of folds. With --make-folds, TABLE is optional."""
    table = command.add_argument(
        "table", metavar="TABLE", type=list_path, help="a .csv with a row for each sample of the cache; -: from a pipe"
    )

    def folds(text: str) -> int:
        table.required = False  # argparse does not find an argument after options that is optional from the start
        return positive(text)

    section(
        "folds (for train --folds, instead of the folds of a table)",
        value("--make-folds", "N", "divide the samples into N folds; no table is needed then", folds),
        value(
            "--groups",
            "duplicates|COLUMN",
            "keep in one fold: pictures that look alike, or samples with the same value in a column",
        ),
        value(
            "--stratify",
            "COLUMN|label|none",
            "give each fold equal shares of the values in COLUMN, or of each class",
            default="label",
        ),
        value("--seed", "N", "seed of the folds", natural, 0),
    )(command)


@command(
    "cache/train labels.csv --label-col breed --fold-col fold",
    CACHE,
    _table_or_folds,
    flag("--corrections", "the table has some of the samples; the rest keep their labels"),
    fields_of(SourceOptions, without=["pad", "truncate"], classes=names),
    fields_of(SoftOptions),
    _table(without=_OF_FILES),
    basic=(
        "--json",
        "--corrections",
        "--make-folds",
        "--groups",
        "--stratify",
        "--labels",
        "--classes",
        "--soft-labels",
        "--path-col",
        "--label-col",
        "--fold-col",
    ),
)
def relabel(options: argparse.Namespace) -> Report:
    """Give a finished cache the labels, folds and columns of a .csv, or new folds. No record is changed."""
    from tpucache.warmup.relabel import relabel_cache

    began = time.monotonic()
    table, soft = from_options(TableOptions, options), from_options(SoftOptions, options)
    of_table = table != TableOptions() or options.corrections or options.classes is not None or soft.soft_labels
    if options.table is None and of_table:
        raise UsageError("the options for a table need a .csv: give a .csv after the cache, too")
    if options.make_folds is None and options.explicit & {"groups", "stratify"}:
        raise UsageError("--groups and --stratify are for --make-folds N: give --make-folds, too")
    if options.make_folds is not None and options.fold_col is not None:
        raise UsageError("--fold-col reads folds from the table, and --make-folds makes new ones: leave one out")
    found: dict[str, Any] = {}
    lines: list[str] = []
    if options.table is not None:
        manifest = relabel_cache(
            options.cache,
            options.table,
            table,
            labels=options.labels,
            classes=options.classes,
            missing_label=options.missing_label,
            corrections=options.corrections,
            soft=soft,
        )
    if options.make_folds is not None:
        manifest, found, lines = call("folds", options)
    lines = [
        f"{options.cache}: {manifest.samples:,} samples, {time.monotonic() - began:,.1f} s",
        f"  labels: {label_text(manifest)}",
        *lines,
    ]
    return {**describe(manifest), **found}, lines


@command(
    "cache/train --where \"fold == 3 and class == 'blurred'\"",
    CACHE,
    value("--where", "EXPR", "delete samples that meet this condition on columns, as in CachedDataset.where"),
    value(
        "--paths",
        "FILE",
        "delete samples with these paths: one path in each line, also from a pipe (-), or the column `path` of a .csv",
        list_path,
    ),
    flag("--undo", "bring back the samples that the newest version deleted"),
)
def delete(options: argparse.Namespace) -> Report:
    """Delete samples: make a version of a cache without them. Or undo the last deletion."""
    from tpucache.warmup.versions import delete_samples, read_paths, undo_delete

    if [options.where, options.paths, options.undo or None].count(None) != 2:
        raise UsageError("delete needs exactly one of --where EXPR, --paths FILE and --undo: give one of the three")
    if options.undo:
        manifest = undo_delete(options.cache)
    else:
        paths = None if options.paths is None else read_paths(options.paths)
        manifest = delete_samples(options.cache, where=options.where, paths=paths)
    lines = [
        f"{options.cache}: version {manifest.number} has {manifest.samples:,} samples, {len(manifest.deleted):,} are "
        "deleted",
    ]
    if manifest.deleted:
        lines.append(
            "  records of deleted samples are still on the disk: `tpucache compact` removes these and earlier versions"
        )
    return describe(manifest), lines


@command("cache/train", CACHE)
def compact(options: argparse.Namespace) -> Report:
    """Write a cache anew, without deleted samples and earlier versions."""
    from tpucache.warmup.versions import compact_cache

    manifest = compact_cache(options.cache)
    line = f"{options.cache}: {manifest.samples:,} samples in one version, {size_text(manifest.total_bytes)}"
    return describe(manifest), [line]


@command(
    "cache/train",
    CACHE,
    value("--repair", "SOURCE", "build damaged shards again, from the cache's source"),
    value(
        "--augment",
        "module:name",
        "with --repair: allow calling this code, your own augmentation that the cache's manifest names",
    ),
    value(
        "--build",
        "OPTIONS",
        "with --repair: the options of warmup that say where SOURCE has images and masks, such as "
        "'--path-col file --suffix .jpg'",
    ),
    fields_of(WorkerOptions, without=_OF_CLUSTERS),
)
def verify(options: argparse.Namespace) -> Report | int:
    """Compare every byte of a cache with its manifest; with --repair, build damaged shards again."""
    if options.repair is not None:
        from tpucache.warmup.repair import load_manifest, repair_cache

        manifest, source = load_manifest(options.cache), _opened(options.repair, parse_build(options.build))
    elif options.augment is None and options.build is None:
        manifest = Cache.open(options.cache).manifest
    else:
        raise UsageError("--augment and --build are for a repair: give --repair SOURCE, too")
    whole = sum(entry.bytes for entry in manifest.shards)
    with Progress(None, "repair") as building, Progress(whole, "verify", "bytes") as verifying:

        def advance(entry: ShardEntry) -> None:
            verifying.advance(entry.bytes)

        if options.repair is None:
            damages = verify_cache(options.cache, advance)
        else:
            damages = repair_cache(
                source,
                options.cache,
                jobs=options.jobs,
                augment=options.augment,
                on_progress=building.show_build,
                on_verified=advance,
            )
    damaged = sorted({damage.name for damage in damages})
    repaired = damaged if options.repair is not None else []
    files = len(manifest.shards) + len(manifest.tables)
    report = {
        "ok": damaged == repaired,
        "files": files,
        "records": manifest.records,
        "bytes": manifest.total_bytes,
        "damages": [damage.to_dict() for damage in damages],
        "repaired": repaired,
    }
    lines = [f"{damage.name} {damage.reason}" for damage in damages] + [f"{name} is repaired" for name in repaired]
    if report["ok"]:
        return report, [*lines, f"{options.cache}: {manifest.records:,} records in {files} files, all sound"]
    show(options, report, lines)
    return process.complain(
        f"{options.cache} is damaged: {', '.join(damaged)}. Run verify with --repair SOURCE, or copy the cache anew", 1
    )
