"""The plan: how samples become blocks, and what says that a source is the same."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from tpucache.recipe import Recipe
from tpucache.store.fields import Field, usual_bytes
from tpucache.warmup.blocks import Block, listing_sha256, samples_a_task
from tpucache.warmup.blocks import plan_blocks as plan_of
from tpucache.warmup.sources.source import Listing, Sample


def fields_of(recipe: Recipe) -> tuple[Field, ...]:
    return (Field("image", recipe.codec, "|u1", (recipe.height, recipe.width, 3)),)


def plan_blocks(samples: Any, recipe: Recipe) -> list[Block]:
    return plan_of(samples, fields_of(recipe), recipe)


_SAMPLES = tuple(Sample(number, f"{number}.jpg", None) for number in range(4000))
_recipes = st.builds(
    Recipe,
    size=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    codec=st.sampled_from(["raw", "jpeg", "png", "zstd"]),
    shard_mb=st.integers(1, 6),
    variants=st.integers(0, 3),
)
_quietly = settings(max_examples=examples(120))


@pytest.mark.slow
@given(count=st.integers(0, len(_SAMPLES)), recipe=_recipes)
@_quietly
def test_blocks_hold_every_sample_once_in_order_and_are_even_and_small_enough(count: int, recipe: Recipe) -> None:
    blocks = plan_blocks(_SAMPLES[:count], recipe)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert tuple(itertools.chain.from_iterable(block.samples for block in blocks)) == _SAMPLES[:count]
    sizes = {len(block.samples) for block in blocks}
    assert not count or 1 <= min(sizes) >= max(sizes) - 1
    assert all(size == 1 or size * usual_bytes(fields_of(recipe)) <= recipe.shard_mb << 20 for size in sizes)


@pytest.mark.slow
@given(count=st.integers(0, len(_SAMPLES)), recipe=_recipes, seed=st.integers(0, 99), variants=st.integers(0, 9))
@_quietly
def test_the_layout_follows_from_samples_and_record_size_alone(
    count: int, recipe: Recipe, seed: int, variants: int
) -> None:
    blocks = plan_blocks(_SAMPLES[:count], recipe)
    other = dataclasses.replace(recipe, seed=seed, variants=variants, augment="strong", fit="pad")
    assert plan_blocks(list(_SAMPLES[:count]), recipe) == blocks
    assert [block.samples for block in plan_blocks(_SAMPLES[:count], other)] == [block.samples for block in blocks]


@given(count=st.integers(1, len(_SAMPLES)), recipe=_recipes, most=st.integers(1, 20))
@_quietly
def test_no_wish_for_few_blocks_is_missed(count: int, recipe: Recipe, most: int) -> None:
    few = dataclasses.replace(recipe, max_blocks=most)
    blocks = plan_blocks(_SAMPLES[:count], few)
    assert len(blocks) <= most
    assert [sample for block in blocks for sample in block.samples] == [*_SAMPLES[:count]]
    assert all(1 <= samples_a_task(block, fields_of(few), count) <= -(-count // 64) for block in blocks)


def test_a_block_numbered_later_starts_there() -> None:
    recipe = Recipe(size=32)
    assert [b.number for b in plan_of(_SAMPLES[:200], fields_of(recipe), recipe, first=5)] == [5, 6, 7, 8]


def test_a_small_source_still_gives_several_workers_work() -> None:
    assert len(plan_blocks(_SAMPLES[:1000], Recipe(size=32))) >= 8


_FIRST, _SECOND = Sample(0, "a/1", 0), Sample(1, "b/1", 1)


@pytest.mark.parametrize(
    "changed",
    [
        Listing([_FIRST, _SECOND], ("a", "c")),
        Listing([_FIRST, Sample(1, "b/1", 0)], ("a", "b")),
        Listing([_FIRST, Sample(1, "b/2", 1)], ("a", "b")),
        Listing([_FIRST, Sample(2, "b/1", 1)], ("a", "b")),
        Listing([Sample(0, "b/1", 1), Sample(1, "a/1", 0)], ("a", "b")),
        Listing([_FIRST], ("a", "b")),
        Listing([_FIRST, _SECOND], ("a", "b"), {"age": ["1", "2"]}),
        Listing([Sample(0, "a/1", None), Sample(1, "b/1", None)], ()),
    ],
    ids=["class", "label", "path", "number", "order", "count", "column", "no labels"],
)
def test_any_change_of_a_listing_changes_its_hash(changed: Listing) -> None:
    listing = Listing([_FIRST, _SECOND], ("a", "b"))
    assert listing_sha256(Listing(tuple(listing.samples), ("a", "b"))) == listing_sha256(listing)
    assert listing_sha256(changed) != listing_sha256(listing)


@pytest.mark.parametrize("path", ["caf\u00e9.jpg", "two\nlines.jpg", "not \udcff utf8.jpg"], ids=ascii)
def test_any_file_name_can_be_hashed(path: Any) -> None:
    assert len(listing_sha256(Listing([Sample(0, path, None)], ()))) == 64
