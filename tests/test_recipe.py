"""A recipe holds what a cache can have, comes back from JSON, and has a fingerprint of what makes its records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache.errors import RecipeError
from tpucache.recipe import Recipe, differences, fingerprint

SIDES = st.integers(1, 16384)
QUALITIES = {"raw": st.none(), "jpeg": st.integers(1, 100), "png": st.integers(0, 9), "zstd": st.integers(1, 22)}


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    codec = draw(st.sampled_from(sorted(QUALITIES)))
    return Recipe(
        size=draw(st.one_of(SIDES, st.tuples(SIDES, SIDES))),
        fit=draw(st.sampled_from(["crop", "pad", "stretch"])),
        variants=draw(st.integers(0, 1000)),
        augment=draw(st.text(max_size=9)),
        seed=draw(st.integers(0, 2**63 - 1)),
        codec=codec,
        quality=draw(st.one_of(st.none(), QUALITIES[codec])),
        shard_mb=draw(st.integers(1, 65536)),
        exact=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=50)
@given(recipes())
def test_a_recipe_comes_back_from_json(recipe: Recipe) -> None:
    content = json.loads(json.dumps(recipe.to_dict()))
    assert Recipe.from_dict({**content, "of a later version": 1}) == recipe
    assert fingerprint(content) == fingerprint(recipe.to_dict())
    assert differences(content, recipe.to_dict()) == []


def test_one_number_is_both_sides() -> None:
    assert Recipe(size=64) == Recipe(size=(64, 64))
    assert (Recipe(size=(3, 5)).height, Recipe(size=(3, 5)).width) == (3, 5)
    assert Recipe(size=[3, 5]).size == (3, 5)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "size",
            [0, -1, 16385, (0, 5), (5,), (1, 2, 3), (), "224", "22", (1.5, 2), (True, 2), (None, 1), None, 224.0],
        ),
        ("augment", [3, None]),
        ("exact", ["no", None]),
        ("fit", ["", "Crop", "squash", None, 1, ["crop"]]),
        ("codec", ["", "RAW", "gif", "bytes", None, 1, ["raw"]]),
        ("variants", [-1, 1001, 1.0, "1", None, True]),
        ("seed", [-1, 2**63, 0.0, "0", None, True]),
        ("shard_mb", [0, -1, 65537, 1.5, None, True]),
        ("quality", [0, 50, True, "95"]),
        ("coordinates", ["", "Stored", "shown", 1, True, ["stored"]]),
        ("white_level", [0, -1, 1.0, True, "4095", 2**31]),
    ],
)
def test_what_no_cache_can_have_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RecipeError, match=f"^(recipe: ')?{name}'? is "):
            Recipe(**{name: value})


@pytest.mark.parametrize(("codec", "low", "high"), [("jpeg", 1, 100), ("png", 0, 9), ("zstd", 1, 22)])
def test_quality_has_the_codecs_range(codec: Any, low: int, high: int) -> None:
    for quality in (None, low, high):
        assert Recipe(codec=codec, quality=quality).quality == quality
    for quality in (low - 1, high + 1, True, float(low)):
        with pytest.raises(RecipeError, match=f"{low} to {high} for {codec}"):
            Recipe(codec=codec, quality=quality)


@pytest.mark.parametrize(
    "content",
    [{}, {"size": None}, {"size": 5}, {"size": [0, 0]}, {"size": [1, 2], "seed": "x"}, {"size": [1, 2], "fit": []}],
    ids=str,
)
def test_what_is_no_recipe_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        Recipe.from_dict(content)


CHANGES: list[dict[str, Any]] = [
    {"size": (224, 225)},
    {"fit": "pad"},
    {"augment": "none"},
    {"seed": 1},
    {"codec": "png"},
    {"codec": "jpeg", "quality": 94},
    {"exact": True},
    {"max_boxes": 5},
    {"coordinates": "displayed"},
    {"white_level": 255},
    {"seed": 7, "fit": "pad"},
]


def test_more_variants_in_other_files_are_the_same_recipe() -> None:
    few, many = Recipe(variants=1).to_dict(), Recipe(variants=8, shard_mb=64, max_blocks=5).to_dict()
    assert fingerprint(few) == fingerprint(many)
    assert differences(few, many) == []


def test_each_part_that_makes_the_records_makes_another_fingerprint_and_is_named() -> None:
    recipes = [Recipe(**change).to_dict() for change in CHANGES]
    assert len({*map(fingerprint, [Recipe().to_dict(), *recipes])}) == len(CHANGES) + 1
    for change, recipe in zip(CHANGES, recipes, strict=True):
        assert [line.split()[0] for line in differences(Recipe().to_dict(), recipe)] == sorted(change)
    assert differences(Recipe().to_dict(), recipes[-1]) == ["fit 'crop', now 'pad'", "seed 0, now 7"]
    assert differences({"seed": 0}, {"extra": 1}) == ["extra None, now 1", "seed 0, now None"]


def test_a_recipe_from_before_a_part_was_added_is_the_same_recipe() -> None:
    now = Recipe().to_dict()
    before = {name: value for name, value in now.items() if name not in ("coordinates", "white_level")}
    assert fingerprint(before) == fingerprint(now)
    assert differences(before, now) == differences(now, before) == []
    assert differences(before, Recipe(coordinates="stored", white_level=4095).to_dict()) == [
        "coordinates None, now 'stored'",
        "white_level None, now 4095",
    ]
