"""Pages: the records that they show, and their parts, which are made of sections, which are made of blocks.

A page is one HTML file without a script that loads nothing from elsewhere. Every value is escaped.
"""

from __future__ import annotations

import collections
import difflib
import functools
import html
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tpucache.errors import DependencyError, TpucacheError, UsageError, calling
from tpucache.loading.reading.memory import Buffer
from tpucache.native import Array
from tpucache.runs import check_no_run_file
from tpucache.store.copying import check_no_cache_file
from tpucache.store.fields import IMAGE, Field
from tpucache.store.files import write_atomically
from tpucache.text import printable
from tpucache.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

    from tpucache.loading.dataset import CachedDataset

SAMPLES: Final = 12
VARIANTS: Final = 6  # of each sample, at most
_FOLDED: Final = 20
_WIDTH, _HEIGHT = 640, 150
_EDGE: Final = 3  # between a curve and the edge of its chart


@dataclass(frozen=True)
class Page:
    """An HTML page about a cache or a run; a notebook shows it when it is the value of a cell.

    `name` is the name of the cache or run, and `html` the page's text. `table` is a .csv of what the page shows; None
    if there is none.
    """

    name: str
    html: str = field(repr=False)
    table: bytes | None = field(default=None, repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, and its table beside it with the suffix .csv; return the page's path.

        Raises UsageError for a path of a file that belongs to a cache or a run, and TpucacheError when a file cannot be
        written.
        """
        write_file(Path(path), self.html.encode())
        if self.table is not None:
            write_file(Path(path).with_suffix(".csv"), self.table)
        return Path(path)

    def _repr_html_(self) -> str:
        style = "width:100%;height:760px;border:0"
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" title="{escape(self.name)}" sandbox style="{style}"></iframe>'
        )


def write_file(path: Path, data: bytes) -> None:
    """Write a file that a user named. Raises UsageError for a file of a cache or run, TpucacheError if it fails."""
    check_no_cache_file(path)
    check_no_run_file(path)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
            path.write_bytes(data)
        else:
            write_atomically(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise TpucacheError(f"{path} cannot be written: {error}. Give another path") from error


class Shown(NamedTuple):
    """A sample: its label as text, its path, and the fields by name of one or more of its records."""

    label: str
    path: str
    records: Sequence[Mapping[str, Array]]


class Records:
    """The samples of a cache, or the selected samples of a dataset; `positions` are theirs in the cache."""

    def __init__(self, cache: str | Path | CachedDataset) -> None:
        """Raises NotACacheError, FormatError or DamageError for the cache."""
        from tpucache.loading.dataset import CachedDataset  # imports torch, which texts about a cache do not need

        self._dataset = CachedDataset(cache, in_memory=False) if isinstance(cache, (str, Path)) else cache
        self.cache, self.manifest, self.table = self._dataset.cache, self._dataset.manifest, self._dataset.table
        self.directory, self.positions = self._dataset.directory, self._dataset.positions

    @property
    def name(self) -> str:
        return Path(self._dataset.place).resolve().name

    @property
    def image(self) -> Field | None:
        """The image field, whose shape is (height, width, channels); None for records without an image."""
        return next((field for field in self.manifest.fields if field.name == IMAGE), None)

    def need_image(self) -> Field:
        if self.image is None:
            raise UsageError(
                f"{self.directory} holds no image to show, only the fields {', '.join(self._dataset.names)}: give a "
                "cache of images"
            )
        return self.image

    def read(self, position: int, variant: int) -> dict[str, Array]:
        """Return the decoded fields of one record by name.

        Raises DamageError, and DependencyError without the decoder.
        """
        buffer = Buffer(self.manifest.fields, 1)
        self._dataset.in_variant(variant).read_into(buffer, np.array([position]), 0)
        return {name: array[0] for name, array in zip(self._dataset.names, buffer.arrays, strict=True)}

    def show(self, position: int, variants: Sequence[int]) -> Shown:
        """Return the sample at this position of the cache, with its records in these variants."""
        label = describe_label(self.label(position), self.manifest.classes)
        return Shown(label, self.table.paths[position], [self.read(position, variant) for variant in variants])

    def label(self, position: int) -> Array | None:
        labels = self.table.labels
        return None if labels is None else np.asarray(labels[position])

    def choose(self, count: int, seed: int = 0, class_name: str | None = None) -> list[int]:
        """Return the positions in the cache of at most `count` random samples, from each class in turn.

        Raises UsageError if no class has the name `class_name`.
        """
        positions = np.unique(self.positions if class_name is None else self._of_class(class_name))
        order, labels = np.random.default_rng(seed).permutation(positions), self.table.labels
        if labels is not None and labels.ndim == 1:
            turns: dict[Any, Iterator[int]] = collections.defaultdict(itertools.count)
            order = order[np.argsort([next(turns[label]) for label in labels[order].tolist()], kind="stable")]
        return sorted(order[:count].tolist())

    def _of_class(self, name: str) -> Array:
        classes, labels = self.manifest.classes, self.table.labels
        if name not in classes or labels is None:
            near = difflib.get_close_matches(name, classes, 3) or classes[:10]
            has = f", such as {', '.join(map(repr, near))}" if near else ""
            raise UsageError(f"{self.directory} has no class {name!r}: it has {len(classes)} classes{has}")
        number, chosen = classes.index(name), np.asarray(labels[self.positions])
        return self.positions[chosen == number if labels.ndim == 1 else chosen[:, number] > 0]


def variant_name(variant: int) -> str:
    return f"variant {variant}" if variant else "clean"


def describe_label(label: Array | None, classes: Sequence[str]) -> str:
    if label is None:
        return "unlabelled"
    if not label.ndim and label.dtype.kind != "f":
        return class_name(int(label), classes)
    values = [float(value) for value in label.reshape(-1)]
    if len(classes) != len(values):
        return ", ".join(f"{value:.4g}" for value in values)
    marked = [(name, value) for name, value in zip(classes, values, strict=True) if value > 0]
    return ", ".join(name if value == 1 else f"{name} {value:.2g}" for name, value in marked) or "none of the classes"


def class_name(number: int, classes: Sequence[str]) -> str:
    return classes[number] if 0 <= number < len(classes) else str(number)


class Block(NamedTuple):
    """What the template's macro `kind` shows of `content`; shown on a click if `folded` has a summary of it."""

    kind: str
    content: Mapping[str, Any]
    folded: str = ""


class Section(NamedTuple):
    title: str
    note: str
    blocks: Sequence[Block] = ()


class Part(NamedTuple):
    name: str
    text: str
    figures: Sequence[tuple[str, str]]
    sections: Sequence[Section]


def make_page(kind: str, parts: Sequence[Part], table: bytes | None = None) -> Page:
    name = parts[0].name
    values = {"title": f"{kind} {name}", "parts": parts, "version": __version__}
    return Page(name, fill("tpucache.report", "page.html", values), table)


def facts(pairs: Iterable[tuple[str, str]]) -> Block:
    return Block("facts", {"pairs": list(pairs)})


def code(lines: Sequence[str], folded: str = "") -> Block:
    return Block("code", {"lines": lines}, folded)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], kinds: str, folded: str = "", look: str = ""
) -> Block:
    """Return a table; `kinds` has a letter for each column: t(ext), n(umber), c(ode), b(ar, a number of per cent).

    With the text `folded`, a table of at least 20 rows is shown on a click on it. The look "stacked" has the cells of a
    row one under the other on a phone.
    """
    content = {"heads": heads, "rows": rows, "kinds": kinds, "look": look}
    return Block("table", content, folded if len(rows) >= _FOLDED else "")


