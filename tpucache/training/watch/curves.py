"""Pictures of a run: its curves, and the losses of a learning-rate range test by rate."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import TrainingError
from tpucache.runs import CURVES_NAME
from tpucache.store.files import write_atomically
from tpucache.training.learn.schedule import Rates
from tpucache.training.run.history import Row
from tpucache.training.run.state import RunState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger("tpucache")

_WINDOW: Final = 50  # steps that a smoothed curve averages over, at most
_WINDOWS: Final = 20  # a smoothed curve averages over at most a run's steps divided by this number
_LOSS, _SAMPLES, _VALID = "valid_loss", "valid_samples", "valid_"
_MOST: Final = 20  # a curve of more points has no markers, which would hide the line


def save_figure(path: Path, size: tuple[float, float], paint: Callable[[Figure], None]) -> None:
    """Write a PNG of the drawing that `paint` makes on a figure of this `size` in inches, atomically.

    If matplotlib is missing or fails, nothing is written, and a warning says so once. Raises TrainingError when the
    file cannot be written.
    """
    picture = try_png(path.name, size, paint)
    if picture is None:
        return
    try:
        write_atomically(path, picture)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error


def try_png(name: str, size: tuple[float, float], paint: Callable[[Figure], None]) -> bytes | None:
    """Return a PNG as `to_png` does; if matplotlib is missing or fails, warn once and return None."""
    try:
        return to_png(size, paint)
    except ImportError:
        warn_once(f"{name} is left out, because matplotlib is missing: run `pip install matplotlib`")
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # the run continues after any error of matplotlib
        warn_once(f"{name} is left out: matplotlib raised {type(error).__name__}: {' '.join(str(error).split())}")
    return None


def to_png(size: tuple[float, float], paint: Callable[[Figure], None]) -> bytes:
    """Return a PNG of the drawing that `paint` makes on a figure of this `size` in inches.

    Raises ImportError without matplotlib.
    """
    # pyplot would open windows and keep global state.
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
    """Return the exponential moving average of `values` without its bias to 0 (Kingma and Ba, arXiv:1412.6980)."""
    average, smoothed = 0.0, []
    for number, value in enumerate(values, 1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**number))
    return smoothed


def fitting_decay(steps: int) -> float:
    """Return a decay for `smooth` that suits a run of this number of steps.

    The average then covers about 50 steps, or a twentieth of a run of fewer than 1,000 steps.
    """
    return 1 - 1 / min(_WINDOW, max(1.0, steps / _WINDOWS))


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time that this message is given, and nothing later."""
    _log.warning(message)


@contextlib.contextmanager
def drawn_curves(run: Path | None, schedule: Callable[[int], Rates], state: RunState) -> Iterator[None]:
    """Return a context that writes the run's curves to its folder when it ends, also after an error.

    Without a folder nothing is written.
    """
    try:
        yield
    finally:
        if run is not None and state.losses:
            save_curves(run, state.losses, [schedule(step).lr for step in range(len(state.losses))], state.rows)


def save_curves(run: Path, losses: Sequence[float], rates: Sequence[float], rows: Sequence[Row]) -> None:
    """Write `curves.png`: the loss and learning rate of each step, and the loss and metrics of each epoch.

    Raises TrainingError when the file cannot be written.
    """
    save_figure(run / CURVES_NAME, curves_size(rows, 1), lambda figure: paint_curves(figure, losses, rows, rates))


def curves_size(rows: Sequence[Row], others: int = 0) -> tuple[float, float]:
    """Return the size in inches of a figure with losses, metrics if the rows have any, and `others` more panels."""
    return 8, 4.4 + 2.2 * (bool(_metrics(rows)) + others)


def paint_curves(
    figure: Figure, losses: Sequence[float], rows: Sequence[Row], rates: Sequence[float] = (), first: int = 0
) -> None:
    """Draw the losses from step `first` on, the epochs' metrics, and the learning rates of all steps, if given."""
    metrics = _metrics(rows)
    heights = [3, *([2] if metrics else []), *([1] if rates else [])]
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _paint_losses(axes[0], losses, rows, first)
    if metrics:
        _paint_metrics(axes[1], metrics, rows)
    if rates:
        axes[-1].plot(range(1, len(rates) + 1), rates, color="tab:green")
        axes[-1].set_ylabel("learning rate")
    axes[-1].set_xlabel("step")


def _metrics(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return [name for name in names if name.startswith(_VALID) and name not in (_LOSS, _SAMPLES)]


def _paint_losses(axes: Any, losses: Sequence[float], rows: Sequence[Row], first: int) -> None:
    steps = range(first + 1, first + len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(
        steps, smooth(losses, fitting_decay(len(losses))), color="tab:blue", linewidth=2, label="training, smoothed"
    )
    _paint_epochs(axes, rows, _LOSS, "validation", "tab:orange")
    axes.set_ylabel("loss")
    axes.legend()


def _paint_metrics(axes: Any, metrics: Sequence[str], rows: Sequence[Row]) -> None:
    for number, name in enumerate(metrics):
        _paint_epochs(axes, rows, name, name.removeprefix(_VALID), f"C{number + 1}")
    axes.set_ylabel("validation")
    axes.legend()


def _paint_epochs(axes: Any, rows: Sequence[Row], name: str, label: str, color: str) -> None:
    known = [(row["step"], row[name]) for row in rows if name in row]
    if not known:
        return
    steps, values = zip(*known, strict=True)
    last = values[-1]
    axes.plot(steps, values, color=color, marker="o" if len(known) <= _MOST else None, markersize=4,
              label=f"{label}, {last:.3f} at the end")  # fmt: skip


@dataclass(frozen=True)
class RangeTest:
    """The result of a learning-rate range test.

    `rates`, `losses` and `smoothed` are the learning rate, the loss and the smoothed loss of each step. `suggestion` is
    the rate to use.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    suggestion: float


def save_range_test(path: Path, found: RangeTest) -> None:
    """Write a PNG with the losses by rate, and the rate to use. Raises TrainingError when it cannot be written."""
    save_figure(path, (7, 4.2), lambda figure: _paint(figure, found))


def _paint(figure: Figure, found: RangeTest) -> None:
    axes = figure.subplots()
    axes.plot(found.rates, found.losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    axes.plot(found.rates, found.smoothed, color="tab:blue", linewidth=2, label="smoothed")
    axes.axvline(found.suggestion, color="tab:orange", linestyle="--", label=f"use {found.suggestion:.2g}")
    low, high = min(found.smoothed), found.smoothed[0]
    axes.set_ylim(low - 0.2 * (high - low), high + 0.6 * (high - low))  # the loss diverges far above its fall
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    axes.set_title("Learning-rate range test")
    axes.legend()
