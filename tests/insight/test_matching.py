"""pairs and groups: exactly those that differ by few enough bits, whichever way they are searched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import thorough

from tpucache.errors import UsageError
from tpucache.insight import Hashes, Pairs, groups, hashes, matching, pairs
from tpucache.insight.matching import count_bits, found_share


def random_hashes(rng: np.random.Generator, count: int) -> Hashes:
    words, mirrored = (rng.integers(0, 1 << 64, (count, 4), np.uint64) for _ in range(2))
    return Hashes(np.arange(count, dtype=np.uint64), words, mirrored, np.zeros(count, np.bool_))


def flipped(rng: np.random.Generator, words: np.ndarray, bits: int) -> np.ndarray:
    """Return a hash with this many bits changed."""
    chosen = np.unpackbits(words.copy().view(np.uint8))
    chosen[rng.choice(256, bits, replace=False)] ^= 1
    return np.packbits(chosen).view(np.uint64)


def bits_between(one: np.ndarray, two: np.ndarray) -> int:
    return int(np.unpackbits((one ^ two).view(np.uint8)).sum())


def slowly(one: Hashes, two: Hashes | None, threshold: int) -> dict[tuple[int, int], tuple[int, bool]]:
    """Return every pair that is close, with its distance and whether that is to the mirror image."""
    other, found = one if two is None else two, {}
    for first in range(len(one)):
        for second in range(first + 1 if two is None else 0, len(other)):
            if one.is_blank[first] or other.is_blank[second]:
                continue
            near = bits_between(one.words[first], other.words[second])
            turned = bits_between(one.words[first], other.mirrored[second])
            if min(near, turned) <= threshold:
                found[first, second] = (min(near, turned), turned < near)
    return found


def as_dict(found: Pairs) -> dict[tuple[int, int], tuple[int, bool]]:
    columns = [each.tolist() for each in (found.first, found.second, found.distance, found.is_mirrored)]
    return {(first, second): (near, turned) for first, second, near, turned in zip(*columns, strict=True)}


@settings(max_examples=25)
@given(st.integers(0, 1000), st.booleans(), st.integers(0, 60), st.sampled_from([2, 7, 8192]))
def test_an_exact_search_finds_the_pairs_that_all_comparisons_find(
    seed: int, is_one_set: bool, threshold: int, columns: int
) -> None:
    rng = np.random.default_rng(seed)
    one, two = random_hashes(rng, 30), random_hashes(rng, 21)
    other = one if is_one_set else two
    for number in range(12):
        copy = flipped(rng, (one.words, one.mirrored)[number % 2][number], int(rng.integers(1, 60)))
        (other.words, other.mirrored)[number % 3 == 0][number + 8] = copy
    one.is_blank[3] = other.is_blank[9] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_COLUMNS", columns)
        found = pairs(one, threshold, other=None if is_one_set else two)
    assert as_dict(found) == slowly(one, None if is_one_set else two, threshold)
    order = list(zip(found.distance.tolist(), found.first.tolist(), found.second.tolist(), strict=True))
    assert order == sorted(order), "the closest come first"
    assert (found.search, found.share) == ("exact", 1.0)


@pytest.mark.parametrize("is_one_set", [True, *thorough(False)])
def test_a_search_by_bands_finds_the_share_that_it_states(noise: np.random.Generator, is_one_set: bool) -> None:
    one = random_hashes(noise, 600)
    two = random_hashes(noise, 600)
    for number in range(300):
        (one if is_one_set else two).words[number + 300] = flipped(noise, one.words[number], 48)
    other = None if is_one_set else two
    exact, bands = pairs(one, other=other), pairs(one, other=other, search="bands")
    assert len(exact) == 300
    assert set(as_dict(bands)) <= set(as_dict(exact))
    assert bands.share == found_share(48, 600)
    assert abs(len(bands) / 300 - bands.share) < 0.06
    assert found_share(48, 10**6) > 0.85
    assert found_share(24, 10**6) > 0.999
    few = pairs(one, 30, other=other, search="bands")
    assert len(few) == 0


def test_a_large_set_is_searched_by_bands_unless_it_is_said_otherwise(
    noise: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "_MOST_COMPARED", 10_000)
    assert pairs(random_hashes(noise, 99)).search == "exact"
    assert pairs(random_hashes(noise, 101)).search == "bands"
    assert pairs(random_hashes(noise, 101), search="exact").search == "exact"


@pytest.mark.parametrize("search", ["exact", "bands"])
def test_equal_hashes_are_paired_with_the_first_of_them(noise: np.random.Generator, search: str) -> None:
    one, two = random_hashes(noise, 40), random_hashes(noise, 9)
    for number in (4, 11, 30):
        one.words[number], one.mirrored[number] = one.words[4], one.mirrored[4]
    one.words[20] = flipped(noise, one.words[4], 5)
    two.words[2] = two.words[7] = one.words[4]
    two.mirrored[7] = two.mirrored[2]
    inner = pairs(one, search=search)
    assert set(as_dict(inner)) == {(4, 11), (4, 30), (4, 20)}
    between = pairs(one, other=two, search=search)
    assert set(as_dict(between)) == {(4, 2), (4, 7), (11, 2), (30, 2), (20, 2), (20, 7)}


def test_too_many_pairs_and_wrong_thresholds_are_refused(
    noise: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = random_hashes(noise, 60)
    same.words[:] = [flipped(noise, same.words[0], 3) for _ in range(60)]
    assert len(pairs(same)) == 60 * 59 // 2
    monkeypatch.setattr(matching, "_MOST_PAIRS", 600)
    with pytest.raises(UsageError, match="more than 300 pairs of images look alike: give a lower threshold"):
        pairs(same)
    for threshold in (-1, 97):
        with pytest.raises(UsageError, match="a threshold is 0 to 96 bits"):
            pairs(same, threshold)
    with pytest.raises(UsageError, match="a search is auto, exact or bands, not 'fast'"):
        pairs(same, search="fast")


@pytest.mark.parametrize("count", [0, 1])
def test_few_images_have_no_pairs(noise: np.random.Generator, count: int) -> None:
    few = random_hashes(noise, count)
    for search in ("exact", "bands"):
        assert len(pairs(few, search=search)) == 0
        assert len(pairs(few, other=random_hashes(noise, 3), search=search)) == 0
    assert groups(pairs(few)).tolist() == [0] * count


def test_bits_are_counted_without_numpy_2(monkeypatch: pytest.MonkeyPatch, noise: np.random.Generator) -> None:
    words = noise.integers(0, 1 << 64, 500, np.uint64)
    out = np.empty(500, np.uint8)
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    count_bits(words, out)
    assert out.tolist() == [int(word).bit_count() for word in words]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=40), st.booleans())
def test_groups_are_what_pairs_connect(edges: list[tuple[int, int]], is_one_set: bool) -> None:
    ends = np.array([edge for edge in edges if edge[0] != edge[1] or not is_one_set], np.int64).reshape(-1, 2)
    samples = (30,) if is_one_set else (30, 30)
    zeros = np.zeros(len(ends), np.int64)
    found = groups(Pairs(ends[:, 0], ends[:, 1], zeros, zeros > 0, samples, 48, "exact", 1.0, 0))
    parents = list(range(sum(samples)))
    for first, second in (ends + np.array([0, 0 if is_one_set else 30])).tolist():
        old, new = sorted((parents[first], parents[second]), reverse=True)
        parents = [new if each == old else each for each in parents]
    assert found.tolist() == parents


def test_copies_of_pictures_are_found_and_others_are_not(copies: Path) -> None:
    found = as_dict(pairs(hashes(copies, keep=False)))
    assert set(found) == {(number, number + 12) for number in range(6)}
    assert [found[number, number + 12][1] for number in range(6)] == [False, True, False, False, False, False]
