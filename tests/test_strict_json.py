"""A JSON text with two meanings is refused, and values that do not fit their dataclass are, with their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest

from tpucache.errors import FormatError
from tpucache.text import (
    GIVEN,
    Stored,
    at_most,
    between,
    check_types,
    matching,
    parse_json,
    read_as,
)


def test_a_key_that_is_there_twice_is_refused_and_named() -> None:
    for text in ('{"a": 1, "b": 2, "a": 1}', b'[{"x": {"a": 1, "a": 2}}]'):
        with pytest.raises(ValueError, match="the key 'a' is there twice in one object"):
            parse_json(text)


def test_a_long_key_is_named_in_a_short_message() -> None:
    with pytest.raises(ValueError, match="is there twice") as caught:
        parse_json('{{"{0}": 1, "{0}": 2}}'.format("k" * 10_000))
    assert len(str(caught.value)) < 200


def test_equal_keys_in_different_objects_are_fine() -> None:
    assert parse_json('[{"a": 1}, {"a": {"a": 2}}]') == [{"a": 1}, {"a": {"a": 2}}]


def test_what_nests_too_deeply_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="too many levels of objects and lists"):
        parse_json("[" * 500_000)


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A part of a file by test."""

    spokes: Annotated[int, between(1, 40)]
    name: str = "front"
    tyre: Annotated[str | None, GIVEN] = None
    turned: Annotated[int, Stored.NEVER] = 0


@dataclasses.dataclass(frozen=True)
class Bicycle:
    """A file by test."""

    wheels: Annotated[tuple[Wheel, ...], at_most(2)]
    gears: Annotated[tuple[float, ...], Stored.ALWAYS] = ()
    kind: Literal["road", "city"] = "city"
    frame: Annotated[str, matching("[0-9a-f]{4}", "a number")] = "0000"
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bell: int | str | None = None


WHOLE: dict[str, Any] = {"wheels": [{"spokes": 36}], "gears": [1, 2.5]}


def test_an_object_becomes_its_dataclass_and_other_keys_are_passed_over() -> None:
    found = read_as(Bicycle, {**WHOLE, "colour": "red", "bell": None, "sizes": {"a": 1}}, "bike")
    assert found == Bicycle((Wheel(36),), (1.0, 2.5), sizes={"a": 1})
    assert read_as(Wheel, {"spokes": 1, "turned": "never read"}, "wheel") == Wheel(1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wheels": [{"spokes": 1}, {"spokes": 0}]}, r"'wheels\[1\].spokes' is 0, not a whole number from 1 to 40"),
        ({"wheels": [{"spokes": True}]}, r"'wheels\[0\].spokes' is True, not a whole number"),
        ({"wheels": [{}]}, r"'wheels\[0\].spokes' is missing"),
        ({"wheels": [{"spokes": 36, "tyre": None}]}, r"'wheels\[0\].tyre' is None, not allowed: leave the key out"),
        ({"wheels": [WHOLE["wheels"][0]] * 3}, "'wheels' is a list, not one of at most 2 items"),
        ({"wheels": {}}, "'wheels' is a dict, not a list"),
        ({"wheels": [3]}, r"'wheels\[0\]' is not an object"),
        ({"gears": [1e39]}, r"'gears\[0\]' is 1e\+39, not a number"),
        ({"gears": None}, "'gears' is None, not a list"),
        ({"kind": "Road"}, "'kind' is 'Road', not one of road, city"),
        ({"frame": "00000"}, "'frame' is '00000', not a number"),
        ({"frame": 5}, "'frame' is 5, not a string"),
        ({"sizes": {"a": 2**63}}, "'sizes' is 9223372036854775808, not a whole number below"),
        ({"bell": []}, "'bell' is a list, not "),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named_with_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read_as(Bicycle, {**WHOLE, **change}, "bike")
    with pytest.raises(FormatError, match="bike is not an object"):
        read_as(Bicycle, [], "bike")


def test_a_key_that_is_always_stored_is_missed_and_checking_types_misses_none() -> None:
    with pytest.raises(FormatError, match="'gears' is missing"):
        read_as(Bicycle, {"wheels": []}, "bike")
    check_types({"wheels": [{}]}, Bicycle, "bike")
    with pytest.raises(FormatError, match="'gears' is 'all', not a list"):
        check_types({"gears": "all"}, Bicycle, "bike")
