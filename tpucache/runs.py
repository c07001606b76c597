"""The files in a run's folder: what training writes and reports read."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import quote

from tpucache.errors import UsageError

BEST_NAME: Final = "best.pt"
LAST_NAME: Final = "last.pt"
#: Settings, task and data of the run, as JSON.
INFO_NAME: Final = "run.json"
#: What was predicted for the validation samples in the best epoch: named arrays, as `store.samples` encodes them.
VALIDATION_NAME: Final = "validation.npz"
HISTORY_NAME: Final = "history.csv"
REPORT_NAME: Final = "report.json"
ACCOUNT_NAME: Final = "account.json"
CURVES_NAME: Final = "curves.png"
RANGE_TEST_NAME: Final = "lr_finder.png"
RANGE_TEST_CSV_NAME: Final = "lr_finder.csv"

#: In the folder of a run that trains a model for each fold, which also has the folders of those.
FOLDS_NAME: Final = "folds.json"
#: In the folder of a run of all folds: that of a run on all of their samples.
REFIT_NAME: Final = "refit"
OUT_OF_FOLD_NAME: Final = "out_of_fold.csv"

#: Says which process trains in the folder, while one does.
LOCK_NAME: Final = "run.lock"

#: What only a run has.
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
    """Return the folder of one fold's run; what a file's name cannot have is written as in a URL."""
    return run / f"fold-{quote(fold, safe='', errors='surrogateescape')}"


def is_run(folder: Path) -> bool:
    """Return whether a folder has files of a run."""
    return any((folder / name).is_file() for name in _MARKS)


def check_no_run_file(path: Path) -> None:
    """Raise UsageError where a path, to be written for somebody else, is a file of a run."""
    place = path.resolve()
    if place.name in RUN_NAMES and is_run(place.parent):
        raise UsageError(f"{path} is a file of the run in {place.parent}: give another path to write to")
