"""Compares two caches: finds pictures that are in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tpucache.insight.hashing import details, hashes, opened
from tpucache.insight.matching import THRESHOLD, Pairs, Search, pairs
from tpucache.store import facts
from tpucache.store.cache import Cache
from tpucache.store.hashes import Hashes, kept_hashes

if TYPE_CHECKING:
    from tpucache.insight.hashing import Samples

Positions = npt.NDArray[np.int64]

#: Settings of a recipe that do not change the bytes of a clean record.
_NOT_IN_RECORDS: Final = {"variants", "augment", "augmentation", "seed", "shard_mb"}

#: Pictures whose details have at least this correlation count as copies. Copies of 63 photographs (encoded again,
#: halved, brighter or mirrored) have at least 0.96; 238 pairs of different photographs that look alike at most 0.64.
_SAME_DETAILS: Final = 0.9
_CONFIRMED_AT_ONCE: Final = 512  # pairs of pictures

#: Each of these numbers of comparisons, of hashes and of details, takes a few seconds.
_QUICK: Final = 1_000_000_000
_QUICK_PAIRS: Final = 2048


@dataclass(frozen=True)
class Exact:
    """Samples of two caches whose clean records are equal byte for byte.

    `first` and `second` are the samples' positions in the two sets, int64 (m,). `reason` says why nothing was compared;
    "" if records were compared.
    """

    first: Positions
    second: Positions
    reason: str = ""

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    `exact` are the samples with equal records, and `near` all other pairs of pictures that look alike. `is_copy`, bool
    (m,), says for each pair in `near` whether a second test confirms that it is a copy.
    """

    exact: Exact
    near: Pairs
    is_copy: npt.NDArray[np.bool_]

    @property
    def has_copies(self) -> bool:
        """Whether any picture of one cache is also in the other cache, or looks like one."""
        return bool(len(self.exact) or len(self.near))


@dataclass(frozen=True)
class Leak:
    """How many validation `samples` are copies of training samples, and how many others only look `alike`.

    `path` is the path of one of the copies. `compared` is "hashes" if hashes and then details of pictures were
    compared, and "records" if only records were. `closest` is the closest pair that only looks alike: the path of the
    validation sample, that of the training sample, and the number of bits, of 256, in which their hashes differ.
    """

    samples: int
    compared: str
    path: str
    alike: int = 0
    closest: tuple[str, str, int] | None = None


def findings(dataset: Samples) -> facts.Findings:
    """Return possible problems of a whole cache, given by a dataset, the opened cache, or its folder or URL.

    No record is read. Raises the errors of opening a cache.
    """
    return facts.findings(opened(dataset)[0])


def exact_copies(one: Samples, two: Samples | None = None) -> Exact:
    """Return the pairs of samples of two caches, or of one cache, that have the same clean record.

    Lengths and checksums are compared, then bytes. If several records of `one` are equal, each equal record is paired
    with the first of them. If the caches were made with different settings or libraries, their records of one picture
    differ, so nothing is compared. Raises DamageError or FormatError for records that cannot be read.
    """
    caches, keys, rows = [], [], []
    for dataset in (one, one if two is None else two):
        cache, positions = opened(dataset)
        chosen = np.arange(cache.manifest.samples) if positions is None else positions
        found = cache.index[cache.rows(cache.manifest.variants[0], chosen)]
        caches.append(cache)
        rows.append(found)
        keys.append(found["length"].astype(np.uint64) << np.uint64(32) | found["crc32"].astype(np.uint64))
    if reason := _difference(*caches):
        return Exact(np.empty(0, np.int64), np.empty(0, np.int64), reason)
    order = np.argsort(keys[0], kind="stable")
    places = np.searchsorted(keys[0][order], keys[1])
    is_there = places < len(order)
    is_there[is_there] = keys[0][order[places[is_there]]] == keys[1][is_there]
    first, second = order[places[is_there]], np.flatnonzero(is_there)
    if two is None:  # no record is paired with itself
        first, second = first[first != second], second[first != second]
    kept = np.zeros(len(first), np.bool_)
    for at, ends in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        of_one, of_two = (
            bytes(each.reader.read(found[end])) for each, found, end in zip(caches, rows, ends, strict=True)
        )
        kept[at] = of_one == of_two
    return Exact(first[kept], second[kept])


