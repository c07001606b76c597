"""What the user asked of a source: kept with a cache, so that a later run asks the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpucache.errors import SourceError
from tpucache.store.copying import earlier_tables
from tpucache.store.manifest import Manifest
from tpucache.warmup.sources import label_source, pad_source, select_source
from tpucache.warmup.sources.base import Listing, Source


def as_asked(source: Source, manifest: Manifest) -> Source:
    """Return a source of the samples, labels and classes that were asked for when a finished cache was made."""
    asked, read = _saved(manifest.source.get("asked")), _saved(manifest.source.get("labels"))
    part = select_source(
        source,
        limit=asked.get("limit"),
        include=asked.get("include", ()),
        exclude=asked.get("exclude", ()),
    )
    part = pad_source(part, asked.get("pad"), asked.get("truncate", False))
    if earlier_tables(manifest):  # its labels are no longer those of the source
        return part
    return label_source(part, read.get("asked", "auto"), manifest.classes if "classes" in asked else ())


def check_asked(cache: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SourceError when an unfinished build was started with another limit or other patterns or classes."""
    changed = [
        f"--{name} {before.get(name, 'not given')}, now {now.get(name, 'not given')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise SourceError(f"{cache} was started with {'; '.join(changed)}: give the same options to continue")


def check_given_classes(manifest: Manifest, listing: Listing, cache: Path) -> None:
    """Raise SourceError when the classes of a finished cache were given, and a source now has others."""
    if manifest.classes and "classes" in _saved(manifest.source.get("asked")) and listing.classes != manifest.classes:
        raise SourceError(
            f"{cache} was made with --classes, and the classes now are others or have another order: give "
            f"--classes {cache}"
        )


def check_boxes(manifest: Manifest, listing: Listing, cache: Path) -> None:
    """Raise SourceError when a finished cache has boxes that lie beside its source, and a source now has none of these,
    or the other way round."""
    before, now = _saved(manifest.source.get("asked")).get("boxes"), listing.asked.get("boxes")
    if before is not None and now is None:
        raise SourceError(f"{cache} was made with --boxes {before}: give --boxes again, or another folder")
    if before is None and now is not None:
        raise SourceError(f"{cache} was made without --boxes: leave --boxes out, or give another folder")


def _saved(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, dict) else {}
