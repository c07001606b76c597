"""Sequences of different lengths -> arrays of one length, and a mask of what is not padding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Final

import numpy as np

from tpucache.errors import SampleError, UsageError
from tpucache.store.fields import IMAGE, MASK
from tpucache.warmup.sources.base import Array, Item, Listing, Sample, Source, source_name
from tpucache.warmup.sources.datasets.items import SEQUENCE
from tpucache.warmup.sources.folder import FolderSource
from tpucache.warmup.sources.names import column_names
from tpucache.warmup.sources.table import TableSource

ATTENTION: Final = "attention_mask"
#: What the sequence that others follow is called, the first of these that there is; else it is the first.
_MAIN: Final = (SEQUENCE, "ids", "tokens")
#: The column with each sequence's own length.
LENGTH: Final = "length"
_TRIED: Final = 8


def pad_source(source: Source, pad: int | None = None, truncate: bool = False) -> Source:
    """Return a source whose sequences have one length: `pad`, or that of the longest one, which is looked for.

    `truncate` cuts longer ones; without it they do not load. Raises UsageError.
    """
    if pad is not None and pad < 1:
        raise UsageError(f"pad is at least 1, not {pad}")
    if truncate and pad is None:
        raise UsageError("truncate needs a length to cut to: give --pad, too")
    has_images = isinstance(source, (FolderSource, TableSource))
    return source if has_images and pad is None else PaddedSource(source, pad, truncate)


@dataclasses.dataclass(frozen=True)
class PaddedSource:
    """The samples of another source, with zeros after the sequences of those that have no image.

    Sequences are arrays of one dimension, as long as the sample's main one, `input_ids`, `ids`, `tokens` or the first.
    A padded sample has a mask besides, `attention_mask`, uint8 (length,) of 1 and 0, unless it has one of that name or
    called `mask`, and a column `length`. Where all sequences have one length and `pad` is None, nothing is changed.
    """

    source: Source
    pad: int | None
    truncate: bool

    def __repr__(self) -> str:
        return source_name(self.source)

    def list(self) -> Listing:
        """Return the other source's listing. Raises UsageError where there is nothing to pad."""
        listing = self.source.list()
        self.__dict__["_shape"] = shape = self._find_shape(listing.samples)
        if self.pad is not None and not shape[0]:
            raise UsageError(f"{source_name(self.source)} has no sequences: leave out --pad")
        if self.pad is None:
            return listing
        return dataclasses.replace(listing, asked={**listing.asked, "pad": self.pad, "truncate": self.truncate})

    def load(self, sample: Sample) -> Item:
        """Return the other source's item, padded. Raises SampleError for a sequence that is too long."""
        item = self.source.load(sample)
        names, length = self._shape
        if not names:
            return item
        first = next(iter(names))
        main = item.fields.get(first)
        if not isinstance(main, np.ndarray) or main.ndim != 1:
            raise SampleError(sample.path, f"has no sequence {first!r}, as other samples have")
        if len(main) > length and not self.truncate:
            raise SampleError(
                sample.path,
                f"{first!r} has {len(main):,} numbers: give --pad {len(main)}, or cut with --truncate",
            )
        fields = dict(item.fields)
        for name, dtype in names.items():
            padded = _padded(item, name, len(main), length, sample.path)
            fields[name] = padded if len(main) else padded.astype(dtype)  # an empty list has no dtype of its own
        if not {ATTENTION, MASK} & set(fields):
            fields[ATTENTION] = (np.arange(length) < len(main)).astype(np.uint8)
        name = column_names([*item.columns, LENGTH])[LENGTH] if LENGTH not in item.columns else f"{LENGTH}_"
        return dataclasses.replace(item, fields=fields, columns={**item.columns, name: len(main)})

    @functools.cached_property
    def _shape(self) -> tuple[dict[str, str], int]:
        """The dtypes of the sequences by name, the main one first, and their length; none where nothing is padded.

        It is found once, when the source is listed, and sent to the workers with it.
        """
        return self._find_shape(self.source.list().samples)

    def _find_shape(self, samples: Sequence[Sample]) -> tuple[dict[str, str], int]:
        names = self._find_names(samples)
        if not names or self.pad is not None:
            return names, self.pad or 0
        lengths = set()
        for sample in samples:
            with contextlib.suppress(SampleError):
                value = self.source.load(sample).fields.get(next(iter(names)))
                if isinstance(value, np.ndarray) and value.ndim == 1:
                    lengths.add(len(value))
        return (names, max(lengths)) if len(lengths) > 1 else ({}, 0)

    def _find_names(self, samples: Sequence[Sample]) -> dict[str, str]:
        found: dict[str, str] = {}
        for sample in samples[:_TRIED]:
            with contextlib.suppress(SampleError):
                fields = self.source.load(sample).fields
                arrays = {n: value for n, value in fields.items() if isinstance(value, np.ndarray) and value.ndim == 1}
                if IMAGE in fields or not arrays:
                    return {}
                main = next((name for name in _MAIN if name in arrays), next(iter(arrays)))
                names = (main, *(name for name in arrays if name != main and len(arrays[name]) == len(arrays[main])))
                found = {name: arrays[name].dtype.str for name in names}
                if len(arrays[main]):  # those of empty lists say little
                    break
        return found


def _padded(item: Item, name: str, own: int, length: int, path: str) -> Array:
    """Return a sequence of a sample, which has to have its `own` length, with zeros up to `length`."""
    value = item.fields.get(name)
    if not isinstance(value, np.ndarray) or value.shape != (own,):
        raise SampleError(path, f"{name!r} is no sequence of {own:,} numbers, as long as the others")
    kept = value[:length]
    return np.concatenate([kept, np.zeros(length - len(kept), kept.dtype)])
