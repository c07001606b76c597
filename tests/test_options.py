"""A dataclass says what its options may be."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tpucache import UsageError, build_cache, open_or_build
from tpucache.options import by_name, check_options, option, options_of
from tpucache.warmup import dry_run


@dataclass(frozen=True)
class Settings:
    size: int = option(4, "how large", metavar="N", minimum=1)
    limit: float | None = option(None, "how long", minimum=0)
    kind: Literal["auto"] | Literal["soft", "hard"] = option("auto", "of which kind")
    name: str = option("a", "one of a list", choices=["a", "b"])
    folder: str | Path | None = option(None, "where to")
    marks: tuple[str, ...] = option((), "any number", flag="mark")
    inner: int = 0


@dataclass(frozen=True, kw_only=True)
class Named:
    size: int = option(4, "how large", metavar="N", minimum=1)
    name: str = option("a", "one of a list", choices=["a", "b"])

    def __post_init__(self):
        check_options(self)


def test_options_are_the_fields_with_help_and_know_their_types_and_choices():
    found = options_of(Settings)
    assert list(found) == ["size", "limit", "kind", "name", "folder", "marks"]
    assert (found["size"].types, found["size"].default, found["size"].metavar) == ((int,), 4, "N")
    assert found["limit"].types == (float,)
    assert found["kind"].choices == ("auto", "soft", "hard")
    assert found["name"].choices == ["a", "b"]
    assert found["folder"].types == (str, Path)
    assert (found["folder"].flag, found["marks"].flag) == ("--folder", "--mark")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size is at least 1, not 0"),
        ({"size": None}, "size is at least 1, not None"),
        ({"size": float("nan")}, "size is at least 1, not nan"),
        ({"limit": -1.0}, "limit is at least 0, not -1.0"),
        ({"limit": float("inf")}, "limit is a finite number, not inf"),
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


def test_a_function_that_takes_an_object_of_options_is_called_with_their_names():
    called = by_name(lambda place, times=1, *, options: (place, times, options), Named)
    assert called("here") == ("here", 1, Named())
    assert called("here", size=2, times=3, name="b") == ("here", 3, Named(size=2, name="b"))
    assert list(inspect.signature(called).parameters) == ["place", "times", "size", "name"]
    with pytest.raises(UsageError, match="size is at least 1"):
        called("here", size=0)


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        (("here",), {"sise": 2}, "build.. got an unexpected keyword argument 'sise': did you mean size?"),
        (("here",), {"options": Named()}, "unexpected keyword argument 'options'"),
        ((), {"size": 2}, "build.. missing a required argument: 'place'"),
        (("here", 1), {}, "build.. too many positional arguments"),
        (("here",), {"place": "there"}, "build.. multiple values for argument 'place'"),
    ],
)
def test_what_a_function_of_options_does_not_take_is_named(arguments, named, message):
    def build(place, *, options):
        raise AssertionError("it was called")

    with pytest.raises(TypeError, match=message):
        by_name(build, Named)(*arguments, **named)


@pytest.mark.parametrize("function", [build_cache, dry_run, open_or_build])
def test_functions_of_a_source_need_no_recipe_and_take_options_by_name(function):
    bound = inspect.signature(function).bind("photos", "cache", jobs=2, missing_label=["NA"])
    assert bound.arguments == {"source": "photos", "cache": "cache", "jobs": 2, "missing_label": ["NA"]}
    with pytest.raises(TypeError, match=f"{function.__name__}.. got an unexpected keyword .*did you mean labels"):
        function("photos", "cache", lables="classes")
    with pytest.raises(UsageError, match="labels is one of"):
        function("photos", "cache", labels="lables")
