"""Describes a cache: its contents, its size, and how it was made, as JSON values, as lines of text, and as a page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.recipe import Recipe
from tpucache.report.page import (
    Block,
    Figure,
    Line,
    Page,
    Part,
    Section,
    bars,
    chart,
    code,
    facts,
    make_page,
    make_picture,
    pictures,
    table,
)
from tpucache.report.records import SAMPLES, VARIANTS, Records, describe_label, variant_name
from tpucache.store.cache import annotation_counts
from tpucache.store.fields import IMAGE, LABEL, MASK
from tpucache.store.manifest import Manifest
from tpucache.text import printable, size_text

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

_NAMED: Final = 8
#: The settings of a recipe that also concern records without an image.
_OF_ARRAYS: Final = {"codec", "quality", "shard_mb", "seed", "variants", "augment"}

_CLASSES: Final = 40  # classes that a page shows at first; it shows the other classes on a click
_MOST: Final = 1000  # rows in each table, at most
_FOLDED: Final = 20  # a table of more rows is shown on a click
_BATCH: Final = 256  # batch size in the example code
_STEPS: Final = 28  # in the histogram of file sizes
_VALUES: Final = 256  # in the histogram of channels
_RECORDS: Final = 256  # records whose values are counted, at most
_BYTES: Final = 64 << 20  # bytes of these records, at most
_CHANNELS: Final = {3: ["red", "green", "blue"], 1: ["grey"]}


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return what a cache contains and how it was made, as JSON values; `variants` counts augmented variants only."""
    return {
        "samples": manifest.samples,
        "variants": manifest.augmented,
        "records": manifest.records,
        "shards": len(manifest.shards),
        "version": manifest.number,
        "deleted": len(manifest.deleted),
        "bytes": manifest.total_bytes,
        "fields": [field.to_dict() for field in manifest.fields],
        "classes": list(manifest.classes),
        "labels": dict(_of_source(manifest, "labels")),
        "statistics": dataclasses.asdict(manifest.statistics),
        "skipped": [{"path": skipped.path, "reason": skipped.reason} for skipped in manifest.skipped],
        "left_out": left_out(manifest),
        "annotations": _annotations(manifest),
        "fingerprint": manifest.fingerprint,
        "recipe": dict(manifest.recipe),
        "created_by": dict(manifest.created_by),
    }


