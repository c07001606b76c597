"""Selects some samples of a source: those whose paths match patterns, or a limited number."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import os
from collections.abc import Iterable, Sequence

import numpy as np

from tpucache.errors import SourceError, UsageError
from tpucache.warmup.sources.source import DerivedSource, Item, Listing, Sample, Source, source_name


def select_source(
    source: Source, *, limit: int | None = None, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> Source:
    """Return a source with some of the samples of `source`; without options, `source` itself.

    `include` and `exclude` are patterns for paths, in which `*` matches any text, even `/`. `limit` is the most samples
    to keep: they are spread over the whole source, and a larger limit keeps all of them and more. Raises UsageError for
    a limit below 1.
    """
    included, excluded = tuple(include), tuple(exclude)
    if limit is not None and limit < 1:
        raise UsageError(f"limit is at least 1, not {limit}")
    return SelectedSource(source, limit, included, excluded) if limit or included or excluded else source


@dataclasses.dataclass(frozen=True, repr=False)
class SelectedSource(DerivedSource):
    """The samples of another source that `select_source` keeps, numbered again in the same order."""

    source: Source
    limit: int | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def list(self) -> Listing:
        """Return the kept samples. Classes that have no sample because of the patterns are left out.

        Raises SourceError if no samples are left.
        """
        listing = self.source.list()
        paths = [sample.path for sample in listing.samples]
        kept = [at for at, path in enumerate(paths) if self._matches(path)]
        if not kept:
            raise SourceError(
                f"--include and --exclude leave none of the {len(paths):,} samples of {source_name(self.source)}: "
                f"their paths are such as {paths[0]!r}"
                if paths
                else f"{source_name(self.source)} has no samples"
            )
        chosen = _few(kept, paths, self.limit)
        asked = {name: getattr(self, name) for name in ("limit", "include", "exclude")}
        return _without_unused(
            dataclasses.replace(
                listing,
                samples=[dataclasses.replace(listing.samples[at], number=number) for number, at in enumerate(chosen)],
                columns={
                    name: column[np.array(chosen)] if isinstance(column, np.ndarray) else [column[at] for at in chosen]
                    for name, column in listing.columns.items()
                },
                asked={
                    **listing.asked,
                    **{name: [*value] if isinstance(value, tuple) else value for name, value in asked.items() if value},
                },
            ),
            {listing.samples[at].label for at in kept},
        )

    def load(self, sample: Sample) -> Item:
        """Load the sample with this path from `source`, and return its item. Raises SampleError."""
        return self.source.load(sample)

    def _matches(self, path: str) -> bool:
        wanted = not self.include or any(_is_meant(path, pattern) for pattern in self.include)
        return wanted and not any(_is_meant(path, pattern) for pattern in self.exclude)


def _is_meant(path: str, pattern: str) -> bool:
    path, pattern = path.removeprefix("./"), pattern.removeprefix("./")
    return path == pattern or fnmatch.fnmatchcase(path, pattern)


def _few(kept: Sequence[int], paths: Sequence[str], limit: int | None) -> Sequence[int]:
    """Return at most `limit` of `kept`, in order: those whose paths have the lowest SHA-256, a pseudo-random choice."""
    if limit is None or limit >= len(kept):
        return kept
    hashes = {at: hashlib.sha256(os.fsencode(paths[at])).digest() for at in kept}
    return sorted(sorted(kept, key=hashes.__getitem__)[:limit])


def _without_unused(listing: Listing, used: set[object]) -> Listing:
    """Return a listing without the classes that no sample has, if each sample has at most one class."""
    if not listing.classes or not all(isinstance(label, int) for label in used):
        return listing
    left = [number for number in range(len(listing.classes)) if number in used]
    numbers = {old: new for new, old in enumerate(left)}
    samples = [
        dataclasses.replace(sample, label=numbers[sample.label]) if isinstance(sample.label, int) else sample
        for sample in listing.samples
    ]
    return dataclasses.replace(listing, samples=samples, classes=tuple(listing.classes[number] for number in left))
