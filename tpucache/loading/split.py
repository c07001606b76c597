"""Splits samples into training and validation sets: by a fraction of each class, or by folds."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.store.samples import Column, SampleTable

#: Samples with this fold are in the training set of every split.
NO_FOLD: Final = -1


class Split(NamedTuple):
    """Positions of the samples to train on and to validate on: both ascending, without a position in common."""

    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]


def stratified_split(labels: npt.NDArray[Any], fraction: float, seed: int) -> Split:
    """Hold out a random fraction of every class for validation. The same arguments give the same split.

    A class with two or more samples has samples in both sets. Labels that are not class numbers (vectors or values)
    count as one class. Raises UsageError unless 0 < fraction < 1 and both sets have samples.
    """
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
    """Hold out the samples whose value in the table's column `fold` is the argument `fold`, an integer or a name.

    Raises UsageError if the table has no such fold or no other fold, or if samples have no fold.
    """
    valid = fold_positions(table, fold)
    train = np.setdiff1d(np.arange(len(table["fold"])), valid)
    if not len(train):
        raise UsageError(f"nothing would be left to train on: all samples of the cache are in fold {fold}")
    return Split(train, valid)


def fold_positions(table: SampleTable, fold: str | int) -> npt.NDArray[np.int64]:
    """Return the positions of the samples in the fold with the number or name `fold`, ascending.

    Raises UsageError if there is no such fold, or if a sample has no fold.
    """
    folds = _folds(table)
    text = str(fold).strip()
    is_number = text.removeprefix("-").isdecimal()
    is_member = folds == text if folds.dtype.kind == "U" else np.full(len(folds), False)
    if folds.dtype.kind != "U" and is_number:
        is_member = folds == int(text)
    if not is_member.any():
        raise UsageError(f"there is no fold {text!r}: the cache has {np.unique(folds).tolist()}")
    return np.flatnonzero(is_member)


def fold_splits(table: SampleTable) -> dict[str, Split]:
    """Return the split of each fold by the fold's name, sorted by number or name.

    Samples of fold -1 are in every training set and in no validation set, as in scikit-learn's PredefinedSplit. Raises
    UsageError if there are fewer than two folds, or if samples have no fold.
    """
    folds = _folds(table)
    values = np.unique(folds)
    values = values[values != (str(NO_FOLD) if folds.dtype.kind == "U" else NO_FOLD)]
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
    column: Column = table["fold"]
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
