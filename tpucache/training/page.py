"""The page of a run: its most wrong samples, curves, confusion, seconds, idle time and settings.

The files of a run are checked when they are read; none is trusted.
"""

from __future__ import annotations

import collections
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tpucache.errors import FormatError, TpucacheError, TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.native import Array
from tpucache.report.page import (
    SAMPLES,
    Block,
    Figure,
    Line,
    Page,
    Part,
    Section,
    bars,
    chart,
    class_name,
    make_page,
    matrix,
    read_record,
    table,
)
from tpucache.runs import (
    HISTORY_NAME,
    INFO_NAME,
    VALIDATION_NAME,
    fold_folder,
    is_run,
)
from tpucache.store.fields import IMAGE, MASK
from tpucache.store.files import check_stored, open_file, open_text, read_file
from tpucache.text import LARGEST, named, parse_object, seconds_text
from tpucache.training.run.report import (
    FoldsReport,
    TrainReport,
    read_account,
    read_folds,
    read_folds_report,
    read_report,
    unfinished_report,
)
from tpucache.training.run.state import VALID, metric_columns

Content = TypeVar("Content")

_SHOWN: Final = 200  # characters of the reason in a message, at most
# Errors from reading values of files that do not belong together.
_MISFITS: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

_HUES: Final = {"training": 260, "validation": 50, "rate": 150}
_POINTS: Final = 600  # points in a curve of single steps, at most
_LOSS: Final = f"{VALID}loss"
_MATRIX: Final = 30  # classes of a confusion matrix, at most: a larger one cannot be read
_PAIRS: Final = 20
_COLUMNS: Final = 6  # values of a sample in a caption, at most
_NAMED: Final = 4  # classes of a mask in a caption, at most


def report_run(run: str | Path, samples: int = SAMPLES, *, cache: str | Path | None = None) -> Page:
    """Return a page about a run: curves, seconds, idle time, confusion, wrong samples and settings.

    The page of a run of all folds shows the scores, curves and seconds of all folds, then a part for each fold. The run
    may be unfinished. The wrong samples are read from `cache`, or else from the cache that the run has used; if it is
    gone, the page says so. The page has no script and loads no other file.

    Raises UsageError for a folder without a run, TrainingError for files that cannot be read, DependencyError without
    jinja2.
    """
    folder = Path(run)
    try:
        names = read_folds(folder)
        if names is None:
            return make_page("run", [_part(_read_run(folder), samples, cache)])
        folders = {name: fold_folder(folder, name) for name in names}
        runs = {name: _read_run(each) for name, each in folders.items() if is_run(each)}
        parts = [_part(each, samples, cache) for each in runs.values()]
        return make_page("run of folds", [_part_of_folds(folder, names, runs), *parts])
    except TpucacheError:
        raise
    except _MISFITS as error:
        raise TrainingError(f"the files in {folder} do not belong together: {error!r}. Copy the run again") from error


# The files of a run.


@dataclass(frozen=True)
class _Run:
    """The contents of a run's files; a file that is missing counts as empty.

    `info` is run.json, `rows` are the rows of history.csv, and `arrays` the arrays of validation.npz, by name.
    """

    folder: Path
    info: Mapping[str, Any]
    report: TrainReport
    rows: Sequence[Mapping[str, float]]
    arrays: Mapping[str, Array]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(map(str, self.info.get("classes", ())))

    @property
    def metrics(self) -> list[str]:
        return metric_columns(self.rows)

    def points(self, name: str) -> list[tuple[float, float]]:
        return [(row["step"], row[name]) for row in self.rows if name in row and "step" in row]


def _read_run(folder: Path) -> _Run:
    if not is_run(folder):
        raise UsageError(f"{folder} holds no run: give the folder that `train --run` named")
    report = read_report(folder)
    if report is None:
        seconds, wall = read_account(folder)
        report = replace(unfinished_report(), seconds=seconds, wall_seconds=wall)
    info = _read(folder / INFO_NAME, lambda path: parse_object(read_file(path), path.name))
    rows, arrays = _read(folder / HISTORY_NAME, _rows), _read(folder / VALIDATION_NAME, _arrays)
    return _Run(folder, info or {}, report, rows or [], arrays or {})


def _read(path: Path, parse: Callable[[Path], Content]) -> Content | None:
    """Return what `parse` returns for a file; None if there is no such file."""
    if not path.exists():
        return None
    try:
        return parse(path)
    except Exception as error:  # zipfile and numpy raise many things for a damaged file
        text = " ".join(str(error).split())[:_SHOWN]
        raise TrainingError(f"{path} cannot be read: {text}. Copy the run again") from error


