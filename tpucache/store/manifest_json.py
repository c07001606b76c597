"""Untrusted JSON: a getter for each kind of value, which checks type and range and names the place of what is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from tpucache.errors import FormatError
from tpucache.strict_json import parse_json

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
#: The largest that numbers of 32-bit floats add up to on average.
_LARGEST: Final = 3.5e38
_MAX_NESTING: Final = 33  # objects and lists inside each other, the manifest itself the first


class JsonObject:
    """A JSON object that is being read. Each getter raises FormatError for a value that is missing or does not fit."""

    def __init__(self, content: object, where: str) -> None:
        """Take a parsed value; `where` is its place, for messages. Raises FormatError when it is not an object."""
        if not isinstance(content, dict):
            raise FormatError(f"{where} is not an object")
        self.content: dict[str, Any] = content
        self.where = where

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return the value of a key, which has one of these types; no bool is a number."""
        value = self.content.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FormatError(f"{self.where}: {key!r} is missing or of the wrong type")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`."""
        return _integer(self.get(key, int), low, high, f"{self.where}: {key!r}")

    def integers(self, key: str, high: int, low: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers from `low` to `high`."""
        where = f"{self.where}: an item of {key!r}"
        return tuple(_integer(item, low, high, where) for item in self.get(key, list))

    def floats(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers."""
        values = self.get(key, list)
        if not all(type(value) in (int, float) and abs(value) <= _LARGEST for value in values):
            raise FormatError(f"{self.where}: {key!r} holds something other than numbers")
        return tuple(float(value) for value in values)

    def string(self, key: str) -> str:
        """Return a string."""
        return str(self.get(key, str))

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of distinct strings."""
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values) or len(set(values)) != len(values):
            raise FormatError(f"{self.where}: {key!r} holds something other than distinct strings")
        return tuple(values)

    def sha256(self, key: str) -> str:
        """Return a SHA-256 in hexadecimal."""
        value = self.string(key)
        if not _SHA256.fullmatch(value):
            raise FormatError(f"{self.where}: {key!r} is not a SHA-256")
        return value

    def object(self, key: str) -> JsonObject:
        """Return an object."""
        return JsonObject(self.content.get(key), f"{self.where}.{key}")

    def objects(self, key: str, limit: int) -> Sequence[JsonObject]:
        """Return a list of at most `limit` objects."""
        items = self.get(key, list)
        if len(items) > limit:
            raise FormatError(f"{self.where}: {len(items)} {key} are more than the limit of {limit}")
        return [JsonObject(item, f"{key}[{number}]") for number, item in enumerate(items)]


def read_object(text: str | bytes, where: str) -> JsonObject:
    """Parse a JSON text whose whole is an object. Raises FormatError."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from error
    _check_nesting(content)
    return JsonObject(content, where)


def _check_nesting(content: object) -> None:
    """Raise FormatError for what nests deeper than any manifest that is written.

    How deep json reads depends on the interpreter, and what handles the content afterwards may recurse, if only to
    print it.
    """
    level = [content]
    for _ in range(_MAX_NESTING):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [value for items in inner for value in items if isinstance(value, (dict, list))]
    if level:
        raise FormatError(f"not JSON of a manifest: it nests deeper than {_MAX_NESTING} levels")


def _integer(value: object, low: int, high: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FormatError(f"{where} should be a whole number from {low} to {high}, not {value!r:.40}")
    return value
