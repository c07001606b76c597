"""A JSON text that can be understood in two ways is refused."""

from __future__ import annotations

import pytest

from tpucache.strict_json import parse_json


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
    with pytest.raises(ValueError, match="nests too deeply"):
        parse_json("[" * 500_000)
