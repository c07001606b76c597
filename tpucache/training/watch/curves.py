"""Pictures of a run: its curves, and the losses of a learning-rate range test by rate."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.runs import CURVES_NAME
from tpucache.training.metrics import warn_once
from tpucache.training.run.state import Row, RunState
from tpucache.training.schedule import Rates
from tpucache.training.weights import write_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WINDOW: Final = 50  # steps that a smoothed curve averages over, at most
_WINDOWS: Final = 20  # a smoothed curve averages over at most a run's steps divided by this number
_LOSS, _SAMPLES, _VALID = "valid_loss", "valid_samples", "valid_"
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
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    metrics = [name for name in names if name.startswith(_VALID) and name not in (_LOSS, _SAMPLES)]
    heights = {"loss": 3, **({"validation": 2} if metrics else {}), **({"learning rate": 1} if rates else {})}
    figure.set_size_inches(8, 2.2 + 2.2 * len(heights))
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=[*heights.values()], squeeze=False)[:, 0]
    axes = dict(zip(heights, panels, strict=True))
    steps, smoothed = range(first + 1, first + len(losses) + 1), smooth(losses, fitting_decay(len(losses)))
    axes["loss"].plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes["loss"].plot(steps, smoothed, color="tab:blue", linewidth=2, label="training, smoothed")
    _paint_epochs(axes["loss"], rows, _LOSS, "validation", "tab:orange")
    for number, name in enumerate(metrics, 1):
        _paint_epochs(axes["validation"], rows, name, name.removeprefix(_VALID), f"C{number}")
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
