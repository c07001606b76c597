"""What a refusal has to be: one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from tpucache import TpucacheError

#: What a message says besides what is wrong and where: what to do, or what is allowed instead.
_ADVICE: Final = re.compile(
    r"\b(add|ask|begin|bring|draw|keep|build|check|choose|convert|copy|end (it|that|other)|give|install|leave|left out|"
    r"look|"
    r"make|name|open|remove|repair|restart|run|save|set|take|try|unset|use|warm|write)\b|"
    r"\b(allowed|at least|at most|between|has|invalid|is a|is an|is one of|less than|lie|looked for|must|needs?|only|"
    r"required|such as|there are|unrecognized)\b|"
    r"above 0|does not divide|leaves nothing|, not |in \w+ \(/|fails on|raised|could be used|--[a-z]",
    re.IGNORECASE,
)


class Done(NamedTuple):
    status: int
    out: str
    err: str


def succeeded(done: Done) -> Done:
    assert (done.status, "Traceback" in done.err) == (0, False), done.err
    return done


def assert_refused(done: Done, *words: str, status: int = 1) -> str:
    said = done.err.strip().removesuffix(" --help").splitlines() or [""]
    line = said[-2] if said[-1].startswith("see ") else said[-1]
    assert done.status == status, line or done.out[-200:]
    assert line.startswith(("tpucache", "python -m tpucache"))
    assert "Traceback" not in done.err
    message = line.partition(": ")[2]
    _assert_telling(message, words)
    return message


@contextlib.contextmanager
def refuses(error: type[TpucacheError], *words: str) -> Iterator[None]:
    with pytest.raises(error) as raised:
        yield
    _assert_telling(str(raised.value), words)


def _assert_telling(message: str, words: tuple[str, ...]) -> None:
    assert "\n" not in message
    assert len(message) >= 20
    assert [word for word in words if not re.search(word, message, re.IGNORECASE)] == [], message
    assert _ADVICE.search(message), f"this does not say what to do: {message}"
