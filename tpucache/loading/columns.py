"""Columns of the samples table, encoded as numbers for the model: input of `CachedDataset.with_columns`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.store.samples import SampleTable, Strings


@dataclass(frozen=True)
class Column:
    """How a column of the samples table is encoded as numbers, as learned from the training samples.

    For a column of numbers, `mean` and `std` are the mean and standard deviation of the numbers, and `names` is empty.
    For a column of text, `names` are the different texts.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number of encoded values per sample."""
        return len(self.names) or 1

    def encode(self, table: SampleTable, positions: Array) -> Array:
        """Return the encoded column of the samples at `positions`, float32 (n, width).

        Numbers are standardised, and names are one-hot. Raises UsageError if a value is missing, has another type, or
        is a name that no training sample has.
        """
        values = read_column(table, self.name, positions)
        if isinstance(values, list) != bool(self.names):
            raise UsageError(
                f"the column {self.name!r} holds {_kind(values)} here, but not in the training samples: give values of "
                "the kind that was learned"
            )
        if not isinstance(values, list):
            return ((values - self.mean) / self.std).astype(np.float32)[:, None]
        numbers = {name: number for number, name in enumerate(self.names)}
        for position, value in zip(positions.tolist(), values, strict=True):
            if value not in numbers:
                raise UsageError(
                    f"the column {self.name!r} of {table.paths[position]!r} is {value!r}, which no training "
                    "sample has: leave such samples out, or give them a name that was learned"
                )
        encoded = np.zeros((len(values), len(self.names)), np.float32)
        encoded[np.arange(len(values)), [numbers[value] for value in values]] = 1
        return encoded


@dataclass(frozen=True)
class Columns:
    """Several columns of the samples table, whose encoded values lie side by side in one array (n, width)."""

    parts: tuple[Column, ...]

    @property
    def width(self) -> int:
        """The number of values per sample."""
        return sum(part.width for part in self.parts)

    def encode(self, table: SampleTable, positions: Array) -> Array:
        """Return the encoded columns of the samples at `positions`, float32 (n, width).

        Raises UsageError for a value that is missing, has another type, or is a name that no training sample has.
        """
        return np.concatenate([part.encode(table, positions) for part in self.parts], 1)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the columns as a list of dicts that can be written as JSON."""
        return [{**asdict(part), "names": list(part.names)} for part in self.parts]


def columns_from(values: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the Columns from which `Columns.to_list` made `values`."""
    return Columns(tuple(Column(**{**part, "names": tuple(part["names"])}) for part in values))


def fit_columns(names: Sequence[str], table: SampleTable, positions: Array) -> Columns:
    """Fit the encoding of the columns `names` to the training samples at `positions`, and return it.

    Raises UsageError if a column does not exist or lacks a value.
    """
    parts = []
    for name in names:
        values = read_column(table, name, positions)
        if isinstance(values, list):
            parts.append(Column(name, names=tuple(sorted(set(values)))))
        else:
            parts.append(Column(name, float(values.mean()), float(values.std()) or 1.0))
    return Columns(tuple(parts))


def read_column(table: SampleTable, name: str, positions: Array) -> Array | list[str]:
    """Return a column of the samples at `positions`: numbers, float64 (n,), or a list of names.

    Raises UsageError if there is no such column of one value per sample, or if a value is missing (NaN, infinite, "").
    """
    if name not in table or name in ("number", "path", "label"):
        kept = [each for each in table if each not in ("number", "path", "label")]
        raise UsageError(f"the samples table has no column {name!r} to train on: it has {', '.join(kept) or 'none'}")
    column = table[name]
    if isinstance(column, Strings):
        names = [column[position] for position in positions.tolist()]
        missing = np.array([not each.strip() for each in names], bool)
    else:
        if column.ndim != 1:
            raise UsageError(f"the column {name!r} has {column.shape[1:]} values per sample: give columns of one value")
        numbers = column[positions].astype(np.float64)
        missing = ~np.isfinite(numbers)
    if missing.any():
        first = int(positions[np.flatnonzero(missing)[0]])
        raise UsageError(
            f"the column {name!r} is missing for {int(missing.sum()):,} samples, the first {table.paths[first]!r} (row "
            f"{first}): fill in the values and relabel the cache, or leave these samples out"
        )
    return names if isinstance(column, Strings) else numbers


def _kind(values: Array | list[str]) -> str:
    return "names" if isinstance(values, list) else "numbers"
