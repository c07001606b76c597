"""The page of findings: pictures that look alike, leaks, suspects and extremes, with a table to correct labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tpucache.errors import UsageError
from tpucache.insight.copies import THRESHOLD, Pairs, confirm_copies, pairs
from tpucache.insight.hashing import hashes
from tpucache.insight.labels import Predictions, read_predictions, suspects, suspects_table
from tpucache.report.page import (
    Block,
    Figure,
    Page,
    Part,
    Picture,
    Section,
    class_name,
    make_page,
    name_of,
    read_record,
    to_dataset,
)
from tpucache.report.preview import make_picture
from tpucache.store.facts import IMAGE_TEXTS, findings
from tpucache.store.fields import IMAGE
from tpucache.store.hashes import BITS
from tpucache.text import join_names

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

_SHOWN: Final = 72  # findings of each kind on the page, at most
_LISTED: Final = 2000  # findings of each kind in the table, at most
_EXTREMES: Final = 5  # samples for each reason


def report_findings(
    cache: str | Path | CachedDataset,
    *,
    against: str | Path | CachedDataset | None = None,
    predictions: str | Path | None = None,
    threshold: int = THRESHOLD,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Page:
    """Return a page of findings about a cache's images, with a table to correct labels.

    The page shows pictures that look alike, with different labels or with the same label; pictures that look like a
    picture of the cache `against`; samples whose labels are least probable by `predictions` (the table of a run of all
    folds, or the run's folder); and unusual images. Two pictures look alike if their hashes differ in at most
    `threshold` of 256 bits (see `tpucache.insight.hashes`).

    At most 72 findings of each kind are shown. The samples of at most 2,000 are in the page's table, which is written
    beside the page: correct its column `label`, then give it to the command `relabel`. `on_progress` is called with the
    name of the current work, the amount done and the whole amount.

    Raises UsageError for records without images and predictions of other samples, and DependencyError without jinja2 or
    Pillow.
    """
    table = None if predictions is None else read_predictions(predictions)  # first, to raise its errors at once
    own = _Set(cache, on_progress)
    other = None if against is None else _Set(against, on_progress)

    compared = partial(on_progress, "compare")
    alike = pairs(own.hashes, threshold, on_progress=compared)
    blank, differs = alike.blank, np.zeros(len(alike), np.bool_)
    if own.labels is not None:
        labels = own.labels.reshape(len(own.labels), -1)
        differs = (labels[alike.first] != labels[alike.second]).any(1)
    kinds = [
        _alike(f"look alike, {which} label", note, own, own, alike.select(chosen))
        for which, note, chosen in (
            ("different", "A label is wrong, or the classes overlap.", differs),
            ("same", "Keep each group of such pictures in one fold.", ~differs),
        )
    ]
    if other is not None:
        note = "A score on samples that the other cache has, too, is too good."
        leaks = pairs(own.hashes, threshold, other=other.hashes, on_progress=compared)
        kinds.append(_alike("leaks", note, own, other, leaks))
        blank = leaks.blank
    if table is not None:
        kinds.append(_suspects(own, table))
    found = [("samples", f"{len(own.positions):,}"), *((kind.title, f"{kind.total:,}") for kind in kinds)]
    kinds.append(_extremes(own))
    text = (
        f"Pictures are alike where their hashes of {BITS} bits differ by at most {threshold}. {blank:,} images with "
        "next to no contrast are left out."
    )
    part = Part(name_of(own.dataset), text, found, [kind.section() for kind in kinds])
    return make_page("findings in", [part], own.table(kinds))


class _Set:
    """A cache whose samples are on the page. Methods take a sample's position in the set."""

    def __init__(self, cache: str | Path | CachedDataset, on_progress: Callable[[str, int, int], None]) -> None:
        """Raises UsageError if the cache has no images."""
        self.dataset = dataset = to_dataset(cache)
        labels, self.classes = dataset.table.labels, dataset.classes
        self.positions, self.numbers, self.paths = dataset.positions, dataset.numbers, dataset.paths
        self.labels = None if labels is None else np.asarray(labels)[self.positions]
        self.hashes = hashes(dataset, on_progress=partial(on_progress, f"hash {name_of(dataset)}"))

    def label(self, at: int) -> str:
        """Return a sample's label as text for `relabel`; "" if the sample has no label."""
        if self.labels is None:
            return ""
        label = self.labels[at]
        if not label.ndim and label.dtype.kind != "f":
            return class_name(int(label), self.classes) if label >= 0 else ""
        values = label.reshape(-1)
        if len(self.classes) == len(values):
            return join_names(name for name, value in zip(self.classes, values, strict=True) if value > 0)
        return ",".join(map(str, values))

    def picture(self, at: int) -> Picture:
        fields = read_record(self.dataset, int(self.positions[at]), self.dataset.manifest.variants[0])
        return make_picture({IMAGE: fields[IMAGE]}, (), self.paths[at], self.label(at) or "unlabelled")

    def table(self, kinds: Sequence[_Kind]) -> bytes | None:
        """Return a row for each of this set's labelled samples in findings; None without labels."""
        if self.labels is None:
            return None
        rows: dict[int, tuple[object, ...]] = {}
        for kind in kinds:
            for finding in kind.findings:
                for own, at, proposed in finding.samples:
                    if own is self and (label := self.label(at)):
                        row = (
                            int(self.numbers[at]),
                            self.paths[at],
                            label,
                            proposed,
                            f"{kind.title}: {finding.text}",
                        )
                        rows.setdefault(at, row)
        return suspects_table(rows.values())


class _Finding(NamedTuple):
    """What was found, and the samples that are shown together: the set, the position in it, and a proposed label."""

    text: str
    samples: Sequence[tuple[_Set, int, str]]


class _Kind(NamedTuple):
    """A kind of findings, of which there are `total`, and the first of them."""

    title: str
    note: str
    total: int
    findings: Sequence[_Finding]

    def section(self) -> Section:
        shown = self.findings[:_SHOWN]
        if not shown:
            return Section(self.title, "None were found.")
        more = "" if len(shown) == self.total else f" The first {len(shown):,} of {self.total:,} are here."
        figures = [
            Figure(
                [own.picture(at) for own, at, _ in each.samples],
                [each.text],
                [own.paths[at] for own, at, _ in each.samples],
            )
            for each in shown
        ]
        return Section(self.title, f"{self.note}{more}", [Block("pictures", figures)])


def _alike(title: str, note: str, own: _Set, other: _Set, alike: Pairs) -> _Kind:
    """Return pairs of samples of two sets, or of one, the closest first; each is proposed the label of the other."""
    first = alike.select(slice(_LISTED))
    is_copy = confirm_copies(first, own.dataset, other.dataset)
    columns = (first.first, first.second, first.distance, first.is_mirrored, is_copy)
    findings = []
    for one, two, distance, mirrored, copy in zip(*(column.tolist() for column in columns), strict=True):
        likeness = max(0.0, 1 - distance / (BITS / 2))  # unrelated pictures differ in half of the bits
        text = f"{likeness:.0%} alike: {distance} of {BITS} bits differ{', mirrored' if mirrored else ''}"
        samples = [(own, one, other.label(two)), (other, two, own.label(one))]
        findings.append(_Finding(f"{text}{', copies by their details' if copy else ''}", samples))
    return _Kind(title, f"{note} The closest come first.", len(alike), findings)


def _suspects(own: _Set, table: Predictions) -> _Kind:
    """Return samples ranked by how improbable their labels are. Raises UsageError for predictions of other samples."""
    labels = table.label_numbers()
    found = suspects(table.probabilities, labels)
    places = {sample: at for at, sample in enumerate(zip(own.numbers.tolist(), own.paths, strict=True))}
    samples = list(zip(table.numbers.tolist(), table.paths, strict=True))
    for number, path in samples:
        if (number, path) not in places:
            raise UsageError(
                f"{table.path} has the sample {number} with the path {path!r:.200}, which {own.dataset.directory} "
                "lacks: give predictions for the samples of this cache"
            )
    findings = []
    for row, score, number in zip(found.positions.tolist(), found.scores, found.classes.tolist(), strict=True):
        name = proposed = table.classes[number]
        if labels.ndim == 2:
            marks = {each for each, mark in zip(table.classes, labels[row], strict=True) if mark} ^ {name}
            proposed = join_names(each for each in table.classes if each in marks)
        text = f"p(label) {1 - score:.3f}, {name} {table.probabilities[row, number]:.3f}"
        findings.append(_Finding(text, [(own, places[samples[row]], proposed)]))
    note = "Ranked by how improbable their labels are to models that have not seen them. Some labels may be right."
    return _Kind("suspects", note, len(found), findings[:_LISTED])


def _extremes(own: _Set) -> _Kind:
    """Return what `findings` lists of the cache: a few images of each problem, and at the ends of each scale."""
    listed = findings(own.dataset.cache)
    found = {**{IMAGE_TEXTS[name]: at for name, at in listed.images.items()}, **listed.extremes}
    shown = [
        _Finding(text, [(own, at, own.label(at))])
        for text, positions in found.items()
        for at in np.flatnonzero(np.isin(own.positions, positions))[:_EXTREMES].tolist()
    ]
    note = f"At most {_EXTREMES} samples for each reason. Most of them will be fine."
    return _Kind("extremes", note, len(shown), shown)
