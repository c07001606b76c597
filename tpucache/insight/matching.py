"""Finds pairs and groups of pictures that look alike, by their hashes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.native import Array
from tpucache.store.hashes import BITS, Hashes

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

Search = Literal["auto", "exact", "bands"]

#: The hashes of copies (encoded again, resized, brighter, mirrored) differ in at most this many bits. The hashes of
#: different pictures rarely do.
THRESHOLD: Final = 48

_LARGEST_THRESHOLD: Final = 96
_MOST_PAIRS: Final = 20_000_000
#: The number of comparisons up to which all images are compared with each other: about a minute on one core.
_MOST_COMPARED: Final = 20_000_000_000

#: The share of the search that is done, and pairs: the numbers of their hashes in both sets, and their distances.
Task = tuple[float, Positions, Positions, Array]

_ROWS: Final = 8
_COLUMNS: Final = 8192  # with this size, a block stays in a processor's cache

_FLIPS: Final = 2
_MOST_CANDIDATES: Final = 1 << 22  # pairs that are compared at once


@dataclass(frozen=True)
class Pairs:
    """Pairs of images that look alike, the closest first.

    `first` and `second` are positions in the hashes, int64 (m,), with first < second; for two sets, each is a position
    in its own set. `distance` is the number of bits, of 256, in which the hashes differ. If `is_mirrored`, the first
    image is like the mirrored second image. `samples` has the number of images in each set, and `threshold` is the
    largest distance. Several images with equal hashes are each paired with the first of them.

    `search` is "exact" if all images were compared, or "bands" (see `pairs`). `share` is the share of the pairs at the
    distance `threshold` that such a search finds; of closer pairs it finds more. `blank` is the number of images that
    were left out because they have almost no contrast.
    """

    first: Positions
    second: Positions
    distance: Positions
    is_mirrored: npt.NDArray[np.bool_]
    samples: tuple[int, ...]
    threshold: int
    search: str
    share: float
    blank: int

    def __len__(self) -> int:
        return len(self.first)

    def select(self, chosen: Array | slice) -> Pairs:
        """Return some of the pairs, chosen like elements of an array."""
        return replace(
            self,
            first=self.first[chosen],
            second=self.second[chosen],
            distance=self.distance[chosen],
            is_mirrored=self.is_mirrored[chosen],
        )


def pairs(
    hashes: Hashes,
    threshold: int = THRESHOLD,
    *,
    other: Hashes | None = None,
    search: Search = "auto",
    on_progress: Callable[[float], None] = lambda share: None,
) -> Pairs:
    """Return which images of a set look alike, or which images of a set look like images of the set `other`.

    Two images look alike if their hashes differ in at most `threshold` of 256 bits, 0 to 96; an image is also compared
    with mirror images. Images with almost no contrast are left out. With `search` "exact", all images are compared;
    with "bands", only images that differ in at most two bits of at least one band of bits, as most copies do. "auto" is
    exact up to about 10^5 images. `on_progress` is called with the share that is done.

    Raises UsageError for too many pairs (10 to 20 million), and for a threshold or a search that is not possible.
    """
    if not 0 <= threshold <= _LARGEST_THRESHOLD:
        raise UsageError(f"a threshold is 0 to {_LARGEST_THRESHOLD} bits of {BITS}, not {threshold}")
    one, two = _Distinct(hashes), None if other is None else _Distinct(other)
    compared = len(one) * (len(one) if two is None else 2 * len(two))  # with images and with mirror images
    if search == "auto":
        search = "exact" if compared <= _MOST_COMPARED else "bands"
    if search not in _SEARCHES:
        raise UsageError(f"a search is auto, exact or bands, not {search!r}")
    against, parts, count = one if two is None else two, list[Array](), 0
    for half, words in enumerate((against.words, against.mirrored)):
        for done, rows, columns, distances in _SEARCHES[search](one.words, words, threshold, two is None):
            parts.append(np.stack([rows, columns, distances, np.full(len(rows), half)], 1))
            count += len(rows)
            if count > _MOST_PAIRS:
                parts = [_closest(parts)]
                count = len(parts[0])
                if count > _MOST_PAIRS // 2:
                    raise UsageError(
                        f"more than {_MOST_PAIRS // 2:,} pairs of images look alike: give a lower threshold"
                    )
            on_progress((half + done) / 2)
    on_progress(1.0)
    whole = _all_of(_closest(parts), one, two)
    whole = whole[np.lexsort(whole.T[[1, 0, 2]])]
    share = 1.0 if search == "exact" else found_share(threshold, len(against))
    sets = [hashes] if other is None else [hashes, other]
    first, second, distance, is_mirrored = np.ascontiguousarray(whole.T)
    return Pairs(
        first,
        second,
        distance,
        is_mirrored.astype(np.bool_),
        samples=tuple(map(len, sets)),
        threshold=threshold,
        search=search,
        share=share,
        blank=sum(int(each.is_blank.sum()) for each in sets),
    )


class _Distinct:
    """The distinct images of a set, without blank images, in the order of their positions.

    Images whose hashes, and those of their mirror images, are equal are one. `firsts` are the positions of the first
    image of each, and `others` those of all other images, ordered by `owners`, the numbers of their distinct images.
    """

    def __init__(self, hashes: Hashes) -> None:
        positions = np.flatnonzero(~hashes.is_blank)
        both = np.concatenate([hashes.words, hashes.mirrored], axis=1)[positions]
        order = np.lexsort(both.T)  # stable: equal hashes stay in the order of their positions
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (both[order[1:]] != both[order[:-1]]).any(1)
        self.firsts = np.sort(positions[order[is_new]])
        self.words, self.mirrored = hashes.words[self.firsts], hashes.mirrored[self.firsts]
        first_of_all = positions[order[is_new]][np.cumsum(is_new) - 1]
        owners = np.searchsorted(self.firsts, first_of_all[~is_new])
        by_owner = np.argsort(owners, kind="stable")
        self.others, self.owners = positions[order[~is_new]][by_owner], owners[by_owner]

    def __len__(self) -> int:
        return len(self.firsts)

    def join(self, numbers: Positions) -> tuple[Positions, Positions]:
        """Return the other images of the distinct images `numbers`, and for each its index in `numbers`."""
        starts = np.searchsorted(self.owners, numbers)
        counts = np.searchsorted(self.owners, numbers, "right") - starts
        return self.others[_ranges(starts, counts)], np.repeat(np.arange(len(numbers)), counts)


def _ranges(starts: Positions, counts: Positions) -> Positions:
    """Return the integers of several ranges, one after another: range i has `counts[i]` integers from `starts[i]`."""
    found: Positions = np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return found


def _closest(parts: Sequence[Array]) -> Array:
    """Return each pair once, with its smallest distance: both numbers, distance, whether it is mirrored."""
    whole = np.concatenate([np.empty((0, 4), np.int64), *parts])
    whole = whole[np.lexsort(whole.T[[3, 2, 1, 0]])]
    is_new = np.ones(len(whole), np.bool_)
    is_new[1:] = (whole[1:, :2] != whole[:-1, :2]).any(1)
    return whole[is_new]


def _all_of(found: Array, one: _Distinct, two: _Distinct | None) -> Array:
    """Return pairs of images, given pairs of distinct hashes; add the pairs of images with equal hashes."""
    rows, columns = found[:, 0], found[:, 1]
    near = np.stack([one.firsts[rows], (two or one).firsts[columns], *found[:, 2:].T], 1)
    if two is None:
        zeros = np.zeros_like(one.others)
        return np.concatenate([near, np.stack([one.firsts[one.owners], one.others, zeros, zeros], 1)])
    parts = [near]
    for side, (which, numbers) in enumerate(((one, rows), (two, columns))):
        others, places = which.join(numbers)
        more = near[places]
        more[:, side] = others
        parts.append(more)
    return np.concatenate(parts)


def _exact(one: Words, two: Words, threshold: int, is_one_set: bool) -> Iterator[Task]:
    """Yield pairs of hashes that differ in at most `threshold` bits.

    Half of the 256 bits are compared first: most pairs differ in more than `threshold` of them.
    """
    turned = np.ascontiguousarray(two.T)
    bits = np.empty((_ROWS, _COLUMNS), np.uint64)
    half, rest = np.empty((_ROWS, _COLUMNS), np.uint8), np.empty((_ROWS, _COLUMNS), np.uint8)
    for first in range(0, len(one), _ROWS):
        block = one[first : first + _ROWS]
        for start in range(first + 1 if is_one_set else 0, len(two), _COLUMNS):
            columns = turned[:, start : start + _COLUMNS]
            part = (slice(len(block)), slice(columns.shape[1]))
            for word, counts in ((0, half), (2, rest)):
                np.bitwise_xor(block[:, word, None], columns[word], out=bits[part])
                count_bits(bits[part], counts[part])
            np.add(half[part], rest[part], out=half[part])
            rows, near = np.nonzero(half[part] <= threshold)
            if len(rows):
                yield first / len(one), *_close(one, two, first + rows, start + near, threshold, is_one_set)


def _close(
    one: Words, two: Words, rows: Positions, columns: Positions, threshold: int, is_one_set: bool
) -> tuple[Positions, Positions, Array]:
    """Return the pairs (`rows`, `columns`) that are close; within one set, only those whose row is smaller."""
    if is_one_set:
        is_first = rows < columns
        rows, columns = rows[is_first], columns[is_first]
    bits = one[rows] ^ two[columns]
    counts = np.empty(bits.shape, np.uint8)
    count_bits(bits, counts)
    distances = counts.sum(1, dtype=np.int64)
    is_close = distances <= threshold
    return rows[is_close], columns[is_close], distances[is_close]


def count_bits(words: Words, out: npt.NDArray[np.uint8]) -> None:
    """Write the number of set bits of each word to `out`."""
    if hasattr(np, "bitwise_count"):  # numpy 2
        np.bitwise_count(words, out=out)
        return
    # Sums of neighbouring bits, then of fours, then of eights (Warren, "Hacker's Delight", 5-1).
    twos = words - ((words >> np.uint64(1)) & np.uint64(0x5555555555555555))
    low = np.uint64(0x3333333333333333)
    fours = (twos & low) + ((twos >> np.uint64(2)) & low)
    eights = (fours + (fours >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    out[...] = ((eights * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(np.uint8)


def _bands(one: Words, two: Words, threshold: int, is_one_set: bool) -> Iterator[Task]:
    """Yield pairs of hashes that differ in at most `threshold` bits, and in at most two bits of at least one band.

    For each band a table has the images by the values of the band's bits. Each value is looked up with none, one and
    two of its bits changed (multi-index hashing: Norouzi, Punjani and Fleet, 2012).
    """
    width, bands = _band_bits(len(two))
    order = np.random.RandomState(np.random.MT19937(0)).permutation(BITS)  # neighbours in frequency are alike
    flips = [sum(1 << bit for bit in each) for count in range(_FLIPS + 1) for each in combinations(range(width), count)]
    for band in range(bands):
        places = order[band * width : (band + 1) * width]
        keys, asked = _values(two, places), _values(one, places)
        by_key, by_asked = np.argsort(keys, kind="stable"), np.argsort(asked, kind="stable")
        starts = np.zeros((1 << width) + 1, np.int32)
        np.cumsum(np.bincount(keys, minlength=1 << width), out=starts[1:])
        asked = asked[by_asked]  # sorted, so that neighbours in the table are looked up one after the other
        for number, flip in enumerate(flips):
            done = (band + number / len(flips)) / bands
            # Within one set, two different values are looked up from only one of them.
            is_from = asked & (1 << (flip.bit_length() - 1)) == 0 if one is two and flip else slice(None)
            values, sources = asked[is_from] ^ flip, by_asked[is_from]
            counts = starts[values + 1] - starts[values]
            hits = np.flatnonzero(counts)
            values, sources, counts = values[hits], sources[hits], counts[hits].astype(np.int64)
            for part in _parts(counts):
                columns = by_key[_ranges(starts[values[part]].astype(np.int64), counts[part])]
                rows = np.repeat(sources[part], counts[part])
                if one is two and flip:
                    rows, columns = np.minimum(rows, columns), np.maximum(rows, columns)
                yield done, *_close(one, two, rows, columns, threshold, is_one_set)


def _parts(counts: Positions) -> Iterator[slice]:
    """Yield slices of looked-up values that have about `_MOST_CANDIDATES` candidates together, by their `counts`."""
    ends = np.cumsum(counts)
    limits = np.arange(_MOST_CANDIDATES, int(counts.sum()), _MOST_CANDIDATES)
    bounds = sorted({0, *np.searchsorted(ends, limits, "right").tolist(), len(counts)})
    return (slice(start, stop) for start, stop in pairwise(bounds))


def _band_bits(images: int) -> tuple[int, int]:
    """Return how many bits a band has, so that few images have equal bits by chance, and the number of bands."""
    width = min(max(int(images).bit_length() + 2, 16), 24)
    return width, BITS // width


def _values(words: Words, places: Positions) -> Positions:
    """Return the bits of hashes at the bit positions `places`, as one number for each hash."""
    values = np.zeros(len(words), np.int64)
    for bit, place in enumerate(places.tolist()):
        values |= ((words[:, place // 64] >> np.uint64(place % 64)) & np.uint64(1)).astype(np.int64) << bit
    return values


_SEARCHES: Final[dict[str, Callable[[Words, Words, int, bool], Iterator[Task]]]] = {"exact": _exact, "bands": _bands}


def found_share(threshold: int, images: int) -> float:
    """Return the share of pairs that a search of `images` by bands finds, if `threshold` random bits differ."""
    width, bands = _band_bits(images)
    ways = sum(math.comb(threshold, flips) * math.comb(BITS - threshold, width - flips) for flips in range(_FLIPS + 1))
    return 1 - (1 - ways / math.comb(BITS, width)) ** bands


def groups(pairs: Pairs) -> Positions:
    """Return the group of each image, as the position of the group's first member: int64 (n,).

    A group consists of all images that pairs connect, directly or through others. For pairs between two sets, the
    positions of the second set follow those of the first.
    """
    first, second = pairs.first, pairs.second + (pairs.samples[0] if len(pairs.samples) > 1 else 0)
    found = np.arange(sum(pairs.samples))
    while True:
        lowest = np.minimum(found[first], found[second])
        joined = found.copy()
        for ends in (first, second):
            np.minimum.at(joined, ends, lowest)
            np.minimum.at(joined, found[ends], lowest)  # and, through their first member, the rest of their group
        while not np.array_equal(joined, joined[joined]):
            joined = joined[joined]
        if np.array_equal(joined, found):
            return found
        found = joined
