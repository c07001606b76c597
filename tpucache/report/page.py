"""Pages as HTML, in a file or in a notebook, and the computed parts of pages: pictures, bars and charts."""

from __future__ import annotations

import base64
import html
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import TpucacheError, calling
from tpucache.redact import printable
from tpucache.report.template import fill
from tpucache.runs import check_no_run_file
from tpucache.store.copying import check_no_cache_file
from tpucache.store.fields import IMAGE, Field
from tpucache.store.files import write_atomically
from tpucache.store.manifest import Manifest
from tpucache.types import Array
from tpucache.version import __version__

_PACKAGE: Final = "tpucache.report"
_DENSE: Final = 2  # for screens with small pixels, pictures have this many pixels for each one on the page, each way
_PLAIN_SIDE: Final = 128 * _DENSE
_DRAWN_SIDE: Final = 176 * _DENSE  # larger, so that text drawn over the picture can be read
_SMALL: Final = 64
_QUALITY: Final = 85
_WIDTH, _HEIGHT = 640, 150
_EDGE: Final = 3  # between a curve and the edge of its chart
_ACROSS, _UP = 7, 5  # ticks along the horizontal and the vertical axis, at most
_COUNTED: Final = 1e9  # an axis has several ticks only if its values are fewer steps between ticks than this from 0


@dataclass(frozen=True)
class Page:
    """An HTML page about a cache or a run; a notebook shows it when it is the value of a cell.

    `name` is the name of the cache or run, and `html` the page's text. `allows` are the permissions that the page needs
    in a notebook's frame, as in the attribute `sandbox`; a page without a script needs none.
    """

    name: str
    html: str = field(repr=False)
    allows: str = ""

    def save(self, path: str | Path) -> Path:
        """Write the page to a file and return the file's path.

        Raises UsageError for a path of a file that belongs to a cache or a run, and TpucacheError when the page cannot
        be written.
        """
        check_no_cache_file(Path(path))
        check_no_run_file(Path(path))
        try:
            if Path(path).exists() and not Path(path).is_file():  # a pipe or a device is written to, not replaced
                Path(path).write_text(self.html, encoding="utf-8")
            else:
                write_atomically(Path(os.path.realpath(path)), self.html.encode())
        except OSError as error:
            raise TpucacheError(f"the page cannot be written: {error}. Give another path") from error
        return Path(path)

    def _repr_html_(self) -> str:
        return fill_template("frame.html", {"name": self.name, "html": self.html, "allows": self.allows})


def make_page(
    template: str, name: str, values: Mapping[str, object], allows: str = "", package: str = _PACKAGE
) -> Page:
    """Return a page with this name, made from a template and the values to fill in.

    `template` is the name of a file in the folder `templates` of `package`. `allows` has the
    permissions of the page in a notebook's frame (see `Page`). Raises DependencyError without jinja2.
    """
    return Page(name, fill_template(template, {"name": name, "version": __version__, **values}, package), allows)


def fill_template(template: str, values: Mapping[str, object], package: str = _PACKAGE) -> str:
    """Return the text of a template, filled with values. Raises DependencyError without jinja2.

    `template` is the name of a file in the folder `templates` of `package`.
    """
    with calling("jinja2"):
        return fill(package, template, values, escape)


def escape(value: object) -> str:
    """Return a value as one line of HTML text that is safe between tags and in quoted attributes."""
    return html.escape(printable(str(value)))


class Picture(NamedTuple):
    """A picture in a page.

    `source` is its file as a data URL, `width` and `height` are in pixels, `text` describes it, and `head` is a word
    that is shown above it.
    """

    source: str
    width: int
    height: int
    text: str
    head: str = ""


def look_of(manifest: Manifest, image: Field) -> str:
    """Return how a page shows the records of a cache: "drawn", "small" or "plain".

    "drawn": other fields are drawn over the image. "small": the image has few pixels, which are shown as squares.
    "plain": only the image is shown.
    """
    if len(manifest.fields) > 1:
        return "drawn"
    return "small" if max(image.shape[:2]) <= _SMALL else "plain"


