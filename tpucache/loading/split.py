"""Which samples train and which validate."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.store.samples import SampleTable


class Split(NamedTuple):
    """Positions of samples, ascending, in two sets that have none in common."""

    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]


def stratified_split(labels: npt.NDArray[Any], fraction: float, seed: int) -> Split:
    """Hold out a fraction of every class, chosen by the seed alone; a class of two or more keeps one on each side.

    Labels that are not class numbers (a vector a sample, or a value) are taken as one class.

    Raises UsageError unless 0 < fraction < 1 and both sets have samples.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"a validation fraction lies between 0 and 1, not at {fraction}")
    rng = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    held: list[npt.NDArray[np.int64]] = []
    if labels.ndim > 1 or labels.dtype.kind == "f":
        labels = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = round(len(members) * fraction)
        held.append(members[: min(max(count, 1), len(members) - 1)])
    valid = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    train = np.setdiff1d(np.arange(len(labels)), valid)
    if not len(valid) or not len(train):
        raise UsageError(f"{len(labels)} samples cannot be split at {fraction}")
    return Split(train, valid)


def fold_split(table: SampleTable, fold: str) -> Split:
    """Hold out the samples of one fold, by the samples table's column `fold`. Raises UsageError."""
    if "fold" not in table:
        raise UsageError("the cache has no folds: warm it up from a .csv with --fold-col, or give a fraction")
    folds = np.asarray(table["fold"])
    if not fold.isdecimal() or not np.any(folds == int(fold)) or np.all(folds == int(fold)):
        raise UsageError(f"there is no fold {fold!r} to hold out: the cache has {np.unique(folds).tolist()}")
    held = folds == int(fold)
    return Split(np.flatnonzero(~held), np.flatnonzero(held))
