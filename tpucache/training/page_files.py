"""Reads the files of a run for the run's page. All files are checked, and none is trusted."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import FormatError, TrainingError, UsageError
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
from tpucache.store.files import check_stored, open_file, open_text, read_file
from tpucache.strict_json import LARGEST, parse_object
from tpucache.types import Array

_SHOWN: Final = 200  # characters of the reason in a message, at most

#: The dimensions of the arrays of validation.npz.
_DIMENSIONS: Final = {
    "positions": 1,
    "errors": 1,
    "predictions": 1,
    "probabilities": 1,
    "values": 2,
    "confusion": 2,
    "shown": 1,
    "maps": 3,
}
#: The arrays that have a row for each sample.
_OF_SAMPLES: Final = ("positions", "errors", "labels", "predictions", "probabilities", "values")


@dataclass(frozen=True)
class RunFiles:
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
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.resolve().name

    @property
    def task(self) -> str:
        """The name of the task; "" if it is not known."""
        return str(self.info.get("task", ""))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; empty if the classes have no names."""
        return tuple(map(str, self.info.get("classes", ())))


@dataclass(frozen=True)
class FoldsFiles:
    """The contents of the files of a run of folds.

    `names` are the folds' names, `summary` is the report on all folds, and `runs` has, by fold, the files of the folds'
    runs that have begun.
    """

    folder: Path
    names: Sequence[str]
    summary: Mapping[str, Any]
    runs: Mapping[str, RunFiles]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.resolve().name


def read_run(folder: Path) -> RunFiles:
    """Return the contents of the files of a run, finished or not.

    Raises UsageError for a folder without a run, TrainingError for a damaged file.
    """
    if not is_run(folder):
        raise UsageError(f"{folder} holds no run: give the folder that `train --run` named")
    summary = _read_json(folder / REPORT_NAME) or _read_json(folder / ACCOUNT_NAME)
    return RunFiles(folder, _read_json(folder / INFO_NAME), summary, _read_rows(folder), _read_arrays(folder))


def read_folds_run(folder: Path) -> FoldsFiles:
    """Return the contents of the files of a run of all folds, finished or not.

    Raises TrainingError for a damaged file.
    """
    names = _read_json(folder / FOLDS_NAME).get("folds")
    if not isinstance(names, list):
        raise _unreadable(folder / FOLDS_NAME, "it has no list of folds")
    folders = {name: fold_folder(folder, name) for name in map(str, names)}
    runs = {name: read_run(each) for name, each in folders.items() if is_run(each)}
    return FoldsFiles(folder, list(folders), _read_json(folder / REPORT_NAME), runs)


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
        if array.ndim != _DIMENSIONS.get(name, array.ndim):
            raise _unreadable(path, f"{name}, {array.dtype} {array.shape}, has a wrong number of dimensions")
    if len({len(arrays[name]) for name in _OF_SAMPLES if name in arrays}) > 1:
        raise _unreadable(path, "its arrays have different numbers of samples")
    return arrays


def _unreadable(path: Path, reason: object) -> TrainingError:
    text = " ".join(str(reason).split())[:_SHOWN]
    return TrainingError(f"{path} cannot be read: {text}. Copy the run again")
