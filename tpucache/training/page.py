"""The page of a run: its most wrong samples, curves, confusion, seconds, idle time and settings.

The files of a run are checked when they are read; none is trusted.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import FormatError, TpucacheError, TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.find import locate
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
    ACCOUNT_NAME,
    FOLDS_NAME,
    HISTORY_NAME,
    INFO_NAME,
    REPORT_NAME,
    VALIDATION_NAME,
    fold_folder,
    is_run,
)
from tpucache.store.fields import IMAGE, MASK
from tpucache.store.files import check_stored, is_url, open_file, open_text, read_file
from tpucache.store.history import split_version
from tpucache.text import LARGEST, parse_object, seconds_text

_SHOWN: Final = 200  # characters of the reason in a message, at most
# Errors from reading values of files that do not belong together.
_MISFITS: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

_HUES: Final = {"training": 260, "validation": 50, "rate": 150}
_POINTS: Final = 600  # points in a curve of single steps, at most
_LOSS, _COUNT, _VALID = "valid_loss", "valid_samples", "valid_"
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
        if not (folder / FOLDS_NAME).exists():
            return make_page("run", [_part(_read_run(folder), samples, cache)])
        names = list(map(str, _read_json(folder / FOLDS_NAME)["folds"]))
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

    `info` is run.json. `summary` is report.json or, if there is none yet, account.json. `rows` are the rows of
    history.csv, and `arrays` the arrays of validation.npz, by name.
    """

    folder: Path
    info: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, float]]
    arrays: Mapping[str, Array]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(map(str, self.info.get("classes", ())))

    @property
    def metrics(self) -> list[str]:
        names = dict.fromkeys(itertools.chain.from_iterable(self.rows))
        return [name for name in names if name.startswith(_VALID) and name != _COUNT]

    def points(self, name: str) -> list[tuple[float, float]]:
        return [(row["step"], row[name]) for row in self.rows if name in row and "step" in row]


def _read_run(folder: Path) -> _Run:
    if not is_run(folder):
        raise UsageError(f"{folder} holds no run: give the folder that `train --run` named")
    summary = _read_json(folder / REPORT_NAME) or _read_json(folder / ACCOUNT_NAME)
    return _Run(folder, _read_json(folder / INFO_NAME), summary, _read_rows(folder), _read_arrays(folder))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = parse_object(read_file(path), path.name)
    except FileNotFoundError:
        return {}
    except (OSError, FormatError) as error:
        raise _unreadable(path, error) from error
    _check_numbers(path, values)
    return values


def _check_numbers(path: Path, values: object) -> None:
    """Raise TrainingError if values have a number too large to be drawn or added up; no run writes such numbers."""
    if isinstance(values, (dict, list)):
        for value in values.values() if isinstance(values, dict) else values:
            _check_numbers(path, value)
    elif isinstance(values, (int, float)) and abs(values) > LARGEST:
        raise _unreadable(path, "it has a number that is too large")


def _read_rows(folder: Path) -> Sequence[Mapping[str, float]]:
    path = folder / HISTORY_NAME
    try:
        with open_text(path, newline="") as file:
            rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise _unreadable(path, error) from error
    _check_numbers(path, rows)
    return rows


def _read_arrays(folder: Path) -> dict[str, Array]:
    path = folder / VALIDATION_NAME
    if not path.exists():
        return {}
    try:
        with open_file(path) as file:
            check_stored(file)
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except Exception as error:  # zipfile and numpy raise many things for a damaged file
        raise _unreadable(path, error) from error
    for name, array in arrays.items():
        if array.dtype.kind not in "iuf" or not np.abs(array.astype(np.float64)).max(initial=0) <= LARGEST:
            raise _unreadable(path, f"{name}, of dtype {array.dtype}, has values that are too large or not numbers")
    return arrays


