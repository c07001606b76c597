"""Reads single records of a cache with numpy alone, and chooses the samples that reports show."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpucache.errors import UsageError
from tpucache.loading.find import open_cache
from tpucache.store.codecs import CODECS, decode_bands
from tpucache.store.fields import IMAGE, Field
from tpucache.store.manifest import Manifest
from tpucache.store.samples import SampleTable
from tpucache.types import Array

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


class Records:
    """The samples of a cache, or the selected samples of a dataset."""

    def __init__(self, cache: str | Path | CachedDataset) -> None:
        """Open the cache in a folder, or take the cache of a CachedDataset with the dataset's samples.

        Raises NotACacheError, FormatError or DamageError for the cache.
        """
        self.cache = open_cache(cache) if isinstance(cache, (str, Path)) else cache.cache
        self.directory: Path = self.cache.directory
        self.manifest: Manifest = self.cache.manifest
        self.table: SampleTable = self.cache.samples
        self._names = [field.name for field in self.manifest.fields]
        self.positions: Array = np.arange(self.manifest.samples) if isinstance(cache, (str, Path)) else cache.positions
        self.cache.index  # reading it here raises the errors of a damaged index now  # noqa: B018

    @property
    def name(self) -> str:
        """The name of the cache, which is the name of its folder."""
        return Path(self.cache.place).resolve().name

    @property
    def image(self) -> Field | None:
        """The image field, whose shape is (height, width, channels); None for records without an image."""
        return next((field for field in self.manifest.fields if field.name == IMAGE), None)

    def read(self, position: int, variant: int) -> dict[str, Array]:
        """Return the decoded fields of one record by name. Raises DamageError, and DependencyError without the decoder.

        `position` is the sample's position in the cache, and `variant` the number of the variant.
        """
        parts: list[list[memoryview]] = [[] for _ in self.manifest.fields]
        for band, layout in enumerate(self.manifest.layouts):
            (row,) = self.cache.index[self.cache.rows(variant, [position], band)]
            found = layout.split(memoryview(self.cache.reader.read(row)))
            for field, part in zip(layout.fields, found, strict=True):
                parts[self._names.index(field.name)].append(part)
        return {
            field.name: _decode(field, of_field) for field, of_field in zip(self.manifest.fields, parts, strict=True)
        }

    def label(self, position: int) -> Array | None:
        """Return the label of the sample at this position of the cache, a number or (m,); None without labels."""
        labels = self.table.labels
        return None if labels is None else np.asarray(labels[position])

    def choose(self, count: int, seed: int = 0, class_name: str | None = None) -> list[int]:
        """Return the positions in the cache of at most `count` samples, chosen at random, in ascending order.

        If each sample has one label, samples are chosen from each class in turn. With `class_name`, only samples of
        that class are chosen. Raises UsageError if no class has that name.
        """
        positions = np.unique(self.positions if class_name is None else self._of_class(class_name))
        labels = self.table.labels
        order = np.random.default_rng(seed).permutation(positions)
        if labels is not None and labels.ndim == 1:
            order = order[np.argsort(_turns(np.asarray(labels[order])), kind="stable")]
        return sorted(order[:count].tolist())

    def _of_class(self, name: str) -> Array:
        classes, labels = self.manifest.classes, self.table.labels
        if name not in classes or labels is None:
            near = difflib.get_close_matches(name, classes, 3) or classes[:10]
            has = f", such as {', '.join(map(repr, near))}" if near else ""
            raise UsageError(f"{self.directory} has no class {name!r}: it has {len(classes)} classes{has}")
        number = classes.index(name)
        chosen = np.asarray(labels[self.positions])
        return self.positions[chosen == number if labels.ndim == 1 else chosen[:, number] > 0]


def _turns(labels: Array) -> Array:
    """Return, for each label, how many equal labels come before it in `labels`."""
    by_label = np.argsort(labels, kind="stable")
    ordered = labels[by_label]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(labels) else by_label
    turns = np.empty(len(labels), np.int64)
    turns[by_label] = np.arange(len(labels)) - np.repeat(starts, np.diff([*starts, len(labels)]))
    return turns


def _decode(field: Field, parts: Sequence[memoryview]) -> Array:
    if CODECS[field.codec].has_any_length:
        return np.frombuffer(parts[0], np.uint8)
    array = np.empty(field.shape, field.dtype)
    decode_bands(field, parts, array)
    return array