def describe_versions(versions: Sequence[Manifest], times: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return each version of a cache and its changes as JSON values, the oldest first; `times` are by identity."""
    return [
        {
            "version": manifest.number,
            "time": times.get(manifest.identity),
            "command": manifest.history.command if manifest.history else "warmup",
            "samples": manifest.samples,
            "variants": manifest.augmented,
            "deleted": len(manifest.deleted),
            "classes": len(manifest.classes),
            "bytes": manifest.total_bytes,
            "identity": manifest.identity,
            "changes": _changes(before, manifest) if before is not None else [],
        }
        for before, manifest in zip([None, *versions], versions, strict=False)
    ]


def _changes(before: Manifest, now: Manifest) -> list[str]:
    deleted, earlier = ({each.number for each in manifest.deleted} for manifest in (now, before))
    gone, back = len(deleted - earlier), len(earlier - deleted)
    counts = {"added": now.samples - before.samples + gone - back, "deleted": gone, "brought back": back}
    texts = [f"{_count(count, 'sample')} {what}" for what, count in counts.items() if count]
    if now.augmented != before.augmented:
        texts.append(f"{_count(now.augmented - before.augmented, 'variant')} added")
    if now.classes != before.classes:
        texts.append(f"classes {len(before.classes)} to {len(now.classes)}")
    if not texts and now.table.sha256 != before.table.sha256:
        texts.append("labels or columns changed")
    return texts


def version_lines(versions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the result of `describe_versions` as lines of text, with the newest version last."""
    return [
        printable(
            f"{each['version']:>4}  {each['time'] or 'time not known':20}  {each['samples']:>9,} samples  "
            f"{each['command']}{': ' if each['changes'] else ''}{', '.join(each['changes'])}"
        )
        for each in versions
    ]


def describe_lines(manifest: Manifest) -> list[str]:
    """Return what a cache contains and how it was made, as lines of text."""
    texts = _fact_texts(manifest)
    lines = [f"{name:<12} {printable(text)}" for name, text in texts.items()]
    if len(manifest.classes) > _NAMED:  # otherwise the line of labels names them all
        lines += _counted(zip(manifest.classes, manifest.statistics.class_counts, strict=False))
    if manifest.skipped:
        lines.append(f"skipped      {len(manifest.skipped):,}")
        lines += [f"  {skipped.path!r}: {printable(skipped.reason)}" for skipped in manifest.skipped]
    if others := left_out(manifest):
        lines.append(f"left out     {sum(others.values()):,} files that are no images by their names")
        lines += _counted(others.items())
    return lines


def _fact_texts(manifest: Manifest) -> dict[str, str]:
    classes, statistics = manifest.classes, manifest.statistics
    recipe = ", ".join(map(" ".join, recipe_texts(manifest).items()))
    fields = (
        f"{field.name} {'x'.join(map(str, field.shape))} {np.dtype(field.dtype).name} {field.codec}"
        for field in manifest.fields
    )
    texts = {
        "samples": f"{manifest.samples:,}{f' in {len(classes)} classes' if classes else ''}",
        "labels": label_text(manifest),
        "records": records_text(manifest),
        "fields": ", ".join(fields),
        "bytes": f"{size_text(manifest.total_bytes)} in {_count(len(manifest.shards), 'shard')}",
        "recipe": f"{recipe}, else the defaults" if recipe else "the defaults",
        "made by": ", ".join(map(" ".join, version_texts(manifest).items())),
    }
    if statistics.mean:
        dtype = next((field.dtype for field in manifest.fields if field.name == IMAGE), "|u1")
        scale = "0 to 255" if dtype == "|u1" else f"of {np.dtype(dtype).name}"
        mean, std = (" ".join(f"{value:.1f}" for value in values) for values in (statistics.mean, statistics.std))
        texts["mean, std"] = f"{mean}; {std} ({scale})"
    texts |= {"fingerprint": manifest.fingerprint, **annotation_texts(manifest)}
    if manifest.parents:
        gone = f", {_count(len(manifest.deleted), 'sample')} deleted since" if manifest.deleted else ""
        texts["version"] = f"{manifest.number}{gone}: `inspect --versions` lists all versions"
    return texts


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _counted(pairs: Iterable[tuple[str, int]]) -> list[str]:
    return [f"  {count:>9,}  {printable(name)}" for name, count in pairs]


def records_text(manifest: Manifest) -> str:
    """Return a text that says how many records a cache has, and which variants they are."""
    records = f"{manifest.records:,} records"
    if not manifest.augmented:
        is_image = IMAGE in {field.name for field in manifest.fields}
        return f"{records}, {'the clean images alone' if is_image else 'one of each'}"
    clean = "the clean one and " if len(manifest.variants) > manifest.augmented else ""
    return f"{records}: {clean}{_count(manifest.augmented, 'augmented variant')} of each"


def recipe_texts(manifest: Manifest) -> dict[str, str]:
    """Return the size, the augmentation and the settings other than the defaults that concern a cache's records."""
    recipe, defaults = manifest.recipe, Recipe().to_dict()
    names = {name for name in recipe if name in ("size", "augment") or recipe[name] != defaults.get(name)}
    if IMAGE not in {field.name for field in manifest.fields}:
        names &= _OF_ARRAYS
    if not manifest.augmented:
        names -= {"augment", "seed"}
    return {name: _setting_text(recipe[name]) for name in recipe if name in names - {"augmentation"}}


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value))
    return "not given" if value is None else "yes" if value is True else str(value)


def version_texts(manifest: Manifest) -> dict[str, str]:
    """Return the versions of the libraries that made a cache."""
    return {name: str(value) for name, value in manifest.created_by.items() if value}


