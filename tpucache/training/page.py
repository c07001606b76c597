"""The page of a run: curves, seconds, idle time, mistakes and settings.

The page of a run of folds has a section for each fold.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache.errors import DependencyError, TpucacheError, TrainingError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.find import locate
from tpucache.report.page import (
    Chart,
    Figure,
    Ink,
    Page,
    Sheet,
    lines_chart,
    look_of,
    make_bars,
    make_page,
    make_picture,
)
from tpucache.report.records import Records
from tpucache.report.text import class_name, describe_mask, mask_class, seconds_text
from tpucache.runs import FOLDS_NAME
from tpucache.store.fields import MASK
from tpucache.store.files import is_url
from tpucache.store.history import split_version
from tpucache.training.page_files import FoldsFiles, RunFiles, read_folds_run, read_run
from tpucache.types import Array

Points = list[tuple[float, float]]

SAMPLES: Final = 12

_PACKAGE: Final = "tpucache.training"  # its folder `templates` has the templates

_FIRST_HUE: Final = 255  # the hue of the first fold's curve, in degrees
_DASHED: Final = 8  # from this many folds on, every second curve is dashed
_POINTS: Final = 600  # points in a curve of single steps, at most
_LOSS, _COUNT, _VALID = "valid_loss", "valid_samples", "valid_"

_LEAST_SECONDS: Final = 0.1

_MATRIX: Final = 30  # classes of a confusion matrix, at most: a larger one cannot be read
_ROWS: Final = 1000
_PAIRS: Final = 20
_COLUMNS: Final = 6  # values of a sample in a caption, at most
_HEADS: Final = {"classes": ("samples", "recall", "precision"), "mask": ("pixels", "recall", "IoU")}
_ROWS_ARE: Final = "A row for each true class, a column for each predicted one."

# Errors from reading values of files that do not belong together.
_MISFITS: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def report_run(run: str | Path, samples: int = SAMPLES, *, cache: str | Path | None = None) -> Page:
    """Return a page about a run: curves, seconds, idle time, confusion, wrong samples and settings.

    The page of a run of all folds shows the scores, curves and seconds of all folds, then a part for each fold. The run
    may be unfinished. At most `samples` wrong samples are shown. They are read from the cache at `cache`, or else from
    the cache that the run has used; if this cache is gone, the page says so and has no pictures. The page has no script
    and loads no other file.

    Raises UsageError for a folder without a run, TrainingError for files that cannot be read, DependencyError without
    jinja2.
    """
    folder = Path(run)
    if not (folder / FOLDS_NAME).exists():
        files = read_run(folder)
        return make_page("run.html", files.name, {"run": _run_values(files, samples, cache)}, package=_PACKAGE)
    folds = read_folds_run(folder)
    try:
        values = _folds_values(folds)
    except _MISFITS as error:
        raise _misfit(folder, error) from error
    runs = [_run_values(fold, samples, cache) for fold in folds.runs.values()]
    return make_page("folds.html", folds.name, {**values, "runs": runs}, package=_PACKAGE)


def _misfit(folder: Path, error: Exception) -> TrainingError:
    return TrainingError(f"the files in {folder} do not belong together: {error!r}. Copy the run again")


# A run of all folds.


def _folds_values(folds: FoldsFiles) -> dict[str, Any]:
    summary = folds.summary
    done = sum(bool(score["finished"]) for score in _by_fold(folds).values())
    figures = [("folds", f"{len(folds.names):,}")]
    figures += [(name, f"{value:.4f}") for name, value in (summary.get("out_of_fold") or {}).items()]
    if summary.get("wall_seconds"):
        figures.append(("time", seconds_text(summary["wall_seconds"])))
    state = f"Not finished: {done:,} of {len(folds.names):,} folds are trained."
    if summary.get("finished"):
        state = "Finished. The figures are over all samples, each predicted by the model that has not seen it."
    inks = fold_inks(list(folds.runs))
    return {
        "figures": figures,
        "state": state,
        "scores": _scores(folds),
        "folds": [(ink, f"fold {fold}") for fold, ink in inks.items()],
        "charts": _fold_charts(folds, inks),
        "seconds": _seconds(summary),
    }


def _by_fold(folds: FoldsFiles) -> Mapping[str, Mapping[str, Any]]:
    """A fold that has not begun has no scores."""
    return {str(score["fold"]): score for score in folds.summary.get("folds") or ()}


class _Score(NamedTuple):
    """A row of the scores. `part` is the number of the fold's section on the page; None if its run has not begun."""

    title: str
    cells: Sequence[str]
    part: int | None = None