def bars(
    pairs: Sequence[tuple[str, float]],
    largest: float,
    total: float,
    to_text: Callable[[float], str] = "{:,}".format,
    folded: str = "",
) -> Block:
    rows = [
        (name, f"{100 * amount / (largest or 1):.2f}", to_text(amount), f"{100 * amount / (total or 1):.1f} %")
        for name, amount in pairs
    ]
    return table((), rows, "tbnn", folded, "bars")


def matrix(names: Sequence[str], counts: Array) -> Block:
    shares = np.ceil(100 * counts / np.maximum(counts.sum(1, keepdims=True), 1))
    rows = [
        (name, [(f"{count:,.0f}", f"{share:.0f}") for count, share in zip(*row, strict=True)])
        for name, *row in zip(names, counts, shares, strict=True)
    ]
    return Block("matrix", {"names": names, "rows": rows})


class Line(NamedTuple):
    """A curve: its name in the legend, its points (x, y), and its colour's hue in degrees."""

    name: str
    points: Sequence[tuple[float, float]]
    hue: int = 50
    is_faint: bool = False


def chart(title: str, lines: Sequence[Line], across: Sequence[str] = (), up: str = "{:,.4g}") -> Block:
    """Return a chart of lines on a common scale. Points that are not finite are left out.

    `across` are the texts below the horizontal axis, in equal distances. `up` is the format of the lowest and highest
    y.
    """
    known = [(line, np.array([point for point in line.points if np.isfinite(point).all()])) for line in lines]
    known = [(line, points) for line, points in known if len(points)]
    if not known:
        return Block("chart", {"lines": ()})  # shows nothing
    every = np.concatenate([points for _, points in known])
    low, high = every.min(0), every.max(0)
    scale = np.array([_WIDTH, 2 * _EDGE - _HEIGHT]) / np.where(high > low, high - low, 1)
    shapes = []
    for line, points in known:
        places = (points - low) * scale + (0, _HEIGHT - _EDGE)
        if len(places) == 1:
            places = np.array([(0, places[0, 1]), (_WIDTH, places[0, 1])])
        shapes.append((line, " ".join(f"{x:.1f},{y:.1f}" for x, y in places.tolist())))
    content = {
        "title": title,
        "lines": shapes,
        "across": across or [f"{value:,.0f}" for value in (low[0], high[0])],
        "up": [up.format(value) for value in (high[1], low[1])],
        "width": _WIDTH,
        "height": _HEIGHT,
    }
    return Block("chart", content)


