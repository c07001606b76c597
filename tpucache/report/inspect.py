"""What a cache holds, how big it is, how it was made."""

from __future__ import annotations

import dataclasses
from typing import Any

from tpucache.report.text import printable
from tpucache.store.manifest import Manifest


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest's facts as JSON values; `variants` counts the augmented ones beside the clean one."""
    return {
        "samples": manifest.samples,
        "variants": manifest.augmented,
        "records": manifest.records,
        "shards": len(manifest.shards),
        "bytes": manifest.total_bytes,
        "fields": [dataclasses.asdict(field) for field in manifest.fields],
        "classes": list(manifest.classes),
        "statistics": dataclasses.asdict(manifest.statistics),
        "skipped": [{"path": skipped.path, "reason": skipped.reason} for skipped in manifest.skipped],
        "left_out": left_out(manifest),
        "fingerprint": manifest.fingerprint,
        "recipe": dict(manifest.recipe),
        "created_by": dict(manifest.created_by),
    }


def describe_lines(manifest: Manifest) -> list[str]:
    """Return the same facts as lines for people."""
    recipe = manifest.recipe
    fields = ", ".join(f"{f.name} {'x'.join(map(str, f.shape))} {f.dtype} {f.codec}" for f in manifest.fields)
    lines = [
        f"samples      {manifest.samples:,} in {len(manifest.classes)} classes"
        if manifest.classes
        else f"samples      {manifest.samples:,}, unlabelled",
        f"variants     {manifest.augmented} augmented beside the clean one: {manifest.records:,} records",
        f"fields       {fields}",
        f"bytes        {manifest.total_bytes:,} in {len(manifest.shards)} shards",
        f"recipe       {', '.join(f'{name}={value}' for name, value in recipe.items() if name != 'augmentation')}",
        f"made by      {', '.join(f'{name} {value}' for name, value in manifest.created_by.items())}",
        f"mean, std    {_numbers(manifest.statistics.mean)}; {_numbers(manifest.statistics.std)} (0 to 255)",
        f"fingerprint  {manifest.fingerprint}",
    ]
    counts = manifest.statistics.class_counts
    lines += [f"  {count:>9,}  {name}" for name, count in zip(manifest.classes, counts, strict=False)]
    if manifest.skipped:
        lines.append(f"skipped      {len(manifest.skipped):,}")
        lines += [f"  {skipped.path!r}: {skipped.reason}" for skipped in manifest.skipped]
    if others := left_out(manifest):
        lines.append(f"left out     {sum(others.values()):,} files that are no images by their names")
        lines += [f"  {count:>9,}  {printable(suffix)}" for suffix, count in others.items()]
    return lines


def left_out(manifest: Manifest) -> dict[str, int]:
    """Return how many files of each type the source had that are no samples; anything else in their place is none."""
    content = manifest.source.get("left_out")
    if not isinstance(content, dict) or not all(type(count) is int for count in content.values()):
        return {}
    return dict(content)


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.1f}" for value in values)
