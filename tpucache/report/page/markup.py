"""Pieces of HTML. Whatever comes from a cache passes through `escape`, and nothing else goes into a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tpucache.redact import printable

_WIDTH, _HEIGHT = 640, 150
_EDGE = 3  # between a curve and the edge of its chart


def escape(value: object) -> str:
    """Return a value as text that is safe between tags and in quoted attributes, and prints in one line."""
    return html.escape(printable(str(value)))


def section(title: str, *parts: str, note: str = "") -> str:
    """Return a section with its heading beside it; nothing where it has no parts."""
    body = "".join(parts)
    aside = f"<p>{note}</p>" if note else ""
    return f"<section><header><h2>{title}</h2>{aside}</header><div>{body}</div></section>" if body else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kinds: str, look: str = "") -> str:
    """Return a table of cells that are HTML already; `kinds` has a letter for each column: t(ext), n(umber), c(ode).

    The look `stacked` has columns of equal width, and on a phone the cells of a row one under the other.
    """
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<table class="{look}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and what they are, HTML already."""
    return (
        '<dl class="facts">' + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs) + "</dl>"
    )


def folded(summary: str, body: str) -> str:
    """Return what is shown when its summary is clicked."""
    return f"<details><summary>{summary}</summary>{body}</details>"


def bars(items: Sequence[tuple[str, int]], largest: int, total: int) -> str:
    """Return a bar for each name and count, as long as its share of the largest."""
    rows = []
    for name, count in items:
        long, share = 100 * count / max(1, largest), 100 * count / max(1, total)
        rows.append(
            f'<li><span class="name" title="{escape(name)}">{escape(name)}</span>'
            f'<span class="track"><span class="bar" style="width:{long:.2f}%"></span></span>'
            f'<span class="count">{count:,}</span><span class="share">{share:.1f}\u202f%</span></li>'
        )
    return f'<ul class="bars">{"".join(rows)}</ul>'


def columns_chart(counts: npt.NDArray[np.int64], label: str) -> str:
    """Return an SVG of a column a count."""
    step = _WIDTH / len(counts)
    highest = max(1, int(counts.max()))
    shapes = "".join(
        f'<rect x="{at * step + 1:.1f}" y="{_HEIGHT * (1 - count / highest):.1f}" width="{step - 2:.1f}" '
        f'height="{_HEIGHT * count / highest:.1f}"/>'
        for at, count in enumerate(counts.tolist())
    )
    return _svg(f'<g class="columns">{shapes}</g>', label)


def areas_chart(counts: npt.NDArray[np.int64], names: Sequence[str], label: str) -> str:
    """Return an SVG of one area over another, one a row of counts (rows, values), by class names of the style."""
    # The lowest and highest value, where over- and underexposed pixels gather, would flatten all others.
    highest = max(1, int(counts[:, 1:-1].max()))
    shapes = []
    for row, name in zip(counts, names, strict=True):
        heights = _HEIGHT * (1 - np.minimum(1, row / highest))
        points = " ".join(f"{at * _WIDTH / (len(row) - 1):.1f},{y:.1f}" for at, y in enumerate(heights.tolist()))
        shapes.append(f'<polygon class="{name}" points="0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}"/>')
    return _svg("".join(shapes), label)


def lines_chart(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], label: str) -> str:
    """Return an SVG of curves, each a class name of the style and its points, on a common scale, and the scale's text.

    Points that are not finite are left out; nothing is returned where none is left.
    """
    known = [(style, [point for point in points if np.isfinite(point).all()]) for style, points in lines]
    every = np.array([point for _, points in known for point in points]).reshape(-1, 2)
    if not len(every):
        return ""
    (left, low), (right, high) = every.min(0), every.max(0)
    wide, tall = max(right - left, np.finfo(float).tiny), max(high - low, np.finfo(float).tiny)
    shapes = []
    for style, points in known:
        around = points if len(points) != 1 else [(left, points[0][1]), (right + wide, points[0][1])]
        places = " ".join(
            f"{_WIDTH * min(1, (x - left) / wide):.1f},{_EDGE + (_HEIGHT - 2 * _EDGE) * (high - y) / tall:.1f}"
            for x, y in around
        )
        shapes.append(f'<polyline class="line {style}" points="{places}"/>')
    between = f"<span>{low:.4g} to {high:.4g}, from bottom to top</span>"
    scale = f'<div class="scale"><span>{left:,.6g}</span>{between}<span>{right:,.6g}</span></div>'
    return f'<div class="chart">{_svg("".join(shapes), label)}{scale}</div>'


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Return what the curves of a chart are: class names of the style, and HTML."""
    items = "".join(f'<span><span class="dot {style}"></span>{name}</span>' for style, name in names)
    return f'<p class="legend">{items}</p>'


def _svg(shapes: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{shapes}</svg>"
    )
