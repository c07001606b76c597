"""The folder of a run: where it stands, so that it can go on, and its best weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.training.checkpoint import BEST_NAME, LAST_NAME, load_checkpoint, save_checkpoint
from tpucache.training.history import Row, write_history
from tpucache.training.learner import Learner
from tpucache.training.settings import TrainSettings, setting_differences, settings_from

_VERSION: Final = 1


@dataclass
class Stand:
    """How far a run is: steps done, the loss of each, a row an epoch, and the best value of what is watched."""

    steps: int
    losses: Sequence[float]
    rows: Sequence[Row]
    best: float | None


def open_run(
    run: Path, settings: TrainSettings, train_set: CachedDataset, resume: bool
) -> tuple[Stand, Mapping[str, Any]] | None:
    """Make a run's folder, or return where its last checkpoint stands and the learner's state there.

    Raises UsageError for a folder that has a run when it is not to be resumed, and when the settings or the data are
    not the run's; TrainingError for a checkpoint that cannot be read.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{run} cannot be written: {error}") from error
    path = run / LAST_NAME
    if not path.exists():
        return None
    if not resume:
        raise UsageError(f"{run} holds a run already: add --resume to go on with it, or give another folder")
    content = load_checkpoint(path)
    if content.get("version") != _VERSION:
        raise UsageError(f"{path} is of another version of tpucache: give another folder")
    changed = setting_differences(settings_from(content["settings"]), settings)
    data = {"fingerprint": train_set.manifest.fingerprint, "samples": len(train_set)}
    changed += [f"{name} {content[name]}, now {value}" for name, value in data.items() if content[name] != value]
    if changed:
        raise UsageError(
            f"{run} was begun otherwise: {'; '.join(changed)}. Give the same options and data to go on, "
            "or another folder"
        )
    return Stand(**content["stand"]), content["learner"]


def save_run(run: Path, learner: Learner, train_set: CachedDataset, stand: Stand) -> None:
    """Write the checkpoint that a run can go on from, and its history. Raises TrainingError."""
    content = _told(learner, train_set)
    save_checkpoint(run / LAST_NAME, {**content, "stand": asdict(stand), "learner": learner.state_dict()})
    write_history(run, stand.rows)


def save_best(run: Path, learner: Learner, train_set: CachedDataset) -> None:
    """Write the weights that were just evaluated, with all that predicting takes. Raises TrainingError."""
    save_checkpoint(run / BEST_NAME, {**_told(learner, train_set), "model": learner.best_weights()})


def _told(learner: Learner, train_set: CachedDataset) -> dict[str, Any]:
    """Return what a checkpoint says of itself, in plain values."""
    return {
        "version": _VERSION,
        "settings": learner.settings.to_dict(),
        "task": learner.task.name,
        "outputs": learner.task.outputs,
        "classes": list(train_set.classes),
        "fields": [asdict(field) for field in train_set.manifest.fields],
        "mean": list(learner.mean),
        "std": list(learner.std),
        "fingerprint": train_set.manifest.fingerprint,
        "samples": len(train_set),
    }
