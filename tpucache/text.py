"""Text for people and for files: without secrets and control characters, cells of tables, quantities, strict JSON."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from tpucache.errors import HIDDEN, USER, FormatError, redact

_SHORTEST: Final = 3

#: The character between several classes or values of a sample in one cell of a table.
SEPARATOR: Final = ";"
#: Characters at the beginning of a cell that make it a formula in spreadsheets.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_TEXT_MARK: Final = "'"
_BYTES_MARK: Final = "bytes:"
_OTHER_BYTE: Final = re.compile("[\udc80-\udcff]")

_NAME_MARK: Final = "name:"
_UNLIKE_NAMES: Final = re.compile(rf"[%{SEPARATOR}\s]")

#: The first columns of a table of predictions; a probability for each class follows.
PREDICTION_COLUMNS: Final = ("sample", "path", "label", "prediction")
#: The first columns of tables that tpucache writes; their text cells are written by `to_cell`.
OWN_HEADING: Final = PREDICTION_COLUMNS[:3]
_CLASS_MARK: Final = "class:"


def shown(url: str) -> str:
    """Return a URL without its user, password and query, for messages; a path is returned unchanged."""
    return redact(url).removesuffix(f"?{HIDDEN}")


def url_secrets(url: str) -> list[str]:
    """Return a URL's passwords, users and query values, longest first, in all their encodings."""
    found: set[str] = set()
    for part in url.split("::"):
        _, *query = re.split(r"[?#]", part)
        user = (USER.match(part) or {"user": ""})["user"].removesuffix("@")
        pairs = "&".join(query).split("&")
        found |= {user, user.partition(":")[2], *query, *pairs, *(pair.partition("=")[2] for pair in pairs)}
    spelled = {way(secret) for secret in found for way in (str, unquote, unquote_plus, quote, quote_plus)}
    return sorted((secret for secret in spelled if len(secret) >= _SHORTEST), key=len, reverse=True)


def printable(text: str) -> str:
    r"""Return text on one line, with escapes such as `\n` for characters that do not print or change its direction."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def named(names: Iterable[object], most: int = 5) -> str:
    """Return the first names, at most `most`, and how many more there are."""
    texts = [*map(str, names)]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def to_cell(text: str) -> str:
    """Return a text as the cell of a CSV, with a `'` before it if a spreadsheet would take it for a formula.

    Numbers, also several with `;` between them, are not changed. A name that is not UTF-8 or begins with `bytes:` gets
    `bytes:` before it, and each invalid byte is written as in a URL, such as `%FF`. `from_cell` is the inverse.
    """
    if text.startswith(_BYTES_MARK) or _OTHER_BYTE.search(text):
        return _BYTES_MARK + _OTHER_BYTE.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", text.replace("%", "%25"))
    return f"{_TEXT_MARK}{text}" if _is_formula(text.lstrip(_TEXT_MARK)) else text


def from_cell(text: str) -> str:
    if text.startswith(_BYTES_MARK):
        return unquote(text.removeprefix(_BYTES_MARK), errors="surrogateescape")
    rest = text.removeprefix(_TEXT_MARK)
    return rest if rest != text and _is_formula(rest.lstrip(_TEXT_MARK)) else text


def _is_formula(text: str) -> bool:
    if not text.startswith(_FORMULA):
        return False
    try:
        [float(number) for number in text.split(SEPARATOR)]  # a sample may have several values
    except ValueError:
        return True
    # Some programs do not read digits of other scripts as numbers.
    return not text.isascii() or text.startswith(("\t", "\r"))


def join_names(names: Iterable[str]) -> str:
    """Return the classes of one sample as one text, with `;` between them; `part_names` is the inverse.

    A name that is empty, contains `;`, has white space at an end or begins with `name:` gets `name:` before it. In such
    a name, `;`, `%` and white space are written as in a URL, for example `;` as `%3B`.
    """
    return SEPARATOR.join(
        _NAME_MARK + _UNLIKE_NAMES.sub(lambda found: quote(found[0], safe=""), name)
        if SEPARATOR in name or name != name.strip() or not name or name.startswith(_NAME_MARK)
        else name
        for name in names
    )


def part_names(text: str, separator: str = SEPARATOR) -> list[str]:
    """The inverse of `join_names`; empty pieces are left out."""
    parts = [part.strip() for part in text.split(separator) if part.strip()]
    return [unquote(part.removeprefix(_NAME_MARK)) if part.startswith(_NAME_MARK) else part for part in parts]


def to_heading(name: str) -> str:
    """Return a class's name as the heading of its column in a table of predictions.

    One that is called as one of the first columns, or begins with `class:`, gets `class:` before it.
    """
    is_taken = name in PREDICTION_COLUMNS or name.startswith(_CLASS_MARK)
    return to_cell(f"{_CLASS_MARK}{name}" if is_taken else name)


def from_heading(text: str) -> str:
    return from_cell(text).removeprefix(_CLASS_MARK)


def to_csv(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return the content of a CSV file with these rows, in UTF-8; csv.reader reads the cells' texts back unchanged."""
    lines: list[str] = []
    found = SimpleNamespace(write=lambda line: lines.append(line.removesuffix("\r\n") + "\n"))
    csv.writer(found, lineterminator="\r\n").writerows(rows)  # makes csv quote carriage returns in cells
    return "".join(lines).encode()


