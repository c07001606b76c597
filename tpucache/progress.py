"""Progress for people: a bar on a terminal, plain lines in a log, and notes about the current work."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TextIO

from tpucache.redact import printable
from tpucache.units import SCALES, duration_text, rate_text, size_text

if TYPE_CHECKING:
    from tpucache.warmup.run.scheduler import BuildProgress

_LINE_SECONDS: Final = 10.0
_COLUMNS: Final = 80  # of a terminal that does not report a width
_ROWS: Final = 20  # for bars, one below another
_LEAST_BAR: Final = 8  # columns of a bar

#: Not empty if another process shows the progress and this one shows none.
_hidden: list[bool] = []


def hide() -> None:
    """Show no progress of this process from now on."""
    _hidden.append(True)


def note(text: str) -> None:
    """Print a line about the current work on standard error, above any bar; do nothing if that fails."""
    if _hidden or sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError), above_bars():
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()


@contextlib.contextmanager
def above_bars() -> Iterator[None]:
    """Return a context for printing lines to the terminal: bars are removed, and then drawn again below the lines."""
    module = sys.modules.get("tqdm")
    with contextlib.nullcontext() if module is None else module.tqdm.external_write_mode():
        yield


def _columns(stream: TextIO | None) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS if stream is not None else _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


class Progress:
    """Counts towards a total, and shows the count on standard error.

    On a terminal, if tqdm is installed, the count is a bar. Otherwise it is a line at most every ten seconds, and a
    line at the end. If standard error is closed or full, or the terminal is gone, work continues and nothing is shown.
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
        """Begin at `initial` of `total` units (None if unknown). The initial units do not count for the rate.

        `label` names the work, and `unit` what is counted; `bytes` are shown as kB, MB, GB or TB. `stream` replaces
        standard error. If `is_brief`, the bar disappears from a terminal at the end, and a log has lines only if the
        work took more than ten seconds.
        """
        self._is_brief = is_brief
        self._stream = stream or sys.stderr  # None: standard error is closed
        self._total, self._label, self._unit = total, printable(label), unit
        self._done = self._initial = self._printed = initial
        self._start = self._began = self._shown = time.monotonic()
        self._note = ""
        self._bar = self._make_bar()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Show the last state and end the bar."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
        elif not _hidden and self._done > self._printed and not (self._is_brief and self._shown == self._began):
            self._print()

    def advance_to(self, done: int, note: str = "") -> None:
        """Set the count to `done` units; `note` is shown after the rate."""
        self.advance(done - self._done, note)

    def advance(self, units: int, note: str = "") -> None:
        """Add `units` to the count; `note` is shown after the rate."""
        self._done += units
        self._note = printable(note)
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(units)
        elif not _hidden and time.monotonic() - self._shown >= _LINE_SECONDS:
            self._print()

    def restart_clock(self) -> None:
        """Compute the rate only from later units. The earlier units were slower, for example because of compiling."""
        self._initial, self._start = self._done, time.monotonic()

    @property
    def rate(self) -> float:
        """Units a second so far; 0 if unknown."""
        seconds = time.monotonic() - self._start
        return (self._done - self._initial) / seconds if seconds > 0 else 0.0

    def _parts(self) -> list[str]:
        """Return four texts: the count, the rate, the time left and the note. A text is "" if its value is unknown."""
        whole, rate = self._total if self._total is not None else self._done, self.rate
        scale, unit, rate_unit = 1.0, self._unit, ""
        if unit == "bytes":
            scale, unit = next(((size, name) for size, name in SCALES if whole >= size), (1.0, unit))
            rate_unit = f" {unit}"
        done, total = (rate_text(count / scale) if scale != 1.0 else f"{count:,}" for count in (self._done, whole))
        left = (whole - self._done) / rate if rate else 0.0
        return [
            f"{done} {unit}" if self._total is None else f"{done} of {total} {unit}",
            f"{rate_text(rate / scale)}{rate_unit}/s" if rate else "",
            f"{duration_text(left)} left" if left > 0 else "",
            self._note,
        ]

    def _text(self, width: int) -> str:
        """Return the state as text of at most `width` columns.

        If the whole text is longer, the count is left out, then also the rate, then also words from the end of the
        note. If nothing fits, return "".
        """
        done, rate, left, note = self._parts()
        pieces = note.split(", ")
        shorter = ((left, *pieces[:count]) for count in range(len(pieces), -1, -1))
        for parts in ((done, rate, left, note), (rate, left, note), *shorter):
            text = ", ".join(filter(None, parts))
            if len(text) <= width:
                return text
        return ""

    def _make_bar(self) -> Any:
        # A terminal that cannot return to the beginning of a line is a log.
        if _hidden or self._stream is None or not self._stream.isatty() or os.environ.get("TERM") == "dumb":
            return None
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        progress = self

        class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
            @property
            def format_dict(self) -> dict[str, Any]:
                columns = _columns(progress._stream) - 1
                head = len(progress._label) + (len(": 100% ") + _LEAST_BAR + 1 if progress._total else len(": "))
                return {**super().format_dict, "ncols": columns, "text": progress._text(columns - head - 1)}

        bar = "{percentage:3.0f}% {bar} " if self._total else ""
        return Bar(
            total=self._total,
            initial=self._done,
            bar_format=f"{self._label.replace('{', '{{').replace('}', '}}')}: {bar}{{text}}",
            ncols=_COLUMNS,  # format_dict replaces it by the current width
            nrows=_ROWS,
            leave=not self._is_brief,
            file=self._stream,
        )

    def _print(self) -> None:
        self._shown, self._printed = time.monotonic(), self._done
        if self._stream is not None:
            with contextlib.suppress(OSError):
                print(f"{self._label}: {', '.join(filter(None, self._parts()))}", file=self._stream, flush=True)


class BuildBar:
    """Shows the progress of a build or repair, from the first call of `show` on."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown: Progress | None = None

    def show(self, progress: BuildProgress) -> None:
        """Show how many samples are done, the bytes that were written, and the number of skipped samples."""
        if self._shown is None:
            self._shown = Progress(progress.total, self._label, "samples", initial=progress.samples)
        skipped = f", {progress.skipped:,} skipped" if progress.skipped else ""
        self._shown.advance_to(progress.samples, f"{size_text(progress.bytes)}{skipped}")

    def close(self) -> None:
        """Show the last state and end the bar."""
        if self._shown is not None:
            self._shown.close()