def _scores(folds: FoldsFiles) -> dict[str, Any]:
    scores, summary = _by_fold(folds), folds.summary
    names = list(dict.fromkeys(itertools.chain.from_iterable(score["metrics"] for score in scores.values())))
    parts = {fold: number for number, fold in enumerate(folds.runs, 1)}
    rows = []
    for fold in folds.names:
        score = scores.get(fold, {"metrics": {}})
        epoch = f"{score['best_epoch']:,}" if score.get("best_epoch") else ""
        count = f"{score['samples']:,}" if score.get("samples") else ""
        rows.append(_Score(fold, (epoch, count, *_score_cells(score["metrics"], names)), parts.get(fold)))
    if summary.get("finished"):
        spread = {name: f"\u00b1 {value:.4f}" for name, value in summary["deviation"].items()}
        rows.append(_Score("mean", ("", "", *_score_cells(summary["mean"], names))))
        rows.append(_Score("deviation", ("", "", *(spread.get(name, "") for name in names))))
        rows.append(_Score("out of fold", ("", "", *_score_cells(summary["out_of_fold"], names))))
    heads = ("fold", "best epoch", "samples", *names)
    return {"heads": heads, "kinds": "t" + "n" * (len(heads) - 1), "rows": rows}


def _score_cells(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [f"{metrics[name]:.4f}" if name in metrics else "" for name in names]


def fold_inks(folds: Sequence[str]) -> dict[str, Ink]:
    """Return the colour and line style of each fold's curve.

    The hues have equal distances. From 8 folds on, every second curve is dashed.
    """
    styles = ("fold", "fold dashed") if len(folds) >= _DASHED else ("fold",)
    hues = [round(_FIRST_HUE + 360 * number / max(1, len(folds))) % 360 for number in range(len(folds))]
    return {fold: Ink(styles[at % len(styles)], hue) for at, (fold, hue) in enumerate(zip(folds, hues, strict=True))}


def _fold_charts(folds: FoldsFiles, inks: Mapping[str, Ink]) -> list[tuple[str, Chart]]:
    names = dict.fromkeys(name for run in folds.runs.values() for row in run.rows for name in row if _is_metric(name))
    charts = []
    for name in names:
        lines = [(inks[fold], _points_of(run.rows, name)) for fold, run in folds.runs.items()]
        if chart := lines_chart(lines, f"{_plain_name(name)} by step", _span(folds.runs.values())):
            charts.append((_plain_name(name), chart))
    return charts


# One run.


def _run_values(run: RunFiles, samples: int, cache: str | Path | None) -> dict[str, Any]:
    """The parameters are those of `report_run`. Raises TrainingError for files that do not belong together."""
    try:
        summary, rows = run.summary, run.rows
        best = int(summary.get("best_epoch") or 0)
        row = rows[best - 1] if 0 < best <= len(rows) else rows[-1] if rows else {}
        figures = [("epochs", f"{len(rows):,}")]
        figures += [(_plain_name(name), f"{value:.4f}") for name, value in row.items() if _is_metric(name)]
        pace = summary.get("pace") or {}
        if pace.get("images_per_second"):
            figures.append((f"{summary.get('unit', 'images')}/s", f"{pace['images_per_second']:,.0f}"))
        if summary.get("wall_seconds"):
            figures.append(("time", seconds_text(summary["wall_seconds"])))
        return {
            "name": run.name,
            "figures": figures,
            "state": _state(summary, best),
            "worst": _worst(run, samples, cache),
            "charts": _charts(run),
            "mistakes": _mistakes(run),
            "seconds": _seconds(summary),
            "pace": _pace(summary),
            "settings": _settings(run),
            "data": _data(run),
        }
    except _MISFITS as error:
        raise _misfit(run.folder, error) from error


def _state(summary: Mapping[str, Any], best: int) -> str:
    parts = ["Finished." if summary.get("finished") else "Not finished."]
    if summary.get("stopped_early"):
        parts.append("The run stopped early.")
    if best:
        parts.append(f"Epoch {best} was best by {summary.get('watched', '')}; the figures are those of that epoch.")
    if summary.get("advice"):
        parts.append(str(summary["advice"]))
    return " ".join(parts)


def _charts(run: RunFiles) -> list[tuple[list[tuple[Ink, str]], Chart | None]]:
    """Return a chart of the losses, one of each metric, and one of the learning rate, each after its legend."""
    losses = [float(loss) for loss in run.summary.get("losses") or ()]
    blue, accent, green = Ink("blue"), Ink("accent"), Ink("green")
    lines: list[tuple[Ink, Points]] = []
    names = []
    if losses:
        lines.append((Ink("blue faint"), _thinned(losses)))
        names.append((Ink("blue faint"), "training, each step" if len(losses) <= _POINTS else "training, steps"))
    for ink, name, text in ((blue, "train_loss", "training, mean of an epoch"), (accent, _LOSS, "validation")):
        if points := _points_of(run.rows, name):
            lines.append((ink, points))
            names.append((ink, text))
    span = _span([run])
    charts = [(names, lines_chart(lines, "losses by step", span))] if lines else []
    for name in dict.fromkeys(name for row in run.rows for name in row if _is_metric(name) and name != _LOSS):
        chart = lines_chart([(accent, _points_of(run.rows, name))], f"{_plain_name(name)} by step", span)
        charts.append(([(accent, _plain_name(name))], chart))
    charts.append(([(green, "learning rate")], lines_chart([(green, _rates(run))], "learning rate by step", span)))
    return [(legend, chart) for legend, chart in charts if chart]


def _span(runs: Collection[RunFiles]) -> tuple[float, float]:
    steps = [row["step"] for run in runs for row in run.rows if np.isfinite(row.get("step", np.nan))]
    return 1, max([*steps, *(len(run.summary.get("losses") or ()) for run in runs), 1])


def _rates(run: RunFiles) -> Points:
    """Return at most about 600 points. Runs of earlier versions have only one learning rate for each epoch."""
    rates = [float(rate) for rate in run.summary.get("learning_rates") or ()]
    each = -(-len(rates) // _POINTS)
    chosen = sorted({*range(0, len(rates), each), len(rates) - 1}) if rates else []
    return [(step + 1, rates[step]) for step in chosen] or _points_of(run.rows, "lr")


def _points_of(rows: Sequence[Mapping[str, float]], name: str) -> Points:
    return [(row["step"], row[name]) for row in rows if name in row and "step" in row]


def _thinned(losses: Sequence[float]) -> Points:
    """Return at most 600 points: mean losses of consecutive steps, each drawn at the last of its steps."""
    each = -(-len(losses) // _POINTS)
    parts = [losses[first : first + each] for first in range(0, len(losses), each)]
    return [(number * each + len(part), sum(part) / len(part)) for number, part in enumerate(parts)]


def _is_metric(name: str) -> bool:
    return name.startswith(_VALID) and name != _COUNT


def _plain_name(name: str) -> str:
    return name.removeprefix(_VALID)


def _seconds(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a bar for each part of a run, or of all folds, that took at least 0.1 s; None if there is no such part."""
    parts = {str(name): float(spent) for name, spent in (summary.get("seconds") or {}).items()}
    pairs = [
        (name.replace("_", " "), spent)
        for name, spent in sorted(parts.items(), key=lambda item: -item[1])
        if spent >= _LEAST_SECONDS
    ]
    if not pairs:
        return None
    wall = float(summary.get("wall_seconds", 0.0)) or sum(parts.values())
    return {
        "note": f"{seconds_text(wall)} in all, summed over the times that the run was resumed.",
        "bars": make_bars(pairs, pairs[0][1], wall, seconds_text),
    }


def _pace(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    pace = summary.get("pace") or {}
    if not pace.get("steps"):
        return []
    unit = summary.get("unit", "images")
    ceiling, idle = pace.get("ceiling_images_per_second"), pace.get("ceiling_idle")
    return [
        ("backend", f"{summary.get('backend', '')}, cores: {summary.get('cores', 1)}"),
        *([("device", str(summary["device"]))] if summary.get("device") else []),
        ("rate", f"{pace['images_per_second']:,.0f} {unit}/s"),
        ("step", f"{pace['step_seconds'] * 1e3:,.1f} ms, mean of {pace['steps']:,}"),
        ("idle", f"{pace['device_idle']:.1%} of that time, the device ran nothing"),
        ("hint: the loop waited for data", f"{pace['waited']:.1%}, also while the device still had work"),
        (
            "hint: slower than a replay",
            "not measured" if idle is None else f"by {idle:.1%}: {ceiling:,.0f} {unit}/s on data already on the device",
        ),
        ("compiles", f"{pace['compiles']:,} after the warm-up"),
        ("received", f"{pace['received_bytes'] / 1e6:,.0f} MB"),
    ]


def _settings(run: RunFiles) -> list[tuple[str, str]] | None:
    """Return the settings in `run.json` as texts, without those that are None, False or empty; None without it."""
    if not run.info:
        return None
    settings = dict(run.info.get("settings") or {})
    augment = settings.pop("augment", {})
    task = {"task found": run.task, "outputs": run.info.get("outputs", "")} if run.task else {}
    values = {**task, **settings, **augment}
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in values.items()
        if value is not None and value is not False and value not in ("", [], {})
    ]


def _data(run: RunFiles) -> list[tuple[str, str]]:
    parts = [(name, run.info.get(name)) for name in ("training", "validation")]
    return [
        (name, f"{part['samples']:,} samples, variant {part['variant']}, of {part['cache']}")
        for name, part in parts
        if part
    ]


# What a run got wrong.


class _Wrong(NamedTuple):
    """A sample that the model predicted wrongly: its label, its prediction, and for a mask its predicted `map`.

    `row` is its row in the arrays of the run. `figure` is a text that says how sure or how far off the prediction was.
    """

    row: int
    label: str
    prediction: str
    figure: str
    map: Array | None = None


def _worst(run: RunFiles, count: int, cache: str | Path | None) -> Sheet:
    """Return pictures of the `count` most wrong validation samples, or a note that says why there are none.

    The samples are read from the cache at `cache`, or else from the cache that the run was validated on. Only the
    pictures need Pillow.
    """
    if "errors" not in run.arrays:
        reason = "The run has no validation samples"
        if run.info.get("validation") is not None or not run.info:
            reason = "No epoch of the run has kept its predictions"
        return Sheet(f"{reason}.")
    chosen = _find_worst(run, count)
    if not chosen:
        return Sheet("No sample is wrong.")
    try:
        records = _open_records(run, cache)
    except TpucacheError as error:
        return Sheet(f"The pictures are left out: {error}")
    image = records.image
    if image is None:
        return Sheet("The records have no images.")
    look, shown = look_of(records.manifest, image), run.info["validation"]["variant"]
    try:
        figures = [_figure(run, records, wrong, look, shown) for wrong in chosen]
        colours = _mask_colours(run) if "maps" in run.arrays else ()
    except DependencyError as error:
        return Sheet(f"The pictures are left out: {error}")
    note = f"{len(chosen):,} of {len(run.arrays['errors']):,}, the most wrong first."
    return Sheet(note, figures, look, 320 if look == "drawn" else 160, colours)


def _open_records(run: RunFiles, cache: str | Path | None) -> Records:
    """Raises TpucacheError if the records are gone or have changed."""
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
        samples = whole.manifest.samples
        if len(positions) and not 0 <= positions.min() <= positions.max() < samples:
            raise TpucacheError(
                f"{whole.place} has {samples:,} samples, fewer than the cache that the run was validated on. "
                "Give that cache by --valid"
            )
        dataset = whole.select(positions)
        if dataset.digest != described["digest"]:
            raise TpucacheError(
                f"{whole.place} has other records or labels than the cache that the run was validated on. Give "
                "that cache by --valid"
            )
        return Records(dataset)


def _find_worst(run: RunFiles, count: int) -> list[_Wrong]:
    """Return the `count` most wrong samples, or fewer if fewer are wrong.

    For masks, these are among the samples whose predicted maps the run has kept.
    """
    arrays, errors = run.arrays, run.arrays["errors"]
    if "maps" in arrays:
        map_of_row = {int(row): found for row, found in zip(arrays["shown"], arrays["maps"], strict=True)}
        rows = sorted(map_of_row, key=lambda row: -errors[row])[:count]
        return [_Wrong(row, "", "", f"IoU {1 - errors[row]:.3f}", map_of_row[row]) for row in rows]
    rows = np.argsort(-errors, kind="stable").tolist()
    wrong = (row for row in rows if "predictions" not in arrays or _is_wrong(run, row))
    return [_describe(run, row) for row in itertools.islice(wrong, count)]


def _is_wrong(run: RunFiles, row: int) -> bool:
    label = int(run.arrays["labels"][row])
    return label >= 0 and label != int(run.arrays["predictions"][row])


def _describe(run: RunFiles, row: int) -> _Wrong:
    arrays, names = run.arrays, run.classes
    if "predictions" in arrays:
        label, prediction = (class_name(int(arrays[name][row]), names) for name in ("labels", "predictions"))
        figure = f"{arrays['probabilities'][row]:.3f}, the true one {1 - arrays['errors'][row]:.3f}"
        return _Wrong(row, label, prediction, figure)
    labels, values = arrays["labels"][row], arrays["values"][row]
    columns = np.argsort(-np.abs(labels - values), kind="stable")[:_COLUMNS]
    if len(values) == 1 and not names:
        return _Wrong(row, f"{labels[0]:.6g}", f"{values[0]:.6g}", f"off by {arrays['errors'][row]:.4g}")
    shown = [[f"{class_name(int(c), names)} {side[c]:.4g}" for c in columns] for side in (labels, values)]
    return _Wrong(row, ", ".join(shown[0]), ", ".join(shown[1]), f"off by {arrays['errors'][row]:.4g}")


def _figure(run: RunFiles, records: Records, wrong: _Wrong, look: str, variant: int) -> Figure:
    position = int(run.arrays["positions"][wrong.row])
    fields, path = records.read(position, variant), records.table.paths[position]
    if wrong.map is None:
        picture = make_picture(fields, run.classes, look, f"{wrong.label}, predicted {wrong.prediction}")
        return Figure([picture], wrong.label, wrong.figure, path, wrong.prediction)
    masks = {"true": fields.get(MASK), "predicted": wrong.map[..., None]}
    texts = {head: "" if mask is None else describe_mask(mask, run.classes) for head, mask in masks.items()}
    pictures = [
        make_picture({**fields, MASK: mask}, run.classes, look, f"{head}: {texts[head]}", head)
        for head, mask in masks.items()
        if mask is not None
    ]
    return Figure(pictures, texts["true"], wrong.figure, path, texts["predicted"])


def _mask_colours(run: RunFiles) -> list[tuple[str, str]]:
    """Return the classes that have a colour of their own in pictures of masks, each with its CSS colour."""
    from tpucache.report.draw import PALETTE

    outputs = max(int(run.info.get("outputs", 0)), len(run.classes))
    numbers = range(1, min(outputs, len(PALETTE) + 1))
    return [(mask_class(each, run.classes), f"rgb{PALETTE[each - 1]}") for each in numbers]


class _PageTable(NamedTuple):
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    kinds: str


class _Matrix(NamedTuple):
    """A confusion matrix.

    `rows` has, by true and then by predicted class, the number of samples or pixels and its percentage of the true
    class, as texts.
    """

    names: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str]]]


class _Mistakes(NamedTuple):
    title: str
    note: str
    tables: Sequence[_PageTable]
    matrix: _Matrix | None = None


def _mistakes(run: RunFiles) -> _Mistakes | None:
    """Return the section about mistakes; None if the run's files lack what it needs."""
    if "predictions" in run.arrays:
        labels, predictions = run.arrays["labels"].astype(np.int64), run.arrays["predictions"].astype(np.int64)
        outputs = max([int(run.info.get("outputs", 0)), *(labels + 1).tolist(), *(predictions + 1).tolist()])
        return _class_mistakes(run, labels[labels >= 0], predictions[labels >= 0], outputs)
    if "confusion" in run.arrays:
        by_class, matrix = _matrix_tables(run, run.arrays["confusion"], "mask")
        return _Mistakes("Confusion", f"{_ROWS_ARE} In pixels.", [by_class], matrix)
    return _multilabel_mistakes(run) if run.task == "multilabel" and "values" in run.arrays else None


def _class_mistakes(run: RunFiles, labels: Array, predictions: Array, outputs: int) -> _Mistakes | None:
    pairs, counts = np.unique(labels * outputs + predictions, return_counts=True)
    wrong = pairs // outputs != pairs % outputs
    order = np.argsort(-counts[wrong], kind="stable")[:_PAIRS]
    often = [
        (class_name(int(pair) // outputs, run.classes), class_name(int(pair) % outputs, run.classes), f"{count:,}")
        for pair, count in zip(pairs[wrong][order], counts[wrong][order], strict=True)
    ]
    most = [_PageTable(("label", "predicted as", "samples"), often, "ttn")] if often else []
    if outputs > _MATRIX:
        return _Mistakes("Confusion", "The most frequent confusions.", most) if most else None
    matrix = np.zeros((outputs, outputs), np.int64)
    matrix.reshape(-1)[pairs] = counts
    by_class, shown = _matrix_tables(run, matrix, "classes")
    return _Mistakes("Confusion", _ROWS_ARE, [by_class, *most], shown)


def _matrix_tables(run: RunFiles, counts: Array, kind: str) -> tuple[_PageTable, _Matrix | None]:
    """Return a table of figures for each class, and the confusion matrix: None for more than 30 classes.

    `counts` has a row for each true and a column for each predicted class. `kind` is "classes" for counts of samples,
    or "mask" for counts of pixels.
    """
    total, found, right = counts.sum(1), counts.sum(0), counts.diagonal()
    if len(total) != len(found):
        raise ValueError(f"the confusion matrix has {len(total)} rows and {len(found)} columns")
    names = [class_name(number, run.classes) for number in range(len(counts))]
    whole = found if kind == "classes" else total + found - right
    figures = [
        (name, f"{total[at]:,.0f}", _share(right[at], total[at]), _share(right[at], whole[at]))
        for at, name in enumerate(names)
    ]
    by_class = _PageTable(("class", *_HEADS[kind]), figures[:_ROWS], "tnnn")
    if len(counts) > _MATRIX:
        return by_class, None
    shares = counts / np.maximum(total, 1)[:, None]
    rows = [
        [(f"{count:,.0f}", str(math.ceil(100 * share))) for count, share in zip(*row, strict=True)]
        for row in zip(counts, shares, strict=True)
    ]
    return by_class, _Matrix(names, rows)


def _multilabel_mistakes(run: RunFiles) -> _Mistakes:
    truth, predicted = run.arrays["labels"] > 0.5, run.arrays["values"] > 0.5
    both = (truth & predicted).sum(0)
    rows = [
        (
            class_name(at, run.classes),
            f"{has:,}",
            _share(both[at], has),
            _share(both[at], found),
            _share(2 * both[at], has + found),
        )
        for at, (has, found) in enumerate(zip(truth.sum(0).tolist(), predicted.sum(0).tolist(), strict=True))
    ]
    table = _PageTable(("class", "samples", "recall", "precision", "F1"), rows[:_ROWS], "tnnnn")
    return _Mistakes("Classes", "Predictions are those above one half.", [table])


def _share(part: Any, whole: Any) -> str:
    return f"{part / whole:.3f}" if whole else "\u2013"
