"""What is fuzzed: a target, and what one input may do to it."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from tpucache import TpucacheError

#: The most memory that inputs may add to that of preparing their target, and the most seconds for one input.
MOST_BYTES: Final = 200 << 20
MOST_SECONDS: Final = 20
_LONGEST_MESSAGE: Final = 2000
_FRAMES: Final = 4


class Target(NamedTuple):
    """Something that reads what others wrote.

    `prepare` makes what all inputs share in a folder. `attempt` makes one input in an empty folder, as the random
    numbers say, and reads it: it raises an error of tpucache's for what is refused, AssertionError for what is wrong.
    `share` is its part of all inputs.
    """

    name: str
    prepare: Callable[[Path], Any]
    attempt: Callable[[Any, random.Random, Path], None]
    share: float = 1.0


def refusals(*calls: Callable[[], object]) -> None:
    """Call all functions, also after one that refuses; raise the first refusal at the end."""
    first: TpucacheError | None = None
    for call in calls:
        try:
            call()
        except TpucacheError as error:
            first = first or error
    if first is not None:
        raise first


class Tries:
    """Tries inputs of one target in this process, where every warning is an error."""

    def __init__(self, target: Target, folder: Path) -> None:
        """Prepare the target, and try a first input that is not counted: it imports what others need."""
        warnings.simplefilter("error")
        signal.signal(signal.SIGALRM, _give_up)
        self._target, self._folder = target, folder
        (folder / "shared").mkdir(parents=True)
        self._state = target.prepare(folder / "shared")
        self._bytes = 0
        self.run(-1)
        self._bytes = peak_bytes()

    def run(self, number: int) -> str | None:
        """Try the input of a number; return what is wrong, "" where it was refused, None where it was read."""
        place = self._folder / "input"
        place.mkdir()
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        try:
            self._target.attempt(self._state, random.Random(f"{self._target.name} {number}"), place)
            found = None
        except TpucacheError as error:
            found = _wrong_message(str(error))
        except BaseException as error:  # whatever else is raised is what is looked for
            if isinstance(error, KeyboardInterrupt):
                raise
            steps = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            places = " < ".join(f"{Path(step.filename).name}:{step.lineno}" for step in reversed(steps))
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({places})"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            shutil.rmtree(place, ignore_errors=True)
        more = peak_bytes() - self._bytes
        if self._bytes and more > MOST_BYTES:
            self._bytes += more  # each input is blamed for its own
            return f"takes {more / 1e6:,.0f} MB more than any before it; {found or 'nothing else'}"
        return found


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _wrong_message(text: str) -> str:
    """Return what is wrong with an error's message, "" where it is a line for people."""
    if 20 <= len(text) <= _LONGEST_MESSAGE and "\n" not in text:
        return ""
    return f"its message is no line for people: {text[:200]!r}"


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"more than {MOST_SECONDS} s")
