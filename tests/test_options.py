"""A dataclass says what its options may be."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import pytest

from tpucache import UsageError
from tpucache.options import check_options, option, options_of


@dataclass(frozen=True)
class Settings:
    size: int = option(4, "how large", metavar="N", minimum=1)
    limit: float | None = option(None, "how long", minimum=0)
    kind: Literal["auto"] | Literal["soft", "hard"] = option("auto", "of which kind")
    name: str = option("a", "one of a list", choices=["a", "b"])
    folder: str | Path | None = option(None, "where to")
    marks: tuple[str, ...] = option((), "any number", flag="mark")
    inner: int = 0


@dataclass(frozen=True)
class Name:
    first: str = option(MISSING, "has to be given")


def test_options_are_the_fields_with_help_and_know_their_types_and_choices():
    found = options_of(Settings)
    assert list(found) == ["size", "limit", "kind", "name", "folder", "marks"]
    assert (found["size"].types, found["size"].default, found["size"].metavar) == ((int,), 4, "N")
    assert found["limit"].types == (float,)
    assert found["kind"].choices == ("auto", "soft", "hard")
    assert found["name"].choices == ["a", "b"]
    assert found["folder"].types == (str, Path)
    assert (found["folder"].flag, found["marks"].flag) == ("--folder", "--mark")


def test_an_option_without_a_default_has_to_be_given():
    assert options_of(Name)["first"].default is MISSING
    with pytest.raises(TypeError, match="first"):
        Name()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size is at least 1, not 0"),
        ({"size": None}, "size is at least 1, not None"),
        ({"size": float("nan")}, "size is at least 1, not nan"),
        ({"limit": -1.0}, "limit is at least 0, not -1.0"),
        ({"kind": "new"}, "kind is one of auto, soft, hard, not 'new'"),
        ({"name": "c"}, "name is one of a, b, not 'c'"),
    ],
)
def test_what_an_option_does_not_allow_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        check_options(Settings(**values))


def test_defaults_and_none_where_it_is_the_default_are_allowed():
    check_options(Settings())
    check_options(Settings(size=1, limit=0.0, kind="hard", name="b"))