class Picture(NamedTuple):
    """A picture's file as a data URL, its size in pixels, a description, and a text that is shown above it."""

    source: str
    width: int
    height: int
    text: str
    head: str = ""
    is_small: bool = False


class Figure(NamedTuple):
    pictures: Sequence[Picture]
    titles: Sequence[str]
    notes: Sequence[str]
    corner: str = ""


def pictures(figures: Sequence[Figure], width: int, side: int, colours: Sequence[tuple[str, str]] = ()) -> Block:
    """Return figures that are about `width` pixels wide, with pictures of at least `side` pixels."""
    return Block("pictures", {"figures": figures, "width": width, "side": side, "colours": colours})


def escape(value: object) -> str:
    """Return a value as one line of HTML text that is safe between tags and in quoted attributes."""
    return html.escape(printable(str(value)))


def fill(package: str, name: str, values: Mapping[str, object], escape: Callable[[object], str] = escape) -> str:
    """Return the text of a file in the folder `templates` of a package, filled with escaped values.

    A name in a template without a value is an error. Raises DependencyError without jinja2.
    """
    with calling("jinja2"):
        return _environment(package, escape).get_template(name).render(values)


def check_jinja() -> None:
    try:
        import jinja2  # noqa: F401  # only a check
    except ImportError as error:
        raise DependencyError(
            f"jinja2 fills in pages and cards: {error}. `pip install jinja2`, or install tpucache[report]"
        ) from error


@functools.cache
def _environment(package: str, escape: Callable[[object], str]) -> Environment:
    check_jinja()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def escaped(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape(value))  # noqa: S704  # it is escaped

    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
