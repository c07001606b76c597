"""What a page shows of one run: curves, seconds, what it got wrong, and its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpucache.errors import TrainingError
from tpucache.report.page.markup import bars, escape, facts, legend, lines_chart, section
from tpucache.report.page.mistakes import confusion, worst
from tpucache.report.page.run_files import RunFiles

_POINTS: Final = 600  # of a curve of single steps
_LOSS, _COUNT, _VALID = "valid_loss", "valid_samples", "valid_"


def run_parts(files: RunFiles, samples: int, cache: Path | None) -> tuple[str, list[str]]:
    """Return the head and the sections about a run, with at most `samples` wrong samples; see `report_run`.

    Raises TrainingError for files that do not belong together.
    """
    try:
        head = f"{_top(files)}\n{worst(files, samples, cache)}"
        return head, [show(files) for show in (_curves, confusion, _seconds, _pace, _settings, _data)]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise TrainingError(
            f"the files in {files.folder} do not belong together: {error!r}. Copy the run again"
        ) from error


def _top(run: RunFiles) -> str:
    report, rows = run.report, run.rows
    best = int(report.get("best_epoch") or 0)
    row = rows[best - 1] if 0 < best <= len(rows) else rows[-1] if rows else {}
    figures = [("epochs", f"{len(rows):,}")]
    figures += [(escape(plain_name(name)), f"{value:.4f}") for name, value in row.items() if is_metric(name)]
    pace = report.get("pace") or {}
    if pace.get("images_per_second"):
        figures.append((f"{escape(report.get('unit', 'images'))}/s", f"{pace['images_per_second']:,.0f}"))
    if report.get("wall_seconds"):
        figures.append(("seconds", f"{report['wall_seconds']:,.0f}"))
    return top(run.name, _state(run, best), figures)


def top(name: str, state: str, figures: Sequence[tuple[str, str]]) -> str:
    """Return a heading: a name, and the state and the figures below it, HTML already."""
    shown = "".join(f"<div><dt>{title}</dt><dd>{value}</dd></div>" for title, value in figures)
    return f'<div class="top"><h1>{escape(name)}</h1><p>{state}</p><dl class="figures">{shown}</dl></div>'


def _state(run: RunFiles, best: int) -> str:
    report = run.report
    parts = ["Finished." if report.get("finished") else "Not finished."]
    if report.get("stopped_early"):
        parts.append("It stopped early.")
    if best:
        parts.append(f"Epoch {best} was best by {escape(report.get('watched', ''))}; the figures are of it.")
    if report.get("advice"):
        parts.append(escape(report["advice"]))
    return " ".join(parts)


def _curves(run: RunFiles) -> str:
    """Return a chart of the losses, and one of each metric and of the rate."""
    losses = [float(loss) for loss in run.report.get("losses") or ()]
    lines: list[tuple[str, Sequence[tuple[float, float]]]] = []
    names = []
    if losses:
        lines.append(("blue faint", _thinned(losses)))
        names.append(("blue", "training, each step"))
    for style, name, text in (("blue", "train_loss", "training, mean of an epoch"), ("accent", _LOSS, "validation")):
        if points := points_of(run.rows, name):
            lines.append((style, points))
            names.append((style, text))
    charts = [legend(names), lines_chart(lines, "losses by step")] if lines else []
    others = dict.fromkeys(name for row in run.rows for name in row if is_metric(name) and name != _LOSS)
    for style, name in (*(("accent", name) for name in others), ("green", "lr")):
        if chart := lines_chart([(style, points_of(run.rows, name))], f"{plain_name(name)} by step"):
            title = "learning rate" if name == "lr" else escape(plain_name(name))
            charts += [legend([(style, title)]), chart]
    return section("Curves", *charts, note="By steps of the optimizer, from left to right.")


def points_of(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """Return the value of a metric by step, of the epochs that have it."""
    return [(row["step"], row[name]) for row in rows if name in row and "step" in row]


def _thinned(losses: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most 600 points: each the mean of as many steps, at the last of them."""
    each = -(-len(losses) // _POINTS)
    parts = [losses[first : first + each] for first in range(0, len(losses), each)]
    return [(number * each + len(part), sum(part) / len(part)) for number, part in enumerate(parts)]


def _seconds(run: RunFiles) -> str:
    return seconds_section(run.report)


def seconds_section(report: Mapping[str, Any]) -> str:
    """Return a bar for the seconds of each part of a run, or of all folds."""
    seconds = {str(name): float(spent) for name, spent in (report.get("seconds") or {}).items() if spent > 0}
    if not seconds:
        return ""
    wall = float(report.get("wall_seconds", 0.0))
    hundredths = {name: round(100 * spent) for name, spent in sorted(seconds.items(), key=lambda item: -item[1])}
    shown = [(f"{name.replace('_', ' ')}, {seconds[name]:,.2f} s", count) for name, count in hundredths.items()]
    note = f"{wall:,.1f} seconds in all, over all processes that continued the run. Bars count hundredths."
    return section("Time", bars(shown, max(hundredths.values()), round(100 * wall)), note=note)


def _pace(run: RunFiles) -> str:
    pace, report = run.report.get("pace") or {}, run.report
    if not pace.get("steps"):
        return ""
    unit = escape(report.get("unit", "images"))
    ceiling, idle = pace.get("ceiling_images_per_second"), pace.get("ceiling_idle")
    pairs = [
        ("backend", f"{escape(report.get('backend', ''))}, cores: {report.get('cores', 1)}"),
        *([("device", escape(report["device"]))] if report.get("device") else []),
        ("rate", f"{pace['images_per_second']:,.0f} {unit}/s"),
        ("step", f"{pace['step_seconds'] * 1e3:,.1f} ms, mean of {pace['steps']:,}"),
        ("waited for data", f"{pace['waited']:.1%}"),
        ("idle, by the device", f"{pace['device_idle']:.1%}"),
        ("idle, by a replay", "not measured" if idle is None else f"{idle:.1%} against {ceiling:,.0f} {unit}/s"),
        ("compiles", f"{pace['compiles']:,} after the warm-up"),
        ("received", f"{pace['received_bytes'] / 1e6:,.0f} MB"),
    ]
    note = "After the warm-up. The replay takes the same steps on data that are already on the device."
    return section("Idle time", facts(pairs), note=note)


def _settings(run: RunFiles) -> str:
    settings = dict(run.info.get("settings") or {})
    augment = settings.pop("augment", {})
    task = {"task found": run.task, "outputs": run.info.get("outputs", "")} if run.task else {}
    values = {**task, **settings, **augment}
    known = {name: value for name, value in values.items() if value not in (None, "", [], False)}
    note = "Those that are not shown are off."
    if not run.info:
        return section("Settings", "<p>The run was made by an earlier version, which did not write them to a file.</p>")
    return section("Settings", facts((escape(name), escape(_text(value))) for name, value in known.items()), note=note)


def _data(run: RunFiles) -> str:
    parts = [(name, run.info.get(name)) for name in ("training", "validation")]
    pairs = [
        (name, f"{part['samples']:,} samples, variant {escape(part['variant'])}, of {escape(part['cache'])}")
        for name, part in parts
        if part
    ]
    return section("Data", facts(pairs)) if pairs else ""


def is_metric(name: str) -> bool:
    """Return whether a column of the history is a metric of the validation."""
    return name.startswith(_VALID) and name != _COUNT


def plain_name(name: str) -> str:
    """Return a metric's name as people know it."""
    return name.removeprefix(_VALID)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
