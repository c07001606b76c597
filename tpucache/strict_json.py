"""Read untrusted JSON: refuse ambiguous text, and check values against dataclasses.

The annotations of a dataclass's fields say what a file may have: types, and limits such as `Annotated[int, Between(0,
100)]`. `read_as` makes the dataclass from a file's content, and `check_types` checks only the values that are present.
The errors of both say where in the content the wrong value is, as `shards[0].bytes`. Both ignore unknown keys.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tpucache.errors import FormatError

#: The largest number in tpucache's files: a bit more than the largest float32, because means of such numbers may be
#: rounded up. Larger numbers could not be drawn or added up.
LARGEST: Final = 3.5e38
_MAX_NESTING: Final = 33  # levels of objects and lists, the outermost included
_MOST: Final = 1 << 63  # the limit of integers without a limit of their own

Kind = TypeVar("Kind")
#: A function that returns a checked value, and raises _MisfitError for one that does not fit.
_Reader = Callable[[Any], Any]


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for other text, and for text that nests too deeply or repeats a key in an object: RFC 8259 does
    not say which value of a repeated key counts.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("the text has too many levels of objects and lists") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r:.60} is there twice in one object: remove one of the two")
    return content


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the object in a JSON text as a dictionary. Raises FormatError for any other text.

    `where` names the text in the message for a value that is not an object. Objects and lists that are nested deeper
    than in tpucache's own files are refused, too: how deep json can read depends on the interpreter, and code that
    handles the content may recurse.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from error
    level = [content]
    for _ in range(_MAX_NESTING):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [value for items in inner for value in items if isinstance(value, (dict, list))]
    if level:
        raise FormatError(f"not JSON that tpucache writes: it has more than {_MAX_NESTING} levels of objects and lists")
    if not isinstance(content, dict):
        raise FormatError(f"{where} is not an object")
    return content


@dataclass(frozen=True)
class Between:
    """An annotation that limits a field to the numbers from `low` to `high`, both included. NaN and None do not fit."""

    low: float
    high: float

    def check(self, value: Any) -> None:
        """Raise _MisfitError if `value` is outside of the limits, NaN or None."""
        if value is None or not self.low <= value <= self.high:
            kind = "a number" if isinstance(self.low, float) else "a whole number"
            raise _MisfitError(f"is {value!r:.40}, not {kind} from {self.low} to {self.high}")


@dataclass(frozen=True)
class Matching:
    """An annotation that limits a field to texts that match all of `pattern`; `what` names such texts in errors."""

    pattern: str
    what: str

    def check(self, value: str) -> None:
        """Raise _MisfitError if the pattern does not match all of `value`."""
        if not re.fullmatch(self.pattern, value):
            raise _MisfitError(f"is not {self.what}: {value!r:.80}")


@dataclass(frozen=True)
class AtMost:
    """An annotation that limits a field to lists of at most `count` items."""

    count: int

    def check(self, value: Sequence[Any]) -> None:
        """Raise _MisfitError if `value` has more than `count` items."""
        if len(value) > self.count:
            raise _MisfitError(f"has {len(value)} items, more than the limit of {self.count}")


@dataclass(frozen=True)
class Distinct:
    """An annotation that limits a field to lists of distinct texts."""

    def check(self, value: Sequence[str]) -> None:
        """Raise _MisfitError if the list `value` has two equal texts."""
        if len(set(value)) != len(value):
            raise _MisfitError("has the same string twice")


@dataclass(frozen=True)
class Given:
    """An annotation that forbids null in a file: if a field has no value, its key is left out instead."""

    def check(self, value: object) -> None:
        """Raise _MisfitError if `value` is None."""
        if value is None:
            raise _MisfitError("is null: leave the key out")


@dataclass(frozen=True)
class NotStored:
    """Marks a dataclass's field, as in `Annotated[int, NotStored()]`: files do not have it."""


@dataclass(frozen=True)
class AlwaysStored:
    """Marks a field, as in `Annotated[int, AlwaysStored()]`: every file has it, even if it has a default."""


