"""Columns of the samples table that training uses: inputs of the model as numbers, and folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.store.samples import SampleTable, Strings


@dataclass(frozen=True)
class Column:
    """How a column of the samples table is encoded as numbers, as learned from the training samples.

    For numbers, `mean` and `std` are theirs, and `names` is empty. For text, `names` are the different texts.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return len(self.names) or 1

    def encode(self, table: SampleTable, positions: Array) -> Array:
        """Return the encoded column of the samples at `positions`, float32 (n, width)."""
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
        return sum(part.width for part in self.parts)

    def encode(self, table: SampleTable, positions: Array) -> Array:
        return np.concatenate([part.encode(table, positions) for part in self.parts], 1)

    def to_list(self) -> list[dict[str, Any]]:
        return [{**asdict(part), "names": list(part.names)} for part in self.parts]


def columns_from(values: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the Columns from which `Columns.to_list` made `values`."""
    return Columns(tuple(Column(**{**part, "names": tuple(part["names"])}) for part in values))


def fit_columns(names: Sequence[str], table: SampleTable, positions: Array) -> Columns:
    parts = []
    for name in names:
        values = read_column(table, name, positions)
        if isinstance(values, list):
            parts.append(Column(name, names=tuple(sorted(set(values)))))
        else:
            parts.append(Column(name, float(values.mean()), float(values.std()) or 1.0))
    return Columns(tuple(parts))


def read_column(table: SampleTable, name: str, positions: Array) -> Array | list[str]:
    """Return a column of the samples at `positions`: numbers, float64 (n,), or a list of names."""
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


#: Samples with this fold are in the training set of every split.
NO_FOLD: Final = -1


class Split(NamedTuple):
    """Positions of the samples to train on and to validate on: both ascending, without a position in common."""

    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]


def stratified_split(labels: npt.NDArray[Any], fraction: float, seed: int) -> Split:
    """Hold out a random fraction of every class for validation. The same arguments give the same split."""
    if not 0 < fraction < 1:
        raise UsageError(f"a validation fraction is between 0 and 1, not {fraction}")
    rng = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    parts: list[npt.NDArray[np.int64]] = []
    if labels.ndim > 1 or labels.dtype.kind == "f":
        labels = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = round(len(members) * fraction)
        parts.append(members[: min(max(count, 1), len(members) - 1)])
    valid = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)
    train = np.setdiff1d(np.arange(len(labels)), valid)
    if not len(valid) or not len(train):
        raise UsageError(
            f"{len(labels):,} samples cannot be split at {fraction}: at least one class needs two samples. Validate on "
            "another cache, or on a fold of this one"
        )
    return Split(train, valid)


def fold_split(table: SampleTable, fold: str | int) -> Split:
    valid = fold_positions(table, fold)
    train = np.setdiff1d(np.arange(len(table["fold"])), valid)
    if not len(train):
        raise UsageError(f"nothing would be left to train on: all samples of the cache are in fold {fold}")
    return Split(train, valid)


def fold_positions(table: SampleTable, fold: str | int) -> npt.NDArray[np.int64]:
    """Return the positions of the samples in the fold with the number or name `fold`, ascending."""
    folds = _folds(table)
    positions = np.flatnonzero(folds.astype(str) == str(fold).strip())
    if not len(positions):
        raise UsageError(f"there is no fold {str(fold).strip()!r}: the cache has {np.unique(folds).tolist()}")
    return positions


def fold_splits(table: SampleTable) -> dict[str, Split]:
    """Return the split of each fold by the fold's name, sorted by number or name."""
    folds = _folds(table)
    values = np.unique(folds)
    values = values[values.astype(str) != str(NO_FOLD)]
    if len(values) == 1 and (folds == values[0]).all():
        raise UsageError(
            f"all samples are in one fold, {values.tolist()}: nothing would remain to train on. Make folds with "
            "`tpucache relabel CACHE --make-folds 5`"
        )
    if len(values) < 2:
        found = f"only one fold besides {NO_FOLD}, {values.tolist()}" if len(values) else f"no fold besides {NO_FOLD}"
        raise UsageError(f"the cache has {found}: cross-validation needs at least two folds")
    return {str(value): Split(np.flatnonzero(folds != value), np.flatnonzero(folds == value)) for value in values}


def _folds(table: SampleTable) -> npt.NDArray[Any]:
    if "fold" not in table:
        raise UsageError(
            "the cache has no folds: make folds with `tpucache relabel CACHE --make-folds 5`, or build the cache from "
            "a .csv with --fold-col"
        )
    column = table["fold"]
    folds = np.asarray(column if isinstance(column, np.ndarray) else list(column))
    if folds.ndim != 1:
        raise UsageError(
            f"the column fold has shape {folds.shape}, not one value a sample: build the cache with --fold-col again"
        )
    if folds.dtype.kind == "f":
        missing = ~(np.isfinite(folds) & (folds == np.round(folds)))
    else:
        missing = folds == "" if folds.dtype.kind == "U" else np.full(len(folds), False)
    if missing.any():
        raise UsageError(
            f"{int(missing.sum()):,} samples are in no fold, the first at position {int(missing.argmax())}: every fold "
            "would train on them. Give each sample a whole number or a name as its fold"
        )
    return folds if folds.dtype.kind == "U" else folds.astype(np.int64)
