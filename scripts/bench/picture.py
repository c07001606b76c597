"""The pictures of benchmarks, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_OURS, _PEER = "#d1495b", "#8d99ae"


def draw_bars(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], path: Path, digits: str) -> None:
    """Draw named figures as bars, a panel for each group with its title, 800 pixels wide."""
    from matplotlib.figure import Figure

    height = sum(0.6 + 0.3 * len(bars) for _, bars in groups)
    figure = Figure(figsize=(8, 0.6 + height), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axes, (heading, bars) in zip(panels, groups, strict=True):
        names, figures = [name for name, _ in bars], [value for _, value in bars]
        drawn = axes.barh(names, figures, color=[_OURS if name.startswith("tpucache") else _PEER for name in names])
        axes.bar_label(drawn, [digits.format(value) for value in figures], padding=4)
        axes.set_title(heading, loc="left", fontsize=10)
        axes.set_xlim(0, 1.15 * max(*figures, 1e-9))
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")
