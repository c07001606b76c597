"""SampleEncoder: one sample -> its record in each variant, and the label that its source stores in it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.store.codecs import encode_bands
from tpucache.store.fields import Field, part_layouts
from tpucache.store.format import Part
from tpucache.warmup.records.arrays import Counts, Facts, clean_and_count, count_annotations, image_fields
from tpucache.warmup.records.augment import AugmentationError, augment_fields
from tpucache.warmup.sources.labelled import NO_LABEL_REASON
from tpucache.warmup.sources.reading import MOST_CLASSES, class_range
from tpucache.warmup.sources.source import Item, Label, Sample, Source


class EncodedSample(NamedTuple):
    """A sample as its source returns it, its clean arrays by field, and its record of each requested part.

    `counts` has the number of its annotations by field: in the source, then in each of the variants of `records`.
    `facts` are what is known about its image, by the column of the samples table.
    """

    item: Item
    clean: dict[str, npt.NDArray[Any]]
    records: list[bytes]
    counts: list[Counts]
    facts: Facts


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

    def encode(self, sample: Sample, parts: Sequence[Part], item: Item | None = None) -> EncodedSample:
        """Decode a sample once, and encode these parts of it. Raises SampleError, RecipeError.

        `item` is what `load` returned for it; without it, the sample is loaded here.
        """
        item = self.load(sample) if item is None else item
        clean, given, facts = clean_and_count(item, self.fields, self.recipe, sample.path)
        made: dict[Part, bytes] = {}
        counts = [given]
        for variant in dict.fromkeys(part.variant for part in parts):
            arrays = self.augment(clean, sample, variant) if variant else clean
            made |= {Part(variant, band): record for band, record in enumerate(self.to_records(arrays))}
            counts.append(count_annotations(arrays))
        return EncodedSample(item, clean, [made[part] for part in parts], counts, facts)

    def load(self, sample: Sample) -> Item:
        """Return a sample as its source returns it, with a label that it may have. Raises SampleError."""
        if reason := self.listed_fault(sample):
            raise SampleError(sample.path, reason)
        item = self.source.load(sample)
        if self.labels is not None:
            self.labels.check(item.label, sample.path)
        return item

    def listed_fault(self, sample: Sample) -> str:
        """Return why the listing already says that a sample cannot be used, "" where it does not."""
        if sample.fault:
            return sample.fault
        return NO_LABEL_REASON if self.is_labelled and sample.label is None else ""

    def augment(
        self, clean: Mapping[str, npt.NDArray[Any]], sample: Sample, variant: int
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a variant of a sample, out of its clean ones. Raises SampleError, RecipeError."""
        try:
            return augment_fields(clean, self.augmentation, self.recipe.seed, sample.number, variant)
        except AugmentationError as error:
            raise SampleError(sample.path, str(error)) from error

    def to_records(self, arrays: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Return a sample's arrays as the bytes of its record of each band."""
        bands = [encode_bands(field, arrays[field.name], self._qualities[field.name]) for field in self.fields]
        first, *further = part_layouts(self.fields)
        more = [part for of_field in bands for part in of_field[1:]]
        return [
            first.join([of_field[0] for of_field in bands]),
            *(layout.join([part]) for layout, part in zip(further, more, strict=True)),
        ]

    @functools.cached_property
    def _qualities(self) -> dict[str, int | None]:
        """The quality by which each field is encoded: the recipe's for the image, and for arrays in the same codec."""
        on_image = image_fields([field.name for field in self.fields])[1:]
        return {
            field.name: self.recipe.quality if field.codec == self.recipe.codec and field.name not in on_image else None
            for field in self.fields
        }


@dataclass(frozen=True)
class LabelRule:
    """What every label must be: of the same kind as `like`, and below `classes` where that is not 0."""

    like: Label
    classes: int = 0

    def check(self, label: Label, path: str) -> None:
        """Raise SampleError for another label. Noticed only at the end, it would make all that was built useless."""
        if _kind(label) != _kind(self.like):
            raise SampleError(path, f"has {_kind(label)}, the first sample has {_kind(self.like)}")
        if isinstance(label, tuple) and len(label) == self.classes and not all(0 <= mark <= 1 for mark in label):
            raise SampleError(path, f"has the label {label}: give 0 or 1 for each class, or say --labels numbers")
        if isinstance(label, int) and label < 0:
            raise SampleError(path, f"has the label {label!r:.40}: class numbers begin at 0")
        if isinstance(label, int) and label >= (self.classes or MOST_CLASSES):
            raise SampleError(path, f"has the label {label!r:.40}: {class_range(self.classes)}")


def _kind(label: Label) -> str:
    if label is None:
        return "no label"
    return "a class number" if isinstance(label, int) else f"a label of length {len(label)}"
