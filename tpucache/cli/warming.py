"""The commands that write caches: warmup (also as a dry run), relabel, delete, compact, and verify with its repair."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tpucache.cli.arguments import (
    add_cache,
    add_command,
    add_config,
    add_json,
    add_options,
    cache,
    cache_place,
    colours,
    from_options,
    list_path,
    local_path,
    names,
    natural,
    positive,
    seconds,
    size,
)
from tpucache.cli.parser import CommandParser, complain, show
from tpucache.errors import UsageError
from tpucache.options import options_of
from tpucache.plugins import call
from tpucache.process import PROG, tell
from tpucache.progress import Progress
from tpucache.recipe import SHARED, Recipe
from tpucache.text import duration_text, size_text
from tpucache.warmup.build_options import (
    BoxOptions,
    BuildOptions,
    SelectionOptions,
    SoftOptions,
    SourceOptions,
    WorkerOptions,
)
from tpucache.warmup.sources.columns import TableOptions

if TYPE_CHECKING:
    from tpucache.cli.comparing import CodecFigures, Listed
    from tpucache.store.manifest import Manifest
    from tpucache.store.verify import Damage
    from tpucache.warmup.sources import Source
    from tpucache.warmup.trial import DryRun

#: The options of warmup that --help lists.
_BASIC: Final = (
    *("--size", "--fit", "--variants", "--augment", "--codec", "--quality", "--limit", "--dry-run", "--config"),
    *("--jobs", "--labels", "--time-limit", "--on-error", "--label-col"),
)
#: Options that only warmup has, not the commands that read a cache while it is built.
_WARMUP_ONLY: Final = ("time_limit", "target", "retry")
#: Options of a table that describe masks. relabel changes no masks, and lacks them.
_NO_RUN_LENGTHS: Final = {"rle_cols": (), "rle_class_col": None, "rle_order": None, "rle_relative": False}

_MOST_NAMED: Final = 5


def warmup(options: argparse.Namespace) -> int:
    """Build a cache, or finish a build that was interrupted."""
    from tpucache.errors import SampleError
    from tpucache.text import shown
    from tpucache.warmup.build import build_cache
    from tpucache.warmup.estimate import Estimate
    from tpucache.warmup.run.executors import Executor
    from tpucache.warmup.run.folder import check_source

    began = time.monotonic()
    recipe, chosen = wanted(options)
    executor = Executor(options.backend, options.jobs, options.scheduler)
    if isinstance(options.cache, Path):
        check_source(options.source, options.cache)
    if options.dry_run:
        return run_dry(options, selected_source(options), recipe, chosen)

    def announce(expected: Estimate) -> None:
        from tpucache.text import seconds_text

        tell(
            f"to do: {expected.records:,} records, about {size_text(expected.bytes)} ({size_text(expected.free)} are "
            f"free), about {seconds_text(max(0.1, expected.process_seconds))} of one core's work"
        )

    try:
        with Progress(None, "warmup") as progress:
            manifest = build_cache(
                selected_source(options),
                options.cache,
                recipe,
                **vars(chosen),
                engine=executor,
                on_progress=progress.show_build,
                announce=announce,
                local=options.local,
                keep_local=options.keep_local == "yes",
                companions=_companions(options.cache),
            )
    except SampleError as error:
        if options.on_error == "skip":
            raise
        reason = f"{error.reason}; or leave such samples out with --on-error skip"
        raise SampleError(error.path, reason, error.file) from error
    from tpucache.report.inspect import describe, describe_lines
    from tpucache.store.cache import Cache
    from tpucache.store.facts import findings

    lines = [
        f"{shown(str(options.cache))}: finished in {duration_text(time.monotonic() - began)}",
        *describe_lines(manifest),
    ]
    report = describe(manifest)
    if isinstance(options.cache, Path):  # a cache at a URL would have to be downloaded
        opened = Cache.open(options.cache)
        if options.truncate:
            lengths: Any = opened.samples.get("length", [])
            cut = sum(length > options.pad for length in lengths)
            lines.append(f"truncated    to {options.pad:,} numbers: {cut:,} samples")
        found = findings(opened)
        lines += [f"look at      {line}" for line in found.lines()]
        report["findings"] = found.to_dict()
    show(options, report, lines)
    return 0


def _companions(place: str | Path) -> Callable[[Manifest], Mapping[str, bytes]] | None:
    """Return a function that makes the files to upload with a cache to Kaggle; None elsewhere."""
    from tpucache.store.files import KAGGLE, is_kaggle

    if not is_kaggle(place):
        return None
    from tpucache.publish.bundle import companions
    from tpucache.report.page import check_jinja

    check_jinja()  # fail now: the card is made only at the end, perhaps hours later
    return partial(companions, str(place).removeprefix(KAGGLE))


def wanted(options: argparse.Namespace) -> tuple[Recipe, BuildOptions]:
    """Return the recipe and the build options; with --like CACHE, what is shared is that of CACHE."""
    from tpucache.warmup.sources.labelled import labels_like

    build = from_options(BuildOptions, options, jobs=options.jobs)
    if options.like is None:
        return from_options(Recipe, options), build
    given = options.explicit
    chosen = {name: getattr(options, name) for name in options_of(Recipe) if name in given or name not in SHARED}
    labels, classes = labels_like(options.like, options.labels, options.classes, options.label_cols)
    return Recipe.like(options.like, **chosen), replace(build, labels=labels, classes=classes)


def selected_source(options: argparse.Namespace) -> Source:
    from tpucache.warmup.sources import select_source
    from tpucache.warmup.sources.labelled import check_separator, like_source

    check_separator(options.labels, options.label_sep)
    source = _opened(options.source, options)
    source = like_source(source, options.like) if getattr(options, "like", None) else source
    return select_source(source, limit=options.limit, include=options.include, exclude=options.exclude)


def relabel(options: argparse.Namespace) -> int:
    """Give a finished cache the labels, folds and columns of a .csv, or new folds. No record is changed."""
    from tpucache.report.inspect import describe, label_text
    from tpucache.warmup.relabel import relabel_cache

    began = time.monotonic()
    table = from_options(TableOptions, options, root=None, mask_col=None, **_NO_RUN_LENGTHS)
    soft = from_options(SoftOptions, options)
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
        given = ("labels", "classes", "missing_label", "corrections")
        chosen: dict[str, Any] = {name: getattr(options, name) for name in given}
        manifest = relabel_cache(options.cache, options.table, table, **chosen, soft=soft)
    if options.make_folds is not None:
        manifest, found, lines = call("folds", options)
    lines = [
        f"{options.cache}: {manifest.samples:,} samples, {time.monotonic() - began:,.1f} s",
        f"  labels: {label_text(manifest)}",
        *lines,
    ]
    show(options, {**describe(manifest), **found}, lines)
    return 0


def delete(options: argparse.Namespace) -> int:
    """Delete samples: make a version of a cache without them. Or undo the last deletion."""
    from tpucache.report.inspect import describe
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
    show(options, describe(manifest), lines)
    return 0


def compact(options: argparse.Namespace) -> int:
    """Write a cache anew, without deleted samples and earlier versions."""
    from tpucache.report.inspect import describe
    from tpucache.store.history import refuse_version, version_files
    from tpucache.store.manifest import Manifest
    from tpucache.warmup.versions import compact_cache

    refuse_version(options.cache)
    before = Manifest.load(options.cache)
    size = sum(entry.bytes for entry in version_files(options.cache, before))
    manifest = compact_cache(options.cache)
    lines = [
        f"{options.cache}: {manifest.samples:,} samples in one version, {size_text(manifest.total_bytes)}, "
        f"{size_text(size)} before",
    ]
    show(options, {**describe(manifest), "bytes_before": size}, lines)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Compare every byte of a cache with its manifest; with --repair, build damaged shards again."""
    from tpucache.store.cache import Cache
    from tpucache.store.verify import verify_cache

    if options.repair is None:
        if options.augment is not None or options.build is not None:
            raise UsageError("--augment and --build are for a repair: give --repair SOURCE, too")
        manifest = Cache.open(options.cache).manifest
        with Progress(sum(entry.bytes for entry in manifest.shards), "verify", "bytes") as progress:
            damages = verify_cache(options.cache, lambda entry: progress.advance(entry.bytes))
    else:
        manifest, damages = _repair(options)
    names = sorted({damage.name for damage in damages})
    repaired = names if options.repair is not None else []
    files = len(manifest.shards) + len(manifest.tables)
    report = {
        "ok": names == repaired,
        "files": files,
        "records": manifest.records,
        "bytes": manifest.total_bytes,
        "damages": [damage.to_dict() for damage in damages],
        "repaired": repaired,
    }
    lines = [f"{damage.name} {damage.reason}" for damage in damages] + [f"{name} is repaired" for name in repaired]
    if names == repaired:
        lines.append(f"{options.cache}: {manifest.records:,} records in {files} files, all sound")
    show(options, report, lines)
    if names != repaired:
        return complain(
            f"{options.cache} is damaged: {', '.join(names)}. Run verify with --repair SOURCE, or copy the cache anew",
            1,
        )
    return 0


