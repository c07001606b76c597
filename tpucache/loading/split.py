"""Which samples train and which validate."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError


class Split(NamedTuple):
    """Positions of samples, ascending, in two sets that have none in common."""

    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]


def stratified_split(labels: npt.NDArray[Any], fraction: float, seed: int) -> Split:
    """Hold out a fraction of every class, chosen by the seed alone; a class of two or more keeps one on each side.

    Raises UsageError unless 0 < fraction < 1 and both sets have samples.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"a validation fraction lies between 0 and 1, not at {fraction}")
    rng = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    held: list[npt.NDArray[np.int64]] = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = round(len(members) * fraction)
        held.append(members[: min(max(count, 1), len(members) - 1)])
    valid = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    train = np.setdiff1d(np.arange(len(labels)), valid)
    if not len(valid) or not len(train):
        raise UsageError(f"{len(labels)} samples cannot be split at {fraction}")
    return Split(train, valid)
