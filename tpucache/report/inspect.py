"""Describes a cache for the command `inspect`: its contents, its size, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpucache.recipe import Recipe
from tpucache.redact import printable
from tpucache.report.text import count_text
from tpucache.store.cache import annotation_counts
from tpucache.store.fields import IMAGE, MASK, Field
from tpucache.store.manifest import Manifest
from tpucache.units import size_text

_NAMED: Final = 8
#: The settings of a recipe that also concern records without an image.
_OF_ARRAYS: Final = {"codec", "quality", "shard_mb", "seed", "variants", "augment"}


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
        "labels": dict(_read_as(manifest)),
        "statistics": manifest.statistics.to_dict(),
        "skipped": [{"path": skipped.path, "reason": skipped.reason} for skipped in manifest.skipped],
        "left_out": left_out(manifest),
        "annotations": _annotations(manifest),
        "fingerprint": manifest.fingerprint,
        "recipe": dict(manifest.recipe),
        "created_by": dict(manifest.created_by),
    }


def describe_versions(versions: Sequence[Manifest], times: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return, as JSON values, each version of a cache and its changes since the version before, the oldest first.

    `times` has the creation times of versions by their identities; a version that is not in `times` has the time None.
    """
    found = []
    for at, manifest in enumerate(versions):
        before = versions[at - 1] if at else None
        found.append(
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
                "changes": [] if before is None else _changes(before, manifest),
            }
        )
    return found


def _changes(before: Manifest, now: Manifest) -> list[str]:
    gone = {each.number for each in now.deleted} - {each.number for each in before.deleted}
    back = {each.number for each in before.deleted} - {each.number for each in now.deleted}
    added = now.samples - before.samples + len(gone) - len(back)
    counts = {"added": added, "deleted": len(gone), "brought back": len(back)}
    texts = [f"{count_text(count, 'sample')} {what}" for what, count in counts.items() if count]
    if now.augmented != before.augmented:
        texts.append(f"{count_text(now.augmented - before.augmented, 'variant')} added")
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


def _frequency_lines(manifest: Manifest) -> list[str]:
    """Return a line with the image sizes that can be read from fewer bands; no line for a cache without bands.

    For each size, the line has the bytes of an image and the quality in dB.
    """
    image, known = manifest.fields[0], manifest.statistics.frequencies
    if not image.bands or not known:
        return []
    texts, size = [], 0
    records = max(1, manifest.samples * len(manifest.variants))
    for band, count in enumerate(image.bands):
        size += sum(entry.bytes for entry in manifest.shards if entry.band == band)
        sides = "x".join(str(max(1, round(side * count / 8))) for side in image.shape[:2])
        worth = f", {known[count - 1].psnr:.0f} dB" if count < len(known) else ""
        texts.append(f"{sides} from {size / records / 1e3:.1f} kB{worth}")
    return [f"sizes        {'; '.join(texts)}"]


def _field_text(field: Field) -> str:
    bands = f" in bands {','.join(map(str, field.bands))}" if field.bands else ""
    return f"{field.name} {'x'.join(map(str, field.shape))} {np.dtype(field.dtype).name} {field.codec}{bands}"


def describe_lines(manifest: Manifest) -> list[str]:
    """Return what a cache contains and how it was made, as lines of text."""
    fields = ", ".join(map(_field_text, manifest.fields))
    lines = [
        f"samples      {manifest.samples:,} in {len(manifest.classes)} classes"
        if manifest.classes
        else f"samples      {manifest.samples:,}",
        f"labels       {label_text(manifest)}",
        f"records      {records_text(manifest)}",
        f"fields       {fields}",
        f"bytes        {size_text(manifest.total_bytes)} in {count_text(len(manifest.shards), 'shard')}",
        printable(f"recipe       {_recipe_line(manifest)}"),
        printable(f"made by      {', '.join(map(' '.join, version_texts(manifest).items()))}"),
        *([_statistics_line(manifest)] if manifest.statistics.mean else []),
        *_frequency_lines(manifest),
        f"fingerprint  {manifest.fingerprint}",
    ]
    counts = manifest.statistics.class_counts
    lines += [f"  {count:>9,}  {printable(name)}" for name, count in zip(manifest.classes, counts, strict=False)]
    lines += [f"{name:12} {text}" for name, text in annotation_texts(manifest).items()]
    if manifest.parents:
        gone = f", {count_text(len(manifest.deleted), 'sample')} deleted since" if manifest.deleted else ""
        lines.append(f"version      {manifest.number}{gone}: `inspect --versions` lists all versions")
    if manifest.skipped:
        lines.append(f"skipped      {len(manifest.skipped):,}")
        lines += [f"  {skipped.path!r}: {printable(skipped.reason)}" for skipped in manifest.skipped]
    if others := left_out(manifest):
        lines.append(f"left out     {sum(others.values()):,} files that are no images by their names")
        lines += [f"  {count:>9,}  {printable(suffix)}" for suffix, count in others.items()]
    return lines


