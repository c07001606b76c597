"""Text as it may be shown: without the passwords and tokens of URLs, and without what steers a terminal."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN: Final = "***"
# A path of a URL collapses its slashes, so one may be all that is left of them.
_SCHEME: Final = r"\b([A-Za-z][A-Za-z0-9+.-]*:/{1,3})"
# What is before an @: up to the first slash, or beyond it where a password holds one, which a port never does.
_USER: Final = re.compile(_SCHEME + r"(?P<user>[^\s/?#]*@|[^\s/:@]*:(?!:|\d+(?:/|$))[^\s@]*@)")
_QUERY: Final = re.compile(_SCHEME + r"([^\s?#'\"<>]*)[?#][^\s'\"<>]+")
_SHORTEST: Final = 3

#: What is between the classes, or the values, of one sample in a cell.
SEPARATOR: Final = ";"
#: What makes a cell of a table a formula, in programs that show tables.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_TEXT_MARK: Final = "'"
_BYTES_MARK: Final = "bytes:"
_OTHER_BYTE: Final = re.compile("[\udc80-\udcff]")

_NAME_MARK: Final = "name:"
_UNLIKE_NAMES: Final = re.compile(rf"[%{SEPARATOR}\s]")

#: The columns in which a table of predictions begins; a probability for each class follows.
PREDICTION_COLUMNS: Final = ("sample", "path", "label", "prediction")
#: What those tables that tpucache wrote begin in: cells of text in them are as `to_cell` makes them.
OWN_HEADING: Final = PREDICTION_COLUMNS[:3]
_CLASS_MARK: Final = "class:"


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text in which each URL has lost its user, password and query, and each of the secrets is hidden."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1\2?{HIDDEN}", _USER.sub(r"\1", text))


def shown(url: str) -> str:
    """Return a URL, or a path, as it may be shown."""
    return redact(url).removesuffix(f"?{HIDDEN}")


def url_secrets(url: str) -> list[str]:
    """Return the passwords, users and values of a URL's query, longest first, in each way that they may be spelled."""
    found: set[str] = set()
    for part in url.split("::"):
        _, *query = re.split(r"[?#]", part)
        user = (_USER.match(part) or {"user": ""})["user"].removesuffix("@")
        pairs = "&".join(query).split("&")
        found |= {user, user.partition(":")[2], *query, *pairs, *(pair.partition("=")[2] for pair in pairs)}
    spelled = {way(secret) for secret in found for way in (str, unquote, unquote_plus, quote, quote_plus)}
    return sorted((secret for secret in spelled if len(secret) >= _SHORTEST), key=len, reverse=True)


def printable(text: str) -> str:
    r"""Return text in one line, with escapes such as `\n` for what does not print or turns the reading order."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def printable_lines(text: str) -> str:
    """Return the same of a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def to_cell(text: str) -> str:
    """Return a text as the cell of a CSV: with a `'` in front where a spreadsheet would take it for a formula.

    Numbers, and several with `;` between them, stay as they are. Names that are no UTF-8 have `bytes:` in front and
    each other byte as `%FF`, and so have texts that begin with that. `from_cell` returns the text again.
    """
    if text.startswith(_BYTES_MARK) or _OTHER_BYTE.search(text):
        return _BYTES_MARK + _OTHER_BYTE.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", text.replace("%", "%25"))
    return f"{_TEXT_MARK}{text}" if _is_formula(text.lstrip(_TEXT_MARK)) else text


def from_cell(text: str) -> str:
    """Return the text of a cell that `to_cell` made."""
    if text.startswith(_BYTES_MARK):
        return unquote(text.removeprefix(_BYTES_MARK), errors="surrogateescape")
    rest = text.removeprefix(_TEXT_MARK)
    return rest if rest != text and _is_formula(rest.lstrip(_TEXT_MARK)) else text


def _is_formula(text: str) -> bool:
    if not text.startswith(_FORMULA):
        return False
    try:
        [float(number) for number in text.split(SEPARATOR)]  # several values of one sample, too
    except ValueError:
        return True
    if not text.isascii():  # digits of other scripts, which not every program takes for a number
        return True
    return text.startswith(("\t", "\r"))


def join_names(names: Iterable[str]) -> str:
    """Return the classes of one sample as one text, with `;` between them. `part_names` returns them again.

    A name with `;` in it, with white space at an end, or without a character has `name:` in front and these characters
    as `%3B`; a name that begins so has, too.
    """
    return SEPARATOR.join(
        _NAME_MARK + _UNLIKE_NAMES.sub(lambda found: quote(found[0], safe=""), name)
        if SEPARATOR in name or name != name.strip() or not name or name.startswith(_NAME_MARK)
        else name
        for name in names
    )


def part_names(text: str, separator: str = SEPARATOR) -> list[str]:
    """Return the classes that `join_names` made one text of; parts without a character are none."""
    parts = [part.strip() for part in text.split(separator) if part.strip()]
    return [unquote(part.removeprefix(_NAME_MARK)) if part.startswith(_NAME_MARK) else part for part in parts]


def to_heading(name: str) -> str:
    """Return what the column of a class is called in a table of predictions: its name as a cell.

    A class that is called as one of the first columns has `class:` in front, and one that begins so, too.
    """
    return to_cell(f"{_CLASS_MARK}{name}" if _is_taken(name) else name)


def from_heading(text: str) -> str:
    """Return the class whose column `to_heading` called so."""
    name = from_cell(text)
    rest = name.removeprefix(_CLASS_MARK)
    return rest if rest != name and _is_taken(rest) else name


def _is_taken(name: str) -> bool:
    while name.startswith(_CLASS_MARK):
        name = name.removeprefix(_CLASS_MARK)
    return name in PREDICTION_COLUMNS


class _Lines:
    """Collects the lines that a csv.writer writes, each ended by a line feed alone."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> None:
        self.lines.append(line.removesuffix("\r\n") + "\n")


def to_csv(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return rows as a CSV file in UTF-8, whose cells are read again as they are."""
    found = _Lines()
    csv.writer(found, lineterminator="\r\n").writerows(rows)  # so that a carriage return in a cell is quoted, too
    return "".join(found.lines).encode()
