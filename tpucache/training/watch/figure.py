"""Pictures of a run, by matplotlib where it is installed."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpucache.errors import TrainingError
from tpucache.store.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger("tpucache")


def save_figure(path: Path, size: tuple[float, float], paint: Callable[[Figure], None]) -> None:
    """Write a PNG, atomically, of what `paint` draws on a figure of this size in inches.

    Without matplotlib nothing is written, and that is logged once. Raises TrainingError when it cannot be written.
    """
    try:
        picture = to_png(size, paint)
    except ImportError:
        _say_once(f"{path.name} is left out without matplotlib: `pip install matplotlib`")
        return
    try:
        write_atomically(path, picture)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error


def to_png(size: tuple[float, float], paint: Callable[[Figure], None]) -> bytes:
    """Return a PNG of what `paint` draws on a figure of this size in inches. Raises ImportError without matplotlib."""
    # Only Figure, not pyplot: no window, and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    paint(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120)
    return target.getvalue()


def smooth(values: Sequence[float], decay: float) -> list[float]:
    """Return the exponential moving average, free of its bias towards 0 (Kingma and Ba, arXiv:1412.6980)."""
    average, smoothed = 0.0, []
    for number, value in enumerate(values, 1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**number))
    return smoothed


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)
