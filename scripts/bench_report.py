"""What bench_read.py tells: a table, the same in Markdown and in JSON, and a picture."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any, Final

from bench_peers import Setting, threads_of

OURS: Final = "tpucache"
LIMIT: Final = "gather"
REFERENCE: Final = "tpucache in memory 2"

_HEADINGS: Final = ("reader", "images/s", "min - max", "of the gather", "times slower", "setting")
_PAPER: Final = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_OURS_COLOUR, _PEER_COLOUR, _LIMIT_COLOUR = "#d1495b", "#8d99ae", "#2b2d42"


def summarise(name: str, setting: Setting, rates: list[float], others: dict[str, list[float]]) -> dict[str, Any]:
    """Return a contender's row. Ratios are taken round by round, then their median: a slow moment slows both alike."""
    threads = threads_of(setting)
    return {
        "name": name,
        "setting": setting,
        "threads": threads,
        "images_per_second": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
        "rates": rates,
        "of_gather": _ratio(rates, others.get(f"{LIMIT} {threads}")),
        "times_slower": _ratio(others.get(REFERENCE), rates),
    }


def _ratio(above: list[float] | None, below: list[float] | None) -> float | None:
    if not above or not below:
        return None
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def as_table(report: dict[str, Any]) -> str:
    """Return the table for a terminal."""
    rows = [_HEADINGS, *map(_cells, report["readers"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return "\n".join("  ".join(_align(row, widths)).rstrip() for row in rows)


def as_markdown(report: dict[str, Any]) -> str:
    """Return the table, what was measured and with which versions, in Markdown."""
    lines = [f"| {' | '.join(_HEADINGS)} |", "|---|--:|--:|--:|--:|---|"]
    for row in report["readers"]:
        cells = _cells(row)
        lines.append(f"| {' | '.join(f'**{cell}**' if cell and _is_ours(row) else cell for cell in cells)} |")
    here = report["machine"]
    lines += [
        "",
        f"{report['images']:,} images of {report['size']}x{report['size']} uint8, shuffled batches of "
        f"{report['batch']}, epochs of {report['passes']} passes, warm page cache; median of {report['rounds']} rounds "
        f"of {report['seconds']:g} s that take turns. {here['cpus']} CPUs ({here['cpu']}), {here['system']}, "
        f"Python {here['python']}.",
        "",
    ]
    for peer, versions in report["versions"].items():
        lines.append(f"- {peer}: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    lines += [f"- left out: {row['name']}: {row['reason']}" for row in report["left_out"]]
    return "\n".join(lines) + "\n"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the rates as bars, fastest first, with the machine's limit as a line; 800 pixels wide."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = sorted((row for row in report["readers"] if not _is_limit(row)), key=lambda row: row["images_per_second"])
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.27 * len(rows)), dpi=100, layout="constrained")
    _draw_bars(axes, rows)
    _draw_limits(axes, [row for row in report["readers"] if _is_limit(row)])
    axes.set_xlim(0, 1.12 * max(row["max"] for row in report["readers"]))
    axes.xaxis.set_major_formatter(lambda value, _: _thousands(value))
    axes.spines[["top", "right"]].set_visible(False)
    size, cpus = report["size"], report["machine"]["cpus"]
    axes.set_title(f"Images/s: {size}x{size}, shuffled batches of {report['batch']}, {cpus} CPUs", fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def _draw_bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    rates = [row["images_per_second"] for row in rows]
    below = [row["images_per_second"] - row["min"] for row in rows]
    above = [row["max"] - row["images_per_second"] for row in rows]
    colours = [_OURS_COLOUR if _is_ours(row) else _PEER_COLOUR for row in rows]
    names = [row["name"] for row in rows]
    gap = max(rates, default=0) / 100
    axes.barh(names, rates, color=colours, xerr=[below, above], error_kw={"lw": 1, "alpha": 0.5})
    for at, row in enumerate(rows):
        text = f" {_thousands(row['images_per_second'])}"
        axes.text(row["max"] + gap, at, text, va="center", fontsize=9, fontweight=_weight(row["name"]), bbox=_PAPER)
    for label in axes.get_yticklabels():
        label.set_fontweight(_weight(label.get_text()))


def _weight(name: str) -> str:
    return "bold" if name.startswith(OURS) else "normal"


def _draw_limits(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        rate, threads = row["images_per_second"], row["threads"]
        label = f"limit: gather in memory, {threads} thread{'s' if threads > 1 else ''}, {_thousands(rate)}"
        style = "dashed" if threads > 1 else "dotted"
        axes.axvline(rate, color=_LIMIT_COLOUR, linestyle=style, linewidth=1.2, zorder=0, label=label)
    if rows:
        axes.legend(loc="lower right", fontsize=9, framealpha=1)


def _is_ours(row: dict[str, Any]) -> bool:
    return row["name"].startswith(OURS)


def _is_limit(row: dict[str, Any]) -> bool:
    return row["name"].startswith(LIMIT)


def _thousands(rate: float) -> str:
    if not rate:
        return "0"
    return f"{rate / 1000:.0f}k" if rate >= 10_000 else f"{rate / 1000:.1f}k"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    of_gather, slower = row["of_gather"], row["times_slower"]
    return (
        row["name"],
        f"{row['images_per_second']:,.0f}",
        f"{row['min']:,.0f} - {row['max']:,.0f}",
        f"{of_gather:.2f}" if of_gather else "",
        f"{slower:.1f}" if slower else "",
        ", ".join(f"{name} {value}" for name, value in row["setting"].items() if name not in ("kind", "memory")),
    )


def _align(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    left = (0, len(cells) - 1)
    return [
        f"{cell:<{width}}" if at in left else f"{cell:>{width}}"
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