def _of_source(manifest: Manifest, name: str) -> Mapping[str, Any]:
    content = manifest.source.get(name)
    return content if isinstance(content, dict) else {}


def left_out(manifest: Manifest) -> dict[str, int]:
    """Return how many files of the source are not samples, by suffix; empty without valid counts."""
    content = _of_source(manifest, "left_out")
    return dict(content) if all(type(count) is int for count in content.values()) else {}


def _annotations(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return how many annotations of each kind the source, the clean images and each variant have, if known."""
    augmented = [str(variant) for variant in manifest.variants if variant]
    return {
        name: {
            "source": places.get("source"),
            "clean": places.get("0"),
            "variants": [places.get(variant) for variant in augmented],
        }
        for name, places in annotation_counts(manifest).items()
    }


def annotation_texts(manifest: Manifest) -> dict[str, str]:
    """Return a text for each kind of annotation: how many the source has, and how many lie outside of the images."""
    texts = {}
    for name, counts in _annotations(manifest).items():
        given, clean, left = counts["source"], counts["clean"], counts["variants"]
        if given is None or clean is None:
            continue
        text = f"{given:,} in the source, {given - clean:,} of them out of view in the clean images"
        if left and None not in left:
            text += f"; of {clean * len(left):,}, {clean * len(left) - sum(left):,} out of view in augmented images"
        texts["masks" if name == MASK else printable(name)] = text
    return texts


def label_text(manifest: Manifest) -> str:
    """Return one line that says how the samples' labels were read."""
    return describe_labels(_of_source(manifest, "labels"), manifest.classes, manifest.statistics.class_counts)


def describe_labels(read: Mapping[str, Any], classes: Sequence[str], counts: Sequence[int]) -> str:
    """Return one line that says how labels were read; `read` is the manifest's description of labels."""
    kind = read.get("kind")
    if classes and kind != "none":
        return _class_text(classes, counts, kind)
    if kind == "numbers":
        several = f", {_short(read.get('columns'))} a sample," if read.get("columns") != 1 else ""
        return f"numbers{several} from {_short(read.get('least'))} to {_short(read.get('most'))}"
    if kind == "none":
        given = read.get("unused")
        unused = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
        names = f"column{'s' if len(unused) > 1 else ''} {', '.join(map(repr, unused[:_NAMED]))}"
        return f"unlabelled; {names} {'were' if len(unused) > 1 else 'was'} not used" if unused else "unlabelled"
    return "no classes"


def _class_text(names: Sequence[str], counts: Sequence[int], kind: object) -> str:
    pairs = [f"{name} {count:,}" for name, count in zip(names, counts, strict=False)] or list(names)
    more = f" and {len(pairs) - _NAMED:,} more" if len(pairs) > _NAMED else ""
    what = "classes, several a sample" if kind == "multilabel" else "classes"
    whole = [int(name) for name in names if name.isascii() and name.isdecimal()]
    if kind == "classes" and len(whole) == len(names) > 2:
        what += f" named {min(whole)} to {max(whole)} (if they are amounts to predict, give --labels numbers)"
    return f"{len(names):,} {what}: {', '.join(map(printable, pairs[:_NAMED]))}{more}"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else "unknown"


# The page of a cache.


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
    figures = [("samples", f"{manifest.samples:,}"), ("records", f"{manifest.records:,}")]
    if manifest.classes:
        figures.append(("classes", f"{len(manifest.classes):,}"))
    if records.image is not None:
        figures.append(("pixels", "{1} \u00d7 {0}".format(*records.image.shape)))
    figures += [("on disk", size_text(manifest.total_bytes)), ("skipped", f"{len(manifest.skipped):,}")]
    sections = [
        _samples(records, samples, seed, variants),
        _classes(manifest),
        _sizes(records),
        _channels(records, seed),
        _skipped(manifest),
        Section(
            "How to use it", "From the folder that the cache is in. No network is needed.", [code(_usage(records))]
        ),
        _made(manifest),
        _disk(manifest),
    ]
    return make_page(
        "cache",
        [Part(records.name, f"{records_text(manifest)}.", figures, [each for each in sections if each is not None])],
    )


def _samples(records: Records, samples: int, seed: int, variants: int) -> Section | None:
    manifest, labels = records.manifest, records.table.labels
    chosen = records.choose(samples, seed)
    if records.image is None or not chosen:
        return None
    note = f"{len(chosen):,} of {manifest.samples:,}, at random"
    if len(chosen) == manifest.samples:
        note = f"All {len(chosen):,}"
    elif labels is not None and labels.ndim == 1 and manifest.classes:
        note += " from each class in turn"
    shown = manifest.variants[: max(1, variants)]
    if len(manifest.variants) > 1:
        more = len(manifest.variants) - len(shown)
        rest = f", and {more:,} more are in the cache" if more else ""
        note += f". Variants: {', '.join(map(variant_name, shown))}{rest}"
    figures = [_figure(records, position, shown) for position in chosen]
    is_drawn = len(manifest.fields) > 1
    width = min(1080, 170 * len(shown)) if is_drawn else min(560, 72 + 88 * len(shown))
    return Section("Samples", f"{note}.", [pictures(figures, width, 150 if is_drawn else 72)])


def _figure(records: Records, position: int, variants: Sequence[int]) -> Figure:
    classes = records.manifest.classes
    label = describe_label(records.label(position), classes)
    shown = [
        make_picture(records.read(position, variant), classes, f"{label}, {variant_name(variant)}")
        for variant in variants
    ]
    return Figure(shown, [label], [records.table.paths[position]], str(int(records.table.numbers[position])))


def _classes(manifest: Manifest) -> Section | None:
    names, counts = manifest.classes, manifest.statistics.class_counts
    if not names or len(names) != len(counts):
        return None
    pairs = sorted(zip(names, counts, strict=True), key=lambda pair: -pair[1])
    largest, smallest = pairs[0][1], pairs[-1][1]
    note = f"{len(names):,}, the largest first."
    if smallest == largest:
        note = f"{len(names):,}, with {largest:,} samples each."
    elif smallest:
        note += f" The largest has {largest / smallest:,.1f} times the samples of the smallest."
    else:
        note += f" {sum(not count for count in counts):,} without any sample."
    blocks = [bars(pairs[:_CLASSES], largest, manifest.samples)]
    if others := pairs[_CLASSES : _CLASSES + _MOST]:
        blocks.append(bars(others, largest, manifest.samples, folded=f"{len(pairs) - _CLASSES:,} more classes"))
    return Section("Classes", note, blocks)


def _sizes(records: Records) -> Section | None:
    """Return a histogram of the sizes of the source's files on a logarithmic scale; 0 is an unknown size."""
    sizes = np.asarray(records.table.get("source_bytes", ()), np.float64)
    known = sizes[sizes > 0]
    if not len(known):
        return None
    scale = np.geomspace(known.min(), known.max(), 3).tolist()
    counts, _ = np.histogram(np.log(known), _STEPS)
    note = f"Files in the source, {size_text(np.median(known))} the median, {size_text(known.sum())} in all."
    line = Line(f"{len(known):,} files by size, logarithmic", list(enumerate(counts.tolist())))
    return _charted("Original sizes", note, chart("files", [line], [size_text(size) for size in scale], "{:,.0f}"))


def _charted(title: str, note: str, drawn: Block | None) -> Section | None:
    return None if drawn is None else Section(title, note, [drawn])


def _channels(records: Records, seed: int) -> Section | None:
    """Return a histogram of the values of each channel of at most 256 random clean records, or 64 MiB of them."""
    image, manifest = records.image, records.manifest
    if image is None or not len(records.positions):
        return None
    most = max(1, min(_RECORDS, _BYTES // max(1, manifest.layout.nbytes)))
    chosen = np.unique(records.positions)
    if len(chosen) > most:
        chosen = np.sort(np.random.default_rng(seed).choice(chosen, most, replace=False))
    clean = [records.read(position, manifest.variants[0])[image.name] for position in chosen.tolist()]
    values = np.concatenate([pixels.reshape(-1, image.shape[2]) for pixels in clean])
    low, high = values.min().item(), values.max().item()
    steps = min(_VALUES, high - low + 1) if values.dtype.kind == "u" else _VALUES
    names = _CHANNELS.get(image.shape[2], [f"channel {number}" for number in range(image.shape[2])])
    lines = []
    for number, (name, column) in enumerate(zip(names, values.T, strict=True)):
        counts, _ = np.histogram(column, steps, (low, high))
        # Under- and overexposed pixels would flatten the curves between them.
        shares = np.minimum(counts, counts[1:-1].max(initial=1)) / len(column)
        lines.append(Line(name, list(enumerate(shares.tolist())), 25 + 360 * number // len(names)))
    which = "all" if len(chosen) == manifest.samples else f"{len(chosen):,} of the"
    drawn = chart("values of the channels", lines, [f"{low:.6g}", f"{high:.6g}"], "{:.1%}")
    return _charted("Channels", f"The curves show {which} clean records.", drawn)


def _skipped(manifest: Manifest) -> Section | None:
    skipped = manifest.skipped
    if not skipped:
        return None
    note = f"{len(skipped):,} samples were found in the source, but cannot be used."
    if len(skipped) > _MOST:
        note += f" {len(skipped) - _MOST:,} of them are left out here: `tpucache inspect --json` lists all."
    rows = [(skip.path, skip.reason) for skip in skipped[:_MOST]]
    return Section("Skipped", note, [table(("path", "reason"), rows, "ct", _folded(rows, "show them"), "stacked")])


def _folded(rows: Sequence[object], summary: str) -> str:
    return summary if len(rows) > _FOLDED else ""


def _usage(records: Records) -> list[str]:
    """Return Python code, as lines, that reads a cache in batches."""
    manifest = records.manifest
    batch = min(_BATCH, manifest.samples)
    variant = ', variant="epoch"' if manifest.augmented else ""
    if [field.name for field in manifest.fields] == [IMAGE]:
        height, width, channels = manifest.fields[0].shape
        loop = f"images, {'labels' if LABEL in records.table else '_'}"
        comment = f"{np.dtype(manifest.fields[0].dtype).name} ({batch}, {channels}, {height}, {width}), channels last"
    else:
        names = [*(field.name for field in manifest.fields), LABEL]
        loop, comment = "batch", f"a dictionary of tensors: {', '.join(names)}"
    note = "  # another augmented variant every epoch" if variant else ""
    name = json.dumps(records.name, ensure_ascii=False)  # a JSON string is also a Python string
    return [
        "from tpucache import CachedDataset, CachedLoader",
        "",
        f"dataset = CachedDataset({name}{variant}){note}",
        f"for {loop} in CachedLoader(dataset, {batch}, shuffle=True, drop_last=True):",
        f"    ...  # {comment}",
    ]


def _made(manifest: Manifest) -> Section:
    blocks = [facts(_fact_texts(manifest).items())]
    if pipeline := manifest.recipe.get("augmentation"):
        lines = json.dumps(pipeline, ensure_ascii=False, indent=1).splitlines()
        blocks.append(code(lines, "augmentation, step by step"))
    return Section("How it was made", "", blocks)


def _disk(manifest: Manifest) -> Section:
    shards = [
        (entry.name, f"{entry.records:,}", size_text(entry.bytes), entry.sha256[:8])
        for entry in manifest.shards[:_MOST]
    ]
    folded = _folded(shards, f"{len(manifest.shards):,} shards")
    note = f"{len(manifest.shards):,} shards and {len(manifest.tables)} tables, {manifest.total_bytes:,} bytes."
    return Section("On disk", note, [table(("shard", "records", "size", "SHA-256"), shards, "cnnc", folded)])
