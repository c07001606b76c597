"""What a run got wrong: its confusion matrix or its figures for each class, and the most wrong samples as pictures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DependencyError, TpucacheError
from tpucache.loading.dataset import CachedDataset
from tpucache.report.page.markup import escape, section, table
from tpucache.report.page.run_files import RunFiles
from tpucache.report.records import Records
from tpucache.report.text import class_name
from tpucache.store.fields import MASK

Array = npt.NDArray[Any]

_MATRIX: Final = 30  # classes of a matrix that can still be read
_ROWS: Final = 1000
_PAIRS: Final = 20
_COLUMNS: Final = 6  # values of a sample in a caption
_HEADS: Final = {"classes": ("samples", "recall", "precision"), "mask": ("pixels", "recall", "IoU")}


@dataclass(frozen=True)
class _Sample:
    """One wrong sample: what it is, what was predicted, a number that says how sure or how far off, and its map."""

    row: int
    label: str
    prediction: str
    figure: str
    map: Array | None = None


def worst(run: RunFiles, count: int, cache: Path | None) -> str:
    """Return the `count` most wrong validation samples as pictures, or why there are none.

    Their cache is read where the run left it, or at `cache`. Pillow draws them; all else needs numpy alone.
    """
    if "errors" not in run.arrays:
        reason = "The run has no validation samples"
        if run.info.get("validation") is not None or not run.info:
            reason = "No epoch of the run has kept its predictions (earlier versions kept none)"
        return _sheet(f"{reason}.")
    chosen = _samples(run, count)
    if not chosen:
        return _sheet("No sample is wrong.")
    try:
        records = _records(run, cache)
    except TpucacheError as error:
        return _sheet(f"The pictures are left out: {escape(error)}")
    image = records.image
    if image is None:
        return _sheet("The records have no images.")
    try:
        from tpucache.report.page.frames import look_of

        look, shown = look_of(records, image), run.info["validation"]["variant"]
        figures = "".join(_figure(run, records, sample, look, shown) for sample in chosen)
    except DependencyError as error:
        return _sheet(f"The pictures are left out: {escape(error)}")
    return _sheet(f"{len(chosen):,} of {len(run.arrays['errors']):,}, the most wrong first.", figures, look)


def _sheet(note: str, figures: str = "", look: str = "") -> str:
    wide = 320 if look == "drawn" else 170
    frames = f'<div class="frames" style="--strip:{wide}px">{figures}</div>' if figures else ""
    return f'<div class="sheet"><h2>Most wrong</h2><p class="note">{note}</p>{frames}</div>'


def _records(run: RunFiles, cache: Path | None) -> Records:
    """Return the validation samples' records. Raises TpucacheError where they are gone or are not what they were."""
    described = run.info["validation"]
    place = cache or Path(described["cache"])
    if not place.exists():
        raise TpucacheError(f"the cache of the validation samples is no longer at {place}. Say where it is by --valid")
    with CachedDataset(place, described["variant"]) as whole:
        positions = run.arrays["positions"]
        if len(positions) and not 0 <= positions.min() <= positions.max() < whole.manifest.samples:
            raise TpucacheError(f"{place} has {whole.manifest.samples:,} samples, fewer than the run has validated on")
        dataset = whole.select(positions)
        if dataset.digest != described["digest"]:
            raise TpucacheError(f"{place} has other records or labels than those that the run was validated on")
        return Records(dataset)


def _samples(run: RunFiles, count: int) -> list[_Sample]:
    """Return the most wrong samples; of masks those whose predicted maps the run has kept."""
    arrays, errors = run.arrays, run.arrays["errors"]
    if "maps" in arrays:
        of_map = {int(row): found for row, found in zip(arrays["shown"], arrays["maps"], strict=True)}
        rows = sorted(of_map, key=lambda row: -errors[row])[:count]
        return [_Sample(row, "true", "predicted", f"IoU {1 - errors[row]:.3f}", of_map[row]) for row in rows]
    rows = np.argsort(-errors, kind="stable").tolist()
    wrong = (row for row in rows if "predictions" not in arrays or _is_wrong(run, row))
    return [_describe(run, row) for row in itertools.islice(wrong, count)]


def _is_wrong(run: RunFiles, row: int) -> bool:
    label = int(run.arrays["labels"][row])
    return label >= 0 and label != int(run.arrays["predictions"][row])


def _describe(run: RunFiles, row: int) -> _Sample:
    arrays, names = run.arrays, run.classes
    if "predictions" in arrays:
        label, prediction = (class_name(int(arrays[name][row]), names) for name in ("labels", "predictions"))
        figure = f"{arrays['probabilities'][row]:.3f}, the right one {1 - arrays['errors'][row]:.3f}"
        return _Sample(row, label, prediction, figure)
    labels, values = arrays["labels"][row], arrays["values"][row]
    columns = np.argsort(-np.abs(labels - values), kind="stable")[:_COLUMNS]
    if len(values) == 1 and not names:
        return _Sample(row, f"{labels[0]:.6g}", f"{values[0]:.6g}", f"off by {arrays['errors'][row]:.4g}")
    shown = [[f"{class_name(int(c), names)} {side[c]:.4g}" for c in columns] for side in (labels, values)]
    return _Sample(row, ", ".join(shown[0]), ", ".join(shown[1]), f"off by {arrays['errors'][row]:.4g}")