class _MisfitError(Exception):
    """A value does not fit its field; `place` is where it is in the content, such as `shards[0].bytes`."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.text, self.place = text, place

    def within(self, place: str) -> _MisfitError:
        """Return a copy of this error for the enclosing object or list.

        `place` is the key or index that leads from the enclosing value to the inner one.
        """
        return _MisfitError(self.text, f"{place}.{self.place}".removesuffix(".").replace(".[", "["))

    def seen_from(self, where: str) -> FormatError:
        return FormatError(f"{where}: {self.place!r} {self.text}" if self.place else f"{where} {self.text}")


def read_as(kind: type[Kind], content: object, where: str) -> Kind:
    """Return an instance of the dataclass `kind` with the values of an untrusted JSON object, `content`.

    `where` names the object in messages. A list becomes a tuple if the field is a tuple. Raises FormatError for a value
    that is missing or does not fit its field.
    """
    hint: Any = kind
    try:
        found: Kind = _reader(hint, True)(content)
    except _MisfitError as error:
        raise error.seen_from(where) from None
    return found


def check_types(values: object, kind: type, where: str) -> None:
    """Raise FormatError unless the untrusted JSON object `values` fits the fields of the dataclass `kind`.

    Fields may be missing. `where` names the object in messages.
    """
    try:
        _reader(kind, False)(values)
    except _MisfitError as error:
        raise error.seen_from(where) from None


def misfit(values: Mapping[str, Any], kind: type) -> str:
    """Return a text about the first value that does not fit its field of the dataclass `kind`; "" if all values fit.

    The text is such as `seed is -1, not a whole number from 0 to 9`.
    """
    try:
        _reader(kind, False)(values)
    except _MisfitError as error:
        return f"{error.place} {error.text}"
    return ""


@functools.cache
def _reader(hint: Any, makes: bool) -> _Reader:
    """Return the function that checks whether a value fits the type `hint`, and returns the value.

    If `makes`, the function returns a JSON object as an instance of its dataclass. Otherwise it returns the object
    unchanged, and fields may be missing.
    """
    if get_origin(hint) is Annotated:
        return _limited(get_args(hint)[0], hint.__metadata__, makes)
    if dataclasses.is_dataclass(hint):
        return _object_reader(hint, makes)
    if get_origin(hint) is not None:
        return _generic_reader(get_origin(hint), get_args(hint), _shown(hint), makes)
    return _PLAIN.get(hint) or _checking(lambda value: isinstance(value, hint), _shown(hint))


def _generic_reader(origin: Any, parts: Sequence[Any], shown: str, makes: bool) -> _Reader:
    if origin is Literal:
        shown = f"one of {', '.join(map(str, parts))}"
        return _checking(lambda value: any(type(value) is type(part) and value == part for part in parts), shown)
    inner = [_reader(part, makes) for part in parts if part not in (..., NoneType)]
    if origin in (Union, UnionType):
        return _first_of(inner, NoneType in parts, shown)
    if issubclass(origin, Mapping):
        return _mapping_reader(*inner)
    return _list_reader(inner[0], tuple if origin is tuple else list)


def _checking(fits: Callable[[Any], bool], what: str, convert: _Reader | None = None) -> _Reader:
    def read(value: Any) -> Any:
        if not fits(value):
            raise _MisfitError(f"is {_described(value)}, not {what}")
        return value if convert is None else convert(value)

    return read


def _limited(base: Any, limits: Sequence[Any], makes: bool) -> _Reader:
    """Return a reader of values of the type `base` within `limits`; `makes` is as in `_reader`.

    For integers, `limits` replace the usual limit, `_MOST`.
    """
    inner = _read_whole if base is int else _reader(base, makes)
    checked = [limit for limit in limits if hasattr(limit, "check")]

    def read(value: Any) -> Any:
        found = inner(value)
        for limit in checked:
            limit.check(found)
        return found

    return _with_short_way(base, checked, read)


def _with_short_way(base: Any, limits: Sequence[Any], read: _Reader) -> _Reader:
    """Return `read`, made faster for integers and texts with one limit: manifests have many such values."""
    if len(limits) != 1 or base not in (int, str):
        return read
    (limit,) = limits
    if base is int and isinstance(limit, Between):
        low, high = limit.low, limit.high

        def read_number(value: Any) -> Any:
            return value if type(value) is int and low <= value <= high else read(value)

        return read_number
    if base is str and isinstance(limit, Matching):
        matches = re.compile(limit.pattern).fullmatch

        def read_text(value: Any) -> Any:
            return value if type(value) is str and matches(value) else read(value)

        return read_text
    return read


def _first_of(readers: Sequence[_Reader], may_be_none: bool, what: str) -> _Reader:
    def read(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        if len(readers) == 1:
            return readers[0](value)
        for each in readers:
            try:
                return each(value)
            except _MisfitError:
                continue
        raise _MisfitError(f"is {_described(value)}, not {what}")

    return read


def _list_reader(inner: _Reader, make: Callable[[list[Any]], Any]) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _MisfitError(f"is {_described(value)}, not a list")
        found: list[Any] = []
        try:
            for item in value:
                found.append(inner(item))
        except _MisfitError as error:
            raise error.within(f"[{len(found)}]") from None
        return make(found)

    return read


def _mapping_reader(key: _Reader, inner: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MisfitError(f"is {_described(value)}, not an object")
        return {key(name): inner(each) for name, each in value.items()}

    return read


def _object_reader(kind: Any, makes: bool) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        (field.name, _reader(hints[field.name], makes), makes and _is_needed(field, hints[field.name]))
        for field in dataclasses.fields(kind)
        if NotStored() not in _marks(hints[field.name])
    ]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MisfitError("is not an object")
        found = {}
        for name, inner, is_needed in fields:
            if name in value:
                try:
                    found[name] = inner(value[name])
                except _MisfitError as error:
                    raise error.within(name) from None
            elif is_needed:
                raise _MisfitError("is missing", name)
        return kind(**found) if makes else value

    return read


def _marks(hint: Any) -> Sequence[Any]:
    marks: Sequence[Any] = getattr(hint, "__metadata__", ())
    return marks


def _is_needed(field: dataclasses.Field[Any], hint: Any) -> bool:
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return not has_default or AlwaysStored() in _marks(hint)


def _described(value: object) -> str:
    return f"{value!r:.40}" if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace("collections.abc.", "")


_read_whole: Final = _checking(lambda value: type(value) is int, "a whole number")
_PLAIN: Final[Mapping[Any, _Reader]] = {
    Any: lambda value: value,
    int: _checking(lambda value: type(value) is int and abs(value) < _MOST, f"a whole number below {_MOST}"),
    float: _checking(lambda value: type(value) in (int, float) and not abs(value) > LARGEST, "a number", float),
    str: _checking(lambda value: isinstance(value, str), "a string"),
    bool: _checking(lambda value: isinstance(value, bool), "true or false"),
}
