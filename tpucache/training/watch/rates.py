"""The picture of a learning-rate range test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpucache.training.watch.figure import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RangeTest:
    """The rate of each step, its loss, the smoothed loss, and the rate to use."""

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    suggestion: float


def save_range_test(path: Path, found: RangeTest) -> None:
    """Write the losses over the rates, and the rate to use, as a PNG. Raises TrainingError."""
    save_figure(path, (7, 4.2), lambda figure: _paint(figure, found))


def _paint(figure: Figure, found: RangeTest) -> None:
    axes = figure.subplots()
    axes.plot(found.rates, found.losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    axes.plot(found.rates, found.smoothed, color="tab:blue", linewidth=2, label="smoothed")
    axes.axvline(found.suggestion, color="tab:orange", linestyle="--", label=f"use {found.suggestion:.2g}")
    low, high = min(found.smoothed), found.smoothed[0]
    axes.set_ylim(low - 0.2 * (high - low), high + 0.6 * (high - low))  # or where it diverges hides where it falls
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    axes.set_title("Learning-rate range test")
    axes.legend()
