"""What became of a row: the right result, a clear refusal, or something wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache import TpucacheError

#: What a message says besides what is wrong and where: what to do, or what is allowed instead.
_ADVICE: Final = re.compile(
    r"\b(add|ask|begin|bring|draw|keep|build|check|choose|convert|copy|end it|give|install|leave|left out|look|"
    r"make|name|open|remove|repair|restart|run|save|set|take|try|unset|use|warm|write)\b|"
    r"\b(allowed|at least|at most|between|has|invalid|is a|is an|is one of|less than|lie|looked for|must|needs?|only|"
    r"required|such as|there are|unrecognized)\b|"
    r"above 0|does not divide|leaves nothing|, not |in \w+ \(/|fails on|raised|could be used|--[a-z]",
    re.IGNORECASE,
)


class Outcome(NamedTuple):
    """How a row ended: "correct", "refused" or "WRONG", and the evidence or the message."""

    kind: str
    text: str


class Done(NamedTuple):
    """A command that ended: its exit status (negative: a signal), and what it printed."""

    status: int
    out: str
    err: str


class Wrong(Exception):  # a verdict of the table, not an error of the program
    """Something is not as documented; the message is the evidence."""


def correct(evidence: str) -> Outcome:
    """Return the outcome of a row whose results were compared with an expectation."""
    return Outcome("correct", evidence)


def equal(what: str, found: Any, expected: Any) -> None:
    """Raise Wrong unless what was found is what was expected: arrays to the bit, other values by ==."""
    if isinstance(expected, np.ndarray):
        found = np.asarray(found)
        same = found.shape == expected.shape and found.dtype == expected.dtype and np.array_equal(found, expected)
    else:
        same = found == expected
    if not same:
        raise Wrong(f"{what}: found {_short(found)}, expected {_short(expected)}")


def true(what: str, holds: bool) -> None:
    """Raise Wrong unless something holds."""
    if not holds:
        raise Wrong(f"this does not hold: {what}")


def succeeded(done: Done) -> Done:
    """Return a command that ended well. Raises Wrong for any other."""
    if done.status != 0 or "Traceback" in done.err:
        raise Wrong(f"exit status {done.status}: {_last_line(done.err)}")
    return done


def refused(done: Done, *words: str, status: int = 1) -> Outcome:
    """Check that a command refused: its exit status, one line that says what, where and what to do, no traceback.

    Each of `words` is a regular expression that the line holds. Raises Wrong.
    """
    line = _last_line(done.err)
    if done.status != status:
        raise Wrong(f"exit status {done.status}, not {status}: {line or done.out[-200:]}")
    if not line.startswith("python -m tpucache"):
        raise Wrong(f"the last line on standard error is no message of the command: {line!r}")
    if "Traceback" in done.err:
        raise Wrong(f"a traceback: {line}")
    return _refusal(line.partition(": ")[2].removeprefix("error: "), words)


def refuses(call: Callable[..., Any], error: type[Exception] | tuple[type[Exception], ...], *words: str) -> Outcome:
    """Check that a call raises this error of tpucache's, with a message of one line that holds each of `words`."""
    try:
        result = call()
    except error as raised:
        if not isinstance(raised, TpucacheError):
            raise Wrong(f"{type(raised).__name__} is no error of tpucache's: {raised}") from raised
        return _refusal(str(raised), words)
    except Exception as raised:
        raise Wrong(f"{type(raised).__name__}: {raised}") from raised
    raise Wrong(f"was accepted, and gave {_short(result)}")


def _refusal(message: str, words: tuple[str, ...]) -> Outcome:
    if "\n" in message or len(message) < 20:
        raise Wrong(f"the message is not one telling line: {message!r}")
    lacking = [word for word in words if not re.search(word, message, re.IGNORECASE)]
    if lacking:
        raise Wrong(f"the message lacks {', '.join(map(repr, lacking))}: {message}")
    if not _ADVICE.search(message):
        raise Wrong(f"the message does not say what to do: {message}")
    return Outcome("refused", message)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 160 else f"{text[:100]} … {text[-50:]}"
