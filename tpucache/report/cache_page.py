"""The page of a cache: samples, classes, sizes, channels, skipped files, how to read the cache and how it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.loading.reading.views import in_resolution, kept_resolution
from tpucache.report.inspect import recipe_texts
from tpucache.report.page import (
    Figure,
    Page,
    Sheet,
    Tick,
    areas_chart,
    columns_chart,
    look_of,
    make_bars,
    make_page,
    make_picture,
)
from tpucache.report.preview import SAMPLES, VARIANTS, variant_name
from tpucache.report.records import Records
from tpucache.report.text import describe_label, outline
from tpucache.store.fields import IMAGE, LABEL
from tpucache.units import size_text

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

_CLASSES: Final = 40  # classes that are shown at first; the page shows the other classes on a click
_MOST: Final = 1000  # rows in each table, at most
_BATCH: Final = 256  # batch size in the example code

_CHANNELS: Final = {3: ("red", "green", "blue"), 1: ("grey",)}
_RECORDS: Final = 256  # records whose values are counted, at most
_BYTES: Final = 64 << 20  # bytes of these records, at most
_VALUES: Final = 256
_SIZES: Final = 28  # steps in the histogram of file sizes


def report_cache(
    cache: str | Path | CachedDataset, samples: int = SAMPLES, *, seed: int = 0, variants: int = VARIANTS
) -> Page:
    """Return a page about a cache: samples, classes, sizes, channels, skipped files, shards, and how it was made.

    At most `samples` samples are shown, each in at most `variants` variants, chosen at random as by `preview_cache`.
    The histograms of channels count at most 256 records. For a dataset with a selection of samples, the shown samples
    and the histograms are from this selection; the rest of the page is about the whole cache. The page has no script
    and loads nothing from elsewhere.

    Raises NotACacheError, FormatError or DamageError for the cache, and DependencyError without jinja2, Pillow or the
    records' decoder.
    """
    records = Records(cache)
    manifest = records.manifest
    several = (
        f"a clean variant and {manifest.augmented:,} augmented" if manifest.augmented else "one variant, the clean"
    )
    pipeline = manifest.recipe.get("augmentation")
    values = {
        "figures": _figures(records),
        "variants": several,
        "fingerprint": manifest.fingerprint,
        "sheet": _sheet(records, samples, seed, variants),
        "classes": _classes(records),
        "sizes": _sizes(records),
        "channels": _channels(records, seed),
        "skipped": _skipped(records),
        "usage": usage_lines(records),
        "recipe": [*(recipe_texts(manifest) or {"recipe": "the defaults"}).items()],
        "pipeline": outline(pipeline) if pipeline else (),
        "made_by": [(name, value) for name, value in manifest.created_by.items() if value],
        "disk": _disk(records),
    }
    return make_page("cache.html", records.name, values)


def _figures(records: Records) -> list[tuple[str, str]]:
    manifest, image = records.manifest, records.image
    figures = [("samples", f"{manifest.samples:,}"), ("records", f"{manifest.records:,}")]
    if manifest.classes:
        figures.append(("classes", f"{len(manifest.classes):,}"))
    if image is not None:
        figures.append(("pixels", f"{image.shape[1]} \u00d7 {image.shape[0]}"))
    return [*figures, ("on disk", size_text(manifest.total_bytes)), ("skipped", f"{len(manifest.skipped):,}")]


def _sheet(records: Records, samples: int, seed: int, variants: int) -> Sheet | None:
    manifest, image = records.manifest, records.image
    chosen = records.choose(samples, seed) if image is not None else []
    if image is None or not chosen:
        return None
    shown = manifest.variants[: max(1, variants)]
    look = look_of(manifest, image)
    width = min(1080, 170 * len(shown)) if look == "drawn" else min(560, 72 + 88 * len(shown))
    figures = [_figure(records, position, shown, look) for position in chosen]
    return Sheet(_sheet_note(records, len(chosen), shown), figures, look, width)


def _sheet_note(records: Records, count: int, shown: Sequence[int]) -> str:
    labels, manifest = records.table.labels, records.manifest
    note = f"All {count:,}" if count == manifest.samples else f"{count:,} of {manifest.samples:,}, at random"
    if count < manifest.samples and labels is not None and labels.ndim == 1 and manifest.classes:
        note += " from each class in turn"
    if len(manifest.variants) == 1:
        return f"{note}."
    more = len(manifest.variants) - len(shown)
    rest = f", and {more:,} more are in the cache" if more else ""
    return f"{note}. Variants: {', '.join(map(variant_name, shown))}{rest}."


def _figure(records: Records, position: int, variants: Sequence[int], look: str) -> Figure:
    classes = records.manifest.classes
    label = describe_label(records.label(position), classes)
    pictures = [
        make_picture(records.read(position, variant), classes, look, f"{label}, {variant_name(variant)}")
        for variant in variants
    ]
    return Figure(pictures, label, str(int(records.table.numbers[position])), records.table.paths[position])


def _classes(records: Records) -> dict[str, Any] | None:
    names, counts = records.manifest.classes, records.manifest.statistics.class_counts
    if not names or len(names) != len(counts):
        return None
    pairs = sorted(zip(names, counts, strict=True), key=lambda pair: -pair[1])
    largest, smallest, total = pairs[0][1], pairs[-1][1], records.manifest.samples
    note = f"{len(names):,}, the largest first."
    if smallest == largest:
        note = f"{len(names):,}, with {largest:,} samples each."
    elif smallest:
        note += f" The largest has {largest / smallest:,.1f} times the samples of the smallest."
    elif len(pairs) > 1:
        note += f" {sum(not count for count in counts):,} without any sample."
    return {
        "note": note,
        "first": make_bars(pairs[:_CLASSES], largest, total),
        "others": make_bars(pairs[_CLASSES : _CLASSES + _MOST], largest, total),
        "more": f"{len(pairs) - _CLASSES:,} more classes",
    }


def _sizes(records: Records) -> dict[str, Any] | None:
    sizes = size_histogram(np.asarray(records.table["source_bytes"])) if "source_bytes" in records.table else None
    if sizes is None:
        return None
    note = f"Files in the source, {size_text(sizes.median)} the median, {size_text(sizes.total)} in all. The scale is "
    scale = [Tick(0, size_text(sizes.smallest)), Tick(50, size_text(sizes.middle)), Tick(100, size_text(sizes.largest))]
    chart = columns_chart(sizes.counts, f"{sizes.counts.sum():,} files by size", scale)
    return {"note": f"{note}logarithmic.", "chart": chart}


@dataclass(frozen=True)
class SizeHistogram:
    """A histogram of file sizes in bytes, in steps of equal ratio from the smallest to the largest size.

    `counts` has the number of files in each step, int64 (steps,). `middle` is the size in the middle of this scale,
    `median` the median size, and `total` the sum of all sizes.
    """

    counts: npt.NDArray[np.int64]
    smallest: int
    middle: int
    largest: int
    median: int
    total: int


def size_histogram(sizes: npt.NDArray[Any]) -> SizeHistogram | None:
    """Return a histogram of file sizes in bytes, in steps of equal ratio; None if no size is known.

    A size of 0 is unknown, and left out.
    """
    known = sizes[sizes > 0].astype(np.float64)
    if not len(known):
        return None
    low, high = known.min(), known.max()
    steps = _SIZES if high > low else 1
    places = np.log(known / low) / max(np.log(high / low), np.finfo(float).tiny) * steps
    counts = np.bincount(np.minimum(places.astype(np.int64), steps - 1), minlength=steps)
    middle = float(np.sqrt(low * high))
    return SizeHistogram(counts, int(low), int(middle), int(high), int(np.median(known)), int(known.sum()))


def _channels(records: Records, seed: int) -> dict[str, Any] | None:
    found, statistics = channel_histogram(records, seed), records.manifest.statistics
    if found is None or records.image is None:
        return None
    is_byte = records.image.dtype == "|u1"
    styles = _CHANNELS.get(len(found.counts), ("grey",) * len(found.counts))
    names = styles if len(found.counts) in _CHANNELS else [f"channel {each}" for each in range(len(found.counts))]
    middle = 128 if is_byte else (found.least + found.most) / 2
    scale = [Tick(0, f"{found.least:.6g}"), Tick(50, f"{middle:.6g}"), Tick(100, f"{found.most:.6g}")]
    which = "all" if found.records == records.manifest.samples else f"{found.records:,} of the"
    rows = [
        (
            style,
            name,
            (f"{mean:.2f}", f"{std:.2f}", *((f"{mean / 255:.4f}", f"{std / 255:.4f}") if is_byte else ())),
        )
        for style, name, mean, std in zip(styles, names, statistics.mean, statistics.std, strict=False)
    ]
    return {
        "note": f"The curves show {which} clean records; mean and deviation are those of all records.",
        "chart": areas_chart(found.counts, styles, f"values of the channels {', '.join(names)}", scale),
        "heads": ("channel", "mean", "std", "mean / 255", "std / 255")[: 5 if is_byte else 3],
        "rows": rows,
    }


@dataclass(frozen=True)
class Channels:
    """How often each value occurs in each channel of `records` records of the first variant: int64 (channels, 256).

    Values are counted in 256 equal steps from `least` to `most`.
    """

    counts: npt.NDArray[np.int64]
    records: int
    least: float
    most: float


def channel_histogram(records: Records, seed: int = 0) -> Channels | None:
    """Return how often values occur in each channel of random clean records; None for a cache without images.

    At most 256 records are read, or 64 MiB of them.
    """
    image = records.image
    if image is None or not len(records.positions):
        return None
    most = max(1, min(_RECORDS, _BYTES // max(1, records.manifest.layout.nbytes)))
    chosen = np.unique(records.positions)
    if len(chosen) > most:
        chosen = np.sort(np.random.default_rng(seed).choice(chosen, most, replace=False))
    clean = [records.read(position, records.manifest.variants[0])[image.name] for position in chosen.tolist()]
    is_byte = image.dtype == "|u1"
    lowest = 0.0 if is_byte else float(min(pixels.min() for pixels in clean))
    highest = 255.0 if is_byte else float(max(pixels.max() for pixels in clean))
    counts = np.zeros((image.shape[2], _VALUES), np.int64)
    for pixels in clean:
        places = pixels if is_byte else _places(pixels, lowest, highest)
        for channel in range(image.shape[2]):
            counts[channel] += np.bincount(places[..., channel].reshape(-1), minlength=_VALUES)
    return Channels(counts, len(chosen), lowest, highest)


def _places(pixels: npt.NDArray[Any], least: float, most: float) -> npt.NDArray[np.int64]:
    """Return the bin of each number, 0 to 255; 256 equal bins divide the range from `least` to `most`."""
    shares = (pixels.astype(np.float64) - least) / max(most - least, np.finfo(np.float64).tiny)
    return np.asarray(np.minimum(shares * _VALUES, _VALUES - 1), np.int64)


def _skipped(records: Records) -> dict[str, Any] | None:
    skipped = records.manifest.skipped
    if not skipped:
        return None
    return {
        "note": f"{len(skipped):,} samples were found in the source, but cannot be used.",
        "rows": [(skip.path, skip.reason) for skip in skipped[:_MOST]],
        "more": f"{len(skipped) - _MOST:,}" if len(skipped) > _MOST else "",
    }


def usage_lines(records: Records) -> list[str]:
    """Return Python code, as lines, that reads a cache in batches; it runs in the folder that contains the cache."""
    resolution = kept_resolution(records.manifest)
    manifest = in_resolution(records.manifest, resolution, None)
    batch = min(_BATCH, manifest.samples)
    variant = ', variant="epoch"' if manifest.augmented else ""
    size = "" if resolution is None else f", resolution={resolution}"
    labelled = "labels" if LABEL in records.table else "_"
    if [field.name for field in manifest.fields] == [IMAGE]:
        height, width, channels = manifest.fields[0].shape
        dtype = np.dtype(manifest.fields[0].dtype).name
        loop, comment = f"images, {labelled}", f"{dtype} ({batch}, {channels}, {height}, {width}), channels last"
    else:
        names = [*(field.name for field in manifest.fields), LABEL]
        loop, comment = "batch", f"a dictionary of tensors: {', '.join(names)}"
    note = "  # another augmented variant every epoch" if variant else ""
    name = json.dumps(records.name, ensure_ascii=False)  # a JSON string is also a Python string
    return [
        "from tpucache import CachedDataset, CachedLoader",
        "",
        f"dataset = CachedDataset({name}{variant}{size}){note}",
        f"for {loop} in CachedLoader(dataset, {batch}, shuffle=True, drop_last=True):",
        f"    ...  # {comment}",
    ]


def _disk(records: Records) -> dict[str, Any]:
    manifest = records.manifest
    return {
        "note": f"{len(manifest.shards):,} shards and {len(manifest.tables)} tables, {manifest.total_bytes:,} bytes.",
        "summary": f"{len(manifest.shards):,} shards",
        "shards": [
            (entry.name, f"{entry.records:,}", size_text(entry.bytes), entry.sha256[:8])
            for entry in manifest.shards[:_MOST]
        ],
        "fields": [
            (field.name, " \u00d7 ".join(map(str, field.shape)) or "any", np.dtype(field.dtype).name, field.codec)
            for field in manifest.fields
        ],
    }