def records_text(manifest: Manifest) -> str:
    """Return a text that says how many records a cache has, and which variants they are."""
    records, names = f"{manifest.records:,} records", {field.name for field in manifest.fields}
    clean, augmented = len(manifest.variants) - manifest.augmented, count_text(manifest.augmented, "augmented variant")
    if IMAGE not in names and not manifest.augmented:
        return f"{records}, one of each"
    if not manifest.augmented:
        return f"{records}, the clean images alone"
    return f"{records}: {'the clean one and ' if clean else ''}{augmented} of each"


def recipe_texts(manifest: Manifest) -> dict[str, str]:
    """Return the settings of a cache's recipe that concern its records, as texts by name.

    These are the image size, the augmentation, and settings other than the defaults.
    """
    recipe, defaults = manifest.recipe, Recipe().to_dict()
    names = {name for name in recipe if name in ("size", "augment") or recipe[name] != defaults.get(name)}
    if IMAGE not in {field.name for field in manifest.fields}:
        names &= _OF_ARRAYS
    if not manifest.augmented:
        names -= {"augment", "seed"}
    return {name: _setting_text(recipe[name]) for name in recipe if name in names - {"augmentation"}}


def _recipe_line(manifest: Manifest) -> str:
    texts = ", ".join(map(" ".join, recipe_texts(manifest).items()))
    return f"{texts}, else the defaults" if texts else "the defaults"


def version_texts(manifest: Manifest) -> dict[str, str]:
    """Return the versions of the libraries that made a cache, by name; a library that was not installed is left out."""
    return {name: str(value) for name, value in manifest.created_by.items() if value}


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value))
    return "not given" if value is None else "yes" if value is True else str(value)


def _statistics_line(manifest: Manifest) -> str:
    mean, std = manifest.statistics.mean, manifest.statistics.std
    return f"mean, std    {_numbers(mean)}; {_numbers(std)} ({_range(manifest)})"


def _range(manifest: Manifest) -> str:
    dtype = next((field.dtype for field in manifest.fields if field.name == IMAGE), "|u1")
    return "0 to 255" if dtype == "|u1" else f"of {np.dtype(dtype).name}"


def left_out(manifest: Manifest) -> dict[str, int]:
    """Return how many files of the source are not samples, by suffix.

    The result is empty if the manifest has no valid counts.
    """
    content = manifest.source.get("left_out")
    if not isinstance(content, dict) or not all(type(count) is int for count in content.values()):
        return {}
    return dict(content)


def _annotations(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return how many annotations of each kind the source, the clean images and each augmented variant have.

    For each kind there is a dictionary with the numbers `source` and `clean`, and the list `variants`. A number that
    the manifest does not have is None.
    """
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
    """Return a text for each kind of annotation: how many the source has, and how many lie outside of the images.

    A kind is left out if the manifest does not have these numbers.
    """
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


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


def label_text(manifest: Manifest) -> str:
    """Return one line that says how the samples' labels were read."""
    return describe_labels(_read_as(manifest), manifest.classes, manifest.statistics.class_counts)


def describe_labels(read: Mapping[str, Any], classes: Sequence[str], counts: Sequence[int]) -> str:
    """Return one line that says how labels were read.

    `read` is the manifest's description of labels, `classes` the names of the classes, and `counts` how many samples
    each class has.
    """
    kind = read.get("kind")
    if classes and kind != "none":
        return _class_text(classes, counts, kind)
    if kind == "numbers":
        several = f", {_short(read.get('columns'))} a sample," if read.get("columns") != 1 else ""
        return f"numbers{several} from {_short(read.get('least'))} to {_short(read.get('most'))}"
    if kind == "none":
        given = read.get("unused")
        unused = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
        columns = f"column{'s' if len(unused) > 1 else ''} {', '.join(map(repr, unused[:_NAMED]))}"
        what = f"; {columns} {'were' if len(unused) > 1 else 'was'} not used" if unused else ""
        return f"unlabelled{what}"
    return "no classes"


def _read_as(manifest: Manifest) -> Mapping[str, Any]:
    read = manifest.source.get("labels")
    return read if isinstance(read, dict) else {}


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
