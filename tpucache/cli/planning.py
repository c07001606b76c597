"""plan: which codec, size and number of variants a cache should have."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any, Final

from tpucache.cli.arguments import (
    add_command,
    add_json,
    add_options,
    colours,
    from_options,
    list_of,
    names,
    natural,
    positive,
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
from tpucache.warmup.build_options import CODECS_COMPARED, BoxOptions, BuildOptions, SelectionOptions, WorkerOptions
from tpucache.warmup.sources.table import TableOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpucache.planning import CachePlan, PlanRow

#: What is compared, or says how a cache is laid out: the other parts of a recipe are given.
_COMPARED: Final = ("size", "variants", "codec", "bands", "shard_mb")
_OF_SAMPLES: Final = ("labels", "classes", "pad", "truncate")
#: The options that warmup has, too: those of these names, or all.
_KEPT: Final[dict[type, tuple[str, ...]]] = {
    Recipe: (),
    SelectionOptions: (),
    BoxOptions: (),
    BuildOptions: _OF_SAMPLES,
    WorkerOptions: ("jobs",),
    TableOptions: (),
}
_NAMED: Final = 5


def plan(options: argparse.Namespace) -> int:
    """Compare codecs, sizes and variants by a few samples of a source, and say which warmup to run."""
    from tpucache.planning import plan_cache

    others = {name: each.default for name, each in options_of(Recipe).items() if name in _COMPARED}
    if options.quality is not None or options.chroma is not None:
        others["codec"] = next(name for name in CODECS.own if CODECS[name].chromas)  # it takes both
    if options.mask_colours is not None:
        others["mask_colours"] = colours(options.mask_colours)
    found = plan_cache(
        selected_source(options),
        from_options(Recipe, options, **others),
        sizes=options.sizes,
        codecs=options.codecs,
        variants=options.variants,
        target=options.target,
        device_rate=options.device_rate,
        seconds=options.seconds,
        jobs=options.jobs,
        threads=options.threads,
        labels=options.labels,
        classes=options.classes,
        pad=options.pad,
        truncate=options.truncate,
        on_progress=tell,
    )
    command = _command(found, options)
    show(options, {**found.to_dict(), "command": command}, [*_lines(found), *_advice(found, command)])
    return 0


def _lines(found: CachePlan) -> Iterator[str]:
    """Yield the table, and what it is measured by."""
    yield (
        f"measured in {found.seconds:,.0f} s on {found.tried:,} of the {found.samples:,} samples of this source, with "
        f"{found.workers} workers and {found.threads} reading threads; GB and minutes are estimates for all samples"
    )
    if found.failed:
        yield f"{len(found.failed):,} of these samples cannot be used:"
        yield from (f"  {path!r}: {reason}" for path, reason in found.failed[:_NAMED])
    yield from (f"left out: {codec}: {reason}" for codec, reason in found.left_out.items())
    has_rate, has_target = found.device_rate is not None, found.target is not None
    table = [["", "codec", "stored", "read as", "variants", "GB", "minutes", "kB read", "sent", "images/s", "from"]]
    table[0] += [*(["idle"] if has_rate else []), "PSNR, dB", *(["fits"] if has_target else [])]
    for row in found.rows:
        cells = ["*" if found.is_recommended(row) else "", row.codec, _side(row.size)]
        cells += [_side(row.resolution or row.size), f"{row.variants}", _gigabytes(row.bytes)]
        cells += [f"{row.seconds / 60:,.1f}", f"{row.bytes_per_image / 1000:,.1f}"]
        cells += [f"{row.batch_bytes_per_image / 1000:,.0f}", f"{row.images_per_second:,.0f}"]
        cells += ["memory" if row.reading == "keep" else "files"]
        cells += [f"{row.idle:.1%}"] if row.idle is not None else []
        cells += ["exact" if row.psnr is None else f"{row.psnr:.1f}"]
        cells += [("yes" if row.fits else "no")] if has_target else []
        if row.bands is not None:
            cells[1] += " in bands"
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    is_text = (True, True, True, True, *[False] * (len(widths) - 4))
    for cells in table:
        aligned = (
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(cells, widths, is_text, strict=True)
        )
        yield "  ".join(aligned).rstrip()


def _side(shape: tuple[int, int]) -> str:
    return f"{shape[0]}" if shape[0] == shape[1] else f"{shape[0]}x{shape[1]}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.{1 if size > 1e10 else 2 if size > 1e9 else 3}f}"


def _advice(found: CachePlan, command: str | None) -> Iterator[str]:
    """Yield what to run, or why nothing can be."""
    if command is None:
        smallest: PlanRow = min(found.rows, key=lambda row: row.bytes)
        yield f"none keeps within the limits of {found.target}; of the smallest: {smallest.reason}"
        return
    yield f"* recommended: {command}"


def _command(found: CachePlan, options: argparse.Namespace) -> str | None:
    """Return the warmup that makes the recommended cache, with the options that were given; None without one."""
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
    of_codec = {"quality": recipe.quality, "chroma": recipe.chroma}
    for settings, only in _KEPT.items():
        for name, each in options_of(settings).items():
            if name not in _COMPARED and name in (only or options_of(settings)):
                words += _words(each, of_codec.get(name, getattr(options, name)))
    return f"{PROG} warmup {shlex.join(words)}"


def _words(each: Option, value: Any) -> list[str]:
    """Return an option as it is typed; nothing where it has its default."""
    if value is None or value in (each.default, []):
        return []
    if value is True:
        return [each.flag]
    return [word for one in (value if isinstance(value, list) else [value]) for word in (each.flag, str(one))]


def add(commands: Any) -> None:
    """Add plan."""
    command = add_command(
        commands,
        plan,
        "photos/train --for kaggle --device-rate 7500 --sizes 224,384",
        (
            *("--for", "--device-rate", "--sizes", "--codecs", "--variants", "--seconds", "--json"),
            *("--fit", "--augment", "--limit", "--label-col"),
        ),
    )
    command.add_argument("source", metavar="SOURCE", help="what warmup reads: a folder, a table, an archive, ...")
    command.add_argument(
        "--for", dest="target", choices=["kaggle"], help="where the cache is to fit: 20 GB and 44 shards"
    )
    command.add_argument("--device-rate", type=rate, metavar="N", help="images/s of an accelerator to simulate")
    command.add_argument(
        "--sizes",
        type=list_of(size),
        default=[224],
        metavar="N,N",
        help="sizes of images to compare, N or HxW; with several, the largest one is also stored in bands",
    )
    command.add_argument(
        "--codecs",
        type=list_of(str),
        default=[*CODECS_COMPARED],
        metavar="NAME,NAME",
        help="codecs to compare, as --codec of warmup",
    )
    command.add_argument(
        "--variants", type=list_of(natural), default=[0, 4], metavar="K,K", help="numbers of augmented variants"
    )
    command.add_argument("--seconds", type=rate, default=30.0, metavar="N", help="about how long to measure")
    command.add_argument("--threads", type=positive, default=2, metavar="N", help="threads that read")
    add_json(command)
    add_options(command, Recipe, without=_COMPARED, parsers={"mask_colours": str})
    add_options(command, BoxOptions)
    add_options(command, SelectionOptions)
    add_options(command, BuildOptions, only=_OF_SAMPLES, parsers={"classes": names})
    add_options(command, WorkerOptions, only=["jobs"])
    add_table(command)
