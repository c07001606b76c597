"""Describes a cache: its contents, its size, and how it was made, as JSON values, as lines of text, and as a page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.recipe import Recipe
from tpucache.report.page import (
    SAMPLES,
    VARIANTS,
    Block,
    Figure,
    Line,
    Page,
    Part,
    Section,
    bars,
    chart,
    choose,
    image_field,
    make_page,
    name_of,
    show,
    table,
    to_dataset,
    variant_name,
)
from tpucache.store.cache import annotation_counts
from tpucache.store.fields import IMAGE, LABEL, MASK
from tpucache.store.manifest import Manifest
from tpucache.text import named, printable, size_text

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

_NAMED: Final = 8

_BATCH: Final = 256  # batch size in the example code
_STEPS: Final = 28  # in the histogram of file sizes
_VALUES: Final = 256  # in the histogram of channels
_RECORDS: Final = 256  # records whose values are counted, at most
_BATCHES: Final = 16  # of these records, at most: 64 MB
_COLOURS: Final = ["red", "green", "blue"]


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return what a cache contains and how it was made, as JSON values; `variants` counts augmented variants only."""
    stored = json.loads(manifest.to_json())
    names = ("samples", "fields", "classes", "statistics", "skipped", "fingerprint", "recipe", "created_by")
    return {
        **{name: stored[name] for name in names},
        "variants": manifest.augmented,
        "records": manifest.records,
        "shards": len(manifest.shards),
        "version": manifest.number,
        "deleted": len(manifest.deleted),
        "bytes": manifest.total_bytes,
        "labels": _of_source(manifest, "labels"),
        "left_out": _of_source(manifest, "left_out"),
        "annotations": _annotations(manifest),
    }


def describe_versions(versions: Sequence[Manifest], times: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "version": manifest.number,
            "time": times.get(manifest.identity),
            "command": manifest.history.command if manifest.history else "warmup",
            "identity": manifest.identity,
            **_sizes_of(manifest),
            "changes": _changes(before, manifest),
        }
        for before, manifest in zip([*versions[:1], *versions], versions, strict=False)
    ]


def _sizes_of(manifest: Manifest) -> dict[str, int]:
    return {"samples": manifest.samples, "variants": manifest.augmented, "classes": len(manifest.classes)}


def _changes(before: Manifest, now: Manifest) -> list[str]:
    earlier = _sizes_of(before)
    texts = [f"{size - earlier[name]:+,} {name}" for name, size in _sizes_of(now).items() if size != earlier[name]]
    is_other = (before.table.sha256, before.classes) != (now.table.sha256, now.classes)
    return texts or (["labels or columns changed"] if is_other else [])


def version_lines(versions: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        printable(
            f"{each['version']:>4}  {each['time'] or 'time not known':20}  {each['samples']:>9,} samples  "
            f"{each['command']}{': ' if each['changes'] else ''}{', '.join(each['changes'])}"
        )
        for each in versions
    ]


def describe_lines(manifest: Manifest, *, lists_classes: bool = False) -> list[str]:
    """Return what a cache contains and how it was made, as lines of text."""
    lines = [f"{name:<12} {text}" for name, text in facts_of(manifest).items()]
    if lists_classes:  # but those that the line of labels names
        counted = zip(manifest.classes[_NAMED:], manifest.statistics.class_counts[_NAMED:], strict=False)
        lines += [f"  {count:>9,}  {name}" for name, count in counted]
    return list(map(printable, [*lines, *(f"  {skipped.path!r}: {skipped.reason}" for skipped in manifest.skipped)]))


def facts_of(manifest: Manifest) -> dict[str, str]:
    """Return the facts about a cache by name, as text: what it contains, and how it was made."""
    fields = [
        f"{field.name} {'x'.join(map(str, field.shape))} {np.dtype(field.dtype).name} {field.codec}"
        for field in manifest.fields
    ]
    mean, std = (
        " ".join(f"{value:.1f}" for value in each) for each in (manifest.statistics.mean, manifest.statistics.std)
    )
    gone = f", {_count(len(manifest.deleted), 'sample')} deleted since" if manifest.deleted else ""
    others = _of_source(manifest, "left_out")
    texts = {
        "samples": f"{manifest.samples:,}",
        "labels": label_text(manifest),
        "records": records_text(manifest),
        "fields": ", ".join(fields),
        "bytes": f"{size_text(manifest.total_bytes)} in {_count(len(manifest.shards), 'shard')}",
        "recipe": _joined(recipe_texts(manifest).items()) or "the defaults",
        "made by": _joined((name, version) for name, version in manifest.created_by.items() if version),
        "mean, std": mean and f"{mean}; {std}",
        "fingerprint": manifest.fingerprint,
        **annotation_texts(manifest),
        "version": f"{manifest.number}{gone}: `inspect --versions` lists all versions" if manifest.parents else "",
        "skipped": f"{len(manifest.skipped):,}" if manifest.skipped else "",
        "left out": f"files that are no images by their names: {_joined(others.items())}" if others else "",
    }
    return {name: text for name, text in texts.items() if text}