def _rows(path: Path) -> Sequence[Mapping[str, float]]:
    with open_text(path, newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    if any(abs(value) > LARGEST for row in rows for value in row.values()):
        raise FormatError("it has a number that is too large")
    return rows


def _arrays(path: Path) -> Mapping[str, Array]:
    with open_file(path) as file:
        check_stored(file)
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: np.asarray(archive[name]) for name in archive.files}
    for name, array in arrays.items():
        if array.dtype.kind not in "iuf" or not np.abs(array.astype(np.float64)).max(initial=0) <= LARGEST:
            raise FormatError(f"{name}, of dtype {array.dtype}, has values that are too large or not numbers")
    return arrays


# A run of all folds.


def _part_of_folds(folder: Path, names: Sequence[str], runs: Mapping[str, _Run]) -> Part:
    report = read_folds_report(folder) or FoldsReport("", 0, [], {}, {}, {}, "", False, {}, 0.0)
    figures = [("folds", f"{len(names):,}"), *((name, f"{value:.4f}") for name, value in report.out_of_fold.items())]
    text = "Finished. The figures are over all samples, each predicted by the model that has not seen it."
    if not report.finished:
        text = f"Not finished: {sum(score.finished for score in report.folds):,} of {len(names):,} folds are trained."
    metrics = dict.fromkeys(name for run in runs.values() for name in run.metrics)
    hues = {fold: (_HUES["training"] + 360 * number // len(runs)) % 360 for number, fold in enumerate(runs)}
    charts = [
        chart(_plain(name), [Line(f"fold {fold}", run.points(name), hues[fold]) for fold, run in runs.items()])
        for name in metrics
    ]
    sections = [
        Section("Scores", "Of the best epoch of each fold.", [Block("code", report.lines())]),
        *_curves("Of the validation", charts),
        *_seconds(report),
    ]
    return Part(folder.resolve().name, text, figures, sections)


# One run.


def _part(run: _Run, samples: int, cache: str | Path | None) -> Part:
    report, rows = run.report, run.rows
    best = report.best_epoch
    row = rows[best - 1] if 0 < best <= len(rows) else rows[-1] if rows else {}
    figures = [("epochs", f"{len(rows):,}")]
    figures += [(_plain(name), f"{row[name]:.4f}") for name in run.metrics if name in row]
    if report.pace.steps:
        figures.append((f"{report.unit}/s", f"{report.pace.images_per_second:,.0f}"))
    text = (
        f"{'Finished' if report.finished else 'Not finished'}{', stopped early' if report.stopped_early else ''}. "
        f"{f'Epoch {best} was best by {report.watched}; the figures are those of that epoch. ' if best else ''}"
        f"{report.advice}"
    )
    sections = [
        _worst(run, samples, cache),
        *_curves("By steps of the optimizer", _charts(run)),
        *_mistakes(run),
        *_seconds(report),
        _pace(report),
        Section("Settings", "Those that are not shown are off.", [Block("facts", _settings(run))]),
        Section("Data", "", [Block("facts", _data(run))]),
    ]
    return Part(run.folder.resolve().name, text, figures, sections)


def _plain(name: str) -> str:
    return name.removeprefix(VALID)


def _curves(note: str, charts: Sequence[Block]) -> list[Section]:
    drawn = [each for each in charts if each.content["lines"]]
    return [Section("Curves", f"{note}, from left to right.", drawn)] if drawn else []


def _charts(run: _Run) -> list[Block]:
    losses, rates = run.report.losses, run.report.learning_rates
    lines = [
        Line("training, single steps", _thinned(losses), _HUES["training"], is_faint=True),
        Line("training, mean of an epoch", run.points("train_loss"), _HUES["training"]),
        Line("validation", run.points(_LOSS), _HUES["validation"]),
    ]
    metrics = [name for name in run.metrics if name != _LOSS]
    return [
        chart("loss", lines),
        *(chart(_plain(name), [Line("validation", run.points(name), _HUES["validation"])]) for name in metrics),
        chart("learning rate", [Line("each step", _thinned(rates) or run.points("lr"), _HUES["rate"])]),
    ]


def _thinned(values: Sequence[float]) -> list[tuple[float, float]]:
    each = -(-len(values) // _POINTS)
    parts = [values[first : first + each] for first in range(0, len(values), each or 1)]
    return [(number * each + len(part), sum(part) / len(part)) for number, part in enumerate(parts)]


def _seconds(report: TrainReport | FoldsReport) -> list[Section]:
    spent = {name.replace("_", " "): seconds for name, seconds in report.seconds.items() if seconds > 0}
    note = f"{seconds_text(report.wall_seconds)} in all, summed over the times that the run was resumed."
    return [Section("Time", note, [bars(spent, report.wall_seconds, seconds_text)])] if spent else []


def _pace(report: TrainReport) -> Section:
    pace = report.pace
    replay = f"by {pace.ceiling_idle:.1%}" if pace.ceiling_idle is not None else "not measured"
    pairs = [
        *report.figures().items(),
        ("hint: the loop waited for data", f"{pace.waited:.1%}, also while the device still had work"),
        ("hint: slower than a replay", replay),
    ]
    note = "After the warm-up. The replay takes the same steps on data that are already on the device."
    return Section("Idle time", note, [Block("facts", pairs)])


def _settings(run: _Run) -> Iterator[tuple[str, str]]:
    settings = dict(run.info.get("settings") or {})
    augment = settings.pop("augment", {})
    task = {"task found": run.info.get("task", ""), "outputs": run.info.get("outputs", "")}
    for name, value in {**task, **settings, **augment}.items():
        if value or type(value) in (int, float):
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _data(run: _Run) -> Iterator[tuple[str, str]]:
    for name in ("training", "validation"):
        if part := run.info.get(name):
            yield name, f"{part['samples']:,} samples, variant {part['variant']}, of {part['cache']}"


# What a run got wrong.


def _worst(run: _Run, count: int, cache: str | Path | None) -> Section:
    title, arrays = "Most wrong", run.arrays
    if "errors" not in arrays:
        return Section(title, "No epoch of the run has kept predictions for validation samples.")
    chosen = _find_worst(run, count)
    if not chosen:
        return Section(title, "No sample is wrong.")
    try:
        dataset = _open_dataset(run, cache)
        if IMAGE not in dataset.names:
            return Section(title, "The records have no images.")
        figures = [_figure(run, dataset, row) for row in chosen]
        colours = _mask_colours(run) if "maps" in arrays else ()
    except TpucacheError as error:
        return Section(title, f"The pictures are left out: {error}. Give the cache of these samples by --valid.")
    note = f"{len(chosen):,} of {len(arrays['errors']):,}, the most wrong first."
    return Section(title, note, [Block("legend", colours), Block("pictures", figures)])


def _open_dataset(run: _Run, cache: str | Path | None) -> CachedDataset:
    described = run.info["validation"]
    shown, frequencies = described.get("resolution"), described.get("frequencies")
    size = tuple(shown) if isinstance(shown, list) else shown
    whole = CachedDataset(
        cache or described["cache"], described["variant"], resolution=size, frequencies=frequencies, in_memory=False
    )
    dataset = whole.select(run.arrays["positions"])
    if dataset.digest != described["digest"]:
        raise TrainingError(f"{whole.place} has other records or labels than the cache that the run was validated on")
    return dataset


def _find_worst(run: _Run, count: int) -> list[int]:
    arrays = run.arrays
    order = np.argsort(-arrays["errors"], kind="stable")
    if "maps" in arrays:
        order = order[np.isin(order, arrays["shown"])]
    elif "predictions" in arrays:
        labels = arrays["labels"][order]
        order = order[(labels >= 0) & (labels != arrays["predictions"][order])]
    return list(map(int, order[:count]))


def _figure(run: _Run, dataset: CachedDataset, row: int) -> Figure:
    from tpucache.report.preview import make_picture

    arrays, classes = run.arrays, run.classes
    position = int(arrays["positions"][row])
    fields, path = read_record(dataset, position, run.info["validation"]["variant"]), dataset.table.paths[position]
    if "maps" not in arrays:
        texts, corner = _compared(run, row)
        return Figure([make_picture(fields, classes, ", ".join(texts))], texts, [path], corner)
    (at,) = np.flatnonzero(arrays["shown"] == row)[:1]
    texts, shown = [], []
    for head, mask in (("true", fields[MASK]), ("predicted", arrays["maps"][at][..., None])):
        texts.append(f"{head}: {_describe_mask(mask, classes)}")
        shown.append(make_picture({**fields, MASK: mask}, classes, texts[-1], head))
    return Figure(shown, texts, [path], f"IoU {1 - arrays['errors'][row]:.3f}")


def _compared(run: _Run, row: int) -> tuple[list[str], str]:
    arrays, names = run.arrays, run.classes
    if "predictions" in arrays:
        label, predicted = (class_name(int(arrays[name][row]), names) for name in ("labels", "predictions"))
        corner = f"{arrays['probabilities'][row]:.3f}, the true one {1 - arrays['errors'][row]:.3f}"
    else:
        labels, values = arrays["labels"][row], arrays["values"][row]
        columns = np.argsort(-np.abs(labels - values), kind="stable")[:_COLUMNS].tolist()
        label, predicted = (
            ", ".join(f"{class_name(at, names)} {side[at]:.4g}" for at in columns) for side in (labels, values)
        )
        corner = f"off by {arrays['errors'][row]:.4g}"
    return [f"true: {label}", f"predicted: {predicted}"], corner


def _describe_mask(mask: Array, classes: Sequence[str]) -> str:
    counts = np.bincount(mask.reshape(-1))
    found = [number for number in np.argsort(-counts, kind="stable").tolist() if number and counts[number]]
    parts = [f"{_mask_class(number, classes)} {counts[number] / mask.size:.1%}" for number in found]
    return named(parts, _NAMED) or "nothing"


def _mask_class(number: int, classes: Sequence[str]) -> str:
    return classes[number] if number < len(classes) else f"class {number}"


def _mask_colours(run: _Run) -> list[tuple[str, str]]:
    from tpucache.report.preview import PALETTE

    outputs = max(int(run.info.get("outputs", 0)), len(run.classes))
    return [
        (_mask_class(number, run.classes), colour) for number, colour in enumerate(PALETTE[: max(0, outputs - 1)], 1)
    ]


def _mistakes(run: _Run) -> list[Section]:
    arrays, note = run.arrays, "A row for each true class, a column for each predicted one."
    if "confusion" in arrays:
        return [Section("Confusion", f"{note} In pixels.", _confusion(run, arrays["confusion"], "pixels"))]
    if "predictions" in arrays:
        is_known = arrays["labels"] >= 0
        labels, predictions = (arrays[name][is_known].astype(np.int64) for name in ("labels", "predictions"))
        outputs = max([run.info.get("outputs", 0), *(int(each.max(initial=-1)) + 1 for each in (labels, predictions))])
        often = _most_often(run, labels, predictions)
        if outputs > _MATRIX:
            return [Section("Confusion", "The most frequent confusions.", often)] if often else []
        counts = np.bincount(labels * outputs + predictions, minlength=outputs**2).reshape(outputs, outputs)
        return [Section("Confusion", note, [*_confusion(run, counts, "samples"), *often])]
    if run.info.get("task") == "multilabel" and "values" in arrays:
        truth, predicted = arrays["labels"] > 0.5, arrays["values"] > 0.5
        block = _by_class(run, "samples", (truth & predicted).sum(0), truth.sum(0), predicted.sum(0))
        return [Section("Classes", "Predictions are those above one half.", [block])]
    return []


def _most_often(run: _Run, labels: Array, predictions: Array) -> list[Block]:
    counts = collections.Counter(zip(labels.tolist(), predictions.tolist(), strict=True)).most_common()
    rows = [
        (class_name(label, run.classes), class_name(predicted, run.classes), f"{count:,}")
        for (label, predicted), count in counts
        if label != predicted
    ]
    return [table(("label", "predicted as", "samples"), rows[:_PAIRS], "ttn")] if rows else []


def _confusion(run: _Run, counts: Array, unit: str) -> list[Block]:
    """Return the confusion matrix, unless it is too large to be read, and a table of figures for each class."""
    if counts.shape[0] != counts.shape[1]:
        raise ValueError(f"the confusion matrix has {len(counts)} rows and {len(counts.T)} columns")
    by_class = _by_class(run, unit, counts.diagonal(), counts.sum(1), counts.sum(0))
    names = [class_name(number, run.classes) for number in range(len(counts))]
    return [matrix(names, counts), by_class] if len(counts) <= _MATRIX else [by_class]


def _by_class(run: _Run, unit: str, right: Array, total: Array, found: Array) -> Block:
    figures = {
        "recall": (right, total),
        "precision": (right, found),
        "F1": (2 * right, total + found),
        "IoU": (right, total + found - right),
    }
    rows = [
        (
            class_name(at, run.classes),
            f"{total[at]:,.0f}",
            *(f"{part[at] / whole[at]:.3f}" if whole[at] else "\u2013" for part, whole in figures.values()),
        )
        for at in range(len(total))
    ]
    return table(("class", unit, *figures), rows, "tnnnnn")
