"""The report of a run: one HTML page, with a part for each fold where all folds were trained."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpucache.errors import TrainingError
from tpucache.loading.find import locate
from tpucache.report.page.document import Report, make_page
from tpucache.report.page.markup import escape, legend, lines_chart, section, table
from tpucache.report.page.run_files import FoldsFiles, RunFiles, read_folds_run, read_run
from tpucache.report.page.run_parts import is_metric, plain_name, points_of, run_parts, seconds_section, top
from tpucache.runs import FOLDS_NAME

SAMPLES: Final = 12

_STYLES: Final = ("blue", "accent", "green", "red")


def report_run(run: str | Path, samples: int = SAMPLES, *, cache: str | Path | None = None) -> Report:
    """Return a page about a run: curves, seconds, idleness, confusion, at most `samples` wrong samples, settings.

    Of a run of all folds it shows the scores, the curves and the seconds of all, and then all that of each fold. The
    run may be unfinished. Its validation samples are read from the cache where they were, or at `cache`; where they
    are gone, the page says so and leaves the pictures out. It has no script and loads nothing from elsewhere.

    Raises UsageError for a folder without a run, TrainingError for files that cannot be read.
    """
    folder, place = Path(run), None if cache is None else locate(cache)
    if not (folder / FOLDS_NAME).exists():
        files = read_run(folder)
        return make_page(files.name, *run_parts(files, samples, place))
    folds = read_folds_run(folder)
    try:
        head = _top(folds)
        sections = [_scores(folds), *_curves(folds), seconds_section(folds.report)]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise TrainingError(f"the files in {run} do not belong together: {error!r}. Copy the run again") from error
    return make_page(folds.name, head, sections, [run_parts(fold, samples, place) for fold in folds.runs.values()])


def _top(folds: FoldsFiles) -> str:
    report = folds.report
    done = sum(bool(score["finished"]) for score in _by_fold(folds).values())
    figures = [("folds", f"{len(folds.names):,}")]
    figures += [(escape(name), f"{value:.4f}") for name, value in (report.get("out_of_fold") or {}).items()]
    if report.get("wall_seconds"):
        figures.append(("seconds", f"{report['wall_seconds']:,.0f}"))
    state = f"Not finished: {done:,} of {len(folds.names):,} folds are trained."
    if report.get("finished"):
        state = "Finished. The figures are over all samples, each predicted by the model that has not seen it."
    return top(folds.name, state, figures)


def _by_fold(folds: FoldsFiles) -> Mapping[str, Mapping[str, Any]]:
    """Return the scores of each fold that has begun."""
    return {str(score["fold"]): score for score in folds.report.get("folds") or ()}


def _scores(folds: FoldsFiles) -> str:
    """Return the table of the folds' scores, with their mean and the score over all samples."""
    scores, report = _by_fold(folds), folds.report
    names = list(dict.fromkeys(itertools.chain.from_iterable(score["metrics"] for score in scores.values())))
    anchors = {fold: number for number, fold in enumerate(folds.runs, 1)}
    rows = []
    for fold in folds.names:
        score = scores.get(fold, {"metrics": {}})
        title = f'<a href="#part-{anchors[fold]}">{escape(fold)}</a>' if fold in anchors else escape(fold)
        state = f"{score['best_epoch']:,}" if score.get("best_epoch") else ""
        count = f"{score['samples']:,}" if score.get("samples") else ""
        rows.append((title, state, count, *_cells(score["metrics"], names)))
    if report.get("finished"):
        spread = {name: f"\u00b1 {value:.4f}" for name, value in report["deviation"].items()}
        rows.append(("mean", "", "", *_cells(report["mean"], names)))
        rows.append(("deviation", "", "", *(spread.get(name, "") for name in names)))
        rows.append(("out of fold", "", "", *_cells(report["out_of_fold"], names)))
    heads = ("fold", "best epoch", "samples", *map(escape, names))
    note = "Of the best epoch of each fold. A fold's name leads to its own part of this page."
    return section("Scores", f'<div class="wide">{table(heads, rows, "t" + "n" * (len(heads) - 1))}</div>', note=note)


def _cells(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [f"{metrics[name]:.4f}" if name in metrics else "" for name in names]


def _curves(folds: FoldsFiles) -> list[str]:
    """Return a chart of each metric, with a line for each fold."""
    styles = dict(zip(folds.runs, itertools.cycle(_STYLES), strict=False))
    rows: dict[str, RunFiles] = dict(folds.runs)
    names = dict.fromkeys(name for run in rows.values() for row in run.rows for name in row if is_metric(name))
    shown = legend((style, f"fold {escape(fold)}") for fold, style in styles.items())
    charts = []
    for name in names:
        lines = [(styles[fold], points_of(run.rows, name)) for fold, run in rows.items()]
        if chart := lines_chart(lines, f"{plain_name(name)} by step"):
            charts.append(f"{legend([('', escape(plain_name(name)))])}{chart}")
    note = "Of the validation, by steps of the optimizer, from left to right."
    return [section("Curves", shown, *charts, note=note)] if charts else []