def make_picture(fields: Mapping[str, Array], classes: Sequence[str], look: str, text: str, head: str = "") -> Picture:
    """Return a picture of a record's `fields`, with a `text` that describes it and a word `head` above it.

    `look` is the result of `look_of`: the picture is a PNG if it is "small", else a JPEG. Raises DependencyError
    without Pillow.
    """
    from tpucache.report.draw import draw_record

    side = {"drawn": _DRAWN_SIDE, "small": max(fields[IMAGE].shape[:2])}.get(look, _PLAIN_SIDE)
    drawn, target = draw_record(fields, classes, side, _DENSE), io.BytesIO()
    kind = "png" if look == "small" else "jpeg"
    with calling("Pillow"):
        drawn.save(target, kind, **({} if kind == "png" else {"quality": _QUALITY}))
    data = base64.b64encode(target.getvalue()).decode()
    return Picture(f"data:image/{kind};base64,{data}", drawn.width, drawn.height, text, head)


class Figure(NamedTuple):
    """A sample on a page: its pictures, its label, a short text for the corner, its path, and its prediction.

    `prediction` is None on pages that show no predictions.
    """

    pictures: Sequence[Picture]
    label: str
    corner: str
    path: str
    prediction: str | None = None


class Sheet(NamedTuple):
    """Samples on a page, each about `width` pixels wide.

    `note` says how the samples were chosen, or why there are none. `look` is the result of `look_of`. `colours` are the
    names of the things that are drawn over the pictures, each with its CSS colour.
    """

    note: str
    figures: Sequence[Figure] = ()
    look: str = ""
    width: int = 0
    colours: Sequence[tuple[str, str]] = ()


class Bar(NamedTuple):
    """A bar of a bar chart.

    `amount` is the bar's number as text. `width` is the bar's length in per cent of the chart's width, and `share` is
    the amount in per cent of the total, both as text.
    """

    name: str
    amount: str
    width: str
    share: str


def make_bars(
    pairs: Iterable[tuple[str, float]],
    largest: float,
    total: float,
    to_text: Callable[[float], str] = "{:,}".format,
) -> list[Bar]:
    """Return a bar for each pair of a name and an amount.

    An amount of `largest` has the full width; shares are those of `total`. `to_text` makes the text of an amount.
    """
    least = 1e-9  # avoids a division by 0
    return [
        Bar(
            name,
            to_text(amount),
            f"{100 * amount / max(least, largest):.2f}",
            f"{100 * amount / max(least, total):.1f}",
        )
        for name, amount in pairs
    ]


class Tick(NamedTuple):
    """A value on an axis: its position in per cent from the left or from the top, and its text."""

    place: float
    text: str


