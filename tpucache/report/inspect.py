"""Describes a cache: its contents, its size, and how it was made, as JSON values, as lines of text, and as a page."""

from __future__ import annotations

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
    Records,
    Section,
    bars,
    chart,
    code,
    facts,
    make_page,
    pictures,
    table,
    variant_name,
)
from tpucache.store.cache import annotation_counts
from tpucache.store.fields import IMAGE, LABEL, MASK
from tpucache.store.manifest import Manifest
from tpucache.text import printable, size_text

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

_NAMED: Final = 8

_CLASSES: Final = 40  # classes that a page shows at first; it shows the other classes on a click
_MOST: Final = 1000  # rows in each table, at most
_BATCH: Final = 256  # batch size in the example code
_STEPS: Final = 28  # in the histogram of file sizes
_VALUES: Final = 256  # in the histogram of channels
_RECORDS: Final = 256  # records whose values are counted, at most
_BYTES: Final = 64 << 20  # bytes of these records, at most
_CHANNELS: Final = {3: ["red", "green", "blue"], 1: ["grey"]}


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
        "labels": dict(_of_source(manifest, "labels")),
        "left_out": left_out(manifest),
        "annotations": _annotations(manifest),
    }


def describe_versions(versions: Sequence[Manifest], times: Mapping[str, str]) -> list[dict[str, Any]]:
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
    return [
        printable(
            f"{each['version']:>4}  {each['time'] or 'time not known':20}  {each['samples']:>9,} samples  "
            f"{each['command']}{': ' if each['changes'] else ''}{', '.join(each['changes'])}"
        )
        for each in versions
    ]


def describe_lines(manifest: Manifest, *, lists_classes: bool = False) -> list[str]:
    """Return what a cache contains and how it was made, as lines of text."""
    lines = [f"{name:<12} {printable(text)}" for name, text in facts_of(manifest).items()]
    if lists_classes:  # but those that the line of labels names
        counted = zip(manifest.classes[_NAMED:], manifest.statistics.class_counts[_NAMED:], strict=False)
        lines += [f"  {count:>9,}  {printable(name)}" for name, count in counted]
    return [*lines, *(f"  {skipped.path!r}: {printable(skipped.reason)}" for skipped in manifest.skipped)]


def facts_of(manifest: Manifest) -> dict[str, str]:
    """Return the facts about a cache by name, as text: what it contains, and how it was made."""
    fields = [
        f"{field.name} {'x'.join(map(str, field.shape))} {np.dtype(field.dtype).name} {field.codec}"
        for field in manifest.fields
    ]
    texts = {
        "samples": f"{manifest.samples:,}",
        "labels": label_text(manifest),
        "records": records_text(manifest),
        "fields": ", ".join(fields),
        "bytes": f"{size_text(manifest.total_bytes)} in {_count(len(manifest.shards), 'shard')}",
        "recipe": _joined(recipe_texts(manifest).items()) or "the defaults",
        "made by": _joined(version_texts(manifest).items()),
    }
    if manifest.statistics.mean:
        mean, std = (
            " ".join(f"{value:.1f}" for value in each) for each in (manifest.statistics.mean, manifest.statistics.std)
        )
        texts["mean, std"] = f"{mean}; {std}"
    texts |= {"fingerprint": manifest.fingerprint, **annotation_texts(manifest)}
    if manifest.parents:
        gone = f", {_count(len(manifest.deleted), 'sample')} deleted since" if manifest.deleted else ""
        texts["version"] = f"{manifest.number}{gone}: `inspect --versions` lists all versions"
    if manifest.skipped:
        texts["skipped"] = f"{len(manifest.skipped):,}"
    if others := left_out(manifest):
        texts["left out"] = f"files that are no images by their names: {_joined(others.items())}"
    return texts


