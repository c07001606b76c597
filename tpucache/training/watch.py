"""Shows a run while it trains: pictures of its curves, also in a notebook, and TensorBoard."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import DependencyError
from tpucache.runs import CURVES_NAME
from tpucache.training.metrics import warn_once
from tpucache.training.run.state import VALID, Row, RunState, Watcher, metric_columns
from tpucache.training.schedule import Rates
from tpucache.training.weights import write_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WINDOW: Final = 50  # steps that a smoothed curve averages over, at most
_WINDOWS: Final = 20  # a smoothed curve averages over at most a run's steps divided by this number
_LOSS: Final = f"{VALID}loss"
_EVERY: Final = 10.0  # seconds between two pictures within an epoch, at least
_MOST: Final = 20  # a curve of more points has no markers, which would hide the line


def save_figure(path: Path, paint: Callable[[Figure], None]) -> None:
    picture = try_png(path.name, paint)
    if picture is not None:
        write_result(path, picture)


def try_png(name: str, paint: Callable[[Figure], None]) -> bytes | None:
    """Return a PNG of the drawing that `paint` makes; if matplotlib is missing or fails, warn once and return None."""
    try:
        from matplotlib.figure import Figure  # pyplot would open windows and keep global state

        figure, target = Figure(figsize=(7, 4.2), layout="constrained"), io.BytesIO()
        paint(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        figure.savefig(target, format="png", dpi=120)
    except ImportError:
        warn_once(f"{name} is left out, because matplotlib is missing: run `pip install matplotlib`")
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # the run continues after any error of matplotlib
        warn_once(f"{name} is left out: matplotlib raised {type(error).__name__}: {' '.join(str(error).split())}")
    else:
        return target.getvalue()
    return None


def smooth(values: Sequence[float], decay: float) -> list[float]:
    """Return the exponential moving average of `values` without its bias to 0 (Kingma and Ba, arXiv:1412.6980)."""
    average, smoothed = 0.0, []
    for number, value in enumerate(values, 1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**number))
    return smoothed


def fitting_decay(steps: int) -> float:
    """Return a decay for `smooth` that averages over about 50 steps, or a twentieth of a run of under 1,000 steps."""
    return 1 - 1 / min(_WINDOW, max(1.0, steps / _WINDOWS))


@contextlib.contextmanager
def drawn_curves(run: Path | None, schedule: Callable[[int], Rates], state: RunState) -> Iterator[None]:
    """Return a context that writes the run's curves at the end, also after an error, if there is a folder."""
    try:
        yield
    finally:
        if run is not None and state.losses:
            save_curves(run, state.losses, [schedule(step).lr for step in range(len(state.losses))], state.rows)


def save_curves(run: Path, losses: Sequence[float], rates: Sequence[float], rows: Sequence[Row]) -> None:
    save_figure(run / CURVES_NAME, lambda figure: paint_curves(figure, losses, rows, rates))


def paint_curves(
    figure: Figure, losses: Sequence[float], rows: Sequence[Row], rates: Sequence[float] = (), first: int = 0
) -> None:
    metrics = [name for name in metric_columns(rows) if name != _LOSS]
    heights = {"loss": 3, **({"validation": 2} if metrics else {}), **({"learning rate": 1} if rates else {})}
    figure.set_size_inches(8, 2.2 + 2.2 * len(heights))
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=[*heights.values()], squeeze=False)[:, 0]
    axes = dict(zip(heights, panels, strict=True))
    steps, smoothed = range(first + 1, first + len(losses) + 1), smooth(losses, fitting_decay(len(losses)))
    axes["loss"].plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes["loss"].plot(steps, smoothed, color="tab:blue", linewidth=2, label="training, smoothed")
    _paint_epochs(axes["loss"], rows, _LOSS, "validation", "tab:orange")
    for number, name in enumerate(metrics, 1):
        _paint_epochs(axes["validation"], rows, name, name.removeprefix(VALID), f"C{number}")
    if rates:
        axes["learning rate"].plot(range(1, len(rates) + 1), rates, color="tab:green")
    for name, panel in axes.items():
        panel.set_ylabel(name)
        if name != "learning rate":
            panel.legend()
    panels[-1].set_xlabel("step")


def _paint_epochs(axes: Any, rows: Sequence[Row], name: str, label: str, color: str) -> None:
    known = [(row["step"], row[name]) for row in rows if name in row]
    if known:
        steps, values = zip(*known, strict=True)
        marker = "o" if len(known) <= _MOST else None
        axes.plot(
            steps, values, color=color, marker=marker, markersize=4, label=f"{label}, {values[-1]:.3f} at the end"
        )


@dataclass(frozen=True)
class RangeTest:
    """The learning rate, loss and smoothed loss of each step of a learning-rate range test, and the rate to use."""

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    suggestion: float


def save_range_test(path: Path, found: RangeTest) -> None:
    save_figure(path, lambda figure: _paint(figure, found))


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


class TensorBoard:
    """Writes scalars for TensorBoard: `train/loss` for each step, and the numbers of each epoch.

    The tags of an epoch's metrics begin with `valid/`, those of its other numbers with `epoch/`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Take the folder to write to, in which nothing is written yet. Raises DependencyError without TensorBoard."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise DependencyError(
                f"TensorBoard cannot be imported: {error}. Run `pip install tensorboard`, or leave --tensorboard out"
            ) from error
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def losses(self, first: int, values: Sequence[float]) -> None:
        """Write the losses of the steps after step `first`."""
        self._write(first, [(step, {"train/loss": value}) for step, value in enumerate(values, first + 1)])

    def epoch(self, row: Row) -> None:
        """Write a row of the history."""
        tagged = {
            name.replace(VALID, "valid/", 1) if name.startswith(VALID) else f"epoch/{name}": value
            for name, value in row.items()
            if name not in ("epoch", "step")
        }
        self._write(row["step"], [(row["step"], tagged)])
        self._writer.flush()

    def _write(self, steps: int, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        # The first call discards scalars of steps after `steps`, which a killed run may have written.
        self._writer = self._writer or self._make(str(self._folder), purge_step=steps + 1)
        for step, scalars in rows:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)
