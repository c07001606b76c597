"""What a source is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """One sample of a source: `number` is its key for ever, `path` its name, `label` its class number or None."""

    number: int
    path: str
    label: int | None


@dataclass(frozen=True)
class Listing:
    """All samples of a source, numbered in a stable order, and the names of their classes (empty: no labels)."""

    samples: Sequence[Sample]
    classes: tuple[str, ...]


class Source(Protocol):
    """Something samples come from. It is pickled to every worker, so it must be small and safe to copy."""

    def list(self) -> Listing:
        """Return all samples, the same in the same order for the same source. Raises SourceError."""
        ...

    def load(self, sample: Sample) -> bytes:
        """Return the encoded image of a sample. Raises SampleError."""
        ...
