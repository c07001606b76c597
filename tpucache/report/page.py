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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tpucache.errors import DependencyError, TpucacheError, UsageError, calling
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


# Records.


class Shown(NamedTuple):
    """A sample: its label as text, its path, and the fields by name of one or more of its records."""

    label: str
    path: str
    records: Sequence[Mapping[str, Array]]


def to_dataset(cache: str | Path | CachedDataset) -> CachedDataset:
    """Open the cache at a path. Raises NotACacheError, FormatError or DamageError."""
    from tpucache.loading.dataset import CachedDataset  # imports torch, which texts about a cache do not need

    return CachedDataset(cache, in_memory=False) if isinstance(cache, (str, Path)) else cache


def name_of(dataset: CachedDataset) -> str:
    return Path(dataset.place).resolve().name


def image_field(dataset: CachedDataset) -> Field:
    """Return the image field, whose shape is (height, width, channels). Raises UsageError for records without one."""
    first = dataset.manifest.fields[0]
    if first.name == IMAGE:
        return first
    raise UsageError(
        f"{dataset.directory} holds no image to show, only the fields {', '.join(dataset.names)}: give a cache of "
        "images"
    )


def read_record(dataset: CachedDataset, position: int, variant: int) -> dict[str, Array]:
    """Return the decoded fields by name of the sample at this position of the cache.

    Raises DamageError, and DependencyError without the decoder.
    """
    one = dataset.in_variant(variant).select([position])
    return {name: next(one.field_batches(name))[0] for name in one.names}


def show(dataset: CachedDataset, position: int, variants: Sequence[int]) -> Shown:
    """Return the sample at this position of the cache, with its records in these variants."""
    labels, path = dataset.table.labels, dataset.table.paths[position]
    label = "unlabelled" if labels is None else describe_label(np.asarray(labels[position]), dataset.classes)
    return Shown(label, path, [read_record(dataset, position, variant) for variant in variants])


def choose(dataset: CachedDataset, count: int, seed: int = 0, class_name: str | None = None) -> list[int]:
    """Return the positions in the cache of at most `count` random samples, from each class in turn.

    Raises UsageError if no class has the name `class_name`.
    """
    positions, labels = dataset.positions, dataset.table.labels
    if class_name is not None:
        positions = positions[_is_of_class(dataset, class_name)]
    order = np.random.default_rng(seed).permutation(np.unique(positions))
    if labels is not None and labels.ndim == 1:
        turns: dict[Any, Iterator[int]] = collections.defaultdict(itertools.count)
        order = order[np.argsort([next(turns[label]) for label in labels[order].tolist()], kind="stable")]
    return sorted(order[:count].tolist())


def _is_of_class(dataset: CachedDataset, name: str) -> Array:
    classes, labels = dataset.classes, dataset.table.labels
    if name not in classes or labels is None:
        near = difflib.get_close_matches(name, classes, 3) or classes[:10]
        has = f", such as {', '.join(map(repr, near))}" if near else ""
        raise UsageError(f"{dataset.directory} has no class {name!r}: it has {len(classes)} classes{has}")
    number, chosen = classes.index(name), labels[dataset.positions]
    return np.asarray(chosen == number if labels.ndim == 1 else chosen[:, number] > 0)


def variant_name(variant: int) -> str:
    return f"variant {variant}" if variant else "clean"


def describe_label(label: Array, classes: Sequence[str]) -> str:
    if not label.ndim and label.dtype.kind != "f":
        return class_name(int(label), classes) if label >= 0 else "unlabelled"
    values = label.reshape(-1).tolist()
    if len(classes) != len(values):
        return ", ".join(f"{value:.4g}" for value in values)
    marked = [(name, value) for name, value in zip(classes, values, strict=True) if value > 0]
    return ", ".join(name if value == 1 else f"{name} {value:.2g}" for name, value in marked) or "none of the classes"


def class_name(number: int, classes: Sequence[str]) -> str:
    return classes[number] if 0 <= number < len(classes) else str(number)