def _joined(pairs: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def records_text(manifest: Manifest) -> str:
    if not manifest.augmented:
        return f"{manifest.records:,} records, one of each"
    clean = "the clean one and " if len(manifest.variants) > manifest.augmented else ""
    return f"{manifest.records:,} records: {clean}{_count(manifest.augmented, 'augmented variant')} of each"


def recipe_texts(manifest: Manifest) -> dict[str, str]:
    defaults, has_images = Recipe().to_dict(), manifest.fields[0].name == IMAGE
    is_shown = {"size": has_images, "augment": manifest.augmented > 0, "augmentation": False}
    return {
        name: _setting_text(value)
        for name, value in manifest.recipe.items()
        if is_shown.get(name, value != defaults.get(name))
    }


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value))
    return "not given" if value is None else "yes" if value is True else str(value)


def _of_source(manifest: Manifest, name: str) -> dict[str, Any]:
    content = manifest.source.get(name)
    return content if isinstance(content, dict) else {}


def _annotations(manifest: Manifest) -> dict[str, dict[str, Any]]:
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
    texts = {}
    for name, counts in _annotations(manifest).items():
        given, clean, left = counts.values()
        if given is None or clean is None:
            continue
        text = f"{given:,} in the source, {given - clean:,} of them out of view in the clean images"
        if left and None not in left:
            text += f"; of {clean * len(left):,}, {clean * len(left) - sum(left):,} out of view in augmented images"
        texts["masks" if name == MASK else name] = text
    return texts


def label_text(manifest: Manifest) -> str:
    """Return one line that says how the samples' labels were read."""
    return describe_labels(_of_source(manifest, "labels"), manifest.classes, manifest.statistics.class_counts)


def describe_labels(read: Mapping[str, Any], classes: Sequence[str], counts: Sequence[int]) -> str:
    """Return one line that says how labels were read; `read` is the manifest's description of labels."""
    kind, columns, least, most, unused = map(read.get, ("kind", "columns", "least", "most", "unused"))
    if kind == "none":
        names = ", ".join(map(repr, unused[:_NAMED])) if isinstance(unused, list) else ""
        return f"unlabelled; columns that were not used: {names}" if names else "unlabelled"
    if not classes and kind != "numbers":
        return "no classes"
    if not classes:
        return f"numbers{'' if columns == 1 else f', {columns} a sample,'} from {_short(least)} to {_short(most)}"
    pairs = [f"{name} {count:,}" for name, count in zip(classes, counts, strict=False)] or classes
    what = "classes, several a sample" if kind == "multilabel" else "classes"
    whole = [int(name) for name in classes if name.isascii() and name.isdecimal()]
    if kind == "classes" and len(whole) == len(classes) > 2:
        what += f" named {min(whole)} to {max(whole)} (if they are amounts to predict, give --labels numbers)"
    return f"{len(classes):,} {what}: {named(map(printable, pairs), _NAMED)}"


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
    dataset = to_dataset(cache)
    manifest = dataset.manifest
    figures = {"samples": f"{manifest.samples:,}", "records": f"{manifest.records:,}"}
    sections = []
    if manifest.classes:
        figures["classes"] = f"{len(manifest.classes):,}"
    if IMAGE in dataset.names:
        height, width, _ = image_field(dataset).shape
        figures["pixels"] = f"{width} \u00d7 {height}"
        if len(dataset):
            sections = [_pictures(dataset, choose(dataset, samples, seed), variants), _channels(dataset, seed)]
    figures |= {"on disk": size_text(manifest.total_bytes), "skipped": f"{len(manifest.skipped):,}"}
    made = [Block("facts", facts_of(manifest).items())]
    if pipeline := manifest.recipe.get("augmentation"):
        steps = json.dumps(pipeline, ensure_ascii=False, indent=1).splitlines()
        made.append(Block("code", steps, "augmentation, step by step"))
    rows = [(entry.name, f"{entry.records:,}", size_text(entry.bytes), entry.sha256[:8]) for entry in manifest.shards]
    note = f"{len(rows):,} shards and {len(manifest.tables)} tables, {manifest.total_bytes:,} bytes."
    sections += [
        *_classes(manifest),
        *_sizes(dataset),
        *_skipped(manifest),
        Section("How to use it", "From the folder that the cache is in. No network is needed.", [_usage(dataset)]),
        Section("How it was made", "", made),
        Section("On disk", note, [table(("shard", "records", "size", "SHA-256"), rows, "cnnc")]),
    ]
    return make_page("cache", [Part(name_of(dataset), f"{records_text(manifest)}.", [*figures.items()], sections)])


