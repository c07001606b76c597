"""A page as a file or in a notebook, and the parts of it that are computed: pictures, bars, the shapes of charts."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import TpucacheError
from tpucache.redact import printable
from tpucache.report.template import fill
from tpucache.runs import check_no_run_file
from tpucache.store.copying import check_no_cache_file
from tpucache.store.fields import IMAGE, Field
from tpucache.store.manifest import Manifest
from tpucache.version import __version__

Array = npt.NDArray[Any]

_PACKAGE: Final = "tpucache.report"
_DENSE: Final = 2  # pictures have so many times the pixels that a page shows them in, for dense screens
_PLAIN_SIDE: Final = 128 * _DENSE
_DRAWN_SIDE: Final = 176 * _DENSE  # of pictures with something drawn over them, which is to be read
_SMALL: Final = 64
_QUALITY: Final = 85
_WIDTH, _HEIGHT = 640, 150
_EDGE: Final = 3  # between a curve and the edge of its chart


@dataclass(frozen=True)
class Page:
    """An HTML page about a cache or a run, which a notebook shows when it is the value of a cell."""

    name: str
    html: str = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file and return its path.

        Raises UsageError for a file of a cache or a run, TpucacheError when it cannot be written.
        """
        check_no_cache_file(Path(path))
        check_no_run_file(Path(path))
        try:
            Path(path).write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise TpucacheError(f"the page cannot be written: {error}. Give another path") from error
        return Path(path)

    def _repr_html_(self) -> str:
        return fill(_PACKAGE, "frame.html", {"name": self.name, "html": self.html}, escape)


def make_page(template: str, name: str, values: Mapping[str, object]) -> Page:
    """Return a page of this name: a template that is filled with values. Raises DependencyError without jinja2."""
    return Page(name, fill(_PACKAGE, template, {"name": name, "version": __version__, **values}, escape))


def escape(value: object) -> str:
    """Return a value as text that is safe between tags and in quoted attributes, and prints in one line."""
    return html.escape(printable(str(value)))


class Picture(NamedTuple):
    """A picture within a page: its bytes as a data URL, its size in pixels, and what it shows."""

    source: str
    width: int
    height: int
    text: str


def look_of(manifest: Manifest, image: Field) -> str:
    """Return how a page shows the records of a cache: `drawn` over, `small` with pixels as squares, or `plain`."""
    if len(manifest.fields) > 1:
        return "drawn"
    return "small" if max(image.shape[:2]) <= _SMALL else "plain"


def make_picture(fields: Mapping[str, Array], classes: Sequence[str], look: str, text: str) -> Picture:
    """Return a record as a picture, of which `text` says what it shows: PNG where it is `small`, else JPEG.

    Raises DependencyError without Pillow.
    """
    from tpucache.report.draw import draw_record

    side = {"drawn": _DRAWN_SIDE, "small": max(fields[IMAGE].shape[:2])}.get(look, _PLAIN_SIDE)
    drawn, target = draw_record(fields, classes, side, _DENSE), io.BytesIO()
    kind = "png" if look == "small" else "jpeg"
    drawn.save(target, kind, **({} if kind == "png" else {"quality": _QUALITY}))
    data = base64.b64encode(target.getvalue()).decode()
    return Picture(f"data:image/{kind};base64,{data}", drawn.width, drawn.height, text)


class Figure(NamedTuple):
    """A sample of a page: its pictures, its label, a short text in the corner, its path, and what was predicted."""

    pictures: Sequence[Picture]
    label: str
    corner: str
    path: str
    prediction: str | None = None


class Sheet(NamedTuple):
    """Samples of a page, each about `width` pixels wide, or a note that says why there are none."""

    note: str
    figures: Sequence[Figure] = ()
    look: str = ""
    width: int = 0


class Bar(NamedTuple):
    """A name and its count; the width of its bar and its share of all, in percent."""

    name: str
    amount: str
    width: str
    share: str


def make_bars(pairs: Iterable[tuple[str, int]], largest: int, total: int) -> list[Bar]:
    """Return a bar for each name and count, as long as its share of the largest."""
    return [
        Bar(
            name,
            f"{count:,}",
            f"{100 * count / max(1, largest):.2f}",
            f"{100 * count / max(1, total):.1f}",
        )
        for name, count in pairs
    ]


@dataclass(frozen=True)
class Chart:
    """The shapes of an SVG, their coordinates as text, and the texts of the scale below it, from left to right.

    `areas` and `lines` are pairs of a class of the style and points.
    """

    label: str
    scale: tuple[str, ...]
    columns: Sequence[tuple[str, str, str, str]] = ()
    areas: Sequence[tuple[str, str]] = ()
    lines: Sequence[tuple[str, str]] = ()
    width: int = _WIDTH
    height: int = _HEIGHT


def columns_chart(counts: npt.NDArray[np.int64], label: str, scale: tuple[str, ...]) -> Chart:
    """Return a chart of a column a count."""
    step = _WIDTH / len(counts)
    highest = max(1, int(counts.max()))
    columns = [
        (
            f"{number * step + 1:.1f}",
            f"{_HEIGHT * (1 - count / highest):.1f}",
            f"{step - 2:.1f}",
            f"{_HEIGHT * count / highest:.1f}",
        )
        for number, count in enumerate(counts.tolist())
    ]
    return Chart(label, scale, columns=columns)


def areas_chart(counts: npt.NDArray[np.int64], styles: Sequence[str], label: str, scale: tuple[str, ...]) -> Chart:
    """Return a chart of one area over another, one for each row of counts (rows, values)."""
    # The lowest and highest value, where over- and underexposed pixels gather, would flatten all others.
    highest = max(1, int(counts[:, 1:-1].max()))
    areas = []
    for row, style in zip(counts, styles, strict=True):
        heights = _HEIGHT * (1 - np.minimum(1, row / highest))
        points = " ".join(f"{at * _WIDTH / (len(row) - 1):.1f},{y:.1f}" for at, y in enumerate(heights.tolist()))
        areas.append((style, f"0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}"))
    return Chart(label, scale, areas=areas)


def lines_chart(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], label: str) -> Chart | None:
    """Return a chart of curves, each a class of the style and its points (x, y), on a common scale.

    Points that are not finite are left out; None is returned where no point is left.
    """
    known = [(style, [point for point in points if np.isfinite(point).all()]) for style, points in lines]
    every = np.array([point for _, points in known for point in points]).reshape(-1, 2)
    if not len(every):
        return None
    (left, low), (right, high) = every.min(0), every.max(0)
    wide, tall = max(right - left, np.finfo(float).tiny), max(high - low, np.finfo(float).tiny)
    shapes = []
    for style, points in known:
        around = points if len(points) != 1 else [(left, points[0][1]), (right + wide, points[0][1])]
        places = " ".join(
            f"{_WIDTH * min(1, (x - left) / wide):.1f},{_EDGE + (_HEIGHT - 2 * _EDGE) * (high - y) / tall:.1f}"
            for x, y in around
        )
        shapes.append((style, places))
    scale = (f"{left:,.6g}", f"{low:.4g} to {high:.4g}, from bottom to top", f"{right:,.6g}")
    return Chart(label, scale, lines=shapes)
