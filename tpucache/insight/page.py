"""The page of findings: pictures that look alike, leaks, suspects and extremes, shown side by side."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError, calling
from tpucache.insight.comparison import confirm_copies
from tpucache.insight.hashing import hashes
from tpucache.insight.labels import Predictions, read_predictions, suspects
from tpucache.insight.matching import THRESHOLD, Pairs, pairs
from tpucache.redact import SEPARATOR, join_names
from tpucache.report.page import Page, escape, fill_template, make_page
from tpucache.report.records import Records
from tpucache.report.text import class_name
from tpucache.store.cache import Cache
from tpucache.store.fields import IMAGE
from tpucache.store.hashes import Hashes
from tpucache.store.samples import HEIGHT, MEAN, STD, TYPE, WIDTH, Strings
from tpucache.types import Array
from tpucache.units import size_text

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset


_MOST: Final = 2000  # findings of each kind on the page, at most
_EXTREMES: Final = 24  # samples that are shown of each end of a scale, at most
_BYTES: Final = 28_000_000  # the size of pictures and texts from which on a page gets no further finding
_BASE64: Final = 4 / 3  # the factor by which base64 enlarges bytes
_SIDE: Final = 128  # the longer side of a picture, in pixels, at most
_BLOCK: Final = 16  # pixels: a block of JPEG with colours at half resolution
_ACROSS, _DOWN = 8, 8  # pictures in a sprite
_QUALITY: Final = 75
_SMALL: Final = 64  # images with sides up to this many pixels are enlarged without smoothing
_CLASSES: Final = 5000  # classes that the page offers as labels, at most

_CONFLICTS: Final = "look alike, different label"
_ALIKE: Final = "look alike, same label"
_TYPES: Final = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "jpeg"),
    **dict.fromkeys((".tif", ".tiff"), "tiff"),
    **{f".{kind}": kind for kind in ("png", "webp", "gif", "bmp")},
}
_HASH_BITS: Final = 256

_PACKAGE: Final = "tpucache.insight"  # has the templates
_WHOLE_PAGE: Final = "allow-scripts allow-downloads"


def report_findings(
    cache: str | Path | CachedDataset,
    *,
    against: str | Path | CachedDataset | None = None,
    predictions: str | Path | None = None,
    threshold: int = THRESHOLD,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Page:
    """Return a page of findings about a cache's images, shown side by side, to check and correct labels.

    The page shows pictures that look alike, with different labels or with the same label; pictures that look like a
    picture of the cache `against`; samples whose labels are least probable by `predictions` (the table of a run of all
    folds, or the run's folder); and unusual images, such as the darkest and the largest. Two pictures look alike if
    their hashes differ in at most `threshold` of 256 bits (see `tpucache.insight.hashes`). At most 2,000 findings of
    each kind are shown.

    The ticks that are made on the page become a table with the columns path and label, for the command `relabel`. The
    page is one file, needs no server and loads nothing from elsewhere; its script runs in any browser. `on_progress` is
    called with the name of the current work, the amount done and the whole amount.

    Raises UsageError for records without images and predictions of other samples, the errors of opening a cache, and
    DependencyError without jinja2 or Pillow.
    """
    table = None if predictions is None else read_predictions(predictions)  # first, to raise its errors at once
    sets = [_Set.open(cache, on_progress)]
    if against is not None:
        sets.append(_Set.open(against, on_progress))
    own = sets[0]
    doubtful = [] if table is None else [_suspects(own, table)]

    def compared(share: float) -> None:
        on_progress("compare", round(share * len(own)), len(own))

    alike = pairs(own.hashes, threshold, on_progress=compared)
    kinds = [*_alike(own, alike)]
    if len(sets) > 1:
        kinds.append(_leaks(sets, pairs(own.hashes, threshold, other=sets[1].hashes, on_progress=compared)))
    kinds += [*doubtful, _extremes(own)]
    shown = _Shown(sets)
    kept = shown.choose(kinds, on_progress)
    counts = [(kind.title, f"{kind.count:,}") for kind in kinds if kind.is_finding]
    values = {
        "figures": [("samples", f"{len(own):,}"), *counts],
        "state": _state(sets, alike),
        "data": json.dumps(shown.to_json(kinds, kept), separators=(",", ":")),
        "sprites": shown.sources(),
        "commands": [_command(each) for each in sets if each.can_correct()],
        "script_hash": _script_hash(),
    }
    return make_page("findings.html", own.name, values, allows=_WHOLE_PAGE, package=_PACKAGE)


class _Set:
    """A cache whose samples are on the page, and their images' hashes. Methods take a sample's position in the set."""

    def __init__(self, records: Records, found: Hashes, cache: str | Path | CachedDataset) -> None:
        is_whole = isinstance(cache, (str, Path))
        self.records, self.hashes, self.place = records, found, str(cache if is_whole else records.directory)
        #: The dataset or cache of the samples. The position of a sample in the set is its position in this dataset.
        self.dataset: Cache | CachedDataset = records.cache if isinstance(cache, (str, Path)) else cache
        self.positions = records.positions
        self.classes = records.manifest.classes
        self._labels = records.table.labels

    @classmethod
    def open(cls, cache: str | Path | CachedDataset, on_progress: Callable[[str, int, int], None]) -> _Set:
        """Raises UsageError if the cache has no images."""
        records = Records(cache)
        if records.image is None:
            names = ", ".join(each.name for each in records.manifest.fields)
            raise UsageError(
                f"{records.directory} has no images to compare, only the fields {names}: give a cache of images"
            )
        found = hashes(cache, on_progress=lambda done, total: on_progress(f"hash {records.name}", done, total))
        return cls(records, found, cache)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def name(self) -> str:
        return self.records.name

    def path(self, at: int) -> str:
        return self.records.table.paths[int(self.positions[at])]

    def original(self, at: int) -> str:
        """Return the size of a sample's original image in pixels, as text; "" if the size is not known."""
        sides = [self.records.table.get(name) for name in (WIDTH, HEIGHT)]
        values = [int(side[self.positions[at]]) for side in sides if isinstance(side, np.ndarray)]
        return f"{values[0]:,} x {values[1]:,} pixels" if len(values) == len(sides) and min(values) > 0 else ""

    def label(self, at: int) -> str:
        """Return the label of the sample at position `at` as text for `relabel`; "" if the sample has no label."""
        if self._labels is None:
            return ""
        label = np.asarray(self._labels[int(self.positions[at])])
        if not label.ndim and label.dtype.kind != "f":
            return class_name(int(label), self.classes) if label >= 0 else ""
        values = label.reshape(-1).tolist()
        if len(self.classes) == len(values):
            return join_names(name for name, value in zip(self.classes, values, strict=True) if value > 0)
        return ",".join(f"{value:.6g}" for value in values)

    def have_other_labels(self, first: Array, second: Array) -> npt.NDArray[np.bool_]:
        if self._labels is None:
            return np.zeros(len(first), np.bool_)
        labels = np.asarray(self._labels).reshape(len(self._labels), -1)[self.positions]
        return np.asarray((labels[first] != labels[second]).any(1), np.bool_)

    def is_numbers(self) -> bool:
        return self._labels is not None and not self.classes

    def can_correct(self) -> bool:
        """Return whether the samples have labels that fit into one column of a table for `relabel`."""
        return self._labels is not None and (bool(self.classes) or self._labels.ndim == 1 or self._labels.shape[1] == 1)

    def separator(self) -> str:
        """Return the text that separates the classes of a sample; "" if no sample can have several classes."""
        return SEPARATOR if self._labels is not None and self._labels.ndim == 2 and self.classes else ""


class _Finding(NamedTuple):
    """Samples that are shown together.

    `samples` has, for each sample, the number of its set and its position in the set. `labels` has the new label that
    is proposed for each sample, and `text` says what was found.
    """

    samples: Sequence[tuple[int, int]]
    labels: Sequence[str]
    text: str


@dataclass(frozen=True)
class _Kind:
    """The findings of one kind, the most important first. There are `count` findings; `make(i)` makes finding number i.

    `title` and `note` are the heading and the explanation on the page. `is_pair` says whether a finding has two
    samples. `is_finding` is False for a kind that every cache has, such as its darkest images; the page does not count
    its findings.
    """

    title: str
    note: str
    count: int
    make: Callable[[int], _Finding]
    is_pair: bool = True
    is_finding: bool = True


def _alike(own: _Set, alike: Pairs) -> Iterator[_Kind]:
    """Yield two kinds of findings: pictures that look alike and have different labels, or have the same label."""
    differs = own.have_other_labels(alike.first, alike.second)
    for title, note, chosen in (
        (
            _CONFLICTS,
            "A label is wrong, or the classes overlap, or the pictures show different things after all.",
            differs,
        ),
        (_ALIKE, "The pictures have the same label. Keep each group of such pictures in one fold.", ~differs),
    ):
        rows = np.flatnonzero(chosen)

        def make(number: int, rows: Array = rows) -> _Finding:
            row = int(rows[number])
            ends = int(alike.first[row]), int(alike.second[row])
            return _pair(alike, row, (own, own), [(0, each) for each in ends], [own.label(ends[1]), own.label(ends[0])])

        yield _Kind(title, f"{note} The closest come first.", len(rows), make)


def _leaks(sets: Sequence[_Set], alike: Pairs) -> _Kind:

    def make(row: int) -> _Finding:
        one, two = int(alike.first[row]), int(alike.second[row])
        return _pair(alike, row, sets, [(0, one), (1, two)], [sets[1].label(two), sets[0].label(one)])

    note = (
        f"Pictures of {sets[0].name} that look like one of {sets[1].name}. Where both show the same, a score on such "
        "samples is too good."
    )
    return _Kind("leaks", f"{note} The closest come first.", len(alike), make)


def _pair(
    alike: Pairs, row: int, sets: Sequence[_Set], samples: Sequence[tuple[int, int]], labels: Sequence[str]
) -> _Finding:
    mirrored = ", mirrored" if alike.is_mirrored[row] else ""
    copies = ", copies by their details" if _is_copy(alike, row, sets) else ""
    return _Finding(samples, labels, f"{_likeness(int(alike.distance[row]))}{mirrored}{copies}")


def _is_copy(alike: Pairs, row: int, sets: Sequence[_Set]) -> bool:
    columns = {name: getattr(alike, name)[row : row + 1] for name in ("first", "second", "distance", "is_mirrored")}
    (found,) = confirm_copies(replace(alike, **columns), *(each.dataset for each in sets))
    return bool(found)


def _suspects(own: _Set, table: Predictions) -> _Kind:
    """Return samples as findings, ranked by how improbable their labels are.

    Raises UsageError for predictions of other samples.
    """
    labels = table.label_numbers()
    found = suspects(table.probabilities, labels)
    places = {int(number): place for place, number in enumerate(own.records.table.numbers[own.positions].tolist())}
    unknown = next((number for number in table.numbers.tolist() if number not in places), None)
    if unknown is not None:
        raise UsageError(
            f"{table.path} has the sample {unknown}, which {own.place} lacks: give predictions for the samples of "
            f"{own.place}"
        )
    rows = found.positions.tolist()
    wrong = next((row for row in rows if table.paths[row] != own.path(places[int(table.numbers[row])])), None)
    if wrong is not None:
        raise UsageError(
            f"{table.path} has the path {table.paths[wrong]!r:.200} for sample {int(table.numbers[wrong])}, and "
            f"{own.place} has another path: give predictions for the samples of {own.place}"
        )

    def make(number: int) -> _Finding:
        row, name = rows[number], table.classes[int(found.classes[number])]
        proposed = name
        if labels.ndim == 2:
            marks = {each for each, mark in zip(table.classes, labels[row], strict=True) if mark} ^ {name}
            proposed = join_names(each for each in table.classes if each in marks)
        text = f"p(label) {1 - found.scores[number]:.3f}, {name} {table.probabilities[row, found.classes[number]]:.3f}"
        return _Finding([(0, places[int(table.numbers[row])])], [proposed], text)

    note = (
        "Ranked by how improbable their labels are to models that have not seen them. Some of the labels may be right."
    )
    return _Kind("suspects", note, len(found), make, is_pair=False)


def _extremes(own: _Set) -> _Kind:
    """Return the blank images, the files with a wrong suffix, and the images at both ends of each known scale."""
    found = [(at, "blank: next to no contrast") for at in np.flatnonzero(own.hashes.is_blank)[:_EXTREMES].tolist()]
    found += itertools.islice(_wrong_suffixes(own), _EXTREMES)
    for (low, high), values, to_text in _scales(own):
        known = np.flatnonzero(np.isfinite(values))
        order = known[np.argsort(values[known], kind="stable")]
        count = min(_EXTREMES, len(order) // 2)
        for name, places in ((low, order[:count]), (high, order[len(order) - count :][::-1])):
            found += [(at, f"{name}: {to_text(values[at])}") for at in places.tolist()]

    def make(number: int) -> _Finding:
        at, text = found[number]
        return _Finding([(0, at)], [own.label(at)], text)

    note = f"The {_EXTREMES} samples at each end of several scales. Most of them will be fine."
    return _Kind("extremes", note, len(found), make, is_pair=False, is_finding=False)


def _wrong_suffixes(own: _Set) -> Iterator[tuple[int, str]]:
    """Yield the position of each sample whose file has the suffix of another file type, and a text with both types."""
    kinds = own.records.table.get(TYPE)
    if not isinstance(kinds, Strings):
        return
    for at, position in enumerate(own.positions.tolist()):
        kind, suffix = kinds[position], PurePosixPath(own.path(at)).suffix.lower()
        if kind in _TYPES.values() and _TYPES.get(suffix, kind) != kind:
            yield at, f"named {suffix}, but a {kind.upper()} file"


def _scales(own: _Set) -> Iterator[tuple[tuple[str, str], Array, Callable[[float], str]]]:
    """Yield the known scales of images: the names of both ends, each sample's value, and the format of a value.

    A value that is not known is NaN.
    """
    table = own.records.table

    def column(name: str) -> Array | None:
        found = table.get(name)
        return np.asarray(found, np.float64)[own.positions] if isinstance(found, np.ndarray) else None

    width, height = column(WIDTH), column(HEIGHT)
    if width is not None and height is not None:
        known = np.where((width > 0) & (height > 0), width / np.maximum(height, 1), np.nan)
        yield ("tallest shape", "widest shape"), known, "{:.2f} times as wide as high".format
        yield ("smallest side", "largest side"), np.minimum(width, height), "{:,.0f} pixels".format
    for name, ends in ((MEAN, ("darkest", "brightest")), (STD, ("least contrast", "most contrast"))):
        if (values := column(name)) is not None:
            yield ends, values, "{:.1f}".format
    if (values := column("source_bytes")) is not None:
        yield ("smallest file", "largest file"), np.where(values > 0, values, np.nan), size_text


@dataclass
class _Sprites:
    """The pictures of a set, drawn when they are needed into JPEGs of 64 pictures each (sprites).

    `size` is the (width, height) of a picture in pixels, and `tile` the (width, height) of the area that it takes up in
    a sprite: `size` rounded up to whole JPEG blocks. `sources` are the finished JPEG files, with `bytes` bytes in all.
    `places` numbers the drawn pictures in the order of drawing; its keys are indices into `positions`.
    """

    records: Records
    positions: Array
    size: tuple[int, int]
    tile: tuple[int, int]
    sources: list[bytes] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    bytes: int = 0
    _open: Any = None

    @classmethod
    def of(cls, own: _Set) -> _Sprites:
        from tpucache.report.draw import fitted_size

        image = own.records.image
        if image is None:
            raise UsageError(f"{own.place} has no images to show: give a cache of images")
        side = min(_SIDE, max(image.shape[:2]))
        width, height = fitted_size(image.shape, side)
        tile = (-(-width // _BLOCK) * _BLOCK, -(-height // _BLOCK) * _BLOCK)
        return cls(own.records, own.positions, (width, height), tile)

    @calling("Pillow")
    def add(self, at: int) -> None:
        from PIL import Image

        from tpucache.report.draw import draw_record

        if at in self.places:
            return
        place = len(self.places) % (_ACROSS * _DOWN)
        if place == 0:
            self.close()
            self._open = Image.new("RGB", (self.tile[0] * _ACROSS, self.tile[1] * _DOWN))
        self.places[at] = len(self.places)
        manifest = self.records.manifest
        fields = self.records.read(int(self.positions[at]), manifest.variants[0])
        picture = draw_record({IMAGE: fields[IMAGE]}, (), max(self.size))
        self._open.paste(picture, (place % _ACROSS * self.tile[0], place // _ACROSS * self.tile[1]))

    @calling("Pillow")
    def close(self) -> None:
        if self._open is not None:
            target = io.BytesIO()
            self._open.save(target, "jpeg", quality=_QUALITY)
            self.sources.append(target.getvalue())
            self.bytes += len(self.sources[-1])
            self._open = None


class _Shown:
    def __init__(self, sets: Sequence[_Set]) -> None:
        self._sets = sets
        self._sprites = [_Sprites.of(each) for each in sets]
        self._numbers: dict[tuple[int, int], int] = {}
        self._bytes = 0  # of texts

    def choose(
        self, kinds: Sequence[_Kind], on_progress: Callable[[str, int, int], None]
    ) -> Sequence[Sequence[_Finding]]:
        """Take findings from each kind in turn, until the page has no room for more."""
        kept: list[list[_Finding]] = [[] for _ in kinds]
        counts = [min(_MOST, kind.count) for kind in kinds]
        total, done = sum(counts), 0
        for number in range(max(counts, default=0)):
            for kind, count, chosen in zip(kinds, counts, kept, strict=True):
                if number >= count:
                    continue
                if self._bytes + sum(_BASE64 * each.bytes for each in self._sprites) >= _BYTES:
                    break
                finding = kind.make(number)
                self._bytes += len(escape(json.dumps(finding)))
                for own, at in finding.samples:
                    if (own, at) not in self._numbers:
                        self._numbers[own, at] = len(self._numbers)
                        self._bytes += len(escape(json.dumps(self._texts(own, at))))
                        self._sprites[own].add(at)
                chosen.append(finding)
                done += 1
                on_progress("draw", done, total)
        for each in self._sprites:
            each.close()
        return kept

    def _texts(self, own: int, at: int) -> tuple[str, str, str]:
        of = self._sets[own]
        return of.path(at), of.label(at), of.original(at)

    def sources(self) -> list[str]:
        """Return all sprites as base64 texts, those of the first set first. A sprite is a JPEG with many pictures."""
        every = itertools.chain.from_iterable(each.sources for each in self._sprites)
        return [base64.b64encode(source).decode() for source in every]

    def to_json(self, kinds: Sequence[_Kind], kept: Sequence[Sequence[_Finding]]) -> dict[str, Any]:
        firsts = itertools.accumulate((len(each.sources) for each in self._sprites), initial=0)
        return {
            "kind": "image/jpeg",
            "sets": [
                {
                    **_geometry(sprites),
                    "first": first,
                    "name": each.name,
                    "table": _table_name(each),
                    "canCorrect": each.can_correct(),
                    "classes": list(each.classes[:_CLASSES]),
                    "isNumber": each.is_numbers(),
                    "separator": each.separator(),
                }
                for each, sprites, first in zip(self._sets, self._sprites, firsts, strict=False)
            ],
            "samples": [[own, self._sprites[own].places[at], *self._texts(own, at)] for own, at in self._numbers],
            "sections": [
                {
                    "title": kind.title,
                    "note": _note(kind, len(findings)),
                    "count": f"{kind.count:,}" if kind.is_finding else "",
                    "isPair": kind.is_pair,
                    "cards": [
                        [[self._numbers[each] for each in finding.samples], list(finding.labels), finding.text]
                        for finding in findings
                    ],
                }
                for kind, findings in zip(kinds, kept, strict=True)
            ],
        }


def _geometry(sprites: _Sprites) -> Mapping[str, Any]:
    (width, height), (tile_width, tile_height) = sprites.size, sprites.tile
    return {
        "width": width,
        "height": height,
        "tileWidth": tile_width,
        "tileHeight": tile_height,
        "across": _ACROSS,
        "each": _ACROSS * _DOWN,
        "small": max(sprites.size) <= _SMALL,
    }


def _note(kind: _Kind, shown: int) -> str:
    if not kind.count:
        return "None were found."
    return kind.note if shown == kind.count else f"{kind.note} The first {shown:,} of {kind.count:,} are here."


def _state(sets: Sequence[_Set], alike: Pairs) -> str:
    """Return a text that says how pictures were compared, and how many images were left out."""
    parts = [f"Pictures are alike where their hashes of {_HASH_BITS} bits differ by at most {alike.threshold}."]
    if alike.search != "exact":
        parts.append(f"In a set of this size, {alike.share:.0%} of such pairs or more are found.")
    if blank := sum(int(each.hashes.is_blank.sum()) for each in sets):
        parts.append(f"{blank:,} images with next to no contrast are left out: they all look alike.")
    return " ".join(parts)


def _likeness(distance: int) -> str:
    """Return how alike two pictures are as text, in per cent and in bits of their hashes.

    Unrelated pictures, which differ in half of the bits, are 0% alike.
    """
    return f"{max(0.0, 1 - distance / (_HASH_BITS / 2)):.0%} alike: {distance} of {_HASH_BITS} bits differ"


def _table_name(own: _Set) -> str:
    return f"{''.join(one if one.isalnum() or one in '-_' else '-' for one in own.name)[:60] or 'cache'}-labels.csv"


def _command(own: _Set) -> str:
    return shlex.join(["tpucache", "relabel", own.place, _table_name(own)])


def _script_hash() -> str:
    """A browser runs only the script with this hash."""
    script = fill_template("findings.js", {}, _PACKAGE)
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