def _opened(source: str, options: argparse.Namespace) -> Source:
    from tpucache.warmup.sources import box_source, open_source

    opened = open_source(source, from_options(TableOptions, options))
    return opened if options.boxes is None else box_source(opened, options.boxes)


def _repair(options: argparse.Namespace) -> tuple[Manifest, list[Damage]]:
    from tpucache.warmup.repair import load_manifest, repair_cache

    manifest = load_manifest(options.cache)
    whole = sum(entry.bytes for entry in manifest.shards)
    with Progress(None, "repair") as building, Progress(whole, "verify", "bytes") as verifying:
        damages = repair_cache(
            _opened(options.repair, parse_build(options.build)[0]),
            options.cache,
            jobs=options.jobs,
            augment=options.augment,
            on_progress=building.show_build,
            on_verified=lambda entry: verifying.advance(entry.bytes),
        )
    return manifest, damages


class _InsteadOfTable(argparse.Action):
    """Stores a value, and makes the argument TABLE optional.

    TABLE is required otherwise: argparse does not find an optional positional argument after options.
    """

    def __init__(self, *given: Any, table: argparse.Action, **keywords: Any) -> None:
        super().__init__(*given, **keywords)
        self._table = table

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        setattr(namespace, self.dest, values)
        self._table.required = False


