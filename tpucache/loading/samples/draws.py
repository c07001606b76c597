"""Samples drawn by weights or by class: what is drawn is a function of (seed, epoch) and of the weights or classes."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.loading.arguments import to_array
from tpucache.loading.samples.sampler import Positions, epoch_random

_SHOWN: Final = 16  # hexadecimal digits of a digest


class WeightedDraws:
    """As many draws with replacement as there are samples, each sample in proportion to its weight.

    Walker's alias method: every draw takes constant time. The tables are filled in one sweep over prefix sums
    (Hübschle-Schneider and Sanders, Parallel Weighted Random Sampling, arXiv:1903.00227).
    """

    def __init__(self, weights: Any, samples: int) -> None:
        """Take one weight a sample, a list or an array (samples,). Raises UsageError for weights that are none."""
        array = _checked(weights, samples)
        self.text = f"weights {hashlib.sha256(array.astype('<f8').tobytes()).hexdigest()[:_SHOWN]}"
        self._kept, self._other = _alias_tables(array)

    def __len__(self) -> int:
        return len(self._kept)

    def positions(self, seed: int, epoch: int) -> Positions:
        """Return the positions drawn: int64 (samples,)."""
        samples = len(self)
        places = epoch_random(seed, epoch).random_sample(samples) * samples
        cells = places.astype(np.int64)
        return np.where(places - cells < self._kept[cells], cells, self._other[cells])

    def digest(self, seed: int, epoch: int) -> str:
        """Return "": `text` has a digest of the weights."""
        return ""


class BalancedDraws:
    """As many draws as there are samples, each class equally often: to within one draw, and never none.

    Within a class, samples are drawn with replacement. Classes without samples are left out.
    """

    text = "balance"

    def __init__(self, labels: npt.NDArray[Any], classes: int) -> None:
        """Take each sample's class number. Raises UsageError for labels that are no classes."""
        numbers = _class_numbers(labels, classes)
        self._members = np.argsort(numbers, kind="stable")  # class after class
        counts = np.bincount(numbers, minlength=1)
        self._counts = counts[counts > 0]
        self._starts = np.cumsum(self._counts) - self._counts

    def __len__(self) -> int:
        return len(self._members)

    def positions(self, seed: int, epoch: int) -> Positions:
        """Return the positions drawn: int64 (samples,)."""
        random, samples, classes = epoch_random(seed, epoch), len(self), len(self._counts)
        if not samples:
            return np.empty(0, np.int64)
        # A class of those that get one draw more is another one each epoch.
        turns = (random.permutation(samples) + random.randint(classes)) % classes
        chosen = (random.random_sample(samples) * self._counts[turns]).astype(np.int64)
        positions: Positions = self._members[self._starts[turns] + chosen]
        return positions

    def digest(self, seed: int, epoch: int) -> str:
        """Return "": the digest of the dataset counts the labels."""
        return ""


def _checked(weights: Any, samples: int) -> npt.NDArray[np.float64]:
    """Return weights that can be drawn by: float64 (samples,)."""
    array = to_array("weights", weights)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"weights are numbers, one a sample, not {array.dtype}")
    if array.shape != (samples,):
        raise UsageError(f"weights are one number a sample, shape ({samples},), not {array.shape}")
    array = array.astype(np.float64)
    is_wrong = ~(np.isfinite(array) & (array >= 0))
    if is_wrong.any():
        at = int(is_wrong.argmax())
        raise UsageError(f"weights are finite and at least 0; the one of sample {at} is {array[at]}")
    if samples and not array.any():
        raise UsageError("all weights are 0: there is nothing to draw")
    return array


def _alias_tables(weights: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], Positions]:
    """Return, for each of n equally likely cells, the chance that it gives its own sample, and which other it gives.

    A light sample, of less than the mean weight, leaves a gap in its cell. Heavy ones fill the gaps in turn; a heavy
    one that has given away more than its surplus has a gap itself, which the next one fills.
    """
    samples = len(weights)
    if not samples:
        return weights, np.empty(0, np.int64)
    scaled = weights / weights.max()  # no sum of them is infinite
    scaled *= samples / scaled.sum()
    is_heavy = scaled >= 1
    is_heavy[scaled.argmax()] = True  # also where rounding leaves none
    light, heavy = np.flatnonzero(~is_heavy), np.flatnonzero(is_heavy)
    gaps, surplus = np.cumsum(1 - scaled[light]), np.cumsum(scaled[heavy] - 1)
    kept, other = scaled.copy(), np.arange(samples)
    filled = np.concatenate([[0.0], gaps])  # filled[i]: before the gap i
    last = len(heavy) - 1
    other[light] = heavy[np.minimum(np.searchsorted(surplus, filled[:-1], "right"), last)]
    given = filled[np.searchsorted(filled[:-1], surplus)]  # until a heavy sample is exhausted, its last gap included
    kept[heavy] = 1 - np.maximum(given - surplus, 0)
    other[heavy] = heavy[np.minimum(np.arange(len(heavy)) + 1, last)]
    return kept, other


def _class_numbers(labels: npt.NDArray[Any], classes: int) -> npt.NDArray[np.int64]:
    if labels.ndim > 1:
        raise UsageError(
            "balance needs one class a sample, and these have several (multilabel): give weights, one a sample"
        )
    if not classes or labels.dtype.kind not in "iu":
        raise UsageError("balance needs classes, and this cache has none: give weights, one a sample")
    is_missing = labels < 0
    if is_missing.any():
        raise UsageError(
            f"balance needs a class for each sample, and {int(is_missing.sum()):,} have none, the first at "
            f"{int(is_missing.argmax())}: select the others"
        )
    return labels.astype(np.int64)