def _unreadable(path: Path, reason: object) -> TrainingError:
    text = " ".join(str(reason).split())[:_SHOWN]
    return TrainingError(f"{path} cannot be read: {text}. Copy the run again")


# A run of all folds.


def _part_of_folds(folder: Path, names: Sequence[str], runs: Mapping[str, _Run]) -> Part:
    summary = _read_json(folder / REPORT_NAME)
    scores = {str(score["fold"]): score for score in summary.get("folds") or ()}  # without folds that have not begun
    figures = [("folds", f"{len(names):,}")]
    figures += [(name, f"{value:.4f}") for name, value in (summary.get("out_of_fold") or {}).items()]
    done = sum(bool(score["finished"]) for score in scores.values())
    text = f"Not finished: {done:,} of {len(names):,} folds are trained."
    if summary.get("finished"):
        text = "Finished. The figures are over all samples, each predicted by the model that has not seen it."
    metrics = dict.fromkeys(name for run in runs.values() for name in run.metrics)
    hues = {fold: (_HUES["training"] + 360 * number // len(runs)) % 360 for number, fold in enumerate(runs)}
    charts = [
        chart(_plain(name), [Line(f"fold {fold}", run.points(name), hues[fold]) for fold, run in runs.items()])
        for name in metrics
    ]
    sections = [
        Section("Scores", "Of the best epoch of each fold.", [_scores(names, scores, summary)]),
        *_curves("Of the validation", charts),
        *_seconds(summary),
    ]
    return Part(folder.resolve().name, text, [*figures, *_time(summary)], sections)


def _scores(names: Sequence[str], scores: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any]) -> Block:
    metrics = list(dict.fromkeys(itertools.chain.from_iterable(score["metrics"] for score in scores.values())))
    rows: list[tuple[str, Any, Any, Mapping[str, float]]] = []
    for fold in names:
        score = scores.get(fold, {"metrics": {}})
        rows.append((fold, score.get("best_epoch") or "", score.get("samples") or "", score["metrics"]))
    if summary.get("finished"):
        rows += [(name.replace("_", " "), "", "", summary[name]) for name in ("mean", "deviation", "out_of_fold")]
    cells = [
        (fold, epoch, count, *(f"{values[name]:.4f}" if name in values else "" for name in metrics))
        for fold, epoch, count, values in rows
    ]
    return table(("fold", "best epoch", "samples", *metrics), cells, "t" + "n" * (2 + len(metrics)))


# One run.


def _part(run: _Run, samples: int, cache: str | Path | None) -> Part:
    summary, rows = run.summary, run.rows
    best = int(summary.get("best_epoch") or 0)
    row = rows[best - 1] if 0 < best <= len(rows) else rows[-1] if rows else {}
    figures = [("epochs", f"{len(rows):,}")]
    figures += [(_plain(name), f"{row[name]:.4f}") for name in run.metrics if name in row]
    if rate := (summary.get("pace") or {}).get("images_per_second"):
        figures.append((f"{summary.get('unit', 'images')}/s", f"{rate:,.0f}"))
    sections = [
        _worst(run, samples, cache),
        *_curves("By steps of the optimizer", _charts(run)),
        *_mistakes(run),
        *_seconds(summary),
        *_pace(summary),
        Section("Settings", "Those that are not shown are off.", [Block("facts", _settings(run))]),
        Section("Data", "", [Block("facts", _data(run))]),
    ]
    return Part(run.folder.resolve().name, _state(summary, best), [*figures, *_time(summary)], sections)


def _plain(name: str) -> str:
    return name.removeprefix(_VALID)


def _time(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("time", seconds_text(summary["wall_seconds"]))] if summary.get("wall_seconds") else []


def _state(summary: Mapping[str, Any], best: int) -> str:
    parts = ["Finished." if summary.get("finished") else "Not finished."]
    if summary.get("stopped_early"):
        parts.append("The run stopped early.")
    if best:
        parts.append(f"Epoch {best} was best by {summary.get('watched', '')}; the figures are those of that epoch.")
    return " ".join([*parts, str(summary.get("advice") or "")])


def _curves(note: str, charts: Sequence[Block]) -> list[Section]:
    drawn = [each for each in charts if each.content["lines"]]
    return [Section("Curves", f"{note}, from left to right.", drawn)] if drawn else []


def _charts(run: _Run) -> list[Block]:
    losses, rates = (run.summary.get(name) or () for name in ("losses", "learning_rates"))
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


def _seconds(summary: Mapping[str, Any]) -> list[Section]:
    parts = {str(name): float(spent) for name, spent in (summary.get("seconds") or {}).items()}
    spent = {name.replace("_", " "): seconds for name, seconds in parts.items() if seconds > 0}
    if not spent:
        return []
    wall = float(summary.get("wall_seconds", 0.0)) or sum(parts.values())
    note = f"{seconds_text(wall)} in all, summed over the times that the run was resumed."
    return [Section("Time", note, [bars(spent, wall, seconds_text)])]


def _pace(summary: Mapping[str, Any]) -> list[Section]:
    pace, unit = summary.get("pace") or {}, summary.get("unit", "images")
    if not pace.get("steps"):
        return []
    ceiling, idle = pace.get("ceiling_images_per_second"), pace.get("ceiling_idle")
    replay = "not measured" if idle is None else f"by {idle:.1%}: {ceiling:,.0f} {unit}/s on data already on the device"
    pairs = {
        "backend": f"{summary.get('backend', '')}, cores: {summary.get('cores', 1)}",
        "device": str(summary.get("device") or "not known"),
        "rate": f"{pace['images_per_second']:,.0f} {unit}/s",
        "step": f"{pace['step_seconds'] * 1e3:,.1f} ms, mean of {pace['steps']:,}",
        "idle": f"{pace['device_idle']:.1%} of that time, the device ran nothing",
        "hint: the loop waited for data": f"{pace['waited']:.1%}, also while the device still had work",
        "hint: slower than a replay": replay,
        "compiles": f"{pace['compiles']:,} after the warm-up",
        "received": f"{pace['received_bytes'] / 1e6:,.0f} MB",
    }
    note = "After the warm-up. The replay takes the same steps on data that are already on the device."
    return [Section("Idle time", note, [Block("facts", pairs.items())])]


def _settings(run: _Run) -> Iterator[tuple[str, str]]:
    settings = dict(run.info.get("settings") or {})
    augment = settings.pop("augment", {})
    task = {"task found": run.info.get("task", ""), "outputs": run.info.get("outputs", "")}
    for name, value in {**task, **settings, **augment}.items():
        if value is not None and value is not False and value not in ("", [], {}):
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
        return Section(title, f"The pictures are left out: {error}")
    note = f"{len(chosen):,} of {len(arrays['errors']):,}, the most wrong first."
    return Section(title, note, [Block("legend", colours), Block("pictures", figures)])


def _open_dataset(run: _Run, cache: str | Path | None) -> CachedDataset:
    described = run.info["validation"]
    place = cache or described["cache"]
    if not is_url(place) and not (folder := locate(split_version(place)[0])).exists():
        raise TpucacheError(
            f"the cache of the validation samples is no longer at {folder}. Say by --valid where that cache is"
        )
    shown, frequencies = described.get("resolution"), described.get("frequencies")
    size = tuple(shown) if isinstance(shown, list) else shown
    with CachedDataset(place, described["variant"], resolution=size, frequencies=frequencies) as whole:
        positions = run.arrays["positions"]
        is_there = not len(positions) or 0 <= positions.min() <= positions.max() < whole.manifest.samples
        dataset = whole.select(positions) if is_there else None
        if dataset is None or dataset.digest != described["digest"]:
            raise TpucacheError(
                f"{whole.place} has other records or labels than the cache that the run was validated on. Give "
                "that cache by --valid"
            )
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
        shown = [make_picture(fields, classes, ", ".join(texts))]
        return Figure(shown, texts, [path], corner)
    (at,) = np.flatnonzero(arrays["shown"] == row)[:1]
    masks = {"true": fields[MASK], "predicted": arrays["maps"][at][..., None]}
    texts = [f"{head}: {_describe_mask(mask, classes)}" for head, mask in masks.items()]
    shown = [
        make_picture({**fields, MASK: mask}, classes, text, head)
        for text, (head, mask) in zip(texts, masks.items(), strict=True)
    ]
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
    parts = [f"{_mask_class(number, classes)} {counts[number] / mask.size:.1%}" for number in found[:_NAMED]]
    rest = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    return f"{', '.join(parts)}{rest}" if found else "nothing"


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
        return [Section("Confusion", f"{note} In pixels.", _confusion(run, arrays["confusion"], "pixels", "IoU"))]
    if "predictions" in arrays:
        labels, predictions = arrays["labels"].astype(np.int64), arrays["predictions"].astype(np.int64)
        outputs = int(max(run.info.get("outputs", 0), labels.max(initial=-1) + 1, predictions.max(initial=-1) + 1))
        pairs, counts = np.unique((labels * outputs + predictions)[labels >= 0], return_counts=True)
        often = _most_often(run, pairs, counts, outputs)
        if outputs > _MATRIX:
            return [Section("Confusion", "The most frequent confusions.", often)] if often else []
        whole = np.zeros((outputs, outputs), np.int64)
        whole.reshape(-1)[pairs] = counts
        return [Section("Confusion", note, [*_confusion(run, whole, "samples", "precision"), *often])]
    if run.info.get("task") == "multilabel" and "values" in arrays:
        truth, predicted = arrays["labels"] > 0.5, arrays["values"] > 0.5
        block = _by_class(run, "samples", (truth & predicted).sum(0), truth.sum(0), predicted.sum(0), "F1")
        return [Section("Classes", "Predictions are those above one half.", [block])]
    return []


def _most_often(run: _Run, pairs: Array, counts: Array, outputs: int) -> list[Block]:
    wrong = pairs // outputs != pairs % outputs
    order = np.argsort(-counts[wrong], kind="stable")[:_PAIRS]
    rows = [
        (*(class_name(number, run.classes) for number in divmod(pair, outputs)), f"{count:,}")
        for pair, count in zip(pairs[wrong][order].tolist(), counts[wrong][order].tolist(), strict=True)
    ]
    return [table(("label", "predicted as", "samples"), rows, "ttn")] if rows else []


def _confusion(run: _Run, counts: Array, unit: str, last: str) -> list[Block]:
    """Return the confusion matrix, unless it is too large to be read, and a table of figures for each class."""
    if counts.shape[0] != counts.shape[1]:
        raise ValueError(f"the confusion matrix has {len(counts)} rows and {len(counts.T)} columns")
    by_class = _by_class(run, unit, counts.diagonal(), counts.sum(1), counts.sum(0), last)
    names = [class_name(number, run.classes) for number in range(len(counts))]
    return [matrix(names, counts), by_class] if len(counts) <= _MATRIX else [by_class]


def _by_class(run: _Run, unit: str, right: Array, total: Array, found: Array, last: str) -> Block:
    figures = {"recall": (right, total), "precision": (right, found)}
    figures[last] = {"F1": (2 * right, total + found), "IoU": (right, total + found - right)}.get(last, (right, found))
    rows = [
        (
            class_name(at, run.classes),
            f"{total[at]:,.0f}",
            *(f"{part[at] / whole[at]:.3f}" if whole[at] else "\u2013" for part, whole in figures.values()),
        )
        for at in range(len(total))
    ]
    return table(("class", unit, *figures), rows, "tn" + "n" * len(figures))
