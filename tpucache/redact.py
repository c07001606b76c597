"""Text as it may be shown: without the passwords and tokens of URLs, and without what steers a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN: Final = "***"
# A path of a URL collapses its slashes, so one may be all that is left of them.
_SCHEME: Final = r"\b([A-Za-z][A-Za-z0-9+.-]*:/{1,3})"
# What is before an @: up to the first slash, or beyond it where a password holds one, which a port never does.
_USER: Final = re.compile(_SCHEME + r"(?P<user>[^\s/?#]*@|[^\s/:@]*:(?!:|\d+(?:/|$))[^\s@]*@)")
_QUERY: Final = re.compile(_SCHEME + r"([^\s?#'\"<>]*)[?#][^\s'\"<>]+")
_SHORTEST: Final = 3


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


#: What makes a cell of a table a formula, in programs that show tables.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_TEXT_MARK: Final = "'"


def to_cell(text: str) -> str:
    """Return a text as the cell of a CSV: with a `'` in front where a spreadsheet would take it for a formula.

    Numbers, and several with `;` between them, stay as they are. `from_cell` returns the text again.
    """
    return f"{_TEXT_MARK}{text}" if _is_formula(text.lstrip(_TEXT_MARK)) else text


def from_cell(text: str) -> str:
    """Return the text of a cell that `to_cell` made."""
    rest = text.removeprefix(_TEXT_MARK)
    return rest if rest != text and _is_formula(rest.lstrip(_TEXT_MARK)) else text


def _is_formula(text: str) -> bool:
    if not text.startswith(_FORMULA):
        return False
    try:
        [float(number) for number in text.split(";")]  # several values of one sample, too
    except ValueError:
        return True
    return text.startswith(("\t", "\r"))
