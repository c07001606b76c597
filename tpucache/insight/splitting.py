"""Divides a cache into folds for a cross-validation, with equal shares of each class, and keeps groups together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.insight.hashing import opened
from tpucache.native import Array
from tpucache.store.cache import Cache
from tpucache.store.fields import LABEL

if TYPE_CHECKING:
    from tpucache.insight.hashing import Samples

Integers = npt.NDArray[np.int64]

_GROUPS: Final = "groups"
_BINS: Final = 10  # numbers are divided into bins with about equally many samples each
_WHOLE: Final = 1 << 32  # the weight of all samples of a class; integers have the same sum on every machine


def folds(
    dataset: Samples,
    count: int = 5,
    groups: str | Array | None = None,
    stratify: str | Array | None = LABEL,
    *,
    seed: int = 0,
) -> Integers:
    """Return the fold of each sample of a dataset, an opened cache, or a cache's folder or URL: int64 (n,), from 0.

    All samples of a group are in one fold. `groups` is a column of the samples table, or an array (n,) such as
    `tpucache.insight.groups` returns; samples with the same value are a group, and a sample whose value is missing
    (empty, or NaN) is a group of its own.

    As far as groups allow, the folds have equally many samples with each value of `stratify`, a column or an array
    (n,); without groups, counts differ by at most one. Several classes a sample, (n, m), are balanced one by one, and
    numbers that are not classes in ten bins. If `stratify` is None, or "label" for a cache without labels, only the
    sizes of the folds are balanced. The same samples, groups, values and seed give the same folds on every machine.

    Raises UsageError for fewer than two folds, for more folds than groups, for missing columns, and for arrays of
    another length.
    """
    cache, positions = opened(dataset)
    total = len(positions)
    units = np.arange(total) if groups is None else _units(_values(cache, positions, groups, _GROUPS))
    values, has_classes = np.zeros(total, np.int64), False
    is_label = isinstance(stratify, str) and stratify == LABEL
    if stratify is not None and not (is_label and LABEL not in cache.samples):
        values, has_classes = _values(cache, positions, stratify, "stratify"), is_label and bool(cache.manifest.classes)
    most = len(np.unique(units))
    if not 2 <= count <= most:
        what = "" if groups is None else f" in {most:,} group{'' if most == 1 else 's'}"
        if most < 2:
            raise UsageError(f"{total:,} samples{what} cannot be divided into folds: at least 2 are needed")
        raise UsageError(f"{total:,} samples{what} can be divided into 2 to {most:,} folds, not {count}")
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).permutation(total)
    return _divide(units, _marks(values, has_classes), count, order)


def column_groups(dataset: Samples, name: str) -> Integers:
    """Return the number of each sample's group in a column of the samples table, as in `folds`: int64 (n,)."""
    return _units(_values(*opened(dataset), name, _GROUPS))


def _values(cache: Cache, positions: Integers, given: str | Array, what: str) -> Array:
    """Return a value for each sample: a column of the samples table, or the given array."""
    if not isinstance(given, str):
        values = np.asarray(given)
        if not values.ndim or len(values) != len(positions):
            raise UsageError(
                f"{what} has shape {values.shape}, and needs a value for each of {len(positions):,} samples"
            )
        return values
    if given not in cache.samples:
        raise UsageError(
            f"{cache.place} has no column {given!r} for {what}: its columns are {', '.join(cache.samples)}"
        )
    column = cache.samples[given]
    return (column if isinstance(column, np.ndarray) else np.array(list(column), np.str_))[positions]


