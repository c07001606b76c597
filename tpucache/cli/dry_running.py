"""warmup --dry-run: what a warmup would do, without doing it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.cli.terminal import show
from tpucache.store.fields import IMAGE

if TYPE_CHECKING:
    from tpucache.recipe import Recipe
    from tpucache.warmup.options import LabelKind
    from tpucache.warmup.sources import Source
    from tpucache.warmup.trial import DryRun

_NAMED: Final = 5
_SIDE: Final = 160


def run_dry(
    options: argparse.Namespace,
    source: Source,
    recipe: Recipe,
    labels: LabelKind,
    classes: Path | Sequence[str] | None,
) -> int:
    """Print what the warmup of a source would do, and write a contact sheet; no cache is made."""
    from tpucache.warmup.trial import dry_run

    found = dry_run(
        source,
        options.cache,
        recipe,
        jobs=options.jobs,
        labels=labels,
        classes=classes,
        retry=options.retry,
        retry_all=options.retry_all,
        pad=options.pad,
        truncate=options.truncate,
    )
    sheet = _write_sheet(found, options.sheet, str(options.source))
    report = {**found.to_dict(), "sheet": None if sheet is None else str(sheet)}
    show(options, report, _lines(found, sheet))
    return 0


def _lines(found: DryRun, sheet: Path | None) -> list[str]:
    from tpucache.report.inspect import describe_labels

    expected = found.estimate
    lines = [
        f"samples   {found.samples:,}: {_counts(found.files)}",
        f"labels    {describe_labels(found.labels, found.classes, found.class_counts)}",
    ]
    if found.retry:
        lines.append(f"retry     {found.retry['tried_again']:,} of {found.retry['skipped']:,} skipped samples")
    if found.left_out:
        lines.append(f"left out  {sum(found.left_out.values()):,}: {_counts(found.left_out)}")
    lines.append(f"tried     {len(found.tried):,} samples, {len(found.failed):,} cannot be used")
    lines += [f"  {tried.path!r}: {tried.reason}" for tried in found.failed[:_NAMED]]
    if found.sizes:
        (least, low), (width, height), (most, high) = found.size_range().values()
        lines.append(
            f"images    {least:,} to {most:,} wide, {low:,} to {high:,} high, median {width}x{height}; "
            f"{_counts(found.kinds)}"
        )
    lines.append(
        f"estimate  {expected.records:,} records, {expected.bytes / 1e6:,.1f} MB and {expected.spooled / 1e6:,.1f} MB "
        f"of working space, of {expected.free / 1e6:,.0f} MB that are free; {found.seconds:,.0f} s"
    )
    if sheet is not None:
        lines.append(f"sheet     {sheet}")
    return lines


def _counts(counted: Any) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counted.items())


def _write_sheet(found: DryRun, path: Path, source: str) -> Path | None:
    """Write a contact sheet of the samples that were tried; None where they have no images."""
    import numpy as np

    from tpucache.report.draw import Cell, Layout, draw_record, draw_sheet, fitted_size
    from tpucache.report.preview import save_picture
    from tpucache.report.text import describe_label

    cells = []
    for tried in found.tried:
        if IMAGE in tried.clean:
            label = None if tried.label is None else np.asarray(tried.label)
            picture = draw_record(tried.clean, found.classes, _SIDE)
            cells.append(Cell(describe_label(label, found.classes), tried.path, [picture]))
            shape = tried.clean[IMAGE].shape
    if not cells:
        return None
    layout = Layout(len(cells), 1, fitted_size(shape, _SIDE))
    line = f"{found.samples:,} samples, {len(cells)} of them as warmup would make them"
    return save_picture(draw_sheet(layout, source, line, cells), path)