class Ink(NamedTuple):
    """How a shape of a chart is coloured: by a CSS class, `style`, and for some classes by a `hue` in degrees."""

    style: str
    hue: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart: the shapes of an SVG, with coordinates as text, and the values along its axes.

    `label` describes the chart. `across` and `up` are the ticks of the horizontal and of the vertical axis. `columns`
    are rectangles: x, y, width and height. `areas` and `lines` are pairs of an ink and the points of a shape. `width`
    and `height` are those of the SVG.
    """

    label: str
    across: Sequence[Tick]
    up: Sequence[Tick]
    columns: Sequence[tuple[str, str, str, str]] = ()
    areas: Sequence[tuple[Ink, str]] = ()
    lines: Sequence[tuple[Ink, str]] = ()
    width: int = _WIDTH
    height: int = _HEIGHT


def columns_chart(counts: npt.NDArray[np.int64], label: str, across: Sequence[Tick]) -> Chart:
    """Return a chart with a column for each count. `label` describes it, and `across` are the ticks below it."""
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
    up = [Tick(100 * (1 - value / highest), text) for value, text in ticks(0, highest, _UP) if value == int(value)]
    return Chart(label, across, up, columns=columns)


def areas_chart(counts: npt.NDArray[np.int64], styles: Sequence[str], label: str, across: Sequence[Tick]) -> Chart:
    """Return a chart of overlapping areas, one for each row of `counts` (rows, values).

    The vertical axis shows counts as shares of a row's sum. `styles` has the CSS class of each area. `label` describes
    the chart, and `across` are the ticks below it.
    """
    # The scale ignores the lowest and the highest value: under- and overexposed pixels would flatten all others.
    highest = max(1, int(counts[:, 1:-1].max()))
    areas = []
    for row, style in zip(counts, styles, strict=True):
        heights = _HEIGHT * (1 - np.minimum(1, row / highest))
        points = " ".join(f"{at * _WIDTH / (len(row) - 1):.1f},{y:.1f}" for at, y in enumerate(heights.tolist()))
        areas.append((Ink(style), f"0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}"))
    percent = 100 * highest / max(1, int(counts.sum(1).max()))
    up = [Tick(100 * (1 - value / percent), f"{text} %") for value, text in ticks(0, percent, _UP)]
    return Chart(label, across, up, areas=areas)


def lines_chart(
    lines: Sequence[tuple[Ink, Sequence[tuple[float, float]]]], label: str, span: tuple[float, float] | None = None
) -> Chart | None:
    """Return a chart of curves on a common scale; None if no point is left to draw.

    `lines` has an ink and the points (x, y) of each curve. Points that are not finite are left out. `label` describes
    the chart. The horizontal axis spans all points, and also `span` (from, to) if that is given.
    """
    known = [(ink, [point for point in points if np.isfinite(point).all()]) for ink, points in lines]
    every = np.array([point for _, points in known for point in points]).reshape(-1, 2)
    if not len(every):
        return None
    (left, low), (right, high) = every.min(0).tolist(), every.max(0).tolist()
    left, right = (left, right) if span is None else (min(left, span[0]), max(right, span[1]))
    wide, tall = max(right - left, np.finfo(float).tiny), max(high - low, np.finfo(float).tiny)

    def height(y: float) -> float:
        return float(_EDGE + (_HEIGHT - 2 * _EDGE) * (high - y) / tall)

    shapes = []
    for ink, points in known:
        around = points if len(points) != 1 else [(left, points[0][1]), (right + wide, points[0][1])]
        places = " ".join(f"{_WIDTH * min(1, (x - left) / wide):.1f},{height(y):.1f}" for x, y in around)
        shapes.append((ink, places))
    whole = [value for value, _ in ticks(left, right, _ACROSS) if value == round(value)]  # steps are integers
    across = [Tick(100 * (value - left) / wide, f"{value:,.0f}") for value in whole]
    up = [Tick(100 * height(value) / _HEIGHT, text) for value, text in ticks(low, high, _UP)]
    return Chart(label, across, up, lines=shapes)


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Return at most `most` round values from `low` to `high`, each with its text.

    If there is no round value between them, only `low` is returned.
    """
    rough = (high - low) / max(1, most - 1)
    power = math.floor(math.log10(rough)) if 0 < rough < math.inf else 0
    step = next((each * 10.0**power for each in (1, 2, 5, 10) if each * 10.0**power >= rough * (1 - 1e-9)), 0.0)
    if rough <= 0 or step <= 0 or not max(abs(low), abs(high)) / step < _COUNTED:
        return [(low, f"{low:,.4g}")]
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    found = [(number * step, _tick_text(number * step, places)) for number in range(first, last + 1)]
    return found[:most] or [(low, f"{low:,.4g}")]


def _tick_text(value: float, places: int) -> str:
    if value and (abs(value) >= 1e7 or places > 5):
        return f"{value:.3g}"
    return f"{value:,.{places}f}"