def _add_folds(command: argparse.ArgumentParser, table: argparse.Action) -> None:
    group = command.add_argument_group("folds", "for train --folds, instead of the folds of a table")
    group.add_argument(
        "--make-folds",
        action=_InsteadOfTable,
        table=table,
        type=positive,
        metavar="N",
        help="divide the samples into N folds; no table is needed then",
    )
    group.add_argument(
        "--groups",
        metavar="duplicates|COLUMN",
        help="keep in one fold: pictures that look alike, or samples with the same value in a column",
    )
    group.add_argument(
        "--stratify",
        metavar="COLUMN|label|none",
        default="label",
        help="give each fold equal shares of the values in COLUMN, or of each class",
    )
    group.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of the folds")


def add(commands: Any) -> None:
    command = add_command(commands, warmup, "photos/train cache/train --size 224 --variants 2", _BASIC)
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of images, flat or with a subfolder for each class; a pattern such as 'photos/*.jpg'; a .csv; "
        ".zip, .tar, .parquet, .tfrec; a folder of save_to_disk; module:callable; a URL (gs://, s3://, hf://)",
    )
    command.add_argument(
        "cache",
        metavar="CACHE",
        type=cache_place,
        help="the folder to write, or a URL (gs://, s3://, hf://) or kaggle:owner/slug, to which each finished shard "
        "is sent; run again to resume",
    )
    command.add_argument(
        "--local", type=local_path, metavar="FOLDER", help="with a URL or kaggle:…: the local folder of the build"
    )
    command.add_argument(
        "--keep-local",
        choices=("yes", "no"),
        default="yes",
        help="with a URL or kaggle:…: whether a shard stays on this machine after it was sent; no: the cache may be "
        "larger than the disk (yes)",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="write no cache: build a few samples, compare codecs by size, time and speed, and show the command to use",
    )
    add_json(command)
    _add_build(command)
    command = add_command(
        commands,
        relabel,
        "cache/train labels.csv --label-col breed --fold-col fold",
        (
            *("--json", "--corrections", "--make-folds", "--groups", "--stratify", "--labels", "--classes"),
            *("--soft-labels", "--path-col", "--label-col", "--fold-col"),
        ),
    )
    add_cache(command)
    table = command.add_argument(
        "table", metavar="TABLE", type=list_path, help="a .csv with a row for each sample of the cache; -: from a pipe"
    )
    command.add_argument(
        "--corrections", action="store_true", help="the table has some of the samples; the rest keep their labels"
    )
    _add_folds(command, table)
    add_options(command, SourceOptions, only=["labels", "classes", "missing_label"], parsers={"classes": names})
    add_options(command, SoftOptions)
    add_table(command, without=["root", "mask_col", *_NO_RUN_LENGTHS])
    command = add_command(commands, delete, "cache/train --where \"fold == 3 and class == 'blurred'\"")
    add_cache(command)
    command.add_argument(
        "--where", metavar="EXPR", help="delete samples that meet this condition on columns, as in CachedDataset.where"
    )
    command.add_argument(
        "--paths",
        type=list_path,
        metavar="FILE",
        help="delete samples with these paths: one path in each line, also from a pipe (-), or the column `path` of a "
        ".csv",
    )
    command.add_argument("--undo", action="store_true", help="bring back the samples that the newest version deleted")
    command = add_command(commands, compact, "cache/train")
    add_cache(command)
    command = add_command(commands, verify, "cache/train")
    add_cache(command)
    command.add_argument("--repair", metavar="SOURCE", help="build damaged shards again, from the cache's source")
    command.add_argument(
        "--augment",
        metavar="module:name",
        help="with --repair: allow calling this code, your own augmentation that the cache's manifest names",
    )
    command.add_argument(
        "--build",
        metavar="OPTIONS",
        help="with --repair: the options of warmup that say where SOURCE has images and masks, such as "
        "'--path-col file --suffix .jpg'",
    )
    add_options(command, WorkerOptions, only=["jobs"])


