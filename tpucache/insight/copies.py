"""Finds copies of pictures in a cache or in two: equal records, pictures that look alike, and groups of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.insight.hashing import details, hashes, opened
from tpucache.native import Array
from tpucache.store import facts
from tpucache.store.cache import Cache
from tpucache.store.hashes import BITS, Hashes, Positions, Words, kept_hashes

if TYPE_CHECKING:
    from tpucache.insight.hashing import Samples

Flags = npt.NDArray[np.bool_]

#: The hashes of copies (encoded again, resized, brighter, mirrored) differ in at most this many bits. The hashes of
#: different pictures rarely do.
THRESHOLD: Final = 48

_LARGEST_THRESHOLD: Final = 96
_ROWS: Final = 1024
_COLUMNS: Final = 1024

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
class Pairs:
    """Pairs of images that look alike, the closest first.

    `first` and `second` are positions in the hashes, int64 (m,), with first < second; for two sets, each is a position
    in its own set. `distance` is the number of bits, of 256, in which the hashes differ. If `is_mirrored`, the first
    image is like the mirrored second image. `samples` has the number of images in each set, and `threshold` is the
    largest distance. Several images with equal hashes are each paired with the first of them. `blank` is the number of
    images that were left out because they have almost no contrast.
    """

    first: Positions
    second: Positions
    distance: Positions
    is_mirrored: Flags
    samples: tuple[int, ...]
    threshold: int
    blank: int

    def __len__(self) -> int:
        return len(self.first)

    def select(self, chosen: Array | slice) -> Pairs:
        """Return some of the pairs, chosen like elements of an array."""
        columns = ("first", "second", "distance", "is_mirrored")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})


def pairs(
    hashes: Hashes,
    threshold: int = THRESHOLD,
    *,
    other: Hashes | None = None,
    most: int = 10_000_000,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pairs:
    """Return which images of a set look alike, or which images of a set look like images of the set `other`.

    Two images look alike if their hashes differ in at most `threshold` of 256 bits, 0 to 96; an image is also compared
    with mirror images. Images with almost no contrast are left out. All others are compared: 10^5 images take about a
    minute of one core, and ten times as many a hundred times as long. `on_progress` is called with
    the number of images that are done, and of all.

    Raises UsageError for more than `most` pairs, and for a threshold that is not possible.
    """
    if not 0 <= threshold <= _LARGEST_THRESHOLD:
        raise UsageError(f"a threshold is 0 to {_LARGEST_THRESHOLD} bits of {BITS}, not {threshold}")
    sets = [hashes] if other is None else [hashes, other]
    known = [np.flatnonzero(~each.is_blank) for each in sets]
    one, two = sets[0].select(known[0]), sets[-1].select(known[-1])
    owners = _first_of_equals(one), _first_of_equals(two)
    parts, count = [np.empty((4, 0), np.int64)], 0
    for row in range(0, len(one), _ROWS):
        on_progress(row, len(one))
        signs = _signs(one.words[row : row + _ROWS])
        for column in range(row if other is None else 0, len(two), _COLUMNS):
            part = slice(column, column + _COLUMNS)
            # The product of two hashes is the number of their equal bits minus that of their different bits.
            plain, turned = (signs @ _signs(words[part]).T for words in (two.words, two.mirrored))
            closest = np.maximum(plain, turned, out=turned)
            at = np.unravel_index(np.flatnonzero(closest >= BITS - 2 * threshold), closest.shape)
            first, second = at[0] + row, at[1] + column
            found = np.stack([first, second, (BITS - closest[at].astype(np.int64)) // 2, closest[at] > plain[at]])
            is_first, is_second = owners[0][first] == first, owners[1][second] == second
            if other is None:
                chosen = (first < second) & is_first & (is_second | (owners[1][second] == first))
            else:
                chosen = is_first | is_second
            parts.append(found[:, chosen])
            count += len(parts[-1][0])
            if count > most:
                raise UsageError(f"more than {most:,} pairs of images look alike: give a lower threshold")
    on_progress(len(one), len(one))
    first, second, distance, is_mirrored = np.concatenate(parts, axis=1)
    order = np.lexsort((second, first, distance))
    return Pairs(
        known[0][first[order]],
        known[-1][second[order]],
        distance[order],
        is_mirrored[order] > 0,
        samples=tuple(map(len, sets)),
        threshold=threshold,
        blank=sum(int(each.is_blank.sum()) for each in sets),
    )


def _signs(words: Words) -> npt.NDArray[np.float32]:
    """Return the bits of hashes, (n, 256), as 1 and -1."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1)
    return 2 * bits.astype(np.float32) - 1


def _first_of_equals(hashes: Hashes) -> Positions:
    """Return for each image the position of the first one whose hash, and that of its mirror image, are equal."""
    both = np.concatenate([hashes.words, hashes.mirrored], axis=1)
    _, firsts, inverse = np.unique(both, axis=0, return_index=True, return_inverse=True)
    return np.asarray(firsts[inverse.reshape(-1)])