#: Units of bytes with their sizes, the largest first.
SCALES: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration_text(seconds)


def size_text(count: float) -> str:
    for scale, name in SCALES:
        if count >= scale:
            return f"{count / scale:,.1f} {name}"
    return f"{count:,.0f} bytes"


def rate_text(value: float) -> str:
    return f"{value:,.1f}" if 0 < value < 9.95 else f"{value:,.0f}"


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

    Raises ValueError also for a repeated key, of which RFC 8259 does not say what counts.
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
    """Return the object in a JSON text.

    Raises FormatError, also for deeper nesting than in our own files: code may recurse.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{where} is not an object")
    level: list[Any] = [content]
    for _ in range(_MAX_NESTING):
        inner = itertools.chain(*(each.values() if isinstance(each, dict) else each for each in level))
        level = [value for value in inner if isinstance(value, (dict, list))]
    if level:
        raise FormatError(f"not JSON that tpucache writes: it has more than {_MAX_NESTING} levels of objects and lists")
    return content


class Limit(NamedTuple):
    """An annotation that limits a field to values for which `fits` is true; `what` names such values in errors."""

    fits: Callable[[Any], object]
    what: str


def between(low: float, high: float) -> Limit:
    """Limit a field to numbers from `low` to `high`, of the type of `low`. NaN does not fit."""
    kind = "a number" if isinstance(low, float) else "a whole number"
    return Limit(lambda value: type(value) is type(low) and low <= value <= high, f"{kind} from {low} to {high}")


def matching(pattern: str, what: str) -> Limit:
    """Limit a field to texts that match all of `pattern`."""
    return Limit(re.compile(pattern).fullmatch, what)


def at_most(count: int) -> Limit:
    """Limit a field to lists of at most `count` items."""
    return Limit(lambda value: len(value) <= count, f"one of at most {count} items")


#: Limits a field to lists of distinct texts.
DISTINCT: Final = Limit(lambda value: len(set(value)) == len(value), "one of distinct texts")
#: Forbids null in a file: if a field has no value, its key is left out instead.
GIVEN: Final = Limit(lambda value: value is not None, "allowed: leave the key out")


class Stored(Enum):
    """Marks a field, as in `Annotated[int, Stored.NEVER]`: no file has it, or every file, even if it has a default."""

    NEVER = 0
    ALWAYS = 1


class _MisfitError(Exception):
    """A value does not fit its field; `place` is where it is in the content, such as `shards[0].bytes`."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place

    def within(self, place: str) -> _MisfitError:
        return _MisfitError(str(self), f"{place}.{self.place}".removesuffix(".").replace(".[", "["))


