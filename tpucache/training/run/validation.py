"""`run.json`, a run's settings and data, and `validation.npz`, its predictions in the best epoch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpucache.errors import NoRoomError, TrainingError
from tpucache.loading.dataset import CachedDataset
from tpucache.runs import INFO_NAME, VALIDATION_NAME
from tpucache.store.files import write_atomically
from tpucache.store.samples import encode_columns
from tpucache.training.learn.learner import Learner
from tpucache.training.run.files import RunData
from tpucache.types import Array


def write_info(run: Path, learner: Learner, data: RunData) -> None:
    """Write `run.json`: settings, task, classes, and where the data are now. Raises TrainingError."""
    info = {
        "settings": learner.settings.to_dict(),
        "task": learner.task.name,
        "outputs": learner.task.outputs,
        "classes": list(learner.task.class_names(data.train_set.classes)),
        "training": _describe(data.train_set),
        "validation": None if data.valid_set is None else _describe(data.valid_set),
    }
    _write(run / INFO_NAME, json.dumps(info, indent=1).encode())


def snapshot_validation(
    run: Path, learner: Learner, valid_set: CachedDataset, values: Array, errors: Array, maps: Mapping[int, Array]
) -> Callable[[], None]:
    """Return the function that writes `validation.npz`: what was predicted for the validation samples.

    Its arrays are `positions` in the cache and `errors`, float32, of all samples, those of the task's `record`, and for
    masks `shown`, numbers of samples, and `maps`, uint8 (shown, height, width). It raises TrainingError.
    """
    arrays: dict[str, Array] = {
        "positions": valid_set.positions,
        "errors": errors.astype(np.float32),
        **learner.task.record(values, valid_set.labels.numpy()),
    }
    if maps:
        arrays |= {"shown": np.array([*maps], np.int64), "maps": np.stack([*maps.values()])}
    return lambda: _write(run / VALIDATION_NAME, encode_columns(arrays))


def _describe(dataset: CachedDataset) -> dict[str, Any]:
    shown = {"resolution": dataset.resolution, "frequencies": dataset.frequencies}
    return {
        "cache": dataset.place,
        "variant": dataset.variant,
        **({} if dataset.resolution is None else shown),
        "samples": len(dataset),
        "digest": _digest(dataset),
    }


def _digest(dataset: CachedDataset) -> str:
    """Return the digest of the samples; "" where their cache will not be finished, because its disk is full."""
    try:
        return dataset.digest_without_columns
    except NoRoomError:
        return ""


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error