# Parts of a page.


class Block(NamedTuple):
    """What the template shows of `content`; on a click on `folded` if that is a text.

    "facts" are pairs of texts, "code" lines, "pictures" figures, and a "legend" pairs of a name and a colour.
    Functions below make other blocks.
    """

    kind: str
    content: Any
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


class Picture(NamedTuple):
    """A picture's file as a data URL, its size in pixels, a description, and a text that is shown above it."""

    source: str
    width: int
    height: int
    text: str
    head: str = ""


class Figure(NamedTuple):
    pictures: Sequence[Picture]
    titles: Sequence[str]
    notes: Sequence[str]
    corner: str = ""


class Line(NamedTuple):
    """A curve: its name in the legend, its points (x, y), and its colour's hue in degrees."""

    name: str
    points: Sequence[tuple[float, float]]
    hue: int = 50
    is_faint: bool = False


def make_page(kind: str, parts: Sequence[Part], table: bytes | None = None) -> Page:
    name = parts[0].name
    values = {"title": f"{kind} {name}", "parts": parts, "version": __version__}
    return Page(name, fill("tpucache.report", "page.html", values), table)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], kinds: str) -> Block:
    """Return a table; `kinds` has a letter for each column: t(ext), n(umber), c(ode), b(ar, a number of per cent).

    The page shows some rows at once, some more on a click, and says how many there are beyond these.
    """
    return Block("table", {"heads": heads, "rows": rows, "kinds": kinds})


def bars(amounts: Mapping[str, float], total: float, to_text: Callable[[float], str] = "{:,}".format) -> Block:
    """Return a bar for each amount, the largest first, with its share of the total."""
    pairs = sorted(amounts.items(), key=lambda pair: -pair[1])
    rows = [
        (name, f"{100 * amount / (pairs[0][1] or 1):.2f}", to_text(amount), f"{100 * amount / (total or 1):.1f} %")
        for name, amount in pairs
    ]
    return table((), rows, "tbnn")


def matrix(names: Sequence[str], counts: Array) -> Block:
    shares = np.ceil(100 * counts / np.maximum(counts.sum(1, keepdims=True), 1))
    return Block("matrix", {"names": names, "rows": list(zip(names, counts.tolist(), shares.tolist(), strict=True))})


def chart(title: str, lines: Sequence[Line], across: Sequence[str] = ()) -> Block:
    """Return a chart of lines on a common scale. Points that are not finite are left out.

    `across` are the texts below the horizontal axis, in equal distances, if these are not the lowest and highest x.
    """
    known = [(line, np.array([point for point in line.points if np.isfinite(point).all()])) for line in lines]
    known = [(line, points) for line, points in known if len(points)]
    if not known:
        return Block("chart", {"lines": ()})  # shows nothing
    every = np.concatenate([points for _, points in known])
    low, high = every.min(0), every.max(0)
    drawn = [(line, ((points - low) / np.where(high > low, high - low, 1)).tolist()) for line, points in known]
    ends = [f"{value:,.7g}" for value in (low[0], high[0])]
    up = [f"{value:,.4g}" for value in (high[1], low[1])]
    return Block("chart", {"title": title, "lines": drawn, "across": across or ends, "up": up})


# Templates.


def escape(value: object) -> str:
    """Return a value as one line of HTML text that is safe between tags and in quoted attributes."""
    return html.escape(printable(str(value)))


def fill(package: str, name: str, values: Mapping[str, object], escape: Callable[[object], str] = escape) -> str:
    """Return the text of a file in the folder `templates` of a package, filled with escaped values.

    A name in a template without a value is an error. Raises DependencyError without jinja2.
    """
    with calling("jinja2"):
        return _environment(package, escape).get_template(name).render(values)


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


def check_jinja() -> None:
    try:
        import jinja2  # noqa: F401  # only a check
    except ImportError as error:
        raise DependencyError(
            f"jinja2 fills in pages and cards: {error}. `pip install jinja2`, or install tpucache[report]"
        ) from error
