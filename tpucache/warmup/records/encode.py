"""SampleEncoder: one sample -> its record in each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.store.codecs import encode
from tpucache.store.fields import Field, RecordLayout
from tpucache.warmup.records.annotations import Counts, count_annotations
from tpucache.warmup.records.arrays import clean_and_count, image_fields
from tpucache.warmup.records.augment import AugmentationError, augment_fields
from tpucache.warmup.records.labels import LabelRule
from tpucache.warmup.sources.base import Item, Sample, Source


class EncodedSample(NamedTuple):
    """A sample as its source returns it, its clean arrays by field, and its record in each requested variant.

    `counts` are of its annotations: in the source, then in each of these records.
    """

    item: Item
    clean: dict[str, npt.NDArray[Any]]
    records: list[bytes]
    counts: list[Counts]


@dataclass(frozen=True)
class SampleEncoder:
    """All that decides the bytes of a sample's records.

    `augmentation` is a definition as `resolve` returns it. `labels` is what labels in the samples must be, None where
    they are ignored. `is_labelled` is whether the listing has labels, so that a sample needs one. It is pickled to
    every worker.
    """

    source: Source
    recipe: Recipe
    augmentation: Mapping[str, Any]
    fields: tuple[Field, ...]
    labels: LabelRule | None = None
    is_labelled: bool = False

    def encode(self, sample: Sample, variants: Sequence[int]) -> EncodedSample:
        """Load and decode a sample once, and encode these variants of it. Raises SampleError, RecipeError."""
        item = self.source.load(sample)
        if self.labels is not None:
            self.labels.check(item.label, sample.path)
        elif self.is_labelled and sample.label is None:
            raise SampleError(sample.path, "has no label, as other samples have")
        clean, given = clean_and_count(item, self.fields, self.recipe, sample.path)
        records, counts = [], [given]
        for variant in variants:
            arrays = clean
            if variant:
                arrays = self._augment(clean, sample, variant)
            records.append(self.to_record(arrays))
            counts.append(count_annotations(arrays))
        return EncodedSample(item, clean, records, counts)

    def _augment(self, clean: dict[str, npt.NDArray[Any]], sample: Sample, variant: int) -> dict[str, npt.NDArray[Any]]:
        try:
            return augment_fields(clean, self.augmentation, self.recipe.seed, sample.number, variant)
        except AugmentationError as error:
            raise SampleError(sample.path, str(error)) from error

    def to_record(self, arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
        """Return a sample's arrays as the bytes of its record."""
        parts = [encode(field, arrays[field.name], self._quality(field)) for field in self.fields]
        return RecordLayout(self.fields).join(parts)

    def _quality(self, field: Field) -> int | None:
        """Return the recipe's quality for what it is of: the image, and arrays in the same codec."""
        others = image_fields([each.name for each in self.fields])[1:]
        is_meant = field.codec == self.recipe.codec and field.name not in others
        return self.recipe.quality if is_meant else None