def _pictures(dataset: CachedDataset, chosen: Sequence[int], variants: int) -> Section:
    from tpucache.report.preview import make_picture

    manifest, figures = dataset.manifest, []
    names = {variant: variant_name(variant) for variant in manifest.variants[: max(1, variants)]}
    for position in chosen:
        label, path, records = show(dataset, position, [*names])
        drawn = [
            make_picture(fields, manifest.classes, f"{label}, {name}")
            for fields, name in zip(records, names.values(), strict=True)
        ]
        figures.append(Figure(drawn, [label], [path], str(dataset.table.numbers[position])))
    note = (
        f"{len(chosen):,} of {manifest.samples:,} at random, from each class in turn. Variants: "
        f"{', '.join(names.values())}, of {len(manifest.variants):,} in the cache."
    )
    return Section("Samples", note, [Block("pictures", figures)])


def _channels(dataset: CachedDataset, seed: int) -> Section:
    clean = dataset.in_variant(dataset.manifest.variants[0]).select(choose(dataset, _RECORDS, seed))
    values = np.concatenate([*itertools.islice(clean.field_batches(IMAGE), _BATCHES)])
    low, high, channels = values.min().item(), values.max().item(), values.shape[3]
    steps = min(_VALUES, high - low + 1) if values.dtype.kind == "u" else _VALUES
    lines = []
    for number in range(channels):
        counts, _ = np.histogram(values[..., number], steps, (low, high))
        # Under- and overexposed pixels would flatten the curves between them.
        points = zip(np.linspace(low, high, steps), counts.clip(max=counts[1:-1].max(initial=1)), strict=True)
        name = _COLOURS[number] if channels == len(_COLOURS) else f"channel {number}"
        lines.append(Line(name, [*points], 25 + 360 * number // channels))
    drawn = chart("pixels by the values of their channels", lines)
    return Section("Channels", f"The curves show {len(values):,} of the clean records.", [drawn])


def _classes(manifest: Manifest) -> Iterator[Section]:
    if counts := dict(zip(manifest.classes, manifest.statistics.class_counts, strict=False)):
        most, least = max(counts.values()), min(counts.values())
        note = f"{len(counts):,}, the largest first: {most:,} to {least:,} samples."
        yield Section("Classes", note, [bars(counts, manifest.samples)])


def _sizes(dataset: CachedDataset) -> Iterator[Section]:
    sizes = np.asarray(dataset.table.get("source_bytes", ()), np.float64)
    if (known := sizes[sizes > 0]).size:
        counts, ends = np.histogram(np.log(known), _STEPS)
        scale = [size_text(np.exp(ends[at])) for at in (0, _STEPS // 2, _STEPS)]
        note = f"Files in the source, {size_text(np.median(known))} the median, {size_text(known.sum())} in all."
        line = Line(f"{len(known):,} files by size, logarithmic", [*enumerate(counts)])
        yield Section("Original sizes", note, [chart("files", [line], scale)])


def _skipped(manifest: Manifest) -> Iterator[Section]:
    if skipped := manifest.skipped:
        note = f"{len(skipped):,} samples were found in the source, but cannot be used."
        rows = [(skip.path, skip.reason) for skip in skipped]
        yield Section("Skipped", note, [table(("path", "reason"), rows, "ct")])


def _usage(dataset: CachedDataset) -> Block:
    variant = ', variant="epoch"' if dataset.manifest.augmented else ""
    what = ", ".join([*dataset.names, LABEL])
    name = json.dumps(name_of(dataset), ensure_ascii=False)  # a JSON string is also a Python string
    batch = min(_BATCH, dataset.manifest.samples)
    lines = [
        "from tpucache import CachedDataset, CachedLoader",
        "",
        f"dataset = CachedDataset({name}{variant})",
        f"for batch in CachedLoader(dataset, {batch}, shuffle=True, drop_last=True):",
        f"    ...  # {'images, labels' if dataset.names == [IMAGE] else f'a dictionary of tensors: {what}'}",
    ]
    return Block("code", lines)
