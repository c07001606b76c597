"""pairs and groups: exactly those that differ by few enough bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache.errors import UsageError
from tpucache.insight import Hashes, Pairs, groups, pairs


def random_hashes(rng: np.random.Generator, count: int) -> Hashes:
    words, mirrored = (rng.integers(0, 1 << 64, (count, 4), np.uint64) for _ in range(2))
    return Hashes(np.arange(count, dtype=np.uint64), words, mirrored, np.zeros(count, np.bool_))


def flipped(rng: np.random.Generator, words: np.ndarray, bits: int) -> np.ndarray:
    """Return a hash with this many bits changed."""
    chosen = np.unpackbits(words.copy().view(np.uint8))
    chosen[rng.choice(256, bits, replace=False)] ^= 1
    return np.packbits(chosen).view(np.uint64)


def slowly(one: Hashes, two: Hashes | None, threshold: int) -> dict[tuple[int, int], tuple[int, bool]]:
    """Return every pair that is close, with its distance and whether that is to the mirror image."""
    other, found = one if two is None else two, {}
    for first in np.flatnonzero(~one.is_blank).tolist():
        near, turned = (
            np.unpackbits((one.words[first] ^ words).view(np.uint8), axis=1).sum(1)
            for words in (other.words, other.mirrored)
        )
        for second in np.flatnonzero((np.minimum(near, turned) <= threshold) & ~other.is_blank).tolist():
            if two is not None or first < second:
                found[first, second] = (int(min(near[second], turned[second])), bool(turned[second] < near[second]))
    return found


def as_dict(found: Pairs) -> dict[tuple[int, int], tuple[int, bool]]:
    columns = [each.tolist() for each in (found.first, found.second, found.distance, found.is_mirrored)]
    return {(first, second): (near, turned) for first, second, near, turned in zip(*columns, strict=True)}


@settings(max_examples=25)
@given(st.integers(0, 1000), st.booleans(), st.integers(0, 60), st.sampled_from([22, 22, 22, 1100]))
def test_the_pairs_are_those_that_all_comparisons_find(seed: int, is_one_set: bool, threshold: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    one, two = random_hashes(rng, count + 9), random_hashes(rng, count)
    other = one if is_one_set else two
    for number in range(12):
        copy = flipped(rng, (one.words, one.mirrored)[number % 2][number], int(rng.integers(1, 60)))
        (other.words, other.mirrored)[number % 3 == 0][count - 1 - number] = copy
    one.is_blank[3] = other.is_blank[count - 2] = True
    found = pairs(one, threshold, other=None if is_one_set else two)
    assert as_dict(found) == slowly(one, None if is_one_set else two, threshold)
    order = list(zip(found.distance.tolist(), found.first.tolist(), found.second.tolist(), strict=True))
    assert order == sorted(order), "the closest come first"


def test_equal_hashes_are_paired_with_the_first_of_them(noise: np.random.Generator) -> None:
    one, two = random_hashes(noise, 40), random_hashes(noise, 9)
    for number in (4, 11, 30):
        one.words[number], one.mirrored[number] = one.words[4], one.mirrored[4]
    one.words[20] = flipped(noise, one.words[4], 5)
    two.words[2] = two.words[7] = one.words[4]
    two.mirrored[7] = two.mirrored[2]
    assert set(as_dict(pairs(one))) == {(4, 11), (4, 30), (4, 20)}
    assert set(as_dict(pairs(one, other=two))) == {(4, 2), (4, 7), (11, 2), (30, 2), (20, 2), (20, 7)}


def test_too_many_pairs_and_wrong_thresholds_are_refused(noise: np.random.Generator) -> None:
    same = random_hashes(noise, 60)
    same.words[:] = [flipped(noise, same.words[0], 3) for _ in range(60)]
    assert len(pairs(same, most=60 * 59 // 2)) == 60 * 59 // 2
    with pytest.raises(UsageError, match="more than 300 pairs of images look alike: give a lower threshold"):
        pairs(same, most=300)
    for threshold in (-1, 97):
        with pytest.raises(UsageError, match="a threshold is 0 to 96 bits"):
            pairs(same, threshold)


@pytest.mark.parametrize("count", [0, 1])
def test_few_images_have_no_pairs(noise: np.random.Generator, count: int) -> None:
    few = random_hashes(noise, count)
    assert len(pairs(few)) == len(pairs(few, other=random_hashes(noise, 3))) == 0
    assert groups(pairs(few)).tolist() == [0] * count


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=40), st.booleans())
def test_groups_are_what_pairs_connect(edges: list[tuple[int, int]], is_one_set: bool) -> None:
    ends = np.array([edge for edge in edges if edge[0] != edge[1] or not is_one_set], np.int64).reshape(-1, 2)
    samples = (30,) if is_one_set else (30, 30)
    zeros = np.zeros(len(ends), np.int64)
    found = groups(Pairs(ends[:, 0], ends[:, 1], zeros, zeros > 0, samples, 48, 0))
    parents = list(range(sum(samples)))
    for first, second in (ends + np.array([0, 0 if is_one_set else 30])).tolist():
        old, new = sorted((parents[first], parents[second]), reverse=True)
        parents = [new if each == old else each for each in parents]
    assert found.tolist() == parents