def _joined(pairs: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def records_text(manifest: Manifest) -> str:
    records = f"{manifest.records:,} records"
    if not manifest.augmented:
        return f"{records}, {'the clean images alone' if _has_images(manifest) else 'one of each'}"
    clean = "the clean one and " if len(manifest.variants) > manifest.augmented else ""
    return f"{records}: {clean}{_count(manifest.augmented, 'augmented variant')} of each"


def recipe_texts(manifest: Manifest) -> dict[str, str]:
    recipe, defaults = manifest.recipe, Recipe().to_dict()
    is_shown = {"size": _has_images(manifest), "augment": manifest.augmented > 0, "augmentation": False}
    return {
        name: _setting_text(value) for name, value in recipe.items() if is_shown.get(name, value != defaults.get(name))
    }


def _has_images(manifest: Manifest) -> bool:
    return IMAGE in {field.name for field in manifest.fields}


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value))
    return "not given" if value is None else "yes" if value is True else str(value)


def version_texts(manifest: Manifest) -> dict[str, str]:
    return {name: str(value) for name, value in manifest.created_by.items() if value}


def _of_source(manifest: Manifest, name: str) -> Mapping[str, Any]:
    content = manifest.source.get(name)
    return content if isinstance(content, dict) else {}


def left_out(manifest: Manifest) -> dict[str, int]:
    content = _of_source(manifest, "left_out")
    return dict(content) if all(type(count) is int for count in content.values()) else {}


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
    manifest, image = records.manifest, records.image
    figures = [("samples", f"{manifest.samples:,}"), ("records", f"{manifest.records:,}")]
    if manifest.classes:
        figures.append(("classes", f"{len(manifest.classes):,}"))
    if image is not None:
        figures.append(("pixels", f"{image.shape[1]} \u00d7 {image.shape[0]}"))
    figures += [("on disk", size_text(manifest.total_bytes)), ("skipped", f"{len(manifest.skipped):,}")]
    sections = [
        *_pictures(records, samples, seed, variants),
        *_classes(manifest),
        *_sizes(records),
        *_channels(records, seed),
        *_skipped(manifest),
        Section("How to use it", "From the folder that the cache is in. No network is needed.", [_usage(records)]),
        _made(manifest),
        _disk(manifest),
    ]
    return make_page("cache", [Part(records.name, f"{records_text(manifest)}.", figures, sections)])


def _pictures(records: Records, samples: int, seed: int, variants: int) -> Iterator[Section]:
    manifest, chosen = records.manifest, records.choose(samples, seed)
    if records.image is None or not chosen:
        return
    from tpucache.report.preview import make_picture

    names = {variant: variant_name(variant) for variant in manifest.variants[: max(1, variants)]}
    figures = []
    for position in chosen:
        label, path, shown = records.show(position, [*names])
        drawn = [
            make_picture(fields, manifest.classes, f"{label}, {name}")
            for fields, name in zip(shown, names.values(), strict=True)
        ]
        figures.append(Figure(drawn, [label], [path], str(int(records.table.numbers[position]))))
    note = f"{len(chosen):,} of {manifest.samples:,} at random, from each class in turn"
    if len(manifest.variants) > 1:
        note += f". Variants: {', '.join(names.values())}, of {len(manifest.variants):,} in the cache"
    is_drawn = len(manifest.fields) > 1
    width = min(1080, 170 * len(names)) if is_drawn else min(560, 72 + 88 * len(names))
    yield Section("Samples", f"{note}.", [pictures(figures, width, 150 if is_drawn else 72)])


def _classes(manifest: Manifest) -> Iterator[Section]:
    names, counts = manifest.classes, manifest.statistics.class_counts
    if not names or len(names) != len(counts):
        return
    pairs = sorted(zip(names, counts, strict=True), key=lambda pair: -pair[1])
    largest, smallest = pairs[0][1], pairs[-1][1]
    note = f"{len(names):,}, the largest first. "
    if smallest:
        note += f"The largest has {largest / smallest:,.1f} times the samples of the smallest."
    else:
        note += f"{counts.count(0):,} without any sample."
    others = pairs[_CLASSES : _CLASSES + _MOST]
    blocks = [
        bars(pairs[:_CLASSES], largest, manifest.samples),
        bars(others, largest, manifest.samples, folded=f"{len(pairs) - _CLASSES:,} more classes"),
    ]
    yield Section("Classes", note, blocks if others else blocks[:1])


