"""Which numbers cells are, and in which order."""

from __future__ import annotations

import pytest

from tpucache.warmup.sources.columns import in_order, to_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9007199254740993.0", 9007199254740993),
        (" 9007199254740993. ", 9007199254740993),
        ("3.719633943371581e+16", int(3.719633943371581e16)),
        ("-9007199254740993.00", -9007199254740993),
        ("9007199254740993", 9007199254740993),
        ("1e22", 10**22),
        ("2.0", 2),
    ],
)
def test_a_whole_number_is_exact_however_it_is_written(text: str, number: int) -> None:
    assert (to_number(text), type(to_number(text))) == (number, int)


def test_a_number_between_whole_ones_that_float64_does_not_hold_is_no_whole_number() -> None:
    assert type(to_number("9007199254740993.5")) is float


def test_names_are_in_the_order_of_their_numbers_if_all_are_numbers() -> None:
    assert in_order(["10", "9", "1.5", "-1"]) == ("-1", "1.5", "9", "10")
    assert in_order(["10", "9", "a"]) == ("10", "9", "a")
    assert in_order(["10", "9", "007"]) == ("007", "10", "9")
    assert in_order(["10", "9", "nan"]) == ("10", "9", "nan")
    assert in_order([]) == ()