def _add_build(command: argparse.ArgumentParser, content_alone: bool = False) -> None:
    add_options(command, Recipe, parsers={"size": size, "mask_colours": colours})
    command.add_argument(
        "--like",
        type=cache,
        metavar="CACHE",
        help="use the size, fit, codec, quality, colours and classes of this cache",
    )
    add_options(command, BoxOptions)
    add_options(command, SelectionOptions)
    add_config(command, "CACHE", _kept_settings)
    add_options(command, WorkerOptions, only=["jobs"] if content_alone else None)
    without = _WARMUP_ONLY if content_alone else ()
    add_options(command, BuildOptions, without=without, parsers={"time_limit": seconds, "classes": names})
    add_table(command)


def _kept_settings(cache: Path) -> dict[str, Any]:
    """Return a cache's recipe and --labels as options of warmup."""
    from tpucache.store.manifest import Manifest

    manifest = Manifest.load(cache)
    recipe, usual = Recipe.from_dict(manifest.recipe), Recipe().to_dict()
    kept = {name: value for name, value in recipe.to_dict().items() if value != usual.get(name)}
    if "mask_colours" in kept:
        raise UsageError(
            "the cache's mask colours came from a file that the cache does not name: leave --config out, give "
            "that file as --mask-colours, and give the other settings as options"
        )
    kept.pop("max_blocks", None)  # not an option: warmup computes it
    kept["size"] = f"{recipe.height}x{recipe.width}"
    labels = manifest.source.get("labels", {}).get("asked", "auto")
    return {**kept, **({} if labels == "auto" else {"labels": labels})}


class _BuildParser(CommandParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"--build: {message}. It takes the options of `{PROG} warmup --help-all` that decide what a cache holds. "
            f"To use other options, run `{PROG} warmup SOURCE CACHE` first, then give CACHE in place of SOURCE"
        )


def parse_build(text: str | None) -> tuple[argparse.Namespace, bool]:
    """Return the options in a text, and whether they name code."""
    parser = _BuildParser(prog=f"{PROG} --build")
    _add_build(parser, content_alone=True)
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        parser.error(str(error).lower())
    found = parser.parse_args(words)
    return found, bool(parser.code_in(found, parser._option_string_actions))