def _units(values: Array) -> Integers:
    """Return the number of each sample's group: int64 (n,), from 0 in the order of the groups' first samples."""
    if values.ndim != 1:
        raise UsageError(f"groups have shape {values.shape}: give an array (n,) with one value for each sample")
    numbers: dict[object, int] = {}
    is_missing = values == "" if values.dtype.kind == "U" else values != values  # noqa: PLR0124  # only NaN differs from itself
    keys = (
        (at,) if missing else value for at, (value, missing) in enumerate(zip(values.tolist(), is_missing, strict=True))
    )
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _marks(values: Array, has_classes: bool) -> Integers:
    """Return samples and their classes, int64 (2, marks), given one value (n,) or several values (n, m) a sample.

    Values (n,) that are not floats are classes. If `has_classes`, or if all values (n, m) are 0 or 1, a sample has the
    classes whose values are above 0, or the class of samples that have no other. Otherwise each column is divided into
    bins, which are classes; NaN has its own.
    """
    samples = np.arange(len(values))
    if values.ndim == 1 and values.dtype.kind != "f":
        return np.stack([samples, np.unique(values, return_inverse=True)[1].reshape(-1)])
    columns = values.reshape(len(values), -1).astype(np.float64)
    if has_classes or (values.ndim > 1 and np.isin(columns, (0, 1)).all()):
        return np.stack(np.nonzero(np.column_stack([columns > 0, ~(columns > 0).any(1)])))
    parts = []
    for number, column in enumerate(columns.T):
        known = np.sort(column[~np.isnan(column)])
        bins = np.searchsorted(known, column, "left") * _BINS // max(1, len(known))
        bins[np.isnan(column)] = _BINS
        parts.append(np.stack([samples, number * (_BINS + 1) + bins]))
    return np.concatenate(parts, axis=1)


def _divide(units: Integers, marks: Integers, count: int, order: Integers) -> Integers:
    """Return the fold of each sample, int64 (n,). `units` are the numbers of the samples' groups.

    Larger groups are placed first, and among them those with rarer classes; then `order` decides, a permutation.
    """
    sizes = np.bincount(units)
    rank = np.argsort(order)[np.unique(units, return_index=True)[1]]  # a group has the rank of its first sample
    samples, classes = marks
    of_class = np.bincount(classes)
    rarest = np.full(len(sizes), len(units))
    np.minimum.at(rarest, units[samples], of_class[classes])
    by_unit = np.argsort(units[samples], kind="stable")
    contents = np.split(classes[by_unit], np.searchsorted(units[samples][by_unit], np.arange(1, len(sizes))))
    is_single = (sizes[units] == 1) & (np.bincount(samples) == 1)  # such samples are dealt out class by class

    fold_of = np.full(len(sizes), -1, np.int64)
    placed, filled = np.zeros((count, len(of_class)), np.int64), np.zeros(count, np.int64)
    weights = _WHOLE // np.maximum(of_class, 1)
    whole = np.setdiff1d(np.arange(len(sizes)), units[is_single])
    for unit in whole[np.lexsort((rank[whole], rarest[whole], -sizes[whole]))].tolist():
        own, counts = np.unique(contents[unit], return_counts=True)
        cost = placed[:, own] @ (counts * weights[own])
        fold = int(np.lexsort((filled, cost))[0])
        placed[fold, own] += counts
        filled[fold] += sizes[unit]
        fold_of[unit] = fold

    class_of = np.empty(len(units), np.int64)
    class_of[samples] = classes
    singles = order[is_single[order]]
    singles = singles[np.argsort(class_of[singles], kind="stable")]
    numbers, starts = np.unique(class_of[singles], return_index=True)
    for number, some in zip(numbers.tolist(), np.split(singles, starts)[1:], strict=True):
        # `levels` plus the shares are as equal as possible; a remainder goes to the folds with the fewest samples.
        levels = placed[:, number]
        steps = np.arange(min(len(some), int(np.ptp(levels)) + len(some) // count + 1))
        places = (np.add.outer(each, steps).reshape(-1) for each in (filled, levels))
        shares = np.bincount(np.lexsort(tuple(places))[: len(some)] // len(steps), minlength=count)
        fold_of[units[some]] = np.repeat(np.arange(count), shares)
        filled += shares
    return fold_of[units]