def groups(pairs: Pairs) -> Positions:
    """Return the group of each image, as the position of the group's first member: int64 (n,).

    A group consists of all images that pairs connect, directly or through others. For pairs between two sets, the
    positions of the second set follow those of the first.
    """
    first, second = pairs.first, pairs.second + sum(pairs.samples[:-1])
    found = np.arange(sum(pairs.samples))
    while True:
        before = found.copy()
        lowest = np.minimum(found[first], found[second])
        for ends in (first, second):
            np.minimum.at(found, found[ends], lowest)  # through their first member, the rest of their group follows
            np.minimum.at(found, ends, lowest)
        found = found[found]
        if np.array_equal(found, before):
            return found


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
    is_copy: Flags

    @property
    def has_copies(self) -> bool:
        """Whether any picture of one cache is also in the other cache, or looks like one."""
        return len(self.exact) + len(self.near) > 0


@dataclass(frozen=True)
class Leak:
    """How many validation `samples` are copies of training samples.

    `path` is the path of one of the copies. `compared` is "hashes" if hashes and then details of pictures were
    compared, and "records" if only records were.
    """

    samples: int
    compared: str
    path: str


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
    sets = [opened(each) for each in (one, one if two is None else two)]
    caches = [cache for cache, _ in sets]
    made = [_settings(cache) for cache in caches]
    if others := sorted(name for name in {*made[0], *made[1]} if made[0].get(name) != made[1].get(name)):
        reason = f"the two caches were made with different settings: {', '.join(others)}"
        nothing = np.empty(0, np.int64)
        return Exact(nothing, nothing, reason)
    rows = [cache.index[cache.rows(cache.manifest.variants[0], positions)] for cache, positions in sets]
    keys = [list(zip(each["length"].tolist(), each["crc32"].tolist(), strict=True)) for each in rows]
    firsts = {key: at for at, key in reversed([*enumerate(keys[0])])}
    same = [
        (first, second)
        for second, key in enumerate(keys[1])
        if (first := firsts.get(key)) is not None
        and (two is not None or first != second)  # no record is paired with itself
        and bytes(caches[0].reader.read(rows[0][first])) == bytes(caches[1].reader.read(rows[1][second]))
    ]
    return Exact(*np.array(same, np.int64).reshape(-1, 2).T)


def _settings(cache: Cache) -> dict[str, object]:
    """Return what decides the bytes of a cache's records of the first variant."""
    manifest = cache.manifest
    chosen = {name: value for name, value in manifest.recipe.items() if name not in _NOT_IN_RECORDS}
    return {"fields": manifest.fields, "first variant": manifest.variants[0], **chosen}


def compare(
    one: Samples, two: Samples, threshold: int = THRESHOLD, *, hashed: tuple[Hashes, Hashes] | None = None
) -> Comparison:
    """Return the pictures of two caches that are copies or look alike.

    `threshold` is that of `pairs`. `hashed` has the hashes of both caches, if they are known.
    """
    first, second = hashed or (hashes(one), hashes(two))
    exact = exact_copies(one, two)
    near = pairs(first, threshold, other=second)
    known = np.isin(near.first * len(second) + near.second, exact.first * len(second) + exact.second)
    near = near.select(~known)
    return Comparison(exact, near, confirm_copies(near, one, two))


def confirm_copies(alike: Pairs, one: Samples, two: Samples | None = None) -> Flags:
    """Return which pairs of images that look alike are copies, by details that hashes do not have: bool (m,).

    Copies that were encoded again, made smaller or brighter, or mirrored are confirmed. Copies that were cropped,
    rotated or drawn on may stay unconfirmed. Raises DamageError or FormatError for records that cannot be read.
    """
    sets = [opened(each) for each in (one, one if two is None else two)]
    found = [np.empty(0, np.bool_)]
    for start in range(0, len(alike), _CONFIRMED_AT_ONCE):
        part = alike.select(slice(start, start + _CONFIRMED_AT_ONCE))
        first, second = (
            details(cache, positions[ends])
            for (cache, positions), ends in zip(sets, (part.first, part.second), strict=True)
        )
        second = np.where(part.is_mirrored[:, None, None], second[:, :, ::-1], second)
        found.append((first * second).sum((1, 2)) >= _SAME_DETAILS)
    return np.concatenate(found)


def find_leak(train: Samples, valid: Samples) -> Leak | None:
    """Return how many validation samples are copies of training samples; None if that cannot be found out.

    If both caches have stored hashes, and are not too large for a quick search, hashes are compared, then the details
    of the closest pairs. Otherwise records are compared, if the caches were made with the same settings.
    """
    sets = [opened(train), opened(valid)]
    kept = [known.select(positions) for cache, positions in sets if (known := kept_hashes(cache)) is not None]
    if len(kept) < 2 or len(kept[0]) * len(kept[1]) > _QUICK:
        exact = exact_copies(train, valid)
        if exact.reason:
            return None
        copies, compared = np.unique(exact.second), "records"
    else:
        alike = pairs(kept[0], other=kept[1]).select(slice(_QUICK_PAIRS))
        copies, compared = np.unique(alike.second[confirm_copies(alike, train, valid)]), "hashes"
    cache, positions = sets[1]
    path = cache.samples.paths[int(positions[copies[0]])] if len(copies) else ""
    return Leak(len(copies), compared, path)
