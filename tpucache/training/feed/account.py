"""The seconds of each part of a run. Every second belongs to exactly one part, so that the parts add up to the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, get_args

Part = Literal[
    "start_up", "staging", "range_test", "compiling", "steps", "waiting", "evaluation", "metrics", "checkpoints",
    "replay", "report",
]  # fmt: skip
PARTS: Final = get_args(Part)

Counter = Callable[[], float]


class Account:
    """The seconds of each part of a run, added up over the processes that resumed it.

    Work that happens within other parts, such as compiling and waiting, has a counter of its own. Its seconds are
    subtracted from the part in which it was done.
    """

    def __init__(self, began: float | None = None, clock: Counter = time.monotonic) -> None:
        """Begin with the part `start_up`, now or at the time `began` of the clock."""
        self._clock = clock
        self._began = self._since = clock() if began is None else began
        self._part: Part = "start_up"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._counters: dict[Part, tuple[Counter, float]] = {}
        self._earlier: Mapping[str, float] | None = None
        self._earlier_wall = 0.0

    def take_out(self, part: Part, counter: Counter) -> None:
        """Count the seconds of `counter` for `part` from now on, and not for the part in which the work is done.

        `counter` returns the seconds that it has counted so far.
        """
        self.begin(self._part)
        self._counters[part] = (counter, counter())

    def add_earlier(self, seconds: Mapping[str, float], wall: float) -> None:
        """Add the seconds of each part that earlier processes of the run spent, and their total `wall`.

        Only the first call counts.
        """
        if self._earlier is None:
            self._earlier, self._earlier_wall = dict(seconds), wall

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Return a context whose seconds count for the part `name`. Afterwards the part before it continues."""
        before = self.begin(name)
        try:
            yield
        finally:
            self.begin(before)

    def begin(self, name: Part) -> Part:
        """Let the time from now on belong to the part `name`; return the part that was current before."""
        now = self._clock()
        spent = now - self._since
        for part, (counter, last) in self._counters.items():
            count = counter()
            self._seconds[part] += count - last
            spent -= count - last
            self._counters[part] = (counter, count)
        self._seconds[self._part] += spent
        self._since = now
        before, self._part = self._part, name
        return before

    def seconds(self) -> dict[str, float]:
        """Return the total seconds of each part."""
        self.begin(self._part)
        earlier = self._earlier or {}
        return {name: earlier.get(name, 0.0) + spent for name, spent in self._seconds.items()}

    def wall_seconds(self) -> float:
        """Return the seconds of the run, earlier processes included, up to the last call of `begin` or `seconds`."""
        return self._earlier_wall + self._since - self._began