def _difference(one: Cache, two: Cache) -> str:
    if one.manifest.fields != two.manifest.fields:
        return "the two caches have records of different fields, sizes or codecs"
    if one.manifest.variants[0] != two.manifest.variants[0]:
        return "the two caches have different first variants: one of the caches lacks the clean variant"
    first, second = one.manifest.recipe, two.manifest.recipe
    others = sorted(str(name) for name in {*first, *second} - _NOT_IN_RECORDS if first.get(name) != second.get(name))
    return f"the two caches were made with different settings: {', '.join(others)}" if others else ""


def compare(
    one: Samples,
    two: Samples,
    threshold: int = THRESHOLD,
    *,
    search: Search = "auto",
    hashed: tuple[Hashes, Hashes] | None = None,
) -> Comparison:
    """Return the pictures of two caches that are copies or look alike.

    `threshold` and `search` are those of `pairs`. `hashed` has the hashes of both caches, if they are known.
    """
    first, second = hashed or (hashes(one), hashes(two))
    exact = exact_copies(one, two)
    near = pairs(first, threshold, other=second, search=search)
    known = np.isin(near.first * len(second) + near.second, exact.first * len(second) + exact.second)
    near = near.select(~known)
    return Comparison(exact, near, confirm_copies(near, one, two))


def confirm_copies(alike: Pairs, one: Samples, two: Samples | None = None) -> npt.NDArray[np.bool_]:
    """Return which pairs of images that look alike are copies, by details that hashes do not have: bool (m,).

    Copies that were encoded again, made smaller or brighter, or mirrored are confirmed. Copies that were cropped,
    rotated or drawn on may stay unconfirmed. Raises DamageError or FormatError for records that cannot be read.
    """
    sets = [opened(each) for each in (one, one if two is None else two)]
    found = np.zeros(len(alike), np.bool_)
    for start in range(0, len(alike), _CONFIRMED_AT_ONCE):
        part = slice(start, start + _CONFIRMED_AT_ONCE)
        fine = []
        for (cache, positions), ends in zip(sets, (alike.first[part], alike.second[part]), strict=True):
            distinct, places = np.unique(ends, return_inverse=True)
            fine.append(details(cache, distinct if positions is None else positions[distinct])[places.reshape(-1)])
        turned = alike.is_mirrored[part, None, None]
        found[part] = (fine[0] * np.where(turned, fine[1][:, :, ::-1], fine[1])).sum((1, 2)) >= _SAME_DETAILS
    return found


def find_leak(train: Samples, valid: Samples) -> Leak | None:
    """Return how many validation samples are copies of training samples; None if that cannot be found out.

    If both caches have stored hashes, and are not too large for a quick search, hashes are compared, then the details
    of the closest pairs. Otherwise records are compared, if the caches were made with the same settings.
    """
    sets = []
    for cache, at in map(opened, (train, valid)):
        if (known := kept_hashes(cache)) is not None:
            sets.append(known if at is None else known.select(at))
    if len(sets) == 2 and len(sets[0]) * len(sets[1]) <= _QUICK:
        return _leak_of_hashes(train, valid, pairs(sets[0], other=sets[1]))
    exact = exact_copies(train, valid)
    if exact.reason:
        return None
    copies = np.unique(exact.second)
    return Leak(len(copies), "records", _path(valid, copies[0]) if len(copies) else "")


def _leak_of_hashes(train: Samples, valid: Samples, alike: Pairs) -> Leak:
    """`alike` begins with the closest pairs. Only the first `_QUICK_PAIRS` are tested for being copies."""
    is_copy = confirm_copies(alike.select(slice(_QUICK_PAIRS)), train, valid)
    copies = np.unique(alike.second[: len(is_copy)][is_copy])
    others = alike.select(~np.isin(alike.second, copies))
    closest = None
    if len(others):
        closest = _path(valid, others.second[0]), _path(train, others.first[0]), int(others.distance[0])
    path = _path(valid, copies[0]) if len(copies) else ""
    return Leak(len(copies), "hashes", path, len(np.unique(others.second)), closest)


def _path(dataset: Samples, number: np.int64) -> str:
    cache, at = opened(dataset)
    return cache.samples.paths[int(number if at is None else at[number])]
