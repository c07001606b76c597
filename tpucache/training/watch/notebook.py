"""The curves of a run in a notebook, redrawn in place during training."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tpucache.training.metrics import warn_once
from tpucache.training.run.state import Row, Watcher
from tpucache.training.watch.curves import paint_curves, try_png

_EVERY: Final = 10.0  # seconds between two pictures within an epoch, at least

#: Shows a PNG in place of the one before it.
Show = Callable[[bytes], None]


class NotebookCurves:
    """Shows a run's losses and metrics by `show`: after each epoch, and within epochs at most every ten seconds."""

    def __init__(self, show: Show, clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._first: int | None = None
        self._losses: list[float] = []
        self._rows: list[Row] = []
        self._drawn = clock()

    def losses(self, first: int, values: Sequence[float]) -> None:
        if self._first is None:
            self._first = first
        self._losses += values
        if self._clock() - self._drawn >= _EVERY:
            self._draw()

    def epoch(self, row: Row) -> None:
        self._rows.append(row)
        self._draw()

    def _draw(self) -> None:
        paint = functools.partial(paint_curves, losses=self._losses, rows=self._rows, first=self._first or 0)
        picture = try_png("the picture of the curves", paint)
        if picture is not None:
            try:
                self._show(picture)
            except Exception as error:  # noqa: BLE001  # whatever a notebook raises, the run continues
                warn_once(f"the picture of the curves is not shown: {type(error).__name__}: {error}")
        self._drawn = self._clock()


def notebook_watchers() -> Sequence[Watcher]:
    show = _find_display()
    if show is None or importlib.util.find_spec("matplotlib") is None:
        return ()
    return (NotebookCurves(show),)


def _find_display() -> Show | None:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:  # a terminal's IPython has none
        return None
    display = importlib.import_module("IPython.display")
    handles: list[Any] = []

    def show(png: bytes) -> None:
        picture = display.Image(data=png)
        if handles:
            handles[0].update(picture)
        else:
            handles.append(display.display(picture, display_id=True))

    return show