def read_as(kind: type[Kind], content: object, where: str) -> Kind:
    """Return an instance of a dataclass with the values of an untrusted JSON object. Raises FormatError."""
    return cast(Kind, _read(kind, content, where, makes=True))


def check_types(content: object, kind: type, where: str) -> None:
    """Raise FormatError unless an untrusted JSON object fits the fields of a dataclass, which may be missing."""
    _read(kind, content, where, makes=False)


def _read(kind: Any, content: object, where: str, *, makes: bool) -> Any:
    try:
        return _reader(kind, makes)(content)
    except _MisfitError as error:
        raise FormatError(f"{where}: {error.place!r} {error}" if error.place else f"{where} {error}") from None


@functools.cache
def _reader(hint: Any, makes: bool) -> _Reader:
    """Return the function that checks a value, and with `makes` returns a dataclass's instance for an object."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [each for each in hint.__metadata__ if isinstance(each, Limit)]
        # The first limit of an integer replaces the usual one.
        read = _checking(*limits.pop(0)) if parts[0] is int and limits else _reader(parts[0], makes)
        for fits, what in limits:
            read = _checking(fits, what, read)
        return read
    if dataclasses.is_dataclass(hint):
        return _object_reader(hint, makes)
    if origin is None:
        return _PLAIN.get(hint) or _checking(lambda value: isinstance(value, hint), _shown(hint))
    if origin is Literal:
        what = f"one of {', '.join(map(str, parts))}"
        return _checking(lambda value: any(type(value) is type(part) and value == part for part in parts), what)
    inner = [_reader(part, makes) for part in parts if part not in (..., NoneType)]
    if origin in (Union, UnionType):
        return _first_of(inner, NoneType in parts, _shown(hint))
    is_mapping = issubclass(origin, Mapping)
    return _mapping_reader(*inner) if is_mapping else _list_reader(inner[0], tuple if origin is tuple else list)


def _checking(fits: Callable[[Any], object], what: str, inner: _Reader = lambda value: value) -> _Reader:
    def read(value: Any) -> Any:
        if fits(found := inner(value)):
            return found
        raise _MisfitError(f"is {_described(value)}, not {what}")

    return read


def _first_of(readers: Sequence[_Reader], may_be_none: bool, what: str) -> _Reader:
    def read(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        if len(readers) == 1:
            return readers[0](value)
        for each in readers:
            with contextlib.suppress(_MisfitError):
                return each(value)
        raise _MisfitError(f"is {_described(value)}, not {what}")

    return read


def _list_reader(inner: _Reader, make: Callable[[list[Any]], Any]) -> _Reader:
    check = _checking(lambda value: isinstance(value, (list, tuple)), "a list")

    def read(value: Any) -> Any:
        found: list[Any] = []
        items = check(value)
        try:
            for item in items:
                found.append(inner(item))
        except _MisfitError as error:
            raise error.within(f"[{len(found)}]") from None
        return make(found)

    return read


def _mapping_reader(key: _Reader, inner: _Reader) -> _Reader:
    check = _checking(lambda value: isinstance(value, dict), "an object")
    return lambda value: {key(name): inner(each) for name, each in check(value).items()}


def _object_reader(kind: Any, makes: bool) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    fields = []
    for field in dataclasses.fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        is_needed = makes and (not has_default or Stored.ALWAYS in marks)
        if Stored.NEVER not in marks:
            fields.append((field.name, _reader(hints[field.name], makes), is_needed))

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


def _described(value: object) -> str:
    return f"{value!r:.40}" if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace("collections.abc.", "")


def _read_number(value: Any) -> float:
    if type(value) in (int, float) and not abs(value) > LARGEST:
        return float(value)
    raise _MisfitError(f"is {_described(value)}, not a number")


_PLAIN: Final[Mapping[Any, _Reader]] = {
    Any: lambda value: value,
    int: _checking(lambda value: type(value) is int and abs(value) < _MOST, f"a whole number below {_MOST}"),
    float: _read_number,
    str: _checking(lambda value: isinstance(value, str), "a string"),
    bool: _checking(lambda value: isinstance(value, bool), "true or false"),
}
