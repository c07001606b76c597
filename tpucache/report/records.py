"""Reads single records of a cache with numpy alone, chooses those that reports show, and puts labels into words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.loading.find import open_cache
from tpucache.native import Array
from tpucache.store.codecs import CODECS, decode_into
from tpucache.store.fields import IMAGE, Field

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

SAMPLES: Final = 12
VARIANTS: Final = 6  # of each sample, at most


class Records:
    """The samples of a cache, or the selected samples of a dataset; `positions` are theirs in the cache."""

    def __init__(self, cache: str | Path | CachedDataset) -> None:
        """Raises NotACacheError, FormatError or DamageError for the cache."""
        self.cache = open_cache(cache) if isinstance(cache, (str, Path)) else cache.cache
        self.directory, self.manifest, self.table = self.cache.directory, self.cache.manifest, self.cache.samples
        self.positions: Array = np.arange(self.manifest.samples) if isinstance(cache, (str, Path)) else cache.positions
        self.cache.index  # reading it here raises the errors of a damaged index now  # noqa: B018

    @property
    def name(self) -> str:
        """The name of the cache's folder."""
        return Path(self.cache.place).resolve().name

    @property
    def image(self) -> Field | None:
        """The image field, whose shape is (height, width, channels); None for records without an image."""
        return next((field for field in self.manifest.fields if field.name == IMAGE), None)

    def read(self, position: int, variant: int) -> dict[str, Array]:
        """Return the decoded fields of one record by name.

        Raises DamageError, and DependencyError without the decoder.
        """
        (row,) = self.cache.index[self.cache.rows(variant, [position])]
        parts = self.manifest.layout.split(memoryview(self.cache.reader.read(row)))
        return {field.name: _decode(field, part) for field, part in zip(self.manifest.fields, parts, strict=True)}

    def label(self, position: int) -> Array | None:
        """Return the label of the sample at this position of the cache; None without labels."""
        labels = self.table.labels
        return None if labels is None else np.asarray(labels[position])

    def choose(self, count: int, seed: int = 0, class_name: str | None = None) -> list[int]:
        """Return the positions in the cache of at most `count` random samples, from each class in turn.

        Raises UsageError if no class has the name `class_name`.
        """
        positions = np.unique(self.positions if class_name is None else self._of_class(class_name))
        order, labels = np.random.default_rng(seed).permutation(positions), self.table.labels
        if labels is not None and labels.ndim == 1:
            order = order[np.argsort(_turns(np.asarray(labels[order])), kind="stable")]
        return sorted(order[:count].tolist())

    def _of_class(self, name: str) -> Array:
        classes, labels = self.manifest.classes, self.table.labels
        if name not in classes or labels is None:
            near = difflib.get_close_matches(name, classes, 3) or classes[:10]
            has = f", such as {', '.join(map(repr, near))}" if near else ""
            raise UsageError(f"{self.directory} has no class {name!r}: it has {len(classes)} classes{has}")
        number, chosen = classes.index(name), np.asarray(labels[self.positions])
        return self.positions[chosen == number if labels.ndim == 1 else chosen[:, number] > 0]


def _turns(labels: Array) -> Array:
    """Return, for each label, how many equal labels come before it in `labels`."""
    by_label = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[by_label], return_index=True, return_counts=True)
    turns = np.empty(len(labels), np.int64)
    turns[by_label] = np.arange(len(labels)) - np.repeat(starts, counts)
    return turns


def _decode(field: Field, data: memoryview) -> Array:
    if CODECS[field.codec].has_any_length:
        return np.frombuffer(data, np.uint8)
    array = np.empty(field.shape, field.dtype)
    decode_into(field, data, array)
    return array


def variant_name(variant: int) -> str:
    return f"variant {variant}" if variant else "clean"


def describe_label(label: Array | None, classes: Sequence[str]) -> str:
    """Return a sample's label as text: its class, its classes with their weights, or its values."""
    if label is None:
        return "unlabelled"
    if not label.ndim and label.dtype.kind != "f":
        return class_name(int(label), classes)
    values = [float(value) for value in label.reshape(-1)]
    if len(classes) != len(values):
        return ", ".join(f"{value:.4g}" for value in values)
    marked = [(name, value) for name, value in zip(classes, values, strict=True) if value > 0]
    return ", ".join(name if value == 1 else f"{name} {value:.2g}" for name, value in marked) or "none of the classes"


def class_name(number: int, classes: Sequence[str]) -> str:
    """Return the name of a class; its number as text if the class has no name."""
    return classes[number] if 0 <= number < len(classes) else str(number)