def _figure(run: RunFiles, records: Records, sample: _Sample, look: str, variant: int) -> str:
    from tpucache.report.page.frames import picture

    position = int(run.arrays["positions"][sample.row])
    fields = records.read(position, variant)
    drawn = [fields]
    if sample.map is not None:
        drawn.append({**fields, MASK: sample.map[..., None]})
    texts = sample.label, sample.prediction, records.table.paths[position]
    label, prediction, path = map(escape, texts)
    pictures = (picture(each, run.classes, look) for each in drawn)
    images = "".join(f'<img {each} alt="{label}, predicted {prediction}">' for each in pictures)
    return (
        f'<figure><div class="strip {look}">{images}</div><figcaption>'
        f'<span class="label" title="{label}">{label}</span><span class="frame">{sample.figure}</span>'
        f'<span class="path" title="{prediction}">predicted {prediction}</span>'
        f'<span class="path" title="{path}">{path}</span></figcaption></figure>'
    )


def confusion(run: RunFiles) -> str:
    """Return the confusion matrix of classes and masks, or the figures for each class of many."""
    if "predictions" in run.arrays:
        labels, predictions = run.arrays["labels"].astype(np.int64), run.arrays["predictions"].astype(np.int64)
        outputs = max([int(run.info.get("outputs", 0)), *(labels + 1).tolist(), *(predictions + 1).tolist()])
        return _of_pairs(run, labels[labels >= 0], predictions[labels >= 0], outputs)
    if "confusion" in run.arrays:
        return section("Confusion", *_matrix(run, run.arrays["confusion"], "mask"), note=f"{_ROWS_ARE} In pixels.")
    return _many(run) if run.task == "multilabel" and "values" in run.arrays else ""


_ROWS_ARE: Final = "A row for each true class, a column for each predicted one."


def _of_pairs(run: RunFiles, labels: Array, predictions: Array, outputs: int) -> str:
    pairs, counts = np.unique(labels * outputs + predictions, return_counts=True)
    wrong = pairs // outputs != pairs % outputs
    order = np.argsort(-counts[wrong], kind="stable")[:_PAIRS]
    often = [
        (escape(class_name(int(pair) // outputs, run.classes)), escape(class_name(int(pair) % outputs, run.classes)),
         f"{count:,}")
        for pair, count in zip(pairs[wrong][order], counts[wrong][order], strict=True)
    ]  # fmt: skip
    most = table(("label", "predicted as", "samples"), often, "ttn") if often else ""
    if outputs > _MATRIX:
        return section("Confusion", most, note="What is taken for what most often.")
    matrix = np.zeros((outputs, outputs), np.int64)
    matrix.reshape(-1)[pairs] = counts
    return section("Confusion", *_matrix(run, matrix, "classes"), most, note=_ROWS_ARE)


def _matrix(run: RunFiles, counts: Array, kind: str) -> list[str]:
    """Return a table of counts, darker where they are a larger share of their row, and the figures for each class."""
    total, found, right = counts.sum(1), counts.sum(0), counts.diagonal()
    names = [escape(class_name(number, run.classes)) for number in range(len(counts))]
    whole = found if kind == "classes" else total + found - right
    figures = [
        (name, f"{total[at]:,.0f}", _share(right[at], total[at]), _share(right[at], whole[at]))
        for at, name in enumerate(names)
    ]
    shares = counts / np.maximum(total, 1)[:, None]
    cells = [[f"{name} ({at})", *map(_cell, counts[at], shares[at])] for at, name in enumerate(names)]
    heads = ("", *(f'<span title="{name}">{at}</span>' for at, name in enumerate(names)))
    matrix = f'<div class="wide">{table(heads, cells, "t" + "n" * len(names), "matrix")}</div>'
    by_class = table(("class", *_HEADS[kind]), figures[:_ROWS], "tnnn")
    return [matrix, by_class] if len(counts) <= _MATRIX else [by_class]


def _cell(count: float, share: float) -> str:
    return f'<span style="opacity:{0.35 + 0.65 * share:.2f}">{count:,.0f}</span>'


def _many(run: RunFiles) -> str:
    truth, said = run.arrays["labels"] > 0.5, run.arrays["values"] > 0.5
    both = (truth & said).sum(0)
    rows = [
        (escape(class_name(at, run.classes)), f"{has:,}", _share(both[at], has), _share(both[at], found),
         _share(2 * both[at], has + found))
        for at, (has, found) in enumerate(zip(truth.sum(0).tolist(), said.sum(0).tolist(), strict=True))
    ]  # fmt: skip
    whole = table(("class", "samples", "recall", "precision", "F1"), rows[:_ROWS], "tnnnn")
    return section("Classes", whole, note="Predictions are those above one half.")


def _share(part: Any, whole: Any) -> str:
    return f"{part / whole:.3f}" if whole else "\u2013"