def _sizes(records: Records) -> Iterator[Section]:
    sizes = np.asarray(records.table.get("source_bytes", ()), np.float64)
    known = sizes[sizes > 0]
    if len(known):
        scale = map(size_text, np.geomspace(known.min(), known.max(), 3).tolist())
        counts, _ = np.histogram(np.log(known), _STEPS)
        note = f"Files in the source, {size_text(np.median(known))} the median, {size_text(known.sum())} in all."
        line = Line(f"{len(known):,} files by size, logarithmic", list(enumerate(counts.tolist())))
        yield Section("Original sizes", note, [chart("files", [line], [*scale], "{:,.0f}")])


def _channels(records: Records, seed: int) -> Iterator[Section]:
    image, manifest = records.image, records.manifest
    chosen = records.choose(max(1, min(_RECORDS, _BYTES // max(1, manifest.layout.nbytes))), seed)
    if image is None or not chosen:
        return
    clean = np.stack([records.read(position, manifest.variants[0])[IMAGE] for position in chosen])
    low, high = clean.min().item(), clean.max().item()
    steps = min(_VALUES, high - low + 1) if clean.dtype.kind == "u" else _VALUES
    names = _CHANNELS.get(image.shape[2], [f"channel {number}" for number in range(image.shape[2])])
    lines = []
    for number, name in enumerate(names):
        counts, _ = np.histogram(clean[..., number], steps, (low, high))
        # Under- and overexposed pixels would flatten the curves between them.
        shares = np.minimum(counts, counts[1:-1].max(initial=1)) / counts.sum()
        lines.append(Line(name, list(enumerate(shares.tolist())), 25 + 360 * number // len(names)))
    drawn = chart("values of the channels", lines, [f"{low:.6g}", f"{high:.6g}"], "{:.1%}")
    yield Section("Channels", f"The curves show {len(chosen):,} of the clean records.", [drawn])


def _skipped(manifest: Manifest) -> Iterator[Section]:
    if skipped := manifest.skipped:
        note = f"{len(skipped):,} samples were found in the source, but cannot be used."
        if len(skipped) > _MOST:
            note += f" {len(skipped) - _MOST:,} of them are left out here: `tpucache inspect --json` lists all."
        rows = [(skip.path, skip.reason) for skip in skipped[:_MOST]]
        yield Section("Skipped", note, [table(("path", "reason"), rows, "ct", "show them", "stacked")])


def _usage(records: Records) -> Block:
    manifest = records.manifest
    batch = min(_BATCH, manifest.samples)
    variant = ', variant="epoch"' if manifest.augmented else ""
    names = [*(field.name for field in manifest.fields), LABEL]
    what = "images, labels" if names == [IMAGE, LABEL] else f"a dictionary of tensors: {', '.join(names)}"
    name = json.dumps(records.name, ensure_ascii=False)  # a JSON string is also a Python string
    return code(
        [
            "from tpucache import CachedDataset, CachedLoader",
            "",
            f"dataset = CachedDataset({name}{variant})",
            f"for batch in CachedLoader(dataset, {batch}, shuffle=True, drop_last=True):",
            f"    ...  # {what}",
        ]
    )


def _made(manifest: Manifest) -> Section:
    blocks = [facts(facts_of(manifest).items())]
    if pipeline := manifest.recipe.get("augmentation"):
        lines = json.dumps(pipeline, ensure_ascii=False, indent=1).splitlines()
        blocks.append(code(lines, "augmentation, step by step"))
    return Section("How it was made", "", blocks)


def _disk(manifest: Manifest) -> Section:
    rows = [
        (entry.name, f"{entry.records:,}", size_text(entry.bytes), entry.sha256[:8])
        for entry in manifest.shards[:_MOST]
    ]
    count = f"{len(manifest.shards):,} shards"
    return Section(
        "On disk",
        f"{count} and {len(manifest.tables)} tables, {manifest.total_bytes:,} bytes.",
        [table(("shard", "records", "size", "SHA-256"), rows, "cnnc", count)],
    )
