"""The report of a cache: one HTML page that needs nothing else, neither network nor script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.report.page.document import Report, make_page
from tpucache.report.page.frames import frames
from tpucache.report.page.histogram import channel_histogram, size_histogram
from tpucache.report.page.markup import areas_chart, bars, columns_chart, escape, facts, folded, section, table
from tpucache.report.page.usage import usage
from tpucache.report.preview import SAMPLES, VARIANTS
from tpucache.report.records import Records
from tpucache.report.text import outline, size_text

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

_CLASSES: Final = 40  # shown at once; others are folded away
_MOST: Final = 1000  # rows of anything; a page is for looking at
_CHANNELS: Final = {3: ("red", "green", "blue"), 1: ("grey",)}
_USAGE: Final = "From the folder that the cache is in. Reading needs numpy and torch, and no network."


def report_cache(
    cache: str | Path | CachedDataset, samples: int = SAMPLES, *, seed: int = 0, variants: int = VARIANTS
) -> Report:
    """Return a page about a cache: samples, classes, sizes, channels, what was skipped, shards, how it was made.

    At most `samples` are shown in at most `variants` variants, drawn at random as `preview_cache` does; the channels'
    histograms are of 256 records at most. Of a dataset that selects samples both are of those; all else is of the whole
    cache. The page has no script and loads nothing from elsewhere.

    Raises NotACacheError, FormatError or DamageError for the cache, DependencyError without Pillow or the records'
    decoder.
    """
    records = Records(cache)
    parts = (
        _classes(records),
        _sizes(records),
        _channels(records, seed),
        _skipped(records),
        section("How to use it", f"<pre><code>{_lines(usage(records))}</code></pre>", note=_USAGE),
        _making(records),
        _shards(records),
    )
    head = f"{_top(records)}\n{frames(records, samples, seed, variants)}"
    return make_page(records.name, head, parts)


def _top(records: Records) -> str:
    manifest, image = records.manifest, records.image
    figures = [("samples", f"{manifest.samples:,}"), ("records", f"{manifest.records:,}")]
    if manifest.classes:
        figures.append(("classes", f"{len(manifest.classes):,}"))
    if image is not None:
        figures.append(("pixels", f"{image.shape[1]} \u00d7 {image.shape[0]}"))
    figures += [("on disk", size_text(manifest.total_bytes)), ("skipped", f"{len(manifest.skipped):,}")]
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    several = (
        f"a clean variant and {manifest.augmented:,} augmented" if manifest.augmented else "one variant, the clean"
    )
    print_of = f"<code>{escape(manifest.fingerprint[:16])}</code>"
    return (
        f'<div class="top"><h1>{escape(records.name)}</h1><p>Each sample has {several}. Fingerprint {print_of}.</p>'
        f'<dl class="figures">{shown}</dl></div>'
    )


def _classes(records: Records) -> str:
    names, counts = records.manifest.classes, records.manifest.statistics.class_counts
    if not names or len(names) != len(counts):
        return ""
    items = sorted(zip(names, counts, strict=True), key=lambda item: -item[1])
    largest, smallest, total = items[0][1], items[-1][1], records.manifest.samples
    note = f"{len(names):,}, the largest first."
    if smallest == largest:
        note = f"{len(names):,}, with {largest:,} samples each."
    elif smallest:
        note += f" The largest has {largest / smallest:,.1f} times the samples of the smallest."
    elif len(items) > 1:
        note += f" {sum(not count for count in counts):,} without any sample."
    rest = items[_CLASSES : _CLASSES + _MOST]
    folds = folded(f"{len(items) - _CLASSES:,} more classes", bars(rest, largest, total)) if rest else ""
    return section("Classes", bars(items[:_CLASSES], largest, total), folds, note=note)


def _sizes(records: Records) -> str:
    if "source_bytes" not in records.table:
        return ""
    sizes = size_histogram(np.asarray(records.table["source_bytes"]))
    if sizes is None:
        return ""
    scale = "".join(f"<span>{size_text(value)}</span>" for value in (sizes.smallest, sizes.middle, sizes.largest))
    chart = columns_chart(sizes.counts, f"{sizes.counts.sum():,} files by size")
    note = f"Files in the source, {size_text(sizes.median)} the median, {size_text(sizes.total)} in all. The scale is "
    note += "logarithmic."
    return section("Original sizes", f'<div class="chart">{chart}<div class="scale">{scale}</div></div>', note=note)


def _channels(records: Records, seed: int) -> str:
    found, statistics = channel_histogram(records, seed), records.manifest.statistics
    if found is None or records.image is None:
        return ""
    is_byte = records.image.dtype == "|u1"
    styles = _CHANNELS.get(len(found.counts), ("grey",) * len(found.counts))
    names = styles if len(found.counts) in _CHANNELS else [f"channel {each}" for each in range(len(found.counts))]
    chart = areas_chart(found.counts, styles, f"values of the channels {', '.join(names)}")
    middle = 128 if is_byte else (found.least + found.most) / 2
    scale = "".join(f"<span>{value:.6g}</span>" for value in (found.least, middle, found.most))
    rows = [
        (f'<span class="dot {style}"></span>{name}', f"{mean:.2f}", f"{std:.2f}")
        + ((f"{mean / 255:.4f}", f"{std / 255:.4f}") if is_byte else ())
        for style, name, mean, std in zip(styles, names, statistics.mean, statistics.std, strict=False)
    ]
    heads = ("channel", "mean", "std", "mean / 255", "std / 255")[: 5 if is_byte else 3]
    which = "all" if found.records == records.manifest.samples else f"{found.records:,} of the"
    return section(
        "Channels",
        f'<div class="chart">{chart}<div class="scale">{scale}</div></div>',
        table(heads, rows, "tnnnn"[: len(heads)]) if rows else "",
        note=f"The curves are of {which} clean records, mean and deviation of all of them.",
    )


def _skipped(records: Records) -> str:
    skipped = records.manifest.skipped
    if not skipped:
        return ""
    rows = [(escape(skip.path), escape(skip.reason)) for skip in skipped[:_MOST]]
    whole = table(("path", "reason"), rows, "ct", "stacked")
    more = len(skipped) - len(rows)
    note = f"{len(skipped):,} found in the source but not usable."
    if more:
        note += f" {more:,} of them are left out here: <code>python -m tpucache inspect --json</code> lists all."
    return section("Skipped", whole if len(rows) <= 20 else folded("show them", whole), note=note)


def _making(records: Records) -> str:
    manifest = records.manifest
    recipe = {name: value for name, value in manifest.recipe.items() if name != "augmentation" and value is not None}
    pipeline = manifest.recipe.get("augmentation")
    detail = "\n".join(map(escape, outline(pipeline))) if pipeline else ""
    return section(
        "How it was made",
        facts((escape(name), escape(_plain(value))) for name, value in recipe.items()),
        folded("augmentation, step by step", f"<pre><code>{detail}</code></pre>") if detail else "",
        facts((escape(name), escape(value)) for name, value in manifest.created_by.items() if value),
        note="The recipe, and the versions of what carried it out.",
    )


def _shards(records: Records) -> str:
    manifest = records.manifest
    rows = [
        (escape(entry.name), f"{entry.records:,}", size_text(entry.bytes), entry.sha256[:8])
        for entry in manifest.shards[:_MOST]
    ]
    whole = table(("shard", "records", "size", "SHA-256"), rows, "cnnc")
    fields = [
        (escape(f.name), escape(" \u00d7 ".join(map(str, f.shape)) or "any"), escape(f.dtype), escape(f.codec))
        for f in manifest.fields
    ]
    return section(
        "On disk",
        table(("field", "shape", "dtype", "codec"), fields, "tttt"),
        whole if len(rows) <= 12 else folded(f"{len(manifest.shards):,} shards", whole),
        f'<p class="print">Fingerprint <code>{escape(manifest.fingerprint)}</code></p>',
        note=f"{len(manifest.shards):,} shards and {len(manifest.tables)} tables, {manifest.total_bytes:,} bytes.",
    )


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value))  # as --size takes it
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, dict)) else str(value)


def _lines(text: str) -> str:
    """Return text of several lines, each escaped."""
    return "\n".join(map(escape, text.split("\n")))
