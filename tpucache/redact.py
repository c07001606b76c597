"""Makes texts safe to print or to store.

In messages, passwords in URLs are left out and control characters are escaped. In CSV files, each text becomes a cell
that a spreadsheet does not take for a formula, and that `from_cell` turns into the same text again.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN: Final = "***"
# `Path` collapses the slashes of a URL, so that only one may be left.
_SCHEME: Final = r"\b([A-Za-z][A-Za-z0-9+.-]*:/{1,3})"
# The part before an @: up to the first slash, or beyond it if a password contains one (a port never does).
_USER: Final = re.compile(_SCHEME + r"(?P<user>[^\s/?#]*@|[^\s/:@]*:(?!:|\d+(?:/|$))[^\s@]*@)")
_QUERY: Final = re.compile(_SCHEME + r"([^\s?#'\"<>]*)[?#][^\s'\"<>]+")
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


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text without the user, password and query of URLs, and with `***` in place of each of the secrets."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1\2?{HIDDEN}", _USER.sub(r"\1", text))


def shown(url: str) -> str:
    """Return a URL without its user, password and query, for messages; a path is returned unchanged."""
    return redact(url).removesuffix(f"?{HIDDEN}")


def url_secrets(url: str) -> list[str]:
    """Return a URL's passwords, users and query values, longest first.

    Each secret is returned as it is in the URL, percent-encoded, and percent-decoded; secrets of one or two characters
    are left out.
    """
    found: set[str] = set()
    for part in url.split("::"):
        _, *query = re.split(r"[?#]", part)
        user = (_USER.match(part) or {"user": ""})["user"].removesuffix("@")
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
    """Return a text of several lines, with each line as `printable` returns it."""
    return "\n".join(map(printable, text.split("\n")))


def to_cell(text: str) -> str:
    """Return a text as the cell of a CSV, with a `'` before it if a spreadsheet would take it for a formula.

    Numbers, and several numbers with `;` between them, are not changed. A name that is not UTF-8 gets `bytes:` before
    it, and each invalid byte is written as in a URL, for example `%FF`; a text that begins with `bytes:` is written in
    the same way. `from_cell` is the inverse.
    """
    if text.startswith(_BYTES_MARK) or _OTHER_BYTE.search(text):
        return _BYTES_MARK + _OTHER_BYTE.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", text.replace("%", "%25"))
    return f"{_TEXT_MARK}{text}" if _is_formula(text.lstrip(_TEXT_MARK)) else text


def from_cell(text: str) -> str:
    """Return the text from which `to_cell` makes the cell `text`."""
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
    if not text.isascii():  # digits of other scripts: some programs do not read them as numbers
        return True
    return text.startswith(("\t", "\r"))


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
    """Return the classes in a text that `join_names` has made; empty pieces between separators are left out."""
    parts = [part.strip() for part in text.split(separator) if part.strip()]
    return [unquote(part.removeprefix(_NAME_MARK)) if part.startswith(_NAME_MARK) else part for part in parts]


def to_heading(name: str) -> str:
    """Return the heading of a class's column in a table of predictions: its name as a cell.

    A class that has the name of one of the table's first columns, perhaps with `class:` before it, gets another
    `class:`.
    """
    return to_cell(f"{_CLASS_MARK}{name}" if _is_taken(name) else name)


def from_heading(text: str) -> str:
    """Return the class whose column has this heading; the inverse of `to_heading`."""
    name = from_cell(text)
    rest = name.removeprefix(_CLASS_MARK)
    return rest if rest != name and _is_taken(rest) else name


def _is_taken(name: str) -> bool:
    while name.startswith(_CLASS_MARK):
        name = name.removeprefix(_CLASS_MARK)
    return name in PREDICTION_COLUMNS


class _Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> None:
        self.lines.append(line.removesuffix("\r\n") + "\n")


def to_csv(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return the content of a CSV file with these rows, in UTF-8; csv.reader reads the cells' texts back unchanged."""
    found = _Lines()
    csv.writer(found, lineterminator="\r\n").writerows(rows)  # makes csv quote carriage returns in cells
    return "".join(found.lines).encode()
