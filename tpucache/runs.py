"""The files in a run's folder, which training writes and reports read."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import quote

from tpucache.errors import UsageError

BEST_NAME: Final = "best.pt"
LAST_NAME: Final = "last.pt"
#: A JSON file with the settings, the task and the description of the data of the run.
INFO_NAME: Final = "run.json"
#: The predictions for the validation samples in the best epoch: named arrays, encoded by `store.samples`.
VALIDATION_NAME: Final = "validation.npz"
HISTORY_NAME: Final = "history.csv"
REPORT_NAME: Final = "report.json"
ACCOUNT_NAME: Final = "account.json"
CURVES_NAME: Final = "curves.png"
RANGE_TEST_NAME: Final = "lr_finder.png"
RANGE_TEST_CSV_NAME: Final = "lr_finder.csv"

#: A file in the folder of a run of all folds; that folder also contains a folder for each fold.
FOLDS_NAME: Final = "folds.json"
OUT_OF_FOLD_NAME: Final = "out_of_fold.csv"

#: The lock of the process that trains in the folder.
LOCK_NAME: Final = "run.lock"

#: A folder with one of these files is the folder of a run.
_MARKS: Final = (LAST_NAME, BEST_NAME, INFO_NAME, HISTORY_NAME, FOLDS_NAME)
RUN_NAMES: Final = (
    *_MARKS,
    VALIDATION_NAME,
    REPORT_NAME,
    ACCOUNT_NAME,
    CURVES_NAME,
    RANGE_TEST_NAME,
    RANGE_TEST_CSV_NAME,
    OUT_OF_FOLD_NAME,
    LOCK_NAME,
)


def fold_folder(run: Path, fold: str) -> Path:
    return run / f"fold-{quote(fold, safe='', errors='surrogateescape')}"


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def check_no_run_file(path: Path) -> None:
    """Raise UsageError if `path`, to which a command other than train would write, is a file of a run."""
    place = path.resolve()
    if place.name in RUN_NAMES and is_run(place.parent):
        raise UsageError(f"{path} is a file of the run in {place.parent}: give another path to write to")
