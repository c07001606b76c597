"""The folder of a run of all folds: it has a run for each fold, and a report on all folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import TrainingError
from tpucache.runs import BEST_NAME, FOLDS_NAME, OUT_OF_FOLD_NAME, REPORT_NAME, fold_folder
from tpucache.training.run.contents import read_values
from tpucache.training.run.report import TrainReport, write_json

_VERSION: Final = 1
_VALID: Final = "valid_"


@dataclass(frozen=True)
class _Names:
    version: int
    folds: list[str]


@dataclass(frozen=True)
class FoldScore:
    """The result of one fold.

    `fold` is its name, and `run` the name of its run's folder. `finished` says whether this run is finished.
    `best_epoch` is its best epoch, from 1, and `metrics` are the validation metrics of that epoch. `samples` is the
    number of its validation samples.
    """

    fold: str
    run: str
    finished: bool
    best_epoch: int
    samples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class FoldsReport:
    """The report on the folds that have been trained so far.

    `mean` and `deviation` are those of the folds' metrics. `out_of_fold` has the metrics over all samples at once, each
    predicted by the model that has not seen it, and `output` is the CSV of these predictions. These four are empty
    until the last fold is finished. `seconds` are those of each part of the work, and `wall_seconds` is the total, over
    all folds.
    """

    backend: str
    cores: int
    folds: Sequence[FoldScore]
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    out_of_fold: Mapping[str, float]
    output: str
    finished: bool
    seconds: Mapping[str, float]
    wall_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = []
        for each in self.folds:
            state = f"best epoch {each.best_epoch:>3}" if each.finished else "unfinished    "
            lines.append(f"fold {each.fold:<4} {state}  {_shown(each.metrics)}")
        if self.finished:
            spread = {name: f"{mean:.4f} ± {self.deviation[name]:.4f}" for name, mean in self.mean.items()}
            lines.append(f"mean      {'  '.join(f'{name} {text}' for name, text in spread.items())}")
            lines.append(f"all       {_shown(self.out_of_fold)}  out of fold: {self.output}")
        return [*lines, f"time      {self.wall_seconds:,.1f} s"]


def read_folds(run: Path) -> list[str] | None:
    """Return the names of the folds of a run; None for another kind of run.

    Raises TrainingError if the file with the names cannot be read.
    """
    path = run / FOLDS_NAME
    try:
        values = read_values(path, _Names)
        if values["version"] != _VERSION:
            raise TrainingError(f"{path} was written by another version of tpucache: give another folder")
        return list(values["folds"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError) as error:
        raise TrainingError(f"{path} cannot be read: {error!r}. Copy the run again") from error


def write_folds(run: Path, names: Sequence[str]) -> None:
    """Write the names of a run's folds. Raises TrainingError when they cannot be written."""
    write_json(run / FOLDS_NAME, {"version": _VERSION, "folds": list(names)})


def run_folders(run: Path) -> list[Path]:
    """Return the folders of the models that predict for a run: one for each fold, or the run's own folder.

    Raises TrainingError for a fold without weights.
    """
    names = read_folds(run)
    if names is None:
        return [run]
    folders = [fold_folder(run, name) for name in names]
    missing = [name for name, folder in zip(names, folders, strict=True) if not (folder / BEST_NAME).exists()]
    if missing:
        raise TrainingError(
            f"{run} has no weights of fold {', '.join(missing)} yet: continue the run with train --folds --resume first"
        )
    return folders


def make_report(
    run: Path,
    reports: Mapping[str, TrainReport],
    device: tuple[str, int],
    account: tuple[Mapping[str, float], float],
    out_of_fold: Mapping[str, float] | None = None,
) -> FoldsReport:
    """Return the report on all folds, given the reports of their runs by the folds' names.

    `device` is the device's name and number of cores. `account` has the seconds, by part and in total, that are in no
    fold's report. Without the metrics `out_of_fold`, the run is not finished.
    """
    scores = [_make_score(fold, fold_folder(run, fold), report) for fold, report in reports.items()]
    seconds, wall = dict(account[0]), account[1] + sum(report.wall_seconds for report in reports.values())
    for report in reports.values():
        for part, spent in report.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + spent
    if out_of_fold is None:
        return FoldsReport(*device, scores, {}, {}, {}, "", False, seconds, wall)
    names = [name for name in scores[0].metrics if all(name in score.metrics for score in scores)]
    columns = {name: [score.metrics[name] for score in scores] for name in names}
    mean = {name: float(np.mean(values)) for name, values in columns.items()}
    deviation = {name: float(np.std(values)) for name, values in columns.items()}
    return FoldsReport(*device, scores, mean, deviation, out_of_fold, OUT_OF_FOLD_NAME, True, seconds, wall)


def _make_score(fold: str, run: Path, report: TrainReport) -> FoldScore:
    row = report.epochs[report.best_epoch - 1] if report.epochs else {}  # the last row where best_epoch is 0
    metrics = {name.removeprefix(_VALID): value for name, value in row.items() if name.startswith(_VALID)}
    samples = int(metrics.pop("samples", 0))
    return FoldScore(fold, run.name, report.finished, report.best_epoch, samples, metrics)


def write_report(run: Path, report: FoldsReport) -> None:
    """Write `report.json` atomically. Raises TrainingError when it cannot be written."""
    write_json(run / REPORT_NAME, report.to_dict())


def read_report(run: str | Path) -> FoldsReport | None:
    """Return the report in the folder of a run of all folds; None if there is no report.

    Raises TrainingError for a report that cannot be read.
    """
    path = Path(run) / REPORT_NAME
    try:
        values = read_values(path, FoldsReport)
        return FoldsReport(**{**values, "folds": [FoldScore(**score) for score in values["folds"]]})
    except FileNotFoundError:
        return None
    except (OSError, TypeError, KeyError) as error:
        raise TrainingError(f"{path} is not a report that can be read: {error!r}; remove it to continue") from error


def _shown(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
