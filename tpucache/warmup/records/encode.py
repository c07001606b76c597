"""SampleEncoder: loads a sample, and makes its record in each variant."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError
from tpucache.native import Array
from tpucache.recipe import Recipe
from tpucache.store.codecs import encode
from tpucache.store.fields import Field, RecordLayout
from tpucache.store.format import FLOAT_BITS
from tpucache.warmup.records.arrays import Counts, Facts, clean_and_count, count_annotations, image_fields
from tpucache.warmup.records.augment import AugmentationError, augment_fields
from tpucache.warmup.sources.labelled import NO_LABEL_REASON
from tpucache.warmup.sources.source import Item, Sample, Source

#: The exact sum of each channel's pixels, and of their squares: exact, so that the order of addition has no effect. A
#: float32 is an integer times 2^-149, and its square an integer times 2^-298; these integers are added.
Moments = tuple[list[int], list[int]]

#: Where labels are: in the listing, in the samples, or nowhere.
LabelPlace = Literal["listed", "inside", "none"]

_FRACTION_BITS: Final = 24
_HALF: Final = 1 << 24
#: Rows of bytes whose squares a float32 adds up exactly: whole numbers below 2^24.
_EXACT_ROWS: Final = 256


def moments(image: Array) -> Moments:
    """Return each channel's sum and sum of squares of an image (height, width, channels).

    For float32 images, the sums are in units of 2^-149, and the sums of squares in units of 2^-298.
    """
    if image.dtype.kind == "f":
        totals = [_of_floats(channel) for channel in image.reshape(-1, image.shape[2]).T]
        return [total for total, _ in totals], [square for _, square in totals]
    height, width, channels = image.shape
    exact = np.float32 if image.dtype == np.uint8 else np.float64
    columns = np.zeros((2, width * channels), np.int64)
    for start in range(0, height, _EXACT_ROWS):
        rows: Array = image[start : start + _EXACT_ROWS].reshape(-1, width * channels).astype(exact)
        # Sums along the first axis use the processor's vector instructions.
        columns += np.stack([rows.sum(0), np.einsum("ij,ij->j", rows, rows)]).astype(np.int64)
    sums, squares = columns.reshape(2, width, channels).sum(1).tolist()
    return sums, squares


def add_moments(first: Moments, second: Moments) -> Moments:
    """Return the moments of all pixels together; without channels, sums are 0."""
    sums, squares = (
        [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
        for one, other in zip(first, second, strict=True)
    )
    return sums, squares


def mean_and_std(channels_moments: Moments, image: Array) -> tuple[float, float]:
    """Return the mean of an image, and the standard deviation around the means of its channels."""
    scale = 1 << (FLOAT_BITS if image.dtype.kind == "f" else 0)
    channels, pixels = image.shape[2], image.size // image.shape[2]
    sums, squares = channels_moments
    variance = pixels * sum(squares) - sum(map(operator.mul, sums, sums))
    mean, spread = sum(sums) / (image.size * scale), variance / (channels * (pixels * scale) ** 2)
    return float(mean), float(spread**0.5)


def _of_floats(values: npt.NDArray[np.float32]) -> tuple[int, int]:
    """Return the exact sum and sum of squares of finite floats, in units of 2^-149 and 2^-298."""
    fractions, exponents = np.frexp(values.astype(np.float64))
    whole = np.ldexp(fractions, _FRACTION_BITS)
    lowest = int(exponents.min())
    high, low = np.divmod(np.square(whole), _HALF)  # a square is below 2^48; its halves are added up exactly

    def total(weights: Array, step: int) -> int:
        sums = np.bincount(exponents - lowest, weights)  # for each exponent, whole numbers below 2^53
        return sum(int(part) << (step * place) for place, part in enumerate(sums.tolist()))

    unit = lowest - _FRACTION_BITS + FLOAT_BITS
    return _shifted(total(whole, 1), unit), _shifted(total(high, 2) * _HALF + total(low, 2), 2 * unit)


def _shifted(value: int, by: int) -> int:
    """For a negative `by`, the bits that are shifted out must be 0."""
    return value << by if by >= 0 else value >> -by


class EncodedSample(NamedTuple):
    """An encoded sample.

    `item` is what the source returned, `clean` has the clean arrays by field, and `records` a record for each requested
    variant. `counts` are the annotations by field, in the source and in each record. `facts` are values of the source's
    image by column of the samples table.
    """

    item: Item
    clean: dict[str, npt.NDArray[Any]]
    records: list[bytes]
    counts: list[Counts]
    facts: Facts


@dataclass(frozen=True)
class SampleEncoder:
    """Makes the records of samples. It has all that decides their bytes, and is pickled to every worker.

    `augmentation` is a definition that `resolve` returned. `labels` says where the labels are: if they are "listed", a
    sample without one cannot be used, and if there are none, a sample with one.
    """

    source: Source
    recipe: Recipe
    augmentation: Mapping[str, Any]
    fields: tuple[Field, ...]
    labels: LabelPlace = "inside"

    def encode(self, sample: Sample, variants: Sequence[int], item: Item | None = None) -> EncodedSample:
        """Decode a sample once, and encode its record for each of `variants`."""
        item = self.load(sample) if item is None else item
        clean, given, facts = clean_and_count(item, self.fields, self.recipe, sample.path)
        records, counts = [], [given]
        for variant in variants:
            arrays = self.augment(clean, sample, variant) if variant else clean
            records.append(self.to_record(arrays))
            counts.append(count_annotations(arrays))
        return EncodedSample(item, clean, records, counts, facts)

    def load(self, sample: Sample) -> Item:
        """Load a sample from its source and check its label."""
        if reason := self.listed_fault(sample):
            raise SampleError(sample.path, reason)
        item = self.source.load(sample)
        if self.labels == "none" and item.label is not None:
            raise SampleError(sample.path, "has a label, and other samples have none")
        return item

    def listed_fault(self, sample: Sample) -> str:
        """Return why a sample cannot be used, as far as the listing shows it, or ""."""
        if sample.fault:
            return sample.fault
        return NO_LABEL_REASON if self.labels == "listed" and sample.label is None else ""

    def augment(
        self, clean: Mapping[str, npt.NDArray[Any]], sample: Sample, variant: int
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of an augmented variant, made from the clean arrays."""
        try:
            return augment_fields(clean, self.augmentation, self.recipe.seed, sample.number, variant)
        except AugmentationError as error:
            raise SampleError(sample.path, str(error)) from error

    def to_record(self, arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
        """Encode a sample's arrays, given by field, as its record."""
        return self._layout.join([encode(field, arrays[field.name], quality) for field, quality in self._qualities])

    @functools.cached_property
    def _layout(self) -> RecordLayout:
        return RecordLayout(self.fields)

    @functools.cached_property
    def _qualities(self) -> list[tuple[Field, int | None]]:
        """The fields with the recipe's quality if they are in its codec; annotations have None."""
        annotations = image_fields([field.name for field in self.fields])[1:]
        return [
            (field, None if field.name in annotations or field.codec != self.recipe.codec else self.recipe.quality)
            for field in self.fields
        ]