def add_table(command: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    table = command.add_argument_group("a .csv", "what columns mean; all other columns are kept with the samples")
    add_options(table, TableOptions, without=without)


def run_dry(options: argparse.Namespace, source: Source, recipe: Recipe, chosen: BuildOptions) -> int:
    from tpucache.cli.comparing import Listed
    from tpucache.store.history import refuse_version
    from tpucache.warmup.run.upload import local_folder
    from tpucache.warmup.trial import dry_run

    refuse_version(options.cache)
    place = options.cache
    folder = place if isinstance(place, Path) else options.local or local_folder(place)
    listed = Listed(source, source.list())
    found = dry_run(listed, folder, recipe, **vars(chosen))
    compared, lines = _compared(options, listed, found, recipe, chosen)
    show(options, {**found.to_dict(), **compared}, [*_lines(found), *lines])
    return 0


def _compared(
    options: argparse.Namespace, listed: Listed, found: DryRun, recipe: Recipe, chosen: BuildOptions
) -> tuple[dict[str, Any], list[str]]:
    from importlib.util import find_spec

    from tpucache.cli.comparing import compare_codecs, recommended
    from tpucache.store.codecs import IMAGE_CODECS

    if not found.sizes or not found.estimate.records or chosen.retry or find_spec("torch") is None:
        return {}, []
    is_chosen = "codec" in options.explicit
    rows, left_out = compare_codecs(listed, found, recipe, chosen, [recipe.codec] if is_chosen else IMAGE_CODECS.own)
    best = recommended(rows)
    command = None if best is None else _command(options, best.codec)
    report = {
        "codecs": [{**row._asdict(), "recommended": row is best} for row in rows],
        "left_out_codecs": left_out,
        "command": command,
    }
    lines = [*_codec_table(rows, best), *(f"left out  {codec}: {reason}" for codec, reason in left_out.items())]
    if any(not row.fits for row in rows):
        lines.append("!         larger than the free disk, or than the 20 GB of --target kaggle")
    lines.append(
        f"command   {command}" if command else "command   none: no cache fits; give a smaller --size, or --limit"
    )
    return report, lines


def _codec_table(rows: Sequence[CodecFigures], best: CodecFigures | None) -> Iterator[str]:
    table = [("", "codec", "GB", "min", "sent", "images/s", "from", "PSNR")]
    for row in rows:
        figures = f"{row.bytes / 1e9:,.3f}", f"{row.seconds / 60:,.1f}", f"{row.batch_bytes_per_image / 1000:,.0f}"
        read = f"{row.images_per_second:,.0f}", "RAM" if row.reading == "keep" else "files"
        mark = "*" if row is best else "" if row.fits else "!"
        table.append((mark, row.codec, *figures, *read, "exact" if row.psnr is None else f"{row.psnr:.1f}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for mark, codec, *cells in table:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[2:], strict=True))
        yield "  ".join([f"{mark:1}{codec:{widths[1]}}", *aligned])


def _command(options: argparse.Namespace, codec: str) -> str:
    words = [word for word in options.arguments if word not in ("--dry-run", "--json")]
    return f"{PROG} {shlex.join(words if 'codec' in options.explicit else [*words, '--codec', codec])}"


def _lines(found: DryRun) -> list[str]:
    from tpucache.report.inspect import describe_labels

    expected = found.estimate
    lines = [
        f"samples   {found.samples:,}: {_counts(found.files)}",
        f"labels    {describe_labels(found.labels, found.classes, found.class_counts)}",
    ]
    if found.left_out:
        lines.append(f"left out  {sum(found.left_out.values()):,}: {_counts(found.left_out)}")
    lines.append(f"tried     {len(found.tried):,} samples, {len(found.failed):,} cannot be used")
    if found.listed:
        lines.append(f"refused   {len(found.listed):,} samples before anything is built, without --on-error skip")
    reasons = {tried.path: tried.reason for tried in (*found.failed, *found.listed)}
    lines += [f"  {path!r}: {reason}" for path, reason in [*reasons.items()][:_MOST_NAMED]]
    if found.sizes:
        (least, low), (width, height), (most, high) = found.size_range().values()
        lines.append(
            f"images    {least:,} to {most:,} wide, {low:,} to {high:,} high, median {width}x{height}; "
            f"{_counts(found.kinds)}"
        )
    lines.append(
        f"estimate  {expected.records:,} records, {size_text(expected.bytes)} and {size_text(expected.spooled)} of "
        f"working space ({size_text(expected.free)} are free), {duration_text(found.seconds)}"
    )
    return lines


def _counts(counted: Any) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counted.items())
