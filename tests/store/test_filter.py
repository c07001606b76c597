"""Conditions on the columns of samples."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.errors import UsageError
from tpucache.store.filter import matching
from tpucache.store.samples import Strings

AGES = [50.0, 70.0, float("nan"), 61.0, 60.0]
TABLE: Any = {
    "age": np.array(AGES),
    "site": Strings.pack(["A", "B", "A", "", "it's (in)"]),
    "label": np.array([0, 1, -1, 1, 0], np.int32),
    "fold": np.array([0, 1, 2, 0, 1]),
    "boxes": np.zeros((5, 2)),
}


def found(condition: str, positions: Any = range(5), classes: tuple[str, ...] = ("cat", "dog")) -> list[int]:
    places = np.array(positions, np.int64)
    return np.flatnonzero(matching(condition, TABLE, places, classes)).tolist()


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("age > 60", [1, 3]),
        ("60 < age", [1, 3]),
        ("50 < age <= 61", [3, 4]),
        ("age >= 6e1 and site == 'B'", [1]),
        ("site == 'A' or (age == 61)", [0, 2, 3]),
        ('site == "it\'s (in)"', [4]),
        ("site < 'B'", [0, 2]),
        ("fold in (0, 2)", [0, 2, 3]),
        ("fold not in [0, 2]", [1, 4]),
        ("fold in ()", []),
        ("label == 1", [1, 3]),
        ("class == 'dog'", [1, 3]),
        ("class in ('cat', 'dog')", [0, 1, 3, 4]),
        ("site == 'class'", []),
        ("fold == label", [0, 1]),
        ("fold > -1", [0, 1, 2, 3, 4]),
        ("\n  age > 60\n  and fold == 1 ", [1]),
    ],
)
def test_a_condition_selects_what_it_says(condition: str, expected: list[int]) -> None:
    assert found(condition) == expected


@pytest.mark.parametrize(
    ("condition", "missing"),
    [("age > 60", 2), ("age == age", 2), ("age in (50, 70)", 2), ("site == 'A'", 3), ("class == 'dog'", 2)],
)
def test_a_missing_value_never_matches(condition: str, missing: int) -> None:
    assert missing not in found(condition)
    assert missing not in found(f"not ({condition})")
    assert sorted(found(condition) + found(f"not ({condition})") + [missing]) == list(range(5))
    assert missing not in found(condition.replace("==", "!=").replace(" in ", " not in "))
    assert missing in found(f"{condition} or fold == fold")


@pytest.mark.parametrize(
    ("condition", "words", "at"),
    [
        ("agee > 60", r"no column 'agee' \(there are age, boxes, class, fold, label, site\), at", 1),
        ("fold == 1 and agee > 60", "no column 'agee'", 15),
        ("'é' == site and agee > 60", "no column 'agee'", 17),
        ("age > 'x'", "age is a number|'x' is text and age a number", 7),
        ("label == 'cat'", "use class for names", 10),
        ("boxes > 1", "several values per sample", 1),
        ("age", "a condition is a comparison", 1),
        ("age > 60 & fold == 1", "columns are compared with", 7),
        ("site in 'A'", "a list in parentheses", 9),
        ("site in ('A')", "a list in parentheses", 10),
        ("age is 60", "not by `is`", 8),
        ("len(site) > 2", "columns are compared with", 1),
        ("age > fold.real", "columns are compared with", 7),
        ("age > None", "columns are compared with", 7),
        ("age >> > 60", "this is not a condition", 8),
        ("", "this is not a condition", 1),
        ("age > 60\0", "this is not a condition", None),
    ],
)
def test_what_is_no_condition_is_refused_with_its_place(condition: str, words: str, at: int | None) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        found(condition)
    (place,) = re.findall(r"at character (\d+) of", str(caught.value))
    assert at is None or int(place) == at


def test_nothing_is_run_and_nothing_is_too_deep() -> None:
    for condition in ("__import__('os').system('exit') == 0", "(lambda: 1)() == 1", "[x for x in (1,)] == 1"):
        with pytest.raises(UsageError):
            found(condition)
    deep = ("not " * 2000 + "age > 1", "(" * 4000 + "age > 1" + ")" * 4000, "-" * 9000 + "1 < age", "a" * 20000)
    for condition in (*deep, "age > 1" + "0" * 400, "age > 1" + "0" * 9000):
        with pytest.raises(UsageError):
            found(condition)


@pytest.mark.slow
@given(st.text(alphabet="agesitefoldcl ()'\"<>=!,0123.not in and or\\#\n", max_size=40))
def test_any_text_is_a_condition_or_refused(condition: str) -> None:
    with contextlib.suppress(UsageError):
        assert matching(condition, TABLE, np.arange(5), ("cat", "dog")).shape == (5,)


comparisons = st.builds(
    lambda name, sign, value: f"{name} {sign} {value}",
    st.sampled_from(["age", "fold"]),
    st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    st.sampled_from([0, 1, 50, 60.5, 61]),
)
conditions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds(lambda part: f"not ({part})", inner),
        st.builds(lambda one, word, other: f"({one}) {word} {other}", inner, st.sampled_from(["and", "or"]), inner),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(conditions)
def test_where_nothing_is_missing_a_condition_means_what_it_means_in_python(condition: str) -> None:
    complete = [0, 1, 3, 4]
    rows = [{"age": AGES[at], "fold": int(TABLE["fold"][at])} for at in complete]
    expected = [at for at, row in enumerate(rows) if eval(condition, {}, row)]  # made here
    assert found(condition, complete) == expected


def test_a_condition_may_have_ten_thousand_characters_and_no_more() -> None:
    condition = "fold == 1".ljust(10_000)
    assert found(condition) == found("fold == 1")
    with pytest.raises(UsageError, match="at most 10,000 characters, not 10,001"):
        found(condition + " ")
