"""Progress for people: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any, Final, TextIO

_LINE_SECONDS: Final = 10.0

#: Whether another process shows the progress of the work that this one takes part in.
_hidden: list[bool] = []


def hide() -> None:
    """Show no progress of this process from now on."""
    _hidden.append(True)


class Progress:
    """Counts towards a total and shows it on standard error.

    On a terminal with tqdm installed it is a bar; otherwise a line at most every ten seconds, and one at the end. Work
    goes on without it where standard error is closed, full, or a terminal that is gone.
    """

    def __init__(
        self,
        total: int | None,
        label: str,
        unit: str,
        initial: int = 0,
        stream: TextIO | None = None,
        *,
        is_brief: bool = False,
    ) -> None:
        """Begin at `initial` of `total` units (None: not known); what was there before does not count for the rate.

        Of work that `is_brief`, nothing is left on a terminal, nor in a log if it took less than ten seconds.
        """
        self._is_brief = is_brief
        self._stream = stream or sys.stderr  # None: standard error is closed
        self._total, self._label, self._unit = total, label, unit
        self._done = self._initial = initial
        self._start = self._shown = time.monotonic()
        self._note = ""
        self._bar = self._make_bar()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Show the last state and end the bar."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
        elif not _hidden and self._done > self._initial and not (self._is_brief and self._shown == self._start):
            self._print()

    def advance_to(self, done: int, note: str = "") -> None:
        """Count up to `done` units in all."""
        self.advance(done - self._done, note)

    def advance(self, units: int, note: str = "") -> None:
        """Count `units` more; `note` is shown beside the rate."""
        self._done += units
        self._note = note
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.set_postfix_str(note, refresh=False)
                self._bar.update(units)
        elif not _hidden and time.monotonic() - self._shown >= _LINE_SECONDS:
            self._print()

    def _make_bar(self) -> Any:
        if _hidden or self._stream is None or not self._stream.isatty():
            return None
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return None
        return tqdm(
            total=self._total,
            initial=self._done,
            desc=self._label,
            unit=f" {self._unit}",
            leave=not self._is_brief,
            file=self._stream,
        )

    def _print(self) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._start
        rate = (self._done - self._initial) / seconds if seconds else 0.0
        whole = self._done if self._total is None else self._total
        left = f", {(whole - self._done) / rate:,.0f} s left" if rate and self._done < whole else ""
        total = "" if self._total is None else f" of {self._total:,}"
        note = f", {self._note}" if self._note else ""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                print(
                    f"{self._label}: {self._done:,}{total} {self._unit}, {rate:,.0f} a second{left}{note}",
                    file=self._stream,
                    flush=True,
                )
