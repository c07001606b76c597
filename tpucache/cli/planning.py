"""The command plan: recommends the codec, size and number of variants of a cache."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any, Final

from tpucache.cli.arguments import (
    add_command,
    add_device_rate,
    add_json,
    add_options,
    colours,
    from_options,
    list_of,
    names,
    natural,
    rate,
    size,
)
from tpucache.cli.terminal import show
from tpucache.cli.warming import add_table, selected_source
from tpucache.options import Option, options_of
from tpucache.process import tell
from tpucache.recipe import Recipe
from tpucache.signals import PROG
from tpucache.store.codecs import CODECS
from tpucache.warmup.build_options import BoxOptions, PlanOptions, SelectionOptions, SourceOptions, WorkerOptions
from tpucache.warmup.sources.table import TableOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpucache.planning import CachePlan, PlanRow

#: Options of a recipe that `plan` decides or does not need. All others are options of `plan`, too.
_COMPARED: Final = ("size", "variants", "codec", "bands", "shard_mb")
#: The dataclasses with options that `plan` shares with warmup.
_SHARED: Final = (Recipe, SelectionOptions, BoxOptions, SourceOptions, WorkerOptions, TableOptions)
_WORKER_OPTIONS: Final = ("jobs",)
_MOST_NAMED: Final = 5


def plan(options: argparse.Namespace) -> int:
    """Build a few samples of a source in several codecs and sizes, compare them, and say which warmup to run."""
    from tpucache.planning import plan_cache

    others = {name: each.default for name, each in options_of(Recipe).items() if name in _COMPARED}
    if options.quality is not None or options.chroma is not None:
        others["codec"] = next(name for name in CODECS.own if CODECS[name].chromas)  # this codec accepts both options
    if options.mask_colours is not None:
        others["mask_colours"] = colours(options.mask_colours)
    recipe = from_options(Recipe, options, **others)
    chosen = from_options(PlanOptions, options, device_rate=options.device_rate, jobs=options.jobs, on_progress=tell)
    found = plan_cache(selected_source(options), recipe, **vars(chosen))
    command = _command(found, options)
    show(options, {**found.to_dict(), "command": command}, [*_lines(found), *_advice(found, command)])
    return 0


def _lines(found: CachePlan) -> Iterator[str]:
    """Yield the lines of the report, which has at most 80 columns."""
    yield (f"built and read {found.tried:,} of the {found.samples:,} samples of this source, in {found.seconds:,.0f} s")
    if found.failed:
        yield f"{len(found.failed):,} of these samples cannot be used:"
        yield from (f"  {path!r}: {reason}" for path, reason in found.failed[:_MOST_NAMED])
    yield from (f"left out: {codec}: {reason}" for codec, reason in found.left_out.items())
    rate = [] if found.device_rate is None else ["idle"]
    table = [["", "codec", "size", "K", "GB", "min", "sent", "images/s", "from", *rate, "PSNR"]]
    for row in found.rows:
        mark = "*" if found.is_recommended(row) else "" if row.fits else "!"
        figures = [f"{row.variants}", _gigabytes(row.bytes), _minutes(row.seconds)]
        figures += [f"{row.batch_bytes_per_image / 1000:,.0f}", f"{row.images_per_second:,.0f}"]
        figures += ["RAM" if row.reading == "keep" else "files"]
        figures += [] if row.idle is None else [f"{row.idle:.0%}"]
        table.append([mark, row.codec, _size(row), *figures, "exact" if row.psnr is None else f"{row.psnr:.1f}"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for mark, codec, shape, *figures in table:
        aligned = (cell.rjust(width) for cell, width in zip(figures, widths[3:], strict=True))
        yield "  ".join([f"{mark:1}{codec:{widths[1]}}", f"{shape:{widths[2]}}", *aligned])
    yield "K: augmented variants. sent: kB that are sent to the device for each image."
    yield f"min: minutes of building with {found.workers} workers; a rough figure, often off by a third."
    yield f"images/s: by {found.threads} threads, once records are in memory or in the page cache."


def _size(row: PlanRow) -> str:
    """Return the stored size of a row's images as text, such as "224", "224x160" or "224 bands".

    If the row is about reading the cache of the row above at another resolution, return "as" and that resolution.
    """
    if row.resolution is None:
        return _side(row.size) + (" bands" if row.bands else "")
    return f"  as {_side(row.resolution)}"  # such a row stands below the row of the cache


def _side(shape: tuple[int, int]) -> str:
    return f"{shape[0]}" if shape[0] == shape[1] else f"{shape[0]}x{shape[1]}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.{1 if size > 1e10 else 2 if size > 1e9 else 3}f}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.{0 if seconds >= 6000 else 1}f}"


def _advice(found: CachePlan, command: str | None) -> Iterator[str]:
    if any(not row.fits for row in found.rows):
        yield f"! is not within the limits of {found.target}"
    if command is None:
        smallest: PlanRow = min(found.rows, key=lambda row: row.bytes)
        yield f"no cache is within the limits of {found.target}; the smallest cache: {smallest.reason}"
        return
    yield f"* recommended: {command}"


def _command(found: CachePlan, options: argparse.Namespace) -> str | None:
    recipe = found.recommended
    if recipe is None:
        return None
    words = [options.source, "cache", "--size", "x".join(map(str, dict.fromkeys((recipe.height, recipe.width))))]
    words += ["--codec", recipe.codec, "--variants", str(recipe.variants)]
    if recipe.bands is not None:
        words += ["--bands", ",".join(map(str, recipe.bands))]
    if found.target is not None:
        words += ["--target", found.target]
    if found.failed:
        words += ["--on-error", "skip"]
    codec_options = {"quality": recipe.quality, "chroma": recipe.chroma}
    for settings in _SHARED:
        for name, each in options_of(settings).items():
            if name not in _COMPARED and (settings is not WorkerOptions or name in _WORKER_OPTIONS):
                words += _words(each, codec_options.get(name, getattr(options, name)))
    return f"{PROG} warmup {shlex.join(words)}"


def _words(each: Option, value: Any) -> list[str]:
    if value is None or value in (each.default, []):
        return []
    if value is True:
        return [each.flag]
    return [word for one in (value if isinstance(value, list) else [value]) for word in (each.flag, str(one))]


def add(commands: Any) -> None:
    """Add the command plan to the parser."""
    command = add_command(
        commands,
        plan,
        "photos/train --for kaggle --device-rate 7500 --sizes 224,384",
        (
            *("--for", "--device-rate", "--sizes", "--codecs", "--variants", "--seconds", "--json"),
            *("--fit", "--augment", "--limit", "--label-col"),
        ),
    )
    command.add_argument("source", metavar="SOURCE", help="a source, as for warmup: a folder, a table, an archive, ...")
    add_device_rate(command)
    lists = {"sizes": list_of(size), "codecs": list_of(str), "variants": list_of(natural)}
    add_options(command, PlanOptions, parsers={**lists, "seconds": rate, "classes": names})
    add_json(command)
    add_options(command, Recipe, without=_COMPARED, parsers={"mask_colours": str})
    add_options(command, BoxOptions)
    add_options(command, SelectionOptions)
    add_options(command, WorkerOptions, only=_WORKER_OPTIONS)
    add_table(command)
