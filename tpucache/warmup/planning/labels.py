"""Where the labels of a cache come from, and what could have been labels where there are none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpucache.errors import SourceError
from tpucache.store.cache import Cache
from tpucache.warmup.records.labels import MOST_CLASSES, LabelRule, class_range
from tpucache.warmup.sources.base import Column, Item, Label, Listing

_LABEL_NAMES: Final = frozenset(
    ("label", "labels", "target", "targets", "class", "classes", "class_id", "class_name", "category", "diagnosis", "y")
)
_LABEL_SUFFIXES: Final = ("_label", "_labels", "_target", "_class")

_log: Final = logging.getLogger("tpucache")


def label_rule(listing: Listing, first: Label) -> LabelRule | None:
    """Return what labels in the samples must be, like the `first`; None where the listing has labels."""
    if any(sample.label is not None for sample in listing.samples):
        return None
    return LabelRule(first, len(listing.classes))


def check_labels(listing: Listing) -> None:
    """Raise SourceError for the number of no class in a listing: found only at the end, all would be built in vain."""
    most = len(listing.classes) or MOST_CLASSES
    for sample in listing.samples:
        if isinstance(sample.label, int) and not 0 <= sample.label < most:
            raise SourceError(
                f"{sample.path!r} has the label {sample.label!r:.40}: {class_range(len(listing.classes))}"
            )


def first_label(cache: Cache) -> Label:
    """Return the label of a finished cache's first sample."""
    labels = cache.samples.labels
    if labels is None or not len(labels):
        return None
    label = labels[0].tolist()
    return label if isinstance(label, int) else tuple(label)


def find_unused_labels(listing: Listing, first: Item) -> list[str]:
    """Return, and warn of, the names of what could be labels where there are none."""
    if first.label is not None or any(sample.label is not None for sample in listing.samples):
        return []
    unused = _label_candidates(listing.columns, first)
    if unused:
        _log.warning(
            "the samples have no labels, and %s could be: name a column or feature with --label-col, and call a "
            "dataset's key 'label'",
            ", ".join(map(repr, unused)),
        )
    return unused


def saved_unused_labels(source: Mapping[str, Any]) -> list[str]:
    """Return what could have been labels of a cache without any, from the `source` part of its manifest."""
    read = source.get("labels")
    unused = read.get("unused") if isinstance(read, dict) else None
    return [name for name in unused if isinstance(name, str)] if isinstance(unused, list) else []


def _label_candidates(columns: Mapping[str, Column], item: Item) -> list[str]:
    """Return the columns and keys that could hold labels: those with such names, or else likely columns."""
    names = [name for name in (*columns, *{**item.columns, **item.fields}) if _sounds_like_label(name)]
    likely = [name for name, column in columns.items() if name != "fold" and _repeats(column)]
    return names or [*likely, *(name for name, value in item.columns.items() if isinstance(value, int))]


def _sounds_like_label(name: str) -> bool:
    return name.lower() in _LABEL_NAMES or name.lower().endswith(_LABEL_SUFFIXES)


def _repeats(column: Column) -> bool:
    """Return whether a column has few values, each often, or numbers that are not whole."""
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        return True
    values = list(map(str, column))
    return 1 < len(set(values)) <= len(values) / 2
