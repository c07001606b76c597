"""Progress for people: a bar on a terminal, plain lines in a log, and notes about the current work."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TextIO

from tpucache.process import tell
from tpucache.text import SCALES, duration_text, printable, rate_text, size_text

_BAR_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 10.0
_COLUMNS: Final = 80  # of a terminal that does not report a width
_ROWS: Final = 20  # for bars, one below another

#: Not empty if another process shows the progress and this one shows none.
_hidden: list[bool] = []


@dataclass(frozen=True)
class BuildProgress:
    """The progress of a build: `samples` of `total` samples are finished, and `skipped` of them were skipped.

    `bytes` is the size of the records that this run has built.
    """

    samples: int
    total: int
    skipped: int
    bytes: int


def hide() -> None:
    _hidden.append(True)


def note(text: str) -> None:
    """Print a line about the current work on standard error, above any bar; do nothing if that fails."""
    if not _hidden:
        with contextlib.suppress(OSError, ValueError), above_bars():
            tell(printable(text))


@contextlib.contextmanager
def above_bars() -> Iterator[None]:
    """Lines are printed in this context above the bars, which are drawn again below."""
    module = sys.modules.get("tqdm")
    with contextlib.nullcontext() if module is None else module.tqdm.external_write_mode():
        yield


class Progress:
    """Counts towards a total: a bar on a terminal, else a line every ten seconds; work goes on if nobody reads it."""

    def __init__(
        self,
        total: int | None,
        label: str,
        unit: str = "samples",
        initial: int = 0,
        stream: TextIO | None = None,
        *,
        is_brief: bool = False,
    ) -> None:
        """The initial units do not count for the rate.

        If `is_brief`, the bar disappears, and quick work has no line.
        """
        self._is_brief = is_brief
        self._stream = None if _hidden else stream or sys.stderr  # None: nothing is shown
        self._unit, self._note = unit, ""
        self._begin(label, total, initial)

    def _begin(self, label: str, total: int | None, initial: int) -> None:
        self._total, self._label = total, printable(label)
        self._done = self._initial = self._printed = initial
        self._start = self._began = self._shown = time.monotonic()
        self._bar = self._make_bar()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._done > self._printed and not (self._is_brief and self._shown == self._began):
            self._show()
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()

    def advance_to(self, done: int) -> None:
        self.advance(done - self._done)

    def show_stage(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show a stage of work whose total was not known before it; each stage has a bar of its own."""
        if label != self._label or self._total is None:
            if self._total is None and self._bar is not None:
                self._bar.leave = False
            self.close()
            self._begin(label, total, done)
        self.advance(done - self._done, note)

    def show_build(self, progress: BuildProgress) -> None:
        skipped = f", {progress.skipped:,} skipped" if progress.skipped else ""
        self.show_stage(self._label, progress.samples, progress.total, f"{size_text(progress.bytes)}{skipped}")

    def advance(self, units: int, note: str = "") -> None:
        self._done += units
        self._note = printable(note)
        if time.monotonic() - self._shown >= (_LINE_SECONDS if self._bar is None else _BAR_SECONDS):
            self._show()

    def restart_clock(self) -> None:
        """Compute the rate only from later units. The earlier units were slower, for example because of compiling."""
        self._initial, self._start = self._done, time.monotonic()

    @property
    def rate(self) -> float:
        seconds = time.monotonic() - self._start
        return (self._done - self._initial) / seconds if seconds > 0 else 0.0

    def _text(self) -> str:
        whole, rate = self._total if self._total is not None else self._done, self.rate
        scale, unit, rate_unit = 1.0, self._unit, ""
        if unit == "bytes":
            scale, unit = next(((size, name) for size, name in SCALES if whole >= size), (1.0, unit))
            rate_unit = f" {unit}"
        done, total = (rate_text(count / scale) if scale != 1.0 else f"{count:,}" for count in (self._done, whole))
        left = (whole - self._done) / rate if rate else 0.0
        parts = (
            f"{done} {unit}" if self._total is None else f"{done} of {total} {unit}",
            f"{rate_text(rate / scale)}{rate_unit}/s" if rate else "",
            f"{duration_text(left)} left" if left > 0 else "",
            self._note,
        )
        return ", ".join(filter(None, parts))

    def _make_bar(self) -> Any:
        # A terminal that cannot return to the beginning of a line is a log.
        if self._stream is None or not self._stream.isatty() or os.environ.get("TERM") == "dumb":
            return None
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        label = self._label.replace("{", "{{").replace("}", "}}")
        bar = "{percentage:3.0f}% {bar} " if self._total else ""
        return tqdm(
            total=self._total,
            initial=self._done,
            bar_format=f"{label}: {bar}{{desc}}",
            ncols=self._columns(),
            nrows=_ROWS,
            leave=not self._is_brief,
            file=self._stream,
        )

    def _columns(self) -> int:
        try:
            return (os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS) - 1 if self._stream else _COLUMNS
        except (OSError, ValueError):
            return _COLUMNS - 1

    def _show(self) -> None:
        self._shown, self._printed = time.monotonic(), self._done
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.n, self._bar.ncols = self._done, self._columns()
                self._bar.set_description_str(self._text())
            elif self._stream is not None:
                print(f"{self._label}: {self._text()}", file=self._stream, flush=True)
